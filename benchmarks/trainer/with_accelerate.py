"""The same training with Accelerate: its documented loop, nothing switched on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import workload
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from bare import leave
from torch.utils.data import DataLoader


def main() -> None:
    """Train the spec's model."""
    spec = json.loads(Path(os.environ["CLOUDTRAIN_SPEC"]).read_text())
    training = spec["training"]
    settings = training["optimizer"]
    tuned = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)] if "BENCH_TUNED" in os.environ else []
    accelerator = Accelerator(cpu=True, kwargs_handlers=tuned)
    torch.manual_seed(training["seed"])
    module = workload.model(spec["params"])
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=settings["lr"], weight_decay=settings["weight_decay"], fused=True
    )
    loader = DataLoader(
        workload.dataset(spec["params"], "train"), training["micro_batch_size"], shuffle=True, drop_last=True
    )
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    step, max_steps = 0, training["max_steps"]
    while step < max_steps:
        for batch in loader:
            loss = workload.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % training["log_every"] == 0 and accelerator.is_main_process:
                print(f"step {step}/{max_steps} loss {loss.item():.4g}", flush=True)
            if step == max_steps:
                break
    leave()


if __name__ == "__main__":
    main()
