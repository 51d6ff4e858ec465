"""Sending to SageMaker, through the installed command and the real SDK: one job whatever happens, and what is said."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from doubles.aws.handle import ROLE, Aws

CONFIG = f"""\
name: j
backend: sagemaker
script: loop.py
resources: {{instances: 2, instance_type: ml.g5.xlarge}}
limits: {{max_duration: 1h}}
sagemaker: {{role: "{ROLE}", bucket: cloudtrain-tests}}
"""


# What most commands here import: once for all of them but those that show that it works so.
SDK = ("boto3", "botocore.session", "s3transfer.manager", "pydantic", "jinja2", "yaml", "pathspec")


@pytest.fixture
def cold_cli(cli: Any) -> Any:
    """Return the command as it starts for users."""
    return replace(cli, preloaded=())


@pytest.fixture
def cli(cli: Any) -> Any:
    """Return the command with the SDK imported already."""
    return replace(cli, preloaded=SDK)


@pytest.fixture(autouse=True)
def jobs_never_end(account: Aws) -> None:
    """Start nothing: a job is in progress until the test ends it."""
    account.settings(execute=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a project's folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "loop.py").write_text("print('x')\n")
    (folder / "cloudtrain.yaml").write_text(CONFIG)
    return folder


def jobs(aws: Aws) -> list[str]:
    """Return the names of all training jobs of the account."""
    pages = aws.client("sagemaker").get_paginator("list_training_jobs").paginate()
    return [job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"]]


def end(aws: Aws, job: str, **details: Any) -> None:
    """End the job as containers do: with their last word in the log."""
    for host in (1, 2):
        stream, word = f"{job}/algo-{host}-1", events.format_line("end", "node has ended", {"node": host - 1})
        aws.write_logs("/aws/sagemaker/TrainingJobs", stream, messages=[word])
    aws.end(job, **details)


def keys(aws: Aws) -> list[str]:
    """Return what is in the bucket."""
    return [item["Key"] for item in aws.client("s3").list_objects_v2(Bucket="cloudtrain-tests").get("Contents", ())]


def test_what_is_sent_is_the_dry_run(cli: Any, cold_cli: Any, folder: Path, account: Aws) -> None:
    """But for the job's own name; and the code is uploaded once, however many jobs have it."""
    dry = cold_cli("submit", "--dry-run", cwd=folder).json
    assert cold_cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    assert cli("submit", "-d", "-y", "--name", "two", cwd=folder).code == 0
    sent = [call["params"] for call in account.journal("CreateTrainingJob")]
    assert [json.loads(json.dumps(body).replace("one", "j-00000")) for body in sent[:1]] == [dry]
    assert [key for key in keys(account) if "/code/" in key] == [key for key in keys(account) if "bundle" in key]
    assert len([call for call in account.journal("PutObject") if "bundle.tar.gz" in str(call["params"])]) == 1
    assert sorted(jobs(account)) == ["one-1", "two-1"]


@pytest.mark.parametrize(
    ("kind", "count"), [("lost", 1), ("throttle", 3), ("500", 2), ("drop", 2), ("lost", 3)], ids=str
)
def test_answer_that_does_not_come(cli: Any, folder: Path, account: Aws, kind: str, count: int) -> None:
    """Whatever is lost on the way, the command goes on, and there is one job."""
    account.fault("CreateTrainingJob", kind, count=count)
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, jobs(account)) == (0, ["one-1"]), done.stderr
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")


@pytest.mark.parametrize("operation", ["PutObject", "HeadObject"])
@pytest.mark.parametrize("kind", ["lost", "500", "drop"])
def test_upload_that_stumbles(cli: Any, folder: Path, account: Aws, operation: str, kind: str) -> None:
    """The claim on the job's name is ours even where the answer to it was lost."""
    account.fault(operation, kind, every=2, count=4)
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, jobs(account)) == (0, ["one-1"]), done.stderr


def test_submit_that_is_killed_before_the_answer_is_found_by_the_next_command(
    cli: Any, folder: Path, account: Aws, wait_until: Any
) -> None:
    """kill -9 while SageMaker has the request: the job is there, and is ours."""
    account.fault("CreateTrainingJob", "slow", delay_s=3.0)
    process = cli.start("submit", "-d", "-y", "--name", "one", cwd=folder)
    wait_until(lambda: account.journal("CreateTrainingJob") != [], 30, 0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: jobs(account) == ["one-1"], 30, 0.1)
    [found] = cli("list", "--json").json["jobs"]
    assert (found["state"] in ("pending", "running"), found["job"]) == (True, "one")


