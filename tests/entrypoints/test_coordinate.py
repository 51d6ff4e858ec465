"""Node 0's decisions, from reports alone."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.entrypoints.agent.coordinate import Coordinator, Desired, Report
from cloudtrain.entrypoints.contract import AgentSpec, ExitReport, JobSpec, RunSpec

SPEC = AgentSpec(
    job=JobSpec(nodes=2, max_restarts=1),
    limit_reason="time_limit",
    deadline_s=900,
    max_duration_s=1000,
    grace_s=30,
    join_timeout_s=60,
    node=0,
    **dict.fromkeys(("address", "root", "bundle", "sha256", "python", "workdir"), ""),
)
SIGNAL = {"rank": 1, "kind": "signal", "signal": "SIGKILL", "message": "killed by SIGKILL", "time_s": 2.0}
RAISED = {"rank": 1, "kind": "exception", "type": "ValueError", "message": "boom", "time_s": 2.0}
HUNG = {"rank": 1, "kind": "hang", "message": "made no step for 900 s", "time_s": 2.0}
COLLATERAL = {"rank": 0, "kind": "exception", "message": "gloo: closed by peer", "time_s": 1.0, "peer_lost": True}


def changed(spec: AgentSpec, **changes: Any) -> AgentSpec:
    """Return the message with changed fields, of the message itself or of its job."""
    of_job = {name: changes.pop(name) for name in list(changes) if name in JobSpec.__dataclass_fields__}
    return replace(spec, job=replace(spec.job, **of_job), **changes)


class Job:
    """A coordinator and its reports."""

    def __init__(self, spec: AgentSpec = SPEC) -> None:
        self.coordinator = Coordinator(spec)
        self.reports = {node: Report(node) for node in range(spec.job.nodes + spec.spares)}
        self.now_s = 0.0

    def say(self, node: int, **changes: Any) -> None:
        """Change the report of a node."""
        self.reports[node] = replace(self.reports[node], **changes)

    def run(self) -> None:
        """Start every wanted node."""
        desired = self.decide()
        for node in desired.nodes:
            self.say(node, phase="running", generation=desired.generation, code=None, failures=(), saved=None)

    def decide(self, after_s: float = 0.1, lost: frozenset[int] = frozenset()) -> Desired:
        """Let time pass, and return the decision."""
        self.now_s += after_s
        return self.coordinator.decide(self.reports, set(lost), self.now_s, lambda: 20001)

    def verdict(self, after_s: float = 0.1, lost: frozenset[int] = frozenset()) -> ExitReport:
        """Let time pass, and return the job's end."""
        desired = self.decide(after_s, lost)
        assert desired.verdict is not None
        return desired.verdict

    def end(self, after_s: float = 0.1, lost: frozenset[int] = frozenset()) -> tuple[str, str | None]:
        """Let time pass, and return state and reason of the job's end."""
        verdict = self.verdict(after_s, lost)
        return verdict.state, verdict.reason

    def message(self, after_s: float = 0.1, lost: frozenset[int] = frozenset()) -> str:
        """Let time pass, and return the message of the job's error."""
        return str((self.verdict(after_s, lost).error or {})["message"])

    def lose_all_peers(self) -> None:
        """End every rank with the echo of a lost peer, and start all again if the job goes on."""
        for node in self.reports:
            self.say(node, phase="exited", code=70, failures=({**COLLATERAL, "rank": node},))
        self.decide()
        self.run()


@pytest.fixture
def job() -> Job:
    """A job whose two nodes run."""
    job = Job()
    job.run()
    return job


def test_start_waits_for_every_node() -> None:
    """No rank runs before all nodes have joined."""
    job = Job()
    second = job.reports.pop(1)
    assert job.decide().want == "wait"
    job.reports[1] = second
    assert job.decide() == Desired("run", 1, 20001, (0, 1))


def test_start_names_the_node_that_never_joined() -> None:
    """A job with a missing node fails, and the message names the node."""
    job = Job()
    del job.reports[1]
    verdict = job.verdict(after_s=61)
    assert (verdict.state, verdict.reason) == ("failed", "node_failure")
    assert "node 1 did not join" in (verdict.error or {})["message"]


@pytest.mark.parametrize("reason", ["time_limit", "budget"])
def test_start_ends_at_a_deadline_before_the_join_timeout(reason: str) -> None:
    """Machines that wait for a node cost money, so the limit's reason ends the job."""
    job = Job(changed(SPEC, deadline_s=45, limit_reason=reason))
    del job.reports[1]
    assert job.decide(after_s=44).want == "wait"
    verdict = job.verdict(after_s=1)
    assert (verdict.state, verdict.reason, verdict.error) == ("stopped", reason, None)


