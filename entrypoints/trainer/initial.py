"""The weights of the first step from another job or a file (`init_from`); the job's own checkpoints always win.

The launcher makes the place an input of the job, so every backend fetches or mounts the files. Only rank 0 needs to see
the files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import foreign
from ..checkpoints import folder as folders
from ..checkpoints import loader, matching
from ..contract import InitSettings
from ..errors import TaskError
from ..format import first_of
from ..models import tensors
from ..models.folder import SUMS, WEIGHT_FILES
from ..rank import exchange
from ..rank.exchange import local_part
from . import report
from .job import TrainingJob, TrainState
from .resume import all_shapes, fill_module, load_optimizer, opened
from .strategies.facts import facts_of

PLACE = "CLOUDTRAIN_INPUT_INIT_FROM"  # as for every entry of `inputs`


@dataclass(frozen=True)
class Parent:
    """Open weights of another job or program. `names`: the reader's name by the weight's name.

    `origin`: job, step and sha256 (of the manifest, of SHA256SUMS, or of the file), for the job's record. `trainer`:
    the checkpoint's trainer.json; None for plain weights.
    """

    reader: loader.CheckpointReader
    names: Mapping[str, str]
    origin: dict[str, Any]
    trainer: dict[str, Any] | None


def initialize(job: TrainingJob, progress: TrainState) -> None:
    """Give the model the weights that `init_from` names, unless the job has resumed. Collective.

    Raises TaskError with all differences of names and shapes, CheckpointError for damaged files.
    """
    wanted = job.spec.init_from
    if wanted is None or progress.resumed_from is not None:
        return
    place = os.environ.get(PLACE)
    if not place:
        raise TaskError(f"init_from has no place: {PLACE} is not set; submit the job by cloudtrain")
    with_optimizer = wanted.what == "weights+optimizer"
    parent = open_parent(job, Path(place), wanted, averaged=not with_optimizer)
    notes = fill(job, parent, wanted)
    if with_optimizer:
        then = None if parent.trainer is None else parent.trainer.get("optimizer")
        if then != job.identity["optimizer"]:
            has = "plain weights without an optimizer" if then is None else f"the optimizer {then}"
            raise TaskError(
                f"init_from.load is weights+optimizer; the parent has {has}, this job {job.identity['optimizer']}: "
                "write `load: weights`"
            )
        with torch.no_grad():
            load_optimizer(job, parent.reader)
        notes.append("with the optimizer's state")
    if job.ema is not None:
        job.ema.reset()
    job.strategy.load_shared_state({}, 0)  # the method's copies of the weights begin at the new weights
    progress.parent = parent.origin
    of = f"{parent.origin['job'] or parent.origin['path']}"
    of += "" if parent.origin["step"] is None else f" step {parent.origin['step']}"
    text = f"init_from: {len(parent.names)} weights of {of}" + (f"; {'; '.join(notes)}" if notes else "")
    report.say(job, "parent", text, step=0, parent=parent.origin)


def open_parent(job: TrainingJob, place: Path, wanted: InitSettings, *, averaged: bool = True) -> Parent:
    """Return the weights at the place, verified. `averaged`: of a checkpoint, the average if kept. Collective."""
    chosen: list[Any] = [None, [], None]
    fault = None
    if job.place.is_head:
        try:
            chosen = _chosen(place, wanted.checkpoint)
        except (TaskError, folders.CheckpointError, OSError, ValueError) as error:
            fault = str(error) if isinstance(error, TaskError) else f"init_from: {error}"
    fault, (checkpoint, files, sha256) = exchange.share([fault, chosen])
    if fault:
        raise TaskError(fault)
    if checkpoint is None:
        reader = loader.open_files([Path(file) for file in files])
        origin = {"job": wanted.job, "step": None, "sha256": sha256, "path": str(place)}
        return Parent(reader, {name: name for name in reader.shapes}, origin, None)
    path = Path(checkpoint)
    if damage := loader.check(path):
        raise folders.CheckpointError(f"the parent's checkpoint {path} is damaged: {damage}")
    found = opened(job, path)
    reader = loader.open_reader(found, whole=facts_of(job.spec.training).is_whole)
    names = matching.saved_names(reader.shapes, averaged=averaged, tied=found.trainer.get("tied", {}))
    origin = {"job": found.trainer.get("job"), "step": found.step, "sha256": sha256, "path": str(path)}
    return Parent(reader, names, origin, found.trainer)


def fill(job: TrainingJob, parent: Parent, wishes: InitSettings) -> list[str]:
    """Copy the parent's weights into the model; return notes for the report. Collective. Raises TaskError."""
    state, reader = job.strategy.module.state_dict(), parent.reader
    live = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    tied = same_tensors(live)
    saved = {name: reader.shapes[full] for name, full in parent.names.items()}
    paired = matching.pair(saved, all_shapes(job, live), wishes, tied)
    sources = {name: parent.names[old] for name, old in paired.sources.items()}
    for names in tied.values():
        twins = sorted({sources[each] for each in names if each in sources})
        if job.place.pipeline > 1 or len(twins) < 2:
            continue
        first, *others = map(reader.read, twins)
        if not all(torch.equal(first, other) for other in others):
            raise TaskError(f"this model ties {', '.join(sorted(names))}, and the parent has different values for them")
    with torch.no_grad():
        extra = reader.plain.get("extra") if isinstance(reader.plain, dict) and not wishes.rename else None
        fill_module(job, reader, sources, extra or {})
    more = f" and {len(paired.kept) - 8} more" if len(paired.kept) > 8 else ""
    notes = [f"{', '.join(paired.kept[:8])} keep their own start{more}"] if paired.kept else []
    if paired.unused:
        notes.append(f"not used of the parent: {first_of(paired.unused, 8)}")
    cast = {f"{reader.dtypes[full]} to {live[name].dtype}" for name, full in sources.items() if name in live}
    cast = {each.replace("torch.", "") for each in cast if len(set(each.split(" to "))) > 1}
    return [*notes, *([f"cast: {', '.join(sorted(cast))}"] if cast else [])]


