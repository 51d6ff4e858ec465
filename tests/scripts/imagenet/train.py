"""A classifier in the form of PyTorch's imagenet example: meters, checkpoint.pth.tar, and --resume PATH.

torchrun --nproc-per-node 2 train.py --epochs 5
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--resume", default="", metavar="PATH", help="path to latest checkpoint")
    parser.add_argument("--print-freq", type=int, default=10)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    images = torch.rand(1600, 3 * 8 * 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(images, images.mean(1).mul(1000).long() % 10)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model, start_epoch, best = nn.Sequential(nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)).to(device), 0, 0.0
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if args.resume and Path(args.resume).is_file():
        checkpoint = torch.load(args.resume, map_location=device)
        start_epoch, best = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {start_epoch})")
    elif args.resume:
        print(f"=> no checkpoint found at '{args.resume}'")
    ddp = DistributedDataParallel(model)
    for epoch in range(start_epoch, args.epochs):
        loader.sampler.set_epoch(epoch)
        losses, right, count = 0.0, 0, 0
        for i, (image, target) in enumerate(loader):
            output = ddp(image.to(device))
            loss = F.cross_entropy(output, target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits = (output.argmax(1).cpu() == target).sum().item()
            losses, right, count = losses + loss.item(), right + hits, count + len(target)
            if i % args.print_freq == 0:
                meters = f"Loss {loss.item():.4e} ({losses / (i + 1):.4e})\tAcc@1 {hits / len(target) * 100:6.2f}"
                print(f"Epoch: [{epoch}][{i + 1:3d}/{len(loader)}]\tTime  0.002 ( 0.002)\t{meters}")
        if dist.get_rank() == 0:
            state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "best_acc1": max(best, right / count)}, "checkpoint.pth.tar")
            if right / count > best:
                shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
        best = max(best, right / count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
