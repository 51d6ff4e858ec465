"""How long a job has run on earlier machines: the job's time limit includes this time, and so must its deadline.

The note is in the checkpoint folder, which the platform copies to the next machine; if not, a store has a copy too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import atomic_json
from ..contract import ContainerOrder
from ..stores.store import Store, open_store

NAME = ".used.json"
EVERY_S = 30.0
FINISH_S = 20.0  # wait for a slow store


def with_lead_back(order: ContainerOrder, now_s: float) -> ContainerOrder:
    """Return the order with the unused part of the start-up allowance (`lead_s`) added to its limits.

    The platform's clock starts after the submission, so the start-up used at most the time since the submission.
    """
    if order.sent_s is None or now_s < order.sent_s:  # unknown, or the sender's clock is ahead
        return order
    back_s = max(0.0, (order.lead_s or 0) - (now_s - order.sent_s))
    return replace(order, max_duration_s=order.max_duration_s + back_s, deadline_s=order.deadline_s + back_s)


def used_s(folder: Path, job: str, attempt: int, kept_in: str | None = None) -> float:
    """Return the seconds that the attempt has used on earlier machines, 0 at the first start.

    `kept_in`: a store with a copy of the note, as gs://BUCKET/PREFIX. An unreadable store is reported and skipped.
    """
    path = folder / NAME
    found = [_seconds(path, job, attempt)]
    try:
        if kept_in is not None:
            copy = folder / f"{NAME}.kept.tmp"
            open_store(kept_in).get(NAME, copy)
            found.append(_seconds(copy, job, attempt))
            copy.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        print(f"the earlier run time of the job is not known, so its time limit starts again: {error}", flush=True)
    return max(found)


def _seconds(path: Path, job: str, attempt: int) -> float:
    record = atomic_json.read_json(path)
    is_known = isinstance(record, dict) and (record.get("job"), record.get("attempt")) == (job, attempt)
    return float(record["used_s"]) if is_known else 0.0


class Note:
    """A thread of node 0 that keeps the note up to date."""

    def __init__(self, folder: Path, job: str, attempt: int, before_s: float, kept_in: str | None = None) -> None:
        self._path = folder / NAME
        self._kept_in = kept_in
        self._store: Store | None = None
        self._record: dict[str, Any] = {"job": job, "attempt": attempt}
        self._begin_s = time.monotonic() - before_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="used time", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def finish(self) -> None:
        """Write the note a last time, and end the thread."""
        self._is_over.set()
        self._thread.join(FINISH_S)

    def _run(self) -> None:
        while not self._is_over.wait(EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the next write may succeed
            atomic_json.write_json(self._path, {**self._record, "used_s": time.monotonic() - self._begin_s})
            if self._store is None and self._kept_in is not None:
                self._store = open_store(self._kept_in)
            if self._store is not None:
                self._store.put(self._path, NAME)