def _chosen(place: Path, wanted: str | None) -> list[Any]:
    """Return a checkpoint, or files of plain weights, and the sha256 of either. Raises TaskError, OSError."""
    if place.is_file():
        return [None, [str(place)], foreign.sha256_of(place)]
    if not place.is_dir():
        raise TaskError(f"init_from names {place}, which does not exist on this node")
    if (place / folders.MANIFEST).exists():
        return [str(place), [], foreign.sha256_of(place / folders.MANIFEST)]
    if folders.list_steps(place):
        path = folders.choose(place, wanted)
        return [str(path), [], foreign.sha256_of(path / folders.MANIFEST)]
    name = next((each for each in WEIGHT_FILES if (place / each).is_file()), None)
    if name is None:
        raise TaskError(f"init_from: {place} has neither a checkpoint nor {', '.join(WEIGHT_FILES)}")
    files = [place / name]
    if name.endswith(".json"):
        files = [place / each for each in sorted(tensors.listed(foreign.read(place / name, foreign.JSON_BYTES)))]
    if not (place / SUMS).exists():
        return [None, [str(file) for file in files], foreign.sha256_of(place / name)]
    pairs = [line.split(maxsplit=1) for line in foreign.read_text(place / SUMS, foreign.JSON_BYTES).splitlines()]
    known = {pair[1].lstrip("*").removeprefix("./"): pair[0] for pair in pairs if len(pair) == 2}
    for file in dict.fromkeys([place / name, *files]):
        if known.get(file.name) != foreign.sha256_of(file):
            why = "differs from" if file.name in known else "is not in"
            raise TaskError(f"init_from: {file} {why} {SUMS}: fetch the folder again")
    return [None, [str(file) for file in files], foreign.sha256_of(place / SUMS)]


def same_tensors(live: Mapping[str, torch.Tensor]) -> dict[str, frozenset[str]]:
    """Return, for each name of a tensor with several names, all its names."""
    by_memory: dict[tuple[int, int, tuple[int, ...]], list[str]] = {}
    for name, value in live.items():
        part = local_part(value)
        if part.numel():  # tensors without data have no address, but a storage
            place = (part.untyped_storage()._cdata, int(part.storage_offset()), tuple(value.shape))
            by_memory.setdefault(place, []).append(name)
    groups = [frozenset(names) for names in by_memory.values() if len(names) > 1]
    return {name: group for group in groups for name in group}
