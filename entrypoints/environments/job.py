"""Carries out a job's `requirements` and `setup` on a node, before the first start of the ranks.

The agent starts this module as a separate process, so a stop kills pip and all commands at once:

    python -m cloudtrain.entrypoints.environments.job ROOT WORKDIR [STORE [keeps]]

Output goes to the node's log; `prepared.json` in the agent's folder names the ranks' Python, or holds the failure.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import atomic_json, processes
from ..contract import AgentSpec, EnvironmentSpec, JobSpec, PreparedEnvironment, SetupSpec
from ..errors import Refused
from ..rank import rehearsal
from . import builds, interpreter, requirements, venvs

ANSWER = "prepared.json"
LINES = 8  # of a log's end, in a failure's report
_SYSTEM = re.compile(r"\b(sudo|apt|apt-get|dnf|yum|microdnf|zypper|apk|pacman)\b")


class Preparation:
    """The process that prepares a node, as the node's agent sees it; `environment`: the variables of the ranks."""

    def __init__(self, spec: AgentSpec, environment: Mapping[str, str], umask: int) -> None:
        self._node, self._answer = spec.node, Path(spec.root) / ANSWER
        self._answer.unlink(missing_ok=True)
        kept = [spec.store, *(["keeps"] if spec.node == 0 else [])] if spec.store else []
        argv = [spec.python, "-u", "-m", __name__, spec.root, spec.workdir, *kept]
        with (self._answer.parent / "log" / "boot.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, cwd=spec.root, env=environment, umask=umask, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def result(self) -> dict[str, Any] | None:
        """Return the process's answer, None while the process works: `python` and `environment`, or a `failure`."""
        code = self._process.poll()
        if code is None:
            return None
        answer: dict[str, Any] | None = atomic_json.read_json(self._answer)
        if answer is None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            answer = {"failure": {"message": f"the preparation was {how}; the node's log has its output", "lines": []}}
        if failure := answer.get("failure"):
            message = f"node {self._node}: {failure['message']}"
            answer["failure"] = {**failure, "rank": None, "kind": "config", "message": message, "time_s": time.time()}
        elif answer["lock"]:
            venvs.hold(answer["lock"])
        return answer


def main(argv: list[str]) -> int:
    """Prepare the node; return 0, or 1 with the failure in the answer."""
    processes.die_with_parent()
    root, log = Path(argv[0]), Path(argv[0]) / "log" / "boot.log"
    begun_s, answer = time.monotonic(), dict[str, Any]()
    try:
        answer = _ready(root, argv[1], *argv[2:3], keeps=len(argv) > 3).dump()
        print(f"setup: ready in {time.monotonic() - begun_s:.1f} s", flush=True)
    except (Refused, OSError) as error:
        print(f"setup: {error}", flush=True)
        lines = log.read_text(errors="replace").splitlines()[-LINES - 1 : -1]
        answer = {"failure": {"message": str(error), "lines": lines}}
    atomic_json.write_json(root / ANSWER, answer)
    return int("failure" in answer)


def _ready(root: Path, workdir: str, store: str | None = None, *, keeps: bool = False) -> PreparedEnvironment:
    """Return the environment of the ranks. Raises Refused, OSError."""
    setup = JobSpec.load(atomic_json.read_json(root / "spec.json")).setup or SetupSpec()
    code = root / "code"
    made = PreparedEnvironment(python=sys.executable)
    tried = rehearsal.of_environment()
    is_apart = tried is not None and tried.is_apart
    if tried is not None and tried.environments:
        workdir, store = tried.environments, None
    if setup.requirements:
        wanted = requirements.read(setup.requirements, code)
        asks = f" (Python {wanted.python} is asked for)" if wanted.python else ""
        print(f"setup: the packages of {setup.requirements} on Python {sys.version.split()[0]}{asks}", flush=True)
        spec = EnvironmentSpec(
            python=sys.executable,
            workdir=workdir,
            code=str(code),
            requirements=wanted.text,
            requirements_folder=str(wanted.folder.relative_to(code)),
            requirements_file=wanted.file,
            system_site_packages=not is_apart,
            is_apart=is_apart,
            holds_torch=True,
            shows=True,
            store=store,
            keeps=keeps,
        )
        made = venvs.build(spec)
        print(f"setup: {made.detail}", flush=True)
    if setup.commands:
        own = _own(root / "venv", made.python, sees_system=not (is_apart and setup.requirements))
        made = replace(made, python=own.python, environment=own.environment)
        with venvs.seen_by_builds(root / "venv", interpreter.find(sys.executable)):
            _run_all(setup.commands, code, own.environment, root / "log" / "boot.log", is_real=tried is None)
    return made


def _own(place: Path, python: str, *, sees_system: bool) -> PreparedEnvironment:
    """Create an environment for this job's `setup` alone, on top of that of `python`, which jobs share."""
    base = interpreter.find(sys.executable)
    below = base if python == sys.executable else interpreter.find(python)
    shutil.rmtree(place, ignore_errors=True)
    flags = [*(["--system-site-packages"] if sees_system else []), *(["--without-pip"] if below.has_pip else [])]
    done = subprocess.run([base.path, "-I", "-m", "venv", *flags, place], capture_output=True, text=True, check=False)
    if done.returncode:
        cure = builds.cure(done.stdout + done.stderr, venvs.CURES, "see the log")
        raise Refused(f"the environment for `setup` could not be made: {builds.last_words(done.stderr)}; {cure}")
    if below.is_venv:
        venvs.show(place, base, below.sites)
    for name in ("pip", "pip3"):
        if not (place / "bin" / name).exists():
            (place / "bin" / name).write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -m pip "$@"\n')
            (place / "bin" / name).chmod(0o755)
    return PreparedEnvironment(python=str(place / "bin" / "python"), environment=venvs.variables(place))


def _run_all(commands: Sequence[str], code: Path, environment: Mapping[str, str], log: Path, *, is_real: bool) -> None:
    """Run the commands of `setup` in order. Raises Refused at the first that fails."""
    shell = shutil.which("bash") or "sh"
    for number, command in enumerate(commands, 1):
        # A rehearsal runs on the user's machine, mostly without the right to change the system.
        if not is_real and _SYSTEM.search(command):
            print(f"setup: not run in a rehearsal, because it changes the machine: {command}", flush=True)
            continue
        print(f"setup: {command}", flush=True)
        begins = log.stat().st_size
        variables = {**os.environ, **environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run([shell, "-c", command], cwd=code, env=variables, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            with log.open("rb") as file:
                file.seek(begins)
                words = builds.last_words(file.read().decode(errors="replace")) or "the command printed nothing"
            how = f"ended with code {done.returncode}" if done.returncode > 0 else f"was killed ({done.returncode})"
            raise Refused(f"setup command {number} of {len(commands)} {how}: {command}: {words}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
