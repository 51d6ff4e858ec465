"""The export of a job's model: the order from the job's records, and the process that carries the order out.

The checkpoint is in the job's own folder on this machine, else a copy from the job's backend.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import atomic_json
from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.models import folder as models
from cloudtrain.entrypoints.models import scratch
from cloudtrain.entrypoints.models.order import HUGGINGFACE, ExportOrder

from .. import backend as backends
from ..backend_table import DEFAULT
from ..errors import CloudtrainError, ConfigError, UsageError
from ..job import Job
from ..jobs import evaluations
from ..jobs.view import read_view
from ..store import series
from ..store.progress import lineage
from ..store.registry import Registry
from ..text import addresses
from ..text.extras import install
from ..text.terminal import say
from ..text.units import as_usd

_FORMS = ("safetensors", "pt2", "onnx", HUGGINGFACE)
_NO_METRICS = ("accuracy_low", "accuracy_high")
_END_S = 5.0
_ONNX = ("onnx", "onnxscript", "onnxruntime")
# The letters that each vendor's registry and endpoint allow, with room for a suffix.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_STEP = re.compile(r"step-(\d{1,18})")


def parse_forms(text: str) -> tuple[str, ...]:
    """Return the forms in the text, safetensors first and always. Raises UsageError."""
    named = [name.strip() for name in text.split(",") if name.strip()]
    if wrong := [name for name in named if name not in _FORMS]:
        raise UsageError(f"`{wrong[0]}` is no form of a model", hint=f"the forms are {', '.join(_FORMS)}")
    if "onnx" in named and (missing := [name for name in _ONNX if find_spec(name) is None]):
        raise ConfigError(f"the form onnx needs {missing[0]}, which is not installed", hint=install("onnx"))
    return ("safetensors", *(form for form in _FORMS[1:] if form in named))


def require_model_name(name: str) -> None:
    """Raise UsageError for a name that a vendor's registry or endpoint refuses."""
    if not _NAME.fullmatch(name):
        hint = "--name with small letters, digits and `-`, at most 40, a letter first"
        raise UsageError(f"`{name}` cannot name a model in every registry", hint=hint)


def require_choice(choice: str | None) -> None:
    """Raise UsageError unless the choice of a checkpoint is None, best, last or step-N."""
    if choice not in (None, "best", "last") and not _STEP.fullmatch(choice or ""):
        raise UsageError(f"`{choice}` names no checkpoint", hint="best, last, or a step such as step-200")


def require_torch(use: str) -> None:
    """Raise ConfigError if torch is not installed beside this command; `use` is the need of torch, for the message."""
    if find_spec("torch") is None:
        raise ConfigError(f"torch is not installed here, and {use} needs it", hint=install(DEFAULT))


def require_key(key: Path) -> None:
    """Raise UsageError if the key cannot sign: tried on a file, as the export signs after minutes of work."""
    if not key.is_file():
        raise UsageError(f"there is no key {key}", hint="--sign takes a private key, as ssh-keygen makes it")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / models.SUMS).write_text("")
        try:
            models.sign(Path(folder), key)
        except models.ModelFolderError as error:
            hint = "of a key with a passphrase, load the private key with ssh-add, and give --sign the public key"
            raise UsageError(str(error), hint=hint) from error


def export_job(
    registry: Registry,
    job: Job,
    place: Path,
    choice: str | None,
    *,
    name: str | None = None,
    forms: Sequence[str],
    inputs: Mapping[str, str],
    key: Path | None,
    is_unchecked: bool,
    needed: str | None = None,
) -> dict[str, Any]:
    """Write the job's model to the folder `place`; return place, digest, check and files. Raises CloudtrainError.

    `needed`: a form without which the export fails; other forms may be left out, with the reason in the check.
    """
    if not job.asked.task or job.config.get("sweep"):
        what = "a script saves its model in its own form" if not job.asked.task else "the job is a sweep of many models"
        hint = "cloudtrain artifacts fetches the files" if not job.asked.task else "submit the best trial's config"
        raise UsageError(f"{job.id} has no model to export: {what}", hint=hint)
    archive = Path(str(job.bundle.get("path")))
    if not archive.exists():
        hint = "--checkpoint with a folder exports weights alone, with --unchecked"
        raise ConfigError("the code as it was submitted is no longer here", where=archive, hint=hint)
    with hidden_beside(place) as hidden:
        kept = saved_checkpoints(registry, job, hidden, choice)
        checkpoint = choose(kept, choice, is_copy=kept == hidden)
        order = ExportOrder(
            checkpoint=str(checkpoint),
            place=str(place),
            name=name or job.name,
            archive=str(archive),
            archive_sha256=job.bundle["sha256"],
            task=job.asked.task,
            params=job.config.get("params") or {},
            environment=_environment(job, inputs),
            forms=tuple(forms),
            seed=(job.config.get("training") or {}).get("seed") or 0,
            key=None if key is None else str(key.absolute()),
            is_unchecked=is_unchecked,
            needed=needed,
            facts=_facts(registry, job, int(checkpoint.name[5:])),
        )
        return _run(order, registry.folder)


def export_path(
    registry: Registry, checkpoint: Path, place: Path, *, name: str | None = None, key: Path | None, is_unchecked: bool
) -> dict[str, Any]:
    """Write the weights of a checkpoint without its job, unchecked. Raises CloudtrainError."""
    steps: list[str] = []
    with contextlib.suppress(OSError):  # the folder may be absent, or not readable
        steps = [path.name for _, path in folders.list_steps(checkpoint)]
    if steps and not (checkpoint / folders.MANIFEST).exists():
        hint = f"there are {', '.join(steps)}; for example {checkpoint / steps[0]}"
        raise UsageError(f"{checkpoint} is a folder of checkpoints, not a checkpoint", hint=hint)
    with hidden_beside(place):
        pass  # before the work: the place can be written
    order = ExportOrder(str(checkpoint.absolute()), str(place), name or place.name, forms=("safetensors",))
    signing = None if key is None else str(key.absolute())
    return _run(replace(order, key=signing, is_unchecked=is_unchecked), registry.folder)


