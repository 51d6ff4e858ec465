"""Jobs that get no machines, on the clouds' stand-ins: refused, accepted in vain, given up after `limits.max_wait`."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.jobs import queue
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.registry import Registry
from doubles.aws.handle import ROLE
from doubles.azure.names import GROUP, SUBSCRIPTION, WORKSPACE
from doubles.azure.names import REGION as AZURE_REGION
from doubles.google.names import BUCKET, PROJECT, REGION
from doubles.waiting import until

CONFIG = """\
name: j
backend: {cloud}
script: loop.py
resources: {{instance_type: {machine}}}
limits: {{max_duration: 1h}}
retry: {{max_attempts: 3}}
{cloud}: {{{block}}}
"""
AZURE = f"subscription: {SUBSCRIPTION}, resource_group: {GROUP}, workspace: {WORKSPACE}, region: {AZURE_REGION}"
CLOUDS = {
    "sagemaker": ("account", "ml.m5.xlarge", f'role: "{ROLE}", bucket: cloudtrain-tests'),
    "azureml": ("azure_account", "Standard_D4s_v5", AZURE),
    "vertex": ("google_project", "n1-standard-4", f"project: {PROJECT}, location: {REGION}, staging_bucket: {BUCKET}"),
}


LARGER = {"ml.m5.xlarge": "ml.m5.2xlarge", "Standard_D4s_v5": "Standard_D8s_v5", "n1-standard-4": "n1-standard-8"}


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest, folder: Path) -> Any:
    """Return the stand-in of a cloud for which the folder has a config; jobs do not execute."""
    fixture, machine, block = CLOUDS[request.param]
    (folder / "cloudtrain.yaml").write_text(CONFIG.format(cloud=request.param, machine=machine, block=block))
    found = request.getfixturevalue(fixture)
    found.settings(execute=False)
    return found


@pytest.mark.parametrize("has", ["no_quota", "no_stock"])
def test_refusal_at_the_create_has_exit_code_5(cli: Any, folder: Path, cloud: Any, has: str) -> None:
    """Nothing was sent, and no job is left."""
    cloud.capacity(has)
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, "hint: wait in line: --queue" in done.stderr) == (5, True), done.stderr
    assert "or name other places under `capacity.try`" in done.stderr
    assert cli("list", "--json").json["jobs"] == []


def test_job_that_got_no_machines_is_no_fault(cli: Any, folder: Path, cloud: Any) -> None:
    """Accepted, then without machines: the state has its reason, no retry is sent, and the money is free."""
    cloud.capacity("failed")
    done = cli("submit", "-y", "--name", "one", cwd=folder)
    assert done.code == 5, done.stderr
    found = cli("status", "one", "--json").json
    assert (found["state"], found["reason"], found["exit_code"]) == ("failed", "no_machines", 5)
    assert (found["attempt"], found["started_s"], found["spend_usd"]) == (1, None, 0)
    assert "failed (no_machines)" in cli("list").stdout
    said = cli("status", "one").stdout
    assert "take fewer or other machines" in said
    cloud.clear_capacity()
    assert "next        cloudtrain resume one" in said
    assert cli.ok("resume", "-d", "-y", "one", "--json").json["attempt"] == 2


def test_job_in_line_that_got_no_machines_is_sent_again(
    cli: Any, folder: Path, cloud: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--queue` an acceptance in vain ends no wait: `advance` sends the job again."""
    cloud.capacity("failed", count=1)
    cli.ok("submit", "-d", "-y", "--queue", "--name", "one", cwd=folder)
    assert cli("wait", "one").code == 5
    monkeypatch.setattr(queue, "TRY_S", 0.0)
    with closing(Registry(home)) as registry:
        assert queue.advance_queue(registry) == ["sent again after it had got no machines: one, attempt 2"]
        assert queue.advance_queue(registry) == []


@pytest.mark.parametrize("follows", [True, False])
def test_wait_that_the_platform_does_not_end_is_ended_here(
    cli: Any, folder: Path, cloud: Any, home: Path, follows: bool
) -> None:
    """A command that follows the job, or `advance`, stops it; the end that the platform then reports is the reason."""
    cloud.capacity("pending")
    done = cli.ok("submit", "-d", "-y", "--name", "one", "--set", "limits.max_wait=1s", cwd=folder)
    assert "limits.max_wait ends the wait only while a cloudtrain command follows the job" in done.stderr
    if follows:
        done = cli("wait", "one")
        assert (done.code, "no machines within limits.max_wait, so the job is stopped" in done.stderr) == (5, True)
    else:
        until(lambda: cli("advance") and cli("status", "one", "--json").json["ended_s"], 60)
    found = cli("status", "one", "--json").json
    assert (found["state"], found["reason"], found["exit_code"]) == ("failed", "no_machines", 5)
    assert found["error"]["message"] == "no machines within limits.max_wait"
    with closing(Registry(home)) as registry:
        assert (ledger.held(registry.database), queue.advance_queue(registry)) == ([], [])


def test_stop_by_the_user_stays_the_users(cli: Any, folder: Path, cloud: Any, home: Path) -> None:
    """A user who stops a waiting job reads `user`, also if a process has given the wait up before."""
    cloud.capacity("pending")
    cli.ok("submit", "-d", "-y", "--name", "one", cwd=folder)
    with closing(Registry(home)) as registry:
        registry.mark(registry.find("one").attempt, gave_up_s=1.0)
    cli.ok("stop", "-y", "one")
    assert cli("wait", "one").code == 9
    found = cli("status", "one", "--json").json
    assert (found["state"], found["reason"]) == ("stopped", "user")


@pytest.mark.parametrize("cloud", CLOUDS, indirect=True)
def test_wait_of_a_candidate_ends_with_the_next_candidate(cli: Any, folder: Path, cloud: Any, home: Path) -> None:
    """After `capacity.wait` the first is stopped; once the platform has told its end, the other machine is sent."""
    machine = next(each for each in LARGER if each in (folder / "cloudtrain.yaml").read_text())
    cloud.capacity("pending", machine=machine)
    tried = f"capacity.try=[{{}}, {{resources.instance_type: {LARGER[machine]}, limits.max_duration: 50m}}]"
    more = ("--set", tried, "--set", "capacity.wait=1s", "--set", "capacity.limits.rounds=1")
    cli.ok("submit", "-d", "-y", "--name", "one", *more, cwd=folder)
    assert cli("status", "one", "--json").json["tries"][0]["state"] == "pending"
    with closing(Registry(home)) as registry:
        until(lambda: cli("advance") and (last := registry.find("one").attempt).number == 2 and last.ref, 60)
    found = cli("status", "one", "--json").json
    tries = [(each["candidate"], each["reason"]) for each in found["tries"]]
    assert (found["phase"], tries) == ("sent", [(0, "no_machines"), (1, None)])
    assert "no machines within capacity.wait" in cli("status", "one").stdout
    with closing(Registry(home)) as registry:
        assert [each.attempt for each in ledger.held(registry.database)] == [2]
