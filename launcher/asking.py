"""Asking the backends of many jobs at once, for a bounded time: one that does not answer holds up no other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cloudtrain.launcher.errors import CloudtrainError, UnreachableError
from cloudtrain.launcher.job import Job
from cloudtrain.launcher.refresh import refresh
from cloudtrain.launcher.registry import Registry

__all__ = ["PATIENCE_S", "Answers", "ask"]

PATIENCE_S = 10.0  # a backend that lives answers in two, its SDK's import included
_AT_ONCE = 16


@dataclass(frozen=True)
class Answers:
    """The jobs in the order in which they were asked for, and of some why they are only as last seen, by their ids.

    Of one that took too long that is an UnreachableError.
    """

    jobs: list[Job]
    faults: dict[str, CloudtrainError]


def ask(registry: Registry, jobs: Sequence[Job], patience_s: float = PATIENCE_S) -> Answers:
    """Return the jobs as their backends describe them now, each asked by a thread with a registry of its own.

    A job that has not answered after `patience_s` in all, or whose backend fails otherwise, is returned as it was last
    seen. Its thread is left alone: it ends by itself, or with this process.
    """
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Job, CloudtrainError | None]] = queue.SimpleQueue()
    jobs_active = [job for job in jobs if job.active]
    for job in jobs_active:
        todo.put(job)
    for _ in range(min(_AT_ONCE, len(jobs_active))):
        threading.Thread(target=_work, args=(registry, todo, done), daemon=True).start()
    end_s = time.monotonic() + patience_s
    seen = {job.id: job for job in jobs if not job.active}
    faults: dict[str, CloudtrainError] = {}
    while len(seen) < len(jobs):
        try:
            job, fault = done.get(timeout=max(0.0, end_s - time.monotonic()))
        except queue.Empty:
            break
        seen[job.id] = job
        if fault is not None:
            faults[job.id] = fault
    for job in jobs:
        if job.id not in seen:
            faults[job.id] = UnreachableError(f"{job.backend} has not answered within {patience_s:.0f} s")
    return Answers([seen.get(job.id, job) for job in jobs], faults)


def _work(
    registry: Registry, todo: queue.SimpleQueue[Job], done: queue.SimpleQueue[tuple[Job, CloudtrainError | None]]
) -> None:
    own = Registry(registry.folder)
    try:
        while True:
            job = todo.get_nowait()
            try:
                done.put((refresh(own, job), None))
            except CloudtrainError as error:
                done.put((job, error))
            except Exception as error:
                done.put((job, CloudtrainError(f"cloudtrain itself failed: {type(error).__name__}: {error}")))
    except queue.Empty:
        return
    finally:
        own.close()
