"""A job at Azure ML from the send on: the run, its lines, its files. A dry run does not import this module."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import secrets
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.stores import claims
from cloudtrain.launcher.backend import Chosen, Cursor, FoundAttempt, JobRef, LogPage, Request, Shipment
from cloudtrain.launcher.backend.accepted import Accepted
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UnreachableError, UsageError, refuse
from cloudtrain.launcher.prices import catalog
from cloudtrain.launcher.store.home import identity, known_identity
from cloudtrain.launcher.text.terminal import say

from ..cloud import as_faults, found_attempt, require_empty
from ..http import object_in
from ..job_folder import JobFolder
from . import api, files, machine_cluster, status
from . import logs as streams
from .api import Azure, AzureAccess
from .machine import block_of, workspace_of
from .records import AzureMLRef, AzureMLSending
from .status import RunHistory

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.job import State

VAULT_VERSION = "7.4"
VAULT_ROLE = "Key Vault Secrets Officer on the workspace's key vault"
MAX_SECRET_BYTES = 25_000  # of one entry
OWNER, RECORD = "cloudtrain.owner", "CLOUDTRAIN_RECORD"
RECORD_BYTES = 65_536  # of a variable; a job with a larger record can be listed, but not adopted
JOB_VERSION = "2024-01-01-preview"  # for GET and cancel; the SDK's PUT has a version of its own
TRIES, AGAIN_S = 3, 30.0  # retries of a send; no retry after AGAIN_S
WORKERS = 8
LONG_OVER_S = 600.0  # since a run's end: then an unreadable log no longer delays the result
SETTLE_S = 5.0  # until a request whose sender has died becomes visible


def send(azure: Azure, request: Request, shipment: Shipment) -> JobRef:
    """Check the compute and the datastore, send the job, and return its handle. Raises as `Backend.send`."""
    from .request import SENT, encoded  # few users of this module need the functions

    plan, owner = AzureMLSending.load(request.sending), identity(shipment.home)
    access = AzureAccess(plan.workspace, azure)
    shipment.sending.prepares()
    with api.answers("start the job"):
        there = describe(access, request.name)
        if there is not None:  # an earlier try's job, whose answer was lost
            return _found(access, request, _services_of_ours(request, there, owner)).dump()
        idle_s = machine_cluster.require(access, plan)
        files.datastore_of(access, plan.datastore)
        given = request.body.get("inputs", {}).items()  # looked at before an upload of gigabytes
        others = {name: each for name, each in given if isinstance(each, Mapping) and name not in shipment.data}
        refuse(as_faults(files.look(access, name, each) for name, each in others.items()))
        _send_data(azure, plan, request, shipment)
        require_empty(partial(files.used, azure, plan), request.name, plan.checkpoint_uri, plan.output_uri)
        claim_uri = f"{files.location(access, _claimed(plan))[0].uri}/{claims.NAME}"
        sent: dict[str, Any] = {"token": secrets.token_hex(16), "sent_s": time.time(), "claim_uri": claim_uri}
        if shipment.secrets:
            sent["vault"] = vault_url(access, request.name)
    try:
        if shipment.secrets:
            with api.answers("store the job's secrets in the key vault", needs=VAULT_ROLE):
                put_secrets(access, sent["vault"], shipment.secrets)
        job = {
            **request.body,
            "tags": {**request.body.get("tags", {}), OWNER: owner},
            "environment_variables": {
                **request.body["environment_variables"],
                SENT: encoded(sent),
                **_kept(shipment.record),
            },
        }
        services = _create(access, request, shipment, job, owner)
    except BaseException as error:
        if shipment.sending.is_nothing_sent(error):  # leave no secret behind
            _remove_secrets(access, sent.get("vault"))
        raise
    return _ref(request, services, idle_s, sent.get("vault")).dump()


def _send_data(azure: Azure, plan: AzureMLSending, request: Request, shipment: Shipment) -> None:
    """Upload the inputs that go along, unless `raw` names another place. Raises ConfigError, CredentialError."""
    for name, pinned in shipment.data.items():
        place = str(request.body["inputs"][name]["path"])
        root, at, _ = place.partition(f"/{pinned.rpartition(':')[2]}/")
        fill = partial(JobFolder.fill, name=name, pinned=pinned, place=place, base=shipment.base)
        if at:
            files.used(azure, plan, root, "", fill, needs=files.WRITER)


def find(azure: Azure, request: Request, home: Path) -> JobRef | None:
    """Return the job that the request has started, or None if no such job belongs to this home folder.

    Azure cannot be told to refuse a name, so a request under way gets SETTLE_S to arrive.
    """
    plan, owner = AzureMLSending.load(request.sending), identity(home)
    access = AzureAccess(plan.workspace, azure)
    with api.polls(f"ask for {request.name}"):
        there = describe(access, request.name)
        if there is None:
            time.sleep(SETTLE_S)
            there = describe(access, request.name)
        if there is None and plan.secrets:
            remove_secrets(access, vault_url(access, request.name))
        if there is None or not _is_ours(there, owner):
            return None
        return _found(access, request, _services(there)).dump()


def supersede(azure: Azure, request: Request, number: int) -> int:
    """Refuse late starts of the request's attempt, by the claim in its checkpoint folder, which Azure mounts."""
    plan = AzureMLSending.load(request.sending)
    raise_claim = partial(JobFolder.supersede, uri=f"/{claims.NAME}", number=number)
    return files.used(azure, plan, _claimed(plan), f"give up {request.name}", raise_claim, needs=files.WRITER)


