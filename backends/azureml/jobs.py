"""A job at Azure ML, once it is to be sent: the run, its lines, its files. What a dry run does without."""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.azureml import files, history, rest, sdk, status, vault
from cloudtrain.backends.azureml import logs as streams
from cloudtrain.backends.azureml.request import SENT, encoded
from cloudtrain.backends.azureml.workspace import Workspace
from cloudtrain.launcher import catalog
from cloudtrain.launcher.backend import JobRef, LogPage, Request, Shipment
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, Fault, UnreachableError, UsageError
from cloudtrain.launcher.home import identity

if TYPE_CHECKING:
    from cloudtrain.launcher.job import State

__all__ = ["artifacts", "find", "logs", "pace_s", "send", "state", "stop"]

OWNER = "cloudtrain.owner"
JOB_VERSION = "2024-01-01-preview"  # of GET and cancel; the SDK puts with one of its own
TRIES = 3
SETTLE_S = 5.0  # until a request that its sender did not live to see answered is there to be seen
IDLE_S = 120.0  # of a cluster that does not say; Azure's own default
RUN_PAUSE_S, WAIT_PAUSE_S = 4.0, 10.0  # the longest between two looks for lines
BUSY_S = 10.0  # after a line, during which further ones are expected

_last_line_s: dict[str, float] = {}


def send(request: Request, shipment: Shipment) -> JobRef:
    """Look at what the job needs, send it, and return its handle.

    Raises CredentialError, CapacityError, ConfigError, UsageError; UnreachableError where it is not known whether it
    has started, which `find` can tell later.
    """
    workspace, owner = _workspace(request.beside), identity(shipment.home)
    with rest.answers("start the job"):
        there = _described(workspace, request.name)
        if there is not None:
            return _adopted(request, there, owner)
        idle_s = _require_compute(workspace, request)
        sent: dict[str, Any] = {"token": secrets.token_hex(16)}
        url = vault.url_of(workspace, request.name) if shipment.secrets else None
        if url is not None:
            with rest.answers("store the job's secrets in the key vault"):
                vault.put(workspace, url, shipment.secrets)
            sent["vault"] = url
        job = {
            **request.body,
            "tags": {**request.body.get("tags", {}), OWNER: owner},
            "environment_variables": {**request.body["environment_variables"], SENT: encoded(sent)},
        }
        try:
            services = _create(request, shipment, job, workspace)
        except rest.AzureError as error:
            return _after_failure(request, error, owner, url, idle_s)
    return _ref(request, services, owner, url, idle_s)


def find(request: Request, home: Path) -> JobRef | None:
    """Return the job that the request has started, None where there is none of ours.

    Azure cannot be told to refuse a name: so a request that may be under way gets a moment to arrive.
    """
    workspace, owner = _workspace(request.beside), identity(home)
    with rest.polls(f"ask for {request.name}"):
        there = _described(workspace, request.name)
        if there is None:
            time.sleep(SETTLE_S)
            there = _described(workspace, request.name)
        if there is None or not _is_ours(there, owner):
            return None
        url = vault.url_of(workspace, request.name) if request.beside["secrets"] else None
        return _ref(request, _services(there), owner, url, _idle_s(workspace, request))


def state(ref: JobRef) -> State:
    """Return what Azure says of the job."""
    workspace = _workspace(ref)
    told = history.details(workspace, _root(ref, workspace), ref["name"])
    account, has_checkpoint = None, None
    if told.is_over:  # what is asked beside that must not hide it
        if told.status != "Completed":
            with contextlib.suppress(CloudtrainError):
                account = _account(told)
            if ref["checkpoint_uri"] is not None:
                with contextlib.suppress(CloudtrainError):
                    has_checkpoint = files.has_checkpoint(workspace, ref["checkpoint_uri"])
        if ref["vault"] is not None:
            with contextlib.suppress(CloudtrainError), rest.answers("remove the job's secrets"):
                vault.remove(workspace, ref["vault"])
    found = status.state_of(
        told,
        account,
        limit_s=ref["limit_s"],
        limit_reason=ref["limit_reason"],
        has_checkpoint=has_checkpoint,
        idle_s=ref["idle_s"],
    )
    return _with_price(found, told, ref)


