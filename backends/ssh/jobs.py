"""A job on the user's own machines: its state, its lines, its stop, its files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.backends.ssh import channel_hedged, channel_master
from cloudtrain.backends.ssh.channel_calls import Call, Fleet, HostAnswer
from cloudtrain.backends.ssh.hosts import Host
from cloudtrain.backends.ssh.records import SshRef
from cloudtrain.entrypoints.agent import node_logs
from cloudtrain.entrypoints.agent.node_logs import Chunk
from cloudtrain.entrypoints.contract import NodeStatus
from cloudtrain.launcher.backend import JobRef, LogPage
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UnreachableError, UsageError
from cloudtrain.launcher.job import State
from cloudtrain.launcher.jobs import agent_state
from cloudtrain.launcher.logs import agent_pages
from cloudtrain.launcher.text.terminal import say

__all__ = ["CLOCKS_S", "brought", "chunks", "logs", "logs_from", "shell", "state", "stop"]

STOP_S = 40.0
BLOCK = 4 << 20
SUMS_S = 600.0  # for the sums of files that another host has with the same name and size
CLOCKS_S = 0.25  # clock differences up to this are not corrected: the round trip allows no better measurement


def state(fleet: Fleet, ref: JobRef) -> State:
    """Return the job's state, from node 0's answer, else from all nodes' answers. Raises UnreachableError."""
    handle = SshRef.load(ref)
    first = _look(fleet, handle, [0], lambda answers: True)[0]
    if first.error is None:
        status = NodeStatus.load(first.reply)
        found = _fold(handle, {0: first}) if status.alive or status.exit else None
        if found is not None:
            return found
    answers = _look(fleet, handle, range(len(handle.nodes)), lambda answers: _fold(handle, answers) is not None)
    found = _fold(handle, answers)
    if found is None:
        raise next(answer.error for answer in answers.values() if answer.error is not None)
    return found


def logs(
    fleet: Fleet, ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
) -> LogPage:
    """Return the lines after the cursor from all reachable hosts; unreachable hosts' lines come later, without loss."""
    handle = SshRef.load(ref)
    wanted, calls = _nodes_of(handle, ranks), {}
    for node in wanted:
        asked = {
            "root": handle.nodes[node].root,
            "offsets": agent_pages.offsets(cursor, node),
            "page_bytes": node_logs.PAGE_BYTES // len(wanted),
        }
        calls[handle.nodes[node].host] = Call("read", {**asked, "ranks": None if ranks is None else sorted(ranks)})
    answers = fleet.ask(calls) if now else channel_hedged.ask(fleet, calls, _has_one)
    found, ahead_s = {}, {}
    for node, answer in zip(wanted, answers.values(), strict=True):
        if answer.error is None:
            found[node] = chunks(answer)
            ahead_s[node] = _ahead_s(fleet, handle.nodes[node].host)
    if not found and answers:
        raise next(answer.error for answer in answers.values() if answer.error is not None)
    page = agent_pages.page(cursor, found, ahead_s)
    missing = [handle.nodes[node].host.name for node in wanted if node not in found]
    if missing and now and not page.lines:
        say(f"the lines of {', '.join(missing)} are missing: not to be reached for now")
    have_ended = not missing and all(answer.reply["ended"] for answer in answers.values())
    # All lines of the reached hosts were read; a follower waits for the remaining hosts for `late_s`.
    return LogPage(page.lines, page.cursor, is_clean=True, is_complete=have_ended)


def logs_from(
    fleet: Fleet, ref: JobRef, ranks: frozenset[int] | None, *, lines: int | None, since_s: float | None
) -> dict[str, Any] | None:
    """Return a cursor before each file's last lines, or before the lines written since the time.

    Raises UnreachableError, also if a single host cannot be reached: its lines must not be skipped.
    """
    handle = SshRef.load(ref)
    wanted, calls = _nodes_of(handle, ranks), {}
    for node in wanted:
        host, ahead_s = handle.nodes[node].host, _ahead_s(fleet, handle.nodes[node].host)
        asked = {"lines": lines, "since_s": None if since_s is None else since_s + ahead_s}
        named = {"root": handle.nodes[node].root, "ranks": None if ranks is None else sorted(ranks)}
        calls[host] = Call("near_end", {**named, **asked})
    cursor = {}
    for node, answer in zip(wanted, fleet.ask(calls).values(), strict=True):
        if answer.error is not None:
            raise answer.error
        cursor.update({f"{node}/{name}": offset for name, offset in answer.reply["offsets"].items()})
    return cursor


def stop(fleet: Fleet, ref: JobRef, *, now: bool) -> None:
    """Send each agent the stop request; with `now`, kill all that do not obey. Raises UnreachableError if all are away.

    A single agent with the request is enough: then all agents save and stop.
    """
    asked = {"reason": "now" if now else "user", "by_force": now}
    calls = {node.host: Call("stop", {**asked, "root": node.root}) for node in SshRef.load(ref).nodes}
    answers = fleet.ask(calls, STOP_S, is_urgent=True)
    unreached = [(host.name, answer.error) for host, answer in answers.items() if answer.error is not None]
    if len(unreached) == len(calls):
        error = unreached[0][1]
        assert error is not None
        raise error
    for name, error in unreached:
        say(f"{name} did not get the stop request; the other agents pass it on: {error.message if error else ''}")


