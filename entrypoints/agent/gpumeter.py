"""How busy each rank's GPU is, as `nvidia-smi` reports it: measured by the node's agent, so a script needs no code.

An event line in rank 0's log carries the figures of all nodes; the launcher reads rank 0's events alone:

    gpus: rank 0 93 %, rank 1 95 %  ::ct {"e":"gpu","gpus":[[0,93.0,39680,81920,402.1],...]}

A list holds rank, utilisation in percent, memory used and in all in MiB, and power in watts; None if not known.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import events
from . import gpus

EVERY_S, EVENT_S = 15.0, 60.0  # between two measurements, and between two event lines
MOST_FAILED = 3  # measurements in a row; then the thread ends
RANKS_A_LINE = 64  # 64 lists of at most 40 characters stay below a line's 4096 bytes

_FIELDS = ("index", "uuid", "utilization.gpu", "memory.used", "memory.total", "power.draw")
_MOST = (100.0, 1e7, 1e7, 1e5)  # of a plausible figure: percent, MiB, MiB, watts

Figures = tuple[float | None, ...]  # utilisation, memory used, memory in all, power


class GpuMeter:
    """A thread that measures until `finish`; the thread ends on a machine without a GPU or a working nvidia-smi."""

    def __init__(self, visible: str | None, ranks: int, every_s: float = EVERY_S) -> None:
        """`visible`: the node's CUDA_VISIBLE_DEVICES; local rank i uses the i-th GPU of the list."""
        self.latest: tuple[Figures, ...] = ()
        self._due_s, self._count = 0.0, 0  # when the next event is due; of how many GPUs the last event was
        self._visible, self._ranks, self._every_s = visible, ranks, every_s
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="gpus", daemon=True)
        self.thread.start()

    def report(self, log: Path, figures: Sequence[tuple[int, Figures]]) -> None:
        """Write the ranks' figures into an existing log: at most each EVENT_S seconds, but at once for more ranks."""
        is_due = len(figures) > self._count or (figures and time.monotonic() >= self._due_s)
        if is_due and events.append(log, lines(figures)):
            self._due_s, self._count = time.monotonic() + EVENT_S, len(figures)

    def finish(self) -> None:
        """Stop measuring, without waiting for a measurement that hangs."""
        self._stop.set()

    def _run(self) -> None:
        failed = 0
        while failed < MOST_FAILED and not self._stop.is_set():
            found: tuple[Figures, ...] = ()
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                found = figures_of(gpus.query(*_FIELDS), self._visible, self._ranks)
            self.latest, failed = found, 0 if found else failed + 1
            self._stop.wait(self._every_s)


def figures_of(rows: Sequence[Sequence[str]], visible: str | None, ranks: int) -> tuple[Figures, ...]:
    """Return each local rank's figures from nvidia-smi's rows; empty if no row is of a visible GPU."""
    known = {row[0]: row for row in rows if row[0].isdigit()}
    names = list(known) if visible is None else [name.strip() for name in visible.split(",")]
    chosen = [next((row for row in known.values() if name and (name == row[0] or row[1].startswith(name))), None)
              for name in names[:ranks]]  # fmt: skip
    found = tuple(tuple(map(_figure, row[2:] if row else [""] * 4, _MOST)) for row in chosen)
    return found if any(chosen) else ()


def lines(figures: Sequence[tuple[int, Figures]]) -> Iterator[str]:
    """Yield the event lines for the ranks' figures, with as many ranks in each as fit."""
    for begin in range(0, len(figures), RANKS_A_LINE):
        some = figures[begin : begin + RANKS_A_LINE]
        busy = (f"rank {rank} {'?' if each[0] is None else f'{each[0]:.0f}'} %" for rank, each in some)
        yield events.format_line("gpu", f"gpus: {', '.join(busy)}", {"gpus": [[rank, *each] for rank, each in some]})


def _figure(text: str, most: float) -> float | None:
    with contextlib.suppress(ValueError):  # [N/A], [Not Supported], ERR!
        if math.isfinite(value := float(text)) and 0 <= value <= most:
            return value
    return None
