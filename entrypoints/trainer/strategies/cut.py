"""Cuts a model into the stages of a pipeline, by a forward pass that shows where its values are used."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...errors import TaskError
from ..settings import ParallelSettings
from .schedules import balanced

Probe = Callable[[nn.Module, torch.device], object]  # computes the loss of a micro-batch, on a device

_MEASUREMENTS = 3
_BEFORE, _BETWEEN = -1, -2  # phases of a forward pass that belong to no block


class Output(NamedTuple):
    """The output of a block."""

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool


@dataclass(frozen=True)
class Trace:
    """One forward pass: the blocks in the order of their calls, their outputs, and the uses of parameters and buffers.

    A phase is -1 before the first block, the number of a block, or the number of blocks after the last block.
    """

    blocks: tuple[nn.Module, ...]
    outputs: tuple[Output, ...]
    written: tuple[str, ...]  # the names of the saved buffers that the pass has changed
    phases: dict[str, frozenset[int]]
    parameters: tuple[str, ...]  # the names of the trainable parameters of the whole model, in order


class _Uses(TorchDispatchMode):
    """Notes the phases in which tensors of the model are used; raises TaskError if an activation skips a block.

    An activation is a value that depends on a parameter. Stages send each other only the outputs of blocks, so all
    other activations must be used in the phase that has made them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = _BEFORE
        self.output: torch.Tensor | None = None  # of the newest block
        self.version = 0  # of the output, changed by each operation in place
        self.found: dict[str, set[int]] = {}
        self.written: list[str] = []
        self._names: dict[int, list[str]] = {}  # a tied parameter has several names
        self._made: dict[int, tuple[int, torch.Tensor]] = {}  # the phase of each activation, which is kept alive
        self._parameters = {id(parameter) for parameter in module.parameters()}
        named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        for name, tensor in (pair for pairs in named for pair in pairs):
            self._names.setdefault(id(tensor), []).append(name)
            self.found[name] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_activation = False
        for value in tree_leaves((args, kwargs)):
            for name in self._names.get(id(value), ()):
                self.found[name].add(self.phase)
            made = self._made.get(id(value))
            is_activation = is_activation or made is not None or id(value) in self._parameters
            if made is not None and made[0] != self.phase and value is not self.output:
                self._check(made[0])
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written += self._names.get(id(value), ())
        result = func(*args, **(kwargs or {}))
        if is_activation:
            self._made |= {id(v): (self.phase, v) for v in tree_leaves(result) if isinstance(v, torch.Tensor)}
        return result

    def _check(self, made: int) -> None:
        if (made, self.phase) != (_BEFORE, 0):
            place = {_BEFORE: "before the blocks", _BETWEEN: "between two blocks"}
            raise TaskError(
                f"parallel.pipeline: a value from {place.get(made, f'block {made}')} is used again in a later block or "
                "after the blocks, and stages pass on only the output of each block; set parallel.pipeline: 1"
            )


def trace(module: nn.Module, blocks: Sequence[nn.Module], run: Callable[[nn.Module], object]) -> Trace:
    """Run the forward pass once on tensors without data, and return its trace. Raises TaskError.

    `run` calls the task's loss. The blocks must form a chain: each is called once, and gets the output of the previous.
    """
    names = {part: name for name, part in module.named_modules()}
    uses, called = _Uses(module), list[nn.Module]()
    outputs: list[Output] = []

    def follow(block: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if block in called:
                raise TaskError(f"parallel.pipeline: {names[block]} is called twice in one forward pass")
            if uses.output is not None and uses.output._version != uses.version:
                raise TaskError(
                    f"parallel.pipeline: the output of {names[called[-1]]} is changed in place before {names[block]}; "
                    "use an operation that returns a new tensor"
                )
            if called and not (args and args[0] is uses.output):
                raise TaskError(
                    f"parallel.pipeline: the first argument of {names[block]} is not the output of "
                    f"{names[called[-1]]}, so the model cannot be cut between them; write blocks(model) in the task"
                )
            uses.phase = len(called)
            called.append(block)
            output = own(*args, **kwargs)
            if not isinstance(output, torch.Tensor):
                raise TaskError(f"parallel.pipeline: {names[block]} returns a {type(output).__name__}, not a tensor")
            uses.output, uses.version = output, output._version
            outputs.append(Output(output.shape, output.dtype, output.requires_grad))
            uses.phase = len(blocks) if len(called) == len(blocks) else _BETWEEN
            return output

        return forward

    try:
        fakes = [parameter.fake_mode for parameter in module.parameters() if isinstance(parameter, FakeTensor)]
        mode = fakes[0] if fakes else FakeTensorMode(allow_non_fake_inputs=True)
        # A counter that is a single number changes even without data.
        with _replaced(module, {block: follow(block, block.forward) for block in blocks}), mode, uses:
            run(module)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"parallel.pipeline: the forward pass cannot be traced without data: {type(error).__name__}: {error}"
        ) from error
    return _concluded(module, blocks, called, outputs, uses)


