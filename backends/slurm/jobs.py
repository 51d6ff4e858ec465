"""A job on a Slurm cluster: its state, its lines, its stop, a command on a node.

The agents' files on the shared disk come first. Slurm is asked only about a job that has not begun, whose agents are
silent, or that Slurm may start again; at most once in ASK_S, by all processes together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.agent import node_logs
from cloudtrain.entrypoints.contract import NodeStatus
from cloudtrain.launcher.backend import Chosen, Cursor, JobRef, LeftFiles, LogPage, SavedFiles, agent_pages, agent_state
from cloudtrain.launcher.errors import UnreachableError, UsageError
from cloudtrain.launcher.job import ACTIVE, CLOCKS, State

from ..channel import copies, master
from ..channel.calls import Fleet
from ..channel.host_channel import status_of
from ..channel.hosts import Host
from . import status
from .channel import Login
from .jobs_submission import UNCERTAIN
from .records import SlurmRef
from .status import SlurmJob

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

ASK_S = 15.0
FIRST_S = 3.0  # from the send: then Slurm has looked at the job, and gives a reason for the wait
SILENT_S = 20.0  # without a sign of any agent; an agent touches a file every 5 s
LATE_S = 60.0  # until a file is seen on another host (NFS's attribute cache), and until accounting knows a job
# Codes of the agents (entrypoints/agent/boot.py): the agents have ended by themselves, and have left a report.
OWN_CODES = ("0", "64", "70", "75")
SAVED = "75"


def state(fleet: Fleet, ref: JobRef) -> State:
    """Return the job's state. Raises UnreachableError."""
    login, handle = _at(fleet, ref)
    asked = {"folder": handle.folder, "nodes": handle.nodes, "checkpoints": handle.checkpoints}
    found = login.poll("slurm.look", asked).reply["nodes"]
    looks = {node: status_of(login.host, status) for node, status in enumerate(found)}
    known = _fold(handle, looks)
    if known is not None and not _must_ask(looks, known):
        return known
    if known is None and abs(time.time() - handle.sent_s) < FIRST_S:
        return State("pending")
    told = login.call("slurm.ask", {"folder": handle.folder, "number": handle.number, "every_s": ASK_S})
    if told.get("error"):
        raise UnreachableError(f"Slurm does not answer: {told['error']}", hint="try again later")
    job = status.read(told)
    if job is None:
        return _unknown(handle, looks, known)
    return judged(handle, looks, job)


def judged(handle: SlurmRef, looks: Mapping[int, NodeStatus], job: SlurmJob) -> State:
    """Return the state from the agents' files and Slurm's words, with the times of all runs of a requeued job.

    The controller knows the last run only; the agents count the runs until their last sign. While the job waits for its
    next run, `ended_s` is the end of the last run, and no cost is added.
    """
    told, counted = _judged(handle, looks, job), _fold(handle, _without_agents(looks, is_reported=False))
    is_whole = told.billed_s not in (None, job.seconds)  # the agents' own figure
    if is_whole or counted is None or counted.billed_s is None:
        return told
    last_s, now_s = max(look.last_s for look in looks.values()), time.time()
    times: dict[str, Any] = {"started_s": counted.started_s, "billed_by": CLOCKS}
    if told.state == "pending" and not told.started_s:
        return replace(told, **times, ended_s=last_s or now_s, billed_s=counted.billed_s)
    after_s = 0.0
    if told.billed_s is None and job.started_s and job.nodes:  # without nodes, the job ended before its next run
        after_s = max(min(job.ended_s or now_s, now_s) - max(job.started_s, last_s), 0.0)
    return replace(told, **times, billed_s=max(counted.billed_s + after_s, told.billed_s or 0.0))


def left(fleet: Fleet, refs: Mapping[str, Sequence[JobRef]], *, remove: bool) -> list[LeftFiles]:
    """Return the jobs' folders on the shared disk; with `remove`, remove the folders."""
    folders: dict[Host, dict[str, str]] = {}
    for job, ref in ((job, SlurmRef.load(each)) for job, those in refs.items() for each in those):
        places = (ref.folder, ref.checkpoints, ref.mirror, *ref.outputs.values())
        folders.setdefault(Login.at(fleet, ref.login).host, {}).update(copies.own_folders(job, *places))
    return copies.left(fleet, folders, remove=remove)


