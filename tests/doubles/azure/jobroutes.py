"""management.azure.com: put, get, list and cancel jobs; and run history's details at https://<region>.api.azureml.ms."""

import copy
import time
import uuid
from typing import Any

from doubles.azure import life
from doubles.azure.arm import resource
from doubles.azure.bodies import check, compute_of
from doubles.azure.errors import AzureError
from doubles.azure.jobs import Job
from doubles.azure.names import ARTIFACTS, REGION, SUBSCRIPTION, iso_time, workspace_id
from doubles.azure.world import World
from doubles.kit import capacity
from doubles.kit.differences import REQUEST
from doubles.wire import Answer, Request, json_answer

PAGE = 10  # jobs of the list
TAKEN = (
    "A job with this name already exists. If you are trying to create a new job, use a different name. If you are "
    "trying to update an existing job, only description, displayName, tags and isArchived can be changed."
)


def put(world: World, request: Request, name: str) -> Answer:
    """Create a job and run it; a repeated PUT changes nothing."""
    body = world.changes.applied(("jobs.put",), REQUEST, request.json())
    with world.lock:
        old = world.jobs.get(name)
        if old is not None:
            return _put_again(old, body)
        check(world, name, body)
        asked = body["properties"]
        job = Job(name=name, body=copy.deepcopy(body), created=time.time())
        job.compute = compute_of(world, asked)
        row = world.capacity.take(REGION, job.compute["vmSize"], spot=job.compute["priority"] == "LowPriority")
        _require_machines(job, row)
        job.tags, job.properties = dict(asked.get("tags") or {}), dict(asked.get("properties") or {})
        job.display_name, job.description = asked.get("displayName"), asked.get("description")
        job.enter_first()
        told = _described(job)
        world.add(job)
    life.begin(world, job)
    world.capacity.answer(row)
    told["properties"]["status"] = "Starting"  # as in a recorded answer
    return json_answer(told, 201)


def _require_machines(job: Job, row: capacity.Row) -> None:
    """Raise AzureError without quota or stock. Texts, and the code for want of stock at a create, are assumed."""
    job.has, size = row.has, job.compute["vmSize"]
    if row.has == capacity.NO_QUOTA:
        message = f"The specified subscription has a vCPU quota of 0 for {size}, and does not support {job.nodes} nodes"
        raise AzureError(409, "QuotaExceeded", message)
    if row.has == capacity.NO_STOCK:
        message = f"Allocation failed. There is no sufficient capacity for the requested size {size} in {REGION}."
        raise AzureError(409, "AllocationFailed", message)


def get(world: World, request: Request, name: str) -> Answer:
    """Return a job."""
    return json_answer(_described(_found(world, name)))


def list_all(world: World, request: Request) -> Answer:
    """Return a page of jobs, the newest first."""
    query = request.query
    if set(query) - {"api-version", "tag", "$skip"} or "=" in query.get("tag", ""):
        raise AzureError(400, "UserError", f"the stand-in's list knows no {request.query}")
    jobs = sorted(world.jobs.values(), key=lambda job: -job.number)
    jobs = [job for job in jobs if query.get("tag") in (None, *job.tags)]
    start = int(query.get("$skip", 0))
    told: dict[str, Any] = {"value": [_described(job) for job in jobs[start : start + PAGE]]}
    if len(jobs) > start + PAGE:
        more = "".join(f"&{name}={value}" for name, value in query.items() if name not in ("$skip", "api-version"))
        version = query.get("api-version", "")
        told["nextLink"] = (
            f"https://management.azure.com{workspace_id()}/jobs?api-version={version}&$skip={start + PAGE}{more}"
        )
    return json_answer(told)


def cancel(world: World, request: Request, name: str) -> Answer:
    """Request the job's end."""
    job = _found(world, name)
    with job.changed:
        if job.has_ended:
            raise AzureError(
                400, "UserError", f"Job {name} is in the terminal state {job.status}: it cannot be canceled."
            )
        job.order("cancel")
        job.enter("CancelRequested")
    return _accepted(f"jc:{name}:{uuid.uuid4()}")


def _found(world: World, name: str) -> Job:
    job = world.jobs.get(name)
    if job is None:
        raise AzureError(404, "UserError", f"Job {name} was not found in this workspace: Run {name} not found.")
    return job


