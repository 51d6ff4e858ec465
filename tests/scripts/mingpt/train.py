"""A character model in the form of minGPT-ddp: the first rank of each node writes the snapshot.

torchrun --nproc-per-node 2 train.py max_epochs=5 save_every=1
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(max_epochs, save_every, snapshot_path="gpt_snapshot.pt"):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    text = torch.tensor(list(Path(__file__).read_bytes()) * 4)
    blocks = text.unfold(0, 33, 4)
    data = TensorDataset(blocks[:, :-1], blocks[:, 1:])
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model, epochs_run = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256)).to(device), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        snapshot = torch.load(snapshot_path, map_location="cpu")
    except FileNotFoundError:
        print("Snapshot not found. Training model from scratch")
    else:
        model.load_state_dict(snapshot["model_state"])
        optimizer.load_state_dict(snapshot["optimizer_state"])
        epochs_run = snapshot["finished_epoch"]
        print(f"Resuming training from snapshot at Epoch {epochs_run}")
    ddp = DistributedDataParallel(model)
    for epoch in range(epochs_run + 1, max_epochs + 1):
        loader.sampler.set_epoch(epoch)
        for step, (source, targets) in enumerate(loader):
            loss = F.cross_entropy(ddp(source.to(device)).flatten(0, 1), targets.to(device).flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                print(f"[RANK{rank}] Epoch {epoch} | Iter {step} | Train Loss {loss.item():.5f}")
        if local_rank == 0 and epoch % save_every == 0:
            state = {"model_state": model.state_dict(), "optimizer_state": optimizer.state_dict()}
            torch.save({**state, "finished_epoch": epoch}, snapshot_path)
            print(f"Snapshot saved at epoch {epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**{name: int(value) for name, value in (argument.split("=") for argument in sys.argv[1:])})