def artifacts(fleet: Fleet, ref: JobRef, folder: Path) -> list[Path]:
    """Copy the job's output folder below `folder`; return the files there. Raises UnreachableError."""
    login, handle = _at(fleet, ref)
    return copies.brought(fleet, [(login.host, handle.output)], folder)


def checkpoints(fleet: Fleet, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
    """Copy the job's checkpoint folder below `folder`; return the files. Raises UnreachableError."""
    login, handle = _at(fleet, ref)
    return copies.brought(fleet, [(login.host, f"{handle.checkpoints}/{inner}".rstrip("/"))], folder)


def saved(fleet: Fleet, refs: Sequence[JobRef], config: JobConfig) -> SavedFiles:
    """Return the files in the job's checkpoint folder. Raises UnreachableError."""
    login, handle = _at(fleet, refs[-1])
    newest = login.call("copying.newest", {"folder": handle.checkpoints, "or_damaged": True})
    return SavedFiles(bool(newest), newest.get("step"))


def logs(
    fleet: Fleet, ref: JobRef, cursor: Cursor | None, ranks: Chosen = None, *, now: bool = False, pattern: str = ""
) -> LogPage:
    """Return the lines after the cursor from all nodes, in one call; `now` changes nothing. Raises UnreachableError."""
    login, handle = _at(fleet, ref)
    wanted = copies.nodes_of(ranks, handle.nodes, handle.nproc_per_node, can_shrink=handle.can_shrink)
    asked = {
        "offsets": {f"{handle.folder}/node-{node}": agent_pages.offsets(cursor, node) for node in wanted},
        "ranks": None if ranks is None else sorted(ranks),
        "page_bytes": node_logs.PAGE_BYTES // max(1, len(wanted)),
        "pattern": pattern,
        "is_shared": True,
    }
    answer = login.poll("files.logs", asked)
    found = dict(zip(wanted, copies.chunks(answer), strict=False))
    page = agent_pages.page(cursor, found, dict.fromkeys(found, copies.ahead_s(fleet, login.host)))
    return replace(page, is_complete=copies.have_ended([answer]))


def logs_from(fleet: Fleet, ref: JobRef, ranks: Chosen, *, lines: int | None, since_s: float | None) -> Cursor:
    """Return a cursor before each file's last lines, or before the lines written since the time."""
    login, handle = _at(fleet, ref)
    wanted = copies.nodes_of(ranks, handle.nodes, handle.nproc_per_node, can_shrink=handle.can_shrink)
    asked = {
        "roots": [f"{handle.folder}/node-{node}" for node in wanted],
        "ranks": None if ranks is None else sorted(ranks),
        "lines": lines,
        "since_s": None if since_s is None else since_s + copies.ahead_s(fleet, login.host),
    }
    found = zip(wanted, login.call("files.log_ends", asked)["offsets"].values(), strict=False)
    return {f"{node}/{name}": offset for node, offsets in found for name, offset in offsets.items()}


def stop(fleet: Fleet, ref: JobRef, *, now: bool) -> None:
    """Ask the agents to stop, or cancel a job that has not begun; `now`: Slurm kills all. Raises UnreachableError."""
    login, handle = _at(fleet, ref)
    reason = "now" if now else "user"
    asked = {"folder": handle.folder, "nodes": handle.nodes, "number": handle.number, "reason": reason}
    done = login.call("slurm.stop", asked)
    if done["code"] and UNCERTAIN.search(done["stderr"]):
        message = f"the agents have the stop request, but Slurm does not answer: {' '.join(done['stderr'].split())}"
        raise UnreachableError(message, hint="a job that has not begun is not cancelled: try again later")


def shell(fleet: Fleet, ref: JobRef, node: int, argv: list[str]) -> list[str]:
    """Return the command that runs `argv`, or a shell, as a step of the job where the node's ranks run."""
    login, handle = _at(fleet, ref)
    if not 0 <= node < handle.nodes:
        raise UsageError(f"there is no node {node}", hint=f"the job has nodes 0 to {handle.nodes - 1}")
    asked = {"folder": handle.folder, "node": node, "number": handle.number, "python": handle.python, "argv": argv}
    path = login.call("slurm.enter", asked)["path"]
    if login.host.is_here:
        return ["sh", path]
    socket = login.fleet.masters.socket(login.host)
    command = master.argv(login.host, socket, is_terminal=not argv)
    return [*command, *login.host.target, f"exec sh '{path}'"]


def _at(fleet: Fleet, ref: JobRef) -> tuple[Login, SlurmRef]:
    handle = SlurmRef.load(ref)
    return Login.at(fleet, handle.login), handle


def _fold(handle: SlurmRef, looks: Mapping[int, NodeStatus]) -> State | None:
    """Return the state from the agents' files, None before the first file."""
    if not any(look.state or look.exit for look in looks.values()):
        return None
    return agent_state.fold(looks, handle.nodes, can_shrink=handle.can_shrink)


def _must_ask(looks: Mapping[int, NodeStatus], known: State) -> bool:
    """Return whether only Slurm knows more: the agents are silent, or Slurm may start the job again."""
    if known.state not in ACTIVE:
        return known.reason in ("preempted", "node_failure")
    ages_s = [(look.now_s or 0.0) - look.last_s for look in looks.values() if look.alive]
    return not ages_s or min(ages_s) > SILENT_S


def _judged(handle: SlurmRef, looks: Mapping[int, NodeStatus], job: SlurmJob) -> State:
    known = _fold(handle, looks)
    is_asked = any(look.asked for look in looks.values())
    is_saved = any(look.saved for look in looks.values())
    told = status.state_of(job, is_asked=is_asked, is_resumable=is_saved, limit_reason=handle.limit_reason)
    if told.state == "pending":
        return told
    if told.state in ACTIVE:
        if known is not None and known.state in ACTIVE:
            return replace(known, detail=told.detail or known.detail)
        if known is None:
            return State("pending", detail=f"starts on {job.nodes}", started_s=job.started_s)
        return told  # the agents have ended, and Slurm has not decided yet whether the job runs again
    if any(look.exit for look in looks.values()):
        found = _fold(handle, _without_agents(looks))
        if found is not None and found.reason == "preempted" and told.state == "stopped":
            return replace(found, reason=told.reason, detail=told.detail)  # Slurm knows who has sent the signal
        return found or told
    is_late = job.ended_s is not None and abs(time.time() - job.ended_s) < LATE_S  # clocks may be set back
    if known is None and told.state == "succeeded":  # the script found no open door, and left
        if is_late:
            return State("pending", detail="its report is on the way", started_s=told.started_s)
        words = f"no agent has begun, as the compute nodes do not see {handle.folder}: set slurm.workdir"
        return replace(told, state="failed", reason="error", error={"rank": None, "kind": "config", "message": words})
    code = job.exit_code.partition(":")[0]
    if any(look.alive for look in looks.values()):
        if known is not None and code in OWN_CODES and is_late:
            return replace(known, detail="its report is on the way")
        return told
    # The agents left for a requeue that Slurm does not make, or the script saw the stop request before the agents.
    if (known is not None or is_asked) and told.state == "failed" and code == SAVED:
        return replace(told, state="stopped", reason="user" if is_asked else "preempted", error=None)
    return told


def _unknown(handle: SlurmRef, looks: Mapping[int, NodeStatus], known: State | None) -> State:
    """Return the state of a job that neither the controller nor the accounting knows."""
    if known is None:
        if time.time() - handle.sent_s < LATE_S:
            return State("pending")
        words = f"Slurm does not know job {handle.number}, which has not begun: cancelled long ago, or lost"
        return State("failed", "node_failure", error={"rank": None, "kind": "lost", "message": words})
    last_s = max((look.last_s for look in looks.values()), default=0.0)
    if known.state in ACTIVE and time.time() - last_s < LATE_S:
        return known
    return _fold(handle, _without_agents(looks)) or known


def _without_agents(looks: Mapping[int, NodeStatus], *, is_reported: bool = True) -> dict[int, NodeStatus]:
    """Return the nodes as if their agents were gone, and also had left no exit report."""
    gone = {node: replace(look, alive=False) for node, look in looks.items()}
    if is_reported:
        return gone
    held = {node: look.held_s or (look.state.held_s if look.state else None) for node, look in gone.items()}
    return {node: replace(look, exit=None, held_s=held[node]) for node, look in gone.items()}
