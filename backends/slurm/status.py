"""Slurm's words about a job as our state, from the text of scontrol and sacct; a node's own verdict goes first.

Times are in unix seconds. The commands run in entrypoints/host/slurm.py.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cloudtrain.launcher.job import JobState, State, no_machines

_STATES: dict[str, JobState] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"), "pending"),
    **dict.fromkeys(("SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE"), "pending"),
    **dict.fromkeys(("RUNNING", "RESIZING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "COMPLETING"), "running"),
    **dict.fromkeys(("COMPLETED",), "succeeded"),
    **dict.fromkeys(("CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED"), "stopped"),
}  # each other state is a failure
_REASONS = {
    **dict.fromkeys(("CANCELLED",), "user"),
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), "time_limit"),
    **dict.fromkeys(("PREEMPTED",), "preempted"),
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"), "node_failure"),
}
# By state, or by exit code: slurmd leaves 0:53 if it cannot open the log in the attempt's folder (seen in 22.05).
_FAULTS = {
    "OUT_OF_MEMORY": "Slurm ended the job for using more memory than slurm.mem",
    "0:53": "the compute node cannot write the job's log: set slurm.workdir to a folder on a disk that login node and "
    "compute nodes share",
}
# Slurm's reason of a wait: in words, and for a wait that may never end, the cure.
_WAITS = {
    "Resources": "waits for free nodes",
    "Priority": "waits for jobs of a higher priority",
    "BeginTime": "waits after a requeue, 2 minutes by Slurm's rule",
    "JobHeldUser": "is held: scontrol release {id}",
    "JobHeldAdmin": "is held by an administrator, who alone can release the job",
    "PartitionTimeLimit": "asks for more time than the partition gives, and never starts: lower limits.max_duration",
    "PartitionNodeLimit": "asks for more nodes than the partition gives, and never starts: lower resources.instances",
    "PartitionConfig": "asks for more than the partition has, and never starts: see `sinfo`, lower the request",
    "PartitionDown": "waits, as the partition is down",
    "PartitionInactive": "waits, as the partition takes no jobs",
    "BadConstraints": "asks for nodes that do not exist, and never starts: see slurm.constraint and slurm.gres",
    "DependencyNeverSatisfied": "waits for a job that has failed, and never starts: stop it",
    "ReqNodeNotAvail": "waits for nodes that are down, drained or reserved",
    "Nodes_required_for_job_are_DOWN": "waits for nodes that are down, drained or reserved",  # Slurm writes a sentence
    "Reservation": "waits for the reservation",
    "Licenses": "waits for licences",
    "AccountNotAllowed": "may not use the partition with this account: set slurm.account",
    "QOSNotAllowed": "may not use the partition with this QOS: set slurm.qos",
    "launch_failed_requeued_held": "is held, as a node could not start the job: scontrol release {id}, or stop the job",
    "job_requeued_in_held_state": "is held after a requeue: scontrol release {id}, or stop the job",
    "JobHoldMaxRequeue": "is held after too many requeues: scontrol release {id}, or stop the job",
    "user_env_retrieval_failed": "is held, as a node could not read the login's start-up files: correct the "
    "files, then scontrol release {id}",
    "InvalidQOS": "names a QOS that is not the user's, and never starts: set slurm.qos",
    "InvalidAccount": "names an account that is not the user's, and never starts: set slurm.account",
}
_LIMIT = re.compile(r"(QOS|Assoc)(Grp|Max)(\w+)")
_SPENT = re.compile(r"(Minutes|RunMinutes)")


@dataclass(frozen=True)
class SlurmJob:
    """The last run of a job."""

    number: int
    state: str
    reason: str = ""
    exit_code: str = ""
    restarts: int = 0
    started_s: float | None = None
    ended_s: float | None = None
    nodes: str = ""
    seconds: float | None = None
    """Of all runs, requeued runs too; None if the source knows the last run only."""
    by: str = ""
    """The user that has cancelled the job, if not the job's owner."""


def read(told: Mapping[str, Any]) -> SlurmJob | None:
    """Return the job in the answer of `ask` (entrypoints/host/slurm.py), None if Slurm does not know the job."""
    readers = {"scontrol": of_scontrol, "sacct": of_sacct}
    job = readers[told["program"]](told["text"]) if told["program"] in readers else None
    return job and replace(job, by=told.get("by", ""))


