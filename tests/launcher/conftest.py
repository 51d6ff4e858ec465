"""Jobs in the registry without a real run."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.store.registry import Registry, this_process
from doubles.plans import plan_of
from doubles.terminals import COMMAND, Terminal

PLAN = plan_of(instances=2, ranks=2, hourly_usd=0.0)


@pytest.fixture
def registry(home: Path) -> Registry:
    """Return an empty registry in the private home folder."""
    return Registry()


@pytest.fixture
def make_job() -> Callable[..., Job]:
    """Return a function that makes a job like `submit`, before the job is journalled."""

    def make(job_id: str, number: int = 1, **changes: Any) -> Job:
        attempt = Attempt(job_id, number, "intent", PLAN, {"body": 1}, time.time(), this_process())
        job = Job(job_id, job_id.split("-")[0], "local", time.time(), {}, "/x/cloudtrain.yaml", {}, attempt)
        return replace(job, **changes)

    return make


@pytest.fixture
def seed(home: Path, make_job: Callable[..., Job]) -> Callable[..., Job]:
    """Return a function that puts a job with the given state into the registry, with the logs of two ranks on disk."""

    def put(name: str = "seeded", state: State | None = None, lines: dict[str, str] | None = None) -> Job:
        registry = Registry()
        job, _ = registry.add(name, make_job, exclusive=True, key=None)
        if state is not None:
            folder = home / "local" / name / "attempt-1"
            for node in range(2):
                (folder / f"node-{node}" / "log").mkdir(parents=True)
                text = (lines or {}).get(f"{node}", f"hello from node {node}\n")
                (folder / f"node-{node}" / "log" / f"rank-{node}.log").write_text(text)
                (folder / f"node-{node}" / "exit.json").write_text("{}")
            ref = {"folder": str(folder), "nodes": 2, "checkpoint_dir": str(folder)}
            registry.mark_sent(job.attempt, ref)
            registry.set_state(job.attempt, state, {})
        found = registry.find(job.id)
        registry.close()
        return found

    return put


@pytest.fixture
def terminal(home: Path) -> Iterator[Callable[..., Terminal]]:
    """Return a function that runs `cloudtrain watch` with arguments on a terminal."""
    begun: list[Terminal] = []

    def begin(*args: str, argv: list[str] | None = None, **environ: str) -> Terminal:
        begun.append(Terminal(home, argv or [str(COMMAND), "watch", *args], **environ))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()
