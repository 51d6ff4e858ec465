"""The course of a job, in a separate thread: from NotStarted to its end."""

import contextlib
import math
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from doubles import sandbox
from doubles.azure import joblogs
from doubles.azure.bodies import seconds
from doubles.azure.joblogs import LogFiles, file_of
from doubles.azure.jobs import Job
from doubles.azure.names import ARTIFACTS
from doubles.azure.node import InputError, Node, Volume, volumes
from doubles.azure.world import World
from doubles.kit import capacity, differences, life

CANCEL_GRACE_S = 30.0  # from SIGTERM to SIGKILL, also at limits.timeout. Invented: Azure states no figure
FAILED_GRACE_S = 5.0  # the same, for the remaining nodes after a node has failed
LIFECYCLER = "system_logs/lifecycler/lifecycler.log"
# Code and text are invented, after users' reports.
PREEMPTED = {
    "code": "PreemptionError",
    "message": "The compute node was preempted: PreemptionError. The job was ended.",
}
STOP_FAILED = {"code": "ServiceError", "message": "The run could not be canceled."}  # a seeded difference
# AllocationFailed is the code of clusters without machines; the text is invented.
NO_CAPACITY = {
    "code": "AllocationFailed",
    "message": "AllocationFailed: there is no sufficient capacity for the requested size in the region.",
}


@dataclass(frozen=True)
class Ending:
    """The end of an attempt: Completed, Failed, Canceled, or Preempted."""

    kind: str
    error: dict[str, Any] | None = None


def begin(world: World, job: Job) -> None:
    """Start the job's thread."""
    life.begin(job, lambda: _live(world, job))


def restart_logs(world: World, job: Job) -> None:
    """Replace the job's log files by new blobs if the settings require it."""
    if world.settings.restart_logs == "replace":
        for name in list(world.blobs.names(ARTIFACTS, f"{job.folder}/user_logs/")):
            joblogs.write(world.blobs, job, name.removeprefix(f"{job.folder}/"), b"", anew=True)


def _live(world: World, job: Job) -> None:
    ending = Ending("Failed", {"code": "ServiceError", "message": "the stand-in itself has failed"})
    try:
        ending = _without_machines(job)
        if ending is None:
            ending = _attempts(world, job) if world.settings.execute else _by_hand(world, job)
    except life.Abandoned:
        return
    except InputError as error:
        ending = Ending("Failed", {"code": "UserError", "message": str(error)})
    except Exception:
        traceback.print_exc()
        ending = Ending("Failed", {"code": "ServiceError", "message": traceback.format_exc()[-800:]})
    finally:
        _release(world, job)
    if "cancel" in job.orders and world.settings.stop_ends:
        ending = {"failed": Ending("Failed", STOP_FAILED), "completed": Ending("Completed")}[world.settings.stop_ends]
    if ending.kind == "Canceled":
        job.enter("CancelRequested")
    details: dict[str, Any] = {"severity": None, "details": [], "innerError": None}
    job.enter(ending.kind, None if ending.error is None else details | ending.error)
    if job.has == capacity.LATE:
        begin_late(world, job)


def begin_late(world: World, job: Job) -> None:
    """Start the containers of a job whose end was told."""
    late = capacity.late(job, status="NotStarted")
    world.late.append(late)
    begin(world, late)


def _without_machines(job: Job) -> Ending | None:
    """Return the end of a job that gets no machines, None if the job gets them: Azure's queue has no limit."""
    if job.has in ("", capacity.MACHINES):
        return None
    job.enter("Queued")
    if job.has == capacity.FAILED:
        return _ordered(job) or Ending("Failed", NO_CAPACITY)
    if job.has == capacity.TAKEN:
        return _ordered(job) or Ending("Failed", PREEMPTED)
    ending: Ending = capacity.wait(job, lambda: _ordered(job), math.inf)
    return ending


def _by_hand(world: World, job: Job) -> Ending:
    """Follow the orders of the handle."""
    while True:
        with job.changed:
            while not job.orders:
                job.changed.wait()
        told = job.orders.get("begin")
        if told is not None:
            job.orders.pop("begin")
            job.active_since = job.active_since or time.time()
            job.enter(told["status"])
        ending = _ordered(job)
        if ending is not None and ending.kind == "Preempted":
            restart_logs(world, job)
            _release(world, job)
            job.enter("Queued")
        elif ending is not None:
            return ending


def _attempts(world: World, job: Job) -> Ending:
    """Repeat attempts until the job is over: a preemption starts the job again."""
    while True:
        job.attempts += 1
        ending = _prepare(world, job) or _attempt(world, job)
        _release(world, job)
        if ending.kind != "Preempted":
            return ending


def _release(world: World, job: Job) -> None:
    with job.changed:
        job.active_s, job.active_since = job.active_now_s(), None


