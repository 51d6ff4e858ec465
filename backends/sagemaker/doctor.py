"""Checks for a SageMaker job, by calls to AWS: credentials, role, bucket, quota, price, image."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote

from cloudtrain.launcher.backend import Check
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.metering.rate import Machine
from cloudtrain.launcher.prices.refreshing import compared
from cloudtrain.launcher.text import addresses

from ..cloud import tried, unasked
from . import api, files, prices, request_images
from .api import AwsAccess, AwsClients
from .block import SageMaker
from .machine import block_of, choices, choose, place_of, region_of

SERVICE = "sagemaker.amazonaws.com"
MAX_ROLES = 5  # the most suitable roles that a check lists
_tried = partial(tried, api.answers)


def checks(clients: AwsClients, config: JobConfig | None) -> list[Check]:
    """Return the checks; with a config, also the checks of its job."""
    block = block_of(config)
    try:
        region = region_of(block)
    except CloudtrainError as error:
        return [Check.failed("region", error)]
    if region is None:
        return [Check("region", "fail", "none", "export AWS_REGION, or set sagemaker.region")]
    access = _access(clients, block, region)
    found = [Check("region", "ok", region), _tried("credentials", _identity, access)]
    if found[-1].verdict == "fail":  # without credentials, every later check would fail
        return [*found, *unasked("role, bucket, quota, price", config, place_of, choose)]
    if config is None or block.role is None:
        return [*found, _tried("roles", _roles, access)]
    return [*found, *_of_job(config, access)]


def _of_job(config: JobConfig, access: AwsAccess) -> Iterator[Check]:
    try:
        place, machine = place_of(config), choose(config)
    except CloudtrainError as error:
        yield Check.failed("config", error)
        return
    yield _tried("role", _role, access, place.role)
    yield _tried("bucket", partial(_bucket, is_default=block_of(config).bucket is None), access, place.bucket)
    for each in choices(config):  # SageMaker refuses a list if the quota of one type is short
        yield _tried("quota", _quota, access, each, config)
    types = (machine.instance_type,)
    yield compared(lambda: prices.quotes(access.clients, config, access.region, types), machine.rates)
    yield _image(config, access.region, machine)
    for name, uri in config.inputs.items():
        if addresses.in_bucket(uri, "s3") is None:
            yield _tried(f"input {name}", files.look, access, name, addresses.explicit(uri))


def _identity(access: AwsAccess) -> Check:
    return Check("credentials", "ok", api.client(access, "sts").get_caller_identity()["Arn"])


def _roles(access: AwsAccess) -> Check:
    """Return the roles that a job can assume, for a user who has not chosen a role yet."""
    pages = api.client(access, "iam").get_paginator("list_roles").paginate()
    found = [role["Arn"] for page in pages for role in page["Roles"] if _trusts(role["AssumeRolePolicyDocument"])]
    if not found:
        return Check("roles", "fail", f"no role trusts {SERVICE}", "create one, as in docs/tutorials/sagemaker.md")
    more = f" and {len(found) - MAX_ROLES} more" if len(found) > MAX_ROLES else ""
    return Check("roles", "ok", f"can be sagemaker.role: {', '.join(found[:MAX_ROLES])}{more}")


def _role(access: AwsAccess, arn: str) -> Check:
    name = arn.rpartition("/")[2]
    try:
        role = api.client(access, "iam").get_role(RoleName=name)["Role"]
    except Exception as error:
        if api.code_of(error) == "NoSuchEntity":
            others = _roles(access)
            cure = "; ".join(filter(None, (others.found, others.cure)))
            return Check("role", "fail", f"there is no role {name}", cure)
        if api.code_of(error) in ("AccessDenied", "AccessDeniedException"):
            return Check("role", "warn", f"{arn}, which your credentials may not read", "nothing, if it works")
        raise
    if role["Arn"] != arn:
        return Check("role", "fail", f"{arn} is of another account, or path, than {role['Arn']}", "fix sagemaker.role")
    if not _trusts(role["AssumeRolePolicyDocument"]):
        return Check("role", "fail", f"{arn} does not trust {SERVICE}", "add it to the role's trust policy")
    return Check("role", "ok", arn)


def _trusts(policy: Any) -> bool:
    """Return whether the trust policy names SageMaker."""
    document = json.loads(unquote(policy)) if isinstance(policy, str) else policy
    return any(
        statement.get("Effect") == "Allow" and SERVICE in str(statement.get("Principal", {}).get("Service", ""))
        for statement in document.get("Statement", ())
        if isinstance(statement.get("Principal"), dict)
    )


def _bucket(access: AwsAccess, bucket: str, *, is_default: bool) -> Check:
    try:
        answer = api.client(access, "s3").head_bucket(Bucket=bucket)
    except Exception as error:
        code = api.code_of(error)
        if code in ("404", "NoSuchBucket") and is_default:
            return Check("bucket", "ok", f"{bucket} is not there yet; the first submit makes it")
        if code in ("404", "NoSuchBucket"):
            return Check("bucket", "fail", f"there is no bucket {bucket}", f"aws s3 mb s3://{bucket}")
        if code == "403":
            return Check("bucket", "fail", f"{bucket} is not yours to use", "fix sagemaker.bucket")
        raise
    region = answer.get("BucketRegion") or access.region
    if region != access.region:
        return Check("bucket", "fail", f"{bucket} is in {region}, the job in {access.region}", "fix sagemaker.bucket")
    return Check("bucket", "ok", bucket)


def short_quota(clients: AwsClients, config: JobConfig) -> str:
    """Return the quota that is too small for each type of the config, in words; "" if none is known to be."""
    block = block_of(config)
    with contextlib.suppress(CloudtrainError), api.answers("look at the quota"):
        if region := region_of(block):
            found = [_quota(_access(clients, block, region), each, config) for each in choices(config)]
            return found[0].found if all(each.verdict == "fail" for each in found) else ""
    return ""


def _access(clients: AwsClients, block: SageMaker, region: str) -> AwsAccess:
    return AwsAccess(region, block.profile, tuple(sorted(block.endpoints.items())), clients)


def _quota(access: AwsAccess, machine: Machine, config: JobConfig) -> Check:
    name = f"{machine.instance_type} for {'spot ' if config.resources.spot else ''}training job usage"
    needed = config.resources.instances
    pages = api.client(access, "service-quotas").get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
    value = next((quota["Value"] for page in pages for quota in page["Quotas"] if quota["QuotaName"] == name), None)
    if value is None:
        return Check("quota", "warn", f"Service Quotas does not list `{name}`", "look there, in the console")
    if value < needed:
        found = f"{value:.0f} instances of `{name}`, the job takes {needed}"
        return Check("quota", "fail", found, "ask for more at Service Quotas; it may take days")
    return Check("quota", "ok", f"{value:.0f} instances of `{name}`")


def _image(config: JobConfig, region: str, machine: Machine) -> Check:
    """Return the image; for a default image, also the SDK's own table, if the SDK is installed."""
    if config.image is not None:
        return Check("image", "ok", f"{config.image} (yours; whether it can be pulled only a job can tell)")
    ours, since = request_images.default_image(region, machine.count), f"AWS's, as of {request_images.IMAGES_AS_OF}"
    try:
        newest = request_images.newest_of_sdk(region, machine.instance_type)
    except CloudtrainError as error:
        return Check("image", "warn", f"{ours} ({since}); {error.message}", error.hint)
    if newest is None:
        return Check("image", "ok", f"{ours} ({since})")
    registry = newest.partition("/")[0]
    if registry != ours.partition("/")[0]:
        found = f"{ours} ({since}), but the SDK looks for AWS's images of {region} at {registry}"
        return Check("image", "warn", found, f"if it cannot be pulled: image: {newest}")
    return Check("image", "ok", f"{ours} ({since}; the SDK's newest is {newest.partition('/')[2]})")