def logs(
    ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
) -> LogPage:
    """Return the lines after the cursor."""
    only = None if ranks is None else frozenset(rank // ref["nproc_per_node"] for rank in ranks)
    workspace = _workspace(ref)
    root = _root(ref, workspace)

    def ask(fresh_s: float) -> history.Details:
        return history.details(workspace, root, ref["name"], fresh_s=fresh_s)

    page = streams.page(ask, ref["nodes"], cursor, only)
    if page.lines:
        _last_line_s[ref["name"]] = time.monotonic()
    return page if ranks is None else page.only(ranks)


def pace_s(ref: JobRef) -> float:
    """Return how long to wait before the next look for lines: a second while they come, then longer and longer.

    Of a run that may fail any moment never so long that its last words wait; of one that waits for machines longer.
    """
    told = history.known(ref["name"])
    if told is not None and told.status in (*history.WAITING, "Preparing"):
        return WAIT_PAUSE_S / 2
    quiet_s = time.monotonic() - _last_line_s.get(ref["name"], 0.0)
    return min(RUN_PAUSE_S, max(1.0, quiet_s / BUSY_S))


def stop(ref: JobRef) -> None:
    """Ask Azure to cancel the job: it signals the containers, which save, and kills them a while later."""
    workspace = _workspace(ref)
    with rest.answers(f"stop {ref['name']}"):
        try:
            rest.arm(workspace, "POST", f"/jobs/{ref['name']}/cancel", version=JOB_VERSION)
        except rest.AzureError as error:
            there = _described(workspace, ref["name"]) if error.status in (400, 409) else None
            if there is None or there["properties"].get("status") not in history.OVER:
                raise


def artifacts(ref: JobRef, folder: Path) -> list[Path]:
    """Download what the job has left in its output folder, while it runs, too; return the files."""
    return files.download(_workspace(ref), ref["output_uri"], folder)


def _workspace(data: dict[str, Any]) -> Workspace:
    return Workspace(**data["workspace"])


def _ref(request: Request, services: dict[str, Any], owner: str, vault_url: str | None, idle_s: float) -> JobRef:
    beside = request.beside
    kept = ("workspace", "checkpoint_uri", "output_uri", "nodes", "nproc_per_node", "limit_s", "limit_reason")
    return {
        **{key: beside[key] for key in kept},
        "name": request.name,
        "history": history.root_of(_workspace(beside), services),
        "vault": vault_url,
        "owner": owner,
        "idle_s": idle_s,
        # Where the plan knew no price, the machines that the run names may have one.
        "prices": None if beside["has_price"] or beside["instance_type"] else {"region": beside["region"]},
    }


def _create(request: Request, shipment: Shipment, job: dict[str, Any], workspace: Workspace) -> dict[str, Any]:
    """Send, and send again where something was lost on the way and the job is not there. Raises AzureError."""
    folder = (shipment.base / request.beside["code_dir"]).absolute()
    for number in range(1, TRIES + 1):
        try:
            return sdk.create(workspace, job, shipment.bundle.path, folder if folder.is_dir() else Path.cwd())
        except rest.AzureError as error:
            # Of a lost answer to an upload the SDK's own second try hears that the blob exists.
            is_lost = error.status == 0 or error.code == "BlobAlreadyExists" or "BlobAlreadyExists" in error.words
            if number == TRIES or not is_lost or _described(workspace, request.name) is not None:
                raise
    raise AssertionError("unreachable")


def _after_failure(
    request: Request, error: rest.AzureError, owner: str, vault_url: str | None, idle_s: float
) -> JobRef:
    """Return the handle where the job is there all the same; else raise, with nothing of it left where it was refused.

    Not only a lost answer hides a job: the SDK asks again by itself, and is told that the name is taken.
    """
    workspace = _workspace(request.beside)
    there = _described(workspace, request.name)
    if there is not None and _is_ours(there, owner):
        return _ref(request, _services(there), owner, vault_url, idle_s)
    if there is not None:
        raise _taken(request.name) from error
    if vault_url is not None and error.status not in (0, 408, 429, 500, 502, 503, 504):
        with contextlib.suppress(rest.AzureError):
            vault.remove(workspace, vault_url)
    raise error


def _adopted(request: Request, there: dict[str, Any], owner: str) -> JobRef:
    """Return the handle of a job that is there before it is sent: an earlier try's, whose answer was lost."""
    if not _is_ours(there, owner):
        raise _taken(request.name)
    workspace = _workspace(request.beside)
    url = vault.url_of(workspace, request.name) if request.beside["secrets"] else None
    return _ref(request, _services(there), owner, url, _idle_s(workspace, request))


def _taken(name: str) -> UsageError:
    message = f"there is a job {name} of another machine's, or of somebody else's, in this workspace"
    return UsageError(message, hint="choose another --name")


def _described(workspace: Workspace, name: str) -> dict[str, Any] | None:
    """Return the job as the control plane has it, None where there is no such job. Raises AzureError."""
    try:
        return rest.get_json(workspace, f"/jobs/{name}", version=JOB_VERSION)
    except rest.AzureError as error:
        if not rest.is_absent(error):
            raise
        if "workspace" in error.words.lower() and "job" not in error.words.lower():
            message = f"there is no workspace {workspace.name} in the resource group {workspace.resource_group}"
            raise ConfigError(
                [Fault(message, key="azureml.workspace", hint="`az ml workspace list` shows yours")]
            ) from error
        return None


def _is_ours(there: dict[str, Any], owner: str) -> bool:
    return (there["properties"].get("tags") or {}).get(OWNER) == owner


def _services(there: dict[str, Any]) -> dict[str, Any]:
    return there["properties"].get("services") or {}


def _root(ref: JobRef, workspace: Workspace) -> str:
    """Return where the run history is; a job that was only found may not have told it yet."""
    if ref["history"] is None:
        with rest.polls(f"ask for {ref['name']}"):
            there = _described(workspace, ref["name"])
        ref["history"] = history.root_of(workspace, _services(there)) if there else None
        if ref["history"] is None:
            raise UnreachableError(f"Azure ML does not say yet where the run {ref['name']} is to be followed")
    return str(ref["history"])


def _account(told: history.Details) -> dict[str, Any] | None:
    """Return how the containers say it ended: every node knows, and node 0 is asked first."""
    names = sorted((node, name) for name in told.log_files if (node := streams.node_of(name)) is not None)
    for _, name in names:
        with rest.answers("read the log's end"):
            found = streams.last_event(told.log_files[name], "ended")
        if found is not None:
            return found
    return None


def _require_compute(workspace: Workspace, request: Request) -> float:
    """Return how long the cluster's machines idle after a job, 0 where there is none, having looked whether it fits.

    Raises ConfigError: a wrong name would be told only after the upload.
    """
    wanted = request.beside["compute"]
    if wanted is None:
        return 0.0
    try:
        there = rest.get_json(workspace, f"/computes/{wanted}")["properties"]
    except rest.AzureError as error:
        if not rest.is_absent(error):
            raise
        found = rest.get_json(workspace, "/computes").get("value") or []
        names = ", ".join(sorted(str(each.get("name")) for each in found)) or "none"
        hint = f"there are: {names}; without `compute` it runs serverless"
        message = f"there is no compute `{wanted}` in the workspace"
        raise ConfigError([Fault(message, key="azureml.compute", hint=hint)]) from error
    own: dict[str, Any] = there.get("properties") or {}
    size, planned = str(own.get("vmSize") or ""), request.beside["instance_type"]
    if size and planned and size.lower() != planned.lower():
        message = f"the machines of `{wanted}` are {size}, not {planned}"
        raise ConfigError([Fault(message, key="resources.instance_type", hint=f"write {size}, or another compute")])
    most = (own.get("scaleSettings") or {}).get("maxNodeCount")
    if isinstance(most, int) and most < request.beside["nodes"]:
        message = f"`{wanted}` grows to {most} machines, and the job wants {request.beside['nodes']}"
        raise ConfigError([Fault(message, key="resources.instances", hint="fewer instances, or let the cluster grow")])
    return _idle_of(own)


def _idle_s(workspace: Workspace, request: Request) -> float:
    """Return how long the cluster's machines idle, as far as it can be asked."""
    if request.beside["compute"] is None:
        return 0.0
    with contextlib.suppress(rest.AzureError, KeyError):
        found = rest.get_json(workspace, f"/computes/{request.beside['compute']}")
        return _idle_of(found["properties"].get("properties") or {})
    return IDLE_S


def _idle_of(properties: dict[str, Any]) -> float:
    """Return the seconds after which idle machines are let go, 0 for those that always stay."""
    scale = properties.get("scaleSettings") or {}
    if scale.get("minNodeCount"):
        return 0.0
    told = status.duration_s(scale.get("nodeIdleTimeBeforeScaleDown"))
    return IDLE_S if told is None else told


def _with_price(found: State, told: history.Details, ref: JobRef) -> State:
    from dataclasses import replace

    if ref["prices"] is None:
        return found
    size, region, _ = status.machine_of(told.data)
    machine = catalog.by_type("azureml", size, region or ref["prices"]["region"]) if size else None
    if machine is None or machine.hourly_usd is None:
        return found
    return replace(found, hourly_usd=machine.hourly_usd * ref["nodes"])
