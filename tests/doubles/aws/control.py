"""`/_control/...`: a test's requests to AWS's stand-in itself."""

from collections.abc import Callable, Mapping
from typing import Any

from doubles.aws import training
from doubles.aws.world import World
from doubles.kit import control

ORDERS = ("interrupt", "end", "abandon")


class Control(control.Control[World]):
    """Answers the control requests."""

    def actions(self, told: dict[str, Any]) -> Mapping[tuple[str, str], Callable[[], Any]]:
        """Return AWS's actions."""
        world = self._world
        return {("POST", "quotas"): lambda: world.quotas.update(told), ("POST", "logs"): lambda: _write(world, **told)}

    def begin_late(self, name: str) -> None:
        """Start the containers of a job that has ended without machines."""
        if (job := self._world.job(name)) is None:
            raise KeyError(name)
        training.begin_late(self._world, job)

    def job(self, path: str, told: dict[str, Any]) -> Any:
        """Give an order to a job: jobs/NAME/ORDER."""
        name, order = path.split("/")
        job = self._world.job(name)
        if job is None or order not in ORDERS:
            raise KeyError(path)
        return job.order(order, **told)


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
