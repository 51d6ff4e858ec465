"""Sending to Azure ML, through the installed command and the real SDK: one job whatever happens, and what is said."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from doubles.azure.handle import ACCOUNT, GROUP, REGION, SUBSCRIPTION, WORKSPACE, Azure

WHERE = f"subscription: {SUBSCRIPTION}, resource_group: {GROUP}, workspace: {WORKSPACE}, region: {REGION}"
CONFIG = f"""\
name: j
backend: azureml
script: loop.py
resources: {{instances: 2, instance_type: Standard_NC4as_T4_v3}}
limits: {{max_duration: 1h}}
azureml: {{{WHERE}, identity: managed}}
"""


@pytest.fixture(autouse=True)
def jobs_never_end(azure_account: Azure) -> None:
    """Start nothing: a job runs until the test ends it."""
    azure_account.settings(execute=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a project's folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "loop.py").write_text("print('x')\n")
    (folder / "cloudtrain.yaml").write_text(CONFIG)
    return folder


def sent(azure: Azure, name: str) -> dict[str, Any]:
    """Return the body that was put."""
    body: dict[str, Any] = azure.job(name)["body"]["properties"]
    return body


def decoded(text: str) -> dict[str, Any]:
    """Return what is in one of our variables."""
    found: dict[str, Any] = json.loads(base64.b64decode(text))
    return found


def test_what_is_sent_is_the_dry_run(cli: Any, folder: Path, azure_account: Azure) -> None:
    """But for the job's own name, the owner and the token; and the code is uploaded once, however many jobs have it."""
    dry = yaml.safe_load(cli("submit", "--dry-run", cwd=folder).stdout)
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    assert cli("submit", "-d", "-y", "--name", "two", cwd=folder).code == 0
    one, two = sent(azure_account, "one-1"), sent(azure_account, "two-1")
    order = decoded(one["environmentVariables"]["CLOUDTRAIN_ORDER"])
    assert order == {**decoded(dry["environment_variables"]["CLOUDTRAIN_ORDER"]), "job": "one"}
    assert one["command"] == dry["command"]
    assert (one["limits"]["timeout"], one["resources"]["instanceCount"]) == ("PT1H", 2)
    assert one["tags"].keys() - dry["tags"].keys() == {"cloudtrain.owner"}
    tokens = [decoded(job["environmentVariables"]["CLOUDTRAIN_SENT"])["token"] for job in (one, two)]
    assert (len(set(tokens)), one["codeId"]) == (2, two["codeId"])
    uploads = [call for call in azure_account.journal("blob.put") if "bundle.tar.gz" in call["path"]]
    assert len(uploads) == 1
    assert azure_account.jobs() == ["one-1", "two-1"]
    assert azure_account.unserved() == []


def test_commit_that_is_noted_is_the_codes(cli: Any, folder: Path, azure_account: Azure, tmp_path: Path) -> None:
    """The SDK reads git's state from the current directory: it must be the code's, wherever the command was started."""
    for where in (folder, tmp_path):
        subprocess.run(["git", "init", "-q", "-b", where.name], cwd=where, check=True)
        author = ("-c", "user.name=x", "-c", "user.email=x@y")
        subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "x"], cwd=where, check=True)
    assert cli("submit", "-d", "-y", "--name", "one", "-f", folder / "cloudtrain.yaml", cwd=tmp_path).code == 0
    assert sent(azure_account, "one-1")["properties"]["mlflow.source.git.branch"] == "project"


def test_nothing_of_the_sdk_is_on_the_screen(cli: Any, folder: Path, azure_account: Azure) -> None:
    """No progress bar, no warning of experimental classes, no log line."""
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    said = [line for line in done.stderr.splitlines() if not line.startswith("  ")]
    assert done.stdout == ""
    assert [line for line in said if re.search(r"(?i)experimental|upload|class |warning|%|azure-ai", line)] == []


@pytest.mark.parametrize(("kind", "count"), [("lost", 1), ("throttle", 3), ("500", 2), ("lost", 5)], ids=str)
def test_answer_that_does_not_come(cli: Any, folder: Path, azure_account: Azure, kind: str, count: int) -> None:
    """Whatever is lost on the way, the command goes on, and there is one job."""
    azure_account.fault("jobs.put", kind, count=count)
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, azure_account.jobs()) == (0, ["one-1"]), done.stderr
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")


@pytest.mark.parametrize(
    ("operation", "kind"), [("codes.*", "lost"), ("codes.*", "drop"), ("blob.put", "lost"), ("jobs.get", "throttle")]
)
def test_way_that_stumbles(cli: Any, folder: Path, azure_account: Azure, operation: str, kind: str) -> None:
    """Every call on the way may fail and be made again."""
    azure_account.fault(operation, kind, count=1)
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, azure_account.jobs()) == (0, ["one-1"]), done.stderr


