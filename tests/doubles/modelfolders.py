"""Model folders in the form of `cloudtrain export`, without a training."""

import json
from pathlib import Path

from cloudtrain.entrypoints.models import folder


def write_model(path: Path) -> Path:
    """Write a folder with small files; return its path."""
    (path / "code").mkdir(parents=True)
    config = {"format": folder.FORMAT, "name": "digits", "job": {"job": "digits-abcde"}, "checkpoint": {"step": 40}}
    (path / folder.CONFIG).write_text(json.dumps(config))
    (path / folder.CHECK).write_text(json.dumps({"passed": True, "forms": {}}))
    (path / folder.WEIGHTS).write_bytes(bytes(range(256)) * 8)
    (path / folder.CARD).write_text("# digits\n")
    (path / "code" / "task.py").write_text("")
    folder.write_sums(path, {})
    return path
