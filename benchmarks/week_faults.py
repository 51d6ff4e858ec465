"""The kinds of faults in a week of a job on ssh hosts (soak_week.py), and how often each of them comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from doubles.faulttable.table import named
from doubles.faulttable.training import Training, until
from doubles.sshhosts import clocks

HOUR_S = 3600
END_S = 150.0


@dataclass(frozen=True)
class Kind:
    """A kind of fault: `share` of all, what must change (0 nothing, 1 the start of the ranks, 2 the attempt)."""

    name: str
    share: int
    level: int
    strike: Callable[[Training, int], Any]


def _sshd(job: Training, node: int) -> None:
    job.hosts[node].kill_sshd(with_sessions=True)
    time.sleep(0.5)
    job.hosts[node].start_sshd()


def _reboot(job: Training, node: int) -> None:
    job.hosts[node].power_off()
    time.sleep(1)
    job.hosts[node].boot()


def _slow(job: Training, node: int) -> None:
    job.hosts[node].slow(delay_ms=20, loss=0.01)
    time.sleep(1.5)
    job.hosts[node].join()


def _cut(seconds: float) -> Callable[[Training, int], None]:
    def strike(job: Training, node: int) -> None:
        job.hosts[node].cut()
        time.sleep(seconds)
        job.hosts[node].join()

    return strike


def disk_full(job: Training, node: int) -> None:
    """Fill the disk of the work folder until the job has ended, then free the disk."""
    named("disk full of the workdir").strike(job, node)
    try:
        folders = [folder for number in range(len(job.hosts)) if (folder := job.folder(number)) is not None]
        until(
            lambda: sum((folder / "exit.json").exists() for folder in folders) >= len(folders) - 1,
            END_S,
            "the job's end",
        )
    finally:
        job.hosts[node].run(["sh", "-c", "rm /data/full-*"])


def _clock(seconds: int) -> Callable[[Training, int], None]:
    def strike(job: Training, node: int) -> None:
        for moved in (seconds, 0):
            clocks.move(job.hosts[node], moved)
            time.sleep(0.8)

    return strike


KINDS: Sequence[Kind] = (
    Kind("rank: kill -9", 10, 1, named("trainer kill -9").strike),
    Kind("torchrun: kill -9", 7, 1, named("torchrun kill -9").strike),
    Kind("agent: kill -9", 2, 2, named("agent kill -9, node 1").strike),
    Kind("reboot", 2, 2, _reboot),
    Kind("disk full", 2, 2, disk_full),
    Kind("network cut 15 s", 2, 2, _cut(15)),
    Kind("network cut 3 s", 15, 0, _cut(3)),
    Kind("network 20 ms, loss 1 %", 12, 0, _slow),
    Kind("clock back 1 h", 16, 0, _clock(-HOUR_S)),
    Kind("clock ahead 1 h", 16, 0, _clock(HOUR_S)),
    Kind("sshd restarted", 16, 0, _sshd),
)