def test_start_waits_for_nodes_that_prepare() -> None:
    """The start waits for preparing nodes up to the deadline; a stop ends the wait."""
    job = Job()
    job.say(1, phase="preparing")
    assert job.decide(after_s=600).want == "wait"
    job.say(1, phase="idle")
    assert job.decide() == Desired("run", 1, 20001, (0, 1))
    for changes, after_s, reason in (({"stop": "user"}, 1, "user"), ({}, 901, "time_limit")):
        job = Job()
        job.say(0, phase="preparing", **changes)
        assert job.end(after_s=after_s) == ("stopped", reason)


@pytest.mark.parametrize(("phase", "message"), [("preparing", "pip"), ("idle", "arrived damaged")])
def test_start_ends_when_a_node_cannot_be_prepared(phase: str, message: str) -> None:
    """The first node with a fault gives the job's error before any rank starts, without a wait for other nodes."""
    job = Job()
    job.say(0, phase=phase)
    job.say(1, phase="exited", code=64, failures=({"rank": None, "kind": "config", "message": message},))
    verdict = job.verdict()
    error = verdict.error or {}
    assert (verdict.state, error["kind"], error["message"]) == ("failed", "config", message)


def test_start_names_a_node_lost_during_preparation() -> None:
    """The node had joined, so the message calls its agent silent."""
    job = Job()
    job.say(0, phase="preparing")
    assert "node 1 was lost" in job.message(after_s=61, lost=frozenset({1}))


def test_end_is_success_only_when_all_nodes_are_done(job: Job) -> None:
    """An exit 0 of one node is not the job's end; reports after the end change no verdict."""
    job.say(0, phase="exited", code=0)
    assert job.decide().want == "run"
    job.say(1, phase="exited", code=0)
    end = job.decide()
    assert end.verdict == ExitReport("succeeded")
    job.say(0, stop="user")
    assert job.decide() == end


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
        job.run()
    verdict = job.verdict()
    assert (verdict.state, verdict.restarts) == ("failed", 1)


def test_exception_of_the_users_code_is_not_restarted(job: Job) -> None:
    """The same code would raise again; the root cause is the exception, not the peer's lost connection."""
    job.say(0, phase="exited", code=70, failures=(COLLATERAL,))
    assert job.decide().want == "run", "a lost connection waits for the account of who broke it"
    job.say(1, phase="exited", code=70, failures=(RAISED,))
    job.decide()
    verdict = job.verdict()
    assert (verdict.state, verdict.reason, (verdict.error or {})["message"]) == ("failed", "error", "boom")


def test_same_echoes_twice_end_the_job() -> None:
    """Two starts that fail only with lost peers and no root cause end the job, as later starts would too."""
    job = Job(changed(SPEC, max_restarts=3))
    job.run()
    for _ in range(2):
        job.lose_all_peers()
    verdict = job.verdict()
    assert (verdict.state, verdict.restarts) == ("failed", 1)


@pytest.mark.parametrize("kind", ["exception", "hang"])
def test_ranks_that_never_met_are_started_twice(kind: str) -> None:
    """Other ranks tell of the time-out in each start, half an hour after it; the second such end is final."""
    job = Job(changed(SPEC, max_restarts=3, deadline_s=9000, max_duration_s=9000))
    job.run()
    for teller in (0, 1):
        failure = {**COLLATERAL, "kind": kind, "message": f"timed out, rank {teller}", "unmet": True}
        job.say(teller, phase="exited", code=70, failures=(failure,))
        job.say(1 - teller, phase="exited", code=70)
        job.decide(after_s=1800)
        job.run()
    verdict = job.coordinator.desired.verdict
    assert verdict is not None
    assert (verdict.state, verdict.restarts) == ("failed", 1)
    assert "no rank has met another" in (verdict.error or {})["message"]


OWN = ("SIGABRT", "SIGSEGV", "SIGBUS")
FULL = {"message": "killed by SIGKILL; meanwhile the kernel killed a process of this machine for want of memory"}


