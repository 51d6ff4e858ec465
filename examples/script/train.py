"""An ordinary torchrun script, which knows nothing of cloudtrain: a small network learns a noisy spiral.

torchrun --nproc-per-node 2 train.py --steps 300 --out checkpoints
cloudtrain submit -f examples/script/cloudtrain.yaml
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spiral(count, seed=0):
    """Points of two intertwined arms, float32 (count, 2), and which arm each is on, int64 (count,)."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(2, (count,), generator=generator)
    turn = torch.rand(count, generator=generator) * 3 * math.pi + 0.5
    angle = turn + math.pi * arm
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 10
    return points + 0.02 * torch.randn(points.shape, generator=generator), arm


def batches(data, size, seed):
    """Yield this rank's batches for ever, in another order each epoch."""
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=size, sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def save(path, step, model, optimizer):
    """Write beside the file and rename, so that the file is always whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    partial.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64, help="samples a rank")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--out", default="checkpoints", help="folder; $VARIABLES in it are expanded")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=args.lr)
    path, first = Path(os.path.expandvars(args.out)) / "spiral.pt", 0
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        if rank == 0:
            print(f"resuming from step {first}")
    model = DistributedDataParallel(network)

    source = batches(TensorDataset(*spiral(4096)), args.batch_size, seed=first)
    for step in range(first + 1, args.steps + 1):
        points, arm = (part.to(device) for part in next(source))
        scores = model(points)
        loss = F.cross_entropy(scores, arm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 20 == 0 or step == args.steps):
            right = (scores.argmax(1) == arm).float().mean()
            print(f"step {step} loss {loss.item():.4f} accuracy {right.item():.3f}")
        if rank == 0 and (step % args.save_every == 0 or step == args.steps):
            save(path, step, network, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
