"""A regression in the form of PyTorch's multinode.py: loads snapshot.pt of the working directory, if present.

torchrun --nproc-per-node 2 train.py 50 10
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(total_epochs, save_every, batch_size, snapshot_path="snapshot.pt"):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    data = TensorDataset(*(torch.rand(2048, width, generator=torch.Generator().manual_seed(0)) for width in (20, 1)))
    loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))
    model, first = nn.Linear(20, 1).to(device), 0
    if os.path.exists(snapshot_path):  # noqa: PTH110 - as the scripts of this form write it
        print("Loading snapshot")
        snapshot = torch.load(snapshot_path, map_location=device)
        model.load_state_dict(snapshot["MODEL_STATE"])
        first = snapshot["EPOCHS_RUN"]
        print(f"Resuming training from snapshot at Epoch {first}")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model)
    for epoch in range(first, total_epochs):
        print(f"[GPU{rank}] Epoch {epoch} | Batchsize: {batch_size} | Steps: {len(loader)}")
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(ddp(source.to(device)), targets.to(device)).backward()
            optimizer.step()
        if rank == 0 and epoch % save_every == 0:
            torch.save({"MODEL_STATE": model.state_dict(), "EPOCHS_RUN": epoch}, snapshot_path)
            print(f"Epoch {epoch} | Training snapshot saved at {snapshot_path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch_size", type=int, default=32)
    arguments = parser.parse_args()
    main(arguments.total_epochs, arguments.save_every, arguments.batch_size)
