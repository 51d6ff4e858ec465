"""A plain DDP loop, as a careful person writes it: what every ratio is taken to."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import workload
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train the spec's model, and say the loss as often as cloudtrain does."""
    spec = json.loads(Path(os.environ["CLOUDTRAIN_SPEC"]).read_text())
    dist.init_process_group("gloo")
    model, optimizer = build(spec)
    train(spec, model, optimizer)
    leave()


def build(spec: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model in DDP and its optimizer, as cloudtrain makes them."""
    torch.manual_seed(spec["training"]["seed"])
    model = DistributedDataParallel(workload.model(spec["params"]), gradient_as_bucket_view=True)
    settings = spec["training"]["optimizer"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["lr"], weight_decay=settings["weight_decay"], fused=True
    )
    return model, optimizer


def train(
    spec: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int = 0,
    save: Callable[[int], None] | None = None,
) -> None:
    """Train from the step to the last one, with a save where one is due."""
    max_steps, every = spec["training"]["max_steps"], spec["checkpoint"].get("every_steps")
    for done in steps(spec, model, optimizer, step):
        if done == max_steps:
            break
        if save and done % every == 0:
            save(done)


def steps(spec: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> Iterator[int]:
    """Take steps for as long as they are asked for; yield the number of each."""
    training, rank = spec["training"], dist.get_rank()
    max_steps, log_every = training["max_steps"], training["log_every"]
    for batch in _batches(spec):
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % log_every == 0 and rank == 0:
            print(f"step {step}/{max_steps} loss {loss.item():.4g}", flush=True)
        yield step


def _batches(spec: dict[str, Any]) -> Iterator[Any]:
    training, epoch = spec["training"], 0
    data = workload.dataset(spec["params"], "train")
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=training["seed"], drop_last=True)
    loader = DataLoader(data, training["micro_batch_size"], sampler=sampler, drop_last=True)
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def leave() -> None:
    """End the process where all ranks are done: tearing gloo down aborts or hangs one time in nine (torch 2.13)."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
