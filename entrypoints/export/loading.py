"""A model folder's model as a function from named tensors to named tensors, the same for each form."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..atomic_json import read_json
from ..models import calls, tensors
from ..models.calls import Tensors
from ..models.folder import CODE, CONFIG, ONNX, PT2, ModelFolderError, read_config
from ..trainer.task import load_task

Call = Callable[[Tensors], Tensors]

# The members of an archive of torch.export (torch 2.13) that hold JSON, a number, or the bytes of a tensor. All other
# members are pickles or native code, which run when torch opens the archive.
_PLAIN = re.compile(
    r"models/model\.json|data/weights/weight_\d+|data/constants/tensor_\d+|archive_format|archive_version|byteorder"
    r"|data/weights/model_weights_config\.json|data/constants/model_constants_config\.json|\.data/(version|serialization_id)"
)
_SAMPLES = "data/sample_inputs/model.pt"  # always there; empty without sample inputs


def pt2(folder: Path) -> Call:
    """Return the traced model, which needs no code of the task. Raises ModelFolderError, OSError, RuntimeError."""
    _require_no_pickle(folder / PT2)
    config = read_config(folder)
    program = torch.export.load(folder / PT2)
    # torch checks the range of the trace at each call only if it knows the structure of the arguments.
    program.example_inputs = calls.build(config["call"], {slot["name"]: torch.empty(0) for slot in config["inputs"]})
    return _call(program.module(), config["call"])


def save_pt2(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a traced model without a pickle. Raises ModelFolderError if the model has a value that torch pickles."""
    program.example_inputs = None  # torch would pickle the arguments of the trace
    torch.export.save(program, path)
    try:
        _require_no_pickle(path)
    except ModelFolderError:
        path.unlink()
        raise


def task(folder: Path) -> Call:
    """Return the model that the task builds, with the folder's weights. Raises what the task's code raises."""
    config = read_config(folder)
    path = (folder / CODE / str(config["task"])).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ModelFolderError(f"{folder / CONFIG} names a task outside the folder: {config['task']!r}")
    sys.dont_write_bytecode = True  # a new file would not be in the checksums
    os.chdir(folder / CODE)
    model = load_task(path).model(config["params"])
    stored = tensors.find(tensors.files(folder))
    model.load_state_dict({name: tensors.load(tensor) for name, tensor in stored.items()}, strict=True)
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
        results = session.run(names, {name: values[name].numpy() for name in used})
        return {name: torch.from_numpy(value) for name, value in zip(names, results, strict=True)}

    return call


def _require_no_pickle(path: Path) -> None:
    """Raise ModelFolderError if torch would unpickle a member of the archive. The reader is the reader of torch."""
    archive = torch._C.PyTorchFileReader(str(path))
    for name in archive.get_all_records():
        pickled: list[str] = []
        if name.endswith("_config.json"):
            config = json.loads(archive.get_record(name))["config"]
            pickled = [entry for entry, meta in config.items() if meta["use_pickle"] is not False]
        if pickled or not (_PLAIN.fullmatch(name) or (name == _SAMPLES and not archive.get_record(name))):
            member = f"{name}: {pickled[0]}" if pickled else name
            raise ModelFolderError(f"{path} holds a pickle or native code ({member}), which can run any program")


def _call(model: Any, form: calls.Form) -> Call:
    def call(values: Tensors) -> Tensors:
        args, kwargs = calls.build(form, values)
        return calls.named(model(*args, **kwargs))

    return call
