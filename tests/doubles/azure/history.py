"""https://<region>.api.azureml.ms: run history's details of a run."""

from __future__ import annotations

from typing import Any

from doubles.azure.errors import AzureError
from doubles.azure.jobs import Job
from doubles.azure.names import ARTIFACTS, iso_time
from doubles.azure.world import World
from doubles.wire import Answer, Request, json_answer

__all__ = ["details"]


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


def _duration(seconds: float) -> str:
    """Return the duration in .NET's format of a time span."""
    days, rest = divmod(max(0.0, seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    text = f"{int(hours):02}:{int(minutes):02}:{rest:010.7f}"
    return f"{int(days)}.{text}" if days else text
