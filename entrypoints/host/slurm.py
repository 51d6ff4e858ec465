"""Verbs for a Slurm cluster's login node: Slurm's commands, and the jobs' folders on the disk shared with the nodes.

The agents run on other machines, so their files alone show whether they live: the state, the exit report, and the time
of the last write. A disk over the network may show a file late: opening the folder asks the server again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from .. import atomic_json, processes
from ..agent import node_folder
from ..contract import BEAT, EXIT, RECORD, STATE, STATE_EVERY_S, STOP, ExitReport, NodeStatus, has_checkpoint
from ..errors import Refused
from .calls import Here

OBEY_S = 5.0
ENDING_S = 1.0  # between two questions about a job that Slurm is ending
RUN_S = 50.0  # sbatch gives up after two of Slurm's time-outs, 20 s by default
NOTE = "slurm.json"  # in an attempt's folder: Slurm's last answer about the job
LOCK = "slurm.lock"
OPEN, CLOSED = "open", "closed"  # the door of an attempt
NUMBER = "number"  # the job's number, written by the batch script
ORDER, PACKAGE = "order.json", "package"
# Slurm delays a requeued job by 2 minutes; the job's owner may lift the delay.
_REQUEUED = re.compile(r"\sReason=BeginTime\s.*?\sRestarts=[1-9]")
# No format of the user's shell, and no variable that would make several jobs of an attempt, let sbatch wait for the
# job's end, or let the compute node run a login shell.
_UNSET = (
    *("SQUEUE_FORMAT", "SQUEUE_FORMAT2", "SACCT_FORMAT", "SLURM_CLUSTERS"),
    *("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_HINT", "SBATCH_CLUSTERS", "SBATCH_GET_USER_ENV"),
)
# sbatch's own variables are the job's environment. `sbatch --export=NIL` would not do: the compute node then takes the
# environment of the user's login shell there (seen in 22.05).
_OF_JOBS = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "SLURM_CONF")


def run(*, argv: list[str]) -> dict[str, Any]:
    """Run a command of Slurm; return `code`, `stdout` and `stderr`."""
    command = [_program(argv[0]), *argv[1:]]
    environ = {name: value for name, value in os.environ.items() if name not in _UNSET}
    if argv[0] == "sbatch" and "--test-only" not in argv:
        environ = {name: environ[name] for name in environ if name in _OF_JOBS or name.startswith("SBATCH_")}
    else:
        environ["SLURM_TIME_FORMAT"] = "%s"  # times in unix seconds
    try:
        done = processes.completed(command, RUN_S, env=environ)
    except subprocess.TimeoutExpired:
        return {"code": 124, "stdout": "", "stderr": f"{argv[0]}: timed out after {RUN_S:.0f} s"}
    return {"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def prepare(here: Here, *, folder: str, nodes: int, files: dict[str, str], request: dict[str, Any]) -> None:
    """Create the attempt's folder, which must be new, with the batch script and the agents' order.

    `files` are texts by name; only the user may read the files. `request`: the further values of `verbs.make`. A
    failure leaves no folder of the attempt.
    """
    from . import verbs  # 15 ms, which each poll of a state saves

    attempt = Path(folder)
    if any((attempt / name).exists() for name in (OPEN, CLOSED)):
        raise Refused(f"{attempt} belongs to a job of the same name: choose another --name")
    try:
        verbs.make(here, job=str(attempt.parent), root=folder, **request)
        for number in range(nodes):
            (attempt / f"node-{number}" / "log").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (attempt / name).write_text(text)
        with contextlib.suppress(FileExistsError):
            (attempt / PACKAGE).symlink_to(here.runtime)
    except OSError as error:
        discard(folder=folder)
        raise Refused(f"{error.filename or folder} cannot be made: {error.strerror}: name another folder") from error


def discard(*, folder: str) -> None:
    """Remove the folder of an attempt that got no job, and what is empty of the job's folder."""
    attempt = Path(folder)
    job = attempt.parent
    shutil.rmtree(attempt, ignore_errors=True)
    if any(job.glob("attempt-*")):
        return
    with contextlib.suppress(OSError):
        for link in [path for path in (job / "output").glob("*") if path.is_symlink()]:
            link.unlink()
        for name in ("output", "checkpoints"):
            if (job / name).exists():
                (job / name).rmdir()
        (job / "owner").unlink(missing_ok=True)
        job.rmdir()


