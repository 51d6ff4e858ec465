"""A job at SageMaker from the send on: the job, its lines, its files. A dry run does not import this module."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.contract import ParameterSecrets
from cloudtrain.launcher.backend import Chosen, Cursor, FoundAttempt, JobRef, LogPage, Request, Shipment
from cloudtrain.launcher.backend.accepted import Accepted
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UnreachableError, UsageError, refuse
from cloudtrain.launcher.job import platform_name
from cloudtrain.launcher.store.home import identity, known_identity
from cloudtrain.launcher.text import addresses
from cloudtrain.launcher.text.terminal import say_each

from ..cloud import as_faults, found_attempt, require_empty
from ..job_folder import claim_beside
from . import api, files, logs, status
from . import request as requests
from .api import AwsAccess, AwsClients
from .machine import block_of, region_of
from .records import SageMakerRef, SageMakerSending

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.job import State

MAX_SECRET_BYTES, SECRETS_A_CALL = 4096, 10  # of a standard parameter of AWS's store (SSM), and of its removal
_JOB_URI = re.compile(r"(?P<folder>s3://.+/jobs/(?P<job>[^/]+))/attempt-(?P<number>\d+)/")


def send(clients: AwsClients, request: Request, shipment: Shipment) -> JobRef:
    """Upload missing files, claim the job's name, and start the job. Raises as `Backend.send`."""
    plan, owner = SageMakerSending.load(request.sending), identity(shipment.home)
    access, handle = AwsAccess.of(plan, clients), _ref(request, owner)
    shipment.sending.prepares()
    with api.answers("look at the inputs"):  # before an upload of gigabytes
        others = [(name, uri) for name, uri in files.inputs_of(request.body) if name not in shipment.data]
        seen = [files.look(access, name, uri) for name, uri in others]
    refuse(as_faults(seen))
    files.put_bundle(access, shipment.bundle, plan.code_uri + requests.BUNDLE, default_of=plan.default_of)
    for name, pinned in shipment.data.items():
        root = plan.code_uri.rpartition("/code/")[0]
        files.of(access).fill(name, pinned, addresses.placed(root, pinned), shipment.base)
    say_each(f"{each.name}: {each.found}" for each in seen if each.verdict == "warn")
    files.of(access).claim(plan.owner_uri, owner)
    require_empty(partial(files.used, clients, handle), request.name, handle.checkpoint_uri, handle.output_uri)
    order = plan.order  # without the fields that only a send knows
    if isinstance(order.secrets, ParameterSecrets):
        order = replace(order, secrets=replace(order.secrets, prefix=handle.secrets_prefix))
    order = replace(order, token=secrets.token_hex(16), claim_uri=claim_beside(plan.owner_uri))
    order_json = order.dump() | {"record": dict(shipment.record)}
    files.of(access).put_order(plan.job_uri + requests.SPEC, order_json)
    try:
        if shipment.secrets:
            _put_secrets(access, handle.secrets_prefix, shipment.secrets)
        shipment.sending.creates()
        _create(access, request)
    except BaseException as error:
        if shipment.sending.is_nothing_sent(error):  # leave no part of the job behind
            with contextlib.suppress(CloudtrainError):
                files.of(access).retract(plan.job_uri + requests.SPEC)
                _remove_secrets(access, handle)
        raise
    return handle.dump()


def find(clients: AwsClients, request: Request, home: Path) -> JobRef | None:
    """Return the job that the request has started; else retract the order, so that a start under way fails.

    If another home folder, or no home folder, has claimed the name, no job was sent: return None and change nothing.
    """
    plan, owner = SageMakerSending.load(request.sending), identity(home)
    access, handle = AwsAccess.of(plan, clients), _ref(request, owner)
    with api.polls(access, f"ask for {request.name}"):
        if files.of(access).owner(plan.owner_uri) != owner:
            return None
        if not _is_ours(describe(access, request.name), request):
            files.of(access).retract(plan.job_uri + requests.SPEC)
            if not _is_ours(describe(access, request.name), request):
                _remove_secrets(access, handle)
                return None
    return handle.dump()


