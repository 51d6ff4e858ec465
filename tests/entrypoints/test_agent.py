"""The agent of a single node in this process, without ranks."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import atomic_json
from cloudtrain.entrypoints.agent import transport
from cloudtrain.entrypoints.agent.agent import Agent
from cloudtrain.entrypoints.agent.coordinate import Desired
from cloudtrain.entrypoints.contract import AgentSpec

HOST = "127.0.0.1"
DAY_S = 86_400.0
Make = Callable[..., Agent]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes the agent of node 0 of a one-node job."""
    with contextlib.ExitStack() as made:

        def agent(home: str = "home", **more: Any) -> Agent:
            root = tmp_path / home
            (root / "log").mkdir(parents=True)
            server = transport.listen(HOST)
            found = Agent(_spec(root, **more), server, umask=0o022)
            made.callback(lambda: found.ranks._port is not None and found.ranks._port.close())
            made.callback(found.membership.close)
            return found

        yield agent


def _spec(root: Path, **more: Any) -> AgentSpec:
    job = {"job": "same", "attempt": 1, "min_nodes": 1, "node_counts": [1], "max_restarts": 3}
    limits = {"limit_reason": "time_limit", "deadline_s": 500, "max_duration_s": 600, "grace_s": 10}
    own = dict.fromkeys(("bundle", "sha256", "python", "workdir"), "")
    own |= {"node": 0, "address": HOST, "head": [HOST, 0], "token": "token", "colocated": 1}
    own |= {"root": str(root), "environment": {"CLOUDTRAIN_CHECKPOINT_DIR": str(root / "checkpoints")}}
    return AgentSpec.load({**own, **limits, "spec": job, **more})


def test_deadline_of_the_ranks_is_the_remaining_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock set after the agent's start moves no deadline of a later start of the ranks."""
    agent, wall_s = make(), time.time()
    agent.membership.zero_s -= 100
    monkeypatch.setattr(time, "time", lambda: wall_s + DAY_S)
    told = agent._environment(Desired("run", 2, nodes=(0,)))
    assert float(told["CLOUDTRAIN_DEADLINE"]) == pytest.approx(wall_s + DAY_S + 500, abs=60)


def test_rendezvous_ports_of_two_jobs_differ(make: Make, tmp_path: Path) -> None:
    """Two jobs with the same name in two home folders share a range of three ports, before and after a restart."""
    first, second = (make(home, ports=(23_451, 23_453)) for home in ("one", "two"))
    ports = [first.ranks.fresh_port(), second.ranks.fresh_port()]
    assert len(set(ports)) == 2
    ports[0] = first.ranks.fresh_port()
    assert len(set(ports)) == 2
    with pytest.raises(OSError, match="no free port between"):
        transport.reserved(_spec(tmp_path, ports=(ports[1], ports[1])))


@pytest.mark.parametrize("is_task", [False, True])
def test_growth_waits_for_the_end_of_a_scripts_save(make: Make, monkeypatch: pytest.MonkeyPatch, is_task: bool) -> None:
    """A script may write several files, or the only file again; a task's checkpoint is whole at its first sight."""
    agent = make()
    files, now_s = agent.files, time.time()
    monkeypatch.setattr(files, "is_task", is_task)
    monkeypatch.setattr(transport, "BEAT_S", -1.0)
    files.checkpoints.mkdir()
    (files.checkpoints / "model.pt").write_bytes(b"weights")
    os.utime(files.checkpoints / "model.pt", (now_s, now_s))
    assert bool(files.latest()) == is_task
    os.utime(files.checkpoints / "model.pt", (now_s - 5, now_s - 5))
    whole = files.latest()
    assert whole
    (files.checkpoints / "optimizer.pt").write_bytes(b"moments")
    assert (files.latest() != whole) == is_task


