"""The parent of a job with `init_from`: where the parent's checkpoint is, as an input of the job.

Every backend fetches, mounts or finds inputs, so the weights need no road of their own, and no user's machine.
"""

from __future__ import annotations

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.format import one_line
from cloudtrain.entrypoints.models import tensors
from cloudtrain.entrypoints.models.folder import WEIGHT_FILES

from .. import backend as backends
from ..backend_table import traits
from ..config.schema import JobConfig
from ..errors import CloudtrainError, ConfigError, Fault, NoSuchJobError
from ..job import Job
from ..planning.prepare import Prepared
from ..store import home
from ..store.registry import Registry
from ..text import addresses
from . import memory, taskcode

INPUT = "init_from"  # the name of the input: CLOUDTRAIN_INPUT_INIT_FROM on the node


def resolved(config: JobConfig, base: Path) -> tuple[JobConfig, list[str]]:
    """Return the config with the parent's place as an input, and notes. `base`: the config file's folder.

    A config that has the input already, as a stored config has, stays as it is: the parent may be gone by then.
    Raises ConfigError for a missing, running or unsaved parent, and for weights on this machine that no job can read.
    """
    wanted = config.init_from
    if wanted is None or INPUT in config.inputs:
        return config, []
    place, note = wanted.path or "", ""
    if wanted.job is not None:
        parent = _job(wanted.job)
        place, checkpoint = _place(parent, config, wanted.checkpoint)
        wanted = wanted.model_copy(update={"job": parent.id, "checkpoint": checkpoint})
        note = f"{parent.id}, {(checkpoint or 'its best checkpoint, else its last').replace('step-', 'step ')}"
    is_here = traits(config.backend).runs_here and "://" not in place.removeprefix("file://")
    if is_here or (traits(config.backend).data_place and place and addresses.is_beside(place)):
        _require_whole(base / place.removeprefix("file://"), wanted.checkpoint, is_task=config.task is not None)
    inputs = {**config.inputs, INPUT: place}
    return config.model_copy(update={"inputs": inputs, "init_from": wanted}), [f"init_from: {note or place}"]


def compared(prepared: Prepared, *, asks_stores: bool = False) -> list[str]:
    """Return a line about the comparison of the parent's names and shapes with the model's, by a separate process.

    Without a cheap comparison the node compares, before step 1. `asks_stores`: headers in a store are read, too.
    Raises ConfigError with the differences.
    """
    config = prepared.config
    is_test = config.evaluate is not None and config.evaluate.only  # its model is the parent's
    if config.init_from is None or config.task is None or is_test:
        return []
    place = addresses.path_of(config.inputs[INPUT]).removeprefix("file://")
    if "://" in place and not asks_stores:
        return ["init_from: names and shapes are compared at the submit"]
    if config.sweep is not None:
        answer = {"why": "each trial of a sweep has its own model"}
    elif not addresses.is_beside(place) and "://" not in place and not traits(config.backend).runs_here:
        answer = {"why": f"{place} is a path on a host"}
    elif find_spec("torch") is None:
        answer = {"why": "torch is not installed here"}
    else:
        answer = _compared(prepared, place)
    if "fault" in answer:
        hint = "if the job's packages make another model than here: cloudtrain submit --force leaves it to the node"
        raise ConfigError([Fault(answer["fault"], key="init_from", hint=hint)])
    if "fits" in answer:
        return [f"init_from: names and shapes of {answer['fits']} weights fit the model"]
    return [f"init_from: names and shapes are compared on the node, before step 1: {answer['why']}"]


def _compared(prepared: Prepared, place: str) -> dict[str, Any]:
    """Return the answer of entrypoints/trainer/fitting.py, or the reason why the parent cannot be read from here."""
    config, backend = prepared.config, prepared.backend
    assert config.init_from is not None, "checked by the caller"
    is_averaged = config.init_from.load == "weights"
    try:
        ref = None if config.init_from.job is None else _job(config.init_from.job).attempt.ref
        if ref is not None and isinstance(backend, backends.KnowsShapes):
            shapes = backend.saved_shapes(ref, averaged=is_averaged)
        else:
            here = prepared.config_file.parent.resolve() / place
            whole = place if "://" in place else str(_chosen(here, config.init_from.checkpoint))
            shapes = tensors.at(whole, averaged=is_averaged)
    except (OSError, ValueError, folders.CheckpointError, tensors.NoShapesError) as error:
        return {"why": one_line(error)}
    except CloudtrainError as error:
        return {"why": error.message}
    ask = memory.asked(prepared)
    key = memory.key_of(prepared, ask, shapes)
    if known := memory.kept().get(key):
        return known[0]
    with tempfile.NamedTemporaryFile("w", prefix="cloudtrain-", suffix=".json") as file:
        json.dump(shapes, file)
        file.flush()
        (answer, *_), _ = taskcode.run(prepared, "fitting", ask, file.name)
    if "fits" in answer:  # a difference may be mended by other packages
        memory.keep(key, [answer])
    return answer


