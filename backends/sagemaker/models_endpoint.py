"""A SageMaker endpoint with an end: EventBridge Scheduler deletes the endpoint, whether this machine runs or not.

The schedule is made before the endpoint, and is removed only when the endpoint is gone. Sources: botocore 1.44.8, the
models of SageMaker and Scheduler; the Scheduler User Guide, "Using universal targets".
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.backend.models import MANIFEST, CheckedModel, EndpointPlan, EndpointWish, VendorCall
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, Fault, UnreachableError
from cloudtrain.launcher.prices import catalog

from . import api, files
from .api import AwsAccess, AwsClients
from .machine import block_of, choose, disk_usd, place_of
from .models import container
from .records import SageMakerEndpoint

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

DELETE = "arn:aws:scheduler:::aws-sdk:sagemaker:deleteEndpoint"
RETRIES, RETRY_S = 3, 1800
# AWS may refuse a deletion during the start, so a start must end long before the shortest lifetime.
DOWNLOAD_S, STARTUP_S = 1200, 600
DISK_GB = 30  # SageMaker's own volume for an instance of an endpoint, if the request names no size; an assumption
_OWN = ("Name", "Description", "ScheduleExpressionTimezone", "FlexibleTimeWindow", "ActionAfterCompletion", "Target")
_GONE = ("Could not find", "does not exist", "not found")


def plan(wish: EndpointWish, config: JobConfig) -> EndpointPlan:
    """Return the requests and the price. Raises ConfigError for a missing setting."""
    place, block, machine, name = place_of(config), block_of(config), choose(config), wish.name
    role = _require(config, wish.model)
    uri = wish.model.place(place.root)
    tags = {"Tags": [{"Key": "cloudtrain:endpoint", "Value": name}]}
    model = {
        "ModelName": name,
        "PrimaryContainer": container(wish.model, config, uri, machine.count),
        "ExecutionRoleArn": place.role,
        "EnableNetworkIsolation": block.network_isolation,
        **tags,
    }
    if block.subnets:
        model["VpcConfig"] = {"Subnets": list(block.subnets), "SecurityGroupIds": list(block.security_groups)}
    variant = {
        "VariantName": "all",
        "ModelName": name,
        "InstanceType": machine.instance_type,
        "InitialInstanceCount": wish.instances,
        "ModelDataDownloadTimeoutInSeconds": DOWNLOAD_S,
        "ContainerStartupHealthCheckTimeoutInSeconds": STARTUP_S,
    }
    calls = (
        VendorCall("CreateSchedule", _schedule(wish, role)),
        VendorCall("CreateModel", model),
        VendorCall("CreateEndpointConfig", {"EndpointConfigName": name, "ProductionVariants": [variant], **tags}),
        VendorCall("CreateEndpoint", {"EndpointName": name, "EndpointConfigName": name, **tags}),
    )
    ref = SageMakerEndpoint(place.region, block.profile, dict(block.endpoints), name)
    delete = f"aws sagemaker delete-endpoint --region {place.region} --endpoint-name {name}"
    disk, usd = disk_usd(machine.instance_type, DISK_GB), machine.hourly_usd
    source = f"{machine.price_source}{f', with a disk of {DISK_GB} GB' if disk else ''}"
    listed = (None if usd is None else usd + disk, source, machine.uncertainty)
    price = catalog.serving("sagemaker", block.price_per_hour, listed, machine.instance_type, place.region)
    return EndpointPlan(name, uri, calls, machine.instance_type, *price, delete, ref.dump())


def prepare(clients: AwsClients, plan: EndpointPlan, model: CheckedModel) -> None:
    """Upload the files, then make the schedule, the model and the configuration, in this order."""
    access, schedule = _access(clients, plan.ref), plan.calls[0].body
    files.of(access).put_model(plan.uri, model.path, model.uploads, MANIFEST)
    with api.answers("schedule the end of the endpoint"):
        api.client(access, "scheduler", patient=True).create_schedule(**schedule)
    client = api.client(access, "sagemaker", patient=True)
    with api.answers("describe the endpoint"):
        client.create_model(**plan.calls[1].body)
        client.create_endpoint_config(**plan.calls[2].body)


def start(clients: AwsClients, plan: EndpointPlan) -> None:
    """Send CreateEndpoint. After a lost answer, look whether the endpoint exists."""
    access = _access(clients, plan.ref)
    with api.answers("start the endpoint"):
        try:
            api.client(access, "sagemaker", patient=True).create_endpoint(**plan.calls[3].body)
        except Exception as error:
            if api.is_refusal(error):
                raise
            with contextlib.suppress(CloudtrainError):
                if state(clients, plan.ref) is not None:
                    return
            raise UnreachableError(f"AWS has not confirmed the endpoint {plan.name}: {error}") from error


def state(clients: AwsClients, ref: dict[str, Any]) -> str | None:
    """Return the endpoint's status, None if AWS knows no such endpoint."""
    handle, access = SageMakerEndpoint.load(ref), _access(clients, ref)
    with api.polls(access, f"ask for the endpoint {handle.name}"):
        try:
            found = api.client(access, "sagemaker").describe_endpoint(EndpointName=handle.name)
        except Exception as error:
            if not _is_gone(error):
                raise
            return None
    return str(found["EndpointStatus"])