def _concluded(
    module: nn.Module, blocks: Sequence[nn.Module], called: list[nn.Module], outputs: list[Output], uses: _Uses
) -> Trace:
    """Return the trace after the pass. Raises TaskError if the pass has left out a block, or used parts between two."""
    names = {part: name for name, part in module.named_modules()}
    if len(called) < len(blocks):
        missing = next(names[block] for block in blocks if block not in called)
        raise TaskError(f"parallel.pipeline: the forward pass does not call {missing}; write blocks(model) in the task")
    between = next((name for name, _ in module.named_parameters() if _BETWEEN in uses.found[name]), None)
    if between is not None:
        raise TaskError(f"parallel.pipeline: {between} is used between two blocks; write blocks(model) in the task")
    saved = module.state_dict(keep_vars=True)
    return Trace(
        blocks=tuple(called),
        outputs=tuple(outputs),
        written=tuple(name for name in uses.written if name in saved),
        phases={name: frozenset(found) for name, found in uses.found.items()},
        parameters=tuple(name for name, p in module.named_parameters() if p.requires_grad),
    )


def cut(settings: ParallelSettings, blocks: int, times: Sequence[float]) -> list[int]:
    """Return the first block of each piece: a stage, or a chunk of a stage. `times` are the blocks', for `timed`.

    `even` gives the rest of the division to the first pieces. Raises TaskError.
    """
    pieces = settings.pipeline * settings.chunks
    if blocks < pieces:
        chunks = f" x parallel.chunks {settings.chunks}" if settings.chunks > 1 else ""
        raise TaskError(
            f"parallel.pipeline {settings.pipeline}{chunks} needs {pieces} blocks, but the model has {blocks}; set "
            "fewer, or write blocks(model) in the task, which returns smaller blocks"
        )
    if settings.cut == "timed":
        return balanced(times, pieces)
    if settings.cut == "even":
        each, rest = divmod(blocks, pieces)
        return [piece * each + min(piece, rest) for piece in range(pieces)]
    starts = [0, *settings.cut]
    if len(starts) != pieces or sorted(set(starts)) != starts or starts[-1] >= blocks:
        raise TaskError(
            f"parallel.cut {list(settings.cut)} must be {pieces - 1} rising numbers from 1 to {blocks - 1}: the first "
            f"block of each later {'stage' if settings.chunks == 1 else 'chunk'}"
        )
    return starts


