"""Asking a job to stop: what `cloudtrain stop`, the live view and the page do, before anybody waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.refresh import refresh

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Job
    from cloudtrain.launcher.registry import Registry

__all__ = ["Asked", "ask"]


@dataclass(frozen=True)
class Asked:
    """The job as it was found, and what came of it: `asked`, `ended` before, or `unsent`: being submitted just now."""

    job: Job
    verdict: Literal["asked", "ended", "unsent"]

    @property
    def words(self) -> str:
        """What is said of it."""
        if self.verdict == "ended":
            return f"{self.job.id} has ended already"
        if self.verdict == "unsent":
            return f"{self.job.id} is just being submitted; try again in a moment"
        return f"stopping {self.job.id} after saving"


def ask(registry: Registry, name: str, *, now: bool = False) -> Asked:
    """Ask the job to save and stop; `now` kills it, where its backend can. It returns before the job has stopped.

    Raises NoSuchJobError, UnreachableError, CredentialError, ConfigError.
    """
    job = refresh(registry, registry.find(name))
    if job.active and job.attempt.ref is None:
        return Asked(job, "unsent")
    if job.attempt.ref is not None:  # of one that has ended, too: what agents that were killed may have left
        backends.load(job.backend).stop(job.attempt.ref, now=now)
    return Asked(job, "asked" if job.active else "ended")
