"""The task file: plain functions that define the training.

Required: `model(params)`; `dataset(params, split)`, split "train" or "eval" (None: the split does not exist);
`loss(model, batch)`, the mean over the batch or (sum, count). Optional: `optimizer(model, params)`; `schedule(step,
max_steps, params)`, the factor on the learning rate for the step counted from 0; `evaluate(model, batch)`, numbers by
name, each a mean over the batch or (sum, count); `outputs(model, batch)`, a test's {"target", "score"} or {"target",
"value"} with a row for each sample; `collate(samples)`; `sampler(dataset, params)` or `sampler(params)`, the indices of
an epoch in their order, or a weight for each sample; `blocks(model)`, the submodules that fsdp shards one by one;
`tensor_plan(model)`, the kinds of modules by name for tensor parallelism; `after_step(model, step)`, called after the
optimizer's step; `on_event(event, fields)`, called on rank 0 with every printed event, for a custom logger. `loss` and
`evaluate` may take a further argument `progress`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from ..errors import FormError, TaskError
from .data import INIT, Stream, mix, seed_all
from .generators import own_generators
from .settings import ScheduleSettings, TrainingSettings, suggest
from .strategies.facts import facts_of

REQUIRED = {"model": ("params",), "dataset": ("params", "split"), "loss": ("model", "batch")}
OPTIONAL = {
    "optimizer": ("model", "params"),
    "schedule": ("step", "max_steps", "params"),
    "evaluate": ("model", "batch"),
    "outputs": ("model", "batch"),
    "collate": ("samples",),
    "blocks": ("model",),
    "tensor_plan": ("model",),
    "on_event": ("event", "fields"),
    "after_step": ("model", "step"),
    "sampler": ("dataset", "params"),
}
_ONLY_RAISES = Dataset.__getitem__  # an IterableDataset inherits it
_MOST_HELD = 100_000  # samples of a stream that is held in memory


@dataclass
class TaskProgress:
    """The argument `progress` of `loss` and `evaluate`: steps done, epoch at the step's begin, last step."""

    step: int = 0
    epoch: int = 0
    max_steps: int = 1


@dataclass(frozen=True)
class Task:
    """The user's functions; `code_sha256` is the hash of the task file."""

    model: Callable[..., Any]
    dataset: Callable[..., Any]
    loss: Callable[..., Any]
    code_sha256: str
    optimizer: Callable[..., Any] | None = None
    schedule: Callable[..., Any] | None = None
    evaluate: Callable[..., Any] | None = None
    outputs: Callable[..., Any] | None = None
    collate: Callable[..., Any] | None = None
    blocks: Callable[..., Any] | None = None
    tensor_plan: Callable[..., Any] | None = None
    on_event: Callable[..., Any] | None = None
    after_step: Callable[..., Any] | None = None
    sampler: Callable[..., Any] | None = None
    progress: TaskProgress | None = None
    """Of a task whose `loss` or `evaluate` takes it."""

    @property
    def layout(self) -> dict[str, Any]:
        """The task's arguments of `wrap`, which spreads the model."""
        return {"blocks": self.blocks, "tensor_plan": self.tensor_plan, "has_optimizer": self.optimizer is not None}

    def check(self, settings: TrainingSettings) -> None:
        """Raise FormError if the task has a function that the settings exclude."""
        is_apart, has_servers = facts_of(settings).is_apart, facts_of(settings).has_servers
        if self.schedule is not None and (settings.schedule != ScheduleSettings() or has_servers):
            what = "strategy: async" if has_servers else "training.schedule"
            raise FormError(
                f"schedule(step, max_steps, params) of the task does not go with {what}; leave one of them out"
            )
        if self.optimizer is not None and has_servers:
            raise FormError("optimizer(model, params) does not go with strategy: async; set training.optimizer instead")
        if self.after_step is not None and (is_apart or settings.parallel.ranks > 1):
            where = f"strategy: {settings.strategy}" if is_apart else "parallel"
            why = "the ranks train apart" if is_apart else "a rank has a part of the model"
            cure = "leave out one of the two, or set strategy: ddp without parallel"
            raise FormError(f"after_step(model, step) does not go with {where}, under which {why}; {cure}")

    def make_dataset(self, params: dict[str, Any], split: str, seed: int, most: int | None = None) -> Any:
        """Return the split by index, and not empty, or None if the task lacks the split.

        A stream to train on is a `Stream`; of another split the first `most` items, or all, are read into a list.
        Each call of `dataset` finds all generators in the same state: a random partition is the same for all splits.
        """
        seed_all(mix(seed, INIT, 0), own_generators(self.dataset))
        data, call = self.dataset(params, split), f"dataset(params, {split!r})"
        if data is None:
            return None
        by_index = isinstance(data, Sized) and getattr(type(data), "__getitem__", None) not in (None, _ONLY_RAISES)
        if isinstance(data, IterableDataset) and not by_index:
            if split == "train":
                return Stream(data, seed)
            data = list(itertools.islice(Stream(data, seed).items(0), min(most or _MOST_HELD, _MOST_HELD) + 1))[:most]
            if len(data) > _MOST_HELD:
                raise FormError(
                    f"{call} is a stream of more than {_MOST_HELD:,} samples, which would be held in memory; end it "
                    "with itertools.islice, or set training.eval_batches"
                )
        elif not by_index:
            raise FormError(
                f"{call} returned a {type(data).__name__}, which has no length or no items by index, so no resume "
                "could be exact; return a map-style Dataset with __len__ and __getitem__, or a torch IterableDataset"
            )
        try:
            count = len(data)
        except Exception as error:
            what = f"{call} returned a {type(data).__name__} whose __len__ raises {error!r}"
            raise TaskError(f"{what}; return its number of items, or a torch IterableDataset") from error
        if not count:
            raise TaskError(f"{call} is empty; look at the path it reads and at params")
        return data


