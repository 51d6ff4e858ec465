"""Model folders in the form of `cloudtrain export`, without a training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.entrypoints.models import folder

if TYPE_CHECKING:
    import torch


def write_model(path: Path) -> Path:
    """Write a folder with small files; return its path."""
    (path / "code").mkdir(parents=True)
    config = {"format": folder.FORMAT, "name": "digits", "job": {"job": "digits-abcde"}, "checkpoint": {"step": 40}}
    (path / folder.CONFIG).write_text(json.dumps(config))
    (path / folder.CHECK).write_text(json.dumps({"passed": True, "forms": {}}))
    (path / folder.WEIGHTS).write_bytes(bytes(range(256)) * 8)
    (path / folder.CARD).write_text("# digits\n")
    (path / "code" / "task.py").write_text("")
    folder.write_sums(path, {})
    return path


def write_traced(
    path: Path, name: str, module: torch.nn.Module, arguments_of: Callable[[int], dict[str, torch.Tensor]]
) -> Path:
    """Write a folder with a traced model, for arguments with any number of samples; return its path."""
    import torch

    from cloudtrain.entrypoints.export import loading
    from cloudtrain.entrypoints.models import calls

    path.mkdir(parents=True)
    arguments = {samples: arguments_of(samples) for samples in (8, 1, 3)}
    results = {samples: calls.named(module(**each)) for samples, each in arguments.items()}
    args = tuple(arguments[8].values())
    vary = {argument: {0: torch.export.Dim.DYNAMIC} for argument in arguments[8]}
    loading.save_pt2(torch.export.export(module, args, dynamic_shapes=vary), path / folder.PT2)
    config = {"format": folder.FORMAT, "name": name, "call": calls.describe(module, args, {})[0]}
    for key, values in (("inputs", arguments), ("outputs", results)):
        config[key] = [slot.dump() for slot in calls.slots(values)]
    (path / folder.CONFIG).write_text(json.dumps(config))
    (path / folder.CHECK).write_text(json.dumps({"passed": True, "torch": torch.__version__}))
    folder.write_sums(path, {})
    return path