def test_submit_that_is_killed_before_the_answer_is_found_by_the_next_command(
    cli: Any, folder: Path, azure_account: Azure, wait_until: Any
) -> None:
    """kill -9 while Azure has the request: the job is there, and is ours."""
    azure_account.fault("jobs.put", "slow", delay_s=3.0)
    process = cli.start("submit", "-d", "-y", "--name", "one", cwd=folder)
    wait_until(lambda: azure_account.journal("blob.put") != [], 30, 0.05)
    wait_until(lambda: azure_account.journal("environments.get") + azure_account.journal("codes.put") != [], 30, 0.05)
    wait_until(lambda: azure_account.journal("jobs.put") != [] or azure_account.jobs() != [], 30, 0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    [found] = cli("list", "--json").json["jobs"]
    assert (found["state"] in ("pending", "running"), found["job"]) == (True, "one")
    assert azure_account.jobs() == ["one-1"]


def test_submit_that_is_killed_before_it_sends_leaves_nothing(
    cli: Any, folder: Path, azure_account: Azure, wait_until: Any
) -> None:
    """Nothing came within the time that a request may take: never sent, and the name is free for the next attempt."""
    azure_account.fault("codes.list", "slow", delay_s=20.0)
    process = cli.start("submit", "-d", "-y", "--name", "one", cwd=folder)
    wait_until(lambda: azure_account.journal("jobs.get") != [], 30, 0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    azure_account.clear_faults()
    [found] = cli("list", "--json").json["jobs"]
    assert (found["state"], "nothing runs" in found["detail"]) == ("failed", True)
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    assert azure_account.jobs() == ["one-2"]


def test_name_that_another_machine_has_taken(cli: Any, folder: Path, azure_account: Azure, tmp_path: Path) -> None:
    """Two machines, one workspace, one name: the second is refused, and the first one's job is untouched."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    before = sent(azure_account, "one-1")
    elsewhere = {"CLOUDTRAIN_HOME": str(tmp_path / "elsewhere")}
    refused = cli("submit", "-d", "-y", "--name", "one", cwd=folder, env=elsewhere)
    assert (refused.code, "choose another --name" in refused.stderr) == (2, True), refused.stderr
    assert (sent(azure_account, "one-1"), azure_account.jobs()) == (before, ["one-1"])


def test_secrets_are_in_the_vault_alone(cli: Any, folder: Path, azure_account: Azure) -> None:
    """One entry, of which the request says the address; gone when the end is seen."""
    env = {"TOKEN": "sesame"}
    assert cli("submit", "-d", "-y", "--set", "secrets=[TOKEN]", "--name", "one", cwd=folder, env=env).code == 0
    body = sent(azure_account, "one-1")
    url = decoded(body["environmentVariables"]["CLOUDTRAIN_SENT"])["vault"]
    assert json.loads(azure_account.secret(url.rpartition("/")[2]) or "") == env
    assert "sesame" not in json.dumps(body)
    azure_account.end("one-1")
    assert cli("wait", "one").code == 0
    assert azure_account.secret(url.rpartition("/")[2]) is None


@pytest.mark.parametrize(
    ("fault", "exit_code", "said"),
    [
        (
            {
                "status": 400,
                "code": "UserError",
                "message": "The specified Azure ML quota Standard NCASv3_T4 is used up",
            },
            5,
            ("is used up", "hint: ask for more under Quotas"),
        ),
        (
            {"status": 403, "code": "AuthorizationFailed", "message": "The client does not have authorization"},
            4,
            ("not allowed: The client", "AzureML Data Scientist"),
        ),
        ({"status": 400, "code": "ValidationError", "message": "Image x cannot be parsed"}, 3, ("Image x cannot",)),
        ({"status": 418, "code": "SomethingNew", "message": "of next year"}, 3, ("of next year",)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusal_is_one_sentence_with_what_to_do(
    cli: Any, folder: Path, azure_account: Azure, fault: dict[str, Any], exit_code: int, said: tuple[str, ...]
) -> None:
    """Nothing stays: no secret, and the attempt is closed."""
    azure_account.fault("jobs.put", "error", **fault)
    done = cli("submit", "-d", "-y", "--set", "secrets=[TOKEN]", cwd=folder, env={"TOKEN": "sesame"})
    assert done.code == exit_code, done.stderr
    assert [word for word in said if word not in done.stderr] == [], done.stderr
    assert ("Traceback" in done.stderr, done.stderr.count("error:")) == (False, 1)
    [put] = azure_account.journal("vault.put")
    assert azure_account.secret(put["path"].rpartition("/")[2]) is None
    assert cli("status", "last", "--json").json["state"] == "failed"


@pytest.mark.parametrize(
    ("env", "settings", "exit_code", "said"),
    [
        ({"AZURE_CLIENT_SECRET": ""}, (), 4, "no Azure credentials"),
        ({"AZURE_CLIENT_SECRET": "wrong"}, (), 4, "Azure"),
        ({"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}, (), 7, "does not answer"),
        ({}, ("azureml.workspace=nowhere",), 3, "there is no workspace nowhere"),
        ({}, ("azureml.compute=nowhere",), 3, "there is no compute `nowhere`"),
        (
            {},
            ("azureml.compute=four", "resources.instance_type=Standard_NC8as_T4_v3"),
            3,
            "are Standard_NC4as_T4_v3, not",
        ),
        ({}, ("azureml.compute=four", "resources.instances=5"), 3, "grows to 4 machines"),
        ({}, ("secrets=[TOKEN]",), 3, "more than the 25000 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_missing_is_said(
    cli: Any,
    folder: Path,
    azure_account: Azure,
    env: dict[str, str],
    settings: tuple[str, ...],
    exit_code: int,
    said: str,
) -> None:
    """Before anything is uploaded."""
    azure_account.compute("four", vmSize="Standard_NC4as_T4_v3", maxNodeCount=4)
    given = [part for setting in settings for part in ("--set", setting)]
    done = cli("submit", "-d", "-y", *given, cwd=folder, env={"TOKEN": "x" * 30_000, **env})
    assert (done.code, said in done.stderr, "Traceback" in done.stderr) == (exit_code, True, False), done.stderr
    assert azure_account.jobs() == []
    assert [call for call in azure_account.journal("blob.put") if ACCOUNT in call["host"]] == []


def test_cluster_tells_its_type_and_how_long_it_idles(cli: Any, folder: Path, azure_account: Azure) -> None:
    """A cluster named alone: what its machines are, and so what they cost, the run says."""
    azure_account.compute("four", vmSize="Standard_NC4as_T4_v3", maxNodeCount=4, nodeIdleTimeBeforeScaleDown="PT300S")
    text = CONFIG.replace(", instance_type: Standard_NC4as_T4_v3", "").replace("identity", "compute: four, identity")
    (folder / "cloudtrain.yaml").write_text(f"{text}distributed: {{nproc_per_node: 1}}\n")
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, "price unknown: no price of the machines of four" in done.stderr) == (0, True), done.stderr
    azure_account.begin("one-1")
    status = cli("status", "one", "--json").json
    assert (status["state"], status["spend_usd"] > 0) == ("running", True)
    assert status["idle_usd"] == pytest.approx(2 * 0.526 * 300 / 3600)
    assert "while its machines idle after it" in cli("status", "one").stdout
    assert sent(azure_account, "one-1")["computeId"].endswith("/computes/four")


def test_poll_that_fails_says_nothing_about_the_job(cli: Any, folder: Path, azure_account: Azure) -> None:
    """Forbidden, expired, gone: the job stays what it was, and is shown as out of reach."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    azure_account.begin("one-1")
    assert cli("status", "one", "--json").json["state"] == "running"
    azure_account.fault("run.details", "error", status=403, code="Forbidden", message="not for you")
    status = cli("status", "one", "--json").json
    assert (status["state"], status["unreachable_since_s"] is not None) == ("running", True)
    azure_account.clear_faults()
    azure_account.fault("run.details", "expired")
    assert cli("status", "one", "--json").json["unreachable_since_s"] is None


def test_nothing_but_a_submit_imports_the_sdk(cli: Any, folder: Path, azure_account: Azure) -> None:
    """It costs a second of processor time: whoever looks at a job must not pay for it."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    azure_account.begin("one-1")
    azure_account.write_logs("one-1", 0, "[0] a")
    for command in (("status", "one"), ("logs", "one"), ("list",), ("stop", "one"), ("doctor", "azureml")):
        if command[0] == "stop":
            azure_account.end("one-1")
        done = cli(*command, cwd=folder, env={"PYTHONPROFILEIMPORTTIME": "1"})
        assert "azure.ai" not in done.stderr
        assert "azure.identity" in done.stderr or command[0] == "stop"


def test_stop_of_a_job_that_is_over_is_no_error(cli: Any, folder: Path, azure_account: Azure) -> None:
    """It has ended between two looks: there is nothing to complain about."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    azure_account.begin("one-1")
    azure_account.end("one-1")
    done = cli("stop", "one")
    assert "Traceback" not in done.stderr
    assert cli("status", "one", "--json").json["state"] == "succeeded"