def of_scontrol(text: str) -> SlurmJob | None:
    """Return the job in the output of `scontrol show job -o NUMBER`, None if the text has no job."""
    # The first value of a name counts: the job's comment, which may have any text, comes later.
    found = dict(reversed(re.findall(r"(?:^|\s)(\w+)=(\S*)", text)))
    if "JobId" not in found or "JobState" not in found:
        return None
    return SlurmJob(
        int(found["JobId"]),
        found["JobState"],
        found.get("Reason", ""),
        found.get("ExitCode", ""),
        int(found.get("Restarts", "0")),
        _time(found.get("StartTime", "")),
        _time(found.get("EndTime", "")),
        "" if found.get("NodeList") == "(null)" else found.get("NodeList", ""),
    )


def of_sacct(text: str) -> SlurmJob | None:
    """Return the job in sacct's output, a line a run; None if accounting does not know the job yet."""
    runs = [line.split("|") for line in text.splitlines() if line.count("|") == 5]
    if not runs:
        return None
    spans = [(_time(start), _time(end)) for *_, start, end, _ in runs]
    number, state, code, start, end, nodes = runs[-1]
    held_s = sum(max(ended - started, 0.0) for started, ended in spans if started and ended)
    name, known = state.split()[0].rstrip("+"), "" if nodes == "None assigned" else nodes
    return SlurmJob(int(number), name, "", code, len(runs) - 1, _time(start), _time(end), known, held_s)


def state_of(job: SlurmJob, *, is_asked: bool, is_resumable: bool, limit_reason: str) -> State:
    """Return the state of a job without a verdict of the job's nodes. `is_asked`: a stop was asked for."""
    name = job.state.split()[0].rstrip("+")
    kind = _STATES.get(name, "failed")
    if job.started_s == job.ended_s and not job.nodes:  # Slurm gives the end of a job in its queue as its start
        job = replace(job, started_s=None)
    facts: dict[str, Any] = {"started_s": job.started_s, "restarts": job.restarts, "billed_s": job.seconds}
    if kind == "pending":
        return State("pending", detail=wait_in_words(job), restarts=job.restarts, billed_s=job.seconds)
    if kind == "running":
        suspended = "suspended by Slurm" if name in ("SUSPENDED", "STOPPED") else None
        return State("stopping" if is_asked else "running", detail=suspended, **facts)
    facts["ended_s"] = job.ended_s
    if kind == "succeeded":
        return State("succeeded", **facts)
    if name == "DEADLINE" and not job.nodes and not job.restarts:  # sbatch's --deadline is limits.max_wait
        return no_machines("no machines within limits.max_wait", resumable=is_resumable, ended_s=job.ended_s)
    reason = _REASONS.get(name, "error")
    if kind == "stopped":
        facts["detail"] = f"cancelled by the user {job.by} of the cluster" if job.by else None
        return State("stopped", limit_reason if reason == "time_limit" else reason, is_resumable, **facts)
    said = f"Slurm says {name} {job.exit_code}{_in_words(job.exit_code)}".rstrip()
    message = _FAULTS.get(name) or _FAULTS.get(job.exit_code, said)
    error = {"rank": None, "kind": "node" if reason == "node_failure" else "error", "message": message}
    return State("failed", reason, is_resumable, error, **facts)


def _in_words(exit_code: str) -> str:
    """Return the signal in `CODE:SIGNAL`, by which Slurm has killed a job, or in a shell's code 128+n."""
    code, _, killed = exit_code.partition(":")
    numbers = [int(number) for number in (killed, code) if number.isdigit()]
    signum = next((n for n in (numbers[0], numbers[-1] - 128) if n in set(signal.Signals)), 0) if numbers else 0
    return f": ended by {signal.Signals(signum).name} ({signal.strsignal(signum)})" if signum else ""


def wait_in_words(job: SlurmJob) -> str | None:
    """Return why a pending job waits, with the cure if the wait may never end."""
    reason = job.reason.strip("()").split(",")[0]
    if reason in ("", "None"):
        return None
    if words := _WAITS.get(reason):
        return words.format(id=job.number)
    if limit := _LIMIT.match(reason):
        whose = "the QOS" if limit[1] == "QOS" else "the account"
        if _SPENT.search(limit[3]):
            return f"waits, as {whose} has too little time left ({reason}): see `sshare`, or ask the site"
        return f"waits, as {whose} is at a limit ({reason})"
    return f"waits: {reason}"


def _time(text: str) -> float | None:
    """Return unix seconds, None for Unknown, None or N/A."""
    return float(text) if text.isdigit() and int(text) else None