@contextlib.contextmanager
def hidden_beside(place: Path) -> Iterator[Path]:
    """Yield a hidden folder beside the place. Raises UsageError if the place is taken, ConfigError if not writable."""
    scratch.remove_dead(place)  # also if the place exists: an export may die between the name and its own removal
    if os.path.lexists(place):  # also a link to nothing
        raise UsageError(f"{place} exists", hint="name another folder with -o, or remove it")
    with contextlib.ExitStack() as stack:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            hidden = stack.enter_context(scratch.scratch(place))
        except OSError as error:
            hint = "name a folder with -o where you may write"
            raise ConfigError(f"no folder can be made: {error.strerror}", where=place.parent, hint=hint) from error
        yield hidden


def saved_checkpoints(registry: Registry, job: Job, copies: Path, choice: str | None) -> Path:
    """Return a folder with the job's checkpoints: the job's own on this machine, else copies below `copies`.

    Only the chosen checkpoint is copied, if its name is known without a look at the others.

    Raises CloudtrainError for a job without checkpoints, and the errors of the backend.
    """
    points = series.read(registry.database, job.id).marks
    for path in [str(point.fields.get("path")) for point in reversed(points) if point.kind == "checkpoint"]:
        trainer = atomic_json.read_json(Path(path) / folders.TRAINER)
        if isinstance(trainer, dict) and trainer.get("job") == job.id:  # on this machine, too
            return Path(path).parent
    backend, ref = backends.load(job.backend_of(job.attempt)), job.attempt.ref
    if ref is None:
        raise UsageError(f"{job.id} was never sent: it has no checkpoint")
    if not isinstance(backend, backends.HasCheckpoints):
        raise UsageError(f"the backend {job.backend} cannot fetch checkpoints", hint="name the checkpoint's folder")
    name = _name_of(job, choice)
    say(f"copying {name} of {job.id}" if name else f"looking for the checkpoints of {job.id}")
    if name is not None:
        with contextlib.suppress(CloudtrainError):  # it may be gone: then look at all
            backend.checkpoints(ref, copies / name, name)
        if (copies / name / folders.MANIFEST).exists():
            return copies
    backend.checkpoints(ref, copies)
    return copies


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
    if choice is None and best is None and (folder / folders.BEST).exists():
        message = f"{folders.BEST} is damaged, so the best step is not known"
        raise CloudtrainError(message, where=where, hint="--checkpoint last, or a step such as step-200")
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


def _environment(job: Job, inputs: Mapping[str, str]) -> dict[str, str]:
    """Return the job's variables, and the paths of the inputs: given paths, and paths of the config."""
    base, plain = Path(job.config_file).parent, job.config.get("inputs") or {}
    paths = {name: addresses.path_of(str(uri)).removeprefix("file://") for name, uri in plain.items()}
    paths = {name: str(base / path) for name, path in paths.items() if "://" not in path}
    variables = {f"CLOUDTRAIN_INPUT_{name.upper()}": path for name, path in {**paths, **inputs}.items()}
    return {**(job.config.get("env") or {}), **variables}


def _facts(registry: Registry, job: Job, step: int) -> dict[str, Any]:
    """Return the registry's facts about the job and the step, for config.json and the model card."""
    git = job.bundle.get("git") or {}
    spent = as_usd(read_view(registry, job).money.spent_micro)
    points = [point for point in series.read(registry.database, job.id).marks if point.kind == "eval"]
    metrics = next((point.fields.get("metrics") for point in reversed(points) if point.step == step), None)
    facts = {"job": job.id, "backend": job.backend, "commit": git.get("commit"), "cost_usd": spent, "metrics": metrics}
    facts |= {"test": _test(registry, job, step), "parent": lineage(job.config, job.attempt.progress) or None}
    return {**facts, "dirty": git.get("dirty")} if git.get("commit") else facts


def _test(registry: Registry, job: Job, step: int) -> dict[str, Any] | None:
    """Return the numbers of the newest test of the step's weights on the split `test`, and the number of looks."""
    tests = evaluations.tests_of(registry, job)
    found = [t.figures for t in tests if (t.figures.get("split"), t.figures.get("step")) == ("test", step)]
    if not found:
        return None
    own = {name: value for name, value in found[-1].items() if name not in _NO_METRICS and isinstance(value, float)}
    about = {"split": "test", "same_as_eval": bool(found[-1].get("same_as_eval"))}
    return {**about, "samples": found[-1].get("n"), "looks": evaluations.looks(tests, "test"), "metrics": own}


def _run(order: ExportOrder, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "cloudtrain.entrypoints.export"]
    # `-m` searches the current folder first, and the user's folder may hold a signal.py.
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=folder) as child:
        try:
            printed, said = child.communicate(json.dumps(order.dump()))
        except BaseException:  # Ctrl-C, or a signal of the command: the child removes its files
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)
            child.kill()
            child.wait()
            scratch.remove_dead(Path(order.place))
            raise
    try:
        answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    except (ValueError, IndexError):
        lines = said.strip().splitlines() or [f"its process ended with code {child.returncode}"]
        raise CloudtrainError(f"the export did not run: {lines[-1]}") from None
    if "fault" in answer:
        raise CloudtrainError(answer["fault"], hint=answer["hint"])
    return answer
