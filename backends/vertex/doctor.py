"""Checks for a Vertex AI job: credentials, project, bucket, log, machines, secrets, price."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

from cloudtrain.entrypoints.stores.store import in_bucket
from cloudtrain.launcher.backend import Check
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import CloudtrainError, UnreachableError
from cloudtrain.launcher.metering.rate import Quote
from cloudtrain.launcher.prices.refreshing import compared

from ..cloud import unasked
from . import api, files, jobs, logs, prices_list
from .api import Google, GoogleError, VertexAccess
from .machine import MachineChoice, block_of, choose, kind_of, place_of, project_of, region_of
from .prices import rate_kind


def checks(google: Google, config: JobConfig | None) -> list[Check]:
    """Return the checks; with a config, also the checks of its job."""
    block = block_of(config)
    project, location = project_of(block), region_of(block)
    if project is None or location is None:
        missing = "project" if project is None else "location"
        cure = "set vertex.project and vertex.location in the config, and name it: doctor vertex -f FILE"
        return [Check("project", "fail", f"no {missing} is known", cure)]
    access = VertexAccess(project, location, tuple(sorted(block.endpoints.items())), google)
    found = [_tried("credentials", _signed_in, access)]
    if found[0].verdict == "fail":  # without credentials, every later check would fail
        return [*found, *unasked("Vertex AI, Cloud Logging, bucket, secrets, price", config, place_of, choose)]
    found.append(_tried("Vertex AI", _jobs, access))
    found.append(_tried("Cloud Logging", _log, access))
    return found if config is None else [*found, *_of_job(config, access)]


def _of_job(config: JobConfig, access: VertexAccess) -> Iterator[Check]:
    block = block_of(config)
    try:
        place, choice, kind = place_of(config), choose(config), kind_of(config)
    except CloudtrainError as error:
        yield Check.failed("config", error)
        return
    yield _tried("bucket", _bucket, access, place.root)
    if block.persistent_resource is not None:
        yield _tried("persistent resource", _persistent, access, block.persistent_resource, choice)
    if config.secrets:
        yield _tried("secrets", _secrets, access)
    attached = (choice.accelerator, choice.count) if choice.label != choice.machine_type else (None, 0)

    def quotes() -> list[Quote]:
        listed = prices_list.listed(access)
        return [prices_list.of_machine(listed, choice.machine_type, *attached, way) for way in prices_list.WAYS]

    yield compared(quotes, choice.machine.rates, rate_kind(kind))


def _tried(name: str, ask: Callable[..., Check], *args: Any) -> Check:
    """Return the check's result, or a failed check with the error's message and hint."""
    try:
        with api.answers("look"):
            return ask(*args)
    except UnreachableError as error:
        return Check(name, "warn", error.message, "try again")
    except CloudtrainError as error:
        return Check.failed(name, error)


def _signed_in(access: VertexAccess) -> Check:
    account = access.google.login(access.project).account()
    return Check("credentials", "ok", f"{account}, for the project {access.project}")


def _jobs(access: VertexAccess) -> Check:
    api.get_json(access, "aiplatform", f"/v1/{access.parent}/customJobs", {"pageSize": "1"})
    return Check("Vertex AI", "ok", f"custom jobs of {access.project} in {access.location} can be seen")


def _log(access: VertexAccess) -> Check:
    with api.answers("read the log", needs="Logs Viewer (roles/logging.viewer)"):
        logs.lists(access, f"{logs.query_of('0', None)} AND {logs.since(4e9)}", "", {})
    return Check("Cloud Logging", "ok", "jobs' lines can be read")


def _bucket(access: VertexAccess, root: str) -> Check:
    """Write an object and remove it: only a write proves the permission to write."""
    bucket, uri = in_bucket(root)[0], f"{root}/doctor-{secrets.token_hex(4)}"
    with api.answers(f"write to the bucket {bucket}", needs=files.ROLE):
        where = files.region_of(access, root)
        files.of(access).put_order(uri, {})
        files.of(access).retract(uri)
    if where is None:  # a role may allow writing objects and forbid reading the bucket's metadata
        return Check("bucket", "ok", f"{root} can be written")
    region = access.location.partition("-")[0]
    if where not in (access.location, {"us": "us", "europe": "eu", "asia": "asia"}.get(region)):
        cure = f"take one in {access.location}: checkpoints and data cross regions, which costs time and money"
        return Check("bucket", "warn", f"{bucket} is in {where}, the job in {access.location}", cure)
    return Check("bucket", "ok", f"{root} in {where}")


def _persistent(access: VertexAccess, name: str, choice: MachineChoice) -> Check:
    try:
        answer = api.get_json(access, "aiplatform", f"/v1/{access.parent}/persistentResources/{name}")
    except GoogleError as error:
        if error.status != 404:
            raise
        return Check("persistent resource", "fail", f"there is no `{name}`", "fix vertex.persistent_resource")
    types = [str((pool.get("machineSpec") or {}).get("machineType")) for pool in answer.get("resourcePools", ())]
    if choice.machine_type not in types:
        cure = f"its machines and the job's must be the same, not {choice.machine_type}: fix resources"
        return Check("persistent resource", "fail", f"{name} has {', '.join(types)}", cure)
    if answer.get("state") != "RUNNING":
        return Check("persistent resource", "warn", f"{name} is {answer.get('state')}", "look at it in the console")
    return Check("persistent resource", "ok", f"{name}: {', '.join(types)}")


def _secrets(access: VertexAccess) -> Check:
    secret = f"projects/{access.project}/secrets/cloudtrain-doctor-{secrets.token_hex(4)}"
    with api.answers("store secrets in Secret Manager", needs=jobs.SECRETS_ROLE):
        jobs.put_secrets(access, secret, {})
        jobs.remove_secrets(access, secret)
    need = "the job's service account needs the role Secret Manager Secret Accessor"
    return Check("secrets", "ok", f"Secret Manager of {access.project}; {need}")
