"""The paths of the server: SageMaker, Vertex AI, Azure ML, and the Open Inference Protocol, all by one table.

GET  /ping, /, the route in AIP_HEALTH_ROUTE       200 once the model is ready, 503 before and after SIGTERM
POST /invocations, /score, AIP_PREDICT_ROUTE       {"instances": [...]} -> {"predictions": [...]}
GET  /v2, /v2/health/live, /v2/health/ready, /v2/models/NAME, /v2/models/NAME/ready
POST /v2/models/NAME/infer                         the protocol's tensors

Bodies are untrusted input: any body ends in tensors of the model's types or in BadInput with a message for the client.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ..models.calls import Tensors, TensorSlot
from .engine import BadInput, Engine

_MODEL = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(/infer|/ready|)")


@dataclass(frozen=True)
class Answer:
    """A status, a JSON body, and further headers."""

    status: int
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        """The body as bytes. Raises ValueError for NaN and infinity, which JSON cannot hold."""
        return json.dumps(self.body, allow_nan=False, separators=(",", ":")).encode()


class Routes:
    """The answers by path. `engine` is None until the model is ready; `is_draining`: the server is about to end."""

    def __init__(self, health: str = "/ping", predict: str = "/invocations") -> None:
        self.engine: Engine | None = None
        self.is_draining = False
        self._health = {"/", "/ping", "/v2/health/ready", health}
        self._predict = {"/invocations", "/score", predict}

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Return the answer; a fault of the request is a 4xx with a message."""
        try:
            return self._answer(method, path.partition("?")[0], body)
        except BadInput as error:
            return Answer(400, {"error": str(error)})

    def _answer(self, method: str, path: str, body: bytes) -> Answer:
        found = _MODEL.fullmatch(path)
        posts = path in self._predict or (found is not None and found[3] == "/infer")
        if not posts and found is None and path not in {*self._health, "/v2", "/v2/health/live"}:
            return Answer(404, {"error": f"there is no path {path!r:.100}; POST /invocations, GET /ping or /v2"})
        if method not in (("POST",) if posts else ("GET", "HEAD")):
            allowed = "POST" if posts else "GET, HEAD"
            return Answer(405, {"error": f"this path takes {allowed}"}, {"Allow": allowed})
        if path == "/v2/health/live":
            return Answer(200, {"status": "live"})
        if path == "/v2":
            return Answer(200, {"name": "cloudtrain", "version": "1", "extensions": []})
        if self.engine is None:
            return Answer(503, {"error": "the model is not ready yet"})
        if self.is_draining and (path in self._health or (found is not None and found[3] == "/ready")):
            return Answer(503, {"error": "the server is about to end"})
        if path in self._health:
            return Answer(200, {"status": "ready"})
        if found is not None and found[1] != self.engine.name:
            return Answer(404, {"error": f"there is no model {found[1]!r:.100}; the model is {self.engine.name}"})
        if found is not None and found[2] not in (None, self.engine.version):
            return Answer(404, {"error": f"there is no version {found[2]!r:.100}; it is {self.engine.version}"})
        if not posts and found and found[3]:
            return Answer(200, {"name": self.engine.name, "ready": True})
        if not posts:
            return self._metadata(self.engine)
        given = _object_in(body)
        if found is not None or (isinstance(given, dict) and "inputs" in given and "instances" not in given):
            results = self.engine.run(_v2_inputs(given, self.engine.inputs))
            return Answer(200, _v2_outputs(given, results, self.engine))
        results = self.engine.run(_instances(given, self.engine.inputs))
        return Answer(200, {"predictions": _predictions(results)})

    @staticmethod
    def _metadata(engine: Engine) -> Answer:
        def listed(slots: tuple[Any, ...]) -> list[dict[str, Any]]:
            shapes = [[-1 if side is None else side for side in slot.shape] for slot in slots]
            pairs = zip(slots, shapes, strict=True)
            return [{"name": slot.name, "datatype": _v2_type(slot.dtype), "shape": sides} for slot, sides in pairs]

        about = {"name": engine.name, "versions": [engine.version], "platform": f"pytorch_{engine.form}"}
        return Answer(200, {**about, "inputs": listed(engine.inputs), "outputs": listed(engine.outputs)})


def _object_in(body: bytes) -> Any:
    """Return the JSON value of a body. Raises BadInput."""
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise BadInput("the body is nested too deeply") from None
    except ValueError as error:
        raise BadInput(f"the body is no JSON: {error}") from None


def _instances(request: Any, slots: Sequence[TensorSlot]) -> Tensors:
    """Return the inputs of a body {"instances": [...]}, or of a bare list; an instance is a sample.

    With several inputs an instance is an object with a value by input's name. Raises BadInput.
    """
    listed = request.get("instances") if isinstance(request, dict) else request
    if not isinstance(listed, list):
        names = ", ".join(slot.name for slot in slots)
        raise BadInput(f'expected {{"instances": [...]}}, a list of samples with the inputs {names}')
    if not listed:
        raise BadInput("the request has no sample")
    if unbatched := [slot.name for slot in slots if not slot.is_batched]:
        raise BadInput(f"{unbatched[0]} has no side for samples: use /v2/models/NAME/infer")
    if len(slots) == 1 and not isinstance(listed[0], dict):
        return {slots[0].name: _tensor(listed, slots[0])}
    wanted = {slot.name for slot in slots}
    for number, instance in enumerate(listed):
        if not isinstance(instance, dict) or instance.keys() != wanted:
            raise BadInput(f"instance {number} must be an object with {', '.join(slot.name for slot in slots)}")
    return {slot.name: _tensor([instance[slot.name] for instance in listed], slot) for slot in slots}