@pytest.mark.parametrize(
    ("first", "second", "is_code"),
    [
        *(({"signal": name, "step": 10}, {"signal": name, "step": 10}, True) for name in OWN),
        ({"step": 10, **FULL}, {"step": 10, **FULL, "rank": 0}, True),
        ({"kind": "hang", "signal": None, "step": 10}, {"kind": "hang", "signal": None, "step": 10}, True),
        ({"step": 10}, {"step": 10}, True),
        ({"step": 10}, {"step": 10, "rank": 2}, False),  # kills from outside
        ({"step": 10}, {"step": 11}, False),
        ({"early": True}, {"early": True}, False),
        ({"signal": "SIGABRT", "early": True}, {"signal": "SIGABRT", "early": True}, True),
        ({"signal": "SIGABRT", "step": 10}, {"signal": "SIGABRT", "step": 20}, False),
        ({"signal": "SIGABRT", "step": 10}, {"signal": "SIGSEGV", "step": 10}, False),
        ({"signal": "SIGABRT"}, {"signal": "SIGABRT"}, False),  # a script without steps
        ({"kind": "lost", "signal": None, "step": 10}, {"kind": "lost", "signal": None, "step": 10}, False),
    ],
)
def test_same_fault_at_the_same_step_is_an_error_of_the_code(
    first: dict[str, Any], second: dict[str, Any], is_code: bool
) -> None:
    """The same sign at the same step ends the job after the second start; another step or sign earns a third."""
    job = Job(changed(SPEC, max_restarts=3))
    job.run()
    for change in (first, second):
        job.say(1, phase="exited", code=70, failures=({**SIGNAL, **change},))
        job.say(0, phase="exited", code=70, failures=(COLLATERAL,))
        job.decide()
        job.run()
    verdict = job.coordinator.desired.verdict
    assert (verdict is not None) is is_code
    if verdict is not None:
        assert (verdict.state, verdict.reason, verdict.restarts) == ("failed", "error", 1)
        when = "before the first step" if "early" in first else "at step 10"
        assert f"in the same way {when}" in (verdict.error or {})["message"]


def test_fault_of_the_code_beside_a_lost_node_is_no_sign() -> None:
    """A lost node may abort its peers in each start, at the step of the newest save."""
    job = shrinking(4, 1, (1, 2, 3, 4), max_restarts=3)
    for gone in (frozenset({3}), frozenset({2, 3})):
        job.decide(lost=gone)
        for node in set(job.coordinator.desired.nodes) - gone:
            job.say(node, phase="exited", code=70, failures=({**SIGNAL, "signal": "SIGABRT", "step": 10},))
        job.decide(lost=gone)
        assert job.decide(after_s=6, lost=gone).want == "run"
        for node in job.coordinator.desired.nodes:
            job.say(node, phase="running", generation=job.coordinator.desired.generation, code=None, failures=())


def test_stop_waits_for_the_save_then_ends(job: Job) -> None:
    """A stop is passed to all nodes, and is over when all have saved."""
    job.say(1, stop="user")
    assert job.decide().want == "stop"
    job.say(0, phase="exited", code=75)
    assert job.decide().want == "stop"
    job.say(1, phase="exited", code=143)
    assert job.end() == ("stopped", "user")


def test_stop_ends_after_its_grace(job: Job) -> None:
    """The machines of a job that never saves are released after the grace period."""
    job.say(0, stop="user")
    assert job.decide().want == "stop"
    assert (ended := job.decide(after_s=31)).want == "end"
    assert ended.verdict
    assert ended.verdict.error
    assert ended.verdict.error["message"] == "did not leave within 31 s, so it was killed"
    script = RunSpec("script", "train.py", stop_signal="SIGUSR1")
    assert script.ignored(31) == "the script did not obey SIGUSR1 within 31 s and was killed"


def test_stop_now_does_not_wait(job: Job) -> None:
    """`stop --now` ends at once, also after a stop that waits; the reason is the user."""
    job.say(0, stop="user")
    assert job.decide().want == "stop"
    job.say(0, stop="now")
    assert job.verdict().reason == "user"


def test_deadline_asks_to_save_then_ends(job: Job) -> None:
    """The limit holds without the platform: a signal before the limit, the end at the limit."""
    assert job.decide(after_s=900).reason == "time_limit"
    assert job.decide(after_s=101).want == "end"


def test_own_deadline_of_the_trainer_is_a_time_limit(job: Job) -> None:
    """If all ranks saved because of their deadline, the job is stopped, neither failed nor restarted."""
    for node in job.reports:
        job.say(node, phase="exited", code=75, saved={"reason": "deadline"})
    assert job.end() == ("stopped", "time_limit")


def test_lost_node_ends_the_others(job: Job) -> None:
    """A silent node ends the remaining nodes, so no machine hangs and costs money."""
    assert job.decide(lost=frozenset({1})).want == "kill"
    job.say(0, phase="exited", code=70, failures=(COLLATERAL,))
    assert job.message(lost=frozenset({1})) == "node 1 was lost: its agent is silent"


@pytest.mark.parametrize(("mine", "cause"), [(RAISED, "boom"), (COLLATERAL, "node 1 was lost")])
def test_node_lost_while_all_are_killed_hides_no_cause(job: Job, mine: dict[str, Any], cause: str) -> None:
    """An exception of a rank stays the cause; a lost-peer error is explained by the lost node."""
    job.say(0, phase="exited", code=70, failures=(mine,))
    job.decide()
    assert job.decide(after_s=6).want == "kill"
    assert cause in job.message(lost=frozenset({1}))


