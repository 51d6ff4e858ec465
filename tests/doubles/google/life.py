"""The course of a job, in a separate thread: from JOB_STATE_QUEUED to its end.

After Google's "Understand the custom training service": a replica's code starts as soon as its machine is up, the state
is RUNNING when all machines are up, and the job ends with its first replica. The documentation does not list the exit
codes that are "common errors": in the stand-in 1 to 127 end the job at once, and signals (128 and more) allow a retry.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import shutil
import signal
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from doubles import sandbox
from doubles.google.jobs import STRATEGIES, Job
from doubles.google.replica import Replica
from doubles.kit import capacity, differences, life

if TYPE_CHECKING:
    from doubles.google.world import World

SERVICE = "service"  # the task of the platform's own messages
FIRST_TRANSIENT = 128
RESTARTING = "JOB_STATE_PENDING"  # the state while the whole job restarts; Google documents no state
WORKER_RESTARTS, JOB_RESTARTS = 5, 3
CANCEL_GRACE_S = 30.0  # from SIGTERM to SIGKILL. Assumed: Kubernetes' default; Google states none
END_GRACE_S = 2.0  # the same, for the remaining replicas after the first has ended or any has failed
CANCELLED = (1, "CANCELED")
STOP_FAILED = 13, "The job could not be cancelled."  # a seeded difference
INTERNAL = 13, "Internal error occurred for the current attempt."
PREEMPTED_CODE, PREEMPTED = (  # the text is invented
    14,
    "The machine of replica {name} was preempted. To find out more, please check the logs: {url}",
)

NO_CAPACITY = "Resources are insufficient in region: {region}. Please try a different region."


@dataclass(frozen=True)
class Ending:
    """The end of a job or an attempt: a state, or "restart"."""

    state: str
    error: tuple[int, str] | None = None


def begin(world: World, job: Job) -> None:
    """Start the job's thread."""
    life.begin(job, lambda: _live(world, job))


def _live(world: World, job: Job) -> None:
    try:
        ending = _without_machines(job)
        if ending is None:
            ending = _attempts(world, job) if world.settings.execute else _by_hand(job)
    except life.Abandoned:
        return
    except Exception:
        traceback.print_exc()
        ending = Ending("JOB_STATE_FAILED", INTERNAL)
    if "cancel" in job.orders and world.settings.stop_ends:
        ends = {"failed": Ending("JOB_STATE_FAILED", STOP_FAILED), "completed": Ending("JOB_STATE_SUCCEEDED")}
        ending = ends[world.settings.stop_ends]
    if ending.state == "JOB_STATE_CANCELLED":
        job.enter("JOB_STATE_CANCELLING")
        life.sleep_anyhow(job, world.settings.cancelling_s)
    words = {"JOB_STATE_SUCCEEDED": "Job completed successfully.", "JOB_STATE_CANCELLED": "Job is cancelled."}
    _note(world, job, words.get(ending.state, "Job failed."), "INFO" if ending.state in words else "ERROR")
    job.enter(ending.state, ending.error)
    if job.has == capacity.LATE:
        begin_late(world, job)


def begin_late(world: World, job: Job) -> None:
    """Start the containers of a job whose end was told."""
    late = capacity.late(job, status="JOB_STATE_PENDING", replicas=[])
    late.enter_first()
    world.late.append(late)
    begin(world, late)


