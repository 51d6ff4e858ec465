"""The paths of the server: SageMaker, Vertex AI, Azure ML, and the Open Inference Protocol, all by one table.

GET  /ping, /, the route in AIP_HEALTH_ROUTE       200 once the model is ready, 503 before and after SIGTERM
POST /invocations, /score, AIP_PREDICT_ROUTE       {"instances": [...]} -> {"predictions": [...]}
GET  /v2, /v2/health/live, /v2/health/ready, /v2/models/NAME, /v2/models/NAME/ready
POST /v2/models/NAME/infer                         the protocol's tensors
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import bodies
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
        given = bodies.object_in(body)
        if found is not None or (isinstance(given, dict) and "inputs" in given and "instances" not in given):
            results = self.engine.run(bodies.v2_inputs(given, self.engine.inputs))
            return Answer(200, bodies.v2_outputs(given, results, self.engine))
        results = self.engine.run(bodies.instances(given, self.engine.inputs))
        return Answer(200, {"predictions": bodies.predictions(results)})

    @staticmethod
    def _metadata(engine: Engine) -> Answer:
        def listed(slots: tuple[Any, ...]) -> list[dict[str, Any]]:
            sides = [[-1 if side is None else side for side in slot.shape] for slot in slots]
            named = [(slot.name, bodies.v2_type(slot.dtype)) for slot in slots]
            return [{"name": n, "datatype": t, "shape": s} for (n, t), s in zip(named, sides, strict=True)]

        about = {"name": engine.name, "versions": [engine.version], "platform": f"pytorch_{engine.form}"}
        return Answer(200, {**about, "inputs": listed(engine.inputs), "outputs": listed(engine.outputs)})