def test_submit_that_is_killed_before_it_sends_leaves_nothing(
    cli: Any, folder: Path, account: Aws, wait_until: Any
) -> None:
    """The next command shuts the door: a request still under way would find no order to carry out."""
    account.fault("DescribeTrainingJob", "slow", delay_s=0.0)
    account.fault("CreateTrainingJob", "drop")
    process = cli.start("submit", "-d", "-y", "--name", "one", cwd=folder)
    wait_until(lambda: account.journal("CreateTrainingJob") != [], 30, 0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    account.clear_faults()
    [found] = cli("list", "--json").json["jobs"]
    assert (found["state"], "nothing runs" in found["detail"]) == ("failed", True)
    assert [key for key in keys(account) if "spec.json" in key] == []
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    assert jobs(account) == ["one-2"]


def test_name_that_another_machine_has_taken(cli: Any, folder: Path, account: Aws, tmp_path: Path) -> None:
    """Two machines, one account, one name: the second is refused, and the first one's job is untouched."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    order = account.client("s3").get_object(Bucket="cloudtrain-tests", Key="cloudtrain/jobs/one/attempt-1/spec.json")
    before = order["Body"].read()
    for number, more in enumerate(((), (), ("--set", "sagemaker.prefix=x"))):
        elsewhere = {"CLOUDTRAIN_HOME": str(tmp_path / f"elsewhere-{number // 2}")}
        refused = cli("submit", "-d", "-y", "--name", "one", *more, cwd=folder, env=elsewhere)
        assert (refused.code, "choose another --name" in refused.stderr) == (2, True), refused.stderr
    order = account.client("s3").get_object(Bucket="cloudtrain-tests", Key="cloudtrain/jobs/one/attempt-1/spec.json")
    assert order["Body"].read() == before
    assert jobs(account) == ["one-1"]


def test_another_machines_job_is_not_adopted(
    cli: Any, folder: Path, account: Aws, tmp_path: Path, wait_until: Any
) -> None:
    """A submit that died before it claimed the name has sent nothing: what there is by that name is somebody else's."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    elsewhere = {"CLOUDTRAIN_HOME": str(tmp_path / "elsewhere")}
    account.fault("HeadObject", "slow", delay_s=20.0)
    before = len(account.journal("HeadObject"))
    process = cli.start("submit", "-d", "-y", "--name", "one", cwd=folder, env=elsewhere)
    wait_until(lambda: len(account.journal("HeadObject")) > before, 30, 0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    account.clear_faults()
    [found] = cli("list", "--json", env=elsewhere).json["jobs"]
    assert (found["state"], "nothing runs" in found["detail"]) == ("failed", True)
    assert [key for key in keys(account) if key.endswith("attempt-1/spec.json")] != []
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")


def test_refusal_of_the_sdks_second_try_is_no_refusal_of_the_first(cli: Any, folder: Path, account: Aws) -> None:
    """The first call has started the job and taken the quota; its answer was lost."""
    account.fault("CreateTrainingJob", "lost", count=1)
    account.fault("CreateTrainingJob", "error", code="ResourceLimitExceeded", message="no more")
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, jobs(account)) == (0, ["one-1"]), done.stderr
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")


@pytest.mark.parametrize("operation", ["DescribeLogStreams", "DeleteParameters", "ListObjectsV2"])
def test_end_is_told_whatever_else_cannot_be_asked(cli: Any, folder: Path, account: Aws, operation: str) -> None:
    """The log, the secrets' removal, the look for checkpoints: none may hide that the job is over."""
    given = ("--set", "secrets=[TOKEN]", "--name", "one")
    assert cli("submit", "-d", "-y", *given, cwd=folder, env={"TOKEN": "x"}).code == 0
    end(account, "one-1", status="Failed", failure_reason="AlgorithmError: x, exit code: 1")
    account.fault(operation, "error", code="AccessDeniedException", message="not for you")
    assert cli("status", "one", "--json").json["state"] == "failed"
    assert cli("wait", "one").code == 1


NO_QUOTA = "The account-level service limit 'ml.g5.xlarge for training job usage' is 0 Instances"


@pytest.mark.parametrize(
    ("code", "message", "exit_code", "said"),
    [
        ("ResourceLimitExceeded", NO_QUOTA, 5, ("is 0 Instances", "hint: ask for more at Service Quotas")),
        ("AccessDeniedException", "User is not authorized to perform x", 4, ("not allowed: User is not", "hint: ask")),
        ("ExpiredTokenException", "The token has expired", 4, ("credentials have expired", "hint: aws sso login")),
        ("UnrecognizedClientException", "The token is invalid.", 4, ("does not know these", "hint: aws configure")),
        ("ValidationException", "1 validation error detected", 3, ("1 validation error detected",)),
        ("SomethingNew", "of next year", 3, ("of next year", "at SomethingNew")),
    ],
)
def test_refusal_is_one_sentence_with_what_to_do(
    cli: Any, folder: Path, account: Aws, code: str, message: str, exit_code: int, said: tuple[str, ...]
) -> None:
    """Nothing stays: not the order, not the secret, and the attempt is closed."""
    account.fault("CreateTrainingJob", "error", code=code, message=message)
    done = cli("submit", "-d", "-y", "--set", "secrets=[TOKEN]", cwd=folder, env={"TOKEN": "sesame"})
    assert done.code == exit_code, done.stderr
    assert [word for word in said if word not in done.stderr] == []
    assert ("Traceback" in done.stderr, done.stderr.count("error:")) == (False, 1)
    assert [key for key in keys(account) if "spec.json" in key] == []
    assert account.client("ssm").describe_parameters()["Parameters"] == []
    assert [job["phase"] for job in cli("list", "--json").json["jobs"]] == ["never_sent"]


@pytest.mark.parametrize(
    ("env", "settings", "exit_code", "said"),
    [
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, (), 4, "no AWS credentials"),
        ({}, ("sagemaker.profile=nobody",), 4, "nobody"),
        ({}, ("sagemaker.bucket=another-bucket",), 3, "there is no bucket another-bucket"),
        ({}, ("sagemaker.role=arn:aws:iam::123456789012:role/none",), 3, "none"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, (), 7, "AWS does not answer"),
        ({}, ("secrets=[TOKEN]",), 3, "more than the 4096 bytes"),
    ],
)
def test_what_is_missing_is_said(
    cli: Any, folder: Path, account: Aws, env: dict[str, str], settings: tuple[str, ...], exit_code: int, said: str
) -> None:
    """Before anything runs."""
    given = [part for setting in settings for part in ("--set", setting)]
    done = cli("submit", "-d", "-y", *given, cwd=folder, env={"TOKEN": "x" * 5000, **env})
    assert (done.code, said in done.stderr, "Traceback" in done.stderr) == (exit_code, True, False), done.stderr
    assert jobs(account) == []
    if exit_code == 4:  # nothing is written down
        assert cli("list", "--json").json["jobs"] == []


