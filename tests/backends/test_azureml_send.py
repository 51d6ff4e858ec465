"""Submits to Azure ML with the installed command and the real SDK: always a single job, and clear messages."""

import base64
import json
import re
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.entrypoints import events
from cloudtrain.launcher.jobs import queue
from cloudtrain.launcher.store.registry import Registry
from doubles.azure.handle import Azure
from doubles.azure.names import ACCOUNT, GROUP, REGION, SUBSCRIPTION, WORKSPACE
from doubles.waiting import until

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
    """Start no container: a job runs until the test ends the job."""
    azure_account.settings(execute=False)


def sent(azure: Azure, name: str) -> dict[str, Any]:
    """Return the body of the PUT."""
    return azure.job(name)["body"]["properties"]


def decoded(text: str) -> dict[str, Any]:
    """Return the content of an encoded variable."""
    return json.loads(base64.b64decode(text))


def test_request_equals_the_dry_run(cli: Any, cold_cli: Any, folder: Path, azure_account: Azure) -> None:
    """Only name, owner and token differ; the code is uploaded once for all jobs."""
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


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("azureml:digits:2", None, ""),
        ("azureml:labels@latest", "uri_file", ""),
        ("azureml:labels:3", None, "azureml:labels:3 is of the type uri_file, and the request says uri_folder"),
        ("azureml:labels:3", None, "write `azureml: {raw: {inputs: {x: {type: uri_file}}}}`"),
        ("azureml:start:1", None, "is of the type custom_model"),
        ("azureml:labels:4", None, "there is no data asset azureml:labels:4"),
    ],
)
def test_types_of_assets_are_asked_for(
    cli: Any, folder: Path, azure_account: Azure, path: str, kind: str | None, said: str
) -> None:
    """Only Azure knows the type of an asset; doctor and the submit ask, before a job exists."""
    more = [
        "--set",
        f"inputs.x={path}",
        *(["--set", f"azureml.raw={{inputs: {{x: {{type: {kind}}}}}}}"] if kind else []),
    ]
    done = cli("submit", "-d", "-y", "--name", "one", *more, cwd=folder)
    assert (done.code, said in re.sub(r"\s+", " ", done.stderr)) == (3 if said else 0, True), done.stderr
    assert azure_account.jobs() == ([] if said else ["one-1"])


def test_noted_commit_is_the_codes(cli: Any, folder: Path, azure_account: Azure, tmp_path: Path) -> None:
    """The SDK reads git's state from the current directory, which must be the code's folder."""
    for where in (folder, tmp_path):
        subprocess.run(["git", "init", "-q", "-b", where.name], cwd=where, check=True)
        author = ("-c", "user.name=x", "-c", "user.email=x@y")
        subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "x"], cwd=where, check=True)
    assert cli("submit", "-d", "-y", "--name", "one", "-f", folder / "cloudtrain.yaml", cwd=tmp_path).code == 0
    assert sent(azure_account, "one-1")["properties"]["mlflow.source.git.branch"] == "project"


def test_removed_job_leaves_nothing_of_its_own_in_the_store(cli: Any, folder: Path, azure_account: Azure) -> None:
    """`rm` names the job's folder in the workspace's store; --everywhere empties that folder alone."""
    for name in ("one", "one-b"):
        cli.ok("submit", "-d", "-y", "--name", name, cwd=folder)
        for inner in ("checkpoints/step-2/manifest.json", "output/metrics.json"):
            azure_account.put_blob(f"cloudtrain/jobs/{name}/{inner}", "{}")
    cli.ok("stop", "one", "--now", "-y")
    until(lambda: cli("status", "one", "--json").json["state"] not in ("running", "pending", "stopping"))
    before = azure_account.blobs()
    assert "paths/cloudtrain/jobs/one  4 B  stays: --everywhere" in cli("rm", "one").stderr
    cli.ok("rm", "-y", "--everywhere", "one")
    assert azure_account.blobs() == [name for name in before if "/one/" not in name]
    assert len(before) == len(azure_account.blobs()) + 2


def test_sdk_prints_nothing(cold_cli: Any, folder: Path, azure_account: Azure) -> None:
    """No progress bar, no warning about experimental classes, and no log line appear."""
    done = cold_cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    said = [line for line in done.stderr.splitlines() if not line.startswith("  ")]
    assert done.stdout == ""
    assert [line for line in said if re.search(r"(?i)experimental|upload|class |warning|%|azure-ai", line)] == []


