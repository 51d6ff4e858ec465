"""Verbs for a host's node of a job: start the node, return its state, stop the node.

Each verb takes JSON values and returns JSON. Folders are absolute paths of this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import atomic_json, foreign, processes
from ..agent import node_folder
from ..agent.boot_environment import node_variables
from ..contract import EXIT, NEVER_SENT, RECORD, START_LOCK, STATE, AgentSpec, EnvironmentSpec, PreparedEnvironment
from ..environments import dockerrun, interpreter
from ..errors import Refused
from . import files
from .calls import Here

GONE_S = 3.0  # for the end of a killed agent
OWNER = "owner"  # in a job's folder: its owner, so that two submitters cannot use the same name
VARIABLES = "variables.json"  # in a node's folder: the variables of the node's ranks, without secrets

# Runs a command, or the login's shell, with the environment of the process `pid` (0: with the variables in the file
# `kept`), except for terminal and session, and for the mark of the job's own processes, which are swept away.
_AS = """\
import json, os, sys
pid, place, kept, *argv = sys.argv[1:]
own = {key: value for key, value in os.environb.items() if key == b"TERM" or key.startswith(b"SSH_")}
try:
    with open(f"/proc/{pid}/environ", "rb") as file:
        theirs = dict(item.split(b"=", 1) for item in file.read().split(b"\\0") if b"=" in item)
except OSError:
    theirs = dict(os.environb)
    if os.path.exists(kept):
        with open(kept) as file:
            theirs.update((os.fsencode(key), os.fsencode(value)) for key, value in json.load(file).items())
theirs.pop(b"CLOUDTRAIN_LOG_DIR", None)
os.chdir(place)
argv = argv or [os.environ.get("SHELL", "/bin/sh")]
try:
    os.execvpe(argv[0], argv, {**theirs, **own})
except OSError as error:
    sys.stderr.write(f"{argv[0]}: {error.strerror}\\n")
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._-]+")  # every shell reads such a path without quotes

_starters: list[subprocess.Popen[str]] = []  # one that waits for its message, from `prepare` on
_START = (
    "import sys; sys.path.insert(0, {!r}); from cloudtrain.entrypoints.agent import starting; sys.exit(starting.main())"
)


