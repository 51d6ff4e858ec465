"""Node 0's decisions, from reports alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.entrypoints.coordinate import Coordinator, Desired, Report, Rules

RULES = Rules(
    nodes=2,
    max_restarts=1,
    limit_reason="time_limit",
    soft_deadline_s=900,
    hard_deadline_s=1000,
    grace_s=30,
    join_timeout_s=60,
)
SIGNAL = {"rank": 1, "kind": "signal", "signal": "SIGKILL", "message": "killed by SIGKILL", "time_s": 2.0}
RAISED = {"rank": 1, "kind": "exception", "type": "ValueError", "message": "boom", "time_s": 2.0}
COLLATERAL = {"rank": 0, "kind": "exception", "message": "gloo: closed by peer", "time_s": 1.0, "peer_lost": True}


class Job:
    """A coordinator and the reports it sees."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.coordinator = Coordinator(rules)
        self.reports = {node: Report(node) for node in range(rules.nodes)}
        self.now_s = 0.0

    def say(self, node: int, **changes: Any) -> None:
        """Change what a node reports."""
        self.reports[node] = replace(self.reports[node], **changes)

    def run(self) -> None:
        """Start every node."""
        generation = self.decide().generation
        for node in self.reports:
            self.say(node, phase="running", generation=generation, code=None, failures=(), saved=None)

    def decide(self, after_s: float = 0.1, lost: frozenset[int] = frozenset()) -> Desired:
        """Let time pass, and ask."""
        self.now_s += after_s
        return self.coordinator.decide(self.reports, set(lost), self.now_s, lambda: 20001)


@pytest.fixture
def job() -> Job:
    """A job whose two nodes run."""
    job = Job()
    job.run()
    return job


def test_start_waits_for_every_node() -> None:
    """Nothing runs before all nodes have joined."""
    job = Job()
    second = job.reports.pop(1)
    assert job.decide().want == "wait"
    job.reports[1] = second
    assert job.decide() == Desired("run", 1, 20001)


def test_start_names_the_node_that_never_joined() -> None:
    """A job whose node stays away fails, and says which."""
    job = Job()
    del job.reports[1]
    verdict = job.decide(after_s=61).verdict
    assert verdict is not None
    assert (verdict["state"], verdict["reason"]) == ("failed", "node_failure")
    assert "node 1 did not join" in verdict["error"]["message"]


def test_end_is_success_only_when_all_nodes_are_done(job: Job) -> None:
    """One node's exit 0 is not the job's end."""
    job.say(0, phase="exited", code=0)
    assert job.decide().want == "run"
    job.say(1, phase="exited", code=0)
    assert job.decide().verdict == {
        "state": "succeeded", "reason": None, "error": None, "restarts": 0, "restarted_after": []
    }  # fmt: skip


def test_failure_kills_all_and_a_killed_worker_restarts(job: Job) -> None:
    """After a SIGKILL every node is killed, then all start again with a fresh port."""
    job.say(1, phase="exited", code=70, failures=(SIGNAL,))
    assert job.decide().want == "kill"
    job.say(0, phase="exited", code=70, failures=(COLLATERAL,))
    assert (job.decide().want, job.decide().generation) == ("run", 2)


def test_restart_stops_at_its_limit(job: Job) -> None:
    """`max_restarts: 1` restarts once; then the job fails with the second cause."""
    for _ in range(2):
        job.say(0, phase="exited", code=70, failures=(COLLATERAL,))
        job.say(1, phase="exited", code=70, failures=(SIGNAL,))
        job.decide()
        desired = job.decide()
        if desired.want == "run":
            for node in job.reports:
                job.say(node, phase="running", generation=desired.generation, code=None, failures=())
    assert desired.verdict is not None
    assert (desired.verdict["state"], desired.verdict["restarts"]) == ("failed", 1)


def test_exception_of_the_users_code_is_not_restarted(job: Job) -> None:
    """The same code would raise again; the root cause is the exception, not the peer's lost connection."""
    job.say(0, phase="exited", code=70, failures=(COLLATERAL,))
    assert job.decide().want == "run", "a lost connection waits for the account of who broke it"
    job.say(1, phase="exited", code=70, failures=(RAISED,))
    job.decide()
    verdict = job.decide().verdict
    assert verdict is not None
    assert (verdict["state"], verdict["reason"], verdict["error"]["message"]) == ("failed", "error", "boom")


