"""Faults for which CreateTrainingJob would refuse a request, found without AWS: by a table and by rules between fields.

rules.json holds every type, required member, limit, pattern and enumeration of the request (tools/sagemaker_table.py
writes the file from botocore, which checks types and required members only). An instance type newer than the table
passes with a warning; a misspelt field does not pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cloudtrain.launcher.errors import Fault
from cloudtrain.launcher.planning import request_rules
from cloudtrain.launcher.planning.request_rules import Found, key_of, keys_of, listed, part

from . import request_images
from .machine import LOCAL_DISK

# The enumeration that AWS extends every month: an unknown word may be newer than the table.
_GROWING = "TrainingInstanceType"

MAX_RUNTIME_S = 28 * 86_400  # botocore's text on StoppingCondition; botocore's model has no such limit


def faults(body: dict[str, Any], region: str | None = None) -> Iterator[Fault]:
    """Yield the request's faults under the keys that set the fields, else `sagemaker.raw`; `region`: the job's."""
    for path, message, is_warning in violations(body):
        yield Fault(f"{path}: {message}", key_of(path, keys_of("sagemaker"), "sagemaker.raw"), is_warning=is_warning)
    for path, message, hint in (*_between(body), *_image(body, region)):
        yield Fault(message, key_of(path, keys_of("sagemaker"), "sagemaker.raw"), hint=hint)


def violations(body: dict[str, Any]) -> Iterator[Found]:
    """Return (path, message, is it only a warning?) for each breach of the table."""
    return request_rules.violations(request_rules.read("sagemaker", "CreateTrainingJob", "SageMaker", _GROWING), body)


def _between(body: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (path, message, hint) for rules that span fields, from AWS's descriptions of the fields."""
    stopping, resources = part(body, "StoppingCondition"), part(body, "ResourceConfig")
    is_spot, wait = body.get("EnableManagedSpotTraining"), stopping.get("MaxWaitTimeInSeconds")
    runtime, warm = stopping.get("MaxRuntimeInSeconds"), resources.get("KeepAlivePeriodInSeconds")
    wait_path = "StoppingCondition.MaxWaitTimeInSeconds"
    if runtime is None:
        yield "StoppingCondition", "without MaxRuntimeInSeconds nothing ends the job in time", "set limits.max_duration"
    if is_spot and wait is None:
        yield wait_path, "spot training needs MaxWaitTimeInSeconds", "set limits.max_wait"
    if not is_spot and wait is not None:
        yield wait_path, "MaxWaitTimeInSeconds goes with spot training only", "set resources.spot"
    if isinstance(wait, int) and isinstance(runtime, int) and wait < runtime:
        message = f"a spot job may take {wait} s in all and run for {runtime}"
        yield wait_path, message, "raise limits.max_wait, or lower limits.max_duration"
    if is_spot and warm:
        yield "ResourceConfig.KeepAlivePeriodInSeconds", "spot machines are not kept warm", "leave keep_alive out"
    if is_spot and "CheckpointConfig" not in body:
        yield "CheckpointConfig", "a spot job without checkpoints starts from nothing each time", "set checkpoint.uri"
    groups = resources.get("InstanceGroups")
    if groups and ("InstanceType" in resources or "InstanceCount" in resources):
        message = "InstanceGroups and InstanceType or InstanceCount exclude each other"
        yield "ResourceConfig", message, "with `raw`, set the two to null"
    if not groups and not resources.get("InstancePreferences"):
        for name in ("InstanceType", "InstanceCount"):
            if name not in resources:
                yield f"ResourceConfig.{name}", f"ResourceConfig.{name}: is required", ""
    vpc = body.get("VpcConfig")
    if isinstance(vpc, dict) and bool(vpc.get("Subnets")) != bool(vpc.get("SecurityGroupIds")):
        yield "VpcConfig.Subnets", "subnets and security groups go together", "give both, or neither"
    if isinstance(runtime, int) and runtime > MAX_RUNTIME_S:
        message = f"{runtime} s is more than the 28 days that SageMaker lets a job run"
        yield "StoppingCondition.MaxRuntimeInSeconds", message, "lower limits.max_duration"
    for each in (resources, *listed(resources, "InstancePreferences")):
        kind = each.get("InstanceType") if isinstance(each, dict) else None
        if not isinstance(kind, str) or "VolumeKmsKeyId" not in resources or not LOCAL_DISK.match(kind):
            continue
        message = f"{kind} has local disks, which are encrypted by themselves and take no key"
        yield "ResourceConfig.VolumeKmsKeyId", message, "leave volume_kms_key out"
    channels = [channel.get("ChannelName") for channel in listed(body, "InputDataConfig") if isinstance(channel, dict)]
    tags = [str(tag.get("Key")) for tag in listed(body, "Tags") if isinstance(tag, dict)]
    for key in sorted({key for key in tags if tags.count(key) > 1}):
        yield "Tags", f"the tag `{key}` is listed twice", "`cloudtrain:` tags are reserved for cloudtrain"
    for key in (key for key in tags if key.lower().startswith("aws:")):
        yield "Tags", f"the tag `{key}` begins with AWS's own `aws:`", "call it otherwise"
    for name in sorted({str(name) for name in channels if channels.count(name) > 1}):
        yield "InputDataConfig", f"the channel `{name}` is listed twice", ""
    algorithm = part(body, "AlgorithmSpecification")
    if "TrainingImage" not in algorithm and "AlgorithmName" not in algorithm:
        yield "AlgorithmSpecification.TrainingImage", "there is no image", "set image"
    elif "TrainingImage" in algorithm and "AlgorithmName" in algorithm:
        yield "AlgorithmSpecification", "TrainingImage and AlgorithmName exclude each other", ""


def _image(body: dict[str, Any], region: str | None) -> Iterator[tuple[str, str, str]]:
    algorithm = part(body, "AlgorithmSpecification")
    image, access = algorithm.get("TrainingImage"), part(algorithm, "TrainingImageConfig")
    is_in_vpc = access.get("TrainingRepositoryAccessMode") == "Vpc" and "VpcConfig" in body
    if isinstance(image, str) and (found := request_images.refused(image, region, is_in_vpc=is_in_vpc)):
        yield "AlgorithmSpecification.TrainingImage", *found