def test_same_echoes_after_hours_of_work_are_restarted() -> None:
    """A network that fails twice with the same message a day apart has no permanent fault."""
    job = Job(changed(SPEC, max_restarts=3, deadline_s=1e9, max_duration_s=1e9))
    job.run()
    for _ in range(2):
        job.decide(after_s=7200)
        job.lose_all_peers()
        assert job.coordinator.desired.want == "run"


def test_hang_restarts_and_is_the_cause(job: Job) -> None:
    """A rank without steps comes before ranks with lost peers as the cause, and a restart may fix the hang."""
    job.say(0, phase="exited", code=70, failures=(COLLATERAL,))
    job.say(1, phase="exited", code=70, failures=(HUNG,))
    assert job.decide().want == "kill"
    assert (job.decide().generation, job.coordinator.history[0]["message"]) == (2, "made no step for 900 s")


def test_hang_waits_for_the_rank_that_was_silent_first(job: Job) -> None:
    """Ranks that wait for a stuck rank seem stuck too: the first report is not yet the cause."""
    job.say(0, phase="exited", code=70, failures=({**HUNG, "rank": 0, "time_s": 3.0},))
    assert job.decide().want == "run"
    job.say(1, phase="exited", code=70, failures=(HUNG,))
    job.decide()
    job.decide()
    assert job.coordinator.history[0]["rank"] == 1


def lose(job: Job, *gone: int) -> Desired:
    """Lose nodes for good; return the decision after the survivors are killed and the lost nodes must have ended."""
    lost = frozenset(gone)
    assert job.decide(lost=lost).want == "kill"
    for node in set(job.coordinator.desired.nodes) - lost:
        job.say(node, phase="exited", code=70, failures=({**COLLATERAL, "rank": node},))
    assert job.decide(lost=lost).want in ("kill", "end"), "a lost node may live, and has not fenced itself yet"
    return job.decide(after_s=6, lost=lost)


def shrinking(nodes: int, fewest: int, sizes: tuple[int, ...], max_restarts: int = 1) -> Job:
    """Return a running job that may continue with fewer nodes."""
    job = Job(changed(SPEC, nodes=nodes, min_nodes=fewest, node_counts=sizes, max_restarts=max_restarts))
    job.run()
    return job


def test_job_continues_without_a_lost_node_if_allowed() -> None:
    """The survivors get new ranks in their order, and the note names the lost node.

    Neither the silence nor the return of the lost node counts after the restart.
    """
    job = shrinking(3, 1, (1, 2, 3))
    desired = lose(job, 1)
    assert (desired.want, desired.generation, desired.nodes) == ("run", 2, (0, 2))
    assert desired.note == "node 1 was lost; going on with 2 of 3 nodes"
    assert job.coordinator.history[0]["message"].endswith("its agent is silent; going on with 2 of 3 nodes")
    for node in (0, 2):
        job.say(node, phase="exited", generation=2, code=0, failures=())
    job.say(1, generation=1, phase="exited", code=70, failures=(RAISED,))
    verdict = job.verdict()
    assert (verdict.state, verdict.restarts) == ("succeeded", 1)


@pytest.mark.parametrize(("max_restarts", "nodes"), [(2, (0, 2)), (3, (0, 1, 2))])
def test_lost_node_is_taken_back_at_a_restart_if_another_restart_is_left(
    max_restarts: int, nodes: tuple[int, ...]
) -> None:
    """The node may fail again: that must not end a job that can do without the node."""
    job = shrinking(3, 1, (1, 2, 3), max_restarts=max_restarts)
    for node in lose(job, 1).nodes:
        job.say(node, phase="exited", generation=2, code=70, failures=(SIGNAL,))
    job.say(1, phase="idle", generation=0, life=1)
    job.decide()
    assert job.decide().nodes == nodes


def test_needed_node_is_taken_back_at_the_last_restart() -> None:
    """Without the node that is back the job would end."""
    job = shrinking(3, 2, (2, 3), max_restarts=2)
    lose(job, 2)
    job.run()
    job.say(2, phase="idle", generation=0, life=1)
    assert lose(job, 1).nodes == (0, 2)


def away(**changes: Any) -> Job:
    """Return a job that runs on nodes 0 and 2 of 3 for long enough; node 1 is back."""
    job = shrinking(3, 1, (1, 2, 3), max_restarts=3)
    job.coordinator.spec = changed(job.coordinator.spec, **changes)
    lose(job, 1)
    job.run()
    job.say(1, phase="idle", generation=0, life=1)
    job.now_s += GROW_S
    return job


GROW_S = SPEC.grow_s


def save(job: Job, name: str = "step-2") -> Desired:
    """Report a first checkpoint, then the next one; return the decision."""
    assert job.decide().want == "run"
    job.say(0, latest="step-1")
    assert job.decide().want == "run"
    job.say(0, latest=name)
    return job.decide()


