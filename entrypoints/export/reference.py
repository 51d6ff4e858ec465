"""The checkpoint's own model: built by the task, called on real samples, traced; the results are for `check`.

    python -m cloudtrain.entrypoints.export.reference CODE WORK

Reads WORK/order.json. Writes into WORK reference.json, calls.pt (arguments and results by number of samples), and the
traced forms.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import processes
from ..checkpoints import weights
from ..errors import TaskError
from ..models import calls
from ..models.folder import ONNX, PT2
from ..models.order import HUGGINGFACE, ExportOrder
from ..trainer import data
from ..trainer.task import Task, load_task
from . import loading

ORDER, RESULT, CALLS = "order.json", "reference.json", "calls.pt"
SIZES = (8, 1, 3)  # samples of a call; the first is the example of a trace, which a size of 1 would fix
_EPOCH = -1  # as in an evaluation
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # torch's exporter for ONNX prints in colours

Batches = dict[int, dict[str, torch.Tensor]]


def main(argv: list[str]) -> int:
    """Write the reference into the folder; return the exit code."""
    processes.die_with_parent()
    code, work = map(Path, argv)
    order = ExportOrder.load(json.loads((work / ORDER).read_text()))
    torch.set_num_threads(1)  # the number of threads changes the order of sums
    with contextlib.suppress(ImportError):  # a loss over all ranks needs a group; torch may change the name
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        result = _reference(order, code.resolve(), work.resolve())
    except Exception as error:  # also any error of the task's code
        result = {"fault": _told(error)}
    (work / RESULT).write_text(json.dumps(result))
    return int("fault" in result)


def evaluated_model(task: Task, params: dict[str, Any], checkpoint: Path) -> torch.nn.Module:
    """Return the task's model with the checkpoint's weights, or their average, in eval mode. Raises TaskError."""
    model = task.model(params)
    if not isinstance(model, torch.nn.Module):
        raise TaskError(f"model(params) returned a {type(model).__name__}; it must return a torch.nn.Module")
    try:
        model.load_state_dict(weights.read(checkpoint, "model"), strict=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise TaskError(f"the checkpoint does not fit model(params): {' '.join(lines[1:3])}") from error
    average = weights.read(checkpoint, "ema")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in average:  # as the trainer's evaluations: rounded to the parameter's type, shared by tied names
                parameter.copy_(average.pop(name))
    if average:
        raise TaskError(f"the average of {next(iter(average))} belongs to no parameter of model(params)")
    return model.eval()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that says something."""
    lines = [_COLOUR.sub("", line).strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)[:300]


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {first_line(error)}"


def bytes_sha256(tensor: torch.Tensor) -> str:
    """Return the hash of the tensor's values, in row-major order."""
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(memoryview(plain.numpy())).hexdigest()  # type: ignore[arg-type]


def _reference(order: ExportOrder, code: Path, work: Path) -> dict[str, Any]:
    os.chdir(code)
    task = load_task(code / order.task, order.seed)
    data.seed_all(order.seed)
    params = dict(order.params)
    model = evaluated_model(task, params, Path(order.checkpoint))
    hashes = {name: [_dtype(tensor), bytes_sha256(tensor)] for name, tensor in model.state_dict().items()}
    tied = weights.tied_names(model)
    result: dict[str, Any] = {"weights": hashes, "tied": tied, "left_out": {}, "torch": torch.__version__}
    try:
        samples, split = _samples(task, params, order.seed)
        names = getattr(samples, "classes", None)  # in order, if the dataset has them, as torchvision's have
        result |= {"split": split, "classes": list(map(str, names)) if isinstance(names, list | tuple) else None}
        form, arguments, results = _calls(task, model, samples, order.seed)
    except Exception as error:  # any error of the task's code
        result["no_calls"] = _told(error)
        why = f"the model could not be called: {result['no_calls']}"
        result["left_out"] = {kind: why for kind in order.forms if kind != "safetensors"}
        return result
    result |= {"call": form, "inputs": [slot.dump() for slot in calls.slots(arguments)]}
    result["outputs"] = [slot.dump() for slot in calls.slots(results)]
    torch.save({"arguments": arguments, "results": results}, work / CALLS)
    for kind in order.forms[1:]:
        try:
            _trace(kind, work, model, form, arguments)
        except Exception as error:  # torch documents no type; a model that cannot be traced is no fault of the export
            result["left_out"][kind] = _why_not(model, error)
    return result


