"""`/_control/...`: a test's requests to the stand-in itself, in JSON; `doubles/aws/handle.py` wraps them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from doubles.aws.wire import Environ, Reply, StartResponse, reply
from doubles.aws.world import World

__all__ = ["PREFIX", "answer"]

PREFIX = "/_control/"
ORDERS = ("interrupt", "internal_error", "capacity_error", "end", "abandon")


def answer(world: World, environ: Environ, start: StartResponse) -> Reply:
    """Return the answer for the path and the method."""
    path = environ["PATH_INFO"].removeprefix(PREFIX).strip("/")
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    try:
        told = json.loads(body or b"{}")
        return reply(start, {"result": _act(world, environ["REQUEST_METHOD"], path, told)})
    except (KeyError, TypeError, ValueError) as error:
        return reply(start, {"message": f"{type(error).__name__}: {error}"}, "400 Bad Request")


def _act(world: World, method: str, path: str, told: dict[str, Any]) -> Any:
    if path.startswith("jobs/"):
        _, name, order = path.split("/")
        job = world.job(name)
        if job is None or order not in ORDERS:
            raise KeyError(path)
        return job.order(order, **told)
    actions: dict[tuple[str, str], Callable[[], Any]] = {
        ("GET", "ready"): lambda: True,
        ("GET", "settings"): lambda: asdict(world.settings),
        ("POST", "settings"): lambda: world.set(told),
        ("POST", "faults"): lambda: world.faults.add(told),
        ("DELETE", "faults"): world.faults.clear,
        ("GET", "journal"): lambda: list(world.journal),
        ("DELETE", "journal"): world.journal.clear,
        ("POST", "quotas"): lambda: world.quotas.update(told),
        ("POST", "logs"): lambda: _write(world, **told),
        ("POST", "reset"): world.reset,
    }
    return actions[method, path]()


def _write(
    world: World,
    group: str,
    stream: str,
    region: str = "us-east-1",
    messages: list[str] | None = None,
    count: int = 0,
    text: str = "line {}",
    timestamp: int | None = None,
) -> None:
    """Put lines into a stream: `messages`, or `count` times `text` with numbers."""
    lines = messages if messages is not None else [text.format(number) for number in range(count)]
    world.logs(region).append(group, stream, lines, timestamp)
