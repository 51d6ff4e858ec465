"""A plain 1F1B loop over isend and irecv, as a careful person writes it for a model whose shapes are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import bare
import torch
import torch.distributed as dist
import workload
from torch import nn
from torch.nn import functional as F


class Start(nn.Module):
    """The embeddings of a GPT."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.token, self.position = gpt.token, gpt.position

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position


def build(spec: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return this rank's stage of the GPT, with an equal share of the blocks, and its optimizer."""
    torch.manual_seed(spec["training"]["seed"])
    gpt, rank, ranks = workload.model(spec["params"]), dist.get_rank(), dist.get_world_size()
    each = len(gpt.blocks) // ranks
    head = [Start(gpt)] if rank == 0 else []
    tail = [gpt.norm, gpt.head] if rank == ranks - 1 else []
    stage = nn.Sequential(*head, *gpt.blocks[rank * each : (rank + 1) * each], *tail)
    return stage, bare.adamw(spec, [list(stage.parameters())])


def steps(spec: dict[str, Any], stage: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Take steps for as long as they are asked for; yield the number of each."""
    training, sizes = spec["training"], spec["params"]["gpt"]
    shape = training["micro_batch_size"], sizes["tokens"], sizes["width"]
    count, is_last = training["global_batch_size"] // shape[0], dist.get_rank() == dist.get_world_size() - 1
    batches, step = bare.batches(spec), 0
    while True:
        loss = _passes(stage, batches, shape, count)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % training["log_every"] == 0 and is_last:
            print(f"step {step}/{training['max_steps']} loss {loss.item():.4g}", flush=True)
        yield step


def _passes(stage: nn.Module, batches: Iterator[Any], shape: tuple[int, ...], count: int) -> torch.Tensor:
    """Run the forward and backward passes of a step, and return the loss, which the last stage knows."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    activations, gradients = _received(shape, rank - 1, count), _received(shape, rank + 1, count)
    waiting: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
    sends, total, ahead = [], torch.zeros(()), last - rank
    for number in range(count + ahead):
        if number < count:
            (tokens,) = next(batches)
            x = next(activations).requires_grad_() if rank else tokens[:, :-1]
            y = stage(x)
            if rank < last:
                sends.append(dist.isend(y.detach(), rank + 1))
            else:
                y = F.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten()) / count
                total += y.detach()
            waiting.append((x, y))
        if number >= ahead:
            x, y = waiting.popleft()
            y.backward(next(gradients) if rank < last else None)
            if rank:
                sends.append(dist.isend(x.grad, rank - 1))
    for send in sends:
        send.wait()
    return total


def _received(shape: tuple[int, ...], source: int, count: int) -> Iterator[torch.Tensor]:
    """Yield the tensors of a neighbour. A receive is posted one tensor ahead: gloo's sender waits for the receive."""
    posted: deque[tuple[torch.Tensor, Any]] = deque()
    for number in range(count + 1):
        if number < count:
            buffer = torch.empty(shape)
            posted.append((buffer, dist.irecv(buffer, source)))
        if number:
            buffer, arrival = posted.popleft()
            arrival.wait()
            yield buffer
