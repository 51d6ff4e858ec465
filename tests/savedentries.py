"""Entries of a folder of checkpoints, saved as the trainer saves them."""

import os
from pathlib import Path

from cloudtrain.entrypoints.checkpoints import folder as checkpoints
from cloudtrain.entrypoints.replication import entries


def checkpoint(folder: Path, step: int, size: int = 1000) -> Path:
    """Save a checkpoint as the trainer does."""
    partial = checkpoints.begin(folder, step, size)
    data = {"model-0-of-1.pt": size, "plain.pt": 100, "shard-00000-of-00001.safetensors": 10}
    files = {name: checkpoints.write_bytes(partial / name, os.urandom(count)) for name, count in data.items()}
    files["trainer.json"] = checkpoints.write_json(partial / "trainer.json", {"step": step})
    return checkpoints.finish(folder, step, files)


def names(folder: Path) -> list[str]:
    """Return the complete entries, the newest first."""
    return [entry.name for entry in entries.list_entries(folder)]
