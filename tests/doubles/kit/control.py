"""`/_control/...`: a test's requests to the stand-in itself, in JSON; the cloud's handle wraps them."""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from doubles.kit import capacity
from doubles.kit.world import World
from doubles.wire import Answer, Request, json_answer

PREFIX = "/_control/"
WorldT = TypeVar("WorldT", bound=World[Any, Any, Any])


class Control(Generic[WorldT]):
    """Answers plain HTTP requests. A subclass adds the cloud's actions, and the endpoints of containers."""

    REFUSED: tuple[type[Exception], ...] = (KeyError, TypeError, ValueError)

    def __init__(self, world: WorldT) -> None:
        self._world = world

    def __call__(self, request: Request) -> Answer:
        """Answer one request on the proxy's port."""
        if request.is_from_container or not request.path.startswith(PREFIX) or "://" in request.target:
            entry = {"operation": "unserved", "host": request.host, "path": request.path, "time": time.time()}
            self._world.journal.append({**entry, "is_from_container": request.is_from_container})
            return Answer(502, body=b"no such host in the stand-in")
        return self.answer(request.method, request.path, request.body)

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Return the answer of a control request."""
        try:
            told = json.loads(body or b"{}")
            return json_answer({"result": self._act(method, path.removeprefix(PREFIX).strip("/"), told)})
        except self.REFUSED as error:
            traceback.print_exc()
            return json_answer({"message": f"{type(error).__name__}: {error}"}, 400)

    def actions(self, told: dict[str, Any]) -> Mapping[tuple[str, str], Callable[[], Any]]:
        """Return the cloud's actions by method and path."""
        raise NotImplementedError

    def job(self, path: str, told: dict[str, Any]) -> Any:
        """Return the result of a request below jobs/."""
        raise NotImplementedError

    def begin_late(self, name: str) -> None:
        """Start the containers of a job that has ended without machines."""
        raise NotImplementedError

    def fault_marks(self) -> dict[str, int]:
        """Return the fields that a fault gets when it is set."""
        return {}

    def _act(self, method: str, path: str, told: dict[str, Any]) -> Any:
        what, _, rest = path.partition("/")
        if what == "jobs":
            return self.job(rest, told)
        world = self._world
        common: dict[tuple[str, str], Callable[[], Any]] = {
            ("GET", "settings"): lambda: asdict(world.settings),
            ("POST", "settings"): lambda: world.set(told),
            ("POST", "faults"): lambda: world.faults.add(told, **self.fault_marks()),
            ("DELETE", "faults"): world.faults.clear,
            ("POST", "capacity"): lambda: world.capacity.add(told),
            ("DELETE", "capacity"): world.capacity.clear,
            ("POST", "changes"): lambda: world.changes.add(told),
            ("DELETE", "changes"): world.changes.clear,
            ("POST", "late"): lambda: self.begin_late(**told),
            ("GET", "late"): lambda: [{"status": job.status, "history": list(job.history)} for job in world.late],
            ("GET", "most_live"): lambda: capacity.most_live(world.all_jobs()),
            ("GET", "journal"): lambda: list(world.journal),
            ("DELETE", "journal"): world.journal.clear,
            ("POST", "reset"): world.reset,
        }
        return {**common, **self.actions(told)}[method, what]()
