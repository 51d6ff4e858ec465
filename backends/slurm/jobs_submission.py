"""At most one Slurm job for an attempt: sbatch makes a held job, a lost answer is repaired by the job's name, and the
job is released. Before, the partitions' limits and nodes, and Slurm's own test, tell whether the cluster can run a job.

All commands go through `Run`, here or on the login node. A held job is free. A late job of an abandoned submission ends
without work, because the batch script's first line asks for the file `open`, the door.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cloudtrain.entrypoints.contract import JobSpec
from cloudtrain.launcher.errors import CapacityError, CloudtrainError, ConfigError, Fault, UnreachableError
from cloudtrain.launcher.text.units import format_duration

from .channel import Login, Run

UNCERTAIN = re.compile(
    r"timed out|unable to contact|zero bytes|connect(ion)? (failure|refused|reset)|unexpected message", re.IGNORECASE
)
_FULL = re.compile(r"(Max|Grp)SubmitJob")  # the user, or all users of the account or QOS, have too many jobs
_PREFIX = re.compile(r"^(?:s[a-z]+: )?(?:error: )?(?:Batch job submission failed: |allocation failure: )?")
_DOCTOR = "`cloudtrain doctor slurm` shows yours"
_CURES = (
    ("invalid account", "slurm.account", _DOCTOR),
    ("qos specification", "slurm.qos", _DOCTOR),
    ("policy", "slurm.qos", "lower limits.max_duration or resources, or name a different QOS or account"),
    ("partition", "slurm.partition", "`sinfo` on the login node shows the partitions"),
    ("licen[cs]e", "slurm.licenses", "`scontrol show licenses` on the login node shows the site's"),
    ("reservation", "slurm.reservation", "`scontrol show reservations` on the login node shows the site's"),
    ("feature", "slurm.constraint", "`sinfo -o '%N %f'` on the login node shows the nodes' features"),
    ("generic resource|gres", "resources.accelerators", "`sinfo -o '%N %G'` shows the nodes' GPUs; or set slurm.gres"),
    ("node name", "slurm.nodelist", "`sinfo -N` on the login node shows the nodes; see also slurm.exclude"),
    ("memory", "slurm.mem", "`sinfo -o '%N %m'` on the login node shows the nodes' memory in MB"),
    ("time limit", "limits.max_duration", "`sinfo -o '%P %l'` on the login node shows the partitions' limits"),
    ("unrecognized option|invalid option|requires an argument", "slurm.raw", "see `sbatch --help` on the login node"),
)
_OTHER = ("slurm", "see `sinfo` on the login node")
MESSAGE_TIMEOUT_S = 10.0  # Slurm's default
LOOK_EVERY_S = 1.0
_OPEN = 'cd "$1" && [ ! -e closed ] && set -C && : > open && { [ ! -e closed ] || { rm -f open; false; }; }'
_CLOSE = 'mkdir -p -m 700 "$1" && cd "$1" && : > closed && rm -f open'
NOT_NOW = "Requested node configuration is not available"  # also of nodes that are down at the moment
OFF = "down,drain,fail,maint,unk"  # states of nodes that may come back
_FIELDS = "%R|%a|%l|%s|%D|%G|%c|%m|%P"
_OF_NODES = ("--gres=", "--cpus-per-task=", "--mem=", "--constraint=", "--nodelist=", "--exclude=", "--exclusive")
_STARTS = re.compile(r"to start at (\d+) using \d+ \S+ on nodes (\S+)")


def submit(run: Run, folder: str, name: str, options: Sequence[str], *, patience: float | None = None) -> int:
    """Make the attempt's only job, released, and return the number. The folder has `job.sh` and an open door.

    Raises ConfigError or CapacityError if Slurm refuses the request, UnreachableError if Slurm does not answer, and
    CloudtrainError if no job was found after a lost answer: the door is closed then.
    """
    sent = run(["sbatch", "--hold", "--parsable", f"--chdir={folder}", *options, f"{folder}/job.sh"])
    # A site's plug-in may print lines before the number.
    found = re.findall(r"^(\d+)(?:;\S+)?$", sent.stdout, re.MULTILINE) if sent.code == 0 else []
    number = int(found[-1]) if found else None
    if number is None and sent.code and not UNCERTAIN.search(sent.stderr):
        raise fault(sent.stderr)
    if number is None:
        number = find(run, name, patience_s(run) if patience is None else patience)
    if number is None:
        is_final = close(run, folder)
        kind = CloudtrainError if is_final else UnreachableError
        raise kind("Slurm gave no answer, and has no job of this name", hint="try again later")
    release(run, number)
    return number


def fault(words: str) -> ConfigError | CapacityError | UnreachableError:
    """Return the error for the words of a command of Slurm that has failed, with the key that mends the fault."""
    lines = [_PREFIX.sub("", line).strip() for line in words.splitlines() if not line.startswith("Try ")]
    said = "; ".join(line for line in lines if line) or "without a reason"
    if UNCERTAIN.search(words):
        return UnreachableError(f"Slurm does not answer: {said}", hint="try again later")
    if _FULL.search(words):
        hint = "end a job of yours, wait for its end, or name a different QOS or account: slurm.qos, slurm.account"
        return CapacityError(f"Slurm refuses the job: {said}", hint=hint)
    key, hint = next((cure for pattern, *cure in _CURES if re.search(pattern, said, re.IGNORECASE)), _OTHER)
    return ConfigError([Fault(f"Slurm refuses the job: {said}", key=key, hint=hint)])


def find(run: Run, name: str, patience: float) -> int | None:
    """Return the number of the job with the name, or None if no job appears within the patience.

    The oldest of several jobs stays; the newer jobs, still held, are cancelled. None is final only behind a closed
    door. Raises UnreachableError.
    """
    end = time.monotonic() + patience
    while True:
        told = run(["squeue", "-h", "--me", f"--name={name}", "-t", "all", "-o", "%i"])
        numbers = sorted(map(int, re.findall(r"^\d+", told.stdout, re.MULTILINE)))
        if numbers:
            for further in numbers[1:]:
                run(["scancel", str(further)])
            return numbers[0]
        if time.monotonic() >= end:
            if told.code:
                raise UnreachableError(f"Slurm does not answer: {' '.join(told.stderr.split())}", hint="try later")
            break
        time.sleep(min(LOOK_EVERY_S, max(end - time.monotonic(), 0.0)))
    over = run(["sacct", "-nPX", f"--name={name}", "-S", "now-7days", "-o", "JobIDRaw"])
    return min(map(int, re.findall(r"^\d+", over.stdout, re.MULTILINE)), default=None)


def release(run: Run, number: int) -> None:
    """Let a held job run; a job without a hold does not change."""
    done = run(["scontrol", "release", str(number)])
    if done.code and UNCERTAIN.search(done.stderr):
        message = f"Slurm holds job {number}, and does not answer: {' '.join(done.stderr.split())}"
        raise UnreachableError(message, hint="the next command about the job releases it")


def open_door(run: Run, folder: str) -> bool:
    """Make the file `open`, without which the batch script does nothing; False if the attempt was given up or sent."""
    return run(["sh", "-c", _OPEN, "sh", folder]).code == 0


def close(run: Run, folder: str) -> bool:
    """Prevent later starts: a job of the attempt that starts after the call does nothing. Return False on failure."""
    return run(["sh", "-c", _CLOSE, "sh", folder]).code == 0


def patience_s(run: Run) -> float:
    """Return how long a request may still be on its way: sbatch's own two time-outs, and five seconds."""
    told = run(["scontrol", "show", "config"]).stdout
    found = re.search(r"^MessageTimeout\s*=\s*(\d+)", told, re.MULTILINE)
    return 2 * (float(found[1]) if found else MESSAGE_TIMEOUT_S) + 5.0


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
        raise fault(told.stderr)
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
        raise fault(done.stderr)
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
