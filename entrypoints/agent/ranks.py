"""The processes of a node's ranks: boot, everything below boot, and their container."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import atomic_json, processes
from ..contract import AgentSpec
from ..environments import builds, dockerrun, venvs
from ..rank import heartbeat
from . import gpumeter, node_logs, transport
from .boot import EXIT_CONFIG, EXIT_FAILED, EXIT_SAVED, EXIT_STOPPED, SLURM, STOP_SIGNAL

MAX_FAILURES = 4  # per node, the root cause first: later failures are consequences
LAST_CHARACTERS = 4000  # of a log


class Ranks:
    """The processes of one generation after the other. `spec` has the Python and the variables of the ranks.

    `is_killed`: the agent killed this generation: then boot's signal is no failure. `meter`: from the first start.
    """

    def __init__(self, spec: AgentSpec, umask: int) -> None:
        self.spec = spec
        self.generation = 0
        self.boot: subprocess.Popen[bytes] | None = None
        self.is_killed = False
        self.meter: gpumeter.GpuMeter | None = None
        self.umask = umask  # the user's own umask, for the files that the job writes
        self._root = Path(spec.root)
        self.times = node_logs.TimeIndex(self._root / "log")
        self._port: socket.socket | None = None
        # The job's environment, if `python` alone is not enough: a venv locked against clean-up, or a container.
        self._kept = venvs.hold(spec.environment_lock) if spec.environment_lock else None
        self._container = dockerrun.Container(**spec.container) if spec.container else None

    @property
    def result(self) -> Path:
        """The folder of this generation's results."""
        return self._root / "result" / str(self.generation)

    def fresh_port(self) -> int:
        """Return a port for the next generation's torchrun, reserved for this job until the following generation."""
        if self._port is not None:
            self._port.close()
        self._port = transport.reserved(self.spec)
        return int(self._port.getsockname()[1])

    def use(self, python: str, environment: dict[str, str]) -> None:
        """Start further ranks by this Python, with these variables too."""
        self.spec = replace(self.spec, python=python, environment={**self.spec.environment, **environment})

    def begin(self, generation: int) -> None:
        """Begin a new generation; no process of an earlier generation is left."""
        self.kill_tree()
        self.generation, self.is_killed = generation, False

    def start(self, env: dict[str, str]) -> None:
        """Start boot with these variables. Raises OSError."""
        self.result.mkdir(parents=True, exist_ok=True)
        argv = [self.spec.python, "-m", "cloudtrain.entrypoints.agent.boot"]
        if self._container is not None:
            place = self._in_container()
            dockerrun.note(self._container, place)
            argv, env = dockerrun.command(self._container, place, env, self.spec.secrets, argv[1:])
        with (self._root / "log" / "boot.log").open("ab") as log:
            if self.meter is None:
                self.meter = gpumeter.GpuMeter(env.get("CUDA_VISIBLE_DEVICES"), self.spec.job.nproc_per_node)
            self.boot = subprocess.Popen(
                argv,
                cwd=self._root,
                umask=self.umask,
                env=env,
                # The container ends when the agent ends: its standard input closes.
                stdin=subprocess.DEVNULL if self._container is None else subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        if self._container is not None:
            assert self.boot.stdin is not None
            dockerrun.hand(self.boot.stdin, self.spec.secrets)

    def stop(self) -> None:
        """Ask boot to stop the ranks, if boot still runs."""
        self.tell(STOP_SIGNAL if SLURM in os.environ else signal.SIGTERM)

    def tell(self, signum: int) -> None:
        """Send boot the signal, if boot still runs."""
        if self.boot is not None and self.boot.returncode is None:
            processes.kill(self.boot.pid, signum)

    def kill(self, *, shows: bool, hung: bool = False) -> list[int]:
        """Kill all descendants; return the pids that could not be killed.

        `shows`: print the stacks, if a rank has been silent for long; `hung`: in any case.
        """
        if shows and not self.is_killed:
            # The cause is another node's timeout, or a rank that does not stop: the stuck rank may be on this node.
            heartbeat.print_stacks(self.result, 0.0 if hung else heartbeat.STALE_S)
        self.is_killed = True
        return self.kill_tree()

    def kill_tree(self) -> list[int]:
        """Kill the container, whose processes are no descendants, and all descendants; return the pids still alive."""
        if self._container is not None and self.generation:
            fault = dockerrun.remove(self._container, self._in_container().name)
            if fault:
                print(fault, flush=True)
        return processes.kill_descendants()

    def boot_code(self) -> int | None:
        """Reap every ended child of the subreaper; return boot's exit code once it has one."""
        assert self.boot is not None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.boot.pid:
                    self.boot.returncode = os.waitstatus_to_exitcode(ended[1])
        if self.boot.returncode is None:
            try:  # boot may have ended after the loop: then its code counts
                pid, status = os.waitpid(self.boot.pid, os.WNOHANG)
                self.boot.returncode = os.waitstatus_to_exitcode(status) if pid else None
            except ChildProcessError:
                self.boot.returncode = -signal.SIGKILL  # reaped by kill_descendants
        return self.boot.returncode

    def collect(self, *, was_asked: bool) -> dict[str, Any]:
        """Return the code, the failures and the save of the ended boot. `was_asked`: a stop was requested."""
        assert self.boot is not None
        code, self.boot = self.boot.returncode, None
        self.kill_tree()
        written = atomic_json.read_json(self.result / "result.json") or {}
        if code in (-signal.SIGTERM, -STOP_SIGNAL) and (written or was_asked):
            code = written.get("code", EXIT_STOPPED)  # the signal came after or before boot's handler was in place
        failures = tuple(written.get("failures", ()))[:MAX_FAILURES]
        if self._container is not None:
            fault = dockerrun.client_fault(self._container, code, self._root / "log" / "boot.log")
            failures = (failure(fault),) if fault else failures
            code = EXIT_CONFIG if fault else dockerrun.boot_code(code)
        if code < 0 and not failures and not self.is_killed:
            name = signal.Signals(-code).name
            failures = (failure(f"boot of node {self.spec.node} was killed by {name}", "signal"),)
        elif code > 0 and not (written or failures or was_asked or self.is_killed):  # Python itself did not start
            said = builds.last_words((self._root / "log" / "boot.log").read_text(errors="replace")[-LAST_CHARACTERS:])
            failures = (failure(f"boot of node {self.spec.node} ended with code {code}: {said}", "exit"),)
        saved = atomic_json.read_json(self.result / "outcome.json") if code == EXIT_SAVED else None
        return {"code": code if code >= 0 else EXIT_FAILED, "failures": failures, "saved": saved}

    def _in_container(self) -> dockerrun.Start:
        """Return this generation's start in the container."""
        spec = self.spec
        who = (spec.job.job, spec.job.attempt, spec.node, self.generation)
        return dockerrun.Start(*who, str(self._root), spec.mounts, spec.gpus)


def failure(message: str, kind: str = "config") -> dict[str, Any]:
    """Return a failure of the node, not of a rank."""
    return {"rank": None, "kind": kind, "message": message, "time_s": time.time()}
