"""Plain HTTP: a test's requests to Google's stand-in itself, and the metadata server of replicas."""

import base64
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import json_format

from doubles.google import accounts, life
from doubles.google.calls import Call, passed
from doubles.google.errors import GoogleError, error_answer
from doubles.google.jobs import Job
from doubles.google.world import World
from doubles.kit import control
from doubles.wire import Answer, Request

START_S = 10.0  # the longest time from a replica's start to its first process


class Plain(control.Control[World]):
    """Answers plain HTTP."""

    REFUSED = (*control.Control.REFUSED, GoogleError)

    def __call__(self, request: Request) -> Answer:
        """Answer one request."""
        if request.is_from_container and request.path.startswith(accounts.METADATA):
            return self._metadata(request)
        return super().__call__(request)

    def actions(self, told: dict[str, Any]) -> Mapping[tuple[str, str], Callable[[], Any]]:
        """Return Google's actions."""
        world = self._world
        return {
            ("POST", "expire_tokens"): world.tokens.expire,
            ("POST", "persistent"): lambda: world.set_persistent(told["name"], told["resource"]),
            ("POST", "bucket"): lambda: world.storage.add_bucket(**told),
            ("POST", "put"): lambda: world.storage.put(told["bucket"], told["name"], base64.b64decode(told["data"])),
            ("POST", "read"): lambda: _read(world, **told),
            ("POST", "remove"): lambda: world.storage.remove(told["bucket"], told["name"]),
            ("POST", "objects"): lambda: world.storage.names(told["bucket"], told["prefix"]),
            ("POST", "break_next_chunk"): lambda: world.storage.break_next_chunk(told["kept_bytes"]),
            ("GET", "secrets"): world.secrets.values,
        }

    def begin_late(self, name: str) -> None:
        """Start the containers of a job that has ended without machines."""
        life.begin_late(self._world, self._world.find(name))

    def job(self, path: str, told: dict[str, Any]) -> Any:
        """Return all jobs, or do a request of jobs/REQUEST to one job."""
        world = self._world
        if not path:
            return [_summary(job) for job in world.all_jobs()]
        job = world.find(told.pop("job"))
        actions: dict[str, Callable[[], Any]] = {
            "get": lambda: _described(job),
            "preempt": lambda: _preempt(job, **told),
            "kill": lambda: _kill(job, **told),
            "begin": lambda: job.order("begin", **told),
            "end": lambda: job.order("end", **told),
            "write": lambda: world.logs.write_lines(job.id, **told),
            "entries": lambda: world.logs.entries(job.id),
        }
        return actions[path]()

    def _metadata(self, request: Request) -> Answer:
        name = "metadata.token" if request.path.endswith("/token") else "metadata.get"
        call = Call("metadata", name, "rest", request.host, request.method, request.path, "", True, 0)
        try:
            told = passed(self._world, call, lambda: accounts.metadata(self._world, request))
        except GoogleError as error:
            told = error_answer(error)
        call.entry["sent"] = len(told.body)
        return told


def _summary(job: Job) -> dict[str, str]:
    return {"id": job.id, "name": job.name, "display_name": job.asked.display_name, "state": job.status}


def _described(job: Job) -> dict[str, Any]:
    body = json_format.MessageToDict(job.asked)
    with job.changed:
        return {
            **_summary(job),
            **{name: getattr(job, name) for name in ("attempts", "created", "started", "ended")},
            "history": list(job.history),
            "body": body,
            "labels": dict(job.asked.labels),
            "error": None if job.error is None else {"code": job.error[0], "message": job.error[1]},
            "replicas": [replica.told() for replica in job.replicas],
        }


def _preempt(job: Job, replica: str) -> None:
    _find(job, replica)
    job.order(f"preempt:{replica}")


def _kill(job: Job, replica: str, signum: int) -> int:
    """Send a signal to the container's first process; return the process number on this machine."""
    found, end = _find(job, replica), time.monotonic() + START_S
    while not found.pids():
        if not found.is_running or time.monotonic() > end:
            raise ValueError(f"{replica} has no process")
        time.sleep(0.01)  # just started
    pid: int = found.pids()[0]
    os.kill(pid, signal.Signals(signum))
    return pid


def _find(job: Job, name: str) -> Any:
    for replica in job.replicas:
        if replica.name == name:
            return replica
    raise ValueError(f"the job has the replicas {[replica.name for replica in job.replicas]}")


def _read(world: World, name: str, bucket: str) -> str | None:
    data = world.storage.read(bucket, name)
    return None if data is None else base64.b64encode(data).decode()
