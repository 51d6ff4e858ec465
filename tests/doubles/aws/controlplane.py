"""SageMaker's operations on training jobs, and the list of quotas."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends

from doubles.aws import training, validate
from doubles.aws.jobs import ACCOUNT, Job, described, summary
from doubles.aws.wire import AwsError, Call
from doubles.aws.world import World
from doubles.kit import capacity
from doubles.kit.differences import ANSWER, REQUEST

MAX_LISTED = 10  # default page size; API reference
QUOTA = 10_000.0  # value of every service quota that a test has not set by name
UNSERVED = ("InstanceGroups", "TensorBoardOutputConfig", "CompressionType", "ShardedByS3Key")
_LISTED = {"StatusEquals", "SortBy", "SortOrder", "NextToken", "MaxResults"}
_NOT_FOUND = "Requested resource not found."

Params = dict[str, Any]


def sagemaker(world: World, call: Call) -> Params:
    """Return the answer of a call to SageMaker. Raises AwsError."""
    actions: dict[str, Callable[[World, Call], Params]] = {
        "CreateTrainingJob": _create,
        "DescribeTrainingJob": lambda world, call: described(_job(world, call)),
        "ListTrainingJobs": _list,
        "StopTrainingJob": _stop,
        "ListTags": _tags,
    }
    return _execute(actions, world, call)


def quotas(world: World, call: Call) -> Params:
    """Return the answer of a call to Service Quotas. Raises AwsError."""
    return _execute({"ListServiceQuotas": _list_quotas}, world, call)


def _execute(actions: dict[str, Callable[[World, Call], Params]], world: World, call: Call) -> Params:
    if call.operation not in actions:
        raise AwsError("UnknownOperationException", f"the stand-in has no {call.service}:{call.operation}")
    validate.check(call.service, call.operation, call.params)
    call = replace(call, params=world.changes.applied(call.names, REQUEST, call.params))
    answer: Params = world.changes.applied(call.names, ANSWER, actions[call.operation](world, call))
    return answer


def _create(world: World, call: Call) -> Params:
    request = call.params
    validate.check_rules(request, call.region)
    unserved = [word for word in UNSERVED if f'"{word}"' in json.dumps(request)]
    if world.settings.execute and unserved:
        raise AwsError("ValidationException", f"the stand-in does not execute {unserved[0]}")
    _require_role(request["RoleArn"])
    tags = {tag["Key"]: tag["Value"] for tag in request.get("Tags", ())}
    job = Job(name=request["TrainingJobName"], region=call.region, request=request, created=time.time(), tags=tags)
    row = _row(world, job)
    with world.lock:
        if row is not None and world.job(job.name, call.region) is None:
            _require_machines(job, row)
        if not world.add(job):
            message = (
                "Training job names must be unique within an AWS account and region, and a training job with this name "
                f"already exists ({job.arn})"
            )
            raise AwsError("ResourceInUse", message)
    training.begin(world, job)
    if row is not None:
        world.capacity.answer(row)
    return {"TrainingJobArn": job.arn}


def _row(world: World, job: Job) -> capacity.Row | None:
    """Return the row that decides the job's create, and select the first type of a list that has machines.

    One type without quota refuses the whole list. Without machines of any type, the job is created and fails.
    """
    kinds = [each["InstanceType"] for each in job.preferences] or job.instance_types[:1]
    rows = {kind: world.capacity.take(job.region, kind, spot=job.is_spot) for kind in kinds}
    if not job.preferences:
        return next(iter(rows.values()), None)
    chosen = next((kind for kind, row in rows.items() if row.has in (capacity.MACHINES, capacity.LATE)), kinds[0])
    short = next((kind for kind, row in rows.items() if row.has == capacity.NO_QUOTA), None)
    job.selected = short or chosen
    row = rows[job.selected]
    return replace(row, has=capacity.FAILED) if row.has == capacity.NO_STOCK else row


def _require_machines(job: Job, row: capacity.Row) -> None:
    """Raise AwsError without quota or stock. SageMaker documents no refusal for want of stock: its code is assumed."""
    kind, count = job.instance_types[0], len(job.instance_types)
    job.has = row.has
    if row.has == capacity.NO_QUOTA:
        message = (
            f"The account-level service limit '{kind} for {'spot ' if job.is_spot else ''}training job usage' is 0 "
            f"Instances, with current utilization of 0 Instances and a request delta of {count} Instances. Please use "
            "AWS Service Quotas to request an increase for this quota. If AWS Service Quotas is not available, contact "
            "AWS support to request an increase for this quota."
        )
        raise AwsError("ResourceLimitExceeded", message)
    if row.has == capacity.NO_STOCK:
        raise AwsError("CapacityError", training.NO_CAPACITY.partition(": ")[2])


def _require_role(arn: str) -> None:
    """Raise AwsError unless SageMaker may assume the role; an account without any role is not checked."""
    if arn.split(":")[4] != ACCOUNT:
        raise AwsError("ValidationException", "RoleArn: Cross-account pass role is not allowed.")
    roles = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].roles
    if not roles:
        return
    role = next((one for one in list(roles.values()) if one.arn == arn), None)
    if role is not None and "sagemaker.amazonaws.com" in json.dumps(role.assume_role_policy_document):
        return
    message = (
        f"Could not assume role {arn}. Please ensure that the role exists and allows principal "
        f"'sagemaker.amazonaws.com' to assume the role."
    )
    raise AwsError("ValidationException", message)


def _job(world: World, call: Call) -> Job:
    job = world.job(call.params["TrainingJobName"], call.region)
    if job is None:
        raise AwsError("ValidationException", _NOT_FOUND)
    return job


def _tags(world: World, call: Call) -> Params:
    with world.lock:
        job = next((one for one in world.jobs.values() if one.arn == call.params["ResourceArn"]), None)
    if job is None:
        raise AwsError("ResourceNotFound", _NOT_FOUND)
    return {"Tags": [{"Key": key, "Value": value} for key, value in job.tags.items()]}


def _stop(world: World, call: Call) -> Params:
    job = _job(world, call)
    with job.changed:
        if job.status != "InProgress":
            message = f"The request was rejected because the training job is in status {job.status}."
            raise AwsError("ValidationException", message)
        job.enter_secondary("Stopping", "Stopping the training job", "Stopping")
        job.order("stop")
    return {}


def _list(world: World, call: Call) -> Params:
    asked = call.params
    order = asked.get("SortBy", "CreationTime"), asked.get("SortOrder", "Ascending")
    if set(asked) - _LISTED or order != ("CreationTime", "Ascending"):
        raise AwsError("ValidationException", f"the stand-in's list knows no {asked}")
    with world.lock:
        found = [job for job in world.jobs.values() if job.region == call.region]
    found = [job for job in found if asked.get("StatusEquals", job.status) == job.status]
    return _page("TrainingJobSummaries", [summary(job) for job in found], asked, MAX_LISTED)


def _page(key: str, found: list[Params], asked: Params, size: int) -> Params:
    start = int(asked.get("NextToken", 0))
    end = start + asked.get("MaxResults", size)
    return {key: found[start:end], **({"NextToken": str(end)} if end < len(found) else {})}


def _list_quotas(world: World, call: Call) -> Params:
    return _page("Quotas", _all_quotas(world) if call.params["ServiceCode"] == "sagemaker" else [], call.params, 100)


def _all_quotas(world: World) -> list[Params]:
    """Return a quota for every type, on demand and spot, and the quotas set by a test. The codes are invented."""
    kinds = ("training job", "spot training job")
    types = validate.enumeration("sagemaker", "TrainingInstanceType")
    names = {f"{instance_type} for {kind} usage" for instance_type in types for kind in kinds} | set(world.quotas)
    return [
        {
            "ServiceCode": "sagemaker",
            "ServiceName": "Amazon SageMaker",
            "QuotaName": name,
            "QuotaCode": f"L-{hashlib.sha256(name.encode()).hexdigest()[:8].upper()}",
            "Value": float(world.quotas.get(name, QUOTA)),
            "Unit": "None",
            "Adjustable": True,
            "GlobalQuota": False,
        }
        for name in sorted(names)
    ]
