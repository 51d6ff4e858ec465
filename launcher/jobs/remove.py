"""Removing ended jobs: rows of the registry, folders on this machine, cached logs, unused bundles.

The ledger keeps all costs.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .. import backend as backends
from ..backend import JobRef, LeftFiles
from ..errors import CloudtrainError, ConfigError, UsageError
from ..job import Job
from ..store import ledger, sweeps
from ..store.registry import Registry
from . import mirrors

UNSENT_S = 3600.0  # a submit packs the code, asks, and journals the job: a younger bundle may be for a job to come


def require_over(jobs: list[Job]) -> None:
    """Raise UsageError for a job that may still run."""
    for job in jobs:
        if job.active:
            is_seen = job.attempt.state.state == "running" and job.attempt.unreachable_since_s is None
            words = "is running" if is_seen else "may still be running"
            hint = f"cloudtrain stop {job.id}"
            if job.attempt.unreachable_since_s is not None:
                hint += f"; if {job.backend} will never answer for it: cloudtrain stop --forget {job.id}"
            raise UsageError(f"{job.id} {words}", hint=hint)


def size_of(registry: Registry, job: Job) -> int:
    """Return how many bytes the job's folders take here."""
    files = (path for folder in _folders(registry, job) for path in folder.rglob("*"))
    return sum(path.lstat().st_size for path in files if not path.is_dir())


def unused_bundles(registry: Registry, without: list[Job]) -> dict[Path, int]:
    """Return the bundles that no job but the jobs of `without` refers to, and no submit may need, with their sizes."""
    registry.database.require_sound("jobs", "attempts")
    gone = {job.id for job in without}
    used = {f"{job.bundle.get('sha256')}.tar.gz" for job in registry.jobs() if job.id not in gone}
    found: dict[Path, int] = {}
    for path in (registry.folder / "bundles").glob("*.tar.gz"):
        with suppress(FileNotFoundError):  # another command removes the same bundles
            info = path.stat()
            if info.st_mtime < time.time() - UNSENT_S and path.name not in used:
                found[path] = info.st_size
    return found


def elsewhere(registry: Registry, jobs: list[Job], *, remove: bool = False) -> list[LeftFiles]:
    """Return the jobs' folders on hosts and in buckets; with `remove`, remove them. A folder that stays tells why."""
    refs: dict[str, dict[str, list[JobRef]]] = {}
    for job in jobs:
        for attempt in registry.attempts(job):
            if attempt.ref and attempt.phase != "damaged":
                refs.setdefault(job.backend_of(attempt), {}).setdefault(job.id, []).append(attempt.ref)
    found: list[LeftFiles] = []
    for name, those in refs.items():
        try:
            backend = backends.load(name)
            found += backend.left(those, remove=remove) if isinstance(backend, backends.Cleans) else []
        except CloudtrainError as error:
            found += [LeftFiles(job, f"{name} ({job})", kept=error.message) for job in those]
    known = {each.place for each in found}
    others = [job for job in jobs if mirrors.place(job) not in known]
    return found + [each for job in others for each in mirrors.left(job, remove=remove)]


def remove(registry: Registry, job: Job) -> None:
    """Remove the job; the cost stays in the budgets. Raises ConfigError for a stuck folder: the job stays."""
    for folder in _folders(registry, job):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            message = f"{job.id} cannot be removed: {error.strerror}"
            raise ConfigError(message, where=error.filename or folder) from error
    with registry.database.transaction():
        for attempt in registry.attempts(job):
            held = ledger.reservation(registry.database, job.id, attempt.number)
            if held is not None and held["state"] == "held":
                ledger.settle(registry.database, job.id, attempt.number, None, time.time())
        sweeps.forget(registry.database, job.id)
        registry.remove(job.id)


def _folders(registry: Registry, job: Job) -> Iterator[Path]:
    """Yield the job's folders below the home: those of its attempts' backends, and the folder of the cached logs."""
    names = {job.backend, *map(job.backend_of, registry.attempts(job)), "logs"}
    is_plain = all(name == Path(name).name for name in (job.id, *names))  # a damaged row may name any place
    found = (registry.folder / name / job.id for name in sorted(names) if is_plain)
    return (folder for folder in found if folder.is_dir() and not folder.is_symlink())