def test_credentials_that_have_expired_are_called_so(cli: Any, folder: Path, account: Aws) -> None:
    """Though S3's first answer, to a HEAD, has no words."""
    account.fault("*", "expired")
    done = cli("submit", "-d", "-y", cwd=folder)
    assert (done.code, "the AWS credentials have expired" in done.stderr) == (4, True), done.stderr


def test_bucket_of_another_region_is_refused(cli: Any, folder: Path, account: Aws) -> None:
    """boto3 would follow it there without a word; SageMaker would not."""
    done = cli("submit", "-d", "-y", "--set", "sagemaker.region=eu-west-1", cwd=folder)
    assert (done.code, "is in us-east-1, the job in eu-west-1" in done.stderr) == (3, True), done.stderr


def test_validate_refuses_what_submit_would(cli: Any, folder: Path, account: Aws) -> None:
    """All of the backend's own rules, without a network."""
    for setting in ("inputs={train: ./data}", "tags={aws:x: y}", "limits.max_duration=40d", "sagemaker.role=nonsense"):
        assert cli("validate", "--set", setting, cwd=folder).code == 3, setting
    assert cli("validate", cwd=folder).code == 0
    assert account.journal("CreateTrainingJob") == []


def test_price_of_ones_own_carries_a_budget(cli: Any, folder: Path, account: Aws) -> None:
    """For a type that the price list does not know."""
    given = ("--set", "budget.limit=10 USD", "--instance-type", "ml.m5.xlarge", "--json")
    refused = cli("plan", *given, cwd=folder)
    assert (refused.code, "set sagemaker.price_per_hour, or add" in refused.stderr) == (3, True), refused.stderr
    plan = cli("plan", *given, "--set", "sagemaker.price_per_hour=0.5 USD", cwd=folder).json
    assert (plan["hourly_usd"], plan["cap_s"], plan["price_source"]) == (1.0, 3600, "sagemaker.price_per_hour")


