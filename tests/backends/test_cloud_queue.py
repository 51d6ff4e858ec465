"""Jobs in line for a cloud's quota: rows of the registry that are not sent, on the clouds' stand-ins."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.job import exit_code
from cloudtrain.launcher.jobs import queue
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.registry import Registry
from doubles.aws.handle import ROLE, Aws

CONFIG = f"""\
name: j
backend: sagemaker
script: loop.py
resources: {{instances: 2, instance_type: ml.g5.xlarge}}
limits: {{max_duration: 1h}}
budget: {{limit: 20 USD}}
sagemaker: {{role: "{ROLE}", bucket: cloudtrain-tests}}
"""
QUEUE = ("submit", "-d", "-y", "--queue")


@pytest.fixture(autouse=True)
def no_quota(account: Aws, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the account refuse each job until the returned function is called; tries have no pause."""
    account.settings(execute=False)
    account.fault("CreateTrainingJob", "error", code="ResourceLimitExceeded", message="the limit is 0 Instances")
    monkeypatch.setattr(queue, "TRY_S", 0.0)
    return account.clear_faults


def sent(account: Aws) -> list[str]:
    """Return the names of the account's jobs, the oldest first."""
    found = account.client("sagemaker").list_training_jobs(SortBy="CreationTime", SortOrder="Ascending")
    return [each["TrainingJobName"] for each in found["TrainingJobSummaries"]]


def test_job_without_quota_waits_and_is_sent_later(
    cli: Any, folder: Path, account: Aws, no_quota: Any, home: Path
) -> None:
    """The job stays in line with its worst case held, says the reason, and is sent once the quota allows the job."""
    done = cli.ok(*QUEUE, "--name", "one", cwd=folder)
    assert "in line, nothing is sent yet: one" in done.stderr
    found = cli("status", "one", "--json").json
    assert (found["state"], found["phase"], "limit is 0" in found["detail"]) == ("pending", "queued", True)
    registry = Registry(home)
    held = ledger.held(registry.database)
    assert held
    assert queue.advance_queue(registry) == []
    assert cli("status", "one", "--json").json["queue"]["place"] == 1
    no_quota()
    assert queue.advance_queue(registry) == ["sent: one"]
    assert (sent(account), ledger.held(registry.database)) == (["one-1"], held)
    assert cli("status", "one", "--json").json["queue"] is None
    registry.close()


def test_clock_that_was_set_back_holds_no_job_in_line(
    cli: Any, folder: Path, no_quota: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last try that lies hours ahead is no reason to wait."""
    cli.ok(*QUEUE, "--name", "one", cwd=folder)
    monkeypatch.setattr(queue, "TRY_S", 15.0)
    no_quota()
    with closing(Registry(home)) as registry:
        attempt = registry.find("one").attempt
        registry.mark_queued(attempt, {**(attempt.state.queue or {}), "tried_s": time.time() + 6 * 3600})
        assert queue.advance_queue(registry) == ["sent: one"]


def test_order_is_priority_then_time(cli: Any, folder: Path, account: Aws, no_quota: Any, home: Path) -> None:
    """Jobs for the same machines are sent in order, and none overtakes a job that was refused."""
    for name, priority in (("low", "low"), ("first", "normal"), ("second", "normal"), ("urgent", "high")):
        cli.ok(*QUEUE, "--name", name, "--set", f"queue.priority={priority}", "--budget", "5", cwd=folder)
    registry = Registry(home)
    before = len(account.journal("CreateTrainingJob"))
    queue.advance_queue(registry)
    assert len(account.journal("CreateTrainingJob")) == before + 1
    assert "3 of 4 in line" in cli("list").stdout
    no_quota()
    queue.advance_queue(registry)
    assert sent(account) == ["urgent-1", "first-1", "second-1", "low-1"]
    registry.close()


def test_many_processes_send_a_job_once(cli: Any, folder: Path, account: Aws, no_quota: Any, home: Path) -> None:
    """Eight concurrent calls send each job in line once."""
    for name in ("one", "two"):
        assert cli(*QUEUE, "--name", name, cwd=folder).code == 0
    no_quota()

    def advance(_: int) -> list[str]:
        with closing(Registry(home)) as registry:
            return queue.advance_queue(registry)

    with ThreadPoolExecutor(8) as pool:
        told = pool.map(advance, range(8))
    assert sorted(chain(*told)) == ["sent: one", "sent: two"]
    assert sorted(sent(account)) == ["one-1", "two-1"]


def test_wait_ends_at_max_wait_or_stop(cli: Any, folder: Path, account: Aws, home: Path) -> None:
    """`limits.max_wait` and `stop` take a job out of the line, and free its money; nothing is sent."""
    assert cli(*QUEUE, "--name", "late", "--set", "limits.max_wait=1s", cwd=folder).code == 0
    assert cli(*QUEUE, "--name", "one", cwd=folder).code == 0
    done = cli("stop", "-y", "one")
    assert (done.code, "has left the line" in done.stdout + done.stderr) == (0, True), done.stderr
    registry = Registry(home)
    job = registry.find("late")
    while queue.advance_queue(registry) != ["late has left the line: no machines within limits.max_wait"]:
        assert registry.find("late").active
    state = registry.find("late").attempt.state
    assert (state.state, state.reason, exit_code(state), job.attempt.phase) == ("failed", "no_machines", 5, "queued")
    assert (ledger.held(registry.database), sent(account)) == ([], [])
    registry.close()


def test_missing_secret_keeps_the_place(cli: Any, folder: Path, no_quota: Any, home: Path, account: Aws) -> None:
    """Without the job's secret in the environment, the job stays in line and says so."""
    assert cli(*QUEUE, "--name", "one", "--set", "secrets=[TOKEN]", cwd=folder, env={"TOKEN": "x"}).code == 0
    no_quota()
    registry = Registry(home)
    [told] = queue.advance_queue(registry)
    assert "the secret `TOKEN` is not set" in told
    assert (registry.find("one").attempt.phase, sent(account)) == ("queued", [])
    registry.close()


def test_job_keeps_its_place_if_its_sender_dies(
    cli: Any, folder: Path, no_quota: Any, home: Path, account: Aws
) -> None:
    """A process that dies before the send leaves the job in line; a process that dies after the send, a sent job."""
    for name in ("one", "two"):
        assert cli(*QUEUE, "--name", name, "--budget", "5", cwd=folder).code == 0
    no_quota()
    registry = Registry(home)
    one, two = registry.find("one"), registry.find("two")
    assert registry.claim(one.attempt)
    assert not registry.claim(one.attempt)
    registry.release(registry.find("one").attempt)  # as if the process had ended
    assert cli("status", "one", "--json").json["phase"] == "queued"
    request = backends.Request.load(two.attempt.name, two.attempt.request)
    assert registry.claim(two.attempt)
    shipment = backends.Shipment(backends.Bundle.load(two.bundle), registry.folder, folder)
    backends.load("sagemaker").send(request, shipment)
    registry.release(registry.find("two").attempt)
    assert cli("status", "two", "--json").json["phase"] == "sent"
    assert queue.advance_queue(registry) == ["sent: one"]
    assert sent(account) == ["two-1", "one-1"]
    registry.close()
