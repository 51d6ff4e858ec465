"""Whether a cluster can run a job: the partitions' limits and nodes, and Slurm's own test of the request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cloudtrain.entrypoints.contract import JobSpec
from cloudtrain.launcher.errors import ConfigError, Fault
from cloudtrain.launcher.text.units import format_duration

from . import jobs_submission as submission
from .channel import Login

NOT_NOW = "Requested node configuration is not available"  # also of nodes that are down at the moment
OFF = "down,drain,fail,maint,unk"  # states of nodes that may come back
_FIELDS = "%R|%a|%l|%s|%D|%G|%c|%m|%P"
_OF_NODES = ("--gres=", "--cpus-per-task=", "--mem=", "--constraint=", "--nodelist=", "--exclude=", "--exclusive")
_STARTS = re.compile(r"to start at (\d+) using \d+ \S+ on nodes (\S+)")


class SlurmStart(NamedTuple):
    """Slurm's forecast of a job's start; without the time if this version of Slurm tells no time."""

    at_s: float | None = None
    nodes: str = ""


@dataclass(frozen=True)
class SlurmPartition:
    """A partition. `limit`: the longest time, in Slurm's words. `kinds`: count and description of equal nodes."""

    name: str
    is_up: bool
    limit: str
    most_nodes: int
    is_default: bool
    kinds: tuple[str, ...]

    @property
    def minutes(self) -> float | None:
        """The time limit in minutes, None without a limit."""
        if not (found := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", self.limit)):
            return None
        days, hours, minutes, seconds = (int(each or 0) for each in found.groups())
        return (days * 24 + hours) * 60 + minutes + seconds / 60

    @property
    def in_words(self) -> str:
        """The partition on a part of a line."""
        return f"{self.name}: {', '.join(self.kinds)}"


def partitions(login: Login) -> list[SlurmPartition]:
    """Return the partitions that the user sees. Raises UnreachableError, and ConfigError with the words of Slurm."""
    told = login.run(["sinfo", "-h", "-o", _FIELDS])
    if told.code:
        raise submission.fault(told.stderr)
    rows: dict[str, list[list[str]]] = {}
    for fields in (line.split("|") for line in told.stdout.splitlines() if line.count("|") == _FIELDS.count("|")):
        rows.setdefault(fields[0], []).append(fields)
    return [_partition(name, each) for name, each in rows.items()]


def chosen(found: Sequence[SlurmPartition], wanted: str | None) -> list[SlurmPartition]:
    """Return the partitions of the config, which may name several with commas; else the site's default partition."""
    names = (wanted or "").split(",")
    return [each for each in found if each.name in names or (names == [""] and each.is_default)]


def would_start(login: Login, body: Mapping[str, Any]) -> SlurmStart | None:
    """Return Slurm's forecast of the request's start, without a job; None if nodes must come back first.

    Raises ConfigError if no partition can run the job, UnreachableError, CredentialError.
    """
    mine = chosen(partitions(login), body["settings"]["partition"])
    _require_fit(mine, body)
    done = login.run(["sbatch", "--test-only", *body["sbatch"], "--wrap=true"])
    if done.code == 0:
        found = _STARTS.search(done.stderr)
        return SlurmStart(float(found[1]), found[2]) if found else SlurmStart()
    if NOT_NOW not in done.stderr:
        raise submission.fault(done.stderr)
    among = [f"--partition={','.join(each.name for each in mine)}"] if mine else []
    if login.run(["sinfo", "-h", *among, "-t", OFF, "-o", "%N"]).stdout.strip():
        return None
    asked = " ".join(option for option in body["sbatch"] if option.startswith(_OF_NODES))
    message = f"no node has all of {asked}; {'; '.join(each.in_words for each in mine)}"
    hint = "lower resources.accelerators, slurm.cpus_per_node or slurm.mem, or name another slurm.partition"
    raise ConfigError([Fault(message, key="slurm", hint=hint)])


def _partition(name: str, rows: Sequence[Sequence[str]]) -> SlurmPartition:
    """Return the partition from sinfo's rows, a row for nodes that are alike."""
    first = rows[0]
    counts = [int(nodes) for *_, nodes, _, _, _, _ in rows]
    kinds = [
        f"{nodes} nodes with {'' if gres == '(null)' else re.sub('[(].*?[)]', '', gres) + ', '}{cores} cores, {mem} MB"
        for *_, nodes, gres, cores, mem, _ in rows
    ]
    most = first[3].rpartition("-")[2]  # such as 1, 1-4 or 1-infinite
    most_nodes = min(int(most), sum(counts)) if most.isdigit() else sum(counts)
    return SlurmPartition(name, first[1] == "up", first[2], most_nodes, first[8].endswith("*"), tuple(kinds))


def _require_fit(mine: Sequence[SlurmPartition], body: Mapping[str, Any]) -> None:
    """Raise ConfigError if no partition has the job's time and nodes: sbatch would take the job, which never starts."""
    minutes = next(int(option.partition("=")[2]) for option in body["sbatch"] if option.startswith("--time="))
    nodes, faults = JobSpec.load(body["order"]["job"]).nodes, []
    for each in mine:
        if each.minutes is not None and each.minutes < minutes:
            message = f"the job may take {format_duration(minutes * 60)}, and the partition {each.name} gives"
            message += f" {format_duration(int(each.minutes) * 60)} at most"
            hint = f"--set limits.max_duration={int(each.minutes)}m"
            faults.append(Fault(message, key="limits.max_duration", hint=hint))
        elif nodes > each.most_nodes:
            message = f"the job takes {nodes} nodes, and the partition {each.name} gives {each.most_nodes} at most"
            hint = f"--set resources.instances={each.most_nodes}"
            faults.append(Fault(message, key="resources.instances", hint=hint))
    if mine and len(faults) == len(mine):
        raise ConfigError(faults)