def _job(name: str) -> Job:
    if not (home.where() / "registry.sqlite").exists():  # a dry run makes no folder
        raise _fault(f"there is no job `{name}`", "there are no jobs yet: submit the parent first", "job")
    try:
        return Registry(home.where()).find(name)
    except NoSuchJobError as error:
        hint = "cloudtrain list shows the jobs; a file or folder is named by `path`, or has a slash"
        raise _fault(error.message, hint, "job") from error


def _require_weights(parent: Job) -> None:
    """Raise ConfigError if the registry knows that an ended parent has no checkpoint that a task reads."""
    test = parent.config.get("evaluate")
    if isinstance(test, dict) and test.get("only") is True:
        asked = parent.config.get("init_from") or {}
        hint = f"name the tested job, {asked['job']}" if asked.get("job") else "name the job that was trained"
        raise _fault(f"{parent.id} is a test of other weights, and has saved none", hint, "job")
    if not parent.asked.task:
        hint = "export the weights as model.safetensors, and name the file by init_from.path"
        raise _fault(f"{parent.id} runs a script, whose checkpoints a task cannot read", hint, "job")
    if parent.attempt.state.state == "succeeded" or parent.config.get("sweep"):
        return
    saves = [attempt.progress for attempt in Registry(home.where()).attempts(parent)]
    if not any({"checkpoint", "checkpoint_step"} & progress.keys() for progress in saves):
        hint = f"cloudtrain resume {parent.id} trains on; a checkpoint that was not reported is named by init_from.path"
        raise _fault(f"{parent.id} ended ({parent.attempt.word}) before the first checkpoint", hint, "job")


def _place(parent: Job, config: JobConfig, checkpoint: str | None) -> tuple[str, str | None]:
    """Return the place of the parent's checkpoint, and the checkpoint by its step if the step is known here."""
    if parent.backend != config.backend:
        hint = f"copy its checkpoint to a place that {config.backend} reads, and name it by init_from.path"
        raise _fault(f"{parent.id} ran on {parent.backend}, this job runs on {config.backend}", hint, "job")
    if parent.active:
        raise _fault(f"{parent.id} is still running", f"cloudtrain wait {parent.id}, or stop it first", "job")
    if config.task is not None:
        _require_weights(parent)
    backend, ref = backends.load(parent.backend_of(parent.attempt)), parent.attempt.ref
    folder = backend.checkpoint_place(ref) if ref is not None and isinstance(backend, backends.HasCheckpoints) else None
    if folder is None:
        raise _fault(f"{parent.id} has left no checkpoint that a job can read", f"cloudtrain status {parent.id}", "job")
    last = parent.attempt.progress.get("checkpoint_step")
    if checkpoint == "last" or (checkpoint is None and not (parent.config.get("checkpoint") or {}).get("keep_best")):
        checkpoint = checkpoint if last is None else f"step-{last}"
    if checkpoint is None or not checkpoint.startswith("step-"):
        return folder, checkpoint  # the node chooses: only the folder knows the best step
    end = "/" if "://" in folder else ""  # a prefix in a bucket
    return f"{folder.rstrip('/')}/{folders.step_name(int(checkpoint[5:]))}{end}", checkpoint


def _chosen(place: Path, checkpoint: str | None) -> Path:
    """Return the checkpoint in a folder of checkpoints, else the place. Raises CheckpointError, OSError."""
    if place.is_dir() and not (place / folders.MANIFEST).exists() and folders.list_steps(place):
        return folders.choose(place, checkpoint)
    return place


def _require_whole(place: Path, checkpoint: str | None, *, is_task: bool) -> None:
    """Raise ConfigError if a place here lacks the checkpoint, or weights for a task; else the node finds out."""
    try:
        if not place.exists():
            there = [f"step-{step}" for step, _ in folders.list_steps(place.parent)] if place.parent.is_dir() else []
            hint = f"there: {', '.join(there)}" if there else "a relative path begins at the config file's folder"
            raise _fault(f"{place} does not exist", hint, "checkpoint" if there else "path")
        chosen = _chosen(place, checkpoint)
        if (chosen / folders.MANIFEST).exists() and (wrong := folders.verify(chosen, only=())):
            hint = "name an older one, as in step-200"
            raise _fault(f"the checkpoint {chosen} is damaged: {wrong}", hint, "checkpoint")
        if not (place.is_file() or place.is_dir()):
            raise _fault(f"{place} is neither a file nor a folder", "name a checkpoint, or a file of weights", "path")
        if is_task:
            tensors.at(str(chosen))
    except folders.Unreadable as error:
        raise _fault(str(error), "name another checkpoint, as in step-200", "checkpoint") from error
    except folders.CheckpointError as error:
        raise _fault(str(error), "name one of these, as in step-200", "checkpoint") from error
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        hint = f"name a checkpoint, a file, or a folder with {', '.join(WEIGHT_FILES)}"
        raise _fault(f"the weights at {place} cannot be read: {one_line(error)}", hint, "path") from error
    except (OSError, tensors.NoShapesError):
        return


def _fault(message: str, hint: str, key: str) -> ConfigError:
    return ConfigError([Fault(message, key=f"init_from.{key}", hint=hint)])
