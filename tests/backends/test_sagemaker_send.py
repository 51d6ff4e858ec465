"""Submits to SageMaker with the installed command and the real SDK: always a single job, and clear messages."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.launcher.prices import own
from doubles.aws.handle import ROLE, Aws
from doubles.waiting import until

CONFIG = f"""\
name: j
backend: sagemaker
script: loop.py
resources: {{instances: 2, instance_type: ml.g5.xlarge}}
limits: {{max_duration: 1h}}
sagemaker: {{role: "{ROLE}", bucket: cloudtrain-tests}}
"""


@pytest.fixture(autouse=True)
def jobs_never_end(account: Aws) -> None:
    """Start no container: a job is in progress until the test ends the job."""
    account.settings(execute=False)


def jobs(aws: Aws) -> list[str]:
    """Return the names of all training jobs of the account."""
    pages = aws.client("sagemaker").get_paginator("list_training_jobs").paginate()
    return [job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"]]


def end(aws: Aws, job: str, **details: Any) -> None:
    """End the job as containers do: with their end events in the log."""
    for host in (1, 2):
        stream, word = f"{job}/algo-{host}-1", events.format_line("end", "node has ended", {"node": host - 1})
        aws.write_logs("/aws/sagemaker/TrainingJobs", stream, messages=[word])
    aws.end(job, **details)


def keys(aws: Aws) -> list[str]:
    """Return the keys in the bucket."""
    return [item["Key"] for item in aws.client("s3").list_objects_v2(Bucket="cloudtrain-tests").get("Contents", ())]


@pytest.mark.parametrize(
    ("uri", "code", "said"),
    [
        ("data/train", 0, ""),
        ("data/train.csv", 0, "also copies what begins so: train.csv.bak"),
        ("data/raw", 3, "`raw` is a file without an ending: name the folder, `s3://cloudtrain-tests/data/`"),
        ("data/v.parquet", 3, "this is a folder: write `s3://cloudtrain-tests/data/v.parquet/`"),
        ("data/trai", 3, "there is no folder s3://cloudtrain-tests/data/trai/"),
        ("data/trai", 3, "names that begin so: train.csv, train.csv.bak, train/, train_holdout/"),
    ],
)
def test_inputs_are_looked_for_before_a_job_exists(
    cli: Any, folder: Path, account: Aws, uri: str, code: int, said: str
) -> None:
    """A missing folder or file is refused with the names that match; doctor says the same."""
    for key in ("train/a", "train_holdout/h", "train.csv", "train.csv.bak", "raw", "v.parquet/0"):
        account.client("s3").put_object(Bucket="cloudtrain-tests", Key=f"data/{key}", Body=b"x")
    more = "--set", f"inputs.x=s3://cloudtrain-tests/{uri}"
    done = cli("submit", "-d", "-y", "--name", "one", *more, cwd=folder)
    assert (done.code, said in re.sub(r"\s+", " ", done.stderr)) == (code, True), done.stderr
    assert len(jobs(account)) == (code == 0)


def test_role_of_another_account_is_refused_before_an_upload(cli: Any, folder: Path, account: Aws) -> None:
    """No bucket with the other account's name is made; the message names both accounts."""
    there = ("--set", "sagemaker.role=arn:aws:iam::111122223333:role/train", "--set", "sagemaker.bucket=null")
    done = cli("submit", "-d", "-y", *there, cwd=folder)
    said = "the role is of the account 111122223333, and your credentials are of the account 123456789012"
    assert (done.code, said in re.sub(r"\s+", " ", done.stderr)) == (3, True), done.stderr
    names = [each["Name"] for each in account.client("s3").list_buckets()["Buckets"]]
    assert not [name for name in names if "111122223333" in name]


def test_request_equals_the_dry_run(cli: Any, cold_cli: Any, folder: Path, account: Aws) -> None:
    """Only the job's name differs; the code is uploaded once for all jobs."""
    dry = cold_cli("submit", "--dry-run", cwd=folder).json
    assert cold_cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    assert cli("submit", "-d", "-y", "--name", "two", cwd=folder).code == 0
    sent = [call["params"] for call in account.journal("CreateTrainingJob")]
    assert [json.loads(json.dumps(body).replace("one", "j-00000")) for body in sent[:1]] == [dry]
    assert [key for key in keys(account) if "/code/" in key] == [key for key in keys(account) if "bundle" in key]
    assert len([call for call in account.journal("PutObject") if "bundle.tar.gz" in str(call["params"])]) == 1
    assert sorted(jobs(account)) == ["one-1", "two-1"]


