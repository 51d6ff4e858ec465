"""Resuming from a checkpoint: the choice of the checkpoint, and the changes since its save."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import atomic_json
from ..checkpoints import folder as folders
from ..checkpoints import loader, mirror
from ..errors import TaskError
from ..events import emit
from ..format import first_of
from ..rank import exchange
from ..rank.exchange import local_part
from ..stores.store import Store
from . import saving
from .contradictions import SPARSE
from .job import TrainingJob, TrainState
from .own_optimizer import filled, room
from .strategies.facts import FACTS, facts_of

# Settings that may change at a resume, and the effect of each change on the run.
_COMPARED = {
    "dataset_length": "the dataset had {then} items, now {now}: samples may repeat or be skipped in this epoch",
    "dataset_fingerprint": "the dataset's first or last item differs: the data are others, or `dataset` splits them "
    "without a fixed seed, so samples may repeat or be skipped, and held-back samples may have been trained on",
    "global_batch_size": "the global batch was {then}, now {now}",
    "micro_batch_size": "the micro-batch was {then}, now {now}: losses agree to rounding, not to the bit",
    "order": "the samples' order was {then}, now {now}: samples may repeat or be skipped in this epoch",
    "seed": "the seed was {then}, now {now}: this epoch's order differs, so samples may repeat or be skipped",
    "world_size": "the ranks were {then}, now {now}: losses agree to rounding, not to the bit",
    "tensor": "the ranks that share a layer were {then}, now {now}: losses agree to rounding, not to the bit",
    "pipeline": "the stages were {then}, now {now}: losses of tied parameters agree to rounding, not to the bit",
    "strategy": "the strategy was {then}, now {now}: losses agree to rounding, not to the bit",
    "precision": "the precision was {then}, now {now}",
    "optimizer": "the optimizer was {then}, now {now}: it starts with fresh state",
    "threads": "the threads of a rank were {then}, now {now}: losses agree to rounding, not to the bit",
    "torch": "torch was {then}, now {now}",
    "config_sha256": "training settings or params differ; the new ones hold",
    "code_sha256": "the task file differs; the new one holds",
}

MOST_NAMED = 3  # damaged checkpoints in one message
_PLAIN: dict[str, type] = {"groups": list, "state": dict, "scaler": dict, "extra": dict}  # the content of plain.pt
_Intact = tuple[folders.FoundCheckpoint, loader.CheckpointReader]  # an intact, open checkpoint
_Damaged = list[tuple[Path, str]]  # with the faults


def resume(job: TrainingJob) -> TrainState:
    """Load the checkpoint that the settings select, if present; report changes; return the job's progress."""
    begin_s = time.perf_counter()
    chosen, damaged = _agree(job)
    progress, notes = TrainState(), list[str]()
    if chosen is not None:
        checkpoint, reader = chosen
        notes = _load(job, checkpoint, reader)
        progress.step = progress.resumed_from = checkpoint.step
        progress.path = checkpoint.path
        told = saving.noted(job, checkpoint.trainer)
        for name in saving.CARRIED:
            if name in told:
                setattr(progress, name, told[name])
        if checkpoint.path.parent == job.folder:
            progress.saved_step = progress.begun_step = checkpoint.step
            _mark_best_again(job, progress)
            _note_missing(job, checkpoint)
        if progress.save_s:
            job.agreement.save_s = progress.save_s
    training = job.spec.training
    progress.max_steps = _end_of(job, progress, training.epochs, training.max_steps) or 0
    progress.pause_at = _end_of(job, progress, training.pause_epochs, training.pause_at)
    if job.place.is_head:
        _report(job, chosen and chosen[0], damaged, notes, time.perf_counter() - begin_s)
    return progress


def _end_of(job: TrainingJob, progress: TrainState, epochs: float | None, steps: int | None) -> int | None:
    """Return `steps`, or the step after so many epochs, counted from now on: the global batch may have changed."""
    if epochs is None:
        return steps
    left = math.ceil(epochs * job.order.length) - progress.samples
    return progress.step + max(0, math.ceil(left / job.split.global_batch))


