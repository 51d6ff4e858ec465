"""The last lines that a rank printed before its end: the cause is often in the lines, not in the exception."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from .. import events

MOST, LINE_CHARACTERS = 10, 200
_READ_BYTES = 32_768  # a progress bar rewrites one line hundreds of times


def of_rank(rank: int) -> list[str]:
    """Return the last lines of the rank's log on this node, as text for users; empty without a log."""
    folder = os.environ.get("CLOUDTRAIN_LOG_DIR")
    if not folder:
        return []
    try:
        with (Path(folder) / f"rank-{rank}.log").open("rb") as log:
            begin = max(0, log.seek(0, os.SEEK_END) - _READ_BYTES)
            log.seek(begin)
            text = log.read(_READ_BYTES).decode(errors="replace")
    except OSError:
        return []
    return of_text(text.partition("\n")[2] if begin and "\n" in text else text)


def of_text(text: str) -> list[str]:
    """Return the last lines, without event tails and empty lines, long lines cut, progress bars in the last state."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in reversed(text.split("\n")))
    found = list(islice(filter(None, (events.parse(line)[0].rstrip() for line in lines)), MOST))
    return [line if len(line) <= LINE_CHARACTERS else f"{line[: LINE_CHARACTERS - 1]}…" for line in found[::-1]]
