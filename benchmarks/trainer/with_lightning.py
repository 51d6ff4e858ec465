"""The same training with Lightning's Trainer, lean: no logger, no bar, no summary, no checkpoint."""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import workload
from bare import leave
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from torch.utils.data import DataLoader


class Module(LightningModule):
    """The workload as Lightning wants it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.training_settings = spec["training"]
        self.model = workload.model(spec["params"])
        if self.training_settings.get("compile"):  # as the others do: whole under ddp, by layer under fsdp
            is_ddp = self.training_settings["strategy"] == "ddp"
            for part in [self.model] if is_ddp else workload.blocks(self.model):
                part.compile()

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        loss = workload.loss(self.model, batch)
        step = self.global_step + 1
        if step % self.training_settings["log_every"] == 0 and self.global_rank == 0:
            print(f"step {step}/{self.training_settings['max_steps']} loss {loss.item():.4g}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        settings = self.training_settings["optimizer"]
        return torch.optim.AdamW(
            self.parameters(), lr=settings["lr"], weight_decay=settings["weight_decay"], fused=True
        )


def main() -> None:
    """Train the spec's model."""
    warnings.simplefilter("ignore")  # advice on the number of loading workers
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    spec = json.loads(Path(os.environ["CLOUDTRAIN_SPEC"]).read_text())
    training = spec["training"]
    seed_everything(training["seed"], verbose=False)
    loader = DataLoader(
        workload.dataset(spec["params"], "train"), training["micro_batch_size"], shuffle=True, drop_last=True
    )
    trainer = Trainer(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=_strategy(training["strategy"]),
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[training["precision"]],
        max_steps=training["max_steps"],
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(spec), loader)
    leave()


def _strategy(name: str) -> Strategy:
    if name == "fsdp":
        return FSDPStrategy(auto_wrap_policy={workload.Block})
    return DDPStrategy(gradient_as_bucket_view="BENCH_TUNED" in os.environ)


if __name__ == "__main__":
    main()