def choose(folder: Path, wanted: str, is_first: bool, job: str) -> list[Path]:
    """Return the checkpoints to try, the best first; an empty list means a start from step 0.

    `wanted` is auto, never, or a path; never and a path hold for the job's first start: afterwards the job's own are
    newer. Checkpoints of later steps would outrank this run's, and are set aside. Raises TaskError.
    """
    own = folders.list_steps(folder)
    if wanted != "auto" and not is_first:
        # A platform that copies the folder restores, on new machines, checkpoints that were set aside here.
        own = [(step, path) for step, path in own if _job_of(path) in (job, None)]
    if wanted == "never" and is_first:
        for _, path in own:
            folders.set_aside(path, "old")
        return []
    if wanted in ("auto", "never") or (own and not is_first):
        return [path for _, path in own]
    path = Path(wanted)
    if not path.is_dir():
        raise TaskError(f"checkpoint.resume names {path}, which does not exist; auto selects this job's newest")
    path = path.absolute()
    if (path / folders.MANIFEST).exists() or not folders.list_steps(path):
        return [path]
    return [step for _, step in folders.list_steps(path)]


def _job_of(path: Path) -> str | None:
    """Return the job of a checkpoint, None if unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(folders.read(path / folders.TRAINER))["job"])
    return None


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return in words the differences between a checkpoint's job and the present job."""
    changed = {key: text for key, text in _COMPARED.items() if key in then and then[key] != now[key]}
    texts = [text.format(then=then[key], now=now[key]) for key, text in changed.items()]
    strategies = [FACTS[side["strategy"]] for side in (then, now) if side.get("strategy") in FACTS]
    apart = [facts for facts in strategies if facts.is_apart]
    if apart:
        has_servers = all(facts.has_servers for facts in apart)
        why = "the rate's share and the staleness follow the ranks" if has_servers else "ranks train apart"
        differs = f"the losses differ, because {why}"
        texts = [text.replace("losses agree to rounding, not to the bit", differs) for text in texts]
    if then.get("reproducible") == now.get("reproducible") == "strict":  # strict allows any number of ranks
        return [text for text in texts if not text.startswith("the ranks were")]
    return texts


def _mark_best_again(job: TrainingJob, progress: TrainState) -> None:
    """Repair the note of the best step, if a kill came between the save and the note."""
    wanted = job.spec.training.monitor.metric
    if job.place.is_head and job.spec.checkpoint.keep_best and progress.best is not None and progress.best_step:
        is_there = (job.folder / folders.step_name(progress.best_step)).is_dir()
        if is_there and folders.best_step(job.folder) != progress.best_step:
            with contextlib.suppress(OSError):
                folders.mark_best(job.folder, progress.best_step, wanted, progress.best)


def _note_missing(job: TrainingJob, checkpoint: folders.FoundCheckpoint) -> None:
    """Have this checkpoint uploaded at the end, if the mirror lacks it and no newer checkpoint is uploaded first."""
    if job.uploader is None:
        return
    lacks = False
    if job.place.is_head:
        with contextlib.suppress(OSError):
            lacks = mirror.latest(job.uploader.to) != checkpoint.step
    if exchange.share(lacks):
        job.uploader.offer(checkpoint.path, list(checkpoint.files) if job.place.is_head else [], passes_over=True)


def _agree(job: TrainingJob) -> tuple[_Intact | None, _Damaged]:
    """Let rank 0 choose and all ranks check; return the first intact checkpoint, and the damaged ones before it."""
    paths, fault = list[str](), None
    wanted = job.spec.checkpoint.resume
    if job.place.is_head:
        try:
            is_first = _is_first_start(job)
            _fetch_newer(job)
            paths = [str(path) for path in choose(job.folder, wanted, is_first, job.spec.job)]
        except (TaskError, OSError) as error:
            fault = str(error)
    if job.uploader is not None:  # a download by rank 0 may take longer than a collective call may last
        job.saver.meet()
    fault, paths = exchange.share([fault, paths])
    if fault:
        raise TaskError(fault)
    damaged: _Damaged = []
    for path in map(Path, paths):
        intact = _intact(job, path)
        if not isinstance(intact, str):
            _set_aside(job, [listed for listed, _ in damaged])
            for step, later in folders.list_steps(job.folder) if job.place.is_head else ():
                if step > intact[0].step:  # later steps than those of a named checkpoint would outrank new ones
                    folders.set_aside(later, "old")
            return intact, damaged
        damaged.append((path, intact))
    if damaged and job.uploader is not None and (fetched := _from_mirror(job, job.uploader.to)) is not None:
        _set_aside(job, [path for path, _ in damaged if path.name != fetched[0].path.name])  # its name is in use again
        return fetched, damaged
    if damaged and wanted not in ("auto", "never") and damaged[0][0].parent != job.folder:
        path, wrong = damaged[0]
        raise folders.CheckpointError(f"checkpoint {path} is damaged: {wrong}")
    if damaged and job.spec.checkpoint.all_damaged != "start-over":
        # The checkpoints keep their names: otherwise the next start would not know of any loss.
        listed = "; ".join(f"{path.name}: {wrong}" for path, wrong in damaged[:MOST_NAMED])
        raise folders.AllDamagedError(
            f"all checkpoints in {job.folder} are damaged ({listed}); nothing starts from step 0 without your consent: "
            "`cloudtrain resume` asks, or set checkpoint.all_damaged to start-over"
        )
    _set_aside(job, [path for path, _ in damaged])
    return None, damaged


