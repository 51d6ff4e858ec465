"""A model folder's model as a function from named tensors to named tensors, the same for each form."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..atomic_json import read_json
from ..models import calls, tensors
from ..models.folder import CODE, CONFIG, ONNX, PT2, read_config
from ..trainer.task import load_task

Tensors = dict[str, torch.Tensor]
Call = Callable[[Tensors], Tensors]


def pt2(folder: Path) -> Call:
    """Return the traced model, which needs no code of the task. Raises OSError, RuntimeError."""
    program = torch.export.load(folder / PT2)
    return _call(program.module(), read_config(folder)["call"])


def task(folder: Path) -> Call:
    """Return the model that the task builds, with the folder's weights. Raises what the task's code raises."""
    sys.dont_write_bytecode = True  # a new file would not be in the checksums
    os.chdir(folder / CODE)
    config = read_config(folder)
    model = load_task(folder / CODE / config["task"]).model(config["params"])
    found = tensors.find(tensors.files(folder))
    model.load_state_dict({name: tensors.load(each) for name, each in found.items()}, strict=True)
    return _call(model.eval(), config["call"])


def huggingface(folder: Path) -> Call:
    """Return the model as transformers opens the folder, without code of the task. Raises what transformers raises."""
    import transformers

    (architecture,) = read_json(folder / CONFIG)["architectures"]
    model = getattr(transformers, architecture).from_pretrained(folder, local_files_only=True)
    return _call(model.eval(), read_config(folder)["call"])


def onnx(folder: Path) -> Call:
    """Return the ONNX model on onnxruntime's CPU kernels."""
    import onnxruntime  # type: ignore[import-not-found,unused-ignore]  # of the extra cloudtrain[onnx]

    session = onnxruntime.InferenceSession(str(folder / ONNX), providers=["CPUExecutionProvider"])
    used = [each.name for each in session.get_inputs()]
    names = [each.name for each in session.get_outputs()]

    def call(values: Tensors) -> Tensors:
        found = session.run(names, {name: values[name].numpy() for name in used})
        return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}

    return call


def _call(model: Any, form: calls.Form) -> Call:
    def call(values: Tensors) -> Tensors:
        args, kwargs = calls.build(form, values)
        return calls.named(model(*args, **kwargs))

    return call
