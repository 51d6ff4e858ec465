"""Jobs in line for hosts that are in use, on real hosts with sshd."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles.sshhosts import lightpython
from doubles.sshhosts.cluster import Cluster

pytestmark = pytest.mark.slow

# Replaces torchrun: notes start and end, and runs until a file `go` appears, or until a stop request.
TRAIN = """\
import os, signal, sys, time
from pathlib import Path

out = Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with (out / "starts").open("a") as file:
    file.write(f"{time.time()}\\n")
Path("saved").mkdir(exist_ok=True)
(Path("saved") / "step").write_text("1")
while not (out / "go").exists():
    time.sleep(0.05)
(out / "end").write_text(str(time.time()))
"""


@pytest.fixture
def pair(ssh_pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return two hosts that the command finds, with an interpreter that starts no torchrun."""
    ssh_pair.apply(monkeypatch)
    for host in ssh_pair.hosts:
        lightpython.install(host)
    return ssh_pair


def config(more: str = "", hosts: str = "h0, h1", instances: int = 2) -> str:
    """Return the config of a job on the hosts."""
    return f"""\
backend: ssh
resources: {{instances: {instances}}}
keep: [saved/]
{more}
ssh: {{hosts: [{hosts}], ssh_config: "${{SSH_CONFIG}}", python: {lightpython.PATH}}}
"""


@pytest.fixture
def send(cli: Any, project: Callable[..., Path]) -> Iterator[Callable[..., str]]:
    """Return a function that submits a job and returns its id; all jobs are stopped in the end."""
    jobs: list[str] = []

    def submit(name: str, text: str, *options: str) -> str:
        where = project(text, script="train.py", text=TRAIN)
        done = cli("submit", "-d", "-y", "--json", "--name", name, *options, cwd=where)
        assert done.code == 0, done.stderr
        jobs.append(done.json["job"])
        return jobs[-1]

    yield submit
    for job in jobs:
        cli("stop", "--now", "-y", job)


@pytest.fixture
def state_of(cli: Any) -> Callable[[str], dict[str, Any]]:
    """Return a function that returns a job's state as JSON."""
    return lambda job: dict(cli("status", job, "--json").json)


@pytest.fixture
def until(state_of: Callable[[str], dict[str, Any]], wait_until: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return a function that waits for a job's state, and returns the job."""

    def wait(job: str, *states: str) -> dict[str, Any]:
        wait_until(lambda: state_of(job)["state"] in states, 60, 0.3)
        return state_of(job)

    return wait


def output(cluster: Cluster, job: str, node: int = 0) -> Path:
    """Return the output folder of a job's node."""
    return next(path for path in _jobs(cluster, node) if path.name == job) / "output"


def _jobs(cluster: Cluster, node: int) -> list[Path]:
    return list(cluster.hosts[node].folder.glob("home/*/.cloudtrain/jobs/*"))


def finish(cluster: Cluster, job: str) -> None:
    """Let the ranks of a running job end."""
    for number in range(len(cluster.hosts)):
        for path in _jobs(cluster, number):
            if path.name == job:
                (path / "output/go").touch()


def test_gang_starts_within_5_s_of_the_end_of_the_job_before(
    pair: Cluster, send: Any, until: Any, state_of: Any, cli: Any
) -> None:
    """A queued job of two hosts waits, says why, and starts when the first job ends."""
    first = send("first", config("limits: {max_duration: 1h}"))
    until(first, "running")
    second = send("second", config(), "--queue")
    found = state_of(second)
    assert (found["state"], found["queue"]["place"], found["queue"]["of"]) == ("pending", 1, 1)
    assert "job first holds h0, h1" in found["queue"]["reason"]
    assert 3000 < found["queue"]["start_s"] - time.time() < 3700
    assert found["started_s"] is None
    assert "place 1 of 1 in line" in cli("status", second).stdout
    finish(pair, first)
    until(second, "running")
    until(first, "succeeded")
    ended_s = float((output(pair, first) / "end").read_text())
    assert float((output(pair, second) / "starts").read_text().split()[0]) - ended_s < 5
    assert state_of(second)["queue"] is None
    finish(pair, second)
    assert until(second, "succeeded")["exit_code"] == 0