def _why_not(model: torch.nn.Module, error: Exception) -> str:
    """Return why the model has no traced form. torch.onnx says only which part of the export failed: its cause says."""
    if isinstance(error, torch.onnx.OnnxExporterError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text, recurrent = str(error), (torch.nn.RNNBase, torch.nn.RNNCellBase)
    kind = next((type(part).__name__ for part in model.modules() if isinstance(part, recurrent)), None)
    if "data-dependent expression" in text:
        why = "forward decides by the values of a tensor (an `if`, a loop or a size), which torch does not trace"
        return f"{why}; use torch.where or a mask ({first_line(error)})"
    if kind is not None and re.search("pack_padded|argument 'size' failed to unpack", text):
        return f"torch does not trace the {kind} of a packed sequence; call it with the padded sequence"
    if kind is None or not re.search("specialized it to be a constant|user-specified ranges", text):
        return _told(error)
    why = f"torch traces {kind} for sequences of one length, and the length differs between batches"
    return f"{why}; let collate pad all batches to the same length"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _samples(task: Task, params: dict[str, Any], seed: int) -> tuple[Any, str]:
    for split in ("eval", "train"):
        with contextlib.suppress(TaskError):
            if (found := task.make_dataset(params, split, seed)) is not None:
                return found, split
    raise TaskError("dataset(params, split) has neither samples to evaluate nor to train on")


def _calls(task: Task, model: torch.nn.Module, samples: Any, seed: int) -> tuple[calls.Form, Batches, Batches]:
    """Return the form of the call, and its arguments and results by number of samples."""
    keys = iter([[(_EPOCH, i % len(samples)) for i in range(size)] for size in SIZES])
    batches = data.load(samples, keys, seed=seed, collate=task.collate)
    arguments: Batches = {}
    results: Batches = {}
    forms = []
    for size, batch in zip(SIZES, batches, strict=True):
        with torch.no_grad(), _first_call(model) as seen:
            (task.evaluate or task.loss)(model, batch)
        if not seen:
            raise TaskError("evaluate or loss calls no `model(...)`, only parts of the model")
        form, arguments[size] = calls.describe(model, *seen[0])
        arguments[size] = {name: tensor.detach().clone() for name, tensor in arguments[size].items()}
        args, kwargs = calls.build(form, arguments[size])
        with torch.no_grad():
            results[size] = {name: tensor.clone() for name, tensor in calls.named(model(*args, **kwargs)).items()}
        forms.append(form)
    if any(form != forms[0] for form in forms):
        raise TaskError("the arguments of the model differ from batch to batch in more than their tensors")
    if not results[SIZES[0]]:
        raise TaskError("the model returns no tensor")
    return forms[0], arguments, results


@contextlib.contextmanager
def _first_call(model: torch.nn.Module) -> Iterator[list[tuple[Any, Any]]]:
    seen: list[tuple[Any, Any]] = []

    def keep(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not seen:
            seen.append((args, kwargs))

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def _configure(model: Any, folder: Path) -> None:
    """Write the configuration files of transformers' `save_pretrained`; its weights are model.safetensors."""
    kind = type(model)
    if not kind.__module__.startswith("transformers.") or not hasattr(model, "save_pretrained"):
        raise TaskError(f"the class {kind.__name__} is no architecture of transformers: safetensors and pt2 instead")
    # As transformers 5.24 does in save_pretrained.
    model.config.architectures, model.config.dtype = [kind.__name__], _dtype(next(model.parameters()))
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _trace(kind: str, work: Path, model: torch.nn.Module, form: calls.Form, arguments: Batches) -> None:
    """Write the model in a form without code. Raises TaskError, and any error of torch."""
    if kind == HUGGINGFACE:
        _configure(model, work / kind)
        return
    inputs = calls.slots(arguments)
    vary = torch.export.Dim.DYNAMIC
    sides = {slot.name: {i: vary for i, side in enumerate(slot.shape) if side is None} or None for slot in inputs}
    args, kwargs = calls.build(form, sides, constants=False)
    shapes = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)  # sides by parameter of `forward`
    args, kwargs = calls.build(form, arguments[SIZES[0]])
    if kind == "pt2":
        loading.save_pt2(torch.export.export(model, args, kwargs, dynamic_shapes=shapes), work / PT2)
        return
    with torch.no_grad():
        outputs = list(calls.named(model(*args, **kwargs)))
    names: dict[str, Any] = {"input_names": [slot.name for slot in inputs], "output_names": outputs}
    torch.onnx.export(model, args, work / ONNX, kwargs=kwargs, dynamic_shapes=shapes, external_data=False, **names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
