"""SageMaker: the request against requests of the vendor's SDKs, the vendor's CLI, and the service's refusals."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.backends.sagemaker import backend, check, request_images
from cloudtrain.backends.sagemaker.backend import SageMakerBackend
from cloudtrain.backends.sagemaker.block import SageMaker
from cloudtrain.backends.sagemaker.machine import region_of
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.prices import catalog
from doubles.aws.handle import Aws

HERE = Path(__file__).parent
CAPTURED = sorted((HERE / "captured").glob("sagemaker_*.json"))
ROLE = "arn:aws:iam::123456789012:role/cloudtrain"
TASK = "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"

DLC = "763104351884.dkr.ecr.{}.amazonaws.com/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker"

# The minimum for a job, and a config with all settings.
PLAIN = f"""
name: digits
backend: sagemaker
task: task.py
resources: {{instances: 2, instance_type: ml.g5.12xlarge}}
training: {{global_batch_size: 64, max_steps: 100}}
sagemaker: {{region: us-west-2, role: "{ROLE}"}}
"""
EVERYTHING = f"""
name: digits
backend: sagemaker
task: task.py
params: {{hidden: 128, note: "it's \\"quoted\\""}}
env: {{NCCL_DEBUG: WARN}}
secrets: [WANDB_API_KEY]
image: 123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1
resources: {{instances: 2, accelerators: "A100:8", spot: true, disk_gb: 500}}
training: {{global_batch_size: 64, max_steps: 100, tensorboard: true}}
checkpoint: {{uri: s3://my-bucket/ck}}
inputs: {{train: s3://my-bucket/train}}
outputs: {{model: s3://my-bucket/out}}
limits: {{max_duration: 12h, max_wait: 2h}}
budget: {{limit: 150 USD}}
retry: {{max_attempts: 3}}
tags: {{team: vision}}
sagemaker:
  region: us-west-2
  role: "{ROLE}"
  bucket: my-bucket
  prefix: teams/vision
  input_mode: FastFile
  subnets: [subnet-0a1b]
  security_groups: [sg-0a1b]
  kms_key: alias/train
  encrypt_traffic: true
  remote_debug: true
  price_per_hour: 25 USD
  metrics: [{{name: acc, regex: "acc (\\\\S+)"}}]
  raw: {{Environment: {{EXTRA: "1"}}, ProfilerConfig: null}}
project: vision
"""
TOOLKIT = f"""
name: digits
backend: sagemaker
script: train.py
args: [--epochs, "10"]
image: 763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.2.0-gpu-py310
resources: {{instances: 2, instance_type: ml.p4d.24xlarge}}
sagemaker: {{region: us-west-2, role: "{ROLE}", distribution: pytorchddp}}
"""

Render = Callable[..., Request]


@pytest.mark.parametrize(("name", "text"), [("plain", PLAIN), ("everything", EVERYTHING), ("toolkit", TOOLKIT)])
def test_request_equals_the_golden_file(name: str, text: str, render: Render) -> None:
    """The whole request is compared, so every new or missing field shows; and SageMaker would accept the request."""
    golden = HERE / "golden" / f"sagemaker_{name}.json"
    request = render(text)
    assert request.body == json.loads(golden.read_text())
    assert list(check.violations(request.body)) == []
    assert SageMakerBackend().check(request) == []
    assert json.loads(request.text) == request.body
    assert render(text).text == request.text


@pytest.mark.parametrize("captured", ["v2_pytorchddp_smddp", "v2_smdistributed_dataparallel"])
@pytest.mark.parametrize("distribution", ["pytorchddp", "smdistributed"])
def test_toolkit_gets_the_sdks_hyperparameters(captured: str, distribution: str, render: Render) -> None:
    """The same hyperparameters as SDK v2 sends, except for the job's own names and places."""
    theirs = json.loads((HERE / "captured" / f"sagemaker_{captured}.json").read_text())["HyperParameters"]
    ours = render(TOOLKIT, f"sagemaker.distribution={distribution}", "args=[]").body["HyperParameters"]
    own = {"sagemaker_job_name", "sagemaker_submit_directory", "sagemaker_program"}
    options = "sagemaker_distributed_dataparallel_custom_mpi_options"  # the user's own options in the capture
    assert ours.keys() == theirs.keys() | {options}
    assert {k: v for k, v in ours.items() if k not in own | {options}} == {
        k: v for k, v in theirs.items() if k not in own | {options}
    }
    assert json.loads(ours["sagemaker_program"]) == "runtime/cloudtrain/entrypoints/container/smddp.py"


@pytest.mark.parametrize("path", CAPTURED, ids=lambda path: path.stem)
def test_requests_of_the_sdks_pass(path: Path) -> None:
    """The check finds no fault in requests of SageMaker's own SDKs."""
    assert [found for found in check.violations(json.loads(path.read_text())) if not found[2]] == []


def test_table_equals_botocores_model() -> None:
    """rules.json contains the installed botocore's own limits, word for word."""
    script = HERE.parents[1] / "tools" / "sagemaker_table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change of the request: set the field at the dotted path, or remove the field for the value ..."""

    def change(body: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            body = body[int(name)] if name.isdigit() else body.setdefault(name, {})  # type: ignore[index]
        if value is ...:
            del body[last]
        else:
            body[last] = value

    return change


# Requests that SageMaker refuses: the change of a good request, and the fault's words.
BROKEN: list[tuple[str, Any, str]] = [
    ("TrainingJobName", "a_b", "does not match"),
    ("TrainingJobName", "x" * 64, "64 characters is more than 63"),
    ("TrainingJobName", ..., "is required"),
    ("RoleArn", "role/train", "does not match"),
    ("RoleArn", 7, "expected a string, found 7"),
    ("AlgorithmSpecification.TrainingImage", ..., "there is no image"),
    ("AlgorithmSpecification.TrainingImage", "x" * 256, "256 characters is more than 255"),
    *(
        ("AlgorithmSpecification.TrainingImage", image, "pulls images from ECR, and `")
        for image in ("pytorch/pytorch:2.8.0", "public.ecr.aws/a/b:1", "nvcr.io/nvidia/pytorch:25.05-py3", "a:5000/b")
    ),
    *(
        ("AlgorithmSpecification.TrainingImage", image, "is not a valid image name")
        for image in ("my-org/Train:latest", "https://a/b", "123456789012.dkr.ecr.us-west-2.amazonaws.com/a:b:c", "")
    ),
    *(
        (
            "AlgorithmSpecification.TrainingImage",
            f"123456789012.dkr.{host}/x:1",
            "pulls from the job's region, us-west-2",
        )
        for host in (
            "ecr.eu-west-1.amazonaws.com",
            "ecr-fips.us-east-1.amazonaws.com",
            "ecr.cn-north-1.amazonaws.com.cn",
        )
    ),
    ("AlgorithmSpecification.TrainingInputMode", "Copy", "`Copy` is not one of Pipe, File, FastFile"),
    ("AlgorithmSpecification.ContainerEntrypoint", ["x" * 257], "257 characters is more than 256"),
    ("AlgorithmSpecification.ContainerEntrypoint", ["a\nb"], "does not match"),
    ("AlgorithmSpecification.ContainerEntrypoint", [], "0 entries is less than 1"),
    ("AlgorithmSpecification.MetricDefinitions", [{"Name": "a", "Regex": "b"}] * 41, "41 entries is more than 40"),
    ("Environment", {"A": "x" * 513}, "513 characters is more than 512"),
    ("Environment", {"1A": "x"}, "does not match"),
    ("HyperParameters", {"a": "x" * 2501}, "2501 characters is more than 2500"),
    ("HyperParameters", {"a": 1}, "expected a string, found 1"),
    ("ResourceConfig.InstanceCount", -1, "-1 is less than 0"),
    ("ResourceConfig.InstanceCount", "2", 'expected an integer, found "2"'),
    ("ResourceConfig.VolumeSizeInGB", -1, "-1 is less than 0"),
    ("ResourceConfig.InstanceType", ..., "is required"),
    ("ResourceConfig.KeepAlivePeriodInSeconds", 30_000, "30000 is more than 21600"),
    ("StoppingCondition.MaxRuntimeInSeconds", 0, "0 is less than 1"),
    ("StoppingCondition.MaxRuntimeInSeconds", ..., "nothing ends the job in time"),
    ("StoppingCondition.MaxWaitTimeInSeconds", 9e9, "expected an integer"),
    ("StoppingCondition.MaxWaitTimeInSeconds", 100_000, "goes with spot training only"),
    ("EnableManagedSpotTraining", True, "spot training needs MaxWaitTimeInSeconds"),
    ("EnableManagedSpotTraining", "yes", "expected true or false"),
    ("RetryStrategy", {"MaximumRetryAttempts": 31}, "31 is more than 30"),
    ("VpcConfig", {"Subnets": ["subnet-1"], "SecurityGroupIds": []}, "0 entries is less than 1"),
    ("VpcConfig", {"Subnets": ["subnet-1"]}, "SecurityGroupIds"),
    ("Tags", [{"Key": "", "Value": "x"}], "0 characters is less than 1"),
    ("OutputDataConfig.S3OutputPath", "/tmp/x", "does not match"),
    ("OutputDataConfig", ..., "is required"),
    ("CheckpointConfig.S3Uri", "gs://x/y", "does not match"),
    ("InputDataConfig.0.ChannelName", "a b", "does not match"),
    ("InputDataConfig.1.ChannelName", "code", "is listed twice"),
    ("InputDataConfig", 5, "expected a list, found 5"),
    ("StoppingCondition.MaxRuntimeInSeconds", 29 * 86_400, "more than the 28 days"),
    ("ResourceConfig.VolumeKmsKeyId", "alias/disk", "has local disks"),
    ("Tags", [{"Key": "a", "Value": "x"}] * 2, "is listed twice"),
    ("Tags", [{"Key": "aws:a", "Value": "x"}], "AWS's own `aws:`"),
    ("Tags", [{"Key": "a", "Value": "x\ty"}], "does not match"),
    ("StopingCondition", {}, "is not a field of CreateTrainingJob; did you mean `StoppingCondition`?"),
]


@pytest.mark.parametrize(("path", "value", "said"), BROKEN, ids=lambda value: str(value)[:40])
def test_broken_request_is_refused(path: str, value: Any, said: str, render: Render) -> None:
    """Each request is one fault away from a good one, and the fault is named; botocore finds 6 of 26 such faults."""
    request = render(PLAIN)
    body = copy.deepcopy(request.body)
    _set(path, value)(body)
    found = SageMakerBackend().check(replace(request, body=body))
    assert any(said in fault.message for fault in found if not fault.is_warning), [str(fault) for fault in found]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("image=registry.corp:5000/train:1", "from a registry in your VPC: sagemaker.raw.AlgorithmSpecification"),
        (f"image={DLC.format('us-east-1')}", f"set `image: {DLC.format('us-west-2')}`"),
        (f"image={DLC.format('us-west-2').replace('763104351884', '626614931356')}", "set `image: 763104351884.dkr."),
        ("image=123456789012.dkr.ecr.us-east-1.amazonaws.com/x:1", "push the image to ECR in us-west-2"),
    ],
)
def test_refused_image_has_a_cure(override: str, said: str, render: Render) -> None:
    """The hint names the image to write, or the way of the image into the region."""
    (fault,) = SageMakerBackend().check(render(PLAIN, override))
    assert (fault.key, fault.is_warning, said in fault.hint) == ("image", False, True), fault


def test_images_that_sagemaker_pulls_are_accepted(render: Render) -> None:
    """ECR of the region with its forms of names; with TrainingImageConfig and a VPC also a private registry."""
    for host in ("dkr.ecr.us-west-2.amazonaws.com", "dkr.ecr-fips.us-west-2.amazonaws.com"):
        assert SageMakerBackend().check(render(PLAIN, f"image=123456789012.{host}/a/b@sha256:{'0a' * 32}")) == []
    raw = "sagemaker.raw={AlgorithmSpecification: {TrainingImageConfig: {TrainingRepositoryAccessMode: Vpc}}}"
    vpc = ("sagemaker.subnets=[subnet-1]", "sagemaker.security_groups=[sg-1]")
    assert SageMakerBackend().check(render(PLAIN, "image=registry.corp:5000/train:1", raw, *vpc)) == []
    assert SageMakerBackend().check(render(PLAIN, "image=registry.corp:5000/train:1", raw)) != []


@pytest.mark.parametrize("raw", ["null", "5", "{TrainingImage: null}", "{TrainingImage: 5}"])
def test_raw_without_an_image_is_a_fault_and_no_traceback(raw: str, render: Render) -> None:
    """Any value may replace the image; the plan then has no line on the image."""
    request = render(PLAIN, f"sagemaker.raw={{AlgorithmSpecification: {raw}}}")
    assert request.runtime is None
    assert any(fault.key == "image" for fault in SageMakerBackend().check(request))


def test_spot_rules_are_checked(render: Render) -> None:
    """A wait shorter than the run, and warm machines, are refused with the remedy."""
    body = copy.deepcopy(render(EVERYTHING).body)
    body["StoppingCondition"]["MaxWaitTimeInSeconds"] = 60
    body["ResourceConfig"]["KeepAlivePeriodInSeconds"] = 600
    del body["CheckpointConfig"]
    said = " ".join(fault.message for fault in check.faults(body))
    assert all(word in said for word in ("may take 60 s in all", "not kept warm", "starts from nothing each time"))


def test_new_instance_type_is_a_warning(render: Render) -> None:
    """AWS adds types faster than any table is updated."""
    request = render(PLAIN, "resources.instance_type=ml.p9.48xlarge", "distributed.nproc_per_node=8")
    (fault,) = SageMakerBackend().check(request)
    assert (fault.is_warning, fault.key) == (True, "resources.instance_type")
    assert "SageMaker may know it" in fault.message


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        (PLAIN, ("sagemaker.role=null", "sagemaker.region=null"), ("no AWS region", "no execution role")),
        (PLAIN, ("sagemaker.role=train",), ("`train` is not the ARN of a role",)),
        (PLAIN, ("sagemaker.region=EU-west-1a",), ("`eu-west-1a` is not a region", "did you mean `eu-west-1`?")),
        (PLAIN, ("resources.instance_type=null",), ("which machines",)),
        (PLAIN, ("resources.instance_type=p4d-24xlarge",), ("did you mean `ml.p4d.24xlarge`?",)),
        (PLAIN, ("resources.instance_type=ml.trn1.32xlarge",), ("Trainium",)),
        (PLAIN, ("resources.instance_type=ml.p9.48xlarge",), ("is not in our table", "distributed.nproc_per_node")),
        (PLAIN, ("resources.instance_type=null", "resources.accelerators=H100:3"), ("has `H100:3`",)),
        (PLAIN, ("inputs={train: /data}",), ("reads inputs from S3", "aws s3 sync /data")),
        (PLAIN, ("inputs={train: s3://My_Bucket/x}",), ("`My_Bucket` is not a bucket name",)),
        (PLAIN, ("inputs={train: s3://bkt/x/*.csv}",), ("is a pattern", "name the folder, `s3://bkt/x/`")),
        (PLAIN, ("outputs={a: https://bkt.s3.amazonaws.com/x}",), ("did you mean `s3://bkt/x`?",)),
        (PLAIN, ("checkpoint.uri=s3a://bkt/x",), ("did you mean `s3://bkt/x`?",)),
        (PLAIN, ("checkpoint.mirror=s3://b/x",), ("`b` is not a bucket name",)),
        (PLAIN, ("sagemaker.bucket=arn:aws:s3:::my-bucket",), ("is not a bucket name", "did you mean `my-bucket`?")),
        (PLAIN, ("sagemaker.bucket=My-Bucket",), ("`My-Bucket` is not a bucket name", "did you mean `my-bucket`?")),
        (PLAIN, ("inputs={code: s3://bkt/x}",), ("cloudtrain's own",)),
        (PLAIN, ("outputs={a: s3://bkt/x, b: s3://bkt/y}",), ("one place for outputs, not a, b",)),
        (PLAIN, ("sagemaker.distribution=smdistributed",), ("runs a `script`", "distribution: torchrun")),
        (PLAIN, ("outputs={a: ./x}", "checkpoint.uri=/tmp/x"), ("`./x` is elsewhere", "`/tmp/x` is elsewhere")),
        (
            PLAIN,
            ("checkpoint.mirror=/x", "checkpoint.resume=s3://b/x"),
            ("end with the container", "only from its own checkpoints"),
        ),
        (PLAIN, ("sagemaker.raw={CheckpointConfig: null}",), ("changes CheckpointConfig.LocalPath", "S3Uri")),
        (PLAIN, ("sagemaker.raw={CheckpointConfig: x}",), ("changes CheckpointConfig.LocalPath",)),
        (PLAIN, ("sagemaker.raw={CheckpointConfig: {S3Uri: null}}",), ("takes away CheckpointConfig.S3Uri",)),
        (PLAIN, ("sagemaker.raw={InputDataConfig: []}",), ("takes away the channels `code` or `job`",)),
        (PLAIN, ("sagemaker.raw={EnableNetworkIsolation: true}",), ("set sagemaker.network_isolation instead",)),
        (PLAIN, ("sagemaker.raw={ResourceConfig: {VolumeSizeInGB: 16384}}",), ("set resources.disk_gb instead",)),
        (
            PLAIN,
            ("sagemaker.raw={DebugRuleConfigurations: [{InstanceType: ml.m5.24xlarge}]}",),
            ("DebugRuleConfigurations run on machines of their own",),
        ),
        (PLAIN, ("distributed.nproc_per_node=16",), ("16 ranks on an instance with 4 GPUs",)),
        (
            PLAIN,
            ("resources.instance_type=null", "resources.accelerators=Trainium:16"),
            ("DDP and FSDP do not run on",),
        ),
        (
            PLAIN,
            ("sagemaker.raw={ResourceConfig: {InstanceCount: 8}, StoppingCondition: null, TrainingJobName: mine}",),
            ("changes ResourceConfig.InstanceCount", "set limits.max_duration instead", "changes TrainingJobName"),
        ),
        (PLAIN, ("resources.instance_type=ml.p3.16xlarge",), ("does not run on V100", "set `image`")),
        (TOOLKIT, ("secrets=[KEY]",), ("has no place for secrets",)),
        (TOOLKIT, ("args=[--a, x, --a, y]",), ("each name once, and `--a` is not such a pair",)),
        (TOOLKIT, ("args=[--sagemaker_program, x]",), ("`--sagemaker_program` is not such a pair",)),
        (TOOLKIT, ("image=null",), ("not in the images of today", "NCCL over EFA")),
        (TOOLKIT, ("resources.instance_type=ml.p5.48xlarge",), ("SMDDP library", "ml.p4d.24xlarge")),
        (TOOLKIT, ("image=x/pytorch-training:2.8.0-gpu-py312",), ("SMDDP library",)),
        (TOOLKIT, ("args=[--verbose]",), ("`--verbose` is not such a pair",)),
    ],
)
def test_config_that_sagemaker_cannot_run_is_refused(
    text: str, overrides: tuple[str, ...], said: tuple[str, ...], render: Render
) -> None:
    """Missing and impossible settings are reported with a remedy, all missing settings together."""
    with pytest.raises(ConfigError) as caught:
        render(text, *overrides)
    assert all(word in str(caught.value) for word in said), str(caught.value)


@pytest.mark.parametrize(
    ("machine", "disk", "extra_usd", "words"),
    [
        ("ml.p3.16xlarge", "null", 100 * 0.154 / 720, "with a disk of 100 GB"),
        ("ml.p3.16xlarge", "16384", 16384 * 0.154 / 720, "with a disk of 16384 GB"),
        ("ml.p4d.24xlarge", "4000", 0.0, "list price"),  # includes its disks
    ],
)
def test_disk_is_a_part_of_the_price(machine: str, disk: str, extra_usd: float, words: str, tmp_path: Path) -> None:
    """A volume is billed by its size in addition to the machine; a user's own price is used unchanged."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "cloudtrain.yaml").write_text(PLAIN)
    asked = [f"resources.instance_type={machine}", f"resources.disk_gb={disk}"]
    config = configs.load(tmp_path / "cloudtrain.yaml", overrides=asked, environ={})
    known = catalog.by_type("sagemaker", machine, "us-west-2")
    assert known.hourly_usd is not None
    found = SageMakerBackend().capacity(config)
    assert found.hourly_usd == pytest.approx(known.hourly_usd + extra_usd)
    assert words in found.price_source
    own = [*asked, "sagemaker.price_per_hour=3 USD"]
    priced = configs.load(tmp_path / "cloudtrain.yaml", overrides=own, environ={})
    assert SageMakerBackend().capacity(priced).hourly_usd == 3.0


def test_budget_becomes_the_time_limit(render: Render) -> None:
    """MaxRuntimeInSeconds is the time that the budget buys without the tail, rounded down; AWS enforces it."""
    machine = catalog.by_type("sagemaker", "ml.g5.12xlarge", "us-west-2")
    assert machine.hourly_usd is not None
    body = render(PLAIN, "budget.limit=20 USD").body
    runtime = body["StoppingCondition"]["MaxRuntimeInSeconds"]
    tail_s = backend.GRACE_S + backend.UPLOAD_S  # billed too
    assert runtime == int(20 / (2 * machine.hourly_usd * machine.uncertainty_of()) * 3600) - tail_s
    warm = render(PLAIN, "budget.limit=20 USD", "sagemaker.keep_alive=10m").body
    assert warm["StoppingCondition"]["MaxRuntimeInSeconds"] == runtime - 600


@pytest.mark.parametrize(
    ("settings", "pending_s"),
    [
        (["limits.max_wait=30m"], 1800),
        (["limits.max_wait=28d"], 2_419_200),
        ([], None),
        (["limits.max_wait=1m", "queue.wait=true"], 1800),  # the wait in line counts too, and is ended here
        (["limits.max_wait=2h", "resources.spot=true"], None),  # spot machines have MaxWaitTimeInSeconds
        (["limits.max_wait=2h", "resources={instance_type: ml.m5.xlarge}"], None),  # only with accelerators
    ],
)
def test_wait_for_machines_has_the_platforms_limit(settings: list[str], pending_s: int | None, render: Render) -> None:
    """`limits.max_wait` is in the request where SageMaker has such a limit, and only then counts as carried."""
    request = render(PLAIN, *settings)
    assert request.body["StoppingCondition"].get("MaxPendingTimeInSeconds") == pending_s
    is_carried = (pending_s is not None and "queue.wait=true" not in settings) or "resources.spot=true" in settings
    assert ("limits.max_wait" in request.carried) is (is_carried or settings == [])
    assert SageMakerBackend().check(request) == []


@pytest.mark.parametrize("wait", ["29m", "29d"])
def test_wait_that_sagemaker_does_not_take_is_refused(wait: str, render: Render) -> None:
    """The error names the key and the valid times."""
    with pytest.raises(ConfigError) as caught:
        render(PLAIN, f"limits.max_wait={wait}")
    (fault,) = caught.value.faults
    assert (fault.key, "30m to 28d" in fault.hint) == ("limits.max_wait", True), fault


def test_unknown_price_is_never_zero(render: Render, cli: Any, tmp_path: Path) -> None:
    """Without a price no worst case is known; the plan names the type, and a budget is refused."""
    render(PLAIN, "sagemaker.region=eu-north-1")
    plan = cli("plan", "--set", "sagemaker.region=eu-north-1", cwd=tmp_path)
    assert "price unknown: no price of ml.g5.12xlarge in eu-north-1" in plan.stdout
    with pytest.raises(ConfigError, match="a budget needs a price"):
        render(PLAIN, "sagemaker.region=eu-north-1", "budget.limit=20 USD")


def test_cheapest_machine_with_the_accelerators_is_first() -> None:
    """`A100:8` gives p4d before p4de; names are case-insensitive."""
    found = catalog.by_accelerators("sagemaker", "a100:8", "us-west-2")
    assert [machine.instance_type for machine in found] == ["ml.p4d.24xlarge", "ml.p4de.24xlarge"]
    assert catalog.by_accelerators("sagemaker", "A100:3", "us-west-2") == []
    # Without a price in the region, the order is by the price in other regions.
    assert catalog.by_accelerators("sagemaker", "T4:1", "eu-central-1")[0].instance_type == "ml.g4dn.xlarge"
    assert all(machine.count == 4 for machine in catalog.by_accelerators("sagemaker", "A10G:4", None))


@pytest.mark.parametrize(
    ("region", "gpus", "image"),
    [
        ("us-west-2", 8, "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker"),
        ("eu-south-1", 0, "692866216735.dkr.ecr.eu-south-1.amazonaws.com/pytorch:2.13-cpu-amzn2023-sagemaker"),
        ("cn-north-1", 1, "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch:2.13-cu133-amzn2023-sagemaker"),
    ],
)
def test_default_image_follows_the_region(region: str, gpus: int, image: str) -> None:
    """The registry's account and domain depend on the region."""
    assert request_images.default_image(region, gpus) == image


def test_region_is_found_as_by_awss_tools(tmp_path: Path) -> None:
    """The region of the config, of the environment or of the profile; otherwise None."""
    (tmp_path / "config").write_text("[default]\nregion = eu-west-1\n[profile work]\nregion = eu-west-2\n")
    file = {"AWS_CONFIG_FILE": str(tmp_path / "config")}
    assert region_of(SageMaker(region="US-East-1"), {"AWS_REGION": "x", **file}) == "us-east-1"
    assert region_of(SageMaker(), {"AWS_DEFAULT_REGION": "us-east-2", **file}) == "us-east-2"
    assert region_of(SageMaker(profile="work"), file) == "eu-west-2"
    assert region_of(SageMaker(), file) == "eu-west-1"
    assert region_of(SageMaker(), {"AWS_CONFIG_FILE": str(tmp_path / "none")}) is None
    (tmp_path / "config").write_bytes(b"[default]\nregion = \xff\n")
    with pytest.raises(ConfigError, match="the AWS config cannot be read"):
        region_of(SageMaker(), file)


@settings(max_examples=200)
@given(
    name=st.from_regex(r"[a-z0-9][a-z0-9-]{0,40}", fullmatch=True).filter(lambda text: text != "last"),
    instances=st.integers(1, 64),
    machine=st.sampled_from(["ml.g5.12xlarge", "ml.p5.48xlarge", "ml.m5.xlarge", "ml.c6i.32xlarge"]),
    is_spot=st.booleans(),
    hours=st.integers(1, 600),
    disk_gb=st.integers(1, 16_000),
    tags=st.dictionaries(
        st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.:/=+@-]{0,30}", fullmatch=True), st.just("x"), max_size=5
    ),
)
def test_rendered_requests_pass(render: Render, **drawn: Any) -> None:
    """Any valid config gives a request within SageMaker's own limits."""
    text = PLAIN.replace("name: digits", f"name: '{drawn['name']}'").replace(
        "training: {global_batch_size: 64, max", "training: {max"
    )
    overrides = [
        f"resources.instances={drawn['instances']}",
        f"training.global_batch_size={drawn['instances'] * 8}",
        f"resources.instance_type={drawn['machine']}",
        f"resources.spot={str(drawn['is_spot']).lower()}",
        f"limits.max_duration={drawn['hours']}h",
        f"resources.disk_gb={drawn['disk_gb']}",
        f"tags={json.dumps(drawn['tags'])}",
    ]
    assert SageMakerBackend().check(render(text, *overrides)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [EVERYTHING, *(pytest.param(text, marks=pytest.mark.soak) for text in (PLAIN, TOOLKIT))],
    ids=["everything", "plain", "toolkit"],
)
def test_dry_run_is_input_for_the_aws_cli(text: str, cli: Any, tmp_path: Path, aws: Aws) -> None:
    """The real `aws` accepts the file of `submit --dry-run -o DIR`, and so does a stand-in with the whole model."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "cloudtrain.yaml").write_text(text)
    dry = cli.ok("submit", "--dry-run", "-o", "out", cwd=tmp_path)
    assert "dry run: nothing was sent" in dry.stderr
    aws.settings(execute=False)
    command = ["sagemaker", "create-training-job", "--region", "us-west-2"]
    sent = subprocess.run(
        [Path(sys.executable).with_name("aws"), *command, "--cli-input-json", "file://out/create-training-job.json"],
        cwd=tmp_path,
        env={**cli.environment(), **aws.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert sent.returncode == 0, sent.stderr
    [call] = aws.journal("CreateTrainingJob")
    assert (call["params"], call["outcome"]) == (dry.json, "ok")