def test_removed_job_leaves_nothing_of_its_own_in_the_bucket(cli: Any, folder: Path, account: Aws) -> None:
    """`prune` names the job's folder and asks about a resumable job; --everywhere empties that folder alone."""
    for name in ("one", "one-b"):
        cli.ok("submit", "-d", "-y", "--name", name, cwd=folder)
    mine = [key for key in keys(account) if "/jobs/one/" in key]
    end(account, "one-1", status="Stopped")
    until(lambda: cli("status", "one", "--json").json["state"] not in ("running", "pending", "stopping"))
    asked = cli("rm", "one")
    assert re.search(r"s3://cloudtrain-tests/cloudtrain/jobs/one  \d+ KiB  stays: --everywhere", asked.stderr)
    before = keys(account)
    cli.ok("rm", "-y", "--everywhere", "one")
    assert mine
    assert keys(account) == [key for key in before if key not in mine]


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("lost", 1),
        ("drop", 2),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("throttle", 3), ("500", 2), ("lost", 3))),
    ],
    ids=str,
)
def test_lost_answer_leaves_one_job(cli: Any, folder: Path, account: Aws, kind: str, count: int) -> None:
    """Despite lost answers, the command succeeds with a single job."""
    account.fault("CreateTrainingJob", kind, count=count)
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, jobs(account)) == (0, ["one-1"]), done.stderr
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")


@pytest.mark.parametrize("operation", ["PutObject", "HeadObject"])
@pytest.mark.parametrize("kind", ["lost", "500", "drop"])
def test_failing_upload_is_retried(cli: Any, folder: Path, account: Aws, operation: str, kind: str) -> None:
    """The claim on the job's name belongs to this home folder even if the answer was lost."""
    account.fault(operation, kind, every=2, count=4)
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, jobs(account)) == (0, ["one-1"]), done.stderr


