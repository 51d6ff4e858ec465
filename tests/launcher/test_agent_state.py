"""The state of a job, folded from the states of its nodes."""

from dataclasses import replace
from typing import Any

from cloudtrain.entrypoints.contract import NodeStatus
from cloudtrain.launcher.backend.agent_state import STRAGGLER_S, fold
from cloudtrain.launcher.job import CLOCKS, State

LOST = {"rank": None, "kind": "lost", "message": "lost contact with node 0 for 10 s"}


def look(
    *,
    alive: bool = True,
    ended: dict[str, Any] | None = None,
    ago_s: float = 1.0,
    asked: str | None = None,
    **more: Any,
) -> NodeStatus:
    """Return the status of a node that runs, has ended with a report, or is gone (`alive` False) without a report."""
    state = {"pid": 1, "started_s": 100.0, "generation": 1, "detail": None, **more.pop("state", {})}
    told = {"state": state, "alive": alive, "exit": ended, "asked": asked}
    return NodeStatus.load({**told, "ended_ago_s": ago_s if ended else 0.0, **more})


def verdict(state: str = "succeeded", reason: str | None = None, **more: Any) -> dict[str, Any]:
    """Return the report that an agent writes at the end."""
    times = {"started_s": 100.0, "ended_s": 160.0, "held_s": 61.5}
    return {"state": state, "reason": reason, "resumable": False, "error": None, "restarts": 0, **times, **more}


def gone(**more: Any) -> NodeStatus:
    """Return the status of a node with a killed agent."""
    return look(alive=False, **{"last_s": 150.0, **more})


def folded(looks: dict[int, NodeStatus], nodes: int) -> State:
    """Return the job's state, which must be known."""
    found = fold(looks, nodes)
    assert found is not None
    return found


def state_of(looks: dict[int, NodeStatus], nodes: int = 2, **more: Any) -> tuple[str, str | None] | None:
    """Return the job's state and reason."""
    found = fold(looks, nodes, **more)
    return None if found is None else (found.state, found.reason)


def test_node_0_decides_while_its_agent_is_alive() -> None:
    """Pending before the first start, stopping after a request; a straggler delays the verdict only for a while."""
    assert state_of({0: look(state={"generation": 0})}) == ("pending", None)
    assert state_of({0: look()}) == ("running", None)
    assert state_of({0: look(asked="user")}) == ("stopping", None)
    ended = look(alive=False, ended=verdict())
    found = folded({0: ended}, 2)
    assert (found.state, found.started_s, found.ended_s, found.billed_s) == ("succeeded", 100.0, 160.0, 61.5)
    assert state_of({0: ended, 1: look()}) == ("running", None)
    late = look(alive=False, ended=verdict(), ago_s=STRAGGLER_S + 1)
    assert state_of({0: late, 1: look()}) == ("succeeded", None)


def test_nodes_are_billed_until_they_are_given_up() -> None:
    """The newest generation decides while the job runs and at its end; the billed time is the mean of all nodes."""
    behind = look(held_s=90.0, state={"generation": 1})
    newest = look(held_s=80.0, state={"generation": 2, "gone_s": {"2": 20.0}})
    found = folded({0: behind, 1: newest}, 3)
    assert (found.state, found.billed_s, found.gone_s) == ("running", 60.0, {"2": 20.0})
    waits = folded({0: look(held_s=9.0, state={"generation": 0})}, 1)
    assert (waits.state, waits.started_s, waits.billed_s) == ("pending", 100.0, 9.0)
    ended = look(alive=False, ended=verdict(gone_s={"2": 20.0}))
    over = folded({0: ended}, 3)
    assert (over.billed_s, over.gone_s, over.billed_by) == (61.5, {"2": 20.0}, "the nodes' clocks")
    lost = folded({0: gone(held_s=55.0)}, 1)
    assert (lost.state, lost.billed_s, lost.gone_s) == ("failed", 55.0, None)