def _intact(job: TrainingJob, path: Path) -> _Intact | str:
    """Return the open checkpoint, or a description of the damage. All ranks call it. Raises Unreadable, TaskError."""
    if (damage := loader.check(path)) is not None:
        return damage
    checkpoint = opened(job, path)
    if lacking := [name for name in ("job", "optimizer", "world_size") if name not in checkpoint.trainer]:
        return f"{folders.TRAINER} has no {lacking[0]}"
    other = checkpoint.trainer["job"]
    if job.spec.checkpoint.resume in ("auto", "never") and other != job.spec.job:
        raise TaskError(
            f"the checkpoints in {path.parent} are of the job {other}, this one is {job.spec.job}; set "
            f"checkpoint.resume to {path} to resume from there (on local, ssh and Slurm), take only the weights by "
            f"`init_from: {{job: {other}}}` (on every backend), or give this job a separate folder"
        )
    try:
        reader = loader.open_reader(checkpoint, whole=facts_of(job.spec.training).is_whole)
    except folders.CheckpointError as error:
        return str(error)
    plain = reader.plain if isinstance(reader.plain, dict) else {}
    if wrong := next((name for name, kind in _PLAIN.items() if not isinstance(plain.get(name), kind)), None):
        return f"{folders.PLAIN} has no {wrong}"
    return checkpoint, reader


def _from_mirror(job: TrainingJob, source: Store) -> _Intact | None:
    """Return the mirror's checkpoint in place of the damaged ones, None if the mirror has no intact checkpoint."""
    fetched, fault = None, None
    if job.place.is_head:
        try:
            fetched = mirror.fetch(source, job.folder, replace=True)
        except OSError as error:
            fault = f"all checkpoints in {job.folder} are damaged, and the mirror cannot be read: {error}"
    job.saver.meet()
    fetched, fault = exchange.share([str(fetched) if fetched else None, fault])
    if fault:  # a start from step 0 would replace an intact remote checkpoint with earlier steps
        raise folders.Unreadable(fault)
    intact = _intact(job, Path(fetched)) if fetched else None
    return None if isinstance(intact, str) else intact


def _set_aside(job: TrainingJob, damaged: list[Path]) -> None:
    """Rename the damaged checkpoints of this job: under their names they would outrank later checkpoints."""
    for path in damaged:
        if job.place.is_head and path.parent == job.folder:
            folders.set_aside(path, "damaged")


def opened(job: TrainingJob, path: Path) -> folders.FoundCheckpoint:
    """Return the checkpoint as rank 0 sees it, on all ranks."""
    agreed: Any = None
    if job.place.is_head:
        checkpoint = folders.open_found(path)
        agreed = [checkpoint.step, checkpoint.trainer, checkpoint.files]
    step, trainer, files = exchange.share(agreed)
    return folders.FoundCheckpoint(path, step, trainer, files)


def _fetch_newer(job: TrainingJob) -> None:
    """Fetch the mirror's checkpoint if newer.

    Raises OSError if the mirror fails, and this machine has no checkpoint, or an older one than a known save.
    """
    if job.uploader is None:
        return
    own = folders.list_steps(job.folder)
    try:
        newest = mirror.latest(job.uploader.to)
        if newest is not None and (not own or newest > own[0][0]):
            mirror.fetch(job.uploader.to, job.folder)
    except OSError as error:
        known = job.spec.checkpoint.saved_step or 0
        if own and own[0][0] < known:
            how = f"`cloudtrain resume {job.spec.job} --from-older` goes on from step {own[0][0]}"
            raise OSError(f"step {known} is not here, and the mirror cannot be read: {error}; {how}") from error
        if not own:
            raise
        text = f"the mirror cannot be read: {error}; continuing with this machine's checkpoint"
        emit("checkpoint", text, step=own[0][0])


