"""A plain loop with DDP, or torch's parallelize_module, as a careful person writes it: what ratios are taken to."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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
    """Return the model, in DDP or split over all ranks, and its optimizer, as cloudtrain makes them."""
    torch.manual_seed(spec["training"]["seed"])
    model = workload.model(spec["params"])
    if "parallel" in spec["training"]:
        groups = _split(model)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        groups = [list(model.parameters())]
    return model, adamw(spec, groups)


def adamw(spec: dict[str, Any], groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the optimizer of the spec."""
    settings = spec["training"]["optimizer"]
    return torch.optim.AdamW(
        [{"params": group} for group in groups], lr=settings["lr"], weight_decay=settings["weight_decay"], fused=True
    )


def _split(model: nn.Module) -> list[list[nn.Parameter]]:
    """Split each layer over all ranks; return the split parameters, and the rest: fused AdamW takes no mixture."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = dict.fromkeys(("q", "k", "v", "mlp.0"), ColwiseParallel) | dict.fromkeys(("o", "mlp.2"), RowwiseParallel)
    for block in model.blocks:
        parallelize_module(block, mesh, {name: kind() for name, kind in plan.items()})
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return [split, [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]]


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
    for batch in batches(spec):
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % log_every == 0 and rank == 0:
            print(f"step {step}/{max_steps} loss {loss.item():.4g}", flush=True)
        yield step


def batches(spec: dict[str, Any]) -> Iterator[Any]:
    """Yield this rank's micro-batches without end."""
    training, epoch = spec["training"], 0
    data = workload.dataset(spec["params"], "train")
    alone = {"num_replicas": 1, "rank": 0} if "parallel" in training else {}  # ranks that share a model share samples
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=training["seed"], drop_last=True, **alone)
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
