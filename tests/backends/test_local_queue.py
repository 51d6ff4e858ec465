"""Jobs in line for this machine, with real agents and an interpreter that only sleeps."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.local import jobs
from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.agent import gpulocks
from cloudtrain.entrypoints.agent.coordinate import Desired
from cloudtrain.entrypoints.agent.queue_wait import QueueWait
from cloudtrain.entrypoints.contract import AgentSpec, JobSpec
from cloudtrain.launcher.jobs import queue
from cloudtrain.launcher.store.registry import Registry
from doubles.waiting import until


@pytest.fixture
def send(cli: Any, project: Callable[..., Path], idle_python: Path) -> Iterator[Callable[..., str]]:
    """Return a function that submits a job of two nodes and returns its id; all jobs are stopped in the end."""
    jobs: list[str] = []

    def submit(name: str, *options: str) -> str:
        where = project(f"resources: {{instances: 2}}\nlocal: {{python: {idle_python}}}\n")
        cli.ok("submit", "-d", "-y", "--name", name, *options, cwd=where)
        jobs.append(name)
        return name

    yield submit
    for job in jobs:
        cli("stop", "--now", "-y", job)


def test_queued_jobs_run_one_after_the_other(cli: Any, send: Any) -> None:
    """Jobs with --queue wait for a running job and for each other; a plain job never waits."""

    def state(job: str) -> str:
        return str(cli("status", job, "--json").json["state"])

    plain = send("plain")
    first, second = send("first", "--queue"), send("second", "--queue")
    until(lambda: (cli("status", second, "--json").json["queue"] or {}).get("place") == 2)
    assert "job plain holds this machine" in cli("status", first).stdout
    assert send("beside") == "beside"
    until(lambda: state("beside") == "running")
    assert (state(first), state(second)) == ("pending", "pending")
    assert cli("stop", "--now", "-y", plain).code == 0
    until(lambda: state(first) == "running")
    assert state(second) == "pending"
    assert cli("stop", "--now", "-y", second).code == 0
    assert state(second) == "stopped"
    assert cli("stop", "--now", "-y", first).code == 0
    assert gpulocks.holders(cli.home / "locks") == []


def test_each_node_gets_its_share_of_the_free_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job takes any free GPUs at its turn, and the nodes of this machine share them."""
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(processes, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nodes = [{"node": 0, "gpus": [0]}, {"node": 1, "gpus": [1]}]
    terms = {"priority": 50, "preempt": False, "max_wait_s": None}
    locks = jobs.locks_of(tmp_path, {"job": "j", "nodes": nodes, "queue": terms})
    assert locks["queue"]["needs"] == {"this machine": 2}
    folder = gpulocks.folder(locks["folder"])
    other = gpulocks.take(folder, ["gpu-0", "gpu-2"], {"job": "other"})
    taken = gpulocks.take(folder, ["gpu-1", "gpu-3"], {"job": "j"})
    for node, gpu in ((0, "1"), (1, "3")):
        times = {"max_duration_s": 60, "deadline_s": 60, "limit_reason": "time_limit", "grace_s": 5}
        job = JobSpec(nodes=2)
        spec = AgentSpec(job=job, node=node, address="", root="", bundle="", sha256="", python="", workdir="", **times)
        waiting = QueueWait(spec, None, locks)
        waiting.taken = taken if node == 0 else None
        won = waiting._with_gpus(Desired("go", queue={"units": ["gpu-1", "gpu-3"]}))
        assert won.environment["CUDA_VISIBLE_DEVICES"] == gpu
    other.release()
    taken.release()


def test_job_whose_waiting_agents_were_lost_is_sent_again(cli: Any, send: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the death of its waiting agents, as at a reboot, `advance_queue` sends the job again, once."""
    send("plain")
    lost = send("lost", "--queue")
    for node in (0, 1):
        state = cli.home / f"local/{lost}/attempt-1/node-{node}/state.json"
        os.kill(json.loads(state.read_text())["pid"], signal.SIGKILL)
    until(lambda: cli("status", lost, "--json").json["state"] == "failed")
    monkeypatch.setattr(queue, "TRY_S", 0.0)
    with closing(Registry(cli.home)) as registry:
        assert queue.advance_queue(registry) == [f"sent again after its agents were lost in line: {lost}, attempt 2"]
        assert queue.advance_queue(registry) == []
    until(lambda: (cli("status", lost, "--json").json["queue"] or {}).get("place") == 1)
