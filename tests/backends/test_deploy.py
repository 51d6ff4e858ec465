"""`cloudtrain deploy` with the real SDK: no endpoint without an end that the platform enforces, and none unpaid for."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1 import types
from google.protobuf import json_format

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend.models import EndpointPlan, EndpointWish
from cloudtrain.launcher.errors import (
    BudgetError,
    CapacityError,
    CloudtrainError,
    ConfigError,
    CredentialError,
    UnreachableError,
    UsageError,
)
from cloudtrain.launcher.models import deploying
from cloudtrain.launcher.models.checked import checked_model
from cloudtrain.launcher.money import endpoints as costs
from cloudtrain.launcher.money import shared_ledger, shared_ledger_sync
from cloudtrain.launcher.money.conditional import located
from cloudtrain.launcher.prices import catalog
from cloudtrain.launcher.store import endpoints, ledger
from cloudtrain.launcher.store.budgets import LedgerBudget
from cloudtrain.launcher.store.database import Database
from cloudtrain.launcher.store.endpoints import EndpointRecord
from cloudtrain.launcher.store.registry import Registry
from doubles.aws.handle import ROLE, Aws
from doubles.azure.names import GROUP, SUBSCRIPTION, WORKSPACE
from doubles.modelfolders import write_model

ENDER = "arn:aws:iam::123456789012:role/end-endpoints"
CONFIG = f"""\
name: j
backend: sagemaker
script: loop.py
image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/serve:1
resources: {{instance_type: ml.g4dn.xlarge}}
sagemaker: {{region: us-east-1, role: "{ROLE}", scheduler_role: "{ENDER}", bucket: cloudtrain-tests}}
azureml: {{subscription: {SUBSCRIPTION}, resource_group: {GROUP}, workspace: {WORKSPACE}, region: eastus}}
vertex: {{project: my-project, location: us-central1, staging_bucket: "gs://my-bucket"}}
"""
DEPLOY = ("deploy", "m", "--to", "sagemaker", "--ttl", "8h")
# Runs the command; the process kills itself as soon as the call has been answered, as a crash at the worst moment.
KILLED_AFTER = """\
import os, signal, sys
import botocore.client
last, sent = sys.argv[1], botocore.client.BaseClient._make_api_call
def call(self, operation, params):
    found = sent(self, operation, params)
    if operation == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
botocore.client.BaseClient._make_api_call = call
from cloudtrain.launcher.cli import main
sys.argv = ["cloudtrain", *sys.argv[2:]]
main()
"""


@pytest.fixture
def model(folder: Path) -> Path:
    """Return a checked model folder `m` in the project's folder."""
    return write_model(folder / "m")


@pytest.fixture
def registry(home: Path) -> Registry:
    """Return an empty registry in the private home folder."""
    return Registry()


@pytest.fixture
def payer(account: Aws) -> Aws:
    """Return the account, with the role by which the scheduler deletes endpoints."""
    account.role("end-endpoints", "scheduler.amazonaws.com")
    return account


def there(aws: Aws) -> dict[str, list[str]]:
    """Return the names of all parts of endpoints at AWS by kind: configs, endpoints, models, schedules."""
    return aws.control("shop", method="GET")


def planned(folder: Path, model: Path) -> deploying.PlannedEndpoint:
    """Return the plan of an endpoint for eight hours."""
    found = checked_model(model, None, None)
    return deploying.planned("sagemaker", found, folder / "cloudtrain.yaml", (), ttl_s=8 * 3600, instances=1)


def held(cli: Any) -> list[float]:
    """Return the amounts that the ledger holds."""
    return [each["amount_usd"] for each in cli("budget", "show", "--json").json["reservations"]]