def _claimed(plan: AzureMLSending) -> str:
    """Return the folder with the claim: a mount shows it to a job whose identity has no right on the store."""
    return plan.checkpoint_uri or plan.output_uri


def jobs(azure: Azure, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
    """Return the running jobs of the workspace with our tag."""
    access, attempts = AzureAccess(workspace_of(block_of(config)), azure), []
    with api.answers("list the jobs"):
        page = api.get_json(access, "/jobs", version=JOB_VERSION, tag="cloudtrain.job")
        while True:
            there = (job for job in page["value"] if job["properties"].get("status") not in status.OVER)
            attempts += [_as_found(access, job, home) for job in there]
            if not page.get("nextLink"):
                return [each for each in attempts if each is not None]
            page = object_in(access.call("GET", page["nextLink"]))


def _as_found(access: AzureAccess, job: dict[str, Any], home: Path) -> FoundAttempt | None:
    """Return the running job, with its record from a variable, or None if its name names no attempt."""
    properties, record, name = job["properties"], None, str(job["name"])
    if not name.rpartition("-")[2].isdigit():
        return None
    with contextlib.suppress(ValueError, LookupError, zlib.error):
        record = json.loads(zlib.decompress(base64.b64decode(properties["environmentVariables"][RECORD])))
    owner = (properties.get("tags") or {}).get(OWNER)
    is_own = owner is not None and owner == known_identity(home)

    def ref_of(request: Request) -> JobRef:  # only the sender removes the job's secrets
        handle = _found(access, request, _services(job))
        return (handle if is_own else replace(handle, vault=None)).dump()

    with contextlib.suppress(api.AzureError):  # about the machines; the job can be listed without them
        return found_attempt(name, record, {"workspace": access.workspace.dump()}, ref_of, is_own=is_own)
    return found_attempt(name, None, {}, ref_of, is_own=is_own)


def _kept(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable with the record, without the body, since the platform has a copy; {} beyond RECORD_BYTES."""
    data = {**record, "request": {**record["request"], "body": {}}} if record else {}
    value = base64.b64encode(zlib.compress(json.dumps(data).encode())).decode()
    return {RECORD: value} if data and len(value) <= RECORD_BYTES else {}


def state(azure: RunHistory, ref: JobRef) -> State:
    """Return the job's state at Azure."""
    handle = AzureMLRef.load(ref)
    access = AzureAccess(handle.workspace, azure)
    answer = azure.details(handle.workspace, _root_of(access, ref, handle), handle.name)
    account, has_checkpoint = None, None
    if answer.is_over and answer.status != "Completed":
        account = _account(azure, answer)
        if account is None and status.may_report_more(answer):
            return status.awaiting(answer, handle.studio)
        if (uri := handle.checkpoint_uri) is not None:
            with contextlib.suppress(Exception):  # a failed extra request must not hide the end
                has_checkpoint = files.used(azure, handle, uri, "", lambda folder: folder.has_checkpoint(uri))
    if answer.is_over:
        _remove_secrets(access, handle.vault)
    outcome = status.state_of(
        answer,
        account,
        limit_s=handle.limit_s,
        limit_reason=handle.limit_reason,
        has_checkpoint=has_checkpoint,
        idle_s=handle.idle_s,
    )
    return replace(outcome, url=handle.studio, hourly_usd=_hourly_usd(answer, handle))


def accepted(azure: RunHistory, request: Request, handle: AzureMLRef) -> Accepted:
    """Return the job of the control plane, beside the body that the SDK made of the request."""
    from .request_body import body_of

    with api.polls(f"ask for {handle.name}"):
        there = describe(AzureAccess(handle.workspace, azure), handle.name) or {"properties": {}}
    sent = re.sub(r"\{\w+\}", "{}", json.dumps(body_of(request.body, handle.workspace.arm_id)))
    return Accepted(json.loads(sent), there, (str(there["properties"].get("status")),))


def lines(azure: RunHistory, ref: JobRef, cursor: Cursor | None, nodes: Chosen, *, now: bool) -> LogPage:
    """Return the nodes' lines after the cursor, of all nodes if `nodes` is None; `now` makes no difference."""
    handle = AzureMLRef.load(ref)
    root = _root_of(AzureAccess(handle.workspace, azure), ref, handle)
    ask = partial(azure.details, handle.workspace, root, handle.name)
    page = streams.page(azure, ask, handle.nodes, cursor, nodes)
    if page.lines:
        azure.heard(handle.name)
    return page


def stop(azure: RunHistory, ref: JobRef, *, now: bool) -> None:
    """Ask Azure to cancel the job: the containers get a signal, save, and are killed later, with `now` or without."""
    handle = AzureMLRef.load(ref)
    access = AzureAccess(handle.workspace, azure)
    with api.answers(f"stop {handle.name}"):
        try:
            api.arm(access, "POST", f"/jobs/{handle.name}/cancel", version=JOB_VERSION)
        except api.AzureError as error:
            there = describe(access, handle.name) if error.status in (400, 409) else None
            if there is None or there["properties"].get("status") not in status.OVER:
                raise


def _found(access: AzureAccess, request: Request, services: dict[str, Any]) -> AzureMLRef:
    """Return the handle of a job that was sent before. Raises AzureError."""
    plan = AzureMLSending.load(request.sending)
    url = vault_url(access, request.name) if plan.secrets else None
    return _ref(request, services, machine_cluster.idle_s(access, plan), url)


def _ref(request: Request, services: dict[str, Any], idle_s: float, vault_url: str | None) -> AzureMLRef:
    plan = AzureMLSending.load(request.sending)
    return AzureMLRef.of(
        plan,
        name=request.name,
        history=status.root_of(plan.workspace, services),
        studio=(services.get("Studio") or {}).get("endpoint"),
        vault=vault_url,
        idle_s=idle_s,
        has_price=plan.has_price or bool(plan.instance_type),
    )


def _create(
    access: AzureAccess, request: Request, shipment: Shipment, job: dict[str, Any], owner: str
) -> dict[str, Any]:
    """Send the job; retry if the request was lost and no job exists; return the job's services.

    After any error the job may exist: the SDK retries by itself, and the refusal of a retry says nothing of the first
    try. Raises UnreachableError if the outcome cannot be read.
    """
    from . import sdk

    plan, begin_s = AzureMLSending.load(request.sending), time.monotonic()
    folder = (shipment.base / plan.code_dir).absolute()
    for number in range(1, TRIES + 1):
        try:
            with api.answers("start the job"):
                return sdk.create(access, job, shipment.bundle.path, folder, shipment.sending.creates)
        except CloudtrainError as error:
            if shipment.sending.may_exist:
                with api.polls(f"look whether {request.name} has started after: {error.message}"):
                    there = describe(access, request.name)
                if there is not None:
                    return _services_of_ours(request, there, owner)
            # If the answer to an upload is lost, the SDK's own retry reports that the blob exists.
            is_lost = isinstance(error, UnreachableError) or "BlobAlreadyExists" in str(error)
            if number == TRIES or not is_lost or time.monotonic() - begin_s > AGAIN_S:
                raise
    raise AssertionError("unreachable")


def _services_of_ours(request: Request, there: dict[str, Any], owner: str) -> dict[str, Any]:
    """Return the services of the existing job of the request's name. Raises UsageError for a job of another owner."""
    if not _is_ours(there, owner):
        message = f"there is a job {request.name} of another user or machine in this workspace"
        raise UsageError(message, hint="choose another --name")
    return _services(there)


def _remove_secrets(access: AzureAccess, url: str | None) -> None:
    """Remove the job's entry in the vault; print the command to remove it by hand if the removal fails."""
    if url is None:
        return
    try:
        with api.answers("remove the job's secrets from the key vault", needs=VAULT_ROLE):
            remove_secrets(access, url)
    except CloudtrainError as error:
        say(f"{error.message}; remove them by hand: az keyvault secret delete --id {url}")


def vault_url(access: AzureAccess, job: str) -> str:
    """Return the address of the job's entry in the key vault, unique for the workspace. Raises AzureError, ConfigError.

    One entry has all of a job's secrets in transit, until the job's end is seen.
    """
    properties = api.get_json(access, "").get("properties") or {}
    vault = str(properties.get("keyVault") or "").rpartition("/")[2]
    if not vault:
        message = f"the workspace {access.workspace.name} has no key vault for secrets"
        raise ConfigError(message, hint="leave `secrets` out")
    name = hashlib.sha256(f"{access.workspace.arm_id}/{job}".lower().encode()).hexdigest()[:32]
    return f"https://{vault}.{api.HOSTS[access.workspace.cloud][2]}/secrets/cloudtrain-{name}"


def put_secrets(access: AzureAccess, url: str, values: Mapping[str, str]) -> None:
    """Store the values. Raises AzureError, or ConfigError if the values are too long together."""
    text = json.dumps(dict(values))
    if len(text.encode()) > MAX_SECRET_BYTES:
        message = f"the secrets have more than the {MAX_SECRET_BYTES} bytes that a key vault takes together"
        raise ConfigError(message, key="secrets", hint="put long ones into a file of your own in blob storage")
    _call_vault(access, "PUT", url, {"value": text})


def remove_secrets(access: AzureAccess, url: str) -> None:
    """Remove the entry if it exists. Raises AzureError."""
    with contextlib.suppress(api.AbsentError):
        _call_vault(access, "DELETE", url)


def _call_vault(access: AzureAccess, method: str, url: str, body: Any = None) -> None:
    audience = f"https://{api.HOSTS[access.workspace.cloud][2]}"
    access.call(method, url, audience, params={"api-version": VAULT_VERSION}, body=body)


def describe(access: AzureAccess, name: str) -> dict[str, Any] | None:
    """Return the job from the control plane, or None if no such job exists. Raises AzureError."""
    try:
        return api.get_json(access, f"/jobs/{name}", version=JOB_VERSION)
    except api.AbsentError as error:
        if "workspace" in error.words.lower() and "job" not in error.words.lower():
            there = access.workspace
            message = f"there is no workspace {there.name} in the resource group {there.resource_group}"
            raise ConfigError(message, key="azureml.workspace", hint="`az ml workspace list` shows yours") from error
        return None


def _is_ours(there: dict[str, Any], owner: str) -> bool:
    return (there["properties"].get("tags") or {}).get(OWNER) == owner


def _services(there: dict[str, Any]) -> dict[str, Any]:
    return there["properties"].get("services") or {}


def _root_of(access: AzureAccess, ref: JobRef, handle: AzureMLRef) -> str:
    """Return the URL of the run history; the handle of a job that `find` returned may lack the URL at first."""
    if handle.history is not None:
        return handle.history
    with api.polls(f"ask for {handle.name}"):
        there = describe(access, handle.name)
    root = status.root_of(handle.workspace, _services(there)) if there else None
    if root is None:
        raise UnreachableError(f"Azure ML does not say yet where the run {handle.name} is to be followed")
    ref.update(history=root)  # for this process's next polls
    return root


def _account(azure: Azure, answer: status.Details) -> dict[str, Any] | None:
    """Return a container's exit report: the report of the lowest node that has written one.

    Raises UnreachableError if a log that may hold the report cannot be read, unless the run ended long ago.
    """
    files_of = ((streams.node_of(name), url) for name, url in answer.log_files.items())
    urls = [url for _, url in sorted(each for each in files_of if each[0] is not None)]
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            with api.polls("read the end of the log"):
                reports = pool.map(lambda url: streams.last_event(azure, url, "ended"), urls)
                return next((report for report in reports if report is not None), None)
        except UnreachableError:
            if not status.is_fresh(answer, LONG_OVER_S):
                return None
            raise


def _hourly_usd(answer: status.Details, handle: AzureMLRef) -> float | None:
    """Return the hourly price of the run's machines, if the plan had no price."""
    if handle.has_price:
        return None
    compute = answer.data.get("compute") or {}
    size, region = compute.get("vmSize"), compute.get("region") or handle.region
    machine = catalog.by_type("azureml", size, region) if size else None
    return None if machine is None or machine.hourly_usd is None else machine.hourly_usd * handle.nodes