def _without_machines(job: Job) -> Ending | None:
    """Return the end of a job that gets no machines; None if the job gets them.

    JOB_STATE_QUEUED is a wait for quota. A flex start ends after its maximal wait; all others may wait for ever.
    """
    if job.has in ("", capacity.MACHINES):
        return None
    no_capacity = Ending("JOB_STATE_FAILED", (8, NO_CAPACITY.format(region=job.region)))
    scheduling = job.spec.scheduling
    if job.has == capacity.FAILED:
        return _ordered(job) or no_capacity
    if job.has == capacity.TAKEN:
        message = PREEMPTED.format(name="workerpool0-0", url=job.logs_url)
        return _ordered(job) or Ending("JOB_STATE_FAILED", (PREEMPTED_CODE, message))
    is_flex = scheduling.strategy == STRATEGIES.FLEX_START
    if not is_flex:
        job.enter("JOB_STATE_QUEUED")
    wait_s = scheduling.max_wait_duration.seconds if is_flex else 0  # 0: no limit
    ending: Ending | None = capacity.wait(job, lambda: _ordered(job), job.created + wait_s if wait_s else math.inf)
    return ending or no_capacity


def _by_hand(job: Job) -> Ending:
    """Follow the orders of the handle."""
    while True:
        with job.changed:
            while not job.orders:
                job.changed.wait()
            told = job.orders.pop("begin", None)
            job.orders = {name: order for name, order in job.orders.items() if not name.startswith("preempt:")}
        if told is not None:
            job.enter(told["state"])
        if (ending := _ordered(job)) is not None:
            return ending


def _attempts(world: World, job: Job) -> Ending:
    """Repeat attempts until the job is over."""
    _note(world, job, "Waiting for job to be provisioned.")
    with _machines(world, job) as replicas:
        job_restarts = 0
        while True:
            job.attempts += 1
            ending = _attempt(world, job, replicas, job_restarts)
            if ending.state not in ("restart", "restart job"):
                return ending
            if ending.state == "restart job":
                job_restarts += 1
                for replica in replicas:
                    replica.restarts = 0
            _note(world, job, "Job is restarted.")
            job.enter(RESTARTING)


@contextlib.contextmanager
def _machines(world: World, job: Job) -> Iterator[list[Replica]]:
    """Yield the replicas, not started, and remove the replicas at the end."""
    root, mark = world.state / "jobs" / job.id, uuid.uuid5(uuid.NAMESPACE_OID, job.id).hex[:10]
    with sandbox.addresses(world.switch) as address:
        replicas = []
        for pool in job.pools:
            for index in range(pool.replicas):
                name = f"cmle-training-{pool.name}-{mark}-{index}"
                replicas.append(Replica(pool, index, name, address(), root, job.wake))
        job.replicas = replicas
        try:
            yield replicas
        finally:
            life.end(job, replicas, 0.0)
            shutil.rmtree(root, ignore_errors=True)


def _attempt(world: World, job: Job, replicas: list[Replica], job_restarts: int) -> Ending:
    """Run the replicas until the attempt is over; return its ending, after ending its containers."""
    if world.settings.restores_older:
        for bucket in world.storage.objects.buckets():
            for name in differences.newest(world.storage.names(bucket.name)):
                world.storage.remove(bucket.name, name)
    for replica in replicas:
        replica.is_done = False
        replica.start(world, job)
    if job.started is None:
        _note(world, job, "Job is running.")
    job.enter("JOB_STATE_RUNNING")
    while (ending := _next(world, job, replicas, job_restarts)) is None:
        pass
    life.end(job, replicas, _grace_s(world, ending))
    for replica in replicas:
        replica.put_written(world)
    for bucket in world.storage.objects.buckets() if world.settings.artifact_damage else ():
        for name in fnmatch.filter(world.storage.names(bucket.name), f"*/{world.settings.artifact_damage}"):
            data = world.storage.read(bucket.name, name) or b"?"
            world.storage.put(bucket.name, name, data[:-1] + bytes([data[-1] ^ 1]))
    return ending


def _grace_s(world: World, ending: Ending) -> float:
    if ending.state == "JOB_STATE_CANCELLED":
        return CANCEL_GRACE_S if world.settings.grace_s is None else world.settings.grace_s
    return 0.0 if ending.state.startswith("restart") else END_GRACE_S