def load_task(target: str | Path, seed: int = 0) -> Task:
    """Return the functions of the task file; report all faults at once. Exceptions from the file propagate.

    The file's own random draws, such as a partition among its globals, belong to the seed.
    """
    path = Path(target).resolve()
    if not path.is_file():
        raise TaskError(f"task file {target} does not exist (looked for {path})")
    source = path.read_bytes()
    seed_all(mix(seed, INIT, 0))
    module = _import(path)
    faults: list[str] = []
    found = {name: getattr(module, name, None) for name in (*REQUIRED, *OPTIONAL)}
    timed = {name: call for name in ("loss", "evaluate") if callable(call := found[name]) and _takes(call, "progress")}
    progress = TaskProgress() if timed else None
    found |= {name: functools.partial(call, progress=progress) for name, call in timed.items()}
    public = [name for name, value in vars(module).items() if inspect.isfunction(value)]
    for name, arguments in (REQUIRED | OPTIONAL).items():
        call, signature = found[name], f"{name}({', '.join(arguments)})"
        if call is None and name in REQUIRED:
            faults.append(f"it has no function {signature}{suggest(name, public)}")
        elif call is not None and not callable(call):
            faults.append(f"`{name}` is a {type(call).__name__}; it must be a function {signature}")
        elif call is not None and name == "sampler" and _accepts(call, 1) and not _accepts(call, 2):
            found[name] = lambda _, params, call=call: call(params)
        elif call is not None and not _accepts(call, len(arguments)):
            faults.append(f"{name}{inspect.signature(call)} does not take {len(arguments)} arguments: {signature}")
    if faults:
        raise FormError(f"task file {path}: " + "; ".join(faults))
    code_sha256 = hashlib.sha256(source).hexdigest()
    return Task(**found, progress=progress, code_sha256=code_sha256)  # type: ignore[arg-type]


def _import(path: Path) -> ModuleType:
    # Imports work as beside a script, and classes pickle by the module's own name.
    sys.path.insert(0, str(path.parent))
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"cloudtrain_task_{path.stem}" if taken else path.stem
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise TaskError(f"task file {path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        raise TaskError(f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    return module


def _takes(call: Callable[..., Any], argument: str) -> bool:
    with contextlib.suppress(ValueError):  # a builtin without a signature
        return argument in inspect.signature(call).parameters
    return False


def _accepts(call: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(call).bind(*range(count))
    except ValueError:  # a builtin without a signature: the builtin's own error will do
        return True
    except TypeError:
        return False
    return True