def test_endpoint_is_the_dry_runs_and_ends_by_itself(cli: Any, folder: Path, payer: Aws, model: Path) -> None:
    """The requests differ in the name and the end alone; the schedule exists before the endpoint, and deletes it."""
    dry = cli(*DEPLOY, "--dry-run", cwd=folder)
    assert (dry.code, there(payer)) == (0, {}), dry.stderr
    done = cli(*DEPLOY, "-y", "--json", cwd=folder)
    assert done.code == 0, done.stderr
    assert "the platform deletes the endpoint at" in done.stderr
    name, planned = done.json["endpoint"], json.dumps(dry.json["requests"])
    calls = [call for call in payer.journal() if call["operation"].startswith("Create") and "Name" in str(call)]
    order = [call["operation"] for call in calls if call["operation"] not in ("CreateBucket", "CreateRole")]
    assert order == ["CreateSchedule", "CreateModel", "CreateEndpointConfig", "CreateEndpoint"]
    for call, request in zip(calls[-4:], json.loads(planned.replace(dry.json["endpoint"], name)), strict=True):
        sent = {key: value for key, value in call["params"].items() if key != "ClientToken"}
        request["body"] |= {key: sent[key] for key in ("ScheduleExpression",) if key in sent}
        assert sent == request["body"]
    assert 8.4 * done.json["usd_per_hour"] < done.json["worst_case_usd"] < 13 * done.json["usd_per_hour"]
    assert held(cli) == [done.json["worst_case_usd"]]
    (shown,) = cli("list", "--json").json["endpoints"]
    assert (shown["endpoint"], shown["platform_state"], shown["spent_usd"] > 0) == (name, "InService", True)
    assert name in cli("cost").stdout
    payer.settings(clock_s=8 * 3600 + 60)  # the launcher does nothing
    assert "endpoints" not in cli("list", "--json").json
    assert (there(payer), held(cli)) == ({}, [])


def test_kill_after_create_leaves_the_schedule(cli: Any, folder: Path, payer: Aws, model: Path) -> None:
    """A launcher killed right after CreateEndpoint leaves an endpoint that the platform deletes, and that counts."""
    command = [sys.executable, "-c", KILLED_AFTER, "CreateEndpoint", *DEPLOY, "-y"]
    done = subprocess.run(command, cwd=folder, env=cli.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(there(payer)) == ["configs", "endpoints", "models", "schedules"]
    (amount,) = held(cli)
    (shown,) = cli("list", "--json").json["endpoints"]
    assert (shown["state"], shown["worst_case_usd"]) == ("live", amount)
    payer.settings(clock_s=8 * 3600 + 60)
    assert "endpoints" not in cli("list", "--json").json
    assert (there(payer), held(cli)) == ({}, [])
    assert payer.journal("DeleteEndpoint") == []


def test_late_request_of_a_killed_launcher_keeps_its_schedule(
    cli: Any, folder: Path, payer: Aws, model: Path, wait_until: Callable[..., Any]
) -> None:
    """A command that asks before the request has arrived removes nothing, and the endpoint still ends."""
    payer.fault("CreateEndpoint", "slow", delay_s=2.0)
    process = cli.start(*DEPLOY, "-y", cwd=folder)
    wait_until(lambda: payer.journal("CreateEndpoint"))
    process.kill()
    process.communicate()
    (shown,) = cli("list", "--json").json["endpoints"]
    assert (shown["state"], list(there(payer))) == ("starting", ["configs", "models", "schedules"])
    wait_until(lambda: "endpoints" in there(payer))
    (shown,) = cli("list", "--json").json["endpoints"]
    assert (shown["state"], "schedules" in there(payer)) == ("live", True)


@pytest.mark.parametrize("call", ["CreateSchedule", "CreateEndpointConfig"])
def test_kill_before_create_costs_nothing(cli: Any, folder: Path, payer: Aws, model: Path, call: str) -> None:
    """The next command removes what an endpoint needs, and frees the money: there never was an endpoint."""
    command = [sys.executable, "-c", KILLED_AFTER, call, *DEPLOY, "-y"]
    subprocess.run(command, cwd=folder, env=cli.environment(), capture_output=True, check=False)
    assert "schedules" in there(payer)
    assert "endpoints" not in cli("list", "--json").json
    assert (there(payer), held(cli), payer.journal("CreateEndpoint")) == ({}, [], [])


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("CreateSchedule", "AccessDeniedException", CredentialError),
        ("CreateSchedule", "ServiceQuotaExceededException", ConfigError),
        ("CreateModel", "ValidationException", ConfigError),
        ("CreateEndpointConfig", "AccessDeniedException", CredentialError),
        ("CreateEndpoint", "ResourceLimitExceeded", CapacityError),
    ],
)
def test_refusal_leaves_nothing(
    folder: Path, payer: Aws, model: Path, registry: Registry, call: str, code: str, kind: type[CloudtrainError]
) -> None:
    """A refused schedule makes no endpoint; a refused endpoint leaves no part and no reservation."""
    payer.fault(call, "error", code=code, message="no")
    with pytest.raises(kind, match="nothing is reserved"):
        deploying.send(registry, planned(folder, model))
    assert (there(payer), ledger.held(registry.database)) == ({}, [])
    assert [each["outcome"] for each in payer.journal("CreateEndpoint")] in ([], ["error"])
    assert [each.spent_micro(time.time()) for each in endpoints.rows(registry.database)] == [0]


