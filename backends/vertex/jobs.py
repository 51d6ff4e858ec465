"""A job at Vertex AI, from the send on: the custom job, its lines, its files. A dry run does not import this module.

CreateCustomJob takes neither a name of ours nor a request id, so a repeated request would make two paid jobs. Two
measures prevent a second job. Each job has the attempt's label, and a retry searches for the label before it sends
again. And each send puts a fence, a random mark, into the job's arguments and into the order in the bucket. Replicas
whose mark differs from the order's mark end at once; the process that sees such a late job cancels it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cloudtrain.entrypoints.contract import SecretManagerSecrets
from cloudtrain.entrypoints.format import one_line
from cloudtrain.entrypoints.stores.retries import tries
from cloudtrain.launcher.backend import Chosen, Cursor, FoundAttempt, JobRef, LogPage, Request, Shipment
from cloudtrain.launcher.backend.accepted import Accepted
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UnreachableError, UsageError
from cloudtrain.launcher.store.home import home as home_folder
from cloudtrain.launcher.store.home import identity, known_identity
from cloudtrain.launcher.text import addresses
from cloudtrain.launcher.text.terminal import say

from ..cloud import found_attempt, require_empty
from ..edge import importing
from ..http import object_in
from ..job_folder import claim_beside
from . import api, files, status
from .api import Google, GoogleError, VertexAccess
from .logs import LogReader
from .machine import block_of, project_of, region_of
from .records import VertexRef, VertexSending

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.job import State

TRIES, PAUSE_S, AGAIN_S = 3, 1.0, 90.0  # retries of a send; no retry after AGAIN_S
OWNER_LABEL = "cloudtrain_owner"
SECRETS_ROLE = "Secret Manager Admin (roles/secretmanager.admin)"
SECRETS_S = 30 * 86_400  # until Google removes a job's secrets, even if cloudtrain never does
SETTLE_TRIES = 4  # polls, one pause apart, for a job whose request was lost on the way
NEW_S = 120.0  # since a send: until then, Vertex AI may not list a new job yet
DUPLICATES_S = 900.0  # how long after a doubtful send to search for a second job
CREATE_S = 60.0


def send(google: Google, request: Request, shipment: Shipment) -> JobRef:
    """Upload missing files, claim the job's name, and start the job. Raises as `Backend.send`."""
    plan, owner = VertexSending.load(request.sending), identity(shipment.home)
    access = VertexAccess.of(plan, google)
    shipment.sending.prepares()
    files.region_of(access, plan.code_uri)  # the bucket must exist
    with api.answers("write to the bucket", needs=files.ROLE):
        files.upload(access, shipment.bundle.path, plan.code_uri)
        if plan.wheel_uri is not None:  # the boot as a package, for Google's prebuilt images
            from . import request as requests

            files.upload(access, requests.wheel(requests.boot_source())[1], plan.wheel_uri)
        for name, pinned in shipment.data.items():
            root = plan.code_uri.rpartition("/code/")[0]
            files.of(access).fill(name, pinned, addresses.placed(root, pinned), shipment.base)
        files.of(access).claim(plan.owner_uri, owner)
    require_empty(partial(files.used, google, plan), request.name, plan.checkpoint_uri, plan.output_uri)
    with api.answers("look whether the job is there already"):
        existing = _there(access, request.name, owner)
    if existing:  # the registry was lost
        number = str(existing[-1]["name"]).rpartition("/")[2]
        message = f"Vertex AI has a job {request.name} of yours already, {number}, of which nothing is known here"
        raise UsageError(message, hint="choose another --name")
    secret = _secret(plan, owner)
    try:
        if shipment.secrets and secret is not None:
            with api.answers("store the job's secrets", needs=SECRETS_ROLE):
                put_secrets(access, secret, shipment.secrets)
        name, is_doubtful = _create(access, request, owner, shipment)
    except BaseException as error:
        if shipment.sending.is_nothing_sent(error):  # leave no part of the job behind
            with contextlib.suppress(GoogleError):
                files.of(access).retract(plan.order_uri)
            _remove_secret(access, secret)
        raise
    return _ref(request, name, owner, is_doubtful=is_doubtful).dump()