def _next(world: World, job: Job, replicas: list[Replica], job_restarts: int) -> Ending | None:
    """Wait for the next event; return the attempt's ending, if any."""
    deadline = math.inf if job.started is None else job.started + job.timeout_s * world.settings.limit_factor
    with job.changed:
        ending = _ordered(job)
        _preempt_ordered(job, replicas)
        over = [one for one in replicas if one.run is not None and one.run.is_over and not one.is_done]
        if ending is None and not over and time.time() < deadline:
            job.changed.wait(min(max(deadline - time.time(), 0.001), 3600.0))
            return None
    if ending is not None:
        return ending
    for replica in sorted(over, key=lambda one: one.run.over_at if one.run else 0.0):
        if (ending := _ended(world, job, replica, job_restarts)) is not None:
            return ending
    if time.time() < deadline:
        return None
    _note(world, job, "The job has exceeded its timeout.", "ERROR")
    job.enter("JOB_STATE_CANCELLING")  # assumed, after tensorflow/tfx issue 6223: "it gets cancelled"
    return Ending("JOB_STATE_CANCELLED", CANCELLED)


def _ended(world: World, job: Job, replica: Replica, job_restarts: int) -> Ending | None:
    """Decide about a replica that has ended; return the attempt's ending, if any."""
    run = replica.run
    assert run.code is not None
    replica.codes.append(run.code)
    if run.code == 0 and not run.is_preempted:
        replica.is_done = True
        return Ending("JOB_STATE_SUCCEEDED") if replica.is_chief else None
    message = _sentence(job, replica, run.code, run.is_preempted)
    _note(world, job, message, "ERROR")
    scheduling = job.spec.scheduling
    is_final = run.code < FIRST_TRANSIENT and not run.is_preempted
    error = (PREEMPTED_CODE if run.is_preempted else 3), message
    if is_final or scheduling.disable_retries:
        return Ending("JOB_STATE_FAILED", error)
    if replica.restarts < WORKER_RESTARTS:
        replica.restarts += 1
        if scheduling.restart_job_on_worker_restart:
            return Ending("restart")
        _note(world, job, f"Replica {replica.name} is restarted.")
        replica.start(world, job)
        return None
    return Ending("restart job") if job_restarts < JOB_RESTARTS else Ending("JOB_STATE_FAILED", error)


def _sentence(job: Job, replica: Replica, code: int, is_preempted: bool) -> str:
    if is_preempted:
        return PREEMPTED.format(name=replica.name, url=job.logs_url)
    status = str(code)
    with contextlib.suppress(ValueError):
        if code > FIRST_TRANSIENT:
            status = f"{code - FIRST_TRANSIENT}({signal.Signals(code - FIRST_TRANSIENT).name})"
    return (
        f"The replica {replica.name} exited with a non-zero status of {status}. To find out more about why your job "
        f"exited please check the logs: {job.logs_url}"
    )


def _ordered(job: Job) -> Ending | None:
    """Return the ending ordered for the job, if any, the most final first. Raises life.Abandoned."""
    with job.changed:
        if "abandon" in job.orders:
            raise life.Abandoned
        if "end" in job.orders:
            told = job.orders.pop("end")
            return Ending(told["state"], None if told["error"] is None else tuple(told["error"]))
        return Ending("JOB_STATE_CANCELLED", CANCELLED) if "cancel" in job.orders else None


def _preempt_ordered(job: Job, replicas: list[Replica]) -> None:
    """Kill the replicas that are ordered to be preempted, without a warning."""
    for order in [name for name in job.orders if name.startswith("preempt:")]:
        del job.orders[order]
        replica = next((one for one in replicas if f"preempt:{one.name}" == order), None)
        if replica is None or replica.run is None or replica.run.is_over:
            continue
        replica.run.is_preempted = True
        replica.run.kill()


def _note(world: World, job: Job, text: str, severity: str = "INFO") -> None:
    world.logs.write(job.id, SERVICE, text, severity=severity)