def door(*, folder: str) -> dict[str, Any]:
    """Return since when in seconds the attempt's door `open` exists, and the `number` of a job that ran, else None."""
    attempt = Path(folder)
    found: dict[str, Any] = {"opened_ago_s": None, "number": None}
    with contextlib.suppress(OSError, ValueError):
        os.listdir(attempt)
        found["opened_ago_s"] = max(time.time() - (attempt / OPEN).stat().st_mtime, 0.0)
        found["number"] = int((attempt / NUMBER).read_text())
    return found


def look(*, folder: str, nodes: int, checkpoints: str) -> dict[str, Any]:
    """Return as `nodes` each node's status (contract.NodeStatus), without a question to Slurm.

    A node is `alive` from its first state to its last: only Slurm knows whether a silent agent is gone. A node whose
    job is requeued has ended without an exit report. `last_s` is the agent's last sign of life.
    """
    now_s, is_saved = time.time(), has_checkpoint(Path(checkpoints))
    found = [_status(Path(folder, f"node-{number}"), now_s, is_saved=is_saved) for number in range(nodes)]
    return {"nodes": [each.dump() for each in found]}


def ask(*, folder: str, number: int, every_s: float) -> dict[str, Any]:
    """Return Slurm's words about the job: `program` and its `text`; `by` is a different user that cancelled the job.

    Slurm is asked once in `every_s` seconds, however many processes follow the job: in between, the last answer counts.
    Without an answer, `error` has the reason. A job that the controller has forgotten is sought in the accounting;
    `program` is None if both do not know the job.
    """
    note = Path(folder, NOTE)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a disk without locks: then two processes may ask at once
            stack.enter_context(processes.locked(Path(folder, LOCK)))
        known: dict[str, Any] | None = atomic_json.read_json(note)
        is_ending = known is not None and "JobState=COMPLETING" in known["text"]  # for seconds, as a rule
        if known is None or not 0 <= time.time() - known["time_s"] < (ENDING_S if is_ending else every_s):
            known = {**_asked(folder, number), "time_s": time.time()}
            atomic_json.write_json(note, known)
    return known


def stop(*, folder: str, nodes: int, number: int, reason: str) -> dict[str, Any]:
    """Leave each node a stop request with `reason`, and cancel a job that has not begun; return Slurm's answer.

    The agents save, and end the job. With the reason `now`, Slurm kills all that do not obey within OBEY_S; Slurm's own
    signals come first to all processes, which may then save.
    """
    roots = [Path(folder, f"node-{node}") for node in range(nodes)]
    for root in roots:
        node_folder.ask_to_stop(root, reason)
    until_s = time.monotonic() + OBEY_S
    while has_agents := any(_status(root, 0.0, is_saved=False).alive for root in roots):
        if reason != "now" or time.monotonic() > until_s:
            break
        time.sleep(0.1)
    if has_agents and reason != "now":  # works without an answer of the controller, too
        return {"code": 0, "stdout": "", "stderr": ""}
    done = run(argv=["scancel", str(number)])  # also a job whose agents have left for a requeue
    with contextlib.suppress(OSError):
        Path(folder, NOTE).unlink()  # the next question must see the end
    if not any((root / STATE).exists() for root in roots):  # else the agents forget the secrets
        order = atomic_json.read_json(Path(folder, ORDER)) or {}
        atomic_json.write_json(Path(folder, ORDER), {**order, "secrets": {}, "token": ""})
    return done


def jobs(here: Here) -> dict[str, Any]:
    """Return as `jobs` the attempts in Slurm's queue: job, attempt, owner, number, and the record of `prepare`."""
    from . import verbs

    told = run(argv=["squeue", "-h", "--me", "-o", "%i|%j"])
    if told["code"]:
        raise Refused(f"squeue fails: {' '.join(told['stderr'].split())}")
    found = []
    for line in told["stdout"].splitlines():
        number, _, name = line.partition("|")
        job, _, attempt = name.rpartition("-")
        folder = here.workdir / "jobs" / job / f"attempt-{attempt}"
        if attempt.isdigit() and (folder / RECORD).exists():
            kept, owner = atomic_json.read_json(folder / RECORD), (folder.parent / verbs.OWNER).read_text()
            found.append({"job": job, "attempt": int(attempt), "owner": owner, "kept": kept, "number": int(number)})
    return {"jobs": found}


