"""The state and the paid time of a job from the agents' files and Slurm's words, without a cluster."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cloudtrain.backends.channel.hosts import Host
from cloudtrain.backends.slurm import jobs
from cloudtrain.backends.slurm.records import SlurmRef
from cloudtrain.backends.slurm.status import SlurmJob
from cloudtrain.entrypoints.contract import AgentState, ExitReport, NodeStatus
from cloudtrain.launcher.job import Attempt, State
from cloudtrain.launcher.metering import meter
from doubles.plans import plan_of

NOW = time.time() - 3600  # a late run of the tests must not matter
HANDLE = SlurmRef(Host("login"), "/f", "/c", "/o", nodes=2, nproc_per_node=1, number=7, sent_s=NOW - 1000)
# The first run of the job: 100 s on both nodes, until 300 s ago.
EARLIER = AgentState(1, "s", phase="ended", generation=1, started_s=NOW - 400, held_s=100.0)
LEFT = {node: NodeStatus(EARLIER, held_s=100.0, saved=True, last_s=NOW - 300, now_s=NOW) for node in (0, 1)}
AGAIN = {"restarts": 1, "started_s": NOW - 60, "ended_s": NOW - 20, "nodes": "node[0-1]"}


@pytest.fixture(autouse=True)
def _clock_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge at the time of the files, however late the test runs."""
    monkeypatch.setattr(jobs, "time", SimpleNamespace(time=lambda: NOW))


@pytest.mark.parametrize(
    ("job", "billed_s", "state"),
    [
        (SlurmJob(7, "PENDING", "BeginTime", restarts=1, started_s=NOW + 60), 100, "pending"),
        (SlurmJob(7, "CANCELLED", restarts=1, started_s=NOW - 9, ended_s=NOW - 9), 100, "stopped"),
        (SlurmJob(7, "NODE_FAIL", **AGAIN), 140, "failed"),
        (SlurmJob(7, "FAILED", exit_code="1:0", **{**AGAIN, "ended_s": NOW - 50}), 110, "failed"),
        (SlurmJob(7, "CANCELLED", **AGAIN, seconds=150.0), 150, "stopped"),
        (SlurmJob(7, "RUNNING", **{**AGAIN, "ended_s": NOW + 600}), 160, "running"),
    ],
)
def test_later_run_adds_to_the_time_of_earlier_runs(job: SlurmJob, billed_s: float, state: str) -> None:
    """Slurm's controller knows only the last run; the cost of a job never becomes lower."""
    told = jobs.judged(HANDLE, LEFT, job)
    assert (told.state, told.started_s) == (state, NOW - 400)
    assert told.billed_s == pytest.approx(billed_s, abs=3)


def test_waiting_between_two_runs_costs_nothing() -> None:
    """A requeued job that waits has no rate, and its cost does not grow."""
    told = jobs.judged(HANDLE, LEFT, SlurmJob(7, "PENDING", "BeginTime", restarts=1))
    assert meter.steady(State("pending"), told, NOW) == told
    legs = meter.legs_of([Attempt("j", 1, "sent", plan_of(instances=2, hourly_usd=72.0), {}, 0.0, {}, state=told)])
    assert meter.burn_micro_h(legs) == 0
    assert meter.spent_micro(legs, NOW + 5000) == meter.spent_micro(legs, NOW) == 2_000_000


def test_agents_own_count_stays() -> None:
    """The exit report of the last run counts all runs; a report of the batch script has no count."""
    report = ExitReport("stopped", "preempted", held_s=130.0, ended_s=NOW - 20, resumable=True)
    ended = {node: replace(look, exit=report, last_s=0.0, held_s=None) for node, look in LEFT.items()}
    told = jobs.judged(HANDLE, ended, SlurmJob(7, "CANCELLED", **AGAIN, by="root"))
    assert (told.reason, told.billed_s, told.detail) == ("user", 130.0, "cancelled by the user root of the cluster")
    refused = {**ended, 0: replace(ended[0], exit=ExitReport("failed", "error", {"message": "no module"}))}
    refused[1] = LEFT[1]
    told = jobs.judged(HANDLE, refused, SlurmJob(7, "FAILED", exit_code="64:0", **AGAIN))
    assert (told.error, told.billed_s) == ({"message": "no module"}, pytest.approx(140, abs=3))


@pytest.mark.parametrize(
    ("ended_ago_s", "state", "words"),
    [(5, "pending", ""), (300, "failed", "set slurm.workdir"), (-7200, "failed", "set slurm.workdir")],
)
def test_job_without_agents_has_not_succeeded(ended_ago_s: float, state: str, words: str) -> None:
    """On nodes that do not see the shared disk, the batch script leaves with code 0, and no agent begins.

    A clock that was set back since the end delays the verdict by no hour.
    """
    job = SlurmJob(7, "COMPLETED", exit_code="0:0", started_s=NOW - 310, ended_s=NOW - ended_ago_s, nodes="node0")
    told = jobs.judged(HANDLE, {0: NodeStatus(), 1: NodeStatus()}, job)
    assert told.state == state
    assert words in (told.error or {"message": ""})["message"]