def test_no_endpoint_exists_without_its_schedule_and_its_reservation(
    folder: Path, payer: Aws, model: Path, registry: Registry
) -> None:
    """With random refusals and lost answers of all calls, each endpoint has an end and a reservation, and ends."""
    chance, sent = random.Random(24), 0
    calls = ("CreateSchedule", "CreateModel", "CreateEndpointConfig", "CreateEndpoint", "DeleteSchedule", "DeleteModel")
    for _ in range(12):
        payer.clear_faults()
        for call in calls:
            if (kind := chance.choice(("", "", "", "error", "lost"))) != "":
                payer.fault(call, kind, count=1, code="AccessDeniedException", message="no")
        with contextlib.suppress(CloudtrainError):
            deploying.send(registry, planned(folder, model))
            sent += 1
        found = there(payer)
        assert set(found.get("endpoints", ())) <= set(found.get("schedules", ()))
        holders = {each.job_id.removeprefix("endpoint:") for each in ledger.held(registry.database)}
        assert holders == set(found.get("endpoints", ()))
    assert 2 <= sent <= 10
    payer.clear_faults()
    payer.settings(clock_s=8 * 3600 + 60)
    assert costs.refresh(registry.database) == []
    assert ("endpoints" in there(payer), ledger.held(registry.database)) == (False, [])


def test_endpoint_after_its_end_is_deleted_by_the_next_command(
    cli: Any, folder: Path, payer: Aws, model: Path, registry: Registry
) -> None:
    """If the schedule has failed, the next command that asks for the endpoint deletes the endpoint."""
    endpoint = planned(folder, model)
    deploying.send(registry, endpoint)
    payer.client("scheduler").delete_schedule(Name=endpoint.plan.name)
    early_s = time.time() - 9 * 3600
    registry.database.execute("UPDATE endpoints SET created_s = ?, ends_s = ?", (early_s, early_s + 8 * 3600))
    assert "endpoints" not in cli("list", "--json").json
    assert there(payer) == {}
    (ended,) = endpoints.rows(registry.database)
    assert ended.spent_micro(0.0) == pytest.approx(9 * endpoint.plan.hourly_usd * 1e6, rel=1e-3)