def test_same_echoes_twice_end_the_job() -> None:
    """Ranks that again find nobody there, with nobody broken, would do so for ever."""
    job = Job(replace(RULES, max_restarts=3))
    job.run()
    for _ in range(2):
        for node in job.reports:
            job.say(node, phase="exited", code=70, failures=({**COLLATERAL, "rank": node},))
        job.decide()
        desired = job.decide()
        for node in job.reports:
            job.say(node, phase="running", generation=desired.generation, code=None, failures=())
    assert desired.verdict is not None
    assert (desired.verdict["state"], desired.verdict["restarts"]) == ("failed", 1)


def test_node_that_cannot_unpack_ends_the_job_with_its_reason() -> None:
    """A damaged bundle is said before anything starts."""
    job = Job()
    job.say(1, phase="exited", code=64, failures=({"rank": None, "kind": "config", "message": "arrived damaged"},))
    verdict = job.decide().verdict
    assert verdict is not None
    assert (verdict["state"], verdict["error"]["message"]) == ("failed", "arrived damaged")


def test_stop_waits_for_the_save_then_ends(job: Job) -> None:
    """A stop is passed to all nodes, and is over when all have saved."""
    job.say(1, stop="user")
    assert job.decide().want == "stop"
    job.say(0, phase="exited", code=75)
    assert job.decide().want == "stop"
    job.say(1, phase="exited", code=143)
    verdict = job.decide().verdict
    assert verdict is not None
    assert (verdict["state"], verdict["reason"]) == ("stopped", "user")


def test_stop_ends_after_its_grace(job: Job) -> None:
    """A job that never saves does not keep the machines."""
    job.say(0, stop="user")
    assert job.decide().want == "stop"
    assert job.decide(after_s=31).want == "end"


def test_stop_now_does_not_wait(job: Job) -> None:
    """`stop --now` ends at once, also after a stop that waits; it is the user's doing."""
    job.say(0, stop="user")
    assert job.decide().want == "stop"
    job.say(0, stop="now")
    verdict = job.decide().verdict
    assert verdict is not None
    assert verdict["reason"] == "user"


def test_deadline_asks_to_save_then_ends(job: Job) -> None:
    """The cap holds by itself: a signal before it, the end at it."""
    assert job.decide(after_s=900).reason == "time_limit"
    assert job.decide(after_s=101).want == "end"


def test_own_deadline_of_the_trainer_is_a_time_limit(job: Job) -> None:
    """All ranks saved because their deadline came near: stopped, not failed, and not a restart."""
    for node in job.reports:
        job.say(node, phase="exited", code=75, saved={"reason": "deadline"})
    verdict = job.decide().verdict
    assert verdict is not None
    assert (verdict["state"], verdict["reason"]) == ("stopped", "time_limit")


def test_lost_node_ends_the_others(job: Job) -> None:
    """Silence of one node kills the rest; nothing is left to hang and bill."""
    assert job.decide(lost=frozenset({1})).want == "kill"
    job.say(0, phase="exited", code=70, failures=(COLLATERAL,))
    verdict = job.decide(lost=frozenset({1})).verdict
    assert verdict is not None
    assert verdict["error"]["message"] == "node 1 was lost: its agent is silent"


@pytest.mark.parametrize(("mine", "cause"), [(RAISED, "boom"), (COLLATERAL, "node 1 was lost")])
def test_node_lost_while_all_are_killed_hides_no_cause(job: Job, mine: dict[str, Any], cause: str) -> None:
    """What a rank raised by itself stays the cause; an echo is explained by the loss."""
    job.say(0, phase="exited", code=70, failures=(mine,))
    job.decide()
    assert job.decide(after_s=6).want == "kill"
    verdict = job.decide(lost=frozenset({1})).verdict
    assert verdict is not None
    assert cause in verdict["error"]["message"]


def test_same_echoes_after_hours_of_work_are_restarted() -> None:
    """A network that fails twice in the same words, with a day between, has not failed for ever."""
    job = Job(replace(RULES, max_restarts=3, soft_deadline_s=1e9, hard_deadline_s=1e9))
    job.run()
    for _ in range(2):
        job.decide(after_s=7200)
        for node in job.reports:
            job.say(node, phase="exited", code=70, failures=({**COLLATERAL, "rank": node},))
        job.decide()
        desired = job.decide()
        assert desired.want == "run"
        for node in job.reports:
            job.say(node, phase="running", generation=desired.generation, code=None, failures=())


def test_verdict_is_final(job: Job) -> None:
    """Whatever is reported after the end changes nothing."""
    for node in job.reports:
        job.say(node, phase="exited", code=0)
    end = job.decide()
    job.say(0, stop="user")
    assert job.decide() == end