def make(
    here: Here,
    *,
    job: str,
    root: str,
    owner: str,
    record: dict[str, Any],
    folders: list[str],
    links: dict[str, str],
    fresh: list[str] | None = None,
) -> None:
    """Create the node's folder, which must be new, and the folders that the job sees.

    `job` and `root` are the job's and the node's folder, `owner` is the submitter's id; absent `folders` and `links`
    (name in the output folder -> target) are created. `record` is kept for `jobs`. `fresh`: folders that must hold no
    file yet.
    """
    if why := files.held(*(fresh or ())):
        raise Refused(why)
    folder, node = Path(job), Path(root)
    files.prune(here.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    if _owner(folder, owner) != owner:
        other = "belongs to a different job of the same name, unknown to your registry"
        raise Refused(f"{folder} {other}: choose another --name")
    if (node / STATE).exists():
        raise Refused(f"{node} belongs to a job of the same name that has already run: choose another --name")
    node.mkdir(parents=True, exist_ok=True)
    atomic_json.write_json(node / RECORD, record)
    os.umask(here.umask)  # the user's own umask, for folders that the job's ranks may share with other users
    try:
        for each in folders:
            Path(each).expanduser().mkdir(parents=True, exist_ok=True)
        for link, target in links.items():
            with contextlib.suppress(FileExistsError):
                Path(link).symlink_to(Path(target).expanduser())
    finally:
        os.umask(0o077)


def jobs(here: Here) -> dict[str, Any]:
    """Return as `jobs` the nodes on this host with a running agent: job, attempt, owner, and the record of `make`."""
    roots = here.workdir.glob("jobs/*/attempt-*/node-*")
    found = []
    for root in sorted(root for root in roots if node_folder.agent_pid(root)):
        job, number = root.parent.parent, root.parent.name.removeprefix("attempt-")
        kept, owner = atomic_json.read_json(root / RECORD), (job / OWNER).read_text()
        found.append({"job": job.name, "attempt": int(number), "owner": owner, "kept": kept})
    return {"jobs": found}


def _owner(job: Path, owner: str) -> str:
    """Return the owner of the folder: the first claimant, among all hosts that share a disk."""
    mark = job / OWNER
    partial = job / f".{OWNER}.{os.uname().nodename}-{os.getpid()}"
    partial.write_text(owner)
    with contextlib.suppress(FileExistsError):
        os.link(partial, mark)
    partial.unlink()
    return mark.read_text()


def unpack(*, path: str, sha256: str, root: str) -> None:
    """Unpack the code in the agent's folder: the build of the environment may need the code."""
    try:
        foreign.unpack(Path(path), sha256, Path(root))
    except foreign.BundleError as error:
        raise Refused(str(error)) from error


def prepare(here: Here | None = None, *, spec: dict[str, Any]) -> dict[str, Any]:
    """Prepare the job's environment (an EnvironmentSpec), and return the PreparedEnvironment. Raises Refused.

    The node's agent needs the result to start boot. Its starter imports its modules meanwhile.
    """
    if here is not None and not _starters:
        _starters.append(_starter(here))
    wanted = EnvironmentSpec.load(spec)
    if wanted.kind == "none":
        found = interpreter.find(wanted.python)
        return PreparedEnvironment(python=found.path, detail=found.words).dump()
    if wanted.kind == "venv":
        from ..environments import venvs  # only the module of the kind is imported

        return venvs.build(wanted).dump()
    if wanted.kind == "conda":
        from ..environments import condaenvs

        return condaenvs.find(wanted.conda or "").dump()
    from ..environments import images

    return images.ready(wanted).dump()


def start(here: Here, *, request: dict[str, Any]) -> dict[str, Any]:
    """Start the node's agent, detached from this channel; return the answer of `starting.start`.

    `request` is the request of starting.start. Only the request holds secrets; a pipe carries the request to the agent.
    """
    for spec in map(AgentSpec.load, request["nodes"]):
        # For later shells, without the machine's own variables and the secrets.
        variables = {**spec.environment, **node_variables(spec, spec.node, spec.job.nodes)}
        atomic_json.write_json(Path(spec.root) / VARIABLES, variables)
    starter = _starters.pop() if _starters else _starter(here)
    answer, complaint = starter.communicate(json.dumps(request))
    if starter.returncode != 0:
        last = complaint.strip().splitlines()[-1:] or [f"its starter ended with code {starter.returncode}"]
        raise Refused(f"the agent did not start: {last[0]}")
    status: dict[str, Any] = json.loads(answer)
    return status


def _starter(here: Here) -> subprocess.Popen[str]:
    """Return a process that starts an agent at a message, and ends with this channel if no message comes."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START.format(here.runtime)],
        cwd=here.workdir,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        umask=here.umask,
        start_new_session=True,
    )


def look(*, root: str, checkpoints: str) -> dict[str, Any]:
    """Return the node's status (contract.NodeStatus), with this host's time."""
    return replace(node_folder.look(Path(root), Path(checkpoints)), now_s=time.time()).dump()


def stop(*, root: str, reason: str, by_force: bool) -> dict[str, Any]:
    """Leave the agent a stop request with `reason`; `by_force` ends all processes. Return whether the agent runs."""
    node = Path(root)
    node_folder.ask_to_stop(node, reason)
    if by_force or node_folder.agent_pid(node) is None:
        node_folder.end([node])
    return {"alive": node_folder.agent_pid(node) is not None}


def close_admission(*, root: str) -> dict[str, Any]:
    """Return whether the node's agent was started; if not, forbid any later start."""
    node = Path(root)
    if not node.is_dir():
        node.mkdir(parents=True)
    with processes.locked(node / START_LOCK):
        started = not (node / NEVER_SENT).exists() and (node / STATE).exists()
        if not started:
            (node / NEVER_SENT).touch()
    return {"started": started}


def give_up(*, root: str, for_ever: bool) -> None:
    """Kill the node's agent and all processes it may have started; `for_ever` also forbids any later start."""
    node = Path(root)
    if not node.is_dir():
        return
    with processes.locked(node / START_LOCK):
        if for_ever:
            (node / NEVER_SENT).touch()
        if pid := node_folder.agent_pid(node):
            processes.kill(pid, signal.SIGKILL)
            end_s = time.monotonic() + GONE_S
            while node_folder.agent_pid(node) and time.monotonic() < end_s:
                time.sleep(0.02)
            node_folder.sweep(node)
        (node / STATE).unlink(missing_ok=True)
        (node / EXIT).unlink(missing_ok=True)


def script(*, root: str, argv: list[str]) -> dict[str, Any]:
    """Write a script that runs `argv` (by default a shell) in the node's code folder, as a rank; return its `path`.

    The script is started by a command that holds only the path, without quotes.
    """
    plain, terminal = commands(root, argv)
    lines = ['rm -f -- "$0"', f"exec {shlex.join(plain)}"]
    if terminal != plain:  # only the script knows whether the standard input is a terminal
        lines.insert(1, f"test ! -t 0 || exec {shlex.join(terminal)}")
    return {"path": script_file(lines)}


def commands(root: str, argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the command that runs `argv` as a rank of the node, without and with a terminal.

    The variables come from a process of the job, if any runs, else from the file written at the start: no secret is
    written. If the job runs in a container, `argv` runs in the container.
    """
    node = Path(root)
    place = node / "code" if (node / "code").is_dir() else node
    inside = dockerrun.running(node)
    # The oldest process is boot, with the variables of all ranks, but without the variables of a single rank.
    pid = inside[2] if inside else min(processes.with_environment(CLOUDTRAIN_LOG_DIR=str(node / "log")), default=0)
    python = inside[0].python if inside else sys.executable
    command = [python, "-I", "-S", "-c", _AS, str(pid), str(place), str(node / VARIABLES), *argv]
    if not inside:
        return command, command
    return dockerrun.exec_argv(*inside[:2], command, False), dockerrun.exec_argv(*inside[:2], command, True)


def script_file(lines: list[str]) -> str:
    """Write a script that no other user can read; return its path, which needs no quotes."""
    folder = tempfile.gettempdir()
    kept, path = tempfile.mkstemp(".sh", "cloudtrain-", folder if _PLAIN_PATH.fullmatch(folder) else "/tmp")
    with os.fdopen(kept, "wb") as file:
        file.write(os.fsencode("\n".join([*lines, ""])))
    return path
