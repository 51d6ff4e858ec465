"""At most one Slurm job for an attempt: sbatch makes a held job, a lost answer is repaired by the job's name, and the
job is released.

All commands go through `Run`, here or on the login node. A held job is free. A late job of an abandoned submission ends
without work, because the batch script's first line asks for the file `open`, the door.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from cloudtrain.launcher.errors import CloudtrainError, ConfigError, Fault, UnreachableError

from .channel import Run

UNCERTAIN = re.compile(
    r"timed out|unable to contact|zero bytes|connect(ion)? (failure|refused|reset)|unexpected message", re.IGNORECASE
)
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


def submit(run: Run, folder: str, name: str, options: Sequence[str], *, patience: float | None = None) -> int:
    """Make the attempt's only job, released, and return the number. The folder has `job.sh` and an open door.

    Raises ConfigError if Slurm refuses the request, UnreachableError if Slurm does not answer, and CloudtrainError if
    no job was found after a lost answer: the door is closed then.
    """
    sent = run(["sbatch", "--hold", "--parsable", f"--chdir={folder}", *options, f"{folder}/job.sh"])
    number = _number(sent.stdout) if sent.code == 0 else None
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


def fault(words: str) -> ConfigError | UnreachableError:
    """Return the error for the words of a command of Slurm that has failed, with the key that mends the fault."""
    lines = [_PREFIX.sub("", line).strip() for line in words.splitlines() if not line.startswith("Try ")]
    said = "; ".join(line for line in lines if line) or "without a reason"
    if UNCERTAIN.search(words):
        return UnreachableError(f"Slurm does not answer: {said}", hint="try again later")
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


def _number(text: str) -> int | None:
    """Return the job's number from the output of `sbatch --parsable`; a site's plug-in may print lines before."""
    found = re.findall(r"^(\d+)(?:;\S+)?$", text, re.MULTILINE)
    return int(found[-1]) if found else None
