"""The checkpoint of a job for an export: the job's own folder on this machine, else a copy from the job's backend."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from cloudtrain.entrypoints.checkpoints import folder as folders

from ..errors import CloudtrainError, UsageError
from ..job import Job
from ..store import series
from ..store.registry import Registry
from ..text.terminal import say

_STEP = re.compile(r"step-(\d{1,18})")


def require_choice(choice: str | None) -> None:
    """Raise UsageError unless the choice of a checkpoint is None, best, last or step-N."""
    if choice not in (None, "best", "last") and not _STEP.fullmatch(choice or ""):
        raise UsageError(f"`{choice}` names no checkpoint", hint="best, last, or a step such as step-200")


def saved_checkpoints(registry: Registry, job: Job, scratch: Path, choice: str | None) -> Path:
    """Return a folder with the job's checkpoints: the job's own on this machine, else copies below `scratch`.

    Only the chosen checkpoint is copied, if its name is known without a look at the others.

    Raises CloudtrainError for a job without checkpoints, and the errors of the backend.
    """
    from .. import backend as backends

    points = series.read(registry.database, job.id).marks
    for path in [str(point.fields.get("path")) for point in reversed(points) if point.kind == "checkpoint"]:
        if _is_of(Path(path), job):
            return Path(path).parent
    backend, ref = backends.load(job.backend), job.attempt.ref
    if ref is None:
        raise UsageError(f"{job.id} was never sent: it has no checkpoint")
    if not isinstance(backend, backends.HasCheckpoints):
        raise UsageError(f"the backend {job.backend} cannot fetch checkpoints", hint="name the checkpoint's folder")
    name = _name_of(job, choice)
    say(f"copying {name} of {job.id}" if name else f"looking for the checkpoints of {job.id}")
    if name is not None:
        with contextlib.suppress(CloudtrainError):  # it may be gone: then look at all
            backend.checkpoints(ref, scratch / name, name)
        if (scratch / name / folders.MANIFEST).exists():
            return scratch
    backend.checkpoints(ref, scratch)
    return scratch


def choose(folder: Path, choice: str | None, *, is_copy: bool = False) -> Path:
    """Return the chosen checkpoint in the folder; without a choice the best, if the job keeps the best, else the last.

    `is_copy`: the folder is a copy for this export, which no message names. Raises CloudtrainError if the checkpoint is
    absent.
    """
    where = "" if is_copy else str(folder)
    steps: dict[int, Path] = {}
    with contextlib.suppress(OSError):
        steps = dict(folders.list_steps(folder))
    if not steps:
        raise CloudtrainError("the job has no checkpoint", where=where, hint="it saves at the steps of `checkpoint`")
    best = folders.best_step(folder)
    if choice == "last" or (choice is None and best not in steps):
        return steps[max(steps)]
    wanted = best if choice in (None, "best") else int((choice or "").removeprefix("step-"))
    if wanted is None:
        raise CloudtrainError("the job keeps no best checkpoint", hint="--checkpoint last, or `checkpoint.keep_best`")
    if wanted not in steps:
        there = ", ".join(f"step-{step}" for step in sorted(steps))
        raise CloudtrainError(f"the checkpoint of step {wanted} is not kept", where=where, hint=f"there are {there}")
    return steps[wanted]


def _name_of(job: Job, choice: str | None) -> str | None:
    """Return the name of the chosen checkpoint; None if only the checkpoints themselves say which is the best."""
    keeps_best = (job.config.get("checkpoint") or {}).get("keep_best")
    if choice == "best" or (choice is None and keeps_best):
        return None
    step = job.attempt.progress.get("checkpoint_step") if choice in (None, "last") else choice.removeprefix("step-")
    return None if step is None else folders.step_name(int(step))


def _is_of(path: Path, job: Job) -> bool:
    """Return whether the reported path is a checkpoint of the job on this machine, too."""
    try:
        trainer = json.loads((path / folders.TRAINER).read_bytes())
        return bool(trainer["job"] == job.id)
    except (OSError, ValueError, KeyError, TypeError):
        return False
