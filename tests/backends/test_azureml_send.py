"""Sending to Azure ML, through the installed command and the real SDK: one job whatever happens, and what is said."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.entrypoints import events
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


# What a submit imports for three seconds of processor time: once for all but the commands that show the import itself.
SDK = ("azure.ai.ml", "azure.identity", "requests", "pydantic", "jinja2", "yaml", "pathspec")


@pytest.fixture
def cold_cli(cli: Any) -> Any:
    """Return the command as it starts for users."""
    return replace(cli, preloaded=())


@pytest.fixture
def cli(cli: Any) -> Any:
    """Return the command with the SDK imported already."""
    return replace(cli, preloaded=SDK)


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


def test_what_is_sent_is_the_dry_run(cli: Any, cold_cli: Any, folder: Path, azure_account: Azure) -> None:
    """But for the job's own name, the owner and the token; and the code is uploaded once, however many jobs have it."""
    dry = yaml.safe_load(cold_cli("submit", "--dry-run", cwd=folder).stdout)
    assert cold_cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
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


def test_nothing_of_the_sdk_is_on_the_screen(cold_cli: Any, folder: Path, azure_account: Azure) -> None:
    """No progress bar, no warning of experimental classes, no log line."""
    done = cold_cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    said = [line for line in done.stderr.splitlines() if not line.startswith("  ")]
    assert done.stdout == ""
    assert [line for line in said if re.search(r"(?i)experimental|upload|class |warning|%|azure-ai", line)] == []


@pytest.mark.parametrize(("kind", "count"), [("lost", 1), ("throttle", 3), ("500", 2), ("lost", 5)], ids=str)
def test_answer_that_does_not_come(cli: Any, folder: Path, azure_account: Azure, kind: str, count: int) -> None:
    """Whatever is lost on the way, the command goes on, and there is one job."""
    azure_account.fault("jobs.put", kind, count=count)
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, len(azure_account.jobs())) == (0, 1), done.stderr
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")


@pytest.mark.parametrize(("operation", "kind"), [("codes.*", "lost"), ("codes.*", "drop"), ("jobs.get", "throttle")])
def test_way_that_stumbles(cli: Any, folder: Path, azure_account: Azure, operation: str, kind: str) -> None:
    """Every call on the way may fail and be made again."""
    azure_account.fault(operation, kind, count=1)
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, len(azure_account.jobs())) == (0, 1), done.stderr


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
    assert ("itself failed" in done.stderr, done.stderr.count("error:")) == (False, 1)
    [put] = azure_account.journal("vault.put")
    assert azure_account.secret(put["path"].rpartition("/")[2]) is None
    assert [job["phase"] for job in cli("list", "--json").json["jobs"]] == ["never_sent"]