def test_job_grows_at_a_save_when_a_node_is_back() -> None:
    """All ranks are killed after the next save, and start on all nodes; a growth is no restart after a fault."""
    job = away()
    assert job.decide().note == "node 1 is ready to join at a save; going on with 2 of 3 nodes"
    assert save(job, "step-1").want == "run", "no new checkpoint: the steps since the last one would be lost"
    job.say(0, latest="step-2")
    assert job.decide().want == "kill"
    job.say(0, phase="exited", code=70, failures=(COLLATERAL,))
    assert job.decide().want == "kill"
    job.say(2, phase="exited", code=70)
    desired = job.decide()
    assert (desired.want, desired.generation, desired.nodes, desired.restarts) == ("run", 3, (0, 1, 2), 1)
    assert desired.note == "node 1 has joined; going on with 3 of 3 nodes"
    job.run()
    for node in range(3):
        job.say(node, phase="exited", code=0)
    verdict = job.verdict()
    assert (verdict.state, verdict.restarts) == ("succeeded", 2)
    assert [cause["kind"] for cause in verdict.restarted_after] == ["lost", "growth"]


@pytest.mark.parametrize(
    "changes",
    [
        {"node_counts": (1, 2)},
        {"max_restarts": 1},
        {"grow_s": 2 * GROW_S},
        {"deadline_s": GROW_S * 1.9},
    ],
    ids=["the batch cannot be shared", "no restart is left", "started lately", "near the end"],
)
def test_job_does_not_grow_without_use(changes: dict[str, Any]) -> None:
    """A growth costs a start of all ranks, and a node that is lost again costs a restart."""
    job = away(**changes)
    assert save(job).want == "run"


@pytest.mark.parametrize(
    "changes", [{"phase": "running", "generation": 1}, {"phase": "exited"}, {"phase": "preparing"}]
)
def test_job_grows_only_by_nodes_that_are_ready(changes: dict[str, Any]) -> None:
    """Old ranks that still run, a failed or unfinished preparation: the node takes no part."""
    job = away()
    job.say(1, **changes)
    assert save(job).want == "run"


def test_job_grows_only_by_a_node_that_holds_its_locks() -> None:
    """Another job may hold the GPUs of a node that is back."""
    job = away()
    job.say(1, seat=(2, False))
    assert save(job).want == "run"
    job.say(1, seat=(2, True))
    job.decide()
    job.say(0, latest="step-3")
    assert job.decide().want == "kill"


def test_job_does_not_grow_at_its_end() -> None:
    """The last save comes with the success of the ranks."""
    job = away()
    job.decide()
    job.say(0, latest="step-1")
    job.decide()
    job.say(0, latest="step-2", done=True)
    assert job.decide().want == "run"


def test_stop_during_a_growth_ends_the_job() -> None:
    """The checkpoint of the growth is there for a resume."""
    job = away()
    assert save(job).want == "kill"
    job.say(0, phase="exited", code=70, stop="user")
    job.say(2, phase="exited", code=70)
    assert job.end() == ("stopped", "user")


def test_stop_that_reaches_a_node_that_is_back_alone_stops_the_job() -> None:
    """The other hosts may be out of the user's reach; a node that is shut down leaves the job."""
    job = away()
    job.say(1, stop="preempted")
    assert job.decide().want == "run"
    job.say(1, stop="user")
    assert (job.decide().want, job.coordinator.desired.reason) == ("stop", "user")


def test_job_grows_by_a_spare_that_was_not_free_at_the_loss() -> None:
    """The spare is called again later, takes its locks, and joins at a save; a spare without locks does not."""
    job = Job(changed(SPEC, min_nodes=1, node_counts=(1, 2), max_restarts=3, spares=1, swaps=1))
    job.reports[2] = Report(2)
    job.run()
    lost = frozenset({1})
    job.decide(lost=lost)
    job.say(0, phase="exited", code=70)
    job.decide(lost=lost)
    assert job.decide(after_s=6, lost=lost).called == (2,)
    job.say(2, seat=(1, False))
    assert job.decide(lost=lost).nodes == (0,)
    job.say(0, phase="running", generation=2, code=None)
    assert job.decide(lost=lost).called == ()
    assert job.decide(after_s=GROW_S, lost=lost).called == (2,)
    assert job.decide(lost=lost).note == "node 1 was lost; going on with 1 of 2 nodes; spare 2 waits"
    job.say(2, seat=(2, True))
    for name in ("step-1", "step-2"):
        job.say(0, latest=name)
        desired = job.decide(lost=lost)
    assert (desired.want, desired.called) == ("kill", (2,))
    job.say(0, phase="exited", code=70)
    desired = job.decide(lost=lost)
    assert (desired.want, desired.nodes, desired.gone, desired.restarts) == ("run", (0, 2), (1,), 0)
    assert desired.note == "node 2 has joined; going on with 2 of 2 nodes, with spare 2"
    assert job.coordinator.swaps == 1


