"""A job on the user's own machines: its state, its lines, its stop, its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.entrypoints.agent import node_logs
from cloudtrain.launcher.backend import Chosen, Cursor, JobRef, LeftFiles, LogPage, SavedFiles, agent_pages, agent_state
from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.job import State
from cloudtrain.launcher.text.terminal import say

from ..channel import copies, master
from ..channel.calls import Call, Fleet, HostAnswer
from ..channel.host_channel import status_of
from ..channel.hosts import Host
from .records import SshRef
from .request import of_config

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

STOP_S = 40.0


def state(fleet: Fleet, ref: JobRef) -> State:
    """Return the job's state, from node 0's answer, else from all nodes' answers. Raises UnreachableError."""
    handle = SshRef.load(ref)
    first = _look(fleet, handle, [0], lambda answers: True)[0]
    if first.error is None:
        status = status_of(handle.nodes[0].host, first.reply)
        found = _fold(handle, {0: first}) if status.alive or status.exit else None
        if found is not None:
            return found
    answers = _look(fleet, handle, range(len(handle.nodes)), lambda answers: _fold(handle, answers) is not None)
    found = _fold(handle, answers)
    if found is None:
        raise next(answer.error for answer in answers.values() if answer.error is not None)
    return found


def artifacts(fleet: Fleet, ref: JobRef, folder: Path) -> list[Path]:
    """Copy the nodes' output folders below `folder`; return the files there. Raises UnreachableError."""
    return copies.brought(fleet, [(node.host, node.output) for node in SshRef.load(ref).nodes], folder)


