"""Files from hosts: folders of a job, copied below a local folder, and pieces of log files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cloudtrain.entrypoints.agent.node_logs import Chunk
from cloudtrain.entrypoints.foreign import is_inside, sha256_of
from cloudtrain.entrypoints.replication.rotation import unseen
from cloudtrain.launcher.backend import LeftFiles
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UnreachableError

from .calls import Call, Fleet, HostAnswer
from .hosts import Host

BLOCK = 4 << 20
SUMS_S = 600.0  # for the sums of files that another host has with the same name and size
LEFT_S = 30.0  # for the sizes of folders
CLOCKS_S = 0.25  # clock differences up to this are not corrected: the round trip allows no better measurement


def brought(fleet: Fleet, places: Sequence[tuple[Host, str]], folder: Path) -> list[Path]:
    """Copy a folder of each node below `folder`; return the files there.

    If files of equal names differ between hosts, the later hosts' files go to `node-N/`. Of a series of checkpoints of
    the first host, older ones that only a later host has are left out: the script has removed them.
    Raises UnreachableError if a host was skipped, after the files of the reached hosts are in the folder.
    """
    files: dict[Path, int] = {}
    missing = []
    leader: list[str] | None = None
    for number, (host, place) in enumerate(places):
        try:
            reply = fleet.call(host, "files.tree", {"folder": place})
        except UnreachableError:
            missing.append(host.name)
            continue
        there = reply["files"] or ()
        leader = [name for name, _ in there] if leader is None else leader
        left_out = unseen((name for name, _ in there), leader)
        there = [(name, size) for name, size in there if name not in left_out]
        here = {name: files.get(_inside(host, folder, name)) for name, _ in there}
        like = [name for name, size in there if here[name] == size]
        sums = fleet.call(host, "files.tree", {"folder": place, "sums": like}, limit_s=SUMS_S)["sums"] if like else {}
        for name, size in there:
            path = _inside(host, folder, name)
            if name in (sums or ()) and sums[name] == sha256_of(path):
                continue  # from a disk that the hosts share, or equal on each host
            if here[name] is not None:
                path = _inside(host, folder / f"node-{number}", name)
            _download(fleet, host, f"{place}/{name}", size, path)
            files[path] = size
    if missing:
        what = f"{', '.join(missing)} cannot be reached: what only it has is missing"
        raise UnreachableError(f"{what}; what the others have left is in {folder}", hint="the same call again, later")
    return sorted(files)


def left(fleet: Fleet, folders: Mapping[Host, Mapping[str, str]], *, remove: bool) -> list[LeftFiles]:
    """Return the folders (path -> job) on the hosts: `Cleans.left`; without paths each job and each cache."""
    calls = {host: Call("files.left", {"folders": [*paths], "remove": remove}) for host, paths in folders.items()}
    found = []
    for host, answer in fleet.ask(calls, SUMS_S if remove else LEFT_S, is_urgent=True).items():
        jobs, name = folders[host], "" if host.is_here else f"{host.name}:"
        if answer.error is not None:
            why = answer.error.message
            found += [LeftFiles(job, f"{name}{path}", kept=why) for path, job in (jobs or {host.workdir: ""}).items()]
            continue
        sizes, kept = answer.reply["sizes"], answer.reply["kept"]
        found += [LeftFiles(jobs.get(path, ""), f"{name}{path}", sizes[path], kept.get(path, "")) for path in sizes]
    return found


def own_folders(job: str, *paths: str) -> dict[str, str]:
    """Return the folders (path -> job) of the job alone: `.../JOB`, and `.../jobs/JOB` around a path of our layout.

    A job may have the name of a user's home or of a bucket, which must stay.
    """
    name = re.escape(job)
    own = re.compile(rf".+/jobs/{name}(?=/(?:attempt-\d+|checkpoints|output)(?:/|$))|.*[^/]/{name}(?=/?$)")
    return {found[0]: job for path in paths if (found := own.match(path))}


def chunks(answer: HostAnswer) -> list[list[Chunk]]:
    """Return the pieces of each node's log files from the answer to the verb `logs`."""
    found, begin = list[list[Chunk]](), 0
    for node in answer.reply["nodes"].values():
        found.append([])
        for reply in node["chunks"]:
            found[-1].append(Chunk.load(reply, answer.data[begin : begin + reply["size"]]))
            begin += reply["size"]
    return found


def have_ended(answers: Iterable[HostAnswer]) -> bool:
    """Return whether the agents of all nodes in the answers to the verb `logs` have ended."""
    return all(node["ended"] for answer in answers for node in answer.reply["nodes"].values())


def ahead_s(fleet: Fleet, host: Host) -> float:
    """Return the host's clock minus ours, 0 for a difference that is too small to be corrected."""
    found = fleet.channel(host).ahead_s
    return found if abs(found) > CLOCKS_S else 0.0


def nodes_of(ranks: frozenset[int] | None, count: int, nproc_per_node: int, *, can_shrink: bool) -> list[int]:
    """Return the nodes that may have the ranks' lines: after a restart on fewer nodes, a rank may be on any node."""
    if ranks is None or can_shrink:
        return list(range(count))
    return sorted({rank // nproc_per_node for rank in ranks} & set(range(count)))


def _inside(host: Host, folder: Path, name: str) -> Path:
    if not is_inside(name):
        raise ConfigError(f"{host.name} names a file outside the folder: {name!r:.300}", where=str(folder))
    return folder / name


def _download(fleet: Fleet, host: Host, source: str, size: int, path: Path) -> None:
    """Copy one file. Raises ConfigError if the file cannot be written here."""
    partial = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            while file.tell() < size:
                call = Call("files.get", {"path": source, "offset": file.tell(), "bytes": BLOCK})
                data = fleet.ask({host: call}, 600.0, is_urgent=True)[host].required().data
                if not data:
                    break  # the file has become shorter meanwhile
                file.write(data)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"the output cannot be copied: {error.strerror}", where=str(path)) from error
    except CloudtrainError:
        partial.unlink(missing_ok=True)
        raise
