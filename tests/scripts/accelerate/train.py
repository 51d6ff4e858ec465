"""A regression with Accelerate, in the form of its checkpointing example.

torchrun --nproc-per-node 2 train.py --epochs 3
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output_dir", default="runs")
    parser.add_argument("--resume_from_checkpoint", metavar="FOLDER", help="runs/epoch_N")
    args = parser.parse_args()
    accelerator = Accelerator()
    set_seed(0)
    x = torch.randn(4096, 20)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        first = int(Path(args.resume_from_checkpoint).name.removeprefix("epoch_")) + 1
    total = args.epochs * len(loader)
    for epoch in range(first, args.epochs):
        for step, (inputs, targets) in enumerate(loader, epoch * len(loader) + 1):
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % 20 == 0:
                accelerator.print(f"step {step}/{total} loss {loss.item():.4f}")
        accelerator.save_state(Path(args.output_dir, f"epoch_{epoch}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