def block_times(
    module: nn.Module, blocks: Sequence[nn.Module], run: Probe, device: torch.device, *, recomputes: bool
) -> list[float]:
    """Return the seconds of a forward and backward pass through each block, on the input that the block really gets.

    `run` calls the task's loss on a batch on the device. The code before the blocks counts for the first block,
    the code after them for the last: three times its forward pass. The whole model may not fit on the device, so each
    block is there only during its measurement. The shortest of several measurements counts. Parameters and buffers
    keep their values.
    """
    inside = {id(tensor) for block in blocks for tensor in (*block.parameters(), *block.buffers())}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in inside:
            tensor.data = tensor.data.to(device)
    outputs: dict[nn.Module, torch.Tensor] = {}
    times: dict[nn.Module, float] = {}
    clock: list[float] = []  # when the first block begins, and when each block ends

    def timed(block: nn.Module, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        clock.append(now_s(device))
        if block not in outputs:
            times[block], outputs[block] = _time(block, forward, args, kwargs, device, recomputes)
        clock.append(now_s(device))
        return outputs[block]

    around = []
    forwards = {block: functools.partial(timed, block, block.forward) for block in blocks}
    with _replaced(module, forwards), torch.no_grad():
        for _ in range(1 + _MEASUREMENTS):  # the first run measures the blocks, the others only the code around
            clock[:] = [now_s(device)]
            run(module, device)
            around.append((clock[1] - clock[0], now_s(device) - clock[-1]))
    before_s, behind_s = (3 * min(parts) for parts in zip(*around[1:], strict=True))
    found = [times[block] for block in blocks]
    found[0] += before_s
    found[-1] += behind_s
    return found


def _time(
    block: nn.Module,
    forward: Callable[..., torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    recomputes: bool,
) -> tuple[float, torch.Tensor]:
    """Return the shortest time of a block, and its output."""
    home = next((parameter.device for parameter in block.parameters()), device)
    block.to(device)
    shortest_s = math.inf
    for _ in range(1 + _MEASUREMENTS):  # the first warms caches
        first = args[0].detach().requires_grad_(args[0].is_floating_point())
        begin_s = now_s(device)
        with torch.enable_grad():
            output = forward(first.clone(), *args[1:], **kwargs)  # the block may change its input in place
        middle_s = now_s(device)
        output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]
        end_s = now_s(device)
        shortest_s = min(shortest_s, end_s - begin_s + recomputes * (middle_s - begin_s))
    for parameter in block.parameters():
        parameter.grad = None
    block.to(home)
    return shortest_s, output.detach()


@contextlib.contextmanager
def _replaced(module: nn.Module, forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace forward passes of blocks; at the end restore them, the buffers' values and the generators."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        for block, forward in forwards.items():
            block.forward = forward
        with torch.random.fork_rng():
            yield
    finally:
        for block in forwards:
            del block.forward
        for buffer, values in kept:
            buffer.copy_(values)


def now_s(device: torch.device) -> float:
    """Return the time after all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def keep_stage(
    module: nn.Module, found: Trace, starts: Sequence[int], stages: int, stage: int, device: torch.device
) -> tuple[str, ...]:
    """Remove the parameters and saved buffers of the other stages from the module.

    Return the names of the parameters that the first and the last stage share, such as a tied embedding. A removed
    parameter leaves a placeholder of the same shape without memory, because code before the blocks still runs; a
    removed buffer leaves its values, from which such code may make masks or positions. Raises TaskError if other stages
    would share a parameter.
    """
    blocks, last = len(found.blocks), stages - 1
    inside = {
        id(tensor): number
        for number, block in enumerate(found.blocks)
        for tensor in (*block.parameters(), *block.buffers())
    }
    stage_of = [(sum(start <= number for start in starts) - 1) % stages for number in range(blocks)]
    shared = []
    for part_name, part in list(module.named_modules()):
        for kind in (part._parameters, part._buffers):
            for name, tensor in list(kind.items()):
                if tensor is None or name in part._non_persistent_buffers_set:
                    continue
                full = f"{part_name}.{name}".lstrip(".")
                # The traced pass may have skipped a part, as stochastic depth does.
                phases = found.phases.get(full) or frozenset({inside.get(id(tensor), _BEFORE)})
                users = {0 if n < 0 else last if n >= blocks else stage_of[n] for n in phases}
                if kind is part._buffers:
                    users = {min(users)}
                elif len(users) > 1:
                    if users != {0, last}:
                        raise TaskError(
                            f"parallel.pipeline: {full} is used in stages {sorted(users)}; only the first and the "
                            "last stage can share a parameter: change parallel.cut"
                        )
                    shared.append(full)
                if stage not in users:
                    del kind[name]
                    empty = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
                    part.__dict__[name] = tensor.to(device) if kind is part._buffers else empty
    return tuple(shared)