def extend(clients: AwsClients, ref: dict[str, Any], ends_s: float) -> None:
    """Move the schedule's time; AWS replaces a schedule as a whole."""
    handle, access = SageMakerEndpoint.load(ref), _access(clients, ref)
    doing = f"move the end of the endpoint {handle.name}"
    try:
        with api.answers(doing):
            client = api.client(access, "scheduler", patient=True)
            kept = {key: value for key, value in client.get_schedule(Name=handle.name).items() if key in _OWN}
    except UnreachableError as error:  # only a read: the end has not moved
        raise CloudtrainError(error.message, hint=error.hint) from error
    with api.answers(doing):
        try:
            client.update_schedule(**kept, ScheduleExpression=_at(ends_s))
        except Exception as error:
            if api.is_refusal(error):
                raise
            raise UnreachableError(f"AWS has not confirmed the end of {handle.name}: {error}") from error


def delete(clients: AwsClients, ref: dict[str, Any]) -> None:
    """Delete the endpoint, if present."""
    handle, access = SageMakerEndpoint.load(ref), _access(clients, ref)
    with api.answers(f"delete the endpoint {handle.name}"), _unless_gone():
        api.client(access, "sagemaker", patient=True).delete_endpoint(EndpointName=handle.name)


def discard(clients: AwsClients, ref: dict[str, Any]) -> bool:
    """Remove configuration and model, which AWS keeps; then the schedule, unless a late start has succeeded."""
    handle, access = SageMakerEndpoint.load(ref), _access(clients, ref)
    client, name = api.client(access, "sagemaker"), handle.name
    with api.answers(f"remove what is left of {name}"):
        with _unless_gone():
            client.delete_endpoint_config(EndpointConfigName=name)
        with _unless_gone():
            client.delete_model(ModelName=name)
        if state(clients, ref) is not None:
            return False
        with _unless_gone():
            api.client(access, "scheduler").delete_schedule(Name=name)
    return True


def _require(config: JobConfig, model: CheckedModel) -> str:
    """Return the scheduler's role. Raises ConfigError without a role, or without an image that serves."""
    faults, role = [], block_of(config).scheduler_role
    if role is None:
        hint = "a role that Scheduler may take on, with sagemaker:DeleteEndpoint: see docs/deploy.md"
        faults.append(Fault("no role to delete the endpoint at its end", "sagemaker.scheduler_role", hint=hint))
    if model.image is None and config.image is None:
        hint = "--image with an image in ECR that has cloudtrain and a program `serve`: see docs/deploy.md"
        faults.append(Fault("no image is named that serves a model", "image", hint=hint))
    if faults or role is None:
        raise ConfigError(faults)
    return role


def _schedule(wish: EndpointWish, role: str) -> dict[str, Any]:
    return {
        "Name": wish.name,
        "Description": f"The end of the endpoint {wish.name}, by cloudtrain deploy",
        "ScheduleExpression": _at(wish.ends_s),
        "ScheduleExpressionTimezone": "UTC",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ActionAfterCompletion": "DELETE",
        "Target": {
            "Arn": DELETE,
            "RoleArn": role,
            "Input": json.dumps({"EndpointName": wish.name}),
            "RetryPolicy": {"MaximumRetryAttempts": RETRIES, "MaximumEventAgeInSeconds": RETRY_S},
        },
    }


def _at(time_s: float) -> str:
    return time.strftime("at(%Y-%m-%dT%H:%M:%S)", time.gmtime(time_s))


def _access(clients: AwsClients, ref: dict[str, Any]) -> AwsAccess:
    handle = SageMakerEndpoint.load(ref)
    return AwsAccess(handle.region, handle.profile, tuple(sorted(handle.endpoints.items())), clients)


def _is_gone(error: Exception) -> bool:
    return api.code_of(error) in ("ValidationException", "ResourceNotFoundException", "ResourceNotFound") and any(
        words in str(error) for words in _GONE
    )


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not _is_gone(error):
            raise