def _is_first_start(job: TrainingJob) -> bool:
    """Return whether the job has never run before: a platform may restart an attempt without notice."""
    if job.spec.checkpoint.resume == "auto":  # auto is the same for every start
        return False
    mark = job.folder / "first-start.json"
    now = {"job": job.spec.job, "attempt": job.spec.attempt, "resume": job.spec.checkpoint.resume}
    is_known = atomic_json.read_json(mark) == now
    if not is_known:
        mark.write_text(json.dumps(now))
    return job.spec.attempt == 1 and _restarts() == 0 and not is_known


def _load(job: TrainingJob, checkpoint: folders.FoundCheckpoint, reader: loader.CheckpointReader) -> list[str]:
    """Fill the live state from the checkpoint; return notes for the report.

    Raises TaskError, on all ranks, for a different model's checkpoint.
    """
    live = {n: value for n, value in job.strategy.module.state_dict().items() if isinstance(value, torch.Tensor)}
    shapes = all_shapes(job, live)
    saved = {name.removeprefix("model."): s for name, s in reader.shapes.items() if name.startswith("model.")}
    if fault := _difference(shapes, saved):
        raise TaskError(
            f"the checkpoint belongs to a different model: {fault}; fix model(params), "
            "or start from step 0 with checkpoint.resume: never"
        )
    with torch.no_grad():
        fill_module(job, reader, {name: f"model.{name}" for name in live}, reader.plain["extra"])
        if job.ema is not None:
            averages = job.ema.averages  # an average that was not saved starts at these weights
            sources = {name: f"ema.{name}" if f"ema.{name}" in reader.shapes else f"model.{name}" for name in averages}
            reader.fill_all({sources[name]: value for name, value in averages.items()})
        if checkpoint.trainer["optimizer"] == job.identity["optimizer"]:
            load_optimizer(job, reader)
    if reader.plain["scaler"] and job.scaler.is_enabled():
        job.scaler.load_state_dict(reader.plain["scaler"])
    shared = [name for name in reader.shapes if name.startswith("strategy.")]
    job.strategy.load_shared_state({n.partition(".")[2]: reader.read(n) for n in shared}, checkpoint.step)
    own = f"rank.{job.place.rank}."
    mine = {name.removeprefix(own) for name in reader.shapes if name.startswith(own)}
    there = {name.split(".")[1] for name in reader.shapes if name.startswith("rank.")}
    is_same = checkpoint.trainer["world_size"] == job.place.ranks
    is_whole = reader.is_seen_by_all and len(there) == job.place.ranks  # all ranks' states, or no rank's state
    if is_same and is_whole:
        job.strategy.load_rank_state({name: reader.read(own + name) for name in mine})
    return list(_notes(job, reader, has_own=is_same and is_whole))


