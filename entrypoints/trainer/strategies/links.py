"""The connections between the stages of a pipeline: activations go forward, gradients go backward.

The generator's state travels with the activation. On CPUs the two are one message, if the activation has the size that
the trace of the model has found. A receive is posted before its message is needed: gloo's sender waits for it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...errors import TaskError
from .cut import Output
from .summation import begun

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 8
_SIZES = 8 * (_MOST_DIMS + 2)  # bytes of an activation's dimensions, type and shape
_ALIGNMENT = 64  # bytes
_VALUES = 1  # the tag of an activation behind its head: heads of later activations are already expected


@dataclass(frozen=True)
class Activation:
    """The output of the previous piece of the model, and the generators' states behind the piece; None: unknown."""

    tensor: torch.Tensor
    state: torch.Tensor | None

    def set_generators(self) -> None:
        """Continue with the random numbers of the previous piece."""
        if self.state is None:
            return
        cpu = len(torch.get_rng_state())
        torch.set_rng_state(self.state[:cpu].clone())
        if self.tensor.device.type == "cuda":
            states = self.state[cpu:].clone()
            torch.cuda.set_rng_state(states[: len(torch.cuda.get_rng_state(self.tensor.device))], self.tensor.device)


class Links:
    """The connections of a stage with its neighbours in a ring of ranks, by stage.

    `forward` and `backward` are process groups of the ranks, one for each direction. `around` are two more, for the
    messages between the last and the first stage: NCCL would order the messages of a pair of ranks in one group. `ends`
    has the first and the last stage only.
    """

    def __init__(self, stages: int, device: torch.device) -> None:
        """Connect this rank. All ranks call it."""
        each = dist.get_world_size() // stages
        rings = [list(range(first, dist.get_world_size(), each)) for first in range(each)]
        made = [([dist.new_group(ring) for _ in range(4)], dist.new_group([ring[0], ring[-1]])) for ring in rings]
        ranks = rings[dist.get_rank() % each]
        (forward, backward, *around), ends = made[dist.get_rank() % each]
        self.forward = forward
        self.number = ranks.index(dist.get_rank())
        is_first, is_last = self.number == 0, self.number == len(ranks) - 1
        self._from_previous, self._to_previous = around if is_first else (forward, backward)
        self._to_next, self._from_next = around if is_last else (forward, backward)
        self.ends: dist.ProcessGroup | None = ends if is_first or is_last else None
        self._device = device
        self._previous, self._next = ranks[self.number - 1], ranks[(self.number + 1) % len(ranks)]
        self._head_bytes = len(_head(torch.empty(0), device))
        self._activations: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._gradients: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []
        self._waited_s = 0.0
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def expect(self, traced: Output) -> None:
        """Begin to receive an activation of the previous stage; another shape than the traced is possible."""
        packet = torch.empty(self._head_bytes + self._inline_bytes(traced), dtype=torch.uint8)
        self._activations.append((begun(dist.irecv(packet, self._previous, self._from_previous)), packet))

    def take(self) -> Activation:
        """Return the expected activation."""
        work, packet = self._activations.popleft()
        self._wait(work)
        sizes = packet[:_SIZES].view(torch.int64).tolist()
        shape, dtype = sizes[2 : 2 + sizes[0]], _DTYPES[sizes[1]]
        inline = packet[self._head_bytes :]
        if len(inline) == math.prod(shape) * dtype.itemsize:
            received = inline.view(dtype).view(shape)
        else:
            received = torch.empty(shape, dtype=dtype, device=self._device)
            self._wait(begun(dist.irecv(received, self._previous, self._from_previous, _VALUES)), received)
        return Activation(received.requires_grad_(torch.is_grad_enabled()), packet[_SIZES : self._head_bytes])

    def give(self, output: torch.Tensor, traced: Output) -> None:
        """Send an activation to the next stage. Raises TaskError if its type cannot be sent."""
        head, values, inline = _head(output, self._device), output.detach().contiguous(), self._inline_bytes(traced)
        packet = torch.empty(len(head) + inline, dtype=torch.uint8)
        packet[: len(head)] = head
        if is_inline := values.nbytes == inline:
            packet[len(head) :] = values.view(-1).view(torch.uint8)
        self._send(packet, self._next, self._to_next)
        if not is_inline:
            self._send(values, self._next, self._to_next, _VALUES)

    def expect_gradient(self, output: torch.Tensor) -> None:
        """Begin to receive the gradient of an activation that the next stage got."""
        gradient = torch.empty(output.shape, dtype=output.dtype, device=output.device)  # contiguous
        self._gradients.append((begun(dist.irecv(gradient, self._next, self._from_next)), gradient))

    def take_gradient(self) -> torch.Tensor:
        """Return the expected gradient."""
        work, gradient = self._gradients.popleft()
        self._wait(work, gradient)
        return gradient

    def give_gradient(self, received: torch.Tensor) -> None:
        """Send the gradient of an activation to the previous stage."""
        gradient = torch.zeros_like(received) if received.grad is None else received.grad
        self._send(gradient.contiguous(), self._previous, self._to_previous)

    def flush(self) -> None:
        """Wait until the neighbours have received everything."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def waited_s(self) -> float:
        """Return the seconds in which training waited for the neighbours since the last call."""
        for begin, end in self._waits:
            end.synchronize()
            self._waited_s += begin.elapsed_time(end) / 1e3
        found, self._waited_s = self._waited_s, 0.0
        self._waits.clear()
        return found

    def _inline_bytes(self, traced: Output) -> int:
        """Return the bytes of an activation in the message of its head: 0 on a GPU, where heads go between CPUs."""
        return math.prod(traced.shape) * traced.dtype.itemsize if self._device.type == "cpu" else 0

    def _wait(self, work: dist.Work, tensor: torch.Tensor | None = None) -> None:
        """Wait for a tensor. In training, count the wait: on a GPU by its own clock, since the call returns at once."""
        if tensor is not None and tensor.device.type == "cuda" and torch.is_grad_enabled():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work.wait()
            end.record()
            self._waits.append((begin, end))
            return
        begin_s = time.perf_counter()
        work.wait()
        if self._device.type == "cpu" and torch.is_grad_enabled():
            self._waited_s += time.perf_counter() - begin_s

    def _send(self, tensor: torch.Tensor, target: int, group: dist.ProcessGroup, tag: int = 0) -> None:
        work = begun(dist.isend(tensor, target, group, tag))
        self._sends = [pair for pair in self._sends if not pair[0].is_completed()]
        self._sends.append((work, tensor))


def _head(output: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the bytes that precede an activation: its dimensions, type and shape, and the generators' states."""
    if output.dim() > _MOST_DIMS or output.dtype not in _DTYPES:
        raise TaskError(f"parallel.pipeline: a block returns {output.dtype} of {output.dim()} dimensions")
    shape = [output.dim(), _DTYPES.index(output.dtype), *output.shape, *[0] * (_MOST_DIMS - output.dim())]
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    parts = [torch.tensor(shape, dtype=torch.int64).view(torch.uint8), *states]
    padding = -sum(map(len, parts)) % _ALIGNMENT  # behind it the values have the alignment of their own memory
    return torch.cat([*parts, torch.empty(padding, dtype=torch.uint8)])