def test_lost_answer_counts_until_the_platform_answers(
    cli: Any, folder: Path, payer: Aws, model: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the platform stays silent, the worst case stays held; the next command that gets an answer knows more."""
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)  # between the SDK's tries
    payer.fault(["CreateEndpoint", "DescribeEndpoint"], "lost")
    with pytest.raises(UnreachableError, match="may exist until its end"):
        deploying.send(registry, planned(folder, model))
    payer.clear_faults()
    (row,) = endpoints.rows(registry.database)
    assert (row.state, [each.job_id for each in ledger.held(registry.database)]) == ("starting", [row.key])
    registry.database.execute("UPDATE endpoints SET submitter = ?", ('{"host": "", "pid": 0, "stamp": ""}',))
    registry.database.execute("UPDATE endpoints SET created_s = created_s - 601")
    (shown,) = cli("list", "--json").json["endpoints"]
    assert (shown["endpoint"], shown["state"]) == (row.name, "live")


def test_undeploy_ends_the_endpoint_and_its_reservation(cli: Any, folder: Path, payer: Aws, model: Path) -> None:
    """Endpoint, configuration, model and schedule are gone; the cost is settled; a second undeploy says so."""
    name = cli(*DEPLOY, "-y", cwd=folder).stdout.strip()
    done = cli("undeploy", name)
    assert (done.code, f"{name} is gone" in done.stderr) == (0, True), done.stderr
    assert (there(payer), held(cli)) == ({}, [])
    assert cli("undeploy", name, "--json").json["state"] == "gone"
    assert len(payer.journal("DeleteEndpoint")) == 1
    assert cli("undeploy", "digits-none").code == 8


def test_extended_endpoint_ends_later_and_is_paid_for(cli: Any, folder: Path, payer: Aws, model: Path) -> None:
    """The platform's own end moves, the added hours are a second reservation, and the end settles both."""
    assert cli("budget", "set", "20USD").code == 0
    deployed = cli(*DEPLOY, "-y", "--json", cwd=folder).json
    name, worst = deployed["endpoint"], deployed["worst_case_usd"]
    refused = cli("extend", name, "1000h", "-y")
    assert (refused.code, payer.journal("UpdateSchedule")) == (6, []), refused.stderr
    assert ("hint: a shorter time, or" in refused.stderr, cli("extend", name, "0s", "-y").code) == (True, 2)
    done = cli("extend", name, "2h", "-y", "--json")
    assert done.code == 0, done.stderr
    more = done.json["worst_case_usd"] - worst
    assert (more, sum(held(cli))) == pytest.approx((worst * 2 / 8.5, done.json["worst_case_usd"]), rel=1e-3)
    (shown,) = cli("list", "--json").json["endpoints"]
    assert shown["ends_s"] == done.json["ends_s"] == deployed["ends_s"] + 7200
    assert cli("extend", name, "1000h", "-y").stderr.count(f"endpoint:{name}") == 1
    payer.settings(clock_s=8 * 3600 + 60)
    assert there(payer)["endpoints"] == [name]
    payer.settings(clock_s=10 * 3600 + 60)
    assert "endpoints" not in cli("list", "--json").json
    assert (there(payer), held(cli)) == ({}, [])
    late = cli("extend", name, "2h", "-y")
    assert (late.code, "it is gone" in late.stderr) == (2, True)


@pytest.mark.parametrize(
    ("call", "kind", "expected"),
    [
        ("UpdateSchedule", "error", CredentialError),
        ("GetSchedule", "lost", CloudtrainError),  # only a read
        ("UpdateSchedule", "lost", UnreachableError),
    ],
)
def test_refused_extension_changes_nothing(
    folder: Path,
    payer: Aws,
    model: Path,
    registry: Registry,
    call: str,
    kind: str,
    expected: type[CloudtrainError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a refusal end and reservation are as before; after a lost answer the later end is held and paid for."""
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)  # between the SDK's tries
    deploying.send(registry, planned(folder, model))
    (before,) = endpoints.rows(registry.database)
    found = deploying.extension(registry, before.name, 7200)
    is_held = expected is UnreachableError
    payer.fault(call, kind, code="AccessDeniedException", message="no")
    with pytest.raises(expected) as refusal:
        deploying.extend(registry, found)
    assert (type(refusal.value), f"extend {before.name} 1m" in refusal.value.hint) == (expected, is_held)
    (after,) = endpoints.rows(registry.database)
    assert (after.ends_s, after.worst_micro) == (
        before.ends_s + 7200 * is_held,
        before.worst_micro + found.more_micro * is_held,
    )
    assert sum(each.amount_micro or 0 for each in ledger.held(registry.database)) == after.worst_micro
    with pytest.raises(UsageError if is_held else expected):
        deploying.extend(registry, found)
    assert deploying.undeploy(registry, before.name).state == "gone"
    assert ledger.held(registry.database) == []


def test_refused_extension_keeps_a_later_extension(
    folder: Path, payer: Aws, model: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal takes back no end and no money of an extension that was accepted while the request was on its way."""
    deploying.send(registry, planned(folder, model))
    (before,) = endpoints.rows(registry.database)
    first, backend = deploying.extension(registry, before.name, 7200), backends.load("sagemaker")
    assert isinstance(backend, backends.EndsEndpoints)
    extend_endpoint = backend.extend_endpoint

    def accept_another_first(ref: dict[str, Any], ends_s: float) -> None:
        monkeypatch.setattr(backend, "extend_endpoint", extend_endpoint)
        deploying.extend(registry, deploying.extension(registry, before.name, 3600))
        payer.fault("UpdateSchedule", "error", code="AccessDeniedException", message="no")
        extend_endpoint(ref, ends_s)

    monkeypatch.setattr(backend, "extend_endpoint", accept_another_first)
    monkeypatch.setattr(backends, "load", lambda name: backend)
    with pytest.raises(CredentialError, match="stays reserved until the endpoint is gone"):
        deploying.extend(registry, first)
    (after,) = endpoints.rows(registry.database)
    assert after.ends_s == before.ends_s + 3 * 3600
    assert sum(each.amount_micro or 0 for each in ledger.held(registry.database)) == after.worst_micro
    assert deploying.undeploy(registry, before.name).state == "gone"
    assert ledger.held(registry.database) == []


def test_interrupt_before_the_request_changes_nothing(
    folder: Path, payer: Aws, model: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at a shared ledger, before the platform's request, restores end and reservation."""
    deploying.send(registry, planned(folder, model))
    (sent,) = endpoints.rows(registry.database)
    found = deploying.extension(registry, sent.name, 7200)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shared_ledger_sync, "hold", interrupt)
    with pytest.raises(KeyboardInterrupt):
        deploying.extend(registry, found)
    assert endpoints.rows(registry.database) == [found.record]
    assert [each.amount_micro for each in ledger.held(registry.database)] == [sent.worst_micro]


def test_endpoint_at_its_end_is_not_extended(
    folder: Path, payer: Aws, model: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end that came near during the question, and a failed start, are refused with the reason; nothing is held."""
    deploying.send(registry, planned(folder, model))
    (sent,) = endpoints.rows(registry.database)
    found = deploying.extension(registry, sent.name, 7200)
    near = replace(found, record=replace(found.record, ends_s=time.time() + 10))
    with pytest.raises(UsageError, match="its end is too near"):
        deploying.extend(registry, near)
    monkeypatch.setattr(costs, "refresh_one", lambda database, record: replace(record, word="Failed"))
    with pytest.raises(UsageError, match="it is Failed"):
        deploying.extension(registry, sent.name, 7200)
    assert [each.amount_micro for each in ledger.held(registry.database)] == [sent.worst_micro]


def test_extension_counts_no_ended_endpoint(folder: Path, payer: Aws, model: Path, registry: Registry) -> None:
    """In a full budget the worst case of an endpoint that has ended unseen is freed first, as for a deploy."""
    ended, endpoint = planned(folder, model), planned(folder, model)
    assert endpoint.worst_micro is not None
    for each in (ended, endpoint):
        deploying.send(registry, each)
    ledger.set_budget(registry.database, LedgerBudget("", "all", 2 * endpoint.worst_micro))
    payer.client("sagemaker").delete_endpoint(EndpointName=ended.plan.name)
    assert deploying.extension(registry, endpoint.plan.name, 7200).more_micro > 0


def test_extension_counts_in_the_teams_ledger(
    folder: Path, payer: Aws, model: Path, registry: Registry, tmp_path: Path
) -> None:
    """A team's ledger holds both worst cases, refuses an extension without room, and is free after the end."""
    (tmp_path / "team").mkdir()
    place = located(str(tmp_path / "team"))
    endpoint = planned(folder, model)
    assert endpoint.worst_micro is not None
    limit = LedgerBudget("", "all", 2 * endpoint.worst_micro)
    shared_ledger_sync.set_budget(registry.database, limit, place, may_make=True)
    deploying.send(registry, endpoint)
    name, cell = endpoint.plan.name, shared_ledger_sync.open_cell(place)
    deploying.extend(registry, deploying.extension(registry, name, 7200))
    with pytest.raises(BudgetError):
        deploying.extend(
            registry, deploying.Extension(endpoints.find(registry.database, name), 1e10, limit.limit_micro)
        )
    (row,) = endpoints.rows(registry.database)
    held = shared_ledger.read(cell).held
    assert sum(each.amount_micro or 0 for each in held.values()) == row.worst_micro < limit.limit_micro
    deploying.undeploy(registry, name)
    assert shared_ledger.read(cell).held == {}


def test_full_budget_refuses_the_endpoint(cli: Any, folder: Path, payer: Aws, model: Path) -> None:
    """The worst case of a second endpoint does not fit; nothing is sent."""
    first = cli(*DEPLOY, "-y", "--json", cwd=folder)
    limit = 1.5 * first.json["worst_case_usd"]
    assert cli("budget", "set", f"{limit:.2f}USD").code == 0
    payer.clear_journal()
    done = cli(*DEPLOY, "-y", cwd=folder)
    assert (done.code, f"endpoint:{first.json['endpoint']}" in done.stderr) == (6, True), done.stderr
    assert not [call for call in payer.journal() if call["operation"].startswith(("Create", "Put"))]
    assert cli("undeploy", first.json["endpoint"]).code == 0
    assert cli(*DEPLOY, "-y", cwd=folder).code == 0


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--to", "sagemaker"], 2, "an endpoint needs an end"),
        (["--to", "sagemaker", "--ttl", "never"], 2, "--ttl never"),
        (["--to", "sagemaker", "--ttl", "10m"], 2, "is too short"),
        (["--to", "local", "--ttl", "8h"], 2, "local has no endpoints"),
        (["--to", "sagemaker", "--ttl", "8h", "--set", "sagemaker.scheduler_role=null"], 3, "no role to delete"),
        (["--to", "sagemaker", "--ttl", "8h", "--instance-type", "ml.c9.xlarge"], 3, "no price is known"),
        (["--to", "sagemaker", "--ttl", "8h", "--set", "image=null"], 3, "no image is named"),
        (["--to", "azureml", "--ttl", "8h", "--instance-type", "Standard_DS3_v2"], 2, "Azure ML deletes no endpoint"),
        (["--to", "vertex", "--ttl", "8h", "--instance-type", "n1-standard-4"], 2, "Vertex AI deletes no endpoint"),
    ],
)
def test_endpoint_without_an_enforced_end_is_refused(
    cli: Any, folder: Path, model: Path, args: list[str], code: int, said: str
) -> None:
    """Without a lifetime, a role, a price or a platform that enforces the end, nothing is sent."""
    done = cli("deploy", "m", *args, "-y", cwd=folder)
    assert (done.code, said in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


def test_question_is_asked_before_money_is_spent(cli: Any, folder: Path, model: Path) -> None:
    """Without a terminal and without -y, the command ends before any request."""
    done = cli(*DEPLOY, cwd=folder)
    assert (done.code, "-y" in done.stderr) == (2, True), done.stderr


def test_azures_requests_fit_azures_own_model(cli: Any, folder: Path, model: Path) -> None:
    """Each property of the rendered requests is a property of the SDK's classes; the price is the table's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the SDK's own, about its libraries
        from azure.ai.ml._restclient.arm_ml_service import models as vendor
    done = cli(
        "deploy", "m", "--to", "azureml", "--ttl", "8h", "--instance-type", "Standard_NC12s_v3", "--dry-run", cwd=folder
    )
    assert done.code == 0, done.stderr
    environment, endpoint, deployment, traffic = (each["body"]["properties"] for each in done.json["requests"])
    for kind, body in (
        (vendor.EnvironmentVersionProperties, environment),
        (vendor.InferenceContainerProperties, environment["inferenceConfig"]),
        (vendor.OnlineEndpointProperties, endpoint),
        (vendor.OnlineEndpointProperties, traffic),
        (vendor.ManagedOnlineDeployment, deployment),
        (vendor.OnlineRequestSettings, deployment["requestSettings"]),
        (vendor.ProbeSettings, deployment["livenessProbe"]),
    ):
        known = {field._rest_name for field in kind({})._attr_to_rest_field.values()}
        assert set(body) <= known, kind
    assert done.json["worst_case_usd"] > 8.5 * done.json["usd_per_hour"] > 0
    assert "az ml online-endpoint delete" in done.json["delete"]


def test_vertexs_requests_fit_googles_own_messages(cli: Any, folder: Path, model: Path) -> None:
    """Google's classes read each rendered request."""
    args = ("--ttl", "8h", "--instance-type", "g2-standard-4", "--instances", "2", "--dry-run")
    done = cli("deploy", "m", "--to", "vertex", *args, cwd=folder)
    assert done.code == 0, done.stderr
    upload, endpoint, deploy = (each["body"] for each in done.json["requests"])
    for kind, body in (
        (types.UploadModelRequest, upload),
        (types.Endpoint, endpoint),
        (types.DeployModelRequest, deploy),
    ):
        json_format.ParseDict(body, kind.pb()())
    assert deploy["deployedModel"]["dedicatedResources"]["minReplicaCount"] == 2
    assert done.json["worst_case_usd"] > 8.5 * done.json["usd_per_hour"] > 0


@pytest.mark.parametrize("target", ["sagemaker", "azureml", "vertex"])
def test_worst_case_of_each_type_of_the_price_list_is_held_by_a_budget(
    folder: Path, model: Path, home: Path, target: str
) -> None:
    """A budget of the worst case holds the endpoint, a cent less refuses; the price's upper bound never exceeds it."""
    database, number, found = Database(), 0, checked_model(model, None, None)
    region = "location" if target == "vertex" else "region"
    for row in catalog.rows(target):
        if not row["usd_per_hour"]:
            continue
        settings = [f"resources.instance_type={row['instance_type']}", f"{target}.{region}={row['region']}"]
        config = configs.load(folder / "cloudtrain.yaml", backend=target, overrides=settings)
        wish = EndpointWish(found, f"e-{(number := number + 1)}", 2, 7200, time.time() + 7200)
        plan: EndpointPlan = backends.load(target).endpoint(wish, config)  # type: ignore[attr-defined]
        worst, price = costs.worst_micro(plan, 2, 7200), costs.price_micro(plan)
        if worst is None or price is None:
            assert target == "vertex", row  # N1 hosts, whose accelerators have no price in the table
            continue
        assert worst >= 2 * price * 2.5 * plan.uncertainty - 10
        record = EndpointRecord(
            plan.name, target, "", plan.machine, 2, 2 * price, worst, "", time.time(), wish.ends_s, {}, {}
        )
        ledger.set_budget(database, LedgerBudget("", "all", worst - 1))
        with pytest.raises(BudgetError):
            endpoints.add(database, record, [])
        ledger.set_budget(database, LedgerBudget("", "all", worst))
        endpoints.add(database, record, [])
        assert [each.amount_micro for each in ledger.held(database)] == [worst]
        endpoints.change(database, plan.name, "live")
        latest_s = record.ends_s + costs.SLACK_S
        live = endpoints.find(database, plan.name)
        assert live.spent_micro(latest_s) <= worst
        database.execute("DELETE FROM reservations")
        database.execute("DELETE FROM endpoints")
    assert number > 20
