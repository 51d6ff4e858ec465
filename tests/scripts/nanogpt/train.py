"""A character model in nanoGPT's form: settings as --name=value, out/ckpt.pt, and --init_from=resume.

torchrun --nproc-per-node 2 train.py --max_iters=200
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

settings = {"max_iters": 2000, "eval_interval": 100, "batch_size": 16, "block_size": 64, "learning_rate": 0.02}
settings |= {"log_interval": 10, "out_dir": "out", "init_from": "scratch", "data": ""}
for argument in sys.argv[1:]:
    name, _, value = argument.removeprefix("--").partition("=")
    settings[name] = type(settings[name])(value)
    print(f"Overriding: {name} = {settings[name]}")

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
master = dist.get_rank() == 0
device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337 + dist.get_rank())
text = torch.tensor(list(Path(settings["data"] or __file__).read_bytes()))
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
file, iteration = Path(settings["out_dir"], "ckpt.pt"), 0
if settings["init_from"] == "resume":
    print(f"Resuming training from {settings['out_dir']}")
    saved = torch.load(file, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    iteration = saved["iter_num"]
ddp, begun = DistributedDataParallel(model), time.time()
while True:
    starts = torch.randint(len(text) - settings["block_size"], (settings["batch_size"], 1))
    places = starts + torch.arange(settings["block_size"])
    scores = ddp(text[places].to(device))
    loss = F.cross_entropy(scores.flatten(0, 1), text[places + 1].to(device).flatten())
    if master and iteration and iteration % settings["eval_interval"] == 0:
        print(f"step {iteration}: train loss {loss.item():.4f}, val loss {loss.item():.4f}")
        print(f"saving checkpoint to {settings['out_dir']}")
        file.parent.mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iteration}
        torch.save(state, file)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    now = time.time()
    if master and iteration % settings["log_interval"] == 0:
        print(f"iter {iteration}: loss {loss.item():.4f}, time {(now - begun) * 1000:.2f}ms, mfu -100.00%")
    iteration, begun = iteration + 1, now
    if iteration > settings["max_iters"]:
        break
dist.destroy_process_group()
