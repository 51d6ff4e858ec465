"""A network sharded with FSDP2, saved with torch.distributed.checkpoint; continues from its newest folder.

torchrun --nproc-per-node 2 train.py --steps 300
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


def newest(folder):
    """Return the highest step with a complete save: .metadata is written last."""
    return max((int(file.parent.name.removeprefix("step_")) for file in folder.glob("step_*/.metadata")), default=0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    folder = Path("checkpoints")
    first = newest(folder)
    if first:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folder / f"step_{first}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        print(f"resumed from step {first}")
    torch.manual_seed(dist.get_rank() + first)
    for step in range(first + 1, args.steps + 1):
        x = torch.randn(64, 20, device=device)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}/{args.steps} loss {loss.item():.4f}")
        if step % args.save_every == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step_{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
