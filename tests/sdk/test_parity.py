"""The launcher's request equals the request of SageMaker's own SDK for the same job, field by field.

`make parity` runs the tests in a separate venv: the SDK takes a gigabyte. Each case is written twice, as a
cloudtrain.yaml in CASES and for the SDK's ModelTrainer in model_trainer.py, whose calls end at conftest.py's server.
Every field is in one of the tables below, with the expected relation of both sides. A field of either side that is
missing in the tables is a fault, and so is an entry that no case needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.sagemaker import check
from cloudtrain.backends.sagemaker.backend import SageMakerBackend
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.planning import planner as plans

HERE = Path(__file__).parent
ROLE = "arn:aws:iam::123456789012:role/cloudtrain"
MINE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"

OPTED_OUT = """
SchemaVersion: "1.0"
SageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}
"""

CASES = {
    "plain": f"""
name: digits
backend: sagemaker
script: train.py
args: [--steps, "10"]
resources: {{instances: 2, instance_type: ml.g5.12xlarge}}
sagemaker: {{region: us-west-2, role: "{ROLE}"}}
""",
    "spot": f"""
name: digits
backend: sagemaker
script: train.py
image: {MINE}
resources: {{instances: 2, instance_type: ml.p4d.24xlarge, spot: true, disk_gb: 500}}
checkpoint: {{uri: s3://my-bucket/ck}}
inputs: {{train: s3://my-bucket/train}}
limits: {{max_duration: 12h, max_wait: 2h}}
tags: {{team: vision}}
sagemaker: {{region: us-west-2, role: "{ROLE}", network_isolation: true}}
""",
    "everything": f"""
name: digits
backend: sagemaker
task: task.py
image: {MINE}
env: {{NCCL_DEBUG: WARN}}
resources: {{instances: 2, instance_type: ml.m5.xlarge, disk_gb: 200}}
training: {{global_batch_size: 64, max_steps: 100, tensorboard: true}}
checkpoint: {{uri: s3://my-bucket/ck}}
inputs: {{train: s3://my-bucket/train, val: s3://my-bucket/val}}
outputs: {{model: s3://my-bucket/out}}
limits: {{max_duration: 2h}}
retry: {{max_attempts: 3}}
tags: {{team: vision, cost centre: "4711"}}
sagemaker:
  region: us-west-2
  role: "{ROLE}"
  bucket: my-bucket
  prefix: teams/vision
  input_mode: FastFile
  subnets: [subnet-0a1b, subnet-0c2d]
  security_groups: [sg-0a1b]
  kms_key: alias/train
  volume_kms_key: alias/disk
  encrypt_traffic: true
  remote_debug: true
  keep_alive: 30m
  training_plan: arn:aws:sagemaker:us-west-2:123456789012:training-plan/p
  metrics: [{{name: acc, regex: "acc (\\\\S+)"}}]
""",
}

# Patterns of paths; entries of lists are named by their name or key.
EQUAL = (
    *("AlgorithmSpecification.MetricDefinitions.acc.*", "AlgorithmSpecification.TrainingImage"),
    *("AlgorithmSpecification.TrainingInputMode", "CheckpointConfig.*", "EnableInterContainerTrafficEncryption"),
    *("EnableManagedSpotTraining", "EnableNetworkIsolation", "InputDataConfig.train.*", "InputDataConfig.val.*"),
    "InputDataConfig.code.DataSource.S3DataSource.S3DataDistributionType",
    *("InputDataConfig.code.DataSource.S3DataSource.S3DataType", "InputDataConfig.code.InputMode"),
    *("OutputDataConfig.KmsKeyId", "OutputDataConfig.S3OutputPath", "RemoteDebugConfig.*", "ResourceConfig.*"),
    *("RetryStrategy.*", "RoleArn", "StoppingCondition.*", "Tags.cost centre.*", "Tags.team.*"),
    *("TensorBoardOutputConfig.*", "VpcConfig.*"),
)
# (path, sides with the field, reason); for `both` the values differ.
DIFFERENT = (
    ("AlgorithmSpecification.ContainerArguments", "theirs", "we say it all in ContainerEntrypoint"),
    ("AlgorithmSpecification.ContainerEntrypoint", "both", "our own boot: a shell, tar and python3 are all it needs"),
    ("AlgorithmSpecification.MetricDefinitions.*", "ours", "the trainer's event lines, for SageMaker's own charts"),
    ("Environment.*", "theirs", "ours is in the spec, which takes any length and any number"),
    ("HyperParameters*", "theirs", "arguments are in the spec too: flags, lists, quotes arrive as they were written"),
    ("InputDataConfig.code.DataSource.S3DataSource.S3Uri", "both", "one bundle for all jobs of the same code"),
    ("InputDataConfig.job.*", "ours", "the spec: a file has none of the limits of arguments and variables"),
    ("InputDataConfig.sm_drivers.*", "theirs", "the SDK's scripts, a file each; our runtime is in the bundle"),
    ("OutputDataConfig.CompressionType", "theirs", "GZIP, which is SageMaker's own default"),
    ("ProfilerConfig.DisableProfiler", "ours", "no profiling that nobody asked for, whatever the default"),
    ("Tags.cloudtrain:*", "ours", "by which a job is found again"),
    ("TrainingJobName", "both", "ours is known before anything is sent, so that a lost answer can be asked for"),
)
SLASH = "a folder has a slash: without it S3 also matches names that begin alike"
# Further differences of a case, where the case relies on defaults.
DEFAULTS = {
    "plain": (
        ("CheckpointConfig.*", "ours", "what can be resumed needs its checkpoints outside; the SDK keeps none unasked"),
        ("OutputDataConfig.S3OutputPath", "both", "in the job's own folder, with all else that is the job's"),
        ("ResourceConfig.VolumeSizeInGB", "both", "100: the SDK's 30 are soon full with an image, data, checkpoints"),
        ("StoppingCondition.MaxRuntimeInSeconds", "both", "SageMaker's own day; the SDK's ends jobs after an hour"),
    ),
    "spot": (
        ("OutputDataConfig.S3OutputPath", "both", "as in plain"),
        ("CheckpointConfig.S3Uri", "both", SLASH),
        ("InputDataConfig.train.DataSource.S3DataSource.S3Uri", "both", SLASH),
    ),
    "everything": (
        ("CheckpointConfig.S3Uri", "both", SLASH),
        ("InputDataConfig.[tv]*.DataSource.S3DataSource.S3Uri", "both", SLASH),
        (
            "InputDataConfig.[tv]*.InputMode",
            "both",
            "an InputData is copied first, whatever the SDK's training_input_mode",
        ),
    ),
}


@pytest.fixture(scope="module")
def pairs(aws: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return (ours, theirs) of each case."""
    folder = tmp_path_factory.mktemp("parity")
    for name in ("task.py", "train.py"):
        (folder / name).write_text(
            "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"
        )
    (folder / "sdk.yaml").write_text(OPTED_OUT)
    return {case: (_ours(text, folder), _theirs(case, folder, aws)) for case, text in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_request_has_the_fields_of_the_sdks_request(case: str, pairs: Any) -> None:
    """Each field has equal values, or a difference listed in the tables."""
    ours, theirs = (dict(_leaves(body)) for body in pairs[case])
    found = {path: _verdict(path, ours, theirs) for path in sorted(ours.keys() | theirs.keys())}
    assert found == {path: (_entry(case, path) or ("", "in no table"))[1] for path in found}


def test_tables_have_no_unused_entries(pairs: Any) -> None:
    """An entry that matches no case compares no field."""
    met = {_entry(case, path) for case, bodies in pairs.items() for body in bodies for path, _ in _leaves(body)}
    assert [entry for case in CASES for entry in _table(case) if entry not in met] == []


@pytest.mark.parametrize("case", CASES)
def test_offline_check_accepts_both_requests(case: str, pairs: Any) -> None:
    """The launcher's offline check accepts both requests."""
    assert [found for body in pairs[case] for found in check.faults(body)] == []


def _ours(text: str, folder: Path) -> dict[str, Any]:
    """Return the request of `cloudtrain submit` for the config."""
    (folder / "cloudtrain.yaml").write_text(text)
    config = configs.load(folder / "cloudtrain.yaml", environ={})
    plan = plans.make(config, SageMakerBackend().capacity(config))
    return SageMakerBackend().request(plan, config, "digits-abcde", 1, "f" * 64).body


def _theirs(case: str, folder: Path, aws: Any) -> dict[str, Any]:
    """Return the request of the SDK's ModelTrainer, which may reach only the fixture's server."""
    settings = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_REGION": "us-west-2",
        "AWS_DEFAULT_REGION": "us-west-2",
        "AWS_ENDPOINT_URL": aws.url,
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(folder / "sdk.yaml"),
    }
    command = [sys.executable, HERE / "model_trainer.py", case, folder]
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [], "the SDK tried to reach others"
    body: dict[str, Any] = aws.created.pop()
    return body


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each field; an entry of a list of objects is named by its name or key."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        label = next(name for name in ("ChannelName", "Name", "Key") if name in value[0])
        value = {item[label]: {name: part for name, part in item.items() if name != label} for item in value}
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for name, part in value.items():
        yield from _leaves(part, f"{path}.{name}" if path else name)


def _verdict(path: str, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    if path not in theirs:
        return "ours"
    if path not in ours:
        return "theirs"
    return "equal" if ours[path] == theirs[path] else "both"


def _table(case: str) -> Iterator[tuple[str, str, str]]:
    """Yield (path, verdict, reason), in order of precedence."""
    yield from DEFAULTS[case]
    yield from ((path, "equal", "") for path in EQUAL)
    yield from DIFFERENT


def _entry(case: str, path: str) -> tuple[str, str, str] | None:
    return next((entry for entry in _table(case) if fnmatchcase(path, entry[0])), None)