def test_store_of_torch_listens_on_the_held_port(make: Make, tmp_path: Path) -> None:
    """The agent keeps the port while torchrun uses it, so no other job finds the port."""
    from torch.distributed import TCPStore

    port = make().ranks.fresh_port()
    store = TCPStore(HOST, port, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert TCPStore(HOST, port, is_master=False).get("key") == b"value"
    with pytest.raises(OSError, match="no free port"):
        transport.reserved(_spec(tmp_path, ports=(port, port)))


@pytest.fixture
def finishing(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """Return the agent of a script after the success of its rank; boot still runs, and ignores SIGTERM."""
    agent = make()
    agent.files.is_task = False
    monkeypatch.setattr(agent.ranks, "kill_tree", list)  # the descendants of this process are not the agent's alone
    agent.membership._coordinator.desired = Desired("run", 1, nodes=(0,))
    agent._set(phase="running", generation=1)
    agent.ranks.generation, agent.desired = 1, agent.membership._coordinator.desired
    agent.ranks.result.mkdir(parents=True)
    (agent.ranks.result / "left-0").write_text("0")
    command = ["sh", "-c", "trap '' TERM; echo ready; exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as boot:
        boot.stdout.readline()
        agent.ranks.boot = boot
        yield agent
        boot.kill()


def _ended(agent: Agent) -> tuple[str, str | None]:
    """Return state and reason of the exit report."""
    while not agent._turn():
        pass
    return agent.ended.state, agent.ended.reason


def test_deadline_after_the_ranks_success_is_a_success(finishing: Agent) -> None:
    """The limit ends the node at once, and the exit report has the ranks' success."""
    finishing.membership.zero_s -= 1000
    assert _ended(finishing) == ("succeeded", None)


def test_stop_file_after_the_ranks_success_is_a_success(finishing: Agent) -> None:
    """`stop --now` arrives while the agent finishes the node."""
    atomic_json.write_json(finishing.root / "stop.json", {"reason": "now"})
    assert _ended(finishing) == ("succeeded", None)


def test_sigterm_after_the_ranks_success_is_a_success(finishing: Agent) -> None:
    """A cloud sends SIGTERM at its time limit, and the grace period passes."""
    assert not finishing._turn()
    finishing._on_sigterm(signal.SIGTERM, None)
    assert not finishing._turn()
    assert finishing.report.stop == "preempted"
    finishing.membership.zero_s -= 1000
    assert _ended(finishing) == ("succeeded", None)


def test_rank_that_ends_after_the_stop_request_is_stopped(finishing: Agent) -> None:
    """After a stop request, exit code 0 of a script may mean a save before the end of the work."""
    left = finishing.ranks.result / "left-0"
    left.unlink()
    finishing._on_sigterm(signal.SIGTERM, None)
    assert not finishing._turn()
    left.write_text("0")
    finishing.membership.zero_s -= 1000
    assert _ended(finishing) == ("stopped", "preempted")


def test_result_of_boot_counts_if_a_signal_kills_boot_at_its_end(finishing: Agent) -> None:
    """Python removes signal handlers shortly before the process ends, after boot has written its result."""
    atomic_json.write_json(finishing.ranks.result / "result.json", {"code": 0, "failures": []})
    finishing.ranks.boot.kill()
    finishing.ranks.boot.wait()
    finishing.ranks.boot.returncode = -signal.SIGTERM
    finishing.asked_to_stop = True
    finishing._collect()
    assert (finishing.report.phase, finishing.report.code) == ("exited", 0)


def test_boot_without_a_result_gives_its_last_words(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python did not start, for example by a PYTHONHOME in `env`: `status` has the reason from boot's log."""
    agent = make()
    monkeypatch.setattr(agent.ranks, "kill_tree", list)  # the children of this process are the tests' stand-ins
    agent.ranks.generation = 1
    (agent.ranks._root / "log" / "boot.log").write_text(
        "ModuleNotFoundError: No module named 'encodings'\n\nThread 1\n"
    )
    with subprocess.Popen(["false"]) as boot:
        boot.wait()
    agent.ranks.boot = boot
    told = agent.ranks.collect(was_asked=False)
    words = "boot of node 0 ended with code 1: ModuleNotFoundError: No module named 'encodings'"
    assert ([failure["message"] for failure in told["failures"]], told["code"]) == ([words], 1)


def test_boot_that_ends_between_two_looks_keeps_its_code(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A boot that ends after the agent has reaped its children is no boot that a signal has killed."""
    agent, wait = make(), os.waitpid
    with subprocess.Popen(["true"]) as boot:
        agent.ranks.boot = boot

        def ends_after_the_look(pid: int, options: int) -> tuple[int, int]:
            if pid != -1:
                return wait(pid, options)
            os.waitid(os.P_PID, boot.pid, os.WEXITED | os.WNOWAIT)
            return 0, 0

        monkeypatch.setattr(os, "waitpid", ends_after_the_look)
        assert agent.ranks.boot_code() == 0
