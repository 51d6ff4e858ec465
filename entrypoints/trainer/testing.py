"""The test of a task: figures of one or more sets of weights, on a split without influence on weights or settings.

The batches do not depend on the number of ranks, and the counts are integers (scores.py), so neither do the figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from .. import atomic_json
from ..checkpoints import folder as folders
from ..contract import EvaluateSettings, InitSettings
from ..errors import TaskError
from ..rank import exchange
from ..rank.agree import Agreement
from . import data, evaluate, initial, report, scores, splits
from .job import EXIT_DONE, EXIT_SAVED, RankContext, TrainingJob, TrainState, build
from .settings import Spec
from .strategies.facts import facts_of, together
from .task import Task

DEFAULT_BATCH = 32
_ROOM = 3300  # bytes of the event's fields, of 4096: the report draws them
_FAULT, _GONE = "cloudtrain/test/fault", "cloudtrain/test/gone"  # in the ranks' store
_LOOK_S, _LEAVE_S = 0.5, 20.0
_leaving = threading.Lock()
_HEAD = ("job", "split", "same_as_eval", "checkpoint", "step", "weights", "kind", "n")  # figures that always fit


@dataclass(frozen=True)
class Weights:
    """Weights to test: `checkpoint` best, last or step-N; `kind` average or trained; `place` puts them in the model."""

    checkpoint: str
    step: int | None
    kind: str
    place: Callable[[], AbstractContextManager[None]]


def require_split(job: TrainingJob) -> Any | None:
    """Return the split of the job's test, None without a test. Collective.

    Raises TaskError if the task has no such split, or returns the training split again.
    """
    if job.spec.evaluate is None:
        return None
    name, seed = job.spec.evaluate.split, job.spec.training.seed
    if job.spec.evaluate.predictions and job.task.outputs is None:
        raise TaskError("evaluate.predictions needs the task's `outputs(model, batch)`: docs/evaluate.md")
    try:
        found = job.task.make_dataset(job.spec.params, name, seed)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"evaluate: dataset(params, {name!r}) raised {type(error).__name__}: {error}; return a dataset for this "
            "split, or leave `evaluate` out"
        ) from error
    if found is None:
        raise TaskError(f"evaluate: there is no split {name!r}: dataset(params, {name!r}) returned None")
    if data.fingerprint(found, seed) == job.identity["dataset_fingerprint"]:
        raise TaskError(f"evaluate: dataset(params, {name!r}) is the training split: the figures would mean nothing")
    return found


def at_end(job: TrainingJob, progress: TrainState, split: Any, finish: Callable[[], None]) -> None:
    """Test the last weights, the average, and the best checkpoint after the last step. Collective.

    The model has other weights afterwards. A failed test is reported: the training is done, and stays so. After the
    fault of a single rank all ranks call `finish`, and leave: the others may wait for that rank for ever.
    """
    best = exchange.share(
        folders.best_step(job.folder) if job.place.is_head and job.spec.checkpoint.keep_best else None
    )
    name, kind = "best" if best == progress.step else "last", "average" if job.ema else "trained"
    candidates = [Weights(name, progress.step, kind, job.averaged)]
    if job.ema is not None:
        candidates.append(Weights("last", progress.step, "trained", contextlib.nullcontext))
    if best not in (None, progress.step):
        candidates.append(_saved(job, job.folder, "best", best, kind))
    prefers = "last" if _wanted(job.spec).checkpoint == "last" else "best"
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(job, finish, ended), name="test", daemon=True)
    watcher.start()
    try:
        _test(job, progress, split, candidates, prefers)
    except (TaskError, folders.CheckpointError) as error:  # on all ranks alike, or on rank 0 after the last exchange
        _say_failed(job, str(error))
    except Exception as error:
        _leave(job, finish, f"{type(error).__name__}: {error}")
    finally:
        ended.set()
        watcher.join(_LEAVE_S)


def _say_failed(job: TrainingJob, fault: str) -> None:
    text = f"the test on {_wanted(job.spec).split} failed: {fault}; the training is done, its weights are exported"
    report.say(job, "test", text, failed=fault[:500])


def _watch(job: TrainingJob, finish: Callable[[], None], ended: threading.Event) -> None:
    """Leave if another rank has left the test, until the test has ended here."""
    with contextlib.suppress(Exception):  # the store ends with rank 0's process, or with its node's
        while not ended.wait(_LOOK_S):
            if _store().check([_FAULT]):
                _leave(job, finish, "")


def _leave(job: TrainingJob, finish: Callable[[], None], fault: str) -> NoReturn:
    """End this rank's process as done. Rank 0 reports the first rank's fault, and leaves last."""
    _leaving.acquire()  # by the thread that comes first; the process ends with the lock
    store = _store()
    if not store.check([_FAULT]):  # a rank that loses its connection to a leaving rank comes later
        store.set(_FAULT, fault[:500])
    if job.place.is_head:
        _say_failed(job, store.get(_FAULT).decode())
        finish()
    gone, end_s = store.add(_GONE, 1), time.monotonic() + _LEAVE_S
    while job.place.is_head and gone < job.place.ranks and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
        gone = store.add(_GONE, 0)
    sys.stdout.flush()
    os._exit(EXIT_DONE)


def _store() -> Any:
    """Return the store by which the ranks have met; a wait in a collective does not hold it up."""
    return dist.distributed_c10d._get_default_store()


def only(spec: Spec, task: Task, place: RankContext, agreement: Agreement) -> int:
    """Test the weights of `init_from`, write the figures, and return the exit code. Nothing is trained or saved."""
    trained, size = spec.training, _batch_size(spec)
    whole = size * place.data_ranks * trained.parallel.pipeline  # a micro-batch for each stage
    training = dataclasses.replace(together(trained), ema_decay=None, compile=False)  # the same model on all ranks
    training = dataclasses.replace(training, global_batch_size=whole, micro_batch_size=size)
    spec = dataclasses.replace(spec, training=training)
    job = build(spec, task, place, agreement)
    split = require_split(job)
    splits.say_faults(job, split)
    progress, folder = TrainState(max_steps=1), Path(os.environ.get(initial.PLACE) or "")
    if not folder.name:
        raise TaskError(f"evaluate.only tests the weights of init_from, and {initial.PLACE} is not set")
    settings = spec.init_from or InitSettings()
    parent = initial.open_parent(job, folder, settings)
    progress.parent = parent.origin
    report.say_start(job, progress)
    step, name = parent.origin["step"], settings.checkpoint or "chosen"
    job.tell(TrainState(step or 0, max_steps=trained.max_steps or 1))
    if job.place.is_head and step is not None and name == "chosen":
        name = "best" if folders.best_step(Path(parent.origin["path"]).parent) == step else "last"
    kind = "average" if any(full.startswith("ema.") for full in parent.names.values()) else "trained"
    candidates = [Weights(name, step, kind, lambda: _filled(job, parent))]
    if kind == "average":
        raw = initial.open_parent(job, folder, settings, averaged=False)
        candidates.append(Weights(name, step, "trained", lambda: _filled(job, raw)))
    further = _further(folder, step) if job.place.is_head else []
    candidates += [_saved(job, folder, which, number, kind) for which, number in exchange.share(further)]
    if not _test(job, progress, split, candidates, name):
        return EXIT_SAVED
    report.write_outcome(job, progress, "done")
    return EXIT_DONE


def _further(folder: Path, step: int | None) -> list[tuple[str, int]]:
    """Return the best and the last checkpoint of a folder of checkpoints, without this step; none for other places."""
    steps = [each for each, _ in folders.list_steps(folder)] if step is not None and folder.is_dir() else []
    known = {"best": folders.best_step(folder), "last": max(steps, default=None)}
    return [(name, found) for name, found in known.items() if found in steps and found not in (None, step)]


def _saved(job: TrainingJob, folder: Path, name: str, step: int, kind: str) -> Weights:
    """Return a saved checkpoint in the folder as weights to test."""
    path = folder / folders.step_name(step)
    return Weights(name, step, kind, lambda: _filled(job, initial.open_parent(job, path, InitSettings())))


@contextlib.contextmanager
def _filled(job: TrainingJob, parent: initial.Parent) -> Iterator[None]:
    initial.fill(job, parent, InitSettings())
    yield


def _wanted(spec: Spec) -> EvaluateSettings:
    return spec.evaluate or EvaluateSettings()


def _batch_size(spec: Spec) -> int:
    return _wanted(spec).batch_size or spec.training.micro_batch_size or DEFAULT_BATCH


def _test(job: TrainingJob, progress: TrainState, split: Any, candidates: list[Weights], prefers: str) -> bool:
    """Test all weights in their order, and report those of the checkpoint `prefers`; return False after a stop."""
    size, name, tested = _batch_size(job.spec), _wanted(job.spec).split, []
    for each in candidates:
        with each.place(), evaluate.eval_mode(job):
            found = _figures(job, split, size)
        if found is None:
            report.say(job, "test", "stopped during the test: no figures", step=progress.step)
            return False
        tested.append({"checkpoint": each.checkpoint, "step": each.step, "weights": each.kind, **found})
    if not job.place.is_head:
        return True
    tested.sort(key=lambda each: each["checkpoint"] != prefers)  # stable: the average, which was evaluated, comes first
    chosen, compared = tested[0], [{k: v for k, v in each.items() if k not in _LONG} for each in tested]
    rows = chosen.pop("predictions", [])
    about = {"job": job.spec.job, "split": name, "batch_size": size, "parent": progress.parent}
    seed, held = job.spec.training.seed, job.eval_data
    is_eval = held is not None and data.fingerprint(held, seed) == data.fingerprint(split, seed)
    result = {**about, "same_as_eval": is_eval, **chosen, "compared": compared}
    if folder := os.environ.get("CLOUDTRAIN_OUTPUT_DIR"):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            if rows:
                lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
                (Path(folder) / f"predictions-{name}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
            atomic_json.write_json(Path(folder) / f"metrics-{name}.json", result)
        except OSError as error:
            raise TaskError(f"evaluate: the figures cannot be written: {error}") from error
    report.say(job, "test", _words(result), test=short(result))
    return True


_LONG = ("classes", "confusion", "calibration", "worst", "quantiles", "predictions")


def _figures(job: TrainingJob, split: Any, size: int) -> dict[str, Any] | None:
    """Return the figures of the present weights, on all ranks; None after a stop request. Collective."""
    place, outputs, kept = job.place, job.task.outputs, _wanted(job.spec).predictions
    counts: scores.ClassCounts | scores.Residuals | None = None
    means: list[tuple[dict[str, evaluate.Number], int]] = []
    fault: str | None = None
    is_lone = place.ranks == 1 or (facts_of(job.spec.training).is_whole and place.tensor == place.pipeline == 1)

    def measure(batch: Any, model: Any) -> Any:
        return evaluate.numbers(job, batch, model) if outputs is None else outputs(model, batch)

    def take(indices: list[int], weight: int, measured: Callable[[], Any]) -> None:
        nonlocal counts, fault
        try:
            found = measured()
            if outputs is None:
                means.append((found or {}, weight))
            elif weight and fault is None:
                counts = scores.counted(found, indices, counts, kept)
        except Exception as error:  # a TaskError on all ranks, after the last batch
            if not isinstance(error, TaskError) and not is_lone:
                raise  # the other ranks wait in the forward pass
            fault = fault or (str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}")

    if evaluate.visit(job, split, size, measure, take) is not None:
        return None
    if fault := next(filter(None, exchange.gather(fault)), None):
        raise TaskError(fault)
    if outputs is None:
        return {"kind": "means", "n": len(split), **evaluate.mean(means)}
    total = scores.summed(exchange.gather(counts and dataclasses.asdict(counts)))
    assert total is not None
    found = scores.class_figures(total) if isinstance(total, scores.ClassCounts) else scores.residual_figures(total)
    return found | {"predictions": scores.predictions(total, kept)}


def _words(result: dict[str, Any]) -> str:
    at = "" if result["step"] is None else f", step {result['step']}"
    text = f"test on {result['split']} ({result['n']} samples{at}): "
    if result["kind"] == "classification":
        text += f"accuracy {result['accuracy']:.4f} ({result['accuracy_low']:.4f} to {result['accuracy_high']:.4f}), "
        text += f"loss {result['loss']:.4g}"
    elif result["kind"] == "regression":
        text += f"MAE {result['mae']:.4g}, RMSE {result['rmse']:.4g}"
    else:
        text += ", ".join(f"{k} {v:.4g}" for k, v in result.items() if isinstance(v, float))
    return text + ("; this split is the eval split, which has chosen the checkpoint" if result["same_as_eval"] else "")


def short(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures in four digits, without the longest tables and the last metrics, to fit into an event line."""
    found: dict[str, Any] = report.rounded(result)
    found["worst"] = found.get("worst", [])[:10]
    columns = {"classes": ("precision", "recall", "f1", "support"), "calibration": ("count", "accuracy", "probability")}
    for table, keys in columns.items():
        found[table] = [[each[k] for k in keys] for each in found.get(table, [])]
    pairs = [(n, a, b) for a, row in enumerate(found.get("confusion", [])) for b, n in enumerate(row) if n and a != b]
    found["pairs"] = [list(each) for each in sorted(pairs, key=lambda each: (-each[0], each[1:]))[:20]]
    others = [name for name in found if name not in _HEAD]
    for name in ("confusion", "classes", "pairs", "worst", "compared", *reversed(others)):
        if len(json.dumps(found)) < _ROOM:
            break
        found.pop(name, None)  # the file of the figures has all
    return found
