"""Jobs in the registry without a real run."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.store.registry import Registry
from doubles.killed import KILLED
from doubles.plans import make_job
from doubles.terminals import COMMAND, Terminal


@pytest.fixture
def registry(home: Path) -> Registry:
    """Return an empty registry in the private home folder."""
    return Registry()


@pytest.fixture
def seed(home: Path) -> Callable[..., Job]:
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
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets a backend's answer to each question for a state; the log has no lines."""

    def install(answer: Callable[[Any], State], backend: str = "local") -> None:
        monkeypatch.setattr(backends.load(backend), "state", answer)
        for name in ("logs", "logs_with"):
            empty = lambda *args, **kwargs: backends.LogPage([], {})  # noqa: E731
            monkeypatch.setattr(backends.load(backend), name, empty, raising=False)
        monkeypatch.setattr(backends.load(backend), "pace", lambda ref: backends.Pace())

    return install


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


@pytest.fixture
def killed_submit(cli: Any) -> Callable[..., None]:
    """Return a function that submits the folder's job in the background, and kills the process at a step."""

    def submit(folder: Path, target: str, when: str, *more: str) -> None:
        command = [sys.executable, "-c", KILLED, target, when, "submit", "-d", *more]
        done = subprocess.run(command, cwd=folder, env=cli.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr

    return submit
