"""Names in a job's folder that both the agents and whoever asks about them must know."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["EXIT", "NEVER_SENT", "RECORD", "START_LOCK", "STATE", "STOP", "TELL_S", "has_checkpoint", "is_whole"]

# Held while agents start; the mark that a start, still under way or not, has been given up.
START_LOCK, NEVER_SENT = "start.lock", "never-sent"
RECORD = "record.json"  # for a registry that has lost the job
# Of one node: how its agent is, how the job ended, and the word to stop that is left for it.
STATE, EXIT, STOP = "state.json", "exit.json", "stop.json"
TELL_S = 60.0  # between two writings of the state: after a power cut it tells how long the node was taken

_NOT_WHOLE = re.compile(r"\.(tmp|damaged-\d+|old-\d+)$|^first-start\.json$|^\.")


def has_checkpoint(folder: Path) -> bool:
    """Return whether there is something to go on from: the trainer's checkpoints, or whatever a script has saved."""
    try:
        return any(is_whole(entry.name) and _holds_a_file(entry) for entry in folder.iterdir())
    except OSError:
        return False


def _holds_a_file(path: Path) -> bool:
    """Return whether the path is a file, or a folder with a file below: a kept folder is there from the start."""
    return not path.is_dir() or any(files for _, _, files in os.walk(path))


def is_whole(name: str) -> bool:
    """Return whether an entry of that name in a checkpoint folder is neither half written nor set aside."""
    return not _NOT_WHOLE.search(name)