def test_node_lost_before_it_joins_leaves_the_earlier_note() -> None:
    """The status names the loss again."""
    job = away()
    assert "is ready to join" in (job.decide().note or "")
    assert job.decide(lost=frozenset({1})).note == "node 1 was lost; going on with 2 of 3 nodes"


def test_loss_during_a_growth_is_a_restart_with_the_node_that_is_back() -> None:
    """A node that dies while the ranks are killed is given up as ever."""
    job = away()
    assert save(job).want == "kill"
    lost = frozenset({2})
    job.say(0, phase="exited", code=70)
    job.decide(lost=lost)
    desired = job.decide(after_s=6, lost=lost)
    assert (desired.want, desired.nodes, desired.restarts) == ("run", (0, 1), 2)


def test_new_agent_of_a_node_does_not_hide_the_loss_of_its_ranks() -> None:
    """A node that answers again before its loss was seen has none of its ranks: the job goes on without the node."""
    job = shrinking(3, 1, (1, 2, 3), max_restarts=3)
    job.say(1, phase="idle", generation=0, life=1)
    assert job.decide().want == "kill"
    for node in (0, 2):
        job.say(node, phase="exited", code=70)
    job.decide()
    desired = job.decide(after_s=6)
    assert (desired.nodes, desired.note) == ((0, 2), "node 1 was lost; going on with 2 of 3 nodes")


def test_nodes_that_cannot_share_the_batch_are_spare() -> None:
    """Of three surviving nodes two continue; the third replaces the next lost node."""
    job = shrinking(4, 2, (1, 2, 4), max_restarts=2)
    assert lose(job, 3).nodes == (0, 1)
    for node in (0, 1):
        job.say(node, phase="running", generation=2, code=None, failures=())
    assert lose(job, 1, 3).nodes == (0, 2)


@pytest.mark.parametrize(
    ("fewest", "sizes", "why"),
    [
        (2, (1, 2, 3), "1 of 3 nodes are left, and min_instances is 2"),
        (1, (3,), "1 of 3 nodes are left, and the batch can be shared only by 3"),
    ],
)
def test_too_few_nodes_left_is_a_node_failure(fewest: int, sizes: tuple[int, ...], why: str) -> None:
    """The job fails as without `min_instances`, and the message gives the reason."""
    verdict = lose(shrinking(3, fewest, sizes), 1, 2).verdict
    assert (verdict.state, verdict.reason) == ("failed", "node_failure")
    assert why in (verdict.error or {})["message"]


def test_exception_of_a_rank_is_not_retried_with_fewer_nodes() -> None:
    """If a node is lost and the user's code raises too, the exception ends the job."""
    job = shrinking(3, 1, (1, 2, 3))
    lost = frozenset({2})
    job.decide(lost=lost)
    for node in (0, 1):
        job.say(node, phase="exited", code=70, failures=(RAISED,))
    job.decide(lost=lost)
    verdict = job.verdict(after_s=6, lost=lost)
    assert (verdict.reason, (verdict.error or {})["message"]) == ("error", "boom")


def test_end_without_time_to_save_is_no_fault() -> None:
    """`on_limit: stop` sets the deadline at the limit: all nodes stop at once, and no error is reported."""
    job = Job(changed(SPEC, limit_reason="budget", deadline_s=1000))
    job.run()
    assert job.decide(after_s=995).want == "run"
    assert job.decide(after_s=5).want == "stop"
    ended = job.decide(after_s=0.2)
    assert ended.want == "end"
    assert (ended.verdict.state, ended.verdict.reason, ended.verdict.error) == ("stopped", "budget", None)


@pytest.mark.parametrize("deadline_s", [900, 1000])
@pytest.mark.parametrize("second", [{"done": True}, {"phase": "exited", "code": 0}])
def test_deadline_after_all_ranks_succeeded_leaves_the_success(deadline_s: int, second: dict[str, Any]) -> None:
    """The agents still copy files at the deadline: the job ends at the limit, and counts as a success."""
    job = Job(changed(SPEC, limit_reason="budget", deadline_s=deadline_s))
    job.run()
    job.say(0, done=True)
    job.say(1, **second)
    assert job.decide(after_s=999.8).want == ("stop" if deadline_s == 900 else "run")
    job.decide(after_s=0.2)
    verdict = job.decide(after_s=0.2).verdict
    assert verdict == ExitReport("succeeded")


def test_node_still_at_work_at_the_deadline_is_no_success(job: Job) -> None:
    """The job is stopped if the ranks of only some nodes have ended with success."""
    job.say(0, done=True)
    assert job.decide(after_s=900).want == "stop"
    assert job.end(after_s=101) == ("stopped", "time_limit")


