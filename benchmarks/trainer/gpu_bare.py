"""A plain bf16 loop on GPUs, by DDP or FSDP2, compiled or not; on CPUs where there are none, to test itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import workload
from bare import leave
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train the spec's model."""
    spec = json.loads(Path(os.environ["CLOUDTRAIN_SPEC"]).read_text())
    training, settings = spec["training"], spec["training"]["optimizer"]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(training["seed"])
    is_ddp = training["strategy"] == "ddp"
    model = (_ddp if is_ddp else _fsdp)(workload.model(spec["params"]).to(device), training.get("compile", False))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["lr"], weight_decay=settings["weight_decay"], fused=True
    )
    data = workload.dataset(spec["params"], "train")
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=training["seed"], drop_last=True)
    size, pinned = training["micro_batch_size"], device.type == "cuda"
    loader = DataLoader(data, size, sampler=sampler, drop_last=True, pin_memory=pinned)
    step, epoch = 0, 0
    while step < training["max_steps"]:
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = [column.to(device, non_blocking=True) for column in batch]
            with torch.autocast(device.type, torch.bfloat16, enabled=is_ddp):
                loss = workload.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % training["log_every"] == 0 and dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4g}", flush=True)
            if step == training["max_steps"]:
                break
        epoch += 1
    leave()


def _ddp(module: nn.Module, is_compiled: bool) -> nn.Module:
    ids = [torch.cuda.current_device()] if torch.cuda.is_available() else None
    model = DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    return torch.compile(model) if is_compiled else model


def _fsdp(module: nn.Module, is_compiled: bool) -> nn.Module:
    """Return the module sharded by layer; compiled by layer too, which is what keeps the gathers apart."""
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    outer = MixedPrecisionPolicy(inner.param_dtype, inner.reduce_dtype, output_dtype=torch.float32)
    for block in workload.blocks(module):
        if is_compiled:
            block.compile()
        fully_shard(block, mp_policy=inner)
    return fully_shard(module, mp_policy=outer)


if __name__ == "__main__":
    main()
