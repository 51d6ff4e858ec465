"""Which machines a cloud has: rows by region, machine and spot, set by a test; and jobs that start late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from doubles.kit import life
from doubles.wire import HangUp

MACHINES, NO_QUOTA, NO_STOCK = "machines", "no_quota", "no_stock"
FAILED, PENDING, LATE, TAKEN = "failed", "pending", "late", "taken"
HAS = (MACHINES, NO_QUOTA, NO_STOCK, FAILED, PENDING, LATE, TAKEN)
LOST = ("", "before", "after")
JobT = TypeVar("JobT", bound=life.Job)


@dataclass
class Row:
    """What the machines of some places are; the first row that fits a create decides.

    `no_quota` and `no_stock` refuse the create. `failed` ends the created job for want of machines, `pending` never
    starts it, `late` starts it after its cancel has been answered and its end told, and `taken` takes its spot machines
    away before its start. `lost` breaks the connection off before the create is done, or after.
    """

    has: str
    region: str = "*"
    machine: str = "*"
    spot: bool | None = None  # None: both
    count: int | None = None  # of creates that the row decides; None: all
    lost: str = ""
    hits: int = field(default=0, init=False)

    def fits(self, region: str, machine: str, *, spot: bool) -> bool:
        """Return whether the row decides a create."""
        is_place = fnmatchcase(region, self.region) and fnmatchcase(machine, self.machine)
        return is_place and self.spot in (None, spot) and (self.count is None or self.hits < self.count)


class Capacity:
    """The rows, in the order of their setting. Without a row that fits, a place has machines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: list[Row] = []

    def add(self, asked: dict[str, Any]) -> None:
        """Add a row. Raises ValueError for an unknown value, TypeError for an unknown field."""
        row = Row(**asked)
        if row.has not in HAS or row.lost not in LOST:
            raise ValueError(f"`has` is one of {HAS}, `lost` one of {LOST}")
        with self._lock:
            self._rows.append(row)

    def clear(self) -> None:
        """Forget all rows."""
        with self._lock:
            self._rows.clear()

    def take(self, region: str, machine: str, *, spot: bool) -> Row:
        """Return the row that decides this create. Raises HangUp if the create is lost before it is done."""
        with self._lock:
            row = next((one for one in self._rows if one.fits(region, machine, spot=spot)), Row(MACHINES))
            row.hits += 1
        if row.lost == "before":
            raise HangUp("on purpose")
        return row

    @staticmethod
    def answer(row: Row) -> None:
        """Raise HangUp if the answer of the create is lost."""
        if row.lost == "after":
            raise HangUp("on purpose")


def wait(job: life.Job, ordered: Callable[[], Any], until: float) -> Any:
    """Return the ending that `ordered` finds for a job without machines, or None at the time `until`."""
    while True:
        with job.changed:
            if (ending := ordered()) is not None or time.time() >= until:
                return ending
            job.changed.wait(min(max(until - time.time(), 0.001), 3600.0))


def late(job: JobT, **first: Any) -> JobT:
    """Return the job as its containers start late: what a client is told of the ended job stays as it was told."""
    assert job.has_ended, f"the job is {job.status}"
    fresh: dict[str, Any] = {"orders": {}, "history": [], "thread": None, "changed": threading.Condition()}
    return replace(job, has="", created=time.time(), started=None, ended=None, error=None, **{**fresh, **first})


def most_live(jobs: Iterable[life.Job]) -> int:
    """Return the largest number of jobs that were created and not ended at the same time."""
    spans = [(job.created, 1) for job in jobs] + [(job.ended, -1) for job in jobs if job.ended is not None]
    count = most = 0
    for _, step in sorted(spans):
        count += step
        most = max(most, count)
    return most
