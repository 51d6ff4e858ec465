"""JobService and its neighbours: each operation, on the client's own message classes, and the filter of jobs.list."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from google.cloud.aiplatform_v1 import types
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2, json_format

from doubles.google import bodies, life
from doubles.google.calls import Call
from doubles.google.errors import GoogleError, invalid
from doubles.google.jobs import STRATEGIES, Job
from doubles.google.names import NUMBER, PROJECT
from doubles.kit import capacity
from doubles.kit.differences import REQUEST

if TYPE_CHECKING:
    from doubles.google.world import World

MAX_PAGE = 100
_HOST = re.compile(r"(?:([a-z]+-[a-z]+\d+)-)?aiplatform\.googleapis\.com")
_NAME = re.compile(r"projects/([^/]+)/locations/([^/]+)(?:/customJobs/([^/]+))?")
_FILTER = re.compile(r'labels\.([a-z][\w-]*)(?:="([^"\\]*)"|:\*)')


def create(world: World, call: Call, request: Any) -> Any:
    """Make a job and start it."""
    region, _ = _place(call, request.parent)
    if not request.HasField("custom_job"):
        raise invalid("Required field 'custom_job' is missing.")
    asked = type(request.custom_job)()
    given = json_format.MessageToDict(request.custom_job)
    changed = world.changes.applied(("jobs.create",), REQUEST, given)
    asked.CopyFrom(request.custom_job) if changed is given else json_format.ParseDict(changed, asked)
    for output_only in ("name", "state", "create_time", "start_time", "end_time", "update_time", "error"):
        asked.ClearField(output_only)
    bodies.check(asked, world.persistent)
    machine = asked.job_spec.worker_pool_specs[0].machine_spec.machine_type
    is_spot = asked.job_spec.scheduling.strategy == STRATEGIES.SPOT
    row = world.capacity.take(region, machine, spot=is_spot)
    _require_machines(region, machine, row)
    with world.lock:
        job = world.add(region, asked)
    job.has = row.has
    life.begin(world, job)
    world.capacity.answer(row)
    return job.resource()


def _require_machines(region: str, machine: str, row: capacity.Row) -> None:
    """Raise GoogleError without quota or stock."""
    if row.has == capacity.NO_QUOTA:
        message = f"The following quotas are exceeded: CustomModelTraining {machine} PerProjectPerRegion in {region}"
        raise GoogleError("RESOURCE_EXHAUSTED", message)
    if row.has == capacity.NO_STOCK:
        raise GoogleError("RESOURCE_EXHAUSTED", life.NO_CAPACITY.format(region=region))


def get(world: World, call: Call, request: Any) -> Any:
    """Return a job."""
    return _job(world, call, request.name).resource()


def list_all(world: World, call: Call, request: Any) -> Any:
    """Return a page of the jobs, the newest first."""
    region, _ = _place(call, request.parent)
    wanted = _parse_filter(request.filter)
    if request.page_size < 0:
        raise invalid("Page size must not be negative.")
    size = min(request.page_size or MAX_PAGE, MAX_PAGE)
    before = _number_of(request.page_token)
    with world.lock:
        jobs = sorted(world.jobs.values(), key=lambda job: -job.number)
    found = [job for job in jobs if job.region == region and (before is None or job.number < before) and wanted(job)]
    answer = types.ListCustomJobsResponse.pb()()
    answer.custom_jobs.extend(job.resource() for job in found[:size])
    if len(found) > size:
        answer.next_page_token = base64.urlsafe_b64encode(str(found[size - 1].number).encode()).decode()
    return answer


def cancel(world: World, call: Call, request: Any) -> Any:
    """Request the job's end."""
    job = _job(world, call, request.name)
    with job.changed:
        if job.status in (*job.ENDS, "JOB_STATE_CANCELLING") or "cancel" in job.orders:
            raise GoogleError(
                "FAILED_PRECONDITION", f"The CustomJob {job.name} is in state {job.status} and cannot be cancelled."
            )
        job.enter("JOB_STATE_CANCELLING")
        job.order("cancel")
    return empty_pb2.Empty()


def delete(world: World, call: Call, request: Any) -> Any:
    """Forget a job that has ended."""
    job = _job(world, call, request.name)
    with world.lock:
        if not job.has_ended:
            raise GoogleError(
                "FAILED_PRECONDITION", f"The CustomJob {job.name} is in state {job.status}; cancel it first."
            )
        world.jobs.pop(job.id, None)
    done = operations_pb2.Operation(name=f"projects/{NUMBER}/locations/{job.region}/operations/{job.id}", done=True)
    done.response.Pack(empty_pb2.Empty())
    metadata = types.DeleteOperationMetadata.pb()()
    metadata.generic_metadata.create_time.FromNanoseconds(int(time.time() * 1e9))
    done.metadata.Pack(metadata)
    return done


def get_resource(world: World, call: Call, request: Any) -> Any:
    """Return a persistent resource."""
    _place(call, request.name)
    name = request.name.rpartition("/")[2]
    if name not in world.persistent:
        raise GoogleError("NOT_FOUND", f"The PersistentResource {name} does not exist.")
    return world.persistent[name]


def _job(world: World, call: Call, name: str) -> Job:
    region, number = _place(call, name)
    job = world.jobs.get(number or "")
    if job is None or job.region != region:
        raise GoogleError("NOT_FOUND", f"The CustomJob {name} does not exist.")
    return job


def _place(call: Call, name: str) -> tuple[str, str | None]:
    """Return region and number of a job's name or its parent's. Raises GoogleError for a wrong project or host."""
    found = _NAME.match(name)
    if found is None:
        raise invalid(f"Invalid resource name: {name!r}.")
    project, region, number = found.groups()
    if project not in (PROJECT, NUMBER):
        resource = f"//aiplatform.googleapis.com/projects/{project}/locations/{region}"
        raise GoogleError(
            "PERMISSION_DENIED",
            f"Permission 'aiplatform.customJobs.{call.operation.partition('.')[2]}' denied on resource '{resource}' "
            "(or it may not exist).",
        )
    served = _HOST.fullmatch(call.host)
    if served is not None and (served[1] or "global") != region:
        raise invalid(
            f"List of found errors:\t1.Field: name; Message: The endpoint {call.host} serves the location "
            f"{served[1] or 'global'}, not {region}.\t"
        )
    return region, number


def _number_of(page_token: str) -> int | None:
    if not page_token:
        return None
    try:
        return int(base64.urlsafe_b64decode(page_token))
    except ValueError:
        raise invalid("The page token is invalid.") from None


def _parse_filter(text: str) -> Callable[[Job], bool]:
    """Return a filter by one label as a function of a job. Raises GoogleError for a different filter."""
    found = _FILTER.fullmatch(text)
    if found is None and text:
        raise invalid(f'Invalid filter "{text}".')
    if found is None:
        return lambda job: True
    key, value = found.groups()
    return lambda job: key in job.asked.labels and value in (None, job.asked.labels[key])