def find(google: Google, request: Request, home: Path) -> JobRef | None:
    """Return the job that the request has started; else retract the order, so that a late job ends at once.

    If another home folder has claimed the name, this home folder has sent no job: return None and change nothing.
    """
    plan, owner = VertexSending.load(request.sending), identity(home)
    access = VertexAccess.of(plan, google)
    with api.polls(f"ask for {request.name}"):
        if files.of(access).owner(plan.owner_uri) not in (owner, None):  # None: the claim was deleted
            return None
        there = _there(access, request.name, owner)
        if not there:
            files.of(access).retract(plan.order_uri)
            there = _there(access, request.name, owner)
        if not there:
            _remove_secret(access, _secret(plan, owner))
            return None
        return _ref(request, _settle(access, request, owner, there), owner, is_doubtful=True).dump()


def supersede(google: Google, request: Request, number: int) -> int:
    """Refuse late starts of the request's attempt, by the claim and without an order."""
    plan = VertexSending.load(request.sending)
    with api.answers(f"give up {request.name}", needs=files.ROLE):
        folder = files.of(VertexAccess.of(plan, google))
        return folder.supersede(claim_beside(plan.owner_uri), number, plan.order_uri)


def jobs(google: Google, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
    """Return the running jobs of the project and location with our label."""
    block = block_of(config)
    project, location = project_of(block), region_of(block)
    if project is None or location is None:
        missing = "project" if project is None else "location"
        raise ConfigError(f"no {missing} to look for jobs in", hint=f"set vertex.{missing} in the config")
    access = VertexAccess(project, location, tuple(sorted(block.endpoints.items())), google)
    with api.answers("list the jobs"):
        there = _listed(access, "labels.cloudtrain_job:*")
    attempts = (_as_found(access, job, home) for job in there if not status.is_over(job))
    return [each for each in attempts if each is not None]


def _as_found(access: VertexAccess, job: dict[str, Any], home: Path) -> FoundAttempt | None:
    """Return the running job, or None if its labels name no attempt."""
    labels, order_uri, record = job["labels"], _arguments(job)[1], None
    name, owner = str(labels.get("cloudtrain_run", "")), str(labels.get(OWNER_LABEL, ""))
    if not (name.rpartition("-")[2].isdigit() and order_uri.startswith("gs://")):
        return None
    with contextlib.suppress(GoogleError):  # an unreadable bucket of another user must not hide the remaining jobs
        record = files.of(access).read_order(order_uri).get("record")
    is_own = owner == known_identity(home)
    asked = {"project": access.project, "location": access.location, "endpoints": dict(access.endpoints)}

    def ref_of(request: Request) -> JobRef:  # only the sender removes the job's secrets
        handle = _ref(request, job["name"], owner, is_doubtful=is_own)
        return (handle if is_own else replace(handle, secret=None)).dump()

    return found_attempt(name, record, asked, ref_of, is_own=is_own)


def state(google: LogReader, ref: JobRef) -> State:
    """Return the job's state at Vertex AI; once the job is over, remove its secrets."""
    handle = VertexRef.load(ref)
    access = VertexAccess.of(handle, google)
    with api.polls(f"ask for {handle.label}"):
        described = _described(access, handle)
    if handle.doubtful_until_s > time.time():
        with contextlib.suppress(GoogleError):  # the next poll tries again; the job's own state is known
            _cancel_others(access, handle.label, handle.owner, handle.name)
    account, has_checkpoint = None, None
    if status.is_over(described) and described.get("state") != "JOB_STATE_SUCCEEDED":
        with api.polls("read how it has ended"):
            account = files.of(access).report(handle.ended_uri, handle.nodes)
        if account is None and status.may_report_more(described, time.time()):
            return replace(status.awaiting(described), url=handle.url)
        if handle.checkpoint_uri is not None:
            with contextlib.suppress(GoogleError, CloudtrainError):  # a failed extra request must not hide the end
                has_checkpoint = files.of(access).has_checkpoint(handle.checkpoint_uri)
    if status.is_over(described):
        google.over.add(handle.name)
        _remove_secret(access, handle.secret)
    outcome = status.state_of(
        described,
        account,
        limit_s=handle.limit_s,
        limit_reason=handle.limit_reason,
        is_spot=handle.kind in ("spot", "flex_start"),
        has_checkpoint=has_checkpoint,
    )
    return replace(outcome, url=handle.url)


def accepted(google: LogReader, request: Request, handle: VertexRef) -> Accepted:
    """Return the custom job, beside the request with the mark of the send that made the job."""
    from .request import with_fence

    with api.polls(f"ask for {handle.label}"):
        there = _described(VertexAccess.of(handle, google), handle)
    sent = with_fence({**request.body, "labels": {**request.body["labels"], OWNER_LABEL: handle.owner}}, "{}")
    return Accepted(sent, there, (str(there.get("state")),))


def lines(google: LogReader, ref: JobRef, cursor: Cursor | None, nodes: Chosen, *, now: bool) -> LogPage:
    """Return the nodes' lines after the cursor, of all nodes if `nodes` is None; with `now`, the reader leaves then."""
    handle = VertexRef.load(ref)
    access, is_over = VertexAccess.of(handle, google), handle.name in google.over
    return google.page(access, handle.job, handle.nodes, cursor, nodes, home_folder(), is_passing=now, is_over=is_over)


def stop(google: Google, ref: JobRef, *, now: bool) -> None:
    """Ask Vertex AI to cancel the job; Vertex AI signals the containers, which save. `now` makes no difference."""
    handle = VertexRef.load(ref)
    with api.answers(f"stop {handle.label}"):
        _cancel(VertexAccess.of(handle, google), handle.name)


def _ref(request: Request, name: str, owner: str, *, is_doubtful: bool) -> VertexRef:
    plan, numeric = VertexSending.load(request.sending), name.rpartition("/")[2]
    order = plan.order
    place = f"locations/{plan.location}/training/{numeric}?project={plan.project}"
    return VertexRef.of(
        plan,
        name=name,
        label=request.name,
        owner=owner,
        job=numeric,
        nodes=order.job.nodes,
        nproc_per_node=order.job.nproc_per_node,
        limit_reason=order.limit_reason,
        ended_uri=order.ended_uri or "",
        secret=_secret(plan, owner),
        url=f"https://console.cloud.google.com/agent-platform/{place}",
        sent_s=time.time(),
        doubtful_until_s=time.time() + DUPLICATES_S if is_doubtful else 0.0,
    )


def _secret(plan: VertexSending, owner: str) -> str | None:
    """Return the name of the job's entry in Secret Manager, with a part of the owner: a name may repeat elsewhere."""
    source = plan.order.secrets
    return f"{source.secret}-{owner[:8]}" if isinstance(source, SecretManagerSecrets) else None


def _create(access: VertexAccess, request: Request, owner: str, shipment: Shipment) -> tuple[str, bool]:
    """Send the job; retry if the request was lost and no job exists.

    Return the job's resource name, and whether a second job with the same label may still arrive. Raises
    UnreachableError if the outcome of the send is unknown.
    """
    from .request import with_fence  # few users of this module need the function

    begin_s, sending, record = time.monotonic(), shipment.sending, dict(shipment.record)
    plan = VertexSending.load(request.sending)
    for number in tries(TRIES, PAUSE_S, doubles=False):
        fence = secrets.token_hex(8)
        try:
            with api.answers("start the job"):
                order = _order(plan, owner, fence, time.time()) | {"record": record}
                files.of(access).put_order(plan.order_uri, order)
                labels = {**request.body["labels"], OWNER_LABEL: owner}
                made = create_once(access, with_fence({**request.body, "labels": labels}, fence), sending.creates)
            if number > 1:
                with contextlib.suppress(GoogleError):
                    _cancel_others(access, request.name, owner, made["name"])
            return made["name"], number > 1
        except UnreachableError as error:
            if sending.may_exist:
                with api.polls(f"look whether {request.name} has started after: {error.message}"):
                    if arrived := _there(access, request.name, owner):
                        return _settle(access, request, owner, arrived), True
            if number == TRIES or time.monotonic() - begin_s > AGAIN_S:
                raise
        except CloudtrainError as error:
            if number == 1:
                raise
            # Refused, but an earlier try's job may have arrived, and may even be the job that uses up the quota.
            with api.polls(f"look whether {request.name} has started after: {error.message}"):
                arrived = _awaited(access, request.name, owner)
            if not arrived:
                raise UnreachableError(f"{error.message}; whether an earlier try arrives is not known yet") from error
            return _settle(access, request, owner, arrived), True
    raise AssertionError("unreachable")


def _order(plan: VertexSending, owner: str, fence: str, sent_s: float | None = None) -> dict[str, Any]:
    """Return the container order: the plan's order, with the fields that only a send knows.

    `sent_s` is the time of the send, None if the job may have been sent before.
    """
    order = plan.order
    if isinstance(order.secrets, SecretManagerSecrets):
        order = replace(order, secrets=replace(order.secrets, secret=f"{_secret(plan, owner)}/versions/latest"))
    claim_uri = claim_beside(plan.owner_uri)
    return replace(order, fence=fence, token=secrets.token_hex(16), sent_s=sent_s, claim_uri=claim_uri).dump()


def _awaited(access: VertexAccess, label: str, owner: str) -> list[dict[str, Any]]:
    """Return as `_there`; a request under way gets up to SETTLE_TRIES polls to arrive. Raises GoogleError."""
    for _ in range(SETTLE_TRIES):
        if there := _there(access, label, owner):
            return there
        time.sleep(PAUSE_S)
    return []


def _there(access: VertexAccess, label: str, owner: str) -> list[dict[str, Any]]:
    """Return the owner's jobs with the attempt's label, oldest first. Raises GoogleError.

    Another home folder may have used the name with another bucket; its job is not returned.
    """
    listed = _listed(access, f'labels.cloudtrain_run="{label}"')
    ours = [job for job in listed if (job.get("labels") or {}).get(OWNER_LABEL) == owner]
    return sorted(ours, key=lambda job: str(job.get("createTime", "")))


def _listed(access: VertexAccess, only: str) -> list[dict[str, Any]]:
    """Return the jobs that match the filter, over all pages. Raises GoogleError."""
    asked = {"filter": only, "pageSize": "50"}
    listed: list[dict[str, Any]] = []
    while True:
        answer = api.get_json(access, "aiplatform", f"/v1/{access.parent}/customJobs", asked)
        listed += answer.get("customJobs", ())
        if not answer.get("nextPageToken"):  # a answer may be empty without being the last answer
            return listed
        asked["pageToken"] = answer["nextPageToken"]


def _settle(access: VertexAccess, request: Request, owner: str, candidates: list[dict[str, Any]]) -> str:
    """Return the resource name of the job whose mark the order has; cancel the remaining jobs. Raises GoogleError.

    If the order was retracted, or its send was lost, renew the order for the first running job, else the first job.
    """
    plan = VertexSending.load(request.sending)
    order = files.of(access).read_order(plan.order_uri)
    own = [job for job in candidates if order.get("fence") == _arguments(job)[2]]
    taken = (own or [job for job in candidates if not status.is_over(job)] or candidates)[0]
    for job in candidates:
        if job["name"] != taken["name"] and not status.is_over(job):
            _cancel(access, str(job["name"]))
    if not own:
        kept = {"record": order.get("record")}
        files.of(access).put_order(plan.order_uri, _order(plan, owner, _arguments(taken)[2]) | kept)
    return str(taken["name"])


def _arguments(job: dict[str, Any]) -> list[str]:
    """Return the arguments of the job's boot, padded to at least three; the third is the mark of the job's send."""
    pool = (job.get("jobSpec", {}).get("workerPoolSpecs") or [{}])[0]
    spec: dict[str, Any] = pool.get("containerSpec") or pool.get("pythonPackageSpec") or {}
    return [*map(str, spec.get("args", ())), "", "", ""]


def _described(access: VertexAccess, handle: VertexRef) -> dict[str, Any]:
    """Return the job at Vertex AI; report a job that a user has deleted there as cancelled. Raises GoogleError."""
    try:
        return api.get_json(access, "aiplatform", f"/v1/{handle.name}")
    except GoogleError as error:
        if error.status != 404 or time.time() - handle.sent_s < NEW_S:
            raise
    error_now = {"code": 5, "message": "it was deleted at Vertex AI; what it has cost is not known here any more"}
    return {"state": "JOB_STATE_CANCELLED", "error": error_now}


def _cancel_others(access: VertexAccess, label: str, owner: str, name: str) -> None:
    """Cancel all running jobs with the attempt's label except the job itself. Raises GoogleError."""
    for job in _there(access, label, owner):
        if job["name"].rpartition("/")[2] != name.rpartition("/")[2] and not status.is_over(job):
            _cancel(access, str(job["name"]))


def _cancel(access: VertexAccess, name: str) -> None:
    """Cancel a job unless the job has ended or is about to end. Raises GoogleError."""
    try:
        _post(access, f"{access.url('aiplatform')}/v1/{name}:cancel", {})
    except GoogleError as error:
        if error.status != 400 or error.code != "FAILED_PRECONDITION":
            raise


def put_secrets(access: VertexAccess, secret: str, values: Mapping[str, str]) -> None:
    """Store the values, a JSON object, as the newest version of `projects/P/secrets/NAME`. Raises GoogleError."""
    base, (_, project, _, name) = access.url("secretmanager"), secret.split("/")
    body = {"replication": {"automatic": {}}, "ttl": f"{SECRETS_S}s", "labels": {"cloudtrain_run": name}}
    try:
        _post(access, f"{base}/v1/projects/{project}/secrets", body, {"secretId": name})
    except GoogleError as error:
        if error.status != 409:  # an earlier try made the entry
            raise
    data = base64.b64encode(json.dumps(dict(values)).encode()).decode()
    try:
        _post(access, f"{base}/v1/{secret}:addVersion", {"payload": {"data": data}})
    except GoogleError:
        with contextlib.suppress(GoogleError):  # a role may allow creating an entry and forbid filling the entry
            remove_secrets(access, secret)
        raise


def remove_secrets(access: VertexAccess, secret: str) -> None:
    """Remove the entry with all its versions. Raises GoogleError."""
    try:
        api.call(access, "DELETE", f"{access.url('secretmanager')}/v1/{secret}")
    except GoogleError as error:
        if error.status != 404:
            raise


def _post(access: VertexAccess, url: str, body: object, params: Mapping[str, str] | None = None) -> None:
    object_in(api.call(access, "POST", url, params=params, body=body))  # raises for a proxy's page


def _remove_secret(access: VertexAccess, secret: str | None) -> None:
    """Remove the job's entry in Secret Manager; print the command to remove it by hand if the removal fails."""
    if secret is None:
        return
    try:
        with api.answers("remove the job's secrets", needs=SECRETS_ROLE):
            remove_secrets(access, secret)
    except CloudtrainError as error:
        say(f"{error.message}; remove them by hand: gcloud secrets delete {secret.rpartition('/')[2]}")


def create_once(access: VertexAccess, body: dict[str, Any], begins: Callable[[], None]) -> dict[str, Any]:
    """Send the job once by Google's client; return its resource name and state. Raises GoogleError, ConfigError.

    The client takes half a second and more of processor time to import. Its calls have neither a time limit nor retries
    by default. `begins` is called directly before the request.
    """
    with importing(api.not_installed):
        from google.api_core import exceptions
        from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
        from google.cloud.aiplatform_v1.types import CustomJob
        from google.protobuf import json_format
    try:
        message = json_format.ParseDict(body, CustomJob.pb(CustomJob()))
    except json_format.ParseError as error:
        hint = "fix vertex.raw, or update google-cloud-aiplatform if the field is a new one"
        raise ConfigError(f"Google's client knows no such job: {one_line(error)}", hint=hint) from error
    url = access.url("aiplatform")
    is_plain = url.startswith("http://")
    options = {"api_endpoint": url if is_plain else urlsplit(url).netloc}
    transport = "rest" if is_plain else None  # REST for an address without TLS, because gRPC would need TLS
    with _client_errors(exceptions):
        credentials = access.google.login(access.project).credentials()
        client = JobServiceClient(credentials=credentials, client_options=options, transport=transport)
        with client:
            begins()
            made = client.create_custom_job(
                parent=access.parent, custom_job=CustomJob.wrap(message), timeout=CREATE_S, retry=None
            )
    return {"name": made.name, "state": made.state.name}


@contextlib.contextmanager
def _client_errors(exceptions: Any) -> Iterator[None]:
    """Raise all kinds of the clients' errors as GoogleError."""
    from google.auth import exceptions as refused
    from google.protobuf.json_format import ParseError
    from requests.exceptions import RequestException

    try:
        yield
    except exceptions.GoogleAPICallError as error:
        status = int(error.code or 0)
        code = error.grpc_status_code.name if getattr(error, "grpc_status_code", None) else ""
        words = str(error.message)  # of a REST error, with address and JSON around Google's message
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            words = str(error.response.json()["error"]["message"]) or words
        raise GoogleError(status, code, one_line(words)) from error
    except refused.RefreshError as error:
        raise api.no_token(error) from error
    except ParseError as error:
        raise GoogleError(0, "page", f"the answer is not from a Google service: {one_line(error)}") from error
    except (refused.GoogleAuthError, RequestException, ConnectionError) as error:
        raise GoogleError(0, "", one_line(error)) from error