@pytest.mark.parametrize(
    ("env", "settings", "exit_code", "said"),
    [
        ({"AZURE_CLIENT_SECRET": ""}, (), 4, "no valid Azure credentials"),
        ({"AZURE_CLIENT_SECRET": "wrong"}, (), 4, "Azure"),
        (
            {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
            (),
            7,
            "gave an unexpected answer",
        ),
        ({}, ("azureml.workspace=nowhere",), 3, "there is no workspace nowhere"),
        ({}, ("azureml.resource_group=nowhere",), 3, "at azureml.resource_group"),
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
    assert (done.code, said in done.stderr, "itself failed" in done.stderr) == (exit_code, True, False), done.stderr
    assert azure_account.jobs() == []
    assert [call for call in azure_account.journal("blob.put") if ACCOUNT in call["host"]] == []
    if exit_code == 4:  # nothing is written down
        assert cli("list", "--json").json["jobs"] == []


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


def test_budget_counts_how_long_a_cluster_idles(cli: Any, folder: Path, azure_account: Azure) -> None:
    """Azure's default is counted; a cluster that keeps its machines longer has to be told, and then is."""
    azure_account.compute("four", vmSize="Standard_NC4as_T4_v3", maxNodeCount=4, nodeIdleTimeBeforeScaleDown="PT300S")
    given = ("submit", "-d", "--name", "one", "--set", "budget.limit=5 USD", "--set", "azureml.compute=four")
    refused = cli(*given, cwd=folder)
    assert (refused.code, azure_account.jobs()) == (3, []), refused.stderr
    assert all(words in refused.stderr for words in ("for 5m, and the plan counts 2m", "write `idle: 5m`"))
    done = cli(*given, "--set", "azureml.idle=5m", cwd=folder)
    assert (done.code, "6m that are billed after the job ends" in done.stderr) == (0, True), done.stderr


def test_price_alone_counts_how_long_a_cluster_idles(cli: Any, folder: Path, azure_account: Azure) -> None:
    """A month's budget reserves by the plan; of machines that stay only those beyond them idle for the job."""
    idle = {"nodeIdleTimeBeforeScaleDown": "PT1H", "maxNodeCount": 4}
    azure_account.compute("some", vmSize="Standard_NC4as_T4_v3", minNodeCount=1, **idle)
    azure_account.compute("all", vmSize="Standard_NC4as_T4_v3", minNodeCount=2, **idle)
    assert cli("budget", "set", "50USD", "--month", cwd=folder).code == 0
    given = ("submit", "-d", "-y", "--name", "one", "--set")
    refused = cli(*given, "azureml.compute=some", cwd=folder)
    assert (refused.code, azure_account.jobs()) == (3, []), refused.stderr
    assert "keeps idle machines for 1h, and the plan counts 2m" in refused.stderr, refused.stderr
    done = cli(*given, "azureml.compute=all", cwd=folder)
    assert (done.code, len(azure_account.jobs())) == (0, 1), done.stderr


def test_price_of_another_region_is_refused(cli: Any, folder: Path, azure_account: Azure) -> None:
    """A cheaper region's price would let the job run too long; a price of the user's own hangs on no region."""
    given = ("submit", "-d", "-y", "--name", "one", "--set", "azureml.region=eastus2")
    refused = cli(*given, "--set", "resources.instance_type=Standard_ND96isr_H100_v5", cwd=folder)
    assert (refused.code, azure_account.jobs()) == (3, []), refused.stderr
    words = f"the machines are in {REGION}, and the price that is counted with is eastus2's"
    assert words in refused.stderr, refused.stderr
    assert f"write `region: {REGION}`" in refused.stderr
    assert cli(*given, "--price-per-hour", "2 USD", cwd=folder).code == 0


def test_cluster_may_be_elsewhere_than_its_workspace(cli: Any, folder: Path, azure_account: Azure) -> None:
    """Then its own region's price counts, however it is written."""
    azure_account.compute("far", vmSize="Standard_ND96isr_H100_v5", location="eastus2")
    given = ("submit", "-d", "-y", "--set", "resources.instance_type=Standard_ND96isr_H100_v5", "--set")
    refused = cli(*given, "azureml.compute=far", cwd=folder)
    assert (refused.code, "the machines are in eastus2" in refused.stderr) == (3, True), refused.stderr
    done = cli(*given, "azureml.compute=far", "--set", "azureml.region=East US 2", cwd=folder)
    assert (done.code, len(azure_account.jobs())) == (0, 1), done.stderr


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


def test_nothing_but_a_submit_imports_the_sdk(cli: Any, cold_cli: Any, folder: Path, azure_account: Azure) -> None:
    """It costs a second of processor time: whoever looks at a job must not pay for it."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    azure_account.begin("one-1")
    azure_account.write_logs("one-1", 0, "[0] a")
    for command in (("status", "one"), ("logs", "one"), ("list",), ("stop", "one"), ("doctor", "azureml")):
        if command[0] == "stop":
            azure_account.end("one-1")
        done = cold_cli(*command, cwd=folder, env={"PYTHONPROFILEIMPORTTIME": "1"})
        assert "azure.ai" not in done.stderr
        assert "azure.identity" in done.stderr or command[0] == "stop"


def test_stop_of_a_job_that_is_over_is_no_error(cli: Any, folder: Path, azure_account: Azure) -> None:
    """It has ended between two looks: there is nothing to complain about."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    azure_account.begin("one-1")
    azure_account.end("one-1")
    done = cli("stop", "one")
    assert (done.code, "itself failed" in done.stderr) == (0, False)
    assert cli("status", "one", "--json").json["state"] == "succeeded"


def end_words(azure: Azure, job: str, **account: Any) -> None:
    """Let both containers say their last words, and what they say of the end."""
    for node in range(2):
        told = [events.format_line("ended", "so it ended", account)] if account else []
        azure.write_logs(job, node, *told, events.format_line("end", "node has ended", {"node": node, "final": True}))


def test_refusal_of_a_look_is_no_refusal_of_the_job(cli: Any, folder: Path, azure_account: Azure) -> None:
    """The answer was lost, and whether the job is there cannot be seen: it is not known, and found out later."""
    azure_account.fault("jobs.put", "lost", every=1)
    azure_account.fault("jobs.get", "error", after=1, status=403, code="Forbidden", message="conditional access")
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, "itself failed" in done.stderr) == (7, False), done.stderr
    azure_account.clear_faults()
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")
    assert azure_account.jobs() == ["one-1"]


def test_secret_of_a_submit_that_died_is_removed(cli: Any, folder: Path, azure_account: Azure, wait_until: Any) -> None:
    """Who finds that nothing was sent leaves nothing in the vault either."""
    azure_account.fault("codes.list", "slow", delay_s=20.0)
    given, env = ("--set", "secrets=[TOKEN]", "--name", "one"), {"TOKEN": "sesame"}
    process = cli.start("submit", "-d", "-y", *given, cwd=folder, env=env)
    wait_until(lambda: azure_account.journal("vault.put") != [], 30, 0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    azure_account.clear_faults()
    [put] = azure_account.journal("vault.put")
    wait_until(lambda: azure_account.secret(put["path"].rpartition("/")[2]) is not None, 10, 0.05)
    [found] = cli("list", "--json").json["jobs"]
    assert (found["state"], azure_account.secret(put["path"].rpartition("/")[2])) == ("failed", None)


def test_end_waits_for_the_containers_account(cli: Any, folder: Path, azure_account: Azure) -> None:
    """Files are written late, or cannot be read just now: what Azure says of a shell's exit code is not the end."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    azure_account.begin("one-1")
    azure_account.write_logs("one-1", 0, "[0] a")
    azure_account.end("one-1", "Failed", {"code": "UserError", "message": "User process 'bash' exited with 75"})
    assert cli("status", "one", "--json").json["state"] == "stopping"
    azure_account.fault("blob.get", "500")
    assert cli("status", "one", "--json").json["unreachable_since_s"] is not None
    azure_account.clear_faults()
    end_words(azure_account, "one-1", state="stopped", reason="budget", kind=None, resumable=True)
    status = cli("status", "one", "--json").json
    assert (status["state"], status["reason"], status["exit_code"]) == ("stopped", "budget", 6)


PREEMPTED = {"code": "PreemptionError", "message": "AzureMLCompute job failed. PreemptionError: Nodes got pre-empted."}
AGAIN = ("--set", "retry.max_attempts=3", "--name", "one")


def test_two_followers_send_one_further_attempt(cli: Any, folder: Path, azure_account: Azure, wait_until: Any) -> None:
    """And each follows it to its end, also who comes while the other is sending it and lives on."""
    assert cli("submit", "-d", "-y", *AGAIN, cwd=folder).code == 0
    assert cli("submit", "-d", "-y", "--name", "two", cwd=folder).code == 0
    azure_account.begin("one-1")
    followers = [cli.start("wait", "one", "two"), cli.start("logs", "-f", "one")]
    wait_until(lambda: len(azure_account.journal("blob.get") + azure_account.journal("run.details")) > 3, 30, 0.05)
    wait_until(lambda: cli("status", "one", "--json").json["state"] == "running", 30, 0.05)
    azure_account.fault("jobs.put", "slow", delay_s=4.0)
    end_words(azure_account, "one-1")
    azure_account.end("one-1", "Failed", PREEMPTED)
    wait_until(lambda: cli("list", "--json").json["jobs"][-1]["attempt"] == 2, 60, 0.1)
    followers.append(cli.start("logs", "-f", "one"))
    wait_until(lambda: "one-2" in azure_account.jobs(), 60, 0.1)
    azure_account.begin("one-2")
    end_words(azure_account, "one-2")
    azure_account.end("one-2")
    codes = [follower.wait(60) for follower in followers[1:]]
    azure_account.end("two-1")
    assert (codes, followers[0].wait(60)) == ([0, 0], 0)
    for follower in followers:
        follower.communicate()
    assert azure_account.jobs() == ["one-1", "two-1", "one-2"]


def test_further_attempt_whose_answer_is_lost_is_followed(
    cli: Any, folder: Path, azure_account: Azure, wait_until: Any
) -> None:
    """It is not known whether it runs, until it is: then it is followed to its end."""
    process = cli.start("submit", "-y", *AGAIN, cwd=folder)
    wait_until(lambda: azure_account.jobs() == ["one-1"], 60, 0.1)
    azure_account.begin("one-1")
    wait_until(lambda: cli("status", "one", "--json").json["state"] == "running", 30, 0.1)
    azure_account.fault("jobs.put", "lost", count=5)
    azure_account.fault("jobs.get", "500", after=1, count=4)
    azure_account.end("one-1", "Failed", PREEMPTED)
    wait_until(lambda: "one-2" in azure_account.jobs(), 60, 0.1)
    azure_account.begin("one-2")
    end_words(azure_account, "one-2")
    azure_account.end("one-2")
    said = process.communicate(timeout=120)[1]
    assert (process.returncode, "whether attempt 2 was sent is not known yet" in said) == (0, True), said
    assert azure_account.jobs() == ["one-1", "one-2"]


def test_nothing_is_begun_for_who_only_looks(cli: Any, folder: Path, azure_account: Azure) -> None:
    """The log of a job that was preempted before is an old story; and who stops a job does not want another attempt."""
    assert cli("submit", "-d", "-y", *AGAIN, cwd=folder).code == 0
    azure_account.begin("one-1")
    end_words(azure_account, "one-1")
    azure_account.end("one-1", "Failed", PREEMPTED)
    assert cli("logs", "-f", "one").code == 1
    assert cli("wait", "one").code == 1
    assert cli("stop", "one", "-y").code == 0
    assert azure_account.jobs() == ["one-1"]


def test_what_others_have_set_up_does_not_take_our_tokens_place(
    cli: Any, folder: Path, azure_account: Azure, tmp_path: Path
) -> None:
    """requests reads ~/.netrc; and a file of certificates that is not there is named, not called a fault of ours."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password else\n")
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder, env={"NETRC": str(netrc)}).code == 0
    done = cli("logs", "one", env={"REQUESTS_CA_BUNDLE": "/nowhere/ca.pem"})
    assert (done.code, "/nowhere/ca.pem" in done.stderr, "itself failed" in done.stderr) == (7, True, False)


def test_datastore_that_is_not_there_is_said_before(cli: Any, folder: Path, azure_account: Azure) -> None:
    """Else it would be the job's first failure."""
    done = cli("submit", "-d", "-y", "--set", "azureml.datastore=nowhere", cwd=folder)
    assert (done.code, "there is no datastore `nowhere`" in done.stderr) == (3, True)
    assert azure_account.jobs() == []
