"""The search for machines on the stand-in of a cloud: what the commands do and say, from the submit to the end."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.jobs import queue
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.store.registry import Registry
from doubles.aws.handle import ROLE, Aws
from doubles.waiting import until

FIRST, SECOND = "ml.g5.xlarge", "ml.g5.2xlarge"
CONFIG = f"""\
name: j
backend: sagemaker
script: loop.py
resources: {{instance_type: {FIRST}}}
limits: {{max_duration: 1h}}
budget: {{limit: 20 USD}}
capacity:
  try:
  - {{}}
  - {{resources.instance_type: {SECOND}, limits.max_duration: 50m}}
  limits: {{rounds: 2}}
sagemaker: {{role: "{ROLE}", bucket: cloudtrain-tests}}
"""
SUBMIT = ("submit", "-y", "--name", "one")


@pytest.fixture(autouse=True)
def no_containers(account: Aws) -> None:
    """Let jobs wait for orders of the test."""
    account.settings(execute=False)


def types(account: Aws) -> dict[str, str]:
    """Return the instance type of each job of the account, the oldest first."""
    found = account.client("sagemaker").list_training_jobs(SortBy="CreationTime", SortOrder="Ascending")
    names = [each["TrainingJobName"] for each in found["TrainingJobSummaries"]]
    return {name: account.describe(name)["ResourceConfig"]["InstanceType"] for name in names}


def test_candidate_whose_quota_is_known_to_be_short_is_not_asked(cli: Any, folder: Path, account: Aws) -> None:
    """The quotas that `doctor` reads drop a hopeless candidate before the first send; not the last one."""
    for machines in (FIRST, SECOND):
        account.quota(f"{machines} for training job usage", 0)
        done = cli.ok(*SUBMIT[:-1], f"short-{machines.replace('.', '-')}", "-d", cwd=folder)
        assert ("is left out for an hour: 0 instances of" in done.stderr) == (machines == FIRST)
    assert list(types(account).values()) == [SECOND, SECOND]


def test_submit_moves_on_at_a_refusal(cli: Any, folder: Path, account: Aws) -> None:
    """The command that was refused sends the next candidate under the same name, and says so."""
    account.capacity("no_quota", machine=FIRST)
    done = cli.ok(*SUBMIT, "-d", cwd=folder)
    assert "sent: one" in done.stderr
    assert f"next: candidate 1 (us-east-1, {SECOND})" in done.stderr
    assert types(account) == {"one-1": SECOND}


def test_submit_without_a_follower_leaves_the_next_round_to_other_commands(
    cli: Any, folder: Path, account: Aws
) -> None:
    """The job is in line, and the command names those that go on."""
    account.capacity("no_quota")
    done = cli.ok(*SUBMIT, "-d", cwd=folder)
    assert "in line, nothing is sent yet: one" in done.stderr
    assert "cloudtrain advance" in done.stderr
    assert "cloudtrain watch" in done.stderr
    assert (cli("status", "one", "--json").json["phase"], types(account)) == ("queued", {})


def test_submit_without_machines_within_the_limits_has_exit_code_5(cli: Any, folder: Path, account: Aws) -> None:
    """The error is the last refusal, and nothing is held."""
    account.capacity("no_quota")
    done = cli(*SUBMIT, "--set", "capacity.limits.rounds=1", cwd=folder)
    assert done.code == 5, done.stderr
    assert cli("status", "one", "--json").json["reason"] == "no_machines"
    assert cli("list", "--active", "--json").json["jobs"] == []


def test_follower_goes_on_with_the_next_candidate(cli: Any, folder: Path, account: Aws, home: Path) -> None:
    """`wait` sees the first attempt end without machines, sends the second, and returns its end."""
    account.capacity("failed", machine=FIRST)
    cli.ok(*SUBMIT, "-d", cwd=folder)
    with closing(Registry(home)) as registry:
        while registry.find("one").attempt.number == 1:
            queue.drive(registry, refresh(registry, registry.find("one")))
        assert types(account) == {"one-1": FIRST, "one-2": SECOND}
        first, second = registry.attempts(registry.find("one"))
        assert (first.state.reason, second.phase) == ("no_machines", "sent")
    account.end("one-2")
    assert cli("wait", "one").code == 0


def test_submit_follows_the_search_to_its_end(cli: Any, folder: Path, account: Aws) -> None:
    """The follower of the submit reads the end of the first attempt, sends the second, and follows that one."""
    account.capacity("failed", machine=FIRST)
    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(cli, *SUBMIT, cwd=folder)
        until(lambda: "one-2" in types(account))
        account.end("one-2")
        done = submitted.result()
    assert done.code == 0, done.stderr
    assert f"next: candidate 1 (us-east-1, {SECOND})" in done.stderr


def test_resume_searches_again_and_says_that_the_job_is_in_line(
    cli: Any, folder: Path, account: Aws, home: Path
) -> None:
    """All places were just found without machines: the job waits, and the next command sends the first that is free."""
    account.capacity("failed")
    cli.ok(*SUBMIT, "-d", "--set", "capacity.limits.rounds=1", cwd=folder)
    with closing(Registry(home)) as registry:
        while (job := registry.find("one")).active:
            queue.drive(registry, refresh(registry, job))
        done = cli.ok("resume", "one", "-y", "-d")
        assert "in line, nothing is sent yet: one, attempt 3" in done.stderr
        account.clear_capacity()
        registry.database.execute("DELETE FROM blocked")
        waiting = registry.find("one").attempt
        registry.mark_queued(waiting, {**(waiting.state.queue or {}), "start_s": 0.0})
    assert "sent: one" in cli.ok("advance").stderr
    assert types(account) == {"one-1": FIRST, "one-2": SECOND, "one-3": FIRST}


def test_list_is_sent_again_without_the_type_whose_quota_is_short(cli: Any, folder: Path, account: Aws) -> None:
    """SageMaker refuses the list, and names the type; the submit itself sends the other type."""
    account.capacity("no_quota", machine=FIRST)
    alike = f"{{resources.instance_type: {SECOND}}}"
    cli.ok(*SUBMIT, "-d", "--set", f"capacity.try=[{{}}, {alike}]", "--set", "capacity.limits.rounds=1", cwd=folder)
    assert types(account) == {"one-1": SECOND}