def test_default_bucket_is_made(cli: Any, folder: Path, account: Aws) -> None:
    """As AWS's own tools do it, under the name that they use."""
    assert cli("submit", "-d", "-y", "--set", "sagemaker.bucket=null", cwd=folder).code == 0
    names = [bucket["Name"] for bucket in account.client("s3").list_buckets()["Buckets"]]
    assert "sagemaker-us-east-1-123456789012" in names


def test_secrets_are_where_only_the_job_can_read_them_and_only_for_its_life(
    cli: Any, folder: Path, account: Aws
) -> None:
    """Encrypted with SSM; not in the request, not in the bucket; gone when the job is seen to be over."""
    given = ("--set", "secrets=[TOKEN]", "--name", "one")
    assert cli("submit", "-d", "-y", *given, cwd=folder, env={"TOKEN": "sesame-street"}).code == 0
    [parameter] = account.client("ssm").describe_parameters()["Parameters"]
    assert re.fullmatch(r"/cloudtrain/one-1-[0-9a-f]{8}/TOKEN", parameter["Name"])
    assert parameter["Type"] == "SecureString"
    assert "sesame-street" not in json.dumps(account.journal("CreateTrainingJob"))
    assert "sesame-street" not in json.dumps(account.describe("one-1"), default=str)
    for key in keys(account):
        assert (
            b"sesame-street" not in account.client("s3").get_object(Bucket="cloudtrain-tests", Key=key)["Body"].read()
        )
    end(account, "one-1")
    assert cli("status", "one", "--json").json["state"] == "succeeded"
    assert account.client("ssm").describe_parameters()["Parameters"] == []


def test_end_of_a_job_is_told_with_what_it_cost(cli: Any, folder: Path, account: Aws) -> None:
    """SageMaker's own seconds, times the instances; spot's are fewer than it trained."""
    assert cli("submit", "-d", "-y", "--force", "--name", "one", "--spot", cwd=folder).code == 0
    hourly = cli("plan", "--json", cwd=folder).json["hourly_usd"]
    end(account, "one-1", training_s=1000, billable_s=300)
    told = cli("status", "one", "--json").json
    assert told["spend_usd"] == pytest.approx(hourly * 300 / 3600, abs=1e-5)
    assert "300 s billed of 1000 s, 70% saved" in told["detail"]


def test_stop_of_a_job_that_is_over_is_quiet(cli: Any, folder: Path, account: Aws) -> None:
    """SageMaker refuses to stop it; there is nothing to stop."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    end(account, "one-1")
    done = cli("stop", "one")
    assert (done.code, "there is nothing to stop" in done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize("kind", ["throttle", "500", "drop", "expired"])
def test_poll_that_fails_says_nothing_about_the_job(cli: Any, folder: Path, account: Aws, kind: str) -> None:
    """It stays what it was, and is shown as unreachable; once AWS answers again, all is as before."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    before = cli("status", "one", "--json").json
    account.fault("DescribeTrainingJob", kind)
    during = cli("status", "one", "--json").json
    account.clear_faults()
    after = cli("status", "one", "--json").json
    assert (before["unreachable_since_s"], during["state"], after["state"]) == (None, before["state"], before["state"])
    assert during["unreachable_since_s"] is not None
    assert after["unreachable_since_s"] is None


Checks = Callable[..., dict[str, tuple[str, str]]]


@pytest.fixture
def doctor(cli: Any, folder: Path) -> Checks:
    """Return a function that runs `doctor sagemaker` and returns (verdict, found) by name."""

    def run(*args: str, code: int = 0, **env: str) -> dict[str, tuple[str, str]]:
        done = cli("doctor", "sagemaker", "--json", *args, cwd=folder, env=env)
        assert done.code == code, done.stdout + done.stderr
        return {check["name"]: (check["verdict"], check["found"]) for check in done.json["sagemaker"]}

    return run