def _put_again(job: Job, body: dict[str, Any]) -> Answer:
    asked, own = body.get("properties") or {}, job.properties_of_body

    def fixed(properties: dict[str, Any]) -> dict[str, Any]:
        ignored = ("properties", "status", "services")
        return {name: value for name, value in properties.items() if name not in ignored and value is not None}

    if fixed(asked) != fixed(own):
        raise AzureError(400, "UserError", TAKEN)
    return json_answer(_described(job))


def _accepted(operation: str) -> Answer:
    location = (
        f"https://management.azure.com/subscriptions/{SUBSCRIPTION}/providers/Microsoft.MachineLearningServices"
        f"/locations/{REGION}/mfeOperationResults/{operation}?api-version=2023-04-01-preview"
    )
    return Answer(202, {"Location": location, "Retry-After": "1"})


def _described(job: Job) -> dict[str, Any]:
    """Return the job in ARM's form."""
    asked = copy.deepcopy(job.properties_of_body)
    studio = f"https://ml.azure.com/runs/{job.name}?wsid={workspace_id()}"
    tracking = f"azureml://{REGION}.api.azureml.ms/mlflow/v1.0{workspace_id()}?"
    service = {"port": None, "status": None, "errorMessage": None, "properties": None, "nodes": None}
    outputs = asked.get("outputs") or {}
    for name, output in outputs.items():
        output["uri"] = job.output_uri(name)
    own = f"azureml://datastores/workspaceartifactstore/{job.folder}"
    outputs["default"] = {"description": None, "jobOutputType": "uri_folder", "mode": "ReadWriteMount", "uri": own}
    properties = {
        "distribution": None,
        "environmentVariables": {},
        "identity": None,
        "inputs": {},
        "limits": None,
        "parameters": {},
        **asked,
        "outputs": outputs,
        "tags": dict(job.tags),
        "properties": {**job.properties, "_azureml.ComputeTargetType": job.compute["targetType"]},
        "displayName": job.display_name or job.name,
        "description": job.description,
        "experimentName": job.experiment,
        "isArchived": False,
        "status": job.status,
        "services": {
            **(asked.get("services") or {}),
            "Tracking": {**service, "jobServiceType": "Tracking", "endpoint": tracking},
            "Studio": {**service, "jobServiceType": "Studio", "endpoint": studio},
        },
    }
    when = {"createdAt": iso_time(job.created), "createdBy": "cloudtrain", "createdByType": "Application"}
    return resource("jobs", f"jobs/{job.name}", properties, systemData=when)


def details(world: World, request: Request, run: str) -> Answer:
    """Return the run's status, times, error, and its log files with fresh signatures."""
    job = _run(world, run)
    files = world.blobs.names(ARTIFACTS, f"{job.folder}/")
    logs = [name for name in files if name.startswith((f"{job.folder}/user_logs/", f"{job.folder}/system_logs/"))]
    told = {
        "runId": job.name,
        "runUuid": job.uuid,
        "rootRunUuid": job.uuid,
        "target": job.compute["target"],
        "parentRunId": None,
        "createdTimeUtc": iso_time(job.created),
        "warnings": [],
        "submittedBy": "cloudtrain",
        "inputDatasets": [],
        "outputDatasets": [],
        "runDefinition": None,
        "jobCost": None,
        "logFiles": {name.removeprefix(f"{job.folder}/"): world.sas_uri(ARTIFACTS, name) for name in logs},
        **_common(job),
    }
    return json_answer(told)


def _run(world: World, run: str) -> Job:
    job = world.jobs.get(run)
    if job is None:
        raise AzureError(404, "UserError", f"Run {run} was not found.")
    return job


def _common(job: Job) -> dict[str, Any]:
    with job.changed:
        return {
            "status": job.status,
            "startTimeUtc": iso_time(job.started),
            "endTimeUtc": iso_time(job.ended),
            "error": None if job.error is None else {"error": job.error, "time": iso_time(job.ended)},
            "tags": dict(job.tags),
            "properties": dict(job.properties),
            "compute": dict(job.compute),
            "computeDuration": _duration(job.active_now_s()) if job.started is not None else None,
            "duration": None if job.ended is None else _duration(job.ended - job.created),
            "revision": job.revision,
        }


def _duration(seconds: float) -> str:
    """Return the duration in .NET's format of a time span."""
    days, rest = divmod(max(0.0, seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    text = f"{int(hours):02}:{int(minutes):02}:{rest:010.7f}"
    return f"{int(days)}.{text}" if days else text
