"""A node's return: which lost agents are started again, and when the wait ends. Real processes and sockets."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import atomic_json
from cloudtrain.entrypoints.agent import returning
from cloudtrain.entrypoints.contract import AgentSpec, AgentState, ExitReport

LEAVES_EXIT = {"fenced": ExitReport("failed", fenced=True), "ended": ExitReport("succeeded")}


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Return a listener in node 0's place; a node returns at once."""
    monkeypatch.setattr(returning, "RETURN_S", 0.0)
    monkeypatch.setattr(returning, "LOOK_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def lives(leader: socket.socket, tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a node's agents, and returns their numbers, in order."""

    head = leader.getsockname()

    def run(*ends: str, generation: int = 1, stop: bool = False) -> str:
        """`ends`: how each agent ends, by its exit report: fenced, ended, or killed without a report."""
        job = {"nodes": 2, "min_nodes": 1}
        limits = {"limit_reason": "budget", "deadline_s": 60, "max_duration_s": 60, "grace_s": 1, "spec": job}
        own = {"node": 1, "address": "127.0.0.1", "head": head, "root": str(tmp_path)}
        spec = AgentSpec.load({**own, **limits, "bundle": "", "sha256": "", "python": "", "workdir": ""})
        assert returning.may_return(spec)
        atomic_json.write_json(tmp_path / "state.json", AgentState(1, generation=generation).dump())
        if stop:
            atomic_json.write_json(tmp_path / "stop.json", {"reason": "user"})

        def agent(spec: AgentSpec, taken: object) -> int:
            with (tmp_path / "lives").open("a") as file:
                print(spec.life, "late" if spec.used_s else "", file=file, end=";")
            if report := LEAVES_EXIT.get(ends[spec.life]):
                atomic_json.write_json(tmp_path / "exit.json", report.dump())
            os._exit(75)

        child = os.fork()  # it ends its descendants, and these tests have others
        if child == 0:
            os._exit(returning.stay(spec, agent))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
        return (tmp_path / "lives").read_text()

    return run


@pytest.mark.parametrize("first", ["killed", "fenced"])
def test_lost_agent_is_started_again_until_the_job_ends(first: str, lives: Callable[..., str]) -> None:
    """The new agent knows its number and the time since the first start; the old exit report is gone."""
    assert lives(first, "ended") == "0 ;1 late;"


def test_agent_that_ended_is_not_started_again(lives: Callable[..., str]) -> None:
    """The job's end is final."""
    assert lives("ended") == "0 ;"


@pytest.mark.parametrize("changes", [{"generation": 0}, {"stop": True}], ids=["no ranks yet", "a stop request"])
def test_agent_is_not_started_again_without_need(changes: dict[str, Any], lives: Callable[..., str]) -> None:
    """A start that was given up, and a job that a user stops, leave no agent."""
    assert lives("killed", **changes) == "0 ;"


def test_refused_connection_ends_the_wait(leader: socket.socket, lives: Callable[..., str]) -> None:
    """Node 0 has ended, and with it the job."""
    leader.close()
    assert lives("killed") == "0 ;"
