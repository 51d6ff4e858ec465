"""How long a job has run on earlier machines: the job's time limit includes this time, and so must the deadline.

The note lies beside the checkpoints, which the platform copies to the next machines; otherwise also in a store.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import durable
from cloudtrain.entrypoints.checkpoints.mirror import Mirror, open_mirror
from cloudtrain.entrypoints.settings import TaskError

__all__ = ["Note", "used_s", "with_lead_back"]

NAME = ".used.json"
EVERY_S = 30.0
FINISH_S = 20.0  # for an unresponsive store


def with_lead_back(spec: dict[str, Any], now_s: float) -> dict[str, Any]:
    """Add back the start-up allowance (`lead_s`) that was not used; return the new spec.

    The platform's clock starts after the submit, so the used allowance is at most the time since the submit.
    """
    sent_s = spec.get("sent_s")
    if sent_s is None or now_s < sent_s:  # a sender's clock that is ahead gives no information
        return spec
    back_s = max(0.0, spec.get("lead_s", 0) - (now_s - sent_s))
    return {**spec, **{key: spec[key] + back_s for key in ("max_duration_s", "deadline_s")}}


def used_s(folder: Path, job: str, attempt: int, kept_in: str | None = None) -> float:
    """Return the seconds that earlier starts of the attempt have used, 0 at the first start.

    `kept_in`: a place with a copy of the note, as gs://BUCKET/PREFIX; a failed read is logged, and the copy is ignored.
    """
    path = folder / NAME
    found = [_seconds(path, job, attempt)]
    try:
        store = open_mirror(kept_in)
        if store is not None:
            copy = folder / f"{NAME}.kept.tmp"
            store.get(NAME, copy)
            found.append(_seconds(copy, job, attempt))
            copy.unlink()
    except FileNotFoundError:
        pass
    except (OSError, TaskError) as error:
        print(f"the earlier run time of the job is not known, so its time limit starts again: {error}", flush=True)
    return max(found)


def _seconds(path: Path, job: str, attempt: int) -> float:
    told = durable.read_json(path)
    is_known = isinstance(told, dict) and (told.get("job"), told.get("attempt")) == (job, attempt)
    return float(told["used_s"]) if is_known else 0.0


class Note:
    """A thread of node 0 that updates the note."""

    def __init__(self, folder: Path, job: str, attempt: int, before_s: float, kept_in: str | None = None) -> None:
        self._path = folder / NAME
        self._kept_in = kept_in
        self._store: Mirror | None = None
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
        self._thread.join(FINISH_S)

    def _run(self) -> None:
        while not self._is_over.wait(EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError, TaskError):  # the next write may succeed
            durable.write_json(self._path, {**self._told, "used_s": time.monotonic() - self._begin_s})
            if self._store is None:
                self._store = open_mirror(self._kept_in)
            if self._store is not None:
                self._store.put(self._path, NAME)
