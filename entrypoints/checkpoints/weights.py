"""Plain weights for other programs: `model.pt` for torch.load, or `model.safetensors`; from a job or a checkpoint.

python -m cloudtrain.entrypoints.checkpoints.weights step-00000120 model.safetensors
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from ..atomic_json import sync
from ..stores.store import whole_file
from . import folder as folders
from . import shards


def main(argv: list[str]) -> int:
    """Write a checkpoint's weights to a file; return the exit code."""
    if len(argv) != 2:
        print("usage: weights.py CHECKPOINT OUT.pt|OUT.safetensors", file=sys.stderr)
        return 2
    try:
        write(Path(argv[1]), from_checkpoint(Path(argv[0])))
    except (folders.CheckpointError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write a state dict in the format of the name's ending, by write, fsync and rename. Raises OSError."""
    try:
        with whole_file(path) as partial:
            if path.suffix == ".safetensors":
                _write_safetensors(partial, weights)
            else:
                with partial.open("wb") as file:  # by a path torch would write its name into the archive
                    torch.save(dict(weights), file)
                sync(partial)
    except RuntimeError as error:
        raise OSError(f"{path} cannot be written: {error}") from error  # torch.save raises RuntimeError for a full disk


def from_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Return the model's whole weights, on the CPU: the average's if kept, because the average was evaluated.

    `path`: a checkpoint, or a folder of checkpoints, whose best or else last is taken. Raises CheckpointError if the
    checkpoint is damaged.
    """
    if not path.is_dir():
        raise folders.CheckpointError(f"there is no checkpoint {path}")
    if not (path / folders.MANIFEST).exists() and folders.list_steps(path):
        path = folders.choose(path, None)
    fault = folders.verify(path)
    if fault:
        raise folders.CheckpointError(f"checkpoint {path} is damaged: {fault}")
    trained, average = read(path, "model"), read(path, "ema")
    tied = folders.read_trainer(path).get("tied", {})
    return {name: average.get(tied.get(name, name), value) for name, value in trained.items()}


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Return the further names of each parameter with several, with its first name, which its average has."""
    first: dict[torch.Tensor, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[p] for name, p in named if first.setdefault(p, name) != name}


def read(path: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a kind, on the CPU: `model` are the trained weights, `ema` is their average, if kept.

    Verifies no checksum. Raises OSError, ValueError.
    """
    found: dict[str, torch.Tensor] = {}
    for file in folders.read_manifest(path):
        if not file.startswith("shard-"):
            continue
        shard = shards.open_shard(path / file, whole=False)
        for box, begin in shard.boxes:
            of, _, name = box.name.partition(".")
            if of == kind:
                whole = found.setdefault(name, torch.empty(box.whole, dtype=box.dtype))
                here = tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
                whole[here].copy_(shard.tensor(box, begin))
    return found


def _write_safetensors(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    shape = {name: tuple(tensor.shape) for name, tensor in plain.items()}
    boxes = [shards.Box(n, t.dtype, shape[n], (0,) * t.dim(), shape[n]) for n, t in plain.items()]
    head, positions, size = shards.place(boxes)
    data = torch.empty(size, dtype=torch.uint8)
    for tensor, box, at in zip(plain.values(), boxes, positions, strict=True):
        data[at : at + box.nbytes].view(box.dtype).view(box.shape).copy_(tensor)
    shards.write(path, head, data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
