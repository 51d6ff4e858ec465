"""A job's next attempt: asked for by `resume`, or earned by its `retry` while somebody follows it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UsageError
from cloudtrain.launcher.terminal import say

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Job
    from cloudtrain.launcher.prepare import Prepared
    from cloudtrain.launcher.registry import Registry

__all__ = ["earned", "is_earned", "prepare_next"]


def prepare_next(registry: Registry, job: Job, settings: Sequence[str] = (), *, update_code: bool = False) -> Prepared:
    """Return what the next attempt would send: the code and the config as they were submitted, but for `settings`.

    Raises ConfigError where that cannot be, BudgetError where the money is used up.
    """
    from cloudtrain.launcher import config as configs
    from cloudtrain.launcher.bundle import Bundle
    from cloudtrain.launcher.prepare import prepare

    stored = configs.stored(job.config, overrides=settings)
    shipped = None if update_code else Bundle.load(job.bundle)
    if shipped is not None and not shipped.path.exists():
        raise ConfigError(
            "the code as it was submitted is no longer here",
            where=shipped.path,
            hint="cloudtrain resume --update-code takes the code folder as it is now",
        )
    file, spent_usd = Path(job.config_file), registry.spent_usd(job) or 0.0
    return prepare(stored, file, registry.folder / "bundles", dry=False, shipped=shipped, spent_usd=spent_usd)


def is_earned(job: Job) -> bool:
    """Return whether the config's `retry` asks for a further attempt, and the platform makes none by itself."""
    attempt, asked = job.attempt, job.config.get("retry") or {}
    is_over = not job.active and attempt.state.state == "failed" and attempt.ref is not None
    if not is_over or attempt.number >= asked.get("max_attempts", 1) or attempt.state.reason not in asked.get("on", ()):
        return False
    return not backends.load(job.backend).pace(attempt.ref or {}).retries


def earned(registry: Registry, job: Job, environ: Mapping[str, str] = os.environ) -> Job | None:
    """Send the attempt that the config's `retry` asks for, if it does; return the job with it, None without one.

    Whoever else follows the job may be quicker: then theirs is the attempt. What stands in the way is said.
    """
    from cloudtrain.launcher import submit

    if not is_earned(job):
        return None
    most = job.config["retry"]["max_attempts"]
    say(f"{job.id}: {job.attempt.state.reason}; attempt {job.attempt.number + 1} of at most {most} begins")
    try:
        return submit.resend(registry, job, prepare_next(registry, job), environ)
    except UsageError:  # somebody else has begun it
        found = registry.find(job.id)
        return found if found.attempt.number > job.attempt.number else None
    except CloudtrainError as error:
        say(f"no further attempt: {error}")
        return None
