"""The course of a job, in a separate thread: from JOB_STATE_QUEUED to its end.

After Google's "Understand the custom training service": a replica's code starts as soon as its machine is up, the state
is RUNNING when all machines are up, and the job ends with its first replica. The documentation does not list the exit
codes that are "common errors": in the stand-in 1 to 127 end the job at once, and signals (128 and more) allow a retry.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from doubles import sandbox
from doubles.google.jobs import Job
from doubles.google.names import REGION
from doubles.google.replica import Replica
from doubles.kit import life

if TYPE_CHECKING:
    from doubles.google.world import World

SERVICE = "service"  # the task of the platform's own messages
FIRST_TRANSIENT = 128
RESTARTING = "JOB_STATE_PENDING"  # the state while the whole job restarts; Google documents no state
END_GRACE_S = 2.0  # as cancel_grace_s, for the remaining replicas after the first has ended or any has failed
CANCELLED = (1, "CANCELED")
INTERNAL = 13, "Internal error occurred for the current attempt."
STOCKOUT = (
    8,
    f"Resources are insufficient in region: {REGION}. Please try a different region or use a different accelerator.",
)
# These texts are invented.
EXPIRED = (8, "The requested resources did not become available within the max wait duration.")
TIMED_OUT = (4, "The job has exceeded its timeout.")
PREEMPTED_CODE, PREEMPTED = (
    14,
    "The machine of replica {name} was preempted. To find out more, please check the logs: {url}",
)


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
        ending = _attempts(world, job) if world.settings.execute else _by_hand(job)
    except life.Abandoned:
        return
    except Exception:
        traceback.print_exc()
        ending = Ending("JOB_STATE_FAILED", INTERNAL)
    if ending.state == "JOB_STATE_CANCELLED":
        job.enter("JOB_STATE_CANCELLING")
        life.sleep_anyhow(job, world.settings.cancelling_s)
    words = {"JOB_STATE_SUCCEEDED": "Job completed successfully.", "JOB_STATE_CANCELLED": "Job is cancelled."}
    _note(world, job, words.get(ending.state, "Job failed."), "INFO" if ending.state in words else "ERROR")
    job.enter(ending.state, ending.error)


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
    if (ending := _wait_for_machines(world, job)) is not None:
        return ending
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
            restarts_at = time.time() + world.settings.restart_s
            while time.time() < restarts_at:
                if (ending := _pause(job, restarts_at - time.time())) is not None:
                    return ending


def _wait_for_machines(world: World, job: Job) -> Ending | None:
    """Wait in QUEUED and PENDING; return the job's ending if the job ends meanwhile."""
    _note(world, job, "Waiting for job to be provisioned.")
    queued_until = job.created + world.settings.queued_s
    while world.settings.queued or time.time() < queued_until:
        job.enter("JOB_STATE_QUEUED")
        if (ending := _pause(job, _until(queued_until))) is not None:
            return ending
    job.enter("JOB_STATE_PENDING")
    pending_until, waited_s = time.time() + world.settings.pending_s, job.max_wait_s
    expires = math.inf if waited_s is None else job.created + waited_s
    while world.settings.pending or time.time() < pending_until:
        if time.time() >= expires:
            return Ending("JOB_STATE_EXPIRED", EXPIRED)
        if (ending := _pause(job, min(_until(pending_until), max(expires - time.time(), 0.0)))) is not None:
            return ending
    return Ending("JOB_STATE_FAILED", STOCKOUT) if world.settings.stockout else None


def _until(moment: float) -> float:
    """Return the seconds until a moment; for a past moment an hour, since a change of a setting wakes the job."""
    left = moment - time.time()
    return left if left > 0 else 3600.0


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
    now, step_s = time.time(), 0.0 if job.is_flex else world.settings.stagger_s
    for number, replica in enumerate(replicas):
        replica.run, replica.is_done, replica.due = None, False, now + number * step_s
    while True:
        for replica in replicas:
            if replica.due is not None and replica.due <= time.time():
                replica.start(world, job)
        if all(replica.run is not None for replica in replicas):
            if job.started is None:
                _note(world, job, "Job is running.")
            job.enter("JOB_STATE_RUNNING")
        ending = _next(world, job, replicas, job_restarts)
        if ending is not None:
            life.end(job, replicas, _grace_s(world, ending))
            return ending


def _grace_s(world: World, ending: Ending) -> float:
    if ending.state == "JOB_STATE_CANCELLED" or ending.error == TIMED_OUT:
        return world.settings.cancel_grace_s
    return 0.0 if ending.state.startswith("restart") else END_GRACE_S


def _next(world: World, job: Job, replicas: list[Replica], job_restarts: int) -> Ending | None:
    """Wait for the next event; return the attempt's ending, if any."""
    deadline = math.inf if job.started is None else job.started + job.timeout_s
    with job.changed:
        ending = _ordered(job)
        _preempt_ordered(world, job, replicas)
        over = [one for one in replicas if one.run is not None and one.run.is_over and not one.is_done and not one.due]
        if ending is None and not over and time.time() < deadline:
            moments = [deadline, *(one.due for one in replicas if one.due is not None)]
            job.changed.wait(min(max(min(moments) - time.time(), 0.001), 3600.0))
            return None
    if ending is not None:
        return ending
    for replica in sorted(over, key=lambda one: one.run.over_at if one.run else 0.0):
        if (ending := _ended(world, job, replica, job_restarts)) is not None:
            return ending
    if time.time() < deadline:
        return None
    _note(world, job, "The job has exceeded its timeout.", "ERROR")
    if world.settings.timeout_state == "JOB_STATE_FAILED":
        return Ending("JOB_STATE_FAILED", TIMED_OUT)
    job.enter("JOB_STATE_CANCELLING")
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
    scheduling, settings = job.spec.scheduling, world.settings
    is_final = run.code < FIRST_TRANSIENT and not run.is_preempted
    error = (PREEMPTED_CODE if run.is_preempted else 3), message
    if is_final or scheduling.disable_retries:
        return Ending("JOB_STATE_FAILED", error)
    if replica.restarts < settings.worker_restarts:
        replica.restarts += 1
        if scheduling.restart_job_on_worker_restart:
            return Ending("restart")
        _note(world, job, f"Replica {replica.name} is restarted.")
        replica.due = time.time() + settings.restart_s
        return None
    return Ending("restart job") if job_restarts < settings.job_restarts else Ending("JOB_STATE_FAILED", error)


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


def _preempt_ordered(world: World, job: Job, replicas: list[Replica]) -> None:
    """Take away the machines that are ordered to be preempted."""
    for order in [name for name in job.orders if name.startswith("preempt:")]:
        del job.orders[order]
        replica = next((one for one in replicas if f"preempt:{one.name}" == order), None)
        if replica is None or replica.run is None or replica.run.is_over:
            continue
        replica.run.is_preempted = True
        if world.settings.preempt_grace_s > 0:
            replica.terminate()
            timer = threading.Timer(world.settings.preempt_grace_s, replica.run.kill)
            timer.daemon = True
            timer.start()
        else:
            replica.run.kill()


def _note(world: World, job: Job, text: str, severity: str = "INFO") -> None:
    world.logs.write(job.id, SERVICE, text, severity=severity)


def _pause(job: Job, wait_s: float) -> Ending | None:
    """Wait for some seconds or until the next event; return the job's ending if the job ends meanwhile."""
    end = time.time() + wait_s
    with job.changed:
        ending = _ordered(job)
        if ending is None and wait_s > 0:
            job.changed.wait(max(end - time.time(), 0.0))
            ending = _ordered(job)
        return ending