@pytest.mark.parametrize("earlier", [None, "user", "preempted"])
def test_stop_now_after_all_ranks_succeeded_leaves_the_success(job: Job, earlier: str | None) -> None:
    """A kill ends the agents' work at once; the ranks' success stays, with or without an earlier stop request."""
    for node in job.reports:
        job.say(node, done=True)
    if earlier is not None:
        job.say(0, stop=earlier)
        assert job.decide().want == "stop"
    job.say(1, stop="now")
    assert job.decide().verdict == ExitReport("succeeded")


def test_exit_code_of_boot_overrides_the_ranks_success(job: Job) -> None:
    """Boot may find a fault after the ranks' end, so a node that has exited is judged by the exit code."""
    job.say(0, done=True)
    job.say(1, done=True, phase="exited", code=143, stop="now")
    assert job.verdict().state == "stopped"


def test_all_nodes_resume_from_the_newest_checkpoint_of_any(job: Job) -> None:
    """The checkpoint is chosen once before the ranks start; a lost node's checkpoint does not count.

    JSON turns the pair of name and time into a list.
    """
    assert job.coordinator.desired.resume is None
    job.say(0, phase="exited", code=70, failures=(COLLATERAL,), newest=("out/checkpoint-1", 5.0))
    job.say(1, phase="exited", code=70, failures=(SIGNAL,), newest=("out/checkpoint-2", 6.0))
    job.decide()
    again = job.decide()
    assert (again.want, again.generation, again.resume) == ("run", 2, "out/checkpoint-2")
    assert Desired.load(again.dump()) == again
    assert Report.load(json.loads(json.dumps(job.reports[1].dump()))) == job.reports[1]


# -- spares -----------------------------------------------------------------------------------------------------------


def spared(spares: int = 1, swaps: int = 1, **changes: Any) -> Job:
    """Return a job of two running nodes with spares."""
    job = Job(changed(SPEC, spares=spares, swaps=swaps, **changes))
    job.run()
    return job


def call(job: Job, *gone: int, generation: int = 1, **answers: bool) -> Desired:
    """Lose nodes for good, and let the called spares answer: `s2=True` holds its locks. Return the decision."""
    desired = lose(job, *gone)
    while desired.want == "kill":
        held = {node: answers.get(f"s{node}") for node in desired.called}
        assert held, desired
        assert None not in held.values(), desired
        for node, is_held in held.items():
            job.say(node, seat=(generation, is_held))
        desired = job.decide(lost=frozenset(gone))
    return desired


def test_spare_is_called_after_the_fence_and_joins_as_the_last_rank() -> None:
    """No spare takes its locks before the lost node must have ended; the next generation has all nodes again."""
    job = spared()
    assert job.coordinator.desired.note == "spare 2 waits"
    called = lose(job, 1)
    assert (called.want, called.called) == ("kill", (2,))
    assert job.decide(lost=frozenset({1})) == called, "the spare has not answered"
    job.say(2, seat=(1, True))
    desired = job.decide(lost=frozenset({1}))
    assert (desired.want, desired.generation, desired.nodes, desired.gone) == ("run", 2, (0, 2), (1,))
    assert desired.note == "node 1 was lost; going on with 2 of 2 nodes, with spare 2"
    job.run()
    for node in (0, 2):
        job.say(node, phase="exited", generation=2, code=0, failures=())
    verdict = job.verdict(lost=frozenset({1}))
    assert (verdict.state, verdict.restarts) == ("succeeded", 1)


def test_next_spare_is_called_if_one_is_not_free() -> None:
    """A spare whose locks another job holds is passed over, at this loss."""
    assert call(spared(spares=2), 1, s2=False, s3=True).nodes == (0, 3)


def test_job_without_a_free_spare_ends_or_shrinks_as_before() -> None:
    """The message says that no spare was free."""
    verdict = call(spared(), 1, s2=False).verdict
    assert verdict is not None
    assert (verdict.state, verdict.reason) == ("failed", "node_failure")
    assert "no spare is free" in (verdict.error or {})["message"]
    assert call(spared(min_nodes=1, node_counts=(1, 2)), 1, s2=False).nodes == (0,)
    assert lose(spared(), 1, 2).want == "end", "the spare is lost too"


