"""Asking a job to stop: what `cloudtrain stop`, the live view and the page do, before anybody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.refresh import refresh

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Job
    from cloudtrain.launcher.registry import Registry

__all__ = ["Asked", "ask"]


@dataclass(frozen=True)
class Asked:
    """The job as it was found, and what came of it.

    `verdict`: `asked`, `ended` before, `unsent`: being submitted just now, or `kept`: whoever was to agree has not.
    `kills`: it is ended at once, as was wished and its backend can.
    """

    job: Job
    verdict: Literal["asked", "ended", "unsent", "kept"]
    wants_kill: bool = False
    kills: bool = False

    @property
    def how(self) -> str:
        """How it is stopped."""
        if self.kills:
            return "at once, without saving"
        return "after saving" if self.job.saves else "with SIGTERM: only the script itself can save"

    @property
    def note(self) -> str:
        """Why it is not done as it was wished; nothing where it is."""
        is_otherwise = self.wants_kill and not self.kills and self.verdict == "asked"
        return f"{self.job.backend} always lets a job leave by itself first" if is_otherwise else ""

    @property
    def words(self) -> str:
        """What is said of it."""
        if self.verdict == "ended":
            return f"{self.job.id} has ended already"
        if self.verdict == "unsent":
            return f"{self.job.id} is just being submitted; try again in a moment"
        if self.verdict == "kept":
            return "not stopped"
        return f"stopping {self.job.id} {self.how}{f': {self.note}' if self.note else ''}"


def ask(registry: Registry, name: str, *, now: bool = False, agrees: Callable[[Asked], bool] = lambda _: True) -> Asked:
    """Ask the job to stop; `now` kills it, where its backend can. It returns before the job has stopped.

    `agrees` is shown what is about to be asked. Raises NoSuchJobError, UnreachableError, CredentialError, ConfigError.
    """
    job = refresh(registry, registry.find(name))
    ref = job.attempt.ref
    if ref is None:
        return Asked(job, "unsent" if job.active else "ended")
    backend = backends.load(job.backend)
    kills = now and job.active and backend.pace(ref).can_kill
    asked = Asked(job, "asked" if job.active else "ended", now, kills)
    if job.active and not agrees(asked):
        return replace(asked, verdict="kept")
    backend.stop(ref, now=now)  # of one that has ended, too: what agents that were killed may have left
    return asked
