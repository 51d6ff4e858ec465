"""Polls the backends of many jobs in parallel, within a time limit; a silent backend does not delay the rest."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cloudtrain.launcher.errors import CloudtrainError, UnreachableError
from cloudtrain.launcher.job import Job
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.store.registry import Registry

__all__ = ["PATIENCE_S", "Answers", "ask"]

PATIENCE_S = 10.0  # a working backend answers within 2 s, the import of the SDK included
_AT_ONCE = 16  # threads for each backend


@dataclass(frozen=True)
class Answers:
    """The jobs in the order of the request; `faults` holds, by job id, why a job is returned as last seen.

    The fault of a job that took too long is an UnreachableError.
    """

    jobs: list[Job]
    faults: dict[str, CloudtrainError]


def ask(registry: Registry, jobs: Sequence[Job], patience_s: float = PATIENCE_S) -> Answers:
    """Return the jobs as their backends describe them now; each thread opens its own registry.

    Each backend has separate threads, so a silent backend blocks no threads of the rest. A job is returned as last seen
    if its backend fails, or does not answer within `patience_s` for all jobs together. The thread of a silent backend
    is not stopped: the thread ends by itself, or with the process.
    """
    done: queue.SimpleQueue[tuple[Job, CloudtrainError | None]] = queue.SimpleQueue()
    asked: set[str] = set()
    for backend in dict.fromkeys(job.backend for job in jobs if job.active):
        todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            if job.active and job.backend == backend:
                todo.put(job)
        for _ in range(min(_AT_ONCE, todo.qsize())):
            threading.Thread(target=_work, args=(registry, todo, asked, done), daemon=True).start()
    end_s = time.monotonic() + patience_s
    seen = {job.id: job for job in jobs if not job.active}
    faults: dict[str, CloudtrainError] = {}
    while len(seen) < len({job.id for job in jobs}):
        try:
            job, fault = done.get(timeout=max(0.0, end_s - time.monotonic()))
        except queue.Empty:
            if time.monotonic() >= end_s:
                break
            continue
        seen[job.id] = job
        if fault is not None:
            faults[job.id] = fault
    for job in jobs:
        if job.id not in seen:
            is_asked = job.id in asked
            why = "has not answered within" if is_asked else "was not asked for it, as its other jobs took all of"
            faults[job.id] = UnreachableError(f"{job.backend} {why} {patience_s:.0f} s")
    return Answers([seen.get(job.id, job) for job in jobs], faults)


def _work(
    registry: Registry,
    todo: queue.SimpleQueue[Job],
    asked: set[str],
    done: queue.SimpleQueue[tuple[Job, CloudtrainError | None]],
) -> None:
    own: Registry | None = None
    try:
        while True:
            job = todo.get_nowait()
            asked.add(job.id)
            try:
                own = own or Registry(registry.folder)
                done.put((refresh(own, job), None))
            except CloudtrainError as error:
                done.put((job, error))
            except Exception as error:
                done.put((job, CloudtrainError(f"cloudtrain itself failed: {type(error).__name__}: {error}")))
    except queue.Empty:
        return
    finally:
        if own is not None:
            own.close()
