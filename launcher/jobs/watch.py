"""Watching jobs without following their lines: one look at each, by one watcher at a time, and what it brings about."""

from __future__ import annotations

import errno
import fcntl
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.entrypoints.format import dollars, span
from cloudtrain.entrypoints.notices.message import Notice
from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.job import Attempt, Job
from cloudtrain.launcher.jobs import retry
from cloudtrain.launcher.jobs.describe import outcome
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.logs import keeping
from cloudtrain.launcher.money.outlook import Forecast
from cloudtrain.launcher.notices import claims
from cloudtrain.launcher.notices.herald import RECENT_S, Notifier
from cloudtrain.launcher.store.progress import shown
from cloudtrain.launcher.store.registry import Registry

__all__ = ["Seen", "chosen", "keep", "line", "look"]

RETRY_S = 3600.0  # a job that ended longer ago is not begun anew by surprise
LOCK = "watch.lock"
MOST_JOBS = 500  # the newest, of which those that have ended are looked at once
KEEP_S = 30.0  # that bringing a log home takes at most, at each look


@dataclass(frozen=True)
class Seen:
    """What one look has found. `fault`: why there was none, or not a whole one.

    `ended` is the attempt that has ended, though the job may go on with another one.
    """

    job: Job
    outlook: Forecast | None = None
    notices: tuple[Notice, ...] = ()
    is_again: bool = False
    fault: str = ""
    ended: Attempt | None = None


def chosen(registry: Registry, names: Sequence[str], now_s: float) -> list[Job]:
    """Return the jobs of these names; without any, all that are active, have ended of late, or have things untold."""
    if names:
        return list({job.id: job for job in map(registry.find, names)}.values())
    waiting = set(claims.pending(registry.database, now_s - RECENT_S))
    jobs = [*registry.jobs(active=True), *registry.jobs(limit=MOST_JOBS)]
    return [job for job in {job.id: job for job in jobs}.values() if _is_of_late(job, now_s) or job.id in waiting]


def look(registry: Registry, herald: Notifier, job: Job) -> Seen | None:
    """Bring the job up to date, tell what is due, send the attempt it has earned; None where another watcher does.

    What goes wrong with one job is said in its `fault`, and stands in no other's way.
    """
    try:
        with _alone(registry.folder, job.id) as is_mine:
            return _look(registry, herald, job) if is_mine else None
    except (CloudtrainError, OSError) as error:
        return Seen(job, fault=str(error))
    except Exception as error:
        return Seen(job, fault=f"cloudtrain itself failed: {type(error).__name__}: {error}")


def keep(registry: Registry, seen: Seen, within_s: float = KEEP_S) -> None:
    """Bring home the log of an attempt that has ended of late, while its machines, or their platform, still have it.

    To be called once the end has been told: it may take its time. What cannot be kept now hides no end.
    """
    attempt = seen.ended
    if attempt is None or (attempt.state.ended_s or 0.0) < time.time() - RECENT_S:
        return
    with suppress(CloudtrainError, OSError):
        keeping.keep(registry, seen.job, attempt, within_s=within_s)


def line(seen: Seen) -> str:
    """Return what was found, for people, on one line."""
    job, clock = seen.job, time.strftime("%H:%M:%S")
    parts = [f"{clock} {job.id}  {outcome(job)}", shown(job.attempt.progress)]
    if (found := seen.outlook) is not None:
        limit = f" of {dollars(found.limit_micro)}" if found.limit_micro else ""
        parts.append(f"{dollars(found.spent_micro)}{limit}")
        if job.active and found.burn_micro_h:
            parts.append(f"{dollars(found.burn_micro_h)} an hour")
        if job.active and found.finish_at_s is not None:
            parts.append(f"done in {span(found.finish_at_s - time.time())}")
        if job.active and found.cap_at_s is not None:
            parts.append(f"{span(found.cap_at_s - time.time())} left")
    if job.attempt.unreachable_since_s is not None:
        parts.append(f"{job.backend} does not answer")
    return ", ".join(part for part in parts if part)


def _look(registry: Registry, herald: Notifier, job: Job) -> Seen:
    was_active = job.active
    job = refresh(registry, registry.find(job.id))
    notices, again = herald.look(job), None
    if not job.active and (was_active or _is_of_late(job, time.time(), RETRY_S)):
        again = retry.earned(registry, job)
    money = herald.outlook(again or job, time.time())
    return Seen(again or job, money, tuple(notices), again is not None, ended=None if job.active else job.attempt)


def _is_of_late(job: Job, now_s: float, within_s: float = RECENT_S) -> bool:
    ended_s = job.attempt.state.ended_s
    return job.active or (ended_s is not None and now_s - ended_s <= within_s)


@contextmanager
def _alone(folder: Path, job_id: str) -> Iterator[bool]:
    """Hold the job's byte of the lock file, which the kernel lets go of with whoever holds it; say whether it is ours.

    Two jobs of one byte only wait for each other. Raises OSError where the folder's file system knows no locks, say.
    """
    with (folder / LOCK).open("a") as lock:
        try:
            _lock(lock.fileno(), zlib.crc32(job_id.encode()))
        except BlockingIOError:
            yield False
            return
        yield True


def _lock(file: int, byte: int) -> None:
    """Lock the byte for this open file. Raises BlockingIOError.

    A process's own lock would be no lock between its threads, and all of them would go with the first file closed.
    """
    if (of_file := getattr(fcntl, "F_OFD_SETLK", None)) is not None:
        try:
            fcntl.fcntl(file, of_file, struct.pack("hhqqi", fcntl.F_WRLCK, 0, byte, 1, 0))  # struct flock
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # that is a kernel without such locks
                raise
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