def test_submit_killed_before_the_answer_is_found_by_the_next_command(cli: Any, folder: Path, account: Aws) -> None:
    """After kill -9 while SageMaker has the request, the job exists and belongs to this home folder."""
    account.fault("CreateTrainingJob", "slow", delay_s=3.0)
    process = cli.start("submit", "-d", "-y", "--name", "one", cwd=folder)
    until(lambda: account.journal("CreateTrainingJob") != [], 30, 0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until(lambda: jobs(account) == ["one-1"], 30, 0.1)
    [found] = cli("list", "--json").json["jobs"]
    assert (found["state"] in ("pending", "running"), found["job"]) == (True, "one")


def test_submit_that_is_killed_before_the_send_leaves_nothing(cli: Any, folder: Path, account: Aws) -> None:
    """The next command removes the container order, so a late request would find no order."""
    account.fault("DescribeTrainingJob", "slow", delay_s=0.0)
    account.fault("CreateTrainingJob", "drop")
    process = cli.start("submit", "-d", "-y", "--name", "one", cwd=folder)
    until(lambda: account.journal("CreateTrainingJob") != [], 30, 0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    account.clear_faults()
    [found] = cli("list", "--json").json["jobs"]
    assert (found["state"], "nothing runs" in found["detail"]) == ("failed", True)
    assert [key for key in keys(account) if "spec.json" in key] == []
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    assert jobs(account) == ["one-2"]


def test_name_taken_by_a_second_machine_is_refused(cli: Any, folder: Path, account: Aws, tmp_path: Path) -> None:
    """With two machines in one account the second submit is refused, and the first job is untouched."""
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


def test_job_of_a_different_machine_is_not_adopted(cli: Any, folder: Path, account: Aws, tmp_path: Path) -> None:
    """A submit that died before its claim sent no job: a job by that name belongs to a different home."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    elsewhere = {"CLOUDTRAIN_HOME": str(tmp_path / "elsewhere")}
    account.fault("HeadObject", "slow", delay_s=20.0)
    before = len(account.journal("HeadObject"))
    process = cli.start("submit", "-d", "-y", "--name", "one", cwd=folder, env=elsewhere)
    until(lambda: len(account.journal("HeadObject")) > before, 30, 0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    account.clear_faults()
    [found] = cli("list", "--json", env=elsewhere).json["jobs"]
    assert (found["state"], "nothing runs" in found["detail"]) == ("failed", True)
    assert [key for key in keys(account) if key.endswith("attempt-1/spec.json")] != []
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")


def test_refused_retry_of_the_sdk_is_no_refusal_of_the_first_try(cli: Any, folder: Path, account: Aws) -> None:
    """The first call has started the job and used the quota; only its answer was lost."""
    account.fault("CreateTrainingJob", "lost", count=1)
    account.fault("CreateTrainingJob", "error", code="ResourceLimitExceeded", message="no more")
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert (done.code, jobs(account)) == (0, ["one-1"]), done.stderr
    assert cli("status", "one", "--json").json["state"] in ("pending", "running")


@pytest.mark.parametrize(
    "operation",
    [
        "DescribeLogStreams",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("DeleteParameters", "ListObjectsV2")),
    ],
)
def test_end_is_reported_despite_further_failures(cli: Any, folder: Path, account: Aws, operation: str) -> None:
    """Neither a failed log, nor a failed removal of secrets, nor a failed search for checkpoints hides the end."""
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
        (
            "ResourceLimitExceeded",
            NO_QUOTA,
            5,
            ("is 0 Instances", "hint: wait in line: --queue; ask for more at Service Quotas"),
        ),
        ("AccessDeniedException", "User is not authorized to perform x", 4, ("not allowed: User is not", "hint: ask")),
        ("ExpiredTokenException", "The token has expired", 4, ("credentials have expired", "hint: aws sso login")),
        ("UnrecognizedClientException", "The token is invalid.", 4, ("does not know these", "hint: aws configure")),
        ("ValidationException", "1 validation error detected", 3, ("1 validation error detected",)),
        ("SomethingNew", "of next year", 3, ("of next year", "at SomethingNew")),
    ],
)
def test_refusal_is_one_sentence_with_a_remedy(
    cli: Any, folder: Path, account: Aws, code: str, message: str, exit_code: int, said: tuple[str, ...]
) -> None:
    """Neither the order nor the secret remains, and the attempt is closed."""
    account.fault("CreateTrainingJob", "error", code=code, message=message)
    done = cli("submit", "-d", "-y", "--set", "secrets=[TOKEN]", cwd=folder, env={"TOKEN": "sesame"})
    assert done.code == exit_code, done.stderr
    assert [word for word in said if word not in done.stderr] == []
    assert ("Traceback" in done.stderr, done.stderr.count("error:")) == (False, 1)
    assert [key for key in keys(account) if "spec.json" in key] == []
    assert account.client("ssm").describe_parameters()["Parameters"] == []
    assert cli("list", "--json").json["jobs"] == []


@pytest.mark.parametrize(
    ("env", "settings", "exit_code", "said"),
    [
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, (), 4, "no AWS credentials"),
        ({}, ("sagemaker.profile=nobody",), 4, "nobody"),
        ({}, ("sagemaker.bucket=another-bucket",), 3, "there is no bucket another-bucket"),
        ({}, ("sagemaker.role=arn:aws:iam::123456789012:role/none",), 3, "none"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, (), 7, "AWS does not answer"),
        ({}, ("secrets=[TOKEN]",), 3, "more than the 4096 bytes"),
        ({}, ("sagemaker.region=eu-west-1",), 3, "is in us-east-1, the job in eu-west-1"),  # boto3 follows, no job does
    ],
)
def test_missing_requirement_is_reported(
    cli: Any, folder: Path, account: Aws, env: dict[str, str], settings: tuple[str, ...], exit_code: int, said: str
) -> None:
    """The error comes before any job starts."""
    given = [part for setting in settings for part in ("--set", setting)]
    done = cli("submit", "-d", "-y", *given, cwd=folder, env={"TOKEN": "x" * 5000, **env})
    assert (done.code, said in done.stderr, "Traceback" in done.stderr) == (exit_code, True, False), done.stderr
    assert jobs(account) == []
    if exit_code == 4:  # no job is registered
        assert cli("list", "--json").json["jobs"] == []


def test_expired_credentials_are_reported(cli: Any, folder: Path, account: Aws) -> None:
    """S3's first answer, to a HEAD, gives no reason."""
    account.fault("*", "expired")
    done = cli("submit", "-d", "-y", cwd=folder)
    assert (done.code, "the AWS credentials have expired" in done.stderr) == (4, True), done.stderr


def test_validate_refuses_the_same_configs_as_submit(cli: Any, folder: Path, account: Aws) -> None:
    """All rules of the backend work without a network."""
    for setting in ("inputs={train: ./data}", "tags={aws:x: y}", "limits.max_duration=40d", "sagemaker.role=nonsense"):
        assert cli("validate", "--set", setting, cwd=folder).code == 3, setting
    assert cli("validate", cwd=folder).code == 0
    assert account.journal("CreateTrainingJob") == []


def test_users_own_price_allows_a_budget(cli: Any, folder: Path, account: Aws) -> None:
    """A type without a list price gets the user's price."""
    given = ("--set", "budget.limit=10 USD", "--instance-type", "ml.m5.xlarge", "--json")
    refused = cli("plan", *given, cwd=folder)
    assert (refused.code, "set sagemaker.price_per_hour, or add" in refused.stderr) == (3, True), refused.stderr
    plan = cli("plan", *given, "--set", "sagemaker.price_per_hour=0.5 USD", cwd=folder).json
    assert (plan["hourly_usd"], plan["cap_s"], plan["price_source"]) == (1.0, 3600, "sagemaker.price_per_hour")


def test_default_bucket_is_made(cli: Any, folder: Path, account: Aws) -> None:
    """The bucket has the name that AWS's own tools use."""
    assert cli("submit", "-d", "-y", "--set", "sagemaker.bucket=null", cwd=folder).code == 0
    names = [bucket["Name"] for bucket in account.client("s3").list_buckets()["Buckets"]]
    assert "sagemaker-us-east-1-123456789012" in names


def test_secrets_are_readable_only_by_the_job_and_are_removed_after_its_end(
    cli: Any, folder: Path, account: Aws
) -> None:
    """Secrets are encrypted in SSM, neither in the request nor in the bucket, and removed at the job's end."""
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


def test_end_of_a_job_is_reported_with_its_cost(cli: Any, folder: Path, account: Aws) -> None:
    """The cost is SageMaker's billed seconds times the instances; on spot they are fewer than the trained seconds."""
    assert cli("submit", "-d", "-y", "--force", "--name", "one", "--spot", cwd=folder).code == 0
    hourly = cli("plan", "--json", cwd=folder).json["hourly_usd"]
    end(account, "one-1", training_s=1000, billable_s=300)
    told = cli("status", "one", "--json").json
    assert told["spend_usd"] == pytest.approx(hourly * 300 / 3600, abs=1e-5)
    assert "300 s billed of 1000 s, 70% saved" in told["detail"]


def test_stop_of_a_finished_job_is_no_error(cli: Any, folder: Path, account: Aws) -> None:
    """SageMaker refuses the stop; the command reports that there is nothing to stop."""
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    end(account, "one-1")
    done = cli("stop", "one")
    assert (done.code, "there is nothing to stop" in done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize(
    "kind", ["500", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("throttle", "drop", "expired"))]
)
def test_poll_that_fails_changes_no_state(cli: Any, folder: Path, account: Aws, kind: str) -> None:
    """The job keeps its state and is shown as unreachable, until AWS answers again."""
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


def test_doctor_passes_a_valid_setup(doctor: Checks, account: Aws) -> None:
    """Every check queries AWS."""
    found = doctor()
    assert {name: verdict for name, (verdict, _) in found.items()} == dict.fromkeys(
        ("region", "credentials", "role", "bucket", "quota", "price", "image"), "ok"
    )
    assert found["quota"][1] == "10000 instances of `ml.g5.xlarge for training job usage`"
    assert "1.408 USD an hour, on demand, by AWS Price List, Training" in found["price"][1]
    assert own.rates("sagemaker", "ml.g5.xlarge", "us-east-1")["on_demand"].usd == 1.408


def test_doctor_without_a_price_list_only_warns(doctor: Checks, account: Aws) -> None:
    """No job needs the price list."""
    account.settings(price_damage="truncated")
    verdict, said = doctor()["price"]
    assert (verdict, "not complete JSON" in said) == ("warn", True)


def test_doctor_names_all_obstacles(doctor: Checks, account: Aws, folder: Path) -> None:
    """Each obstacle has its own remedy, and all are reported together."""
    account.role("stranger", "ec2.amazonaws.com")
    account.quota("ml.g5.xlarge for training job usage", 1)
    text = CONFIG.replace("role/cloudtrain", "role/stranger").replace("cloudtrain-tests", "nobodys-bucket")
    (folder / "cloudtrain.yaml").write_text(text)
    found = doctor(code=1)
    stranger = ROLE.replace("/cloudtrain", "/stranger")
    assert found["role"] == ("fail", f"{stranger} does not trust sagemaker.amazonaws.com")
    assert found["bucket"] == ("fail", "there is no bucket nobodys-bucket")
    assert found["quota"] == ("fail", "1 instances of `ml.g5.xlarge for training job usage`, the job takes 2")


def test_doctor_of_a_missing_role_says_how_to_make_a_role(cli: Any, account: Aws, folder: Path) -> None:
    """In a new account no role trusts SageMaker; in another account the roles that do are named."""
    (folder / "cloudtrain.yaml").write_text(CONFIG.replace("role/cloudtrain", "role/nobodys"))
    (said,) = [each for each in _checks(cli, folder) if each["name"] == "role"]
    assert (said["found"], said["cure"]) == ("there is no role nobodys", f"can be sagemaker.role: {ROLE}")
    account.client("iam").delete_role(RoleName="cloudtrain")
    (said,) = [each for each in _checks(cli, folder) if each["name"] == "role"]
    assert said["cure"].endswith("create one, as in docs/tutorials/sagemaker.md")


def _checks(cli: Any, folder: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = cli("doctor", "sagemaker", "--json", cwd=folder).json["sagemaker"]
    return found


def test_doctor_without_a_job_lists_the_roles(doctor: Checks, account: Aws, folder: Path) -> None:
    """The roles are for users who have not chosen a role yet."""
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