def checkpoints(fleet: Fleet, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
    """Copy the nodes' checkpoint folders below `folder`; return the files. Raises UnreachableError."""
    places = [(node.host, f"{node.checkpoints}/{inner}".rstrip("/")) for node in SshRef.load(ref).nodes]
    return copies.brought(fleet, places, folder)


def logs(
    fleet: Fleet, ref: JobRef, cursor: Cursor | None, ranks: Chosen = None, *, now: bool = False, pattern: str = ""
) -> LogPage:
    """Return the lines after the cursor from all reachable hosts; unreachable hosts' lines come later, without loss."""
    handle = SshRef.load(ref)
    count, size = len(handle.nodes), handle.nproc_per_node
    wanted, calls = copies.nodes_of(ranks, count, size, can_shrink=handle.can_shrink), {}
    for node in wanted:
        asked = {
            "offsets": {handle.nodes[node].root: agent_pages.offsets(cursor, node)},
            "page_bytes": node_logs.PAGE_BYTES // len(wanted),
            "ranks": None if ranks is None else sorted(ranks),
            "pattern": pattern,
        }
        calls[handle.nodes[node].host] = Call("files.logs", asked)
    answers = fleet.ask(calls) if now else fleet.hedged(calls, lambda each: any(a.error is None for a in each.values()))
    found, ahead_s = {}, {}
    for node, answer in zip(wanted, answers.values(), strict=True):
        if answer.error is None:
            found[node] = [chunk for chunks in copies.chunks(answer) for chunk in chunks]
            ahead_s[node] = copies.ahead_s(fleet, handle.nodes[node].host)
    if not found and answers:
        raise next(answer.error for answer in answers.values() if answer.error is not None)
    page = agent_pages.page(cursor, found, ahead_s)
    missing = [handle.nodes[node].host.name for node in wanted if node not in found]
    if missing and now and not page.lines:
        say(f"the lines of {', '.join(missing)} are missing: not to be reached for now")
    have_ended = not missing and copies.have_ended(answers.values())
    # All lines of the reached hosts were read; a follower waits for the remaining hosts for `late_s`.
    is_whole = not missing and not any(chunk.has_more for chunks in found.values() for chunk in chunks)
    return replace(page, is_complete=have_ended, is_whole=is_whole)


def logs_from(fleet: Fleet, ref: JobRef, ranks: Chosen, *, lines: int | None, since_s: float | None) -> Cursor | None:
    """Return a cursor before each file's last lines, or before the lines written since the time.

    Raises UnreachableError, also if a single host cannot be reached: its lines must not be skipped.
    """
    handle = SshRef.load(ref)
    count, size = len(handle.nodes), handle.nproc_per_node
    wanted, calls = copies.nodes_of(ranks, count, size, can_shrink=handle.can_shrink), {}
    for node in wanted:
        host, ahead_s = handle.nodes[node].host, copies.ahead_s(fleet, handle.nodes[node].host)
        asked = {"lines": lines, "since_s": None if since_s is None else since_s + ahead_s}
        named = {"roots": [handle.nodes[node].root], "ranks": None if ranks is None else sorted(ranks)}
        calls[host] = Call("files.log_ends", {**named, **asked})
    cursor = {}
    for node, answer in zip(wanted, fleet.ask(calls).values(), strict=True):
        for offsets in answer.required().reply["offsets"].values():
            cursor.update({f"{node}/{name}": offset for name, offset in offsets.items()})
    return cursor


def stop(fleet: Fleet, ref: JobRef, *, now: bool) -> None:
    """Send each agent the stop request; with `now`, kill all that do not obey. Raises UnreachableError if all are away.

    A single agent with the request is enough: then all agents save and stop.
    """
    asked = {"reason": "now" if now else "user", "by_force": now}
    calls = {node.host: Call("verbs.stop", {**asked, "root": node.root}) for node in SshRef.load(ref).nodes}
    answers = fleet.ask(calls, STOP_S, is_urgent=True)
    unreached = {host.name: answer.error.message for host, answer in answers.items() if answer.error is not None}
    if len(unreached) == len(calls):
        next(iter(answers.values())).required()
    for name, why in unreached.items():
        say(f"{name} did not get the stop request; the other agents pass it on: {why}")


def saved(fleet: Fleet, refs: Sequence[JobRef], config: JobConfig) -> SavedFiles:
    """Return the files on the hosts of `config`: the send looks on no other host."""
    nodes = [node for ref in refs for node in SshRef.load(ref).nodes]
    hosts = of_config(config)
    names, former = {host.name for host in hosts}, {node.host.name for node in nodes}
    places = dict.fromkeys(hosts, nodes[-1].checkpoints)
    places |= {node.host: node.checkpoints for node in nodes if node.host.name in names}
    asked = {host: {"folder": folder, "or_damaged": True} for host, folder in places.items()}
    answers = fleet.ask({host: Call("copying.newest", each) for host, each in asked.items()}, is_urgent=True)
    newest = [answer.reply for answer in answers.values() if answer.error is None and answer.reply]
    silent = {host.name for host, answer in answers.items() if answer.error is not None} & former
    away = {" (no answer)": silent, " (not in ssh.hosts)": former - names}
    words = [f"on {' or '.join(sorted(hosts))}{why}" for why, hosts in away.items() if hosts]
    return SavedFiles(bool(newest), max((reply["step"] or 0 for reply in newest), default=0) or None, ", ".join(words))


def left(fleet: Fleet, refs: Mapping[str, Sequence[JobRef]], *, remove: bool) -> list[LeftFiles]:
    """Return the jobs' folders on their hosts; with `remove`, remove the folders."""
    folders: dict[Host, dict[str, str]] = {}
    for job, node in ((job, node) for job, those in refs.items() for ref in those for node in SshRef.load(ref).nodes):
        places = (node.root, node.checkpoints, node.mirror, *node.outputs.values())
        folders.setdefault(node.host, {}).update(copies.own_folders(job, *places))
    return copies.left(fleet, folders, remove=remove)


def shell(fleet: Fleet, ref: JobRef, node: int, argv: list[str]) -> list[str]:
    """Return the ssh command that runs `argv`, or a shell, in the node's code folder with its ranks' variables."""
    nodes = SshRef.load(ref).nodes
    if not 0 <= node < len(nodes):
        raise UsageError(f"there is no node {node}", hint=f"the job has nodes 0 to {len(nodes) - 1}")
    host = nodes[node].host
    path = fleet.call(host, "verbs.script", {"root": nodes[node].root, "argv": argv})["path"]
    command = master.argv(host, fleet.masters.socket(host), is_terminal=not argv)
    return [*command, *host.target, f"exec sh '{path}'"]


def _look(
    fleet: Fleet, handle: SshRef, nodes: Sequence[int], is_enough: Callable[[Mapping[int, HostAnswer]], bool]
) -> dict[int, HostAnswer]:
    numbers, places = {handle.nodes[node].host: node for node in nodes}, [handle.nodes[node] for node in nodes]
    calls = {at.host: Call("verbs.look", {"root": at.root, "checkpoints": at.checkpoints}) for at in places}
    answers = fleet.hedged(calls, lambda found: is_enough({numbers[host]: found[host] for host in found}))
    return {numbers[host]: answer for host, answer in answers.items()}


def _fold(handle: SshRef, answers: Mapping[int, HostAnswer]) -> State | None:
    given = {node: answer.reply for node, answer in answers.items() if answer.error is None}
    reply = {node: status_of(handle.nodes[node].host, found) for node, found in given.items()}
    nodes = len(handle.nodes) - handle.spares
    return agent_state.fold(reply, nodes, can_shrink=handle.can_shrink, spares=handle.spares) if reply else None