def test_spares_begin_no_more_attempts_than_allowed() -> None:
    """Two losses in a row use two attempts; with one attempt left the second loss ends the job."""
    for swaps, nodes in ((2, (2, 3)), (1, ())):
        job = spared(spares=2, swaps=swaps)
        assert call(job, 1, s2=True).nodes == (0, 2)
        job.run()
        ends = job.decide(lost=frozenset({1}))
        assert ends.want == "run"
        assert (job.decide(lost=frozenset({0, 1})).want, job.coordinator.desired.called) == ("kill", ())
        job.say(2, phase="exited", generation=2, code=70, failures=({**COLLATERAL, "rank": 1},))
        job.decide(lost=frozenset({0, 1}))
        desired = job.decide(after_s=6, lost=frozenset({0, 1}))
        if nodes:
            assert desired.called == (3,)
            job.say(3, seat=(2, True))
            desired = job.decide(lost=frozenset({0, 1}))
        assert (desired.want, desired.nodes) == (("run", nodes) if nodes else ("end", (0, 2)))


def test_spare_starts_a_new_attempt_with_all_its_restarts() -> None:
    """A loss needs no restart of `max_restarts`, and a killed rank of the new attempt has its own."""
    job = spared(max_restarts=1)
    job.say(0, phase="exited", code=70, failures=(SIGNAL,))
    job.say(1, phase="exited", code=70)
    job.decide()
    job.run()
    assert call(job, 1, generation=2, s2=True).nodes == (0, 2)
    job.run()
    for node in (0, 2):
        job.say(node, phase="exited", code=70, failures=({**SIGNAL, "rank": 0},))
    job.decide(lost=frozenset({1}))
    assert job.decide(lost=frozenset({1})).generation == 4


def test_node_that_is_back_takes_no_place_of_a_spare_that_runs() -> None:
    """The spare is billed from its start on, and holds its locks until the end. No further spare is called."""
    job = spared(spares=3, swaps=2, min_nodes=1, node_counts=(1, 2), max_restarts=3)
    assert call(job, 1, s2=True, s3=False).nodes == (0, 2)
    job.run()
    job.say(1, phase="idle", generation=0, life=1)
    assert save(job).called == ()
    assert job.decide(after_s=GROW_S).called == ()
    for node in (0, 2):
        job.say(node, phase="exited", code=70, failures=({**SIGNAL, "rank": 0},))
    job.decide()
    assert (job.decide().generation, job.coordinator.desired.nodes) == (3, (0, 2))


def test_job_calls_no_spare_in_place_of_nodes_that_are_back() -> None:
    """A spare that is called holds its GPUs."""
    spec = changed(SPEC, nodes=3, min_nodes=1, node_counts=(1, 2, 3), max_restarts=3, spares=3, swaps=2)
    job = Job(spec)
    job.run()
    assert call(job, 1, 2, s3=True, s4=False, s5=False).nodes == (0, 3)
    job.run()
    for node in (1, 2):
        job.say(node, phase="idle", generation=0, life=1)
    assert job.decide(after_s=GROW_S).called == ()


def test_leader_stays_the_first_node_when_a_node_of_a_lower_number_joins() -> None:
    """Rank 0 writes the checkpoints on the leader, whose successor has the copies."""
    job = away()
    job.coordinator.desired = replace(job.coordinator.desired, nodes=(2,))
    job.coordinator.lives = {}
    lost = frozenset({0})
    job.say(2, latest="step-1")
    job.decide(lost=lost)
    job.say(2, latest="step-2")
    assert job.decide(lost=lost).want == "kill"
    job.say(2, phase="exited", code=70)
    assert job.decide(lost=lost).nodes == (2, 1)


def test_spare_that_the_batch_leaves_out_permits_no_further_restart() -> None:
    """Two nodes and a spare cannot share the batch of four nodes: no attempt begins, so the limit counts."""
    job = Job(changed(SPEC, nodes=4, min_nodes=2, node_counts=(2, 4), max_restarts=0, spares=1, swaps=1))
    job.run()
    assert call(job, 2, 3, s4=True).want == "end"


def test_killed_rank_calls_no_spare() -> None:
    """The machine is there, so the job restarts on its own nodes, and ends at its limit."""
    job = spared()
    for _ in range(2):
        for node in (0, 1):
            job.say(node, phase="exited", code=70, failures=({**SIGNAL, "time_s": job.now_s},))
        job.decide()
        desired = job.decide()
        assert desired.called == ()
        job.run()
    assert job.coordinator.desired.want == "end"


def test_lost_or_stopping_spare_does_not_matter() -> None:
    """A spare's loss and its shutdown leave the job; a user's stop that reaches a spare alone stops the job.

    The status names the spares that are left.
    """
    job = spared()
    desired = job.decide(lost=frozenset({2}))
    assert (desired.want, desired.note) == ("run", None)
    assert job.decide().note == "spare 2 waits"
    assert spared(spares=2).decide(lost=frozenset({2})).note == "spare 3 waits"
    job.say(2, stop="preempted")
    assert job.decide().want == "run"
    job.say(2, stop="user")
    assert (job.decide().want, job.coordinator.desired.reason) == ("stop", "user")
