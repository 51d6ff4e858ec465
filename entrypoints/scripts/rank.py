"""The setup of a script's or module's rank, for the rank's shell (worker.py)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from ..contract import JobSpec
from . import meeting, streams, trackers, trainers
from .steps import Steps
from .trainers import Stopping

_AfterImport = Callable[[ModuleType], None]  # an action that runs after the script imports a library
# Long imports, which leave no garbage: the search for garbage is a quarter of their 1.9 s of processor time (torch
# 2.13, Python 3.11). DistributedDataParallel imports the second module.
_LONG = {"torch", "torch._dynamo"}


def begin(kind: str) -> None:
    """Read steps from the script's output, record that the ranks met, add callbacks to Trainers."""
    path = os.environ.get("CLOUDTRAIN_SPEC")
    spec = JobSpec.load(json.loads(Path(path).read_text()) if path else {})
    run = replace(spec.run, kind=kind)
    steps = Steps(int(os.environ.get("RANK", "0")), dict(run.progress or {}), spec.hang_timeout_s or math.inf)
    stopping = Stopping(run.on_stop == "save")
    ranks = meeting.expect(run)
    _set_lightning()
    streams.watch(steps)
    actions: dict[str, _AfterImport] = {
        "transformers.trainer": functools.partial(trainers.hugging_face, steps=steps, stopping=stopping),
        "lightning.pytorch.trainer.trainer": functools.partial(trainers.lightning, steps=steps, stopping=stopping),
        "pytorch_lightning.trainer.trainer": functools.partial(trainers.lightning, steps=steps, stopping=stopping),
    }
    if os.environ.get("CLOUDTRAIN_TRACKED_AS") and os.environ.get("RANK") == "0":
        actions["wandb.sdk.wandb_init"] = trackers.use_once
        if "MLFLOW_RUN_ID" not in os.environ:
            actions["mlflow.tracking.client"] = trackers.go_on
    if ranks:
        actions["accelerate.state"] = _set_accelerate
        actions["deepspeed.constants"] = _set_deepspeed
        actions["torch.distributed.distributed_c10d"] = functools.partial(meeting.watch_groups, ranks=ranks)
        atexit.register(meeting.report_missing_group, ranks)
    for name in actions.keys() & sys.modules.keys():  # imported already
        _run_action(actions.pop(name), sys.modules[name])
    watch_imports(actions)
    if ranks or stopping.is_wanted:
        threading.Thread(target=_warn, args=(ranks, stopping), daemon=True).start()


def watch_imports(actions: dict[str, _AfterImport]) -> None:
    """Run the actions, by the names of modules, after the modules' imports; shorten the imports of _LONG."""
    sys.meta_path.insert(0, _Finder(actions))


def _set_accelerate(module: ModuleType) -> None:
    """Make Accelerate, and Hugging Face's Trainer with it, join all ranks on the CPU: by default each trains alone."""
    import torch

    accelerator = getattr(torch, "accelerator", torch.cuda)  # torch.accelerator is new in torch 2.6
    if not accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _set_deepspeed(module: ModuleType) -> None:
    """Set the variables that DeepSpeed's own launcher adds to torchrun's."""
    for name, ours in (("CROSS_RANK", "NODE_RANK"), ("CROSS_SIZE", "NUM_NODES")):
        os.environ.setdefault(name, os.environ[f"CLOUDTRAIN_{ours}"])
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])


def _set_lightning() -> None:
    """Give Lightning's Trainer (PL_TRAINER_) and Fabric (LT_) the number of nodes and ranks in their variables."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    nodes = str(int(os.environ.get("WORLD_SIZE", "1")) // int(local))
    for name, value in (("NUM_NODES", nodes), ("DEVICES", local)):
        os.environ.setdefault(f"PL_TRAINER_{name}", value)
        os.environ.setdefault(f"LT_{name}", value)


def _warn(ranks: int, stopping: Stopping) -> None:
    """Warn after a minute (CLOUDTRAIN_WARN_S: other seconds) of ranks alone, and of a save without a Trainer."""
    wait_s = float(os.environ.get("CLOUDTRAIN_WARN_S", meeting.WAIT_S))
    time.sleep(wait_s)
    while meeting.is_compiling():
        time.sleep(wait_s)
    if ranks and (why := meeting.missing_group(ranks)) is not None:
        words = f"this rank has joined no process group of {ranks} ranks after {wait_s:.0f} s"
        streams.say(f"cloudtrain: warning: {words}; {why}\n")
        meeting.report_missing_group(ranks)
    if stopping.is_wanted and not stopping.has_trainer:
        words = "on_stop: save has found no Trainer of Hugging Face or Lightning: cloudtrain cannot save at a stop"
        streams.say(f"cloudtrain: warning: {words}\n")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module as usual, and runs its action, by the module's full name, after the module's code.

    No garbage is collected during an import of _LONG.
    """

    def __init__(self, actions: dict[str, _AfterImport]) -> None:
        self._actions = actions
        self._finding: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (name not in self._actions and name not in _LONG) or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            with _no_collection() if name in _LONG else contextlib.nullcontext():
                execute(module)
            _run_action(self._actions.pop(name, None), module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile; the objects made meanwhile then count as old, as if they had been searched."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else the script has frozen objects, which have to stay so
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()


def _run_action(action: _AfterImport | None, module: ModuleType) -> None:
    """Run the action; a fault, for example with a new version of the library, must not break the script's import."""
    try:
        if action is not None:
            action(module)
    except Exception as error:
        print(f"cloudtrain: warning: {module.__name__} is used without cloudtrain's callback: {error!r}", flush=True)
