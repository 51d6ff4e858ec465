"""The rules between fields of CreateTrainingJob that are missing in the vendor's model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from doubles.aws.wire import AwsError

__all__ = ["check"]

MAX_S = 28 * 86_400
Request = dict[str, Any]

# Families named in botocore's text on VolumeSizeInGB and EC2's list of instance stores, with and without local disks.
_LOCAL_DISK = re.compile(r"ml\.(g4dn|g5|g6|g6e|p4d|p4de|p5|p5e|p5en|trn1|trn1n|trn2|m5d|c5d|r5d)\.")
_NO_LOCAL_DISK = re.compile(r"ml\.(m4|m5|c4|c5|p2|r5|t3)\.")


def check(request: Request) -> None:
    """Raise AwsError for the first broken rule; the request fits the model already."""
    for message in _broken(request):
        raise AwsError("ValidationException", message)


def _broken(request: Request) -> Iterator[str]:
    yield from _resources(request["ResourceConfig"])
    yield from _times(request)
    algorithm = request["AlgorithmSpecification"]
    if ("TrainingImage" in algorithm) == ("AlgorithmName" in algorithm):
        yield "You must specify either TrainingImage or AlgorithmName, and not both."
    spot = request.get("EnableManagedSpotTraining", False)
    if spot and "InstancePreferences" in request["ResourceConfig"]:
        yield "InstancePreferences is not supported with EnableManagedSpotTraining."
    if spot and request["ResourceConfig"].get("KeepAlivePeriodInSeconds"):
        yield "KeepAlivePeriodInSeconds is not supported with EnableManagedSpotTraining."
    channels = [channel["ChannelName"] for channel in request.get("InputDataConfig", ())]
    if len(set(channels)) < len(channels):
        yield "Input data channels must have unique names."
    for channel in request.get("InputDataConfig", ()):
        if len(channel["DataSource"]) != 1:
            yield f"The data source of channel {channel['ChannelName']} must have exactly one kind."
    tags = [tag["Key"] for tag in request.get("Tags", ())]
    if len(set(tags)) < len(tags):
        yield "Duplicate tag keys found. Please note that Tag keys are case insensitive."
    if any(tag.lower().startswith("aws:") for tag in tags):
        yield "Tag keys starting with 'aws:' are reserved for system use."
    names = [metric["Name"] for metric in algorithm.get("MetricDefinitions", ())]
    if len(set(names)) < len(names):
        yield "MetricDefinitions must have unique names."


def _resources(resources: Request) -> Iterator[str]:
    groups = "InstanceGroups" in resources
    single = "InstanceType" in resources or "InstanceCount" in resources
    if groups and single:
        yield "InstanceGroups cannot be specified with InstanceType and InstanceCount."
    if "InstancePreferences" in resources:
        if groups or "InstanceType" in resources or "InstancePlacementConfig" in resources:
            yield "InstancePreferences cannot be specified with InstanceType, InstanceGroups or placement."
    elif not groups:
        if "InstanceType" not in resources:
            yield "InstanceType is required in ResourceConfig."
        if "InstanceCount" not in resources:
            yield "InstanceCount is required in ResourceConfig."
    kind = resources.get("InstanceType", "")
    if "VolumeSizeInGB" not in resources and _NO_LOCAL_DISK.match(kind):
        yield f"VolumeSizeInGB is required in ResourceConfig for {kind}."
    if "VolumeKmsKeyId" in resources and _LOCAL_DISK.match(kind):
        yield f"VolumeKmsKeyId is not supported for {kind}, which has local instance storage."
    if "SelectedInstanceType" in resources or "SelectedInstanceCount" in resources:
        yield "SelectedInstanceType and SelectedInstanceCount are read-only."


def _times(request: Request) -> Iterator[str]:
    stopping = request.get("StoppingCondition", {})
    runtime, wait = stopping.get("MaxRuntimeInSeconds", 86_400), stopping.get("MaxWaitTimeInSeconds")
    if runtime > MAX_S:
        yield f"MaxRuntimeInSeconds must be less than or equal to {MAX_S}."
    if request.get("EnableManagedSpotTraining", False):
        if wait is None:
            yield "MaxWaitTimeInSeconds is required when EnableManagedSpotTraining is true."
        elif wait < runtime:
            yield "MaxWaitTimeInSeconds must be greater than or equal to MaxRuntimeInSeconds."
    elif wait is not None:
        yield "MaxWaitTimeInSeconds is only supported with EnableManagedSpotTraining."