@pytest.mark.parametrize(
    ("kind", "count"), [("lost", 1), ("throttle", 3), ("500", 2), ("lost", 5), ("lost", 20)], ids=str
)
def test_lost_answer_leaves_one_job(cli: Any, folder: Path, azure_account: Azure, kind: str, count: int) -> None:
    """Despite lost answers, of all tries too, the command succeeds with a single job."""
    azure_account.fault("jobs.put", kind, count=count)
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, len(azure_account.jobs())) == (0, 1), done.stderr
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")


@pytest.mark.parametrize(("operation", "kind"), [("codes.*", "lost"), ("codes.*", "drop"), ("jobs.get", "throttle")])
def test_failing_calls_are_retried(cli: Any, folder: Path, azure_account: Azure, operation: str, kind: str) -> None:
    """Every call before the submit may fail and is made again."""
    azure_account.fault(operation, kind, count=1)
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, len(azure_account.jobs())) == (0, 1), done.stderr


def test_killed_submit_is_found_by_the_next_command(cli: Any, folder: Path, azure_account: Azure) -> None:
    """After kill -9 while Azure has the request, the job exists and belongs to this home folder."""
    azure_account.fault("jobs.put", "slow", delay_s=3.0)
    process = cli.start("submit", "-d", "-y", "--name", "one", cwd=folder)
    until(lambda: azure_account.journal("blob.put") != [], 30, 0.05)
    until(lambda: azure_account.journal("environments.get") + azure_account.journal("codes.put") != [], 30, 0.05)
    until(lambda: azure_account.journal("jobs.put") != [] or azure_account.jobs() != [], 30, 0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    [found] = cli("list", "--json").json["jobs"]
    assert (found["state"] in ("pending", "running"), found["job"]) == (True, "one")
    assert azure_account.jobs() == ["one-1"]


def test_submit_killed_before_the_send_leaves_nothing(cli: Any, folder: Path, azure_account: Azure) -> None:
    """If no job appears in a request's longest time, it was never sent, and the name is free for a new attempt.

    The command that finds no job also removes the secret from the vault.
    """
    azure_account.fault("codes.list", "slow", delay_s=20.0)
    given, env = ("--set", "secrets=[TOKEN]", "--name", "one"), {"TOKEN": "sesame"}
    process = cli.start("submit", "-d", "-y", *given, cwd=folder, env=env)
    until(lambda: azure_account.journal("jobs.get") and azure_account.journal("vault.put"), 30, 0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    azure_account.clear_faults()
    [put] = azure_account.journal("vault.put")
    secret = put["path"].rpartition("/")[2]
    until(lambda: azure_account.secret(secret) is not None, 10, 0.05)
    [found] = cli("list", "--json").json["jobs"]
    assert (found["state"], "nothing runs" in found["detail"]) == ("failed", True)
    assert azure_account.secret(secret) is None
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    assert azure_account.jobs() == ["one-2"]


def test_name_taken_by_a_second_home_is_refused(cli: Any, folder: Path, azure_account: Azure, tmp_path: Path) -> None:
    """With two machines in one workspace the second submit is refused, and the first job is untouched."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    before = sent(azure_account, "one-1")
    elsewhere = {"CLOUDTRAIN_HOME": str(tmp_path / "elsewhere")}
    refused = cli("submit", "-d", "-y", "--name", "one", cwd=folder, env=elsewhere)
    assert (refused.code, "choose another --name" in refused.stderr) == (2, True), refused.stderr
    assert (sent(azure_account, "one-1"), azure_account.jobs()) == (before, ["one-1"])


def test_secrets_are_only_in_the_vault(cli: Any, folder: Path, azure_account: Azure) -> None:
    """The request has only the address of the vault's single entry, which is removed after the end."""
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
            ("is used up", "hint: wait in line: --queue; ask for more under Quotas"),
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
def test_refusal_is_one_sentence_with_a_remedy(
    cli: Any, folder: Path, azure_account: Azure, fault: dict[str, Any], exit_code: int, said: tuple[str, ...]
) -> None:
    """No secret remains, and the attempt is closed."""
    azure_account.fault("jobs.put", "error", **fault)
    done = cli("submit", "-d", "-y", "--set", "secrets=[TOKEN]", cwd=folder, env={"TOKEN": "sesame"})
    assert done.code == exit_code, done.stderr
    assert [word for word in said if word not in done.stderr] == [], done.stderr
    assert ("itself failed" in done.stderr, done.stderr.count("error:")) == (False, 1)
    [put] = azure_account.journal("vault.put")
    assert azure_account.secret(put["path"].rpartition("/")[2]) is None
    assert cli("list", "--json").json["jobs"] == []


@pytest.mark.parametrize(
    ("env", "settings", "exit_code", "said"),
    [
        ({"AZURE_CLIENT_SECRET": ""}, (), 4, "no valid Azure credentials"),
        ({"AZURE_CLIENT_SECRET": "wrong"}, (), 4, "Azure"),
        (dict.fromkeys(("HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9"), (), 7, "gave an unexpected answer"),
        ({}, ("azureml.workspace=nowhere",), 3, "there is no workspace nowhere"),
        ({}, ("azureml.resource_group=nowhere",), 3, "at azureml.resource_group"),
        ({}, ("azureml.compute=nowhere",), 3, "there is no compute `nowhere`"),
        ({}, ("azureml.datastore=nowhere",), 3, "there is no datastore `nowhere`"),
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
def test_missing_requirement_is_reported(
    cli: Any,
    folder: Path,
    azure_account: Azure,
    env: dict[str, str],
    settings: tuple[str, ...],
    exit_code: int,
    said: str,
) -> None:
    """The error comes before any upload."""
    azure_account.compute("four", vmSize="Standard_NC4as_T4_v3", maxNodeCount=4)
    given = [part for setting in settings for part in ("--set", setting)]
    done = cli("submit", "-d", "-y", *given, cwd=folder, env={"TOKEN": "x" * 30_000, **env})
    assert (done.code, said in done.stderr, "itself failed" in done.stderr) == (exit_code, True, False), done.stderr
    assert azure_account.jobs() == []
    assert [call for call in azure_account.journal("blob.put") if ACCOUNT in call["host"]] == []
    if exit_code == 4:  # no job is registered
        assert cli("list", "--json").json["jobs"] == []


def test_cluster_gives_its_type_and_idle_time(cli: Any, folder: Path, azure_account: Azure) -> None:
    """If only the cluster is named, the run gives its machine type, in any case, and so the price."""
    azure_account.compute("four", vmSize="STANDARD_NC4AS_T4_V3", maxNodeCount=4, nodeIdleTimeBeforeScaleDown="PT300S")
    text = CONFIG.replace(", instance_type: Standard_NC4as_T4_v3", "")
    text = text.replace("identity", "compute: azureml:four, identity")
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
    """Azure's default idle time is counted; a longer idle time must be configured, and then counts."""
    azure_account.compute("four", vmSize="Standard_NC4as_T4_v3", maxNodeCount=4, nodeIdleTimeBeforeScaleDown="PT300S")
    given = ("submit", "-d", "--name", "one", "--set", "budget.limit=5 USD", "--set", "azureml.compute=four")
    refused = cli(*given, cwd=folder)
    assert (refused.code, azure_account.jobs()) == (3, []), refused.stderr
    assert all(words in refused.stderr for words in ("for 5m, and the plan counts 2m", "write `idle: 5m`"))
    done = cli(*given, "--set", "azureml.idle=5m", cwd=folder)
    assert (done.code, "6m that are billed after the job ends" in done.stderr) == (0, True), done.stderr


def test_month_budget_counts_how_long_a_cluster_idles(cli: Any, folder: Path, azure_account: Azure) -> None:
    """A month's budget reserves by the plan; of a cluster's machines only those above its minimum idle for the job."""
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


def test_price_of_the_wrong_region_is_refused(cli: Any, folder: Path, azure_account: Azure) -> None:
    """A cheaper region's price would let the job run too long; a user's own price depends on no region."""
    given = ("submit", "-d", "-y", "--name", "one", "--set", "azureml.region=eastus2")
    refused = cli(*given, "--set", "resources.instance_type=Standard_ND96isr_H100_v5", cwd=folder)
    assert (refused.code, azure_account.jobs()) == (3, []), refused.stderr
    words = f"the machines are in {REGION}, and the price that is counted with is eastus2's"
    assert words in refused.stderr, refused.stderr
    assert f"write `region: {REGION}`" in refused.stderr
    assert cli(*given, "--price-per-hour", "2 USD", cwd=folder).code == 0


def test_cluster_may_be_outside_its_workspaces_region(cli: Any, folder: Path, azure_account: Azure) -> None:
    """Then the price of the cluster's region counts, in any spelling."""
    azure_account.compute("far", vmSize="Standard_ND96isr_H100_v5", location="eastus2")
    given = ("submit", "-d", "-y", "--set", "resources.instance_type=Standard_ND96isr_H100_v5", "--set")
    refused = cli(*given, "azureml.compute=far", cwd=folder)
    assert (refused.code, "the machines are in eastus2" in refused.stderr) == (3, True), refused.stderr
    done = cli(*given, "azureml.compute=far", "--set", "azureml.region=East US 2", cwd=folder)
    assert (done.code, len(azure_account.jobs())) == (0, 1), done.stderr


def test_poll_that_fails_changes_no_state(cli: Any, folder: Path, azure_account: Azure) -> None:
    """Forbidden or expired: the job keeps its state, and is shown as unreachable."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    azure_account.begin("one-1")
    assert cli("status", "one", "--json").json["state"] == "running"
    azure_account.fault("run.details", "error", status=403, code="Forbidden", message="not for you")
    status = cli("status", "one", "--json").json
    assert (status["state"], status["unreachable_since_s"] is not None) == ("running", True)
    azure_account.clear_faults()
    azure_account.fault("run.details", "expired")
    assert cli("status", "one", "--json").json["unreachable_since_s"] is None


def test_only_a_submit_imports_the_sdk(cli: Any, cold_cli: Any, folder: Path, azure_account: Azure) -> None:
    """The import costs a second of processor time, so polling commands must not import the SDK."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    azure_account.begin("one-1")
    azure_account.write_logs("one-1", 0, "[0] a")
    for command in (("status", "one"), ("logs", "one"), ("list",), ("stop", "one"), ("doctor", "azureml")):
        if command[0] == "stop":
            azure_account.end("one-1")
        done = cold_cli(*command, cwd=folder, env={"PYTHONPROFILEIMPORTTIME": "1"})
        assert "azure.ai" not in done.stderr
        assert "azure.identity" in done.stderr or command[0] == "stop"


def test_stop_of_a_finished_job_is_no_error(cli: Any, folder: Path, azure_account: Azure) -> None:
    """A job that ended between two polls gives no message."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    azure_account.begin("one-1")
    azure_account.end("one-1")
    done = cli("stop", "one")
    assert (done.code, "itself failed" in done.stderr) == (0, False)
    assert cli("status", "one", "--json").json["state"] == "succeeded"


def end_words(azure: Azure, job: str, **account: Any) -> None:
    """Write the end events of both containers, with an exit report if given."""
    for node in range(2):
        told = [events.format_line("ended", "so it ended", account)] if account else []
        azure.write_logs(job, node, *told, events.format_line("end", "node has ended", {"node": node, "final": True}))


def test_refused_poll_is_no_refusal_of_the_job(cli: Any, folder: Path, azure_account: Azure) -> None:
    """After a lost answer and a refused poll the state is unknown, and found out later."""
    azure_account.fault("jobs.put", "lost", every=1)
    azure_account.fault("jobs.get", "error", after=1, status=403, code="Forbidden", message="conditional access")
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, "itself failed" in done.stderr) == (7, False), done.stderr
    azure_account.clear_faults()
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")
    assert azure_account.jobs() == ["one-1"]


def test_end_waits_for_the_containers_exit_report(cli: Any, folder: Path, azure_account: Azure) -> None:
    """Files are late or unreadable for a while: Azure's exit code of a shell alone is not the end."""
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


def test_two_followers_send_one_retry(cli: Any, folder: Path, azure_account: Azure) -> None:
    """Each follows the retry to the end, and so does a follower that starts during the submit."""
    assert cli("submit", "-d", "-y", *AGAIN, cwd=folder).code == 0
    assert cli("submit", "-d", "-y", "--name", "two", cwd=folder).code == 0
    azure_account.begin("one-1")
    followers = [cli.start("wait", "one", "two"), cli.start("logs", "-f", "one")]
    until(lambda: len(azure_account.journal("blob.get") + azure_account.journal("run.details")) > 3, 30, 0.05)
    until(lambda: cli("status", "one", "--json").json["state"] == "running", 30, 0.05)
    azure_account.fault("jobs.put", "slow", delay_s=4.0)
    end_words(azure_account, "one-1")
    azure_account.end("one-1", "Failed", PREEMPTED)
    until(lambda: cli("list", "--json").json["jobs"][-1]["attempt"] == 2, 60, 0.1)
    followers.append(cli.start("logs", "-f", "one"))
    until(lambda: "one-2" in azure_account.jobs(), 60, 0.1)
    azure_account.begin("one-2")
    end_words(azure_account, "one-2")
    azure_account.end("one-2")
    codes = [follower.wait(60) for follower in followers[1:]]
    azure_account.end("two-1")
    assert (codes, followers[0].wait(60)) == ([0, 0], 0)
    for follower in followers:
        follower.communicate()
    assert azure_account.jobs() == ["one-1", "two-1", "one-2"]


@pytest.mark.soak  # retries: the test of two followers; lost answers: the test above them
def test_retry_with_a_lost_answer_is_followed_to_its_end(cli: Any, folder: Path, azure_account: Azure) -> None:
    """As soon as the state of the retry is known, the follower follows the retry to the end."""
    process = cli.start("submit", "-y", *AGAIN, cwd=folder)
    until(lambda: azure_account.jobs() == ["one-1"], 60, 0.1)
    azure_account.begin("one-1")
    until(lambda: cli("status", "one", "--json").json["state"] == "running", 30, 0.1)
    azure_account.fault("jobs.put", "lost", count=5)
    azure_account.fault("jobs.get", "500", after=1, count=4)
    azure_account.end("one-1", "Failed", PREEMPTED)
    until(lambda: "one-2" in azure_account.jobs(), 60, 0.1)
    azure_account.begin("one-2")
    end_words(azure_account, "one-2")
    azure_account.end("one-2")
    said = process.communicate(timeout=120)[1]
    assert (process.returncode, "whether attempt 2 was sent is not known yet" in said) == (0, True), said
    assert azure_account.jobs() == ["one-1", "one-2"]


def test_reading_commands_send_no_retry(cli: Any, folder: Path, azure_account: Azure) -> None:
    """Logs of a job that was preempted earlier cause no retry, and neither does a stop."""
    assert cli("submit", "-d", "-y", *AGAIN, cwd=folder).code == 0
    azure_account.begin("one-1")
    end_words(azure_account, "one-1")
    azure_account.end("one-1", "Failed", PREEMPTED)
    assert cli("logs", "-f", "one").code == 1
    assert cli("wait", "one").code == 1
    assert cli("stop", "one", "-y").code == 0
    assert azure_account.jobs() == ["one-1"]


def test_netrc_of_the_user_does_not_replace_our_token(
    cli: Any, folder: Path, azure_account: Azure, tmp_path: Path
) -> None:
    """requests reads ~/.netrc; a missing file of certificates is named, and not reported as our fault."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password else\n")
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder, env={"NETRC": str(netrc)}).code == 0
    done = cli("logs", "one", env={"REQUESTS_CA_BUNDLE": "/nowhere/ca.pem"})
    assert (done.code, "/nowhere/ca.pem" in done.stderr, "itself failed" in done.stderr) == (7, True, False)


@pytest.mark.soak  # the line of the clouds: test_cloud_queue.py
def test_job_in_line_is_sent_under_its_name(
    cli: Any, folder: Path, azure_account: Azure, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """After a refusal for quota with --queue, a later try sends the same request."""
    azure_account.fault("jobs.put", "error", code="QuotaExceeded", status=409, message="The quota is exceeded")
    done = cli("submit", "-d", "-y", "--queue", "--name", "one", cwd=folder)
    assert (done.code, "in line, nothing is sent yet" in done.stderr) == (0, True), done.stderr
    azure_account.clear_faults()
    monkeypatch.setattr(queue, "TRY_S", 0.0)
    with closing(Registry(home)) as registry:
        assert queue.advance_queue(registry) == ["sent: one"]
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")
