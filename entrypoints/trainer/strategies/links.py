"""The connections between the stages of a pipeline: activations go forward, gradients go backward.

The generator's state travels with the activation. Receives block; sends are asynchronous.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer.strategies.cut import Output

__all__ = ["Activation", "Links"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 8


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
            torch.cuda.set_rng_state(self.state[cpu:].clone(), self.tensor.device)


class Links:
    """The connections of a stage with its neighbours in a ring of `ranks`, by stage.

    `forward` and `backward` are process groups of the ranks, one for each direction; `ends`, of the first and the last
    stage only.
    """

    def __init__(
        self,
        ranks: list[int],
        forward: dist.ProcessGroup,
        backward: dist.ProcessGroup,
        ends: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.forward, self.backward, self.ends = forward, backward, ends
        self.number = ranks.index(dist.get_rank())
        self._device = device
        self._previous, self._next = ranks[self.number - 1], ranks[(self.number + 1) % len(ranks)]
        self._head_bytes = _head(torch.empty(0), device).numel()
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []
        self._waited_s = 0.0
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @classmethod
    def create(cls, stages: int, device: torch.device) -> Links:
        """Return the connections of this rank. All ranks call it."""
        each, found = dist.get_world_size() // stages, None
        for first in range(each):
            line = list(range(first, dist.get_world_size(), each))
            forward, backward, ends = dist.new_group(line), dist.new_group(line), dist.new_group([line[0], line[-1]])
            if dist.get_rank() in line:
                is_end = dist.get_rank() in (line[0], line[-1])
                found = cls(line, forward, backward, ends if is_end else None, device)
        assert found is not None
        return found

    def take(self, traced: Output) -> Activation:
        """Return the next activation of the previous stage. A shorter batch has another shape than the traced."""
        del traced
        head = torch.empty(self._head_bytes, dtype=torch.uint8)
        self._receive(head, self._previous, self.forward)
        sizes = head[: 8 * (_MOST_DIMS + 2)].view(torch.int64).tolist()
        dims, dtype = sizes[0], _DTYPES[sizes[1]]
        received = torch.empty(sizes[2 : 2 + dims], dtype=dtype, device=self._device)
        self._receive(received, self._previous, self.forward)
        return Activation(received.requires_grad_(torch.is_grad_enabled()), head[8 * (_MOST_DIMS + 2) :])

    def give(self, output: torch.Tensor) -> None:
        """Send an activation to the next stage. Raises TaskError if its type cannot be sent."""
        self._send(_head(output, self._device), self._next, self.forward)
        self._send(output.detach().contiguous(), self._next, self.forward)

    def take_gradient(self, output: torch.Tensor) -> torch.Tensor:
        """Return the gradient of an activation that the next stage got."""
        gradient = torch.empty(output.shape, dtype=output.dtype, device=output.device)  # contiguous
        self._receive(gradient, self._next, self.backward)
        return gradient

    def give_gradient(self, received: torch.Tensor) -> None:
        """Send the gradient of an activation to the previous stage."""
        gradient = torch.zeros_like(received) if received.grad is None else received.grad
        self._send(gradient.contiguous(), self._previous, self.backward)

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

    def _receive(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
        """Receive a tensor. In training, count the wait: on a GPU by its own clock, since the call returns at once."""
        if tensor.device.type == "cuda" and torch.is_grad_enabled():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            dist.recv(tensor, source, group)
            end.record()
            self._waits.append((begin, end))
            return
        begin_s = time.perf_counter()
        dist.recv(tensor, source, group)
        if self._device.type == "cpu" and torch.is_grad_enabled():
            self._waited_s += time.perf_counter() - begin_s

    def _send(self, tensor: torch.Tensor, target: int, group: dist.ProcessGroup) -> None:
        work = dist.isend(tensor, target, group)
        assert work is not None
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
    return torch.cat([torch.tensor(shape, dtype=torch.int64).view(torch.uint8), *states])