def test_spares_are_billed_from_their_begin() -> None:
    """Of two nodes one is lost after 20 s, replaced by a spare, which is lost after 30 s and replaced by another."""
    swapped = {"generation": 3, "gone_s": {"1": 20.0, "2": 30.0}, "joined_s": {"2": 20.0, "3": 50.0}}
    waiting = look(held_s=90.0, state={"generation": 0, "detail": "waits as a spare"})
    found = fold({0: look(held_s=80.0, state=swapped), 3: waiting}, 2, spares=3)
    assert found is not None
    assert (found.billed_s, found.joined_s, found.spare_attempts) == (80.0, {"2": 20.0, "3": 50.0}, 2)
    fenced = look(alive=False, ended=verdict(fenced=True))
    assert fold({0: fenced, 1: fenced}, 2, spares=1) is None, "the spare may go on"


def test_preempted_job_in_line_tells_the_end_of_its_last_run() -> None:
    """So no limit and no cost counts the wait."""
    state = {"generation": 0, "phase": "queued", "queue": {"place": 1}, "ended_s": 140.0}
    waits = folded({0: look(held_s=40.0, state=state), 1: look(held_s=40.0, state={**state, "ended_s": 141.0})}, 2)
    assert (waits.waits_again, waits.ended_s, waits.billed_s, waits.billed_by) == (True, 141.0, 40.0, CLOCKS)


def test_newest_generation_decides() -> None:
    """A lost node knows less than the remaining; agents of an earlier version report no clock while they run."""
    found = folded({0: gone(), 1: look(state={"generation": 3, "detail": "node 0 was lost"})}, 3)
    assert (found.state, found.restarts, found.detail) == ("running", 2, "node 0 was lost")
    found = folded({0: look()}, 1)
    assert (found.billed_s, found.gone_s) == (None, None)


def test_node_that_was_cut_off_reports_only_itself() -> None:
    """Unseen nodes may continue; the report is enough if all nodes must take part, or if all were seen."""
    fenced = look(alive=False, ended=verdict("failed", "node_failure", error=LOST, fenced=True))
    assert state_of({1: fenced}, 3) is None
    assert state_of({0: fenced}, 3) is None
    assert state_of({1: fenced}, 2, can_shrink=False) == ("failed", "node_failure")
    assert state_of({0: fenced, 1: fenced}) == ("failed", "node_failure")
    long_ago = replace(fenced, ended_ago_s=STRAGGLER_S + 1)
    assert state_of({0: long_ago, 1: look(), 2: look()}, 3) == ("running", None)
    ended = look(alive=False, ended=verdict())
    assert state_of({0: fenced, 1: ended, 2: ended}, 3) == ("succeeded", None)


def test_job_is_lost_only_if_all_nodes_were_seen() -> None:
    """A missing agent says nothing about unseen nodes; a lost job has the last line's time, checkpoint and restart."""
    assert state_of({0: gone()}) is None
    assert state_of({0: gone(), 1: gone()}) == ("failed", "node_failure")
    assert state_of({0: gone(asked="now"), 1: gone(asked="now")}) == ("stopped", "user")
    found = folded({0: gone(), 1: gone(saved=True, last_s=170.0, rebooted=True)}, 2)
    assert (found.resumable, found.ended_s) == (True, 170.0)
    assert "machine was restarted" in found.error["message"]


def test_checkpoint_of_any_node_makes_a_job_resumable() -> None:
    """A lost node may be the node with the checkpoint; a job that succeeded is not resumable."""
    fenced = look(alive=False, ended=verdict("failed", "node_failure", error=LOST, fenced=True))
    found = folded({0: gone(saved=True), 1: fenced}, 2)
    assert (found.state, found.resumable) == ("failed", True)
    done = folded({0: look(alive=False, ended=verdict()), 1: gone(saved=True)}, 2)
    assert not done.resumable
