"""State of a task that no checkpoint has: what changes in both of the first two steps, in globals and attributes."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import TaskError
from ..format import first_of
from ..rank.exchange import local_part
from .generators import is_library, search, walk
from .job import TrainingJob
from .own_optimizer import Encoder
from .strategies.buffers import checksum

_MOST_BYTES = 1 << 22  # of a tensor that is compared by value; of a larger tensor the changes in place count
_ENTERED = (nn.Module, type, dict, list, tuple, deque, types.FunctionType, types.MethodType, functools.partial)
_CHANGES = """warning: each step changes {}, and no checkpoint has the value: a resume begins with the first value \
again, and the training differs if it reads that. Make tensors buffers of the model (register_buffer), and read \
progress.step in place of a counter; figures for a log may stay"""
_LATE = """warning: the first step makes a random generator, which no seed reaches in the first step of each start: \
make it in model(params), or at the top of the task file"""


def watch(job: TrainingJob) -> Iterator[None]:
    """Look at the state before the first step, and at each of two further calls of `next`, and say what no resume has.

    Raises TaskError for parameters: a teacher or an average is more than a figure for a log.
    """
    seen, made = [_state(job)], list(search(job.roots))
    job.generators[:] = made
    for _ in range(2):
        yield
        job.generators[:] = search(job.roots)
        if job.own is not None:
            job.own.check(job.strategy.parameter_names())
        seen.append(_state(job))
    first, second, third = seen
    changed = [at for at, now in third.items() if first.get(at) != second.get(at, now) != now]
    if lost := [at for at in changed if third[at][0]]:
        raise TaskError(
            f"each step changes {first_of(lost, 4)}, parameters outside of the model, and no checkpoint would have "
            "them: make their module a part of the model in model(params), as in self.teacher = ..."
        )
    if changed and job.place.is_head:
        print(_CHANGES.format(first_of(changed, 4)), flush=True)
    if job.generators != made and job.place.is_head:
        print(_LATE, flush=True)


def _state(job: TrainingJob) -> dict[str, tuple[bool, Any]]:
    """Return, by place, whether a value is a parameter, and what shows that it changes."""
    task, module = job.task, job.strategy.module
    state, found = module.state_dict(keep_vars=True), dict[str, tuple[bool, Any]]()  # a hook may give copies
    own = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    saved = [*state.values(), *(tensor for name, tensor in own if name in state)]
    known = set(map(id, [*saved, *(Encoder(job.own, {}).tensors.values() if job.own else ())]))
    functions = {name: getattr(task, name) for name in ("loss", "evaluate", "after_step", "schedule", "collate")}
    roots = {"model": module, **functions, **_of_optimizer(job, module)}

    def is_of_task(value: Any) -> bool:
        return isinstance(value, _ENTERED) or not is_library(str(type(value).__module__))

    for place, value in walk(roots, skip=[task.progress, job.optimizer], enters=is_of_task):
        if isinstance(value, (int, float, str)):
            found[place] = False, value
        elif isinstance(value, (list, deque)):
            found[place] = False, len(value)
        elif isinstance(value, torch.Tensor) and id(value) not in known and value.grad_fn is None:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # without values, or of an unknown layout
                found[place] = isinstance(value, nn.Parameter), _sign(value)
    return found


def _of_optimizer(job: TrainingJob, module: nn.Module) -> dict[str, Any]:
    """Return where a task's optimizer may keep state beside itself: code, hooks, attributes of parameters."""
    if job.own is None:
        return {}
    parts = [job.optimizer, *job.own.parts]
    hooks = [getattr(part, f"_optimizer_step_{when}_hooks", None) for part in parts for when in ("pre", "post")]
    code = [type(part) for part in parts if not is_library(type(part).__module__)]
    of_parameters = [{n: value for n, value in vars(p).items() if not n.startswith("_")} for p in module.parameters()]
    return {"optimizer": [*code, *hooks], "p": [each for each in of_parameters if each]}


def _sign(tensor: torch.Tensor) -> Any:
    part = local_part(tensor.detach())
    by_value = part.nbytes <= _MOST_BYTES and not isinstance(tensor, nn.Parameter)
    return checksum(part) if by_value else (part.data_ptr(), tensor._version)