def _predictions(results: Tensors) -> Any:
    """Return a prediction for each sample: a list, or an object by output's name if there are several."""
    listed = {name: value.tolist() for name, value in results.items()}
    if len(listed) == 1:
        return next(iter(listed.values()))
    return [dict(zip(listed, each, strict=True)) for each in zip(*listed.values(), strict=True)]


def _v2_inputs(request: Any, slots: Sequence[TensorSlot]) -> Tensors:
    """Return the inputs of a request of the Open Inference Protocol. Raises BadInput."""
    inputs = request.get("inputs") if isinstance(request, dict) else None
    if not isinstance(inputs, list) or not all(isinstance(each, dict) for each in inputs):
        raise BadInput('expected {"inputs": [{"name", "shape", "datatype", "data"}]}')
    by_name = {name: each for each in inputs if isinstance(name := each.get("name"), str)}
    if set(by_name) != {slot.name for slot in slots} or len(by_name) != len(inputs):
        wanted = ", ".join(slot.name for slot in slots)
        raise BadInput(f"expected the inputs {wanted}, found {', '.join(by_name)}"[:300])
    return {slot.name: _v2_tensor(by_name[slot.name], slot) for slot in slots}


def _v2_outputs(request: Any, results: Tensors, engine: Engine) -> dict[str, Any]:
    """Return the answer of the Open Inference Protocol. Raises BadInput for an output that does not exist."""
    wanted = request.get("outputs") or [{"name": name} for name in results]
    listed = wanted if isinstance(wanted, list) else []
    asked = [each.get("name") if isinstance(each, dict) else None for each in listed]
    names = [name for name in asked if isinstance(name, str) and name in results]
    if not names or len(set(names)) < len(asked):  # an output asked for often would fill the memory
        raise BadInput(f"the outputs are {', '.join(results)}, each at most once")
    outputs = [_v2_output(name, results[name]) for name in names]
    number = {"id": request["id"]} if isinstance(request.get("id"), str) else {}
    return {"model_name": engine.name, "model_version": engine.version, **number, "outputs": outputs}


def _v2_output(name: str, value: torch.Tensor) -> dict[str, Any]:
    kind = _v2_type(str(value.dtype).removeprefix("torch."))
    return {"name": name, "shape": list(value.shape), "datatype": kind, "data": value.reshape(-1).tolist()}


def _v2_type(dtype: str) -> str:
    """Return the protocol's name of a type. Source: Open Inference Protocol, "Tensor Data Types"."""
    return dtype.upper().replace("BFLOAT", "BF").replace("FLOAT", "FP")


def _v2_tensor(given: dict[str, Any], slot: TensorSlot) -> torch.Tensor:
    shape, datatype = given.get("shape"), given.get("datatype")
    if isinstance(shape, list) and len(shape) > len(slot.shape):  # a product of many sides would take minutes
        raise BadInput(f"the shape of {slot.name} has {len(shape)} sides; expected {len(slot.shape)}")
    if not isinstance(shape, list) or not all(type(side) is int and 0 <= side < 2**40 for side in shape):
        raise BadInput(f"the shape of {slot.name} must be a list of whole numbers")
    if datatype != _v2_type(slot.dtype):
        shown = f", not {datatype!r:.40}" if isinstance(datatype, str) else ""
        raise BadInput(f"{slot.name} has the datatype {_v2_type(slot.dtype)}{shown}")
    values = _tensor(given.get("data"), slot)
    if values.numel() != math.prod(shape):
        raise BadInput(f"{slot.name} has {values.numel()} values, and its shape has {math.prod(shape)}")
    return values.reshape(shape)


def _tensor(value: Any, slot: TensorSlot) -> torch.Tensor:
    """Return the nested lists as a tensor of the slot's type. Raises BadInput for uneven lists and for other values."""
    if not isinstance(value, list):
        raise BadInput(f"the values of {slot.name} must be a list")
    dtype = getattr(torch, slot.dtype)
    try:
        tensor = torch.tensor(value, dtype=dtype if dtype.is_floating_point else None)
        is_finite = bool(tensor.isfinite().all())  # RuntimeError above 64 sides
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        why = str(error).splitlines()[0]
        raise BadInput(f"the values of {slot.name} are no even list of numbers: {why:.200}") from None
    if tensor.dtype is dtype and dtype.is_floating_point and not is_finite:
        raise BadInput(f"{slot.name} has values outside {slot.dtype}")
    if tensor.dtype is dtype or not tensor.numel():
        return tensor.to(dtype)
    if tensor.dtype is not torch.int64 or dtype is torch.bool:
        raise BadInput(f"{slot.name} has the type {slot.dtype}, and was given other values")
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if not least <= int(tensor.min()) <= int(tensor.max()) <= most:
        raise BadInput(f"{slot.name} has values outside {slot.dtype}")
    return tensor.to(dtype)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
