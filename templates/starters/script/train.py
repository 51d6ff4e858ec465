"""Fit a small network to a linear function with DDP. Runs as it is under `python`, `torchrun` and cloudtrain.

Rank 0 saves `out/ckpt.pt` every few steps; with `--resume` the training continues from the last save.

torchrun --nproc-per-node 2 train.py --steps 200
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train, and let rank 0 write checkpoints and the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    net = DistributedDataParallel(net) if distributed else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    samples = torch.Generator().manual_seed(rank)
    truth = torch.arange(8.0, device=device)

    saved, first = Path("out/ckpt.pt"), 1
    saved.parent.mkdir(exist_ok=True)
    if args.resume and saved.exists():  # every rank reads the same file
        state = torch.load(saved, map_location=device)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
        samples.manual_seed(rank + 1000 * first)  # new samples, not those of the first steps again

    for step in range(first, args.steps + 1):
        x = torch.randn(64, 8, generator=samples).to(device)
        loss = nn.functional.mse_loss(net(x).squeeze(1), x @ truth)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}/{args.steps} loss {loss.item():.4f}", flush=True)
        if rank == 0 and step % args.save_every == 0:
            state = {"step": step, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, "out/ckpt.tmp")
            Path("out/ckpt.tmp").replace(saved)  # an incomplete save never replaces the last save

    if rank == 0:
        output = Path(os.environ.get("CLOUDTRAIN_OUTPUT_DIR", "."))
        torch.save(net.state_dict(), output / "model.pt")
    if distributed:
        dist.barrier()
        sys.stdout.flush()
        # Tearing gloo down beside a live DDP model aborts or hangs now and then (torch 2.13): all is saved, so leave.
        os._exit(0)


if __name__ == "__main__":
    main()