def _prepare(world: World, job: Job) -> Ending | None:
    """Enter the states before Running; return the job's ending if the job ends meanwhile."""
    job.enter("Queued")
    job.active_since = time.time()
    for status in ("Preparing", "Starting"):
        job.enter(status)
    return _ordered(job)


def _attempt(world: World, job: Job) -> Ending:
    """Run the containers once."""
    data = volumes(job, world)
    if job.attempts > 1:
        restart_logs(world, job)
    logs = LogFiles(world.blobs, job, world.settings.log_lag_s)
    if world.settings.restores_older:
        for volume in data:
            names = world.blobs.names(volume.container, f"{volume.path}/")
            for name in differences.newest(names) if volume.is_output else ():
                world.blobs.delete(volume.container, name)
    try:
        with _nodes(world, job) as nodes:
            for node in nodes:
                node.lay_out(job, world, _code_of(world, job), data)
                logs.note(LIFECYCLER, f"node {node.number} of attempt {job.attempts} is ready")
                logs.write(file_of(node.number, len(nodes)), b"")
            job.enter("Running")
            for node in nodes:
                node.start(job, world, data, nodes, logs)
            ending = _watch(world, job, nodes)
            life.end(job, nodes, 0.0)
            logs.note(LIFECYCLER, f"attempt {job.attempts} ended: {ending.kind}")
            if ending.kind == "Completed":
                return _finalize(world, job, nodes, data, logs)
            return ending
    finally:
        logs.close()


def _finalize(world: World, job: Job, nodes: list[Node], data: list[Volume], logs: LogFiles) -> Ending:
    job.enter("Finalizing")
    for node in nodes:
        node.collect(job, world, data)
    logs.close()
    return _ordered(job) or Ending("Completed")


def _code_of(world: World, job: Job) -> tuple[str, str] | None:
    """Return container and path of the job's code."""
    code = job.properties_of_body.get("codeId")
    if not code:
        return None
    parts = code.split("/")
    uri = world.codes[parts[-3], parts[-1]]["properties"]["codeUri"]
    container, _, path = uri.partition(".blob.core.windows.net/")[2].partition("/")
    return container, path.strip("/")


@contextlib.contextmanager
def _nodes(world: World, job: Job) -> Iterator[list[Node]]:
    """Yield the attempt's machines, with empty disks, and remove the machines at the end."""
    root = world.state / "jobs" / f"{job.number}-{job.name}" / f"attempt-{job.attempts}"
    with sandbox.addresses(world.switch) as address:
        nodes = [Node(number, address(), root / f"node-{number}", job.wake) for number in range(job.nodes)]
        try:
            yield nodes
        finally:
            life.end(job, nodes, 0.0)
            for node in nodes:
                node.remove()


def _watch(world: World, job: Job, nodes: list[Node]) -> Ending:
    """Wait until the attempt is over; return its ending, after ending its containers."""
    limit_s = seconds((job.properties_of_body.get("limits") or {}).get("timeout"))
    deadline = math.inf if limit_s is None else (job.started or time.time()) + limit_s * world.settings.limit_factor
    own_s = world.settings.grace_s
    grace_s = CANCEL_GRACE_S if own_s is None else own_s
    while True:
        with job.changed:
            ending = _ordered(job)
            failed = [node for node in nodes if node.code]
            if ending is None and not failed and any(node.code is None for node in nodes) and time.time() < deadline:
                job.changed.wait(min(max(deadline - time.time(), 0.001), 3600.0))
                continue
        if ending is not None:
            is_preempted = ending.kind == "Preempted" or ending.error == PREEMPTED
            life.end(job, nodes, 0.0 if is_preempted or ending.kind == "Completed" else grace_s)
            return ending
        if failed:
            life.end(job, nodes, FAILED_GRACE_S)
            return _failure(min(failed, key=lambda node: node.ended_at), len(nodes))
        if all(node.code == 0 for node in nodes):
            return Ending("Completed")
        job.enter("CancelRequested")  # the time limit
        life.end(job, nodes, grace_s)
        return Ending("Canceled")


def _failure(node: Node, nodes: int) -> Ending:
    file = file_of(node.number, nodes)
    message = (
        f"Execution failed. User process 'bash' exited with status code {node.code}. Please check log file '{file}' "
        "for error details."
    )
    return Ending("Failed", {"code": "UserError", "message": message})


def _ordered(job: Job) -> Ending | None:
    """Return the ending ordered for the job, if any, the most final first. Raises life.Abandoned."""
    with job.changed:
        if "abandon" in job.orders:
            raise life.Abandoned
        if "end" in job.orders:
            told = job.orders.pop("end")
            return Ending(told["status"], told["error"])
        if "cancel" in job.orders:
            return Ending("Canceled")
        if "preempt" not in job.orders:
            return None
        told = job.orders.pop("preempt")
        return Ending("Preempted") if told["how"] == "restart" else Ending("Failed", PREEMPTED)
