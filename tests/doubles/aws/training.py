"""The course of a training job, in a separate thread: from the download of its input to the archive of the model."""

import contextlib
import math
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from doubles import sandbox
from doubles.aws import storage
from doubles.aws.instance import InputError, Instance, find_inputs
from doubles.aws.jobs import Job
from doubles.aws.world import World
from doubles.kit import capacity, differences, life

SPOT_BILLING = 0.3  # billable part of a training second on spot machines; invented: AWS documents only a value below 1
REASON_CHARACTERS = 1024  # length limit of the failure file
FAILED_GRACE_S = 5.0  # from SIGTERM to SIGKILL, for the remaining containers after a container has failed
SYNC_EVERY_S = 1.0  # between two copies of checkpoints to S3
STOP_FAILED = "InternalServerError: the job did not end after its stop"  # a seeded difference
NO_CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."
)

# End of an attempt -> secondary status of the job at its end, and its message.
_ENDINGS = {
    "Completed": ("Completed", "Training job completed"),
    "Failed": ("Failed", "Training job failed"),
    "Stopped": ("Stopped", "Training job stopped"),
    "MaxRuntimeExceeded": ("Stopped", "Training job runtime exceeded MaxRuntimeInSeconds provided"),
    "MaxWaitTimeExceeded": ("Stopped", "Training job runtime exceeded MaxWaitTimeInSeconds provided"),
    # The API has no secondary status of its own for this end; the message is invented.
    "MaxPendingTimeExceeded": ("Stopped", "Training job pending time exceeded MaxPendingTimeInSeconds provided"),
}


@dataclass(frozen=True)
class Ending:
    """The end of an attempt: a secondary status, or Interrupted, Abandoned."""

    kind: str
    reason: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def begin(world: World, job: Job) -> None:
    """Start the job's thread."""
    job.enter_secondary("Starting", "Preparing the instances for training")
    life.begin(job, lambda: _live(world, job))


def _live(world: World, job: Job) -> None:
    try:
        ending = _attempts(world, job)
    except life.Abandoned:
        return
    except InputError as error:
        ending = Ending("Failed", str(error))
    except Exception:
        traceback.print_exc()
        ending = Ending("Failed", f"InternalServerError: the stand-in itself: {traceback.format_exc()[-800:]}")
    _finish(world, job, ending)
    if job.has == capacity.LATE:
        begin_late(world, job)


def begin_late(world: World, job: Job) -> None:
    """Start the containers of a job whose end was told."""
    late = capacity.late(job, status="InProgress", secondary="Starting", transitions=[], training_start=None)
    world.late.append(late)
    begin(world, late)


def _attempts(world: World, job: Job) -> Ending:
    """Repeat attempts until the job is over: an interruption starts the job again."""
    if (ending := _without_machines(job)) is not None:
        return ending
    number = 0
    while True:
        number += 1
        ending = _ended(job) or _attempt(world, job, number)
        if ending.kind != "Interrupted":
            return ending
        job.enter_secondary("Interrupted", "Interrupted: managed spot training instances were taken away")
        job.enter_secondary("Starting", "Preparing the instances for training")


def _without_machines(job: Job) -> Ending | None:
    """Return the end of a job that gets no machines; None if the job gets them."""
    if job.has in ("", capacity.MACHINES):
        return None
    if job.has == capacity.FAILED:
        return _ordered(job) or Ending("Failed", NO_CAPACITY)
    if job.has == capacity.TAKEN and job.is_spot:
        job.enter_secondary("Interrupted", "Interrupted: managed spot training instances were taken away")
        job.enter_secondary("Starting", "Preparing the instances for training")
    elif not job.is_spot:
        job.enter_secondary("Pending", "Waiting for the requested ML compute capacity")  # the message is invented
    limit_s = job.request.get("StoppingCondition", {}).get("MaxPendingTimeInSeconds", math.inf)
    pending_until = math.inf if job.is_spot else job.created + limit_s
    ending: Ending | None = capacity.wait(job, lambda: _ordered(job), min(_latest(job), pending_until))
    return ending or Ending("MaxWaitTimeExceeded" if job.is_spot else "MaxPendingTimeExceeded")


def _attempt(world: World, job: Job, number: int) -> Ending:
    """Run the containers once."""
    inputs = find_inputs(job)
    if world.settings.restores_older:
        storage.remove(job.request["CheckpointConfig"]["S3Uri"], differences.newest)
    with _instances(world, job, number) as instances:
        job.enter_secondary("Downloading", "Downloading input data")
        with job.changed:
            job.training_start = job.training_start or time.time()
        for instance in instances:
            instance.lay_out(job, instances)
            instance.fill(job, inputs)
        if (ending := _ended(job)) is not None:
            return ending
        job.enter_secondary("Training", "Training image download completed. Training in progress.")
        began = time.time()
        for instance in instances:
            instance.start(job, world, instances)
        try:
            ending = _watch(world, job, instances, began)
        finally:
            job.ran_s += time.time() - began
            life.end(job, instances, 0.0)
        _copy(instances)
        if ending.kind != "Failed" and ending.kind in _ENDINGS:
            _upload(world, job, instances)
    return ending


@contextlib.contextmanager
def _instances(world: World, job: Job, attempt: int) -> Iterator[list[Instance]]:
    """Yield the attempt's machines, with empty disks, and remove the machines; an empty list if jobs do not execute."""
    if not world.settings.execute:
        yield []
        return
    job.last_epoch = max(int(time.time()), job.last_epoch + 1)
    root = world.state / "jobs" / f"{job.number}-{job.name}" / f"attempt-{attempt}"
    with sandbox.addresses(world.switch) as address:
        instances = []
        for number, kind in enumerate(job.instance_types, start=1):
            stream = f"{job.name}/algo-{number}-{job.last_epoch}"
            name = f"algo-{number}"
            instances.append(Instance(name, kind, address(), root / name, stream, on_end=job.wake))
        try:
            yield instances
        finally:
            life.end(job, instances, 0.0)
            for instance in instances:
                instance.remove()


