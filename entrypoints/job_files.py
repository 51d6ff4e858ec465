"""Names in a job's folder, shared by the agents and the programs that read the agents' state."""

from __future__ import annotations

import os
import re
from pathlib import Path

# The lock held while agents start; the mark of a start that was given up, during the start or before.
START_LOCK, NEVER_SENT = "start.lock", "never-sent"
RECORD = "record.json"  # for a registry that has lost the job
# Per node: the agent's state, the exit record, the stop request.
STATE, EXIT, STOP = "state.json", "exit.json", "stop.json"
BEAT, BEAT_S = "beat", 5.0  # a file that the agent touches, if the readers are on other machines
STATE_EVERY_S = 60.0  # between two writes of the state: the state has the node's time in use, even after a power cut

_NOT_WHOLE = re.compile(r"\.(tmp|damaged-\d+|old-\d+)$|^first-start\.json$|^\.")


def has_checkpoint(folder: Path) -> bool:
    """Return whether the folder has a checkpoint to resume from: the trainer's, or any file that a script has saved."""
    try:
        return any(is_whole(entry.name) and _holds_a_file(entry) for entry in folder.iterdir())
    except OSError:
        return False


def _holds_a_file(path: Path) -> bool:
    """Return whether the path is a file, or a folder with a file below: a kept folder exists from the start."""
    return not path.is_dir() or any(files for _, _, files in os.walk(path))


def is_whole(name: str) -> bool:
    """Return whether an entry with the name in a checkpoint folder is complete and not set aside."""
    return not _NOT_WHOLE.search(name)
