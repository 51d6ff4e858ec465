"""Plain HTTP: a test's requests to Azure's stand-in itself, and the identity endpoint of containers."""

import base64
import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

from doubles.azure import joblogs, login
from doubles.azure.errors import AzureError
from doubles.azure.jobs import Job
from doubles.azure.life import begin_late, restart_logs
from doubles.azure.names import CONTAINER
from doubles.azure.world import World
from doubles.kit import control
from doubles.wire import Answer, Request, json_answer


class Plain(control.Control[World]):
    """Answers plain HTTP: control for tests, the identity endpoint for containers."""

    REFUSED = (*control.Control.REFUSED, AzureError)

    def __call__(self, request: Request) -> Answer:
        """Answer one request."""
        if request.path.rstrip("/") == "/msi/token":
            return self._identity(request)
        return super().__call__(request)

    def fault_marks(self) -> dict[str, int]:
        """Return the numbers of the last token and the last signature: a fault of kind `expired` spares later ones."""
        return {"token_serial": self._world.tokens.last, "sas_serial": self._world.sas_serial}

    def actions(self, told: dict[str, Any]) -> Mapping[tuple[str, str], Callable[[], Any]]:
        """Return Azure's actions."""
        world = self._world
        return {
            ("POST", "computes"): lambda: world.set_compute(told["name"], told["properties"]),
            ("POST", "blob"): lambda: _put(world, **told),
            ("POST", "read"): lambda: _read(world, **told),
            ("POST", "blobs"): lambda: list(world.blobs.names(told["container"], told["prefix"])),
            ("GET", "secrets"): lambda: {name: one[-1]["value"] for name, one in world.secrets.items() if one},
        }

    def begin_late(self, name: str) -> None:
        """Start the containers of a job that has ended without machines."""
        begin_late(self._world, self._world.jobs[name])

    def job(self, path: str, told: dict[str, Any]) -> Any:
        """Return all jobs' names, or a job, or give a job an order: jobs, jobs/NAME, jobs/NAME/ORDER."""
        world = self._world
        name, _, order = path.partition("/")
        if not name:
            return list(world.jobs)
        job = world.jobs[name]
        if not order:
            return _described(job)
        actions: dict[str, Callable[[], Any]] = {
            "preempt": lambda: _preempt(job, **told),
            "begin": lambda: job.order("begin", **told),
            "end": lambda: job.order("end", **told),
            "write_log": lambda: joblogs.write(world.blobs, job, told["file"], base64.b64decode(told["data"])),
            "write_lines": lambda: _write_lines(world, job, **told),
            "restart_logs": lambda: restart_logs(world, job),
        }
        return actions[order]()

    def _identity(self, request: Request) -> Answer:
        entry: dict[str, Any] = {"operation": "msi.token", "service": "msi", "host": request.host}
        entry |= {"path": request.path, "query": request.query, "is_from_container": request.is_from_container}
        self._world.journal.append({**entry, "time": time.time()})
        try:
            return login.give_token_to_job(self._world, request)
        except AzureError as error:
            return json_answer({"statusCode": error.status, "message": error.message}, error.status)


def _described(job: Job) -> dict[str, Any]:
    with job.changed:
        names = ("name", "status", "history", "body", "tags", "properties", "error", "attempts", "folder", "compute")
        told = {name: getattr(job, name) for name in (*names, "created", "started", "ended")}
        return copy.deepcopy({**told, "active_s": job.active_now_s()})


def _preempt(job: Job, how: str) -> None:
    if how not in ("restart", "fail"):
        raise ValueError("how is restart or fail")
    job.order("preempt", how=how)


def _write_lines(world: World, job: Job, node: int, lines: list[str]) -> None:
    file = joblogs.file_of(node, job.nodes)
    joblogs.write(world.blobs, job, file, "".join(f"{line}\n" for line in lines).encode())


def _put(world: World, name: str, data: str, container: str = CONTAINER) -> None:
    world.blobs.put(container, name, base64.b64decode(data))


def _read(world: World, name: str, container: str = CONTAINER) -> str | None:
    with world.blobs.lock:
        if world.blobs.find(container, name) is None:
            return None
        return base64.b64encode(world.blobs.read(container, name)).decode()
