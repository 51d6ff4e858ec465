"""https://<region>.api.azureml.ms: the addresses of the services, and run history."""

from __future__ import annotations

import time
from typing import Any

from doubles.azure.errors import AzureError
from doubles.azure.jobs import Job
from doubles.azure.names import (
    ARTIFACTS,
    CLIENT,
    GROUP,
    REGION,
    SUBSCRIPTION,
    TENANT,
    WORKSPACE,
    WORKSPACE_ID,
    iso_time,
)
from doubles.azure.world import World
from doubles.wire import Answer, Request, json_answer

__all__ = ["details", "discover", "get", "list_artifacts", "locate_artifact", "patch", "resolve", "run_data"]
__all__ += ["service_instances"]

HOST = f"https://{REGION}.api.azureml.ms"
DATA_ASSET = f"azureml://locations/{REGION}/workspaces/{WORKSPACE_ID}/data/"


def discover(world: World, request: Request) -> Answer:
    """Return the addresses of the region's services."""
    names = ("api", "catalog", "experimentation", "history", "hyperdrive", "labeling", "modelmanagement", "pipelines")
    return json_answer(
        {**dict.fromkeys(names, HOST), "notebooks": f"https://{WORKSPACE_ID}.{REGION}.notebooks.azure.net"}
    )


def details(world: World, request: Request, run: str) -> Answer:
    """Return the run's status, times, error, and its log files with fresh signatures."""
    job = _found(world, run)
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


def get(world: World, request: Request, run: str, experiment: str = "") -> Answer:
    """Return the run."""
    return json_answer(_run(_found(world, run)))


def patch(world: World, request: Request, run: str, experiment: str = "") -> Answer:
    """Add tags and properties to the run; change its display name and description."""
    job, told = _found(world, run), request.json()
    with job.changed:
        job.tags |= {key: str(value) for key, value in (told.get("tags") or {}).items()}
        job.properties |= {key: str(value) for key, value in (told.get("properties") or {}).items()}
        job.display_name = told.get("displayName") or job.display_name
        job.description = told.get("description") or job.description
        job.is_archived = bool(told.get("hidden", job.is_archived))
        job.revision += 1
    return json_answer(_run(job))


def run_data(world: World, request: Request) -> Answer:
    """Return the run named in the body."""
    return json_answer({"runMetadata": _run(_found(world, request.json()["runId"])), "runDefinition": None})


def service_instances(world: World, request: Request, run: str, node: str) -> Answer:
    """Return no services: the stand-in starts none."""
    _found(world, run)
    return json_answer({"instances": {}})


def resolve(world: World, request: Request) -> Answer:
    """Return the addresses of data assets; all assets of the stand-in are outputs of jobs."""
    values = {}
    for asset in request.json().get("values") or []:
        for job in list(world.jobs.values()):
            for name in job.properties_of_body.get("outputs") or {}:
                if _asset(job, name) == asset:
                    values[asset] = {"uri": _long(job.output_uri(name)), "type": "UriFolder"}
    return json_answer({"values": values})


def list_artifacts(world: World, request: Request, run: str, experiment: str = "") -> Answer:
    """Return the run's files."""
    job = _found(world, run)
    names = [name.removeprefix(f"{job.folder}/") for name in world.blobs.names(ARTIFACTS, f"{job.folder}/")]
    prefix = request.query.get("path", "")
    values = [_artifact(job, name) for name in names if name.startswith(prefix)]
    return json_answer({"value": values, "continuationToken": None, "nextLink": None})


def locate_artifact(world: World, request: Request, run: str, experiment: str = "") -> Answer:
    """Return the address of a file of the run, with a signature."""
    job, path = _found(world, run), request.query.get("path", "")
    if world.blobs.find(ARTIFACTS, f"{job.folder}/{path}") is None:
        raise AzureError(404, "UserError", f"Artifact {path} not found.")
    return json_answer({**_artifact(job, path), "contentUri": world.sas_uri(ARTIFACTS, f"{job.folder}/{path}")})


def _found(world: World, run: str) -> Job:
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


def _run(job: Job) -> dict[str, Any]:
    asked = job.properties_of_body
    who = {"userObjectId": CLIENT, "userTenantId": TENANT, "userName": "cloudtrain"}
    return {
        "runNumber": job.number,
        "rootRunId": job.name,
        "createdUtc": iso_time(job.created),
        "createdBy": who,
        "userId": CLIENT,
        "runUuid": job.uuid,
        "rootRunUuid": job.uuid,
        "lastModifiedUtc": iso_time(job.history[-1][1] if job.history else time.time()),
        "runId": job.name,
        "experimentId": f"experiment-{job.experiment}",
        "name": job.display_name,
        "displayName": job.display_name or job.name,
        "description": job.description,
        "dataContainerId": f"dcid.{job.name}",
        "hidden": job.is_archived,
        "runType": "azureml.scriptrun",
        "runTypeV2": {"orchestrator": "Execution", "traits": [], "computeType": "AmlcTrain"},
        "cancelationReason": None,
        "target": job.compute["target"],
        "isVirtual": False,
        "hasVirtualParent": False,
        "inputs": {},
        "outputs": {name: {"assetId": _asset(job, name), "type": "uri_folder"} for name in asked.get("outputs") or {}},
        **_common(job),
    }


def _asset(job: Job, output: str) -> str:
    return f"{DATA_ASSET}azureml_{job.name}_output_data_{output}/versions/1"


def _long(uri: str) -> str:
    """Return an azureml:// address with subscription, group and workspace."""
    prefix = f"azureml://subscriptions/{SUBSCRIPTION}/resourcegroups/{GROUP}/workspaces/{WORKSPACE}/"
    return uri if not uri.startswith("azureml://datastores/") else prefix + uri.removeprefix("azureml://")


def _artifact(job: Job, path: str) -> dict[str, Any]:
    container = f"dcid.{job.name}"
    return {
        "artifactId": f"ExperimentRun/{container}/{path}",
        "origin": "ExperimentRun",
        "container": container,
        "path": path,
    }


def _duration(seconds: float) -> str:
    """Return the duration in .NET's format of a time span."""
    days, rest = divmod(max(0.0, seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    text = f"{int(hours):02}:{int(minutes):02}:{rest:010.7f}"
    return f"{int(days)}.{text}" if days else text