def brought(fleet: Fleet, places: Sequence[tuple[Host, str]], folder: Path) -> list[Path]:
    """Copy a folder of each node below `folder`; return the files there.

    If files of equal names differ between hosts, the later hosts' files go to `node-N/`. Raises UnreachableError if a
    host was skipped, after the files of the reached hosts are in the folder.
    """
    files: dict[Path, int] = {}
    missing = []
    for number, (host, place) in enumerate(places):
        try:
            reply = fleet.call(host, "tree", {"folder": place})
        except UnreachableError:
            missing.append(host.name)
            continue
        here = {name: files.get(_inside(folder, name)) for name, _ in reply["files"]}
        like = [name for name, size in reply["files"] if here[name] == size]
        sums = fleet.call(host, "tree", {"folder": place, "sums": like}, limit_s=SUMS_S)["sums"] if like else {}
        for name, size in reply["files"]:
            path = _inside(folder, name)
            if name in sums and sums[name] == _sha256(path):
                continue  # from a disk that the hosts share, or equal on each host
            if here[name] is not None:
                path = _inside(folder / f"node-{number}", name)
            _download(fleet, host, f"{place}/{name}", size, path)
            files[path] = size
    if missing:
        what = f"{', '.join(missing)} cannot be reached: what only it has is missing"
        raise UnreachableError(f"{what}; what the others have left is in {folder}", hint="the same call again, later")
    return sorted(files)


def shell(fleet: Fleet, ref: JobRef, node: int, argv: list[str]) -> list[str]:
    """Return the ssh command that runs `argv`, or a shell, in the node's code folder with its ranks' variables."""
    nodes = SshRef.load(ref).nodes
    if not 0 <= node < len(nodes):
        raise UsageError(f"there is no node {node}", hint=f"the job has nodes 0 to {len(nodes) - 1}")
    host = nodes[node].host
    path = fleet.call(host, "script", {"root": nodes[node].root, "argv": argv})["path"]
    command = channel_master.argv(host, fleet.masters.socket(host), is_terminal=not argv)
    return [*command, *host.target, f"exec sh '{path}'"]


def _look(
    fleet: Fleet, handle: SshRef, nodes: Sequence[int], is_enough: Callable[[Mapping[int, HostAnswer]], bool]
) -> dict[int, HostAnswer]:
    calls, numbers = {}, {}
    for node in nodes:
        place = handle.nodes[node]
        numbers[place.host] = node
        calls[place.host] = Call("look", {"root": place.root, "checkpoints": place.checkpoints})
    answers = channel_hedged.ask(fleet, calls, lambda found: is_enough({numbers[host]: found[host] for host in found}))
    return {numbers[host]: answer for host, answer in answers.items()}


def _fold(handle: SshRef, answers: Mapping[int, HostAnswer]) -> State | None:
    reply = {node: NodeStatus.load(answer.reply) for node, answer in answers.items() if answer.error is None}
    return agent_state.fold(reply, len(handle.nodes), can_shrink=handle.can_shrink) if reply else None


def _has_one(answers: Mapping[Host, HostAnswer]) -> bool:
    return any(answer.error is None for answer in answers.values())


def _nodes_of(handle: SshRef, ranks: frozenset[int] | None) -> list[int]:
    """Return the nodes that may have the ranks' lines: after a restart on fewer nodes, a rank may be on any node."""
    if ranks is None or handle.can_shrink:
        return list(range(len(handle.nodes)))
    return sorted({rank // handle.nproc_per_node for rank in ranks} & set(range(len(handle.nodes))))


def chunks(answer: HostAnswer) -> list[Chunk]:
    """Return the pieces of a node's log files from the answer to the verb `read`."""
    found, begin = [], 0
    for reply in answer.reply["chunks"]:
        data = answer.data[begin : begin + reply["size"]]
        begin += reply["size"]
        found.append(
            Chunk(
                reply["name"],
                reply["offset"],
                data,
                tuple((size, time_s) for size, time_s in reply["times"]),
                reply["has_more"],
            )
        )
    return found


def _ahead_s(fleet: Fleet, host: Host) -> float:
    found = fleet.channel(host).ahead_s
    return found if abs(found) > CLOCKS_S else 0.0


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise ConfigError(f"a host names a file outside the folder: {name!r}", where=str(folder))
    return path


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()


def _download(fleet: Fleet, host: Host, source: str, size: int, path: Path) -> None:
    """Copy one file. Raises ConfigError if the file cannot be written here."""
    partial = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            while file.tell() < size:
                call = Call("get", {"path": source, "offset": file.tell(), "bytes": BLOCK})
                answer = fleet.ask({host: call}, 600.0, is_urgent=True)[host]
                if answer.error is not None:
                    raise answer.error
                if not answer.data:
                    break  # the file has become shorter meanwhile
                file.write(answer.data)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"the output cannot be copied: {error.strerror}", where=str(path)) from error
    except CloudtrainError:
        partial.unlink(missing_ok=True)
        raise
