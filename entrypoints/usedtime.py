"""How long a job has run on machines that were taken away since: its time limit counts them, and so must its deadline.

The note lies beside the checkpoints, which the platform brings to the next machines.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import durable

__all__ = ["Note", "used_s"]

NAME = ".used.json"
EVERY_S = 30.0


def used_s(folder: Path, job: str, attempt: int) -> float:
    """Return the seconds that the attempt has used before, 0 where it begins."""
    told = durable.read_json(folder / NAME)
    is_known = isinstance(told, dict) and (told.get("job"), told.get("attempt")) == (job, attempt)
    return float(told["used_s"]) if is_known else 0.0


class Note:
    """A thread of node 0 that keeps the note up to date."""

    def __init__(self, folder: Path, job: str, attempt: int, before_s: float) -> None:
        self._path = folder / NAME
        self._told: dict[str, Any] = {"job": job, "attempt": attempt}
        self._begin_s = time.monotonic() - before_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="used time", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def finish(self) -> None:
        """Write once more."""
        self._is_over.set()
        self._write()

    def _run(self) -> None:
        while not self._is_over.wait(EVERY_S):
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            durable.write_json(self._path, {**self._told, "used_s": time.monotonic() - self._begin_s})