def supersede(clients: AwsClients, request: Request, number: int) -> int:
    """Refuse late starts of the request's attempt: by the claim, and without an order SageMaker starts no container."""
    plan = SageMakerSending.load(request.sending)
    folder = files.of(AwsAccess.of(plan, clients))
    return folder.supersede(claim_beside(plan.owner_uri), number, plan.job_uri + requests.SPEC)


def jobs(clients: AwsClients, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
    """Return the training jobs of the account and region that read a container order of cloudtrain."""
    block = block_of(config)
    if (region := region_of(block)) is None:
        raise ConfigError("no region to look for jobs in", hint="export AWS_REGION, or set sagemaker.region")
    access = AwsAccess(region, block.profile, tuple(sorted(block.endpoints.items())), clients)
    attempts = []
    with api.answers("list the training jobs"):
        lists = api.client(access, "sagemaker").get_paginator("list_training_jobs")
        for status_name in ("InProgress", "Stopping"):
            for page in lists.paginate(StatusEquals=status_name):
                attempts += [_as_found(access, each["TrainingJobName"], home) for each in page["TrainingJobSummaries"]]
    return [each for each in attempts if each is not None]


def _as_found(access: AwsAccess, name: str, home: Path) -> FoundAttempt | None:
    """Return the running job, or None for a foreign job: cloudtrain's orders are in jobs/NAME/attempt-NUMBER/."""
    described = describe(access, name) or {}
    channels = {each["ChannelName"]: each["DataSource"] for each in described.get("InputDataConfig", ())}
    uri = channels.get(requests.JOB, {}).get("S3DataSource", {}).get("S3Uri", "")
    match = _JOB_URI.fullmatch(uri)
    if match is None or name != platform_name(match["job"], int(match["number"])):
        return None
    record, owner = None, ""
    with contextlib.suppress(CloudtrainError):  # an unreadable bucket of another user must not hide the remaining jobs
        record = files.of(access).read_order(uri + requests.SPEC).get("record")
        owner = files.of(access).owner(match["folder"] + "/owner") or ""
    is_own = owner == known_identity(home)
    asked = {"region": access.region, "profile": access.profile, "endpoints": dict(access.endpoints)}

    def ref_of(request: Request) -> JobRef:  # only the sender removes the job's secrets
        handle = _ref(request, owner)
        return (handle if is_own else replace(handle, secrets=[])).dump()

    return found_attempt(name, record, asked, ref_of, is_own=is_own)


def state(clients: AwsClients, ref: JobRef) -> State:
    """Return the job's state at SageMaker; once the job is over, remove its secrets."""
    handle = SageMakerRef.load(ref)
    access = AwsAccess.of(handle, clients)
    with api.polls(access, f"ask for {handle.name}"):
        described = describe(access, handle.name)
        if described is None or "TrainingJobStatus" not in described:
            raise UnreachableError(f"SageMaker does not know {handle.name} in {access.region}", hint="another account?")
    has_checkpoint = False
    if status.is_over(described):  # failures of the extra requests must not hide the end
        if described["TrainingJobStatus"] != "Completed":
            with contextlib.suppress(CloudtrainError):
                has_checkpoint = files.of(access).has_checkpoint(handle.checkpoint_uri)
        with contextlib.suppress(CloudtrainError):
            _remove_secrets(access, handle)
    found = status.state_of(described, handle.limit_reason, has_checkpoint=has_checkpoint)
    hourly_usd = (handle.hourly_usd or {}).get(described["ResourceConfig"].get("SelectedInstanceType", ""))
    return found if hourly_usd is None else replace(found, hourly_usd=hourly_usd * handle.nodes)


def accepted(clients: AwsClients, request: Request, handle: SageMakerRef) -> Accepted:
    """Return SageMaker's description of the job with its tags, beside the request."""
    access = AwsAccess.of(handle, clients)
    with api.polls(access, f"ask for {handle.name}"):
        there = describe(access, handle.name) or {}
        tags = api.client(access, "sagemaker").list_tags(ResourceArn=there["TrainingJobArn"])["Tags"]
    words = tuple(move["Status"] for move in there.get("SecondaryStatusTransitions", ()))
    return Accepted(request.body, {**there, "Tags": tags, "ResponseMetadata": None}, words)


def lines(clients: AwsClients, ref: JobRef, cursor: Cursor | None, nodes: Chosen, *, now: bool) -> LogPage:
    """Return the nodes' lines after the cursor, of all nodes if `nodes` is None; `now` makes no difference."""
    handle = SageMakerRef.load(ref)
    return logs.page(AwsAccess.of(handle, clients), handle.name, handle.nodes, cursor, nodes)


def stop(clients: AwsClients, ref: JobRef, *, now: bool) -> None:
    """Ask SageMaker to stop the job: the containers get a signal, save, and are killed after 120 s, also with `now`."""
    handle = SageMakerRef.load(ref)
    access = AwsAccess.of(handle, clients)
    with api.answers(f"stop {handle.name}"):
        try:
            api.client(access, "sagemaker").stop_training_job(TrainingJobName=handle.name)
        except Exception as error:
            described = describe(access, handle.name) if api.code_of(error) == "ValidationException" else None
            if described is None or described["TrainingJobStatus"] == "InProgress":
                raise


def _ref(request: Request, owner: str) -> SageMakerRef:
    body, plan = request.body, SageMakerSending.load(request.sending)
    order = plan.order
    source = order.secrets if isinstance(order.secrets, ParameterSecrets) else ParameterSecrets("", "")
    return SageMakerRef.of(
        plan,
        name=request.name,
        nodes=order.job.nodes,
        nproc_per_node=order.job.nproc_per_node,
        limit_reason=order.limit_reason,
        checkpoint_uri=body["CheckpointConfig"]["S3Uri"].rstrip("/"),
        output_uri=body["OutputDataConfig"]["S3OutputPath"],
        secrets_prefix=f"{source.prefix}-{owner[:8]}",  # a job of another machine may have the same name
        secrets=list(source.names),
    )


def _put_secrets(access: AwsAccess, prefix: str, values: Mapping[str, str]) -> None:
    """Store the values as encrypted parameters below the prefix. Raises ConfigError if a value is too long."""
    for name, value in values.items():
        if len(value.encode()) > MAX_SECRET_BYTES:
            message = f"the secret `{name}` has more than the {MAX_SECRET_BYTES} bytes that SSM takes"
            raise ConfigError(message, key="secrets", hint="put it into a file of your own in S3")
    client = api.client(access, "ssm")
    with api.answers("store the job's secrets with SSM"):
        for name, value in values.items():
            client.put_parameter(Name=f"{prefix}/{name}", Value=value, Type="SecureString", Overwrite=True)


def _remove_secrets(access: AwsAccess, handle: SageMakerRef) -> None:
    """Remove the parameters that exist."""
    paths = [f"{handle.secrets_prefix}/{name}" for name in handle.secrets]
    with api.answers("remove the job's secrets from SSM"):
        for at in range(0, len(paths), SECRETS_A_CALL):
            api.client(access, "ssm").delete_parameters(Names=paths[at : at + SECRETS_A_CALL])


def _create(access: AwsAccess, request: Request) -> None:
    """Send the request. If an answer is missing, even to the SDK's first try only, look whether the job exists."""
    with api.answers("start the training job"):
        try:
            api.client(access, "sagemaker", patient=True).create_training_job(**request.body)
        except Exception as error:
            code = api.code_of(error)
            if code != "ResourceInUse" and api.is_refusal(error):
                raise
            described = describe(access, request.name)
            if described is not None and not _is_ours(described, request):
                message = f"there is a training job {request.name} of another user or machine in this account"
                raise UsageError(message, hint="choose another --name") from error
            if described is None:
                raise


def _is_ours(described: dict[str, Any] | None, request: Request) -> bool:
    """Return whether the job is the request's: its order is in the folder that this home folder has claimed."""
    if described is None:
        return False
    theirs = (channel["DataSource"]["S3DataSource"]["S3Uri"] for channel in described.get("InputDataConfig", ()))
    return SageMakerSending.load(request.sending).job_uri in theirs


def describe(access: AwsAccess, name: str) -> dict[str, Any] | None:
    """Return DescribeTrainingJob's answer, or None if no such job exists."""
    try:
        answer: dict[str, Any] = api.client(access, "sagemaker").describe_training_job(TrainingJobName=name)
    except Exception as error:
        if api.code_of(error) in ("ValidationException", "ResourceNotFound") and "not found" in str(error).lower():
            return None
        raise
    return answer