def enter(*, folder: str, node: int, number: int, python: str, argv: list[str]) -> dict[str, Any]:
    """Write a script that runs `argv` (by default a shell) where the node's ranks run; return its `path`.

    The script runs here, and starts a step of the job on the node. A command with the path needs no quotes.
    """
    from . import verbs

    root = Path(folder, f"node-{node}")
    state = node_folder.state_of(root)
    if state is None:
        raise Refused(f"node {node} of the job has not begun: see `cloudtrain status`")
    if (root / EXIT).exists():
        raise Refused("the job has ended, and its nodes take other jobs")
    host = (state.machine or "").partition(".")[0]
    step = [_program("srun"), f"--jobid={number}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
    step.append("--export=ALL")
    inside = [python, "-I", "-S", "-c", _ENTER.format(str(Path(folder, PACKAGE))), str(root), *argv]
    lines = ['rm -f -- "$0"', f"test ! -t 0 || exec {shlex.join([*step, '--pty', *inside])}"]
    lines.append(f"exec {shlex.join([*step, *inside])}")
    return {"path": verbs.script_file(lines)}


# Runs on the compute node: the command that `verbs.script` has there.
_ENTER = (
    "import os, sys; sys.path.insert(0, {!r}); from cloudtrain.entrypoints.host import verbs; "
    "found = verbs.commands(sys.argv[1], sys.argv[2:])[os.isatty(0)]; os.execvp(found[0], found)"
)


def _status(root: Path, now_s: float, *, is_saved: bool) -> NodeStatus:
    with contextlib.suppress(OSError):
        os.listdir(root)
    state = node_folder.state_of(root)
    ended, asked = atomic_json.read_json(root / EXIT), atomic_json.read_json(root / STOP)
    reason = asked and asked["reason"]
    if ended is not None:
        report = ExitReport.load(ended)
        return NodeStatus(state, report, asked=reason, ended_ago_s=now_s - report.ended_s, saved=is_saved)
    if state is None:
        return NodeStatus(asked=reason, saved=is_saved)
    held_s, written_s = state.held_s, _time(root / STATE)
    is_alive = state.phase != "ended"
    if held_s is not None and is_alive:  # the state is written every STATE_EVERY_S at least
        held_s += min(max(now_s - written_s, 0.0), STATE_EVERY_S)
    sign_s = max(written_s, _time(root / BEAT), node_folder.last_sign_s(root, state.started_s))
    return NodeStatus(state, alive=is_alive, asked=reason, held_s=held_s, saved=is_saved, last_s=sign_s, now_s=now_s)


def _time(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _asked(folder: str, number: int) -> dict[str, Any]:
    """Return the answer of the controller, else of the accounting."""
    done = run(argv=["scontrol", "show", "job", "-o", str(number)])
    if done["code"] == 0:
        if Path(folder, "node-0", STOP).exists() and "JobState=PENDING" in done["stdout"]:
            run(argv=["scancel", str(number)])  # the stop came after the agents' end
        elif _REQUEUED.search(done["stdout"]):
            run(argv=["scontrol", "update", f"JobId={number}", "StartTime=now+2"])
        return {"program": "scontrol", "text": done["stdout"], "by": _canceller(number, done["stdout"])}
    if "Invalid job id" not in done["stderr"]:
        return {"program": None, "text": "", "error": " ".join(done["stderr"].split()) or f"code {done['code']}"}
    done = run(argv=["sacct", "-nPXD", "-j", str(number), "-o", "JobIDRaw,State,ExitCode,Start,End,NodeList"])
    if done["code"] == 0 and done["stdout"].strip():
        return {"program": "sacct", "text": done["stdout"]}
    return {"program": None, "text": ""}


def _canceller(number: int, shown: str) -> str:
    """Return the user that has cancelled the job, from the accounting; empty for the owner, and without a cancel."""
    if "JobState=CANCELLED" not in shown:
        return ""
    told = run(argv=["sacct", "-nPX", "-j", str(number), "-o", "State"])["stdout"]
    found = re.search(r"CANCELLED by (\d+)", told)
    if not found or int(found[1]) == os.getuid():
        return ""
    return processes.user_name(int(found[1]))


def _program(name: str) -> str:
    """Return the program's path. A site may name Slurm's folder only in the start-up files of a login shell."""
    if found := shutil.which(name):
        return found
    told = processes.completed(["bash", "-lc", f"command -v {shlex.quote(name)}"])
    lines = told.stdout.split()
    if not lines or not lines[-1].startswith("/"):
        raise Refused(f"there is no `{name}` here: is this a login node of a Slurm cluster?")
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{os.path.dirname(lines[-1])}"  # noqa: PTH120
    return lines[-1]