def test_doctor_finds_nothing_wrong(doctor: Checks, account: Aws) -> None:
    """Everything is asked for on AWS itself."""
    found = doctor()
    assert {name: verdict for name, (verdict, _) in found.items()} == dict.fromkeys(
        ("region", "credentials", "role", "bucket", "quota", "price", "image"), "ok"
    )
    assert found["quota"][1] == "10000 instances of `ml.g5.xlarge for training job usage`"
    assert "1.408 USD an hour, on demand, by AWS Price List, Training" in found["price"][1]


def test_doctor_without_a_price_list_is_content(doctor: Checks, account: Aws) -> None:
    """No job needs it."""
    account.settings(price_damage="truncated")
    verdict, said = doctor()["price"]
    assert (verdict, "not complete JSON" in said) == ("warn", True)


def test_doctor_names_what_stands_in_the_way(doctor: Checks, account: Aws, folder: Path) -> None:
    """Each with its own cure, and all of them at once."""
    account.role("stranger", "ec2.amazonaws.com")
    account.quota("ml.g5.xlarge for training job usage", 1)
    text = CONFIG.replace("role/cloudtrain", "role/stranger").replace("cloudtrain-tests", "nobodys-bucket")
    (folder / "cloudtrain.yaml").write_text(text)
    found = doctor(code=1)
    assert found["role"] == (
        "fail",
        f"{ROLE.replace('/cloudtrain', '/stranger')} does not trust sagemaker.amazonaws.com",
    )
    assert found["bucket"] == ("fail", "there is no bucket nobodys-bucket")
    assert found["quota"] == ("fail", "1 instances of `ml.g5.xlarge for training job usage`, the job takes 2")


def test_doctor_without_a_job_lists_the_roles(doctor: Checks, account: Aws, folder: Path) -> None:
    """For who has not chosen one yet."""
    (folder / "cloudtrain.yaml").unlink()
    account.role("stranger", "ec2.amazonaws.com")
    assert doctor()["roles"] == ("ok", f"can be sagemaker.role: {ROLE}")
    account.fault("GetCallerIdentity", "error", code="InvalidClientTokenId", message="no such key", status=403)
    assert doctor(code=1)["credentials"][0] == "fail"


def test_doctor_without_credentials_names_the_skipped_checks_and_the_faults_of_the_config(
    cli: Any, folder: Path, account: Aws
) -> None:
    """No hint names the command that was just run, and a missing machine type shows without AWS."""
    (folder / "cloudtrain.yaml").write_text(CONFIG.replace("instance_type: ml.g5.xlarge", "disk_gb: 50"))
    empty = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
    done = cli("doctor", "sagemaker", cwd=folder, env=empty)
    assert done.code == 1
    assert "fail  config: SageMaker needs to know which machines" in done.stdout
    assert "warn  not checked without credentials: role, bucket, quota, price" in done.stdout
    assert ("doctor sagemaker" in done.stdout, "docs/tutorials/sagemaker.md" in done.stdout) == (False, True)


def test_invoice_is_asked_by_the_jobs_tag(cli: Any, folder: Path, account: Aws) -> None:
    """Cost Explorer's own sum stands beside what was metered; an amount in another currency is refused."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    end(account, "one-1", billable_s=3600)
    bill = cli("cost", "one", "--invoice", "--json").json
    # By the stand-in's price of 1.408 an hour, not 1.4084.
    assert bill["invoice"]["usd"] == pytest.approx(bill["billed_usd"], rel=1e-3)
    assert bill["legs"][0]["source"] == "BillableTimeInSeconds"
    assert "by AWS Cost Explorer" in cli("cost", "one", "--invoice").stdout
    account.settings(cost_tags=[])
    assert "only once `cloudtrain:job` is activated" in cli("cost", "one", "--invoice").stdout
    account.settings(cost_tags=["cloudtrain:job"], cost_currency="CNY")
    assert "amounts in CNY" in cli("cost", "one", "--invoice").stderr
    account.fault("GetCostAndUsage", "error", code="AccessDeniedException", status=400)
    assert (refused := cli("cost", "one", "--invoice")).code == 4
    assert "ce:GetCostAndUsage" in refused.stderr
