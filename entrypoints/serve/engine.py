"""The model behind the server: verified, loaded, and called for several requests at once.

A request that finds the model busy waits, and the next call takes all waiting requests up to the largest batch. A batch
costs no waiting time, and grows with the load.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..export import loading
from ..models import folder as folders
from ..models.calls import Tensors, TensorSlot

# The model's errors for values that the check of types and shapes cannot know: a token above the vocabulary, a shape
# outside the traced range. Other errors, such as RuntimeError for lack of memory, are the model's or the machine's.
_OF_VALUES = (IndexError, ValueError, AssertionError)


class BadInput(Exception):
    """The request's tensors do not fit the model; the message is for the client."""


@dataclass(eq=False)
class _Waiting:
    """A waiting request. `rows`: the number of samples, None if the inputs have no side for samples."""

    inputs: Tensors
    rows: int | None
    result: Tensors | None = None
    fault: Exception | None = None
    is_done: threading.Event = field(default_factory=threading.Event)


class Engine:
    """A loaded model. `run` may be called by many threads."""

    def __init__(self, folder: folders.ModelFolder, call: loading.Call, form: str, most_rows: int) -> None:
        config = folder.config
        self.name: str = config["name"]
        self.version = folder.digest[:12]
        self.form = form
        self.inputs = tuple(TensorSlot.load(each) for each in config["inputs"])
        self.outputs = tuple(TensorSlot.load(each) for each in config["outputs"])
        self.batches = all(slot.is_batched for slot in (*self.inputs, *self.outputs))
        self._call = call
        self._most_rows = most_rows if self.batches else 1
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()  # of the list
        self._model = threading.Lock()

    def run(self, inputs: Tensors) -> Tensors:
        """Return the model's result. Raises BadInput for the request's fault, and for the model's any error."""
        own = _Waiting(inputs, self._rows(inputs))
        with self._lock:
            self._waiting.append(own)
        with self._model:
            if not own.is_done.is_set():  # an earlier call may have included the request
                self._run_batch(self._take(own))
        if own.fault is not None:
            raise own.fault
        assert own.result is not None
        return own.result

    def _rows(self, inputs: Tensors) -> int | None:
        """Return the number of samples. Raises BadInput if the tensors do not fit."""
        found: set[int] = set()
        for slot in self.inputs:
            shape = tuple(inputs[slot.name].shape)
            fits = len(shape) == len(slot.shape) and all(b in (None, a) for a, b in zip(shape, slot.shape, strict=True))
            if not fits:
                raise BadInput(f"{slot.name} has the shape {_words(shape)}; expected {_words(slot.shape)}")
            if slot.is_batched:
                found.add(shape[0])
        if len(found) > 1:
            raise BadInput(f"the inputs have different numbers of samples: {', '.join(map(str, sorted(found)))}")
        if found == {0}:
            raise BadInput("the request has no sample")
        return found.pop() if found else None

    def _take(self, own: _Waiting) -> list[_Waiting]:
        """Return the next batch: the request, and further requests in order with tensors of equal shapes."""
        with self._lock:
            self._waiting.remove(own)
            taken, rows = [own], own.rows or 1
            for other in self._waiting[:]:
                is_alike = all(value.shape[1:] == other.inputs[name].shape[1:] for name, value in own.inputs.items())
                if is_alike and rows + (other.rows or 1) <= self._most_rows:
                    self._waiting.remove(other)
                    taken.append(other)
                    rows += other.rows or 1
        return taken

    def _run_batch(self, taken: Sequence[_Waiting]) -> None:
        try:
            if len(taken) == 1:
                taken[0].result = self._result(taken[0].inputs)
            else:
                names, rows = taken[0].inputs, [each.rows or 1 for each in taken]
                whole = self._result({name: torch.cat([each.inputs[name] for each in taken]) for name in names})
                parts = {name: torch.split(value, rows) for name, value in whole.items()}
                for number, each in enumerate(taken):
                    each.result = {name: part[number] for name, part in parts.items()}
        except Exception as error:
            if len(taken) > 1:  # only one request may be at fault
                for each in taken:
                    self._run_batch([each])
                return
            taken[0].fault = error
            if isinstance(error, _OF_VALUES):
                lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
                taken[0].fault = BadInput(f"the model refuses the values: {lines[0][:300]}")
        for each in taken:
            each.is_done.set()

    def _result(self, inputs: Tensors) -> Tensors:
        with torch.inference_mode():
            return self._call(inputs)


def open_engine(path: Path, most_rows: int, threads: int | None = None) -> Engine:
    """Return the engine of a folder after verifying every byte, and after a first call.

    Raises ModelFolderError, and for a model that cannot be loaded any error.
    """
    path = path.resolve()  # a link such as PLACE/current may change between the verification and the load
    folder = folders.verify(path)
    if not folder.config.get("inputs"):
        raise folders.ModelFolderError(f"{path} cannot be served: the export did not see a call of the model")
    if threads is not None:
        torch.set_num_threads(threads)
    form = "pt2" if folders.PT2 in folder.files else "safetensors"
    call = loading.pt2(path) if form == "pt2" else loading.task(path)
    engine = Engine(folder, call, form, most_rows)
    with contextlib.suppress(Exception):  # a first call is slow; zeros may be no input of the model
        shapes = {slot: [1 if side is None else side for side in slot.shape] for slot in engine.inputs}
        engine.run({slot.name: torch.zeros(shape, dtype=getattr(torch, slot.dtype)) for slot, shape in shapes.items()})
    return engine


def _words(shape: Sequence[int | None]) -> str:
    return "x".join("any" if side is None else str(side) for side in shape) or "scalar"
