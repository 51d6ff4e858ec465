"""What every contestant trains: one task file, so that model, data and clock are the same for all.

cloudtrain runs this file as its task; the other contestants import it. `loss` notes the time at each call, the start of
a forward pass, which is the one place that all of them pass once a step; at the last call it writes what was noted.
"""

from __future__ import annotations

import json
import os
import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

# Where the notes go, the number of calls after which they do, and the call at which the output so far is counted.
NOTES = os.environ.get("BENCH_NOTES")
STEPS = int(os.environ.get("BENCH_STEPS", "0"))
COUNT_AT = min(401, STEPS)
SYNC_AT = int(os.environ.get("BENCH_SYNC_AT", "-1"))  # the calls that wait for the GPU: the two ends of what is timed

_wall_s: list[float] = []
_cpu_s: list[float] = []
_bytes_out: list[int] = []


class Items(Dataset):
    """Samples kept in memory: what is measured is the loop, not a disk."""

    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(column[index] for column in self.columns)


class Cnn(nn.Module):
    """Convolutions, batch norm and dropout on 3x32x32."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 64, 128]
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
                for a, b in pairwise(widths)
            )
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(128 * 16, 256), nn.ReLU(), nn.Dropout(0.2))
        self.last = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.head(self.body(x)))


class Block(nn.Module):
    """One pre-norm transformer layer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(samples, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.mlp(self.norm2(x))


class SplitBlock(nn.Module):
    """The same layer with separate matrices for q, k and v, which two ranks can share."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A small GPT; returns logits."""

    def __init__(
        self, layers: int, width: int, heads: int, vocab: int, tokens: int, split: bool = False, tied: bool = True
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Parameter(0.02 * torch.randn(tokens, width))
        kind = SplitBlock if split else Block
        self.blocks = nn.ModuleList(kind(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.apply(_shrink)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _shrink(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def model(params: dict[str, Any]) -> nn.Module:
    """Return the model of the name: 102 k, 0.6 M and 10.0 M parameters, or a GPT of the given sizes."""
    if params["model"] == "mlp":
        return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    if params["model"] == "cnn":
        return Cnn()
    return Gpt(**params["gpt"])


def dataset(params: dict[str, Any], split: str) -> Items | None:
    """Return samples drawn from a fixed seed; there is nothing to evaluate."""
    if split != "train":
        return None
    generator = torch.Generator().manual_seed(0)
    if params["model"] == "mlp":
        return Items(torch.randn(4096, 784, generator=generator), torch.randint(10, (4096,), generator=generator))
    if params["model"] == "cnn":
        return Items(torch.randn(1024, 3, 32, 32, generator=generator), torch.randint(10, (1024,), generator=generator))
    sizes = params["gpt"]
    return Items(torch.randint(sizes["vocab"], (1024, sizes["tokens"] + 1), generator=generator))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean loss, after noting the time."""
    note()
    if len(batch) == 2:
        return F.cross_entropy(model(batch[0]), batch[1])
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers that fsdp shards one by one."""
    return list(model.blocks) if isinstance(model, Gpt) else []


def note() -> None:
    """Note the time; at the last step write everything. Costs a microsecond, the same for all."""
    calls = len(_wall_s) + 1
    if SYNC_AT >= 0 and calls in (SYNC_AT, STEPS) and torch.cuda.is_available():
        torch.cuda.synchronize()
    _wall_s.append(time.perf_counter())
    _cpu_s.append(time.process_time())
    if calls == COUNT_AT:
        _bytes_out.append(os.fstat(1).st_size)
    if calls == STEPS and NOTES:
        write()


def write() -> None:
    """Write this rank's notes; rss in KB, times by the clock that the launcher reads too."""
    found = {
        "wall_s": _wall_s,
        "cpu_s": _cpu_s,
        "bytes_out": _bytes_out[:1],
        "counted_at": COUNT_AT - 1,
        "rss": _peak_kb(),
    }
    if torch.cuda.is_available():
        found["gpu_bytes"] = torch.cuda.max_memory_allocated()
    Path(f"{NOTES}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))


def _peak_kb() -> int:
    """Return the most memory in use so far. getrusage would count what the process that forked this one had."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