def all_shapes(job: TrainingJob, live: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name, those of all stages. Collective."""
    shapes = {name: tuple(value.shape) for name, value in live.items()}
    stages = exchange.gather(shapes) if job.place.pipeline > 1 else [shapes]
    return {name: tuple(shape) for stage in stages for name, shape in stage.items()}


def _notes(job: TrainingJob, reader: loader.CheckpointReader, *, has_own: bool) -> Iterator[str]:
    """Yield the state of ranks that is not continued exactly; `has_own`: each rank has loaded its own state."""
    is_local = facts_of(job.spec.training).averages_weights
    if job.own is not None and (job.own.parts or not job.own.is_torch) and reader.plain.get("own") is None:
        yield "the checkpoint lacks the state of your optimizer, or of those inside, which begins anew"
    kinds = {parts[3] for name in reader.shapes if (parts := name.split("."))[::2][:2] == ["rank", "local"]}
    if kinds and not (is_local and has_own):
        what = "weights" if "weight" in kinds else "optimizer states"
        yield f"the ranks had different {what}, and all ranks continue from the mean"
    has_residuals = any(name.startswith("rank.") and name.split(".")[2] == "residual" for name in reader.shapes)
    if has_residuals and (not has_own or job.spec.training.compression not in SPARSE):
        yield "the ranks' own state, residuals of compression, is dropped, and starts at zero"


def fill_module(
    job: TrainingJob, reader: loader.CheckpointReader, sources: Mapping[str, str], extra: Mapping[str, Any]
) -> None:
    """Fill the model's tensors from the saved tensors by `sources`, and load its extra state.

    Hooks of `state_dict` may return copies, and filling a copy changes nothing in the module: the module loads them.
    """
    module = job.strategy.module
    filled_in = {name: value for name, value in module.state_dict().items() if name in sources}
    reader.fill_all({sources[name]: value for name, value in filled_in.items()})
    live = {local_part(tensor).data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    copies = {n: v for n, v in filled_in.items() if v.numel() and local_part(v).data_ptr() not in live}
    if copies or extra:
        module.load_state_dict({**extra, **copies}, strict=False)


def load_optimizer(job: TrainingJob, reader: loader.CheckpointReader) -> None:
    """Load the optimizer's state, in tensors sharded like the parameters. Raises TaskError for other groups."""
    own, plain, state = job.own, reader.plain, getattr(job.optimizer, "state", {})
    names, named = saving.optimizer_names(job), {name: p for p, name in job.strategy.parameter_names().items()}
    groups, saved = job.optimizer.param_groups if names else [], plain["groups"]
    if len(saved) != len(groups):
        raise TaskError(f"the checkpoint's optimizer has {len(saved)} parameter groups, this one {len(groups)}")
    here = set(names.values())
    on_device = {names[p] for group in groups for p in group["params"] if group.get("fused") or group.get("capturable")}
    by_name = {full: full.removeprefix("optimizer.").rpartition(".")[::2] for full in reader.shapes}
    by_name = {full: of for full, of in by_name.items() if full.startswith("optimizer.") and of[0] in here}
    trees = plain.get("own") if own is not None else None
    about = {} if trees is None else trees["tensors"]
    for full, (name, key) in by_name.items():  # on the devices on which torch has them
        about.setdefault(full, [name, None, "cpu" if key == "step" and name not in on_device else "any"])
    read = {full: room(reader, full, kind, named) for full, kind in about.items()}
    reader.fill_all(read)
    if own is not None and trees is not None:
        own.load_dict(trees["dict"], read, named)
    for name, values in plain["state"].items():
        if name in here:
            state.setdefault(named[name], {}).update(values)
    for full, (name, key) in by_name.items():
        # State of the weight's type follows a changed type; other state, as fp32 averages of bf16 weights, does not.
        is_alike = key != "step" and read[full].dtype == reader.dtypes[f"model.{name}"]
        state.setdefault(named[name], {})[key] = read[full].to(named[name].dtype) if is_alike else read[full]
    if own is not None:  # else the present settings hold
        for group, loaded in zip(groups, saved, strict=True):
            lr = group.get("lr")
            group.update({**loaded, "params": group["params"]})
            if isinstance(lr, torch.Tensor) and isinstance(loaded["lr"], torch.Tensor):
                group["lr"] = lr.copy_(loaded["lr"])  # the optimizer's defaults share it
        if trees is not None:
            filled(own.optimizer, trees["tree"], read, named)
        own.load_lrs(trees)


def _difference(shapes: dict[str, tuple[int, ...]], saved: dict[str, tuple[int, ...]]) -> str | None:
    faults = {
        "it lacks": [name for name in shapes if name not in saved],
        "it has but this model lacks": [name for name in saved if name not in shapes],
        "the shape differs of": [f"{n} {saved[n]}, here {s}" for n, s in shapes.items() if saved.get(n, s) != s],
    }
    return "; ".join(f"{what} {first_of(names, 4)}" for what, names in faults.items() if names) or None


def _report(
    job: TrainingJob, checkpoint: folders.FoundCheckpoint | None, damaged: _Damaged, notes: list[str], load_s: float
) -> None:
    step, place = (checkpoint.step, str(checkpoint.path)) if checkpoint else (0, None)
    for path, fault in damaged:
        instead = f"using the checkpoint of step {step}" if checkpoint else "no checkpoint is left"
        text = f"checkpoint {path.name} is damaged ({fault}); {instead}, and {path.name} is set aside"
        emit("checkpoint", text, step=step, damaged=str(path), reason=fault)
    if checkpoint is None and _restarts() == 0 and job.spec.attempt == 1:
        return
    changed = differences(checkpoint.trainer, job.identity) if checkpoint else []
    changed += notes
    if job.task.optimizer is not None:
        but = "the new ones hold, but of your optimizer's groups only lr: the rest is the checkpoint's"
        changed = [text.replace("the new ones hold", but) for text in changed]
    origin = f"resuming from step {step} ({place})" if place else "there is no checkpoint: starting from step 0"
    text = f"{origin}; changed since: {'; '.join(changed)}" if changed else origin
    emit("restart", text, step=step, path=place, restarts=_restarts(), changed=changed, load_s=load_s)


def _restarts() -> int:
    """Return how often this attempt was restarted: by the agents, or by torchrun."""
    names = ("CLOUDTRAIN_RESTART", "TORCHELASTIC_RESTART_COUNT")
    return max(int(os.environ.get(name) or 0) for name in names)
