"""The check: a new process opens the exported files and compares their results with the checkpoint's own model.

    python -m cloudtrain.entrypoints.export.check FOLDER WORK

Writes WORK/check-result.json. The weights and the results of safetensors and pt2 must have the same bits. ONNX and
transformers may run other kernels: their results may differ by a share of the largest value. A relative error of each
value would say nothing: at values near 0 it is 2 % for equal models. The task's code is imported last: the other forms
run without the code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import processes
from ..atomic_json import read_json
from ..models import tensors
from ..models.calls import Tensors
from ..models.folder import CONFIG, ONNX, OWN, PT2
from ..models.order import HUGGINGFACE
from . import loading
from .loading import Call
from .reference import CALLS, RESULT, bytes_sha256, first_line

FOUND = "check-result.json"
# Of the largest value of a result. Measured at 6e-8 to 9.5e-7 in fp32 for a CNN and a transformer (torch 2.13).
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}
SAME_ARGMAX = 0.999

Recorded = dict[str, dict[int, Tensors]]


def main(argv: list[str]) -> int:
    """Check each form in the folder; return the exit code."""
    processes.die_with_parent()
    sys.dont_write_bytecode = True  # the folder's files are counted
    folder, work = Path(argv[0]).resolve(), Path(argv[1]).resolve()
    torch.set_num_threads(1)
    reference = json.loads((work / RESULT).read_text())
    verdicts: dict[str, Any] = {}
    recorded: Recorded = torch.load(work / CALLS, weights_only=True) if (work / CALLS).exists() else {}
    if (folder / PT2).exists():
        verdicts["pt2"] = _guarded(lambda: _compared(loading.pt2(folder), recorded))
    if (folder / ONNX).exists():
        verdicts["onnx"] = _guarded(lambda: _compared(loading.onnx(folder), recorded, is_loose=True))
    if OWN in (read_json(folder / CONFIG) or {}):
        verdicts[HUGGINGFACE] = _guarded(lambda: _compared(loading.huggingface(folder), recorded, is_loose=True))
    verdicts["safetensors"] = _guarded(lambda: _weights(folder, reference))
    if verdicts["safetensors"]["passed"] and recorded:
        verdicts["safetensors"] |= _guarded(lambda: _compared(loading.task(folder), recorded))
    (work / FOUND).write_text(json.dumps(verdicts))
    return int(not all(each["passed"] for each in verdicts.values()))


def compare(expected: Tensors, got: Tensors, *, is_loose: bool) -> dict[str, Any]:
    """Return the differences of the results: `passed`, the largest difference as a share of the largest value, words.

    `is_loose`: allow the differences of other kernels.
    """
    if list(expected) != list(got):
        return _failed(f"the results are {', '.join(got)}, not {', '.join(expected)}")
    worst, same = 0.0, 1.0
    for name, one in expected.items():
        other = got[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return _failed(f"{name} is {other.dtype} {tuple(other.shape)}, not {one.dtype} {tuple(one.shape)}")
        if bytes_sha256(one) == bytes_sha256(other):
            continue
        difference = _difference(one, other)
        worst = max(worst, difference)
        words = f"{name} differs by {difference:.2g} of its largest value"
        if not is_loose:
            return _failed(words, worst)
        if one.is_floating_point() and one.dim() > 1 and one.shape[-1] > 1:
            same = min(same, (one.argmax(-1) == other.argmax(-1)).double().mean().item())
        if not (difference <= TOLERANCES.get(one.dtype, 0.0) and same >= SAME_ARGMAX):
            return _failed(f"{words}, argmax equal in {same:.2%}", worst)
    return {"passed": True, "same_bits": worst == 0.0, "difference": worst}


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return max |a - b| / max |a|; infinite if a value is no number in only one of the two."""
    a, b = one.double(), other.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-300))


def _compared(call: Call, recorded: Recorded, *, is_loose: bool = False) -> dict[str, Any]:
    """Compare the results of all recorded calls; return the worst."""
    worst: dict[str, Any] = {"passed": True, "same_bits": True, "difference": 0.0}
    for size, arguments in recorded["arguments"].items():
        with torch.no_grad():
            found = compare(recorded["results"][size], call(arguments), is_loose=is_loose)
        if not found["passed"]:
            return {**found, "fault": f"with {size} samples: {found['fault']}"}
        worst["difference"] = max(worst["difference"], found["difference"])
        worst["same_bits"] = worst["same_bits"] and found["same_bits"]
    return worst


def _weights(folder: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """Compare each tensor in the files with the model's."""
    state = {name: tensors.load(each) for name, each in tensors.find(tensors.files(folder)).items()}
    if missing := sorted(set(reference["weights"]) ^ set(state)):
        return _failed(f"{missing[0]} is in only one of the file and the model")
    for name, (dtype, digest) in reference["weights"].items():
        if str(state[name].dtype) != f"torch.{dtype}":
            return _failed(f"{name} is {state[name].dtype}, not torch.{dtype}")
        if bytes_sha256(state[name]) != digest:
            return _failed(f"the weights of {name} differ from the model's")
    return {"passed": True, "same_bits": True, "difference": 0.0}


def _failed(fault: str, difference: float | None = None) -> dict[str, Any]:
    return {"passed": False, "fault": fault, "difference": difference}


def _guarded(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return ask()
    except Exception as error:  # any error of a file that cannot be opened, or of the task's code
        return _failed(f"{type(error).__name__}: {first_line(error)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