def _watch(world: World, job: Job, instances: list[Instance], began: float) -> Ending:
    """Wait until the attempt is over; copy checkpoints meanwhile."""
    next_copy = time.time() + SYNC_EVERY_S
    limit_s = job.request.get("StoppingCondition", {}).get("MaxRuntimeInSeconds", 86_400)
    deadline = began + limit_s * world.settings.limit_factor - job.ran_s
    while True:
        if (ending := _judged(world, job, instances, deadline)) is not None:
            return ending
        if time.time() >= next_copy:
            _copy(instances)
            next_copy = time.time() + SYNC_EVERY_S
        until = min(deadline, _latest(job), next_copy if instances else math.inf)
        with job.changed:
            if not job.orders and not _over(instances):
                job.changed.wait(min(max(until - time.time(), 0.001), 3600.0))


def _judged(world: World, job: Job, instances: list[Instance], deadline: float) -> Ending | None:
    """Return the attempt's ending, after ending its containers, or None while the attempt runs."""
    settings = world.settings
    if _over(instances) and "stop" not in job.orders:
        failed = [one for one in instances if one.code not in (None, 0)]
        if not failed:
            return Ending("Completed")
        first = min(failed, key=lambda one: one.ended_at or 0.0)
        life.end(job, instances, FAILED_GRACE_S)
        return Ending("Failed", f"AlgorithmError: {first.failure()[:REASON_CHARACTERS]}, exit code: {first.code}")
    ending = _ordered(job)
    if ending is None and time.time() >= deadline:
        ending = Ending("MaxRuntimeExceeded")
    if ending is None and time.time() >= _latest(job):
        ending = Ending("MaxWaitTimeExceeded")
    if ending is None:
        return None
    graces = {"Interrupted": settings.interrupt_grace_s, "Failed": 0.0, "Completed": 0.0}
    if ending.kind in ("MaxRuntimeExceeded", "MaxWaitTimeExceeded"):
        job.enter_secondary("Stopping", _ENDINGS[ending.kind][1], "Stopping")
    grace_s = settings.stop_grace_s if settings.grace_s is None else settings.grace_s
    life.end(job, instances, graces.get(ending.kind, grace_s))
    return ending


def _over(instances: list[Instance]) -> bool:
    codes = [one.code for one in instances]
    return any(code not in (None, 0) for code in codes) or (bool(codes) and all(code == 0 for code in codes))


def _ordered(job: Job) -> Ending | None:
    """Return the ending ordered for the job, if any, the most final first. Raises life.Abandoned."""
    with job.changed:
        if "abandon" in job.orders:
            raise life.Abandoned
        if "stop" in job.orders:
            return Ending("Stopped")
        if "end" in job.orders:
            details = job.orders.pop("end")
            return Ending(details.pop("status", "Completed"), details.pop("failure_reason", None), details)
        return Ending("Interrupted") if job.orders.pop("interrupt", None) is not None else None


def _latest(job: Job) -> float:
    """Return the time limit of a spot job, waiting and running together."""
    wait_s = job.request.get("StoppingCondition", {}).get("MaxWaitTimeInSeconds")
    return job.created + wait_s if wait_s is not None else math.inf


def _ended(job: Job) -> Ending | None:
    """Return the job's ending if the job ends now."""
    ending = _ordered(job)
    return Ending("MaxWaitTimeExceeded") if ending is None and time.time() >= _latest(job) else ending


def _copy(instances: list[Instance]) -> None:
    for instance in instances:
        instance.copy()


def _upload(world: World, job: Job, instances: list[Instance]) -> None:
    """Upload the model and the output, from all instances together, to the addresses of the request."""
    if job.status != "Stopping":
        job.enter_secondary("Uploading", "Uploading generated training model")
    output = job.request["OutputDataConfig"]
    uri = f"{output['S3OutputPath'].rstrip('/')}/{job.name}/output"
    bucket, prefix = storage.split(uri)
    for instance in instances:
        differences.damage(instance.ml / "model", world.settings.artifact_damage)
    models, others = [one.ml / "model" for one in instances], [one.ml / "output/data" for one in instances]
    if not instances:
        return
    job.model_uri = f"{uri}/model.tar.gz"
    storage.put(bucket, f"{prefix}/model.tar.gz", storage.archive(models))
    if any(any(folder.iterdir()) for folder in others):
        storage.put(bucket, f"{prefix}/output.tar.gz", storage.archive(others))


def _finish(world: World, job: Job, ending: Ending) -> None:
    if ending.kind == "Stopped" and world.settings.stop_ends:
        ending = {"failed": Ending("Failed", STOP_FAILED), "completed": Ending("Completed")}[world.settings.stop_ends]
    status, message = _ENDINGS[ending.kind]
    with job.changed:
        now = time.time()
        job.failure_reason = ending.reason
        if job.training_start is not None:
            job.training_end = now
            training_s = ending.details.get("training_s", math.ceil(now - job.training_start))
            billable_s = math.ceil(training_s * (SPOT_BILLING if job.is_spot else 1.0))
            job.training_s, job.billable_s = training_s, ending.details.get("billable_s", billable_s)
        secondary = "Stopped" if ending.kind == "MaxPendingTimeExceeded" else ending.kind
        job.ended = now
        job.enter_secondary(secondary, message, status)
