"""The supervisor of one node: detached from whoever started it, it runs boot, restarts it, and ends it cleanly.

    python agent.py start < specs.json      starts one agent for each node in the file, and answers when they live

An agent's folder: `state.json` (phase, pid), `exit.json` (the job's end, written once), `stop.json` (written by who
wants the job stopped), `log/` (one file a rank), `result/GENERATION/`, `code/` and `runtime/` (the unpacked bundle).
Node 0's agent decides (see coordinate.py); an agent that no longer hears it fences itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import bundlefile, durable, heartbeat, logtimes, peers, processes
from cloudtrain.entrypoints.boot import EXIT_CONFIG, EXIT_FAILED, EXIT_SAVED, EXIT_STOPPED
from cloudtrain.entrypoints.coordinate import Coordinator, Desired, Report, Rules
from cloudtrain.entrypoints.places import NEVER_SENT, START_LOCK, has_checkpoint

__all__ = ["main", "start", "supervise"]

TICK_S = 0.1
JOIN_TIMEOUT_S = 120.0
MAX_FAILURES = 4  # of a node, the root cause first: the others are its echoes
WAITING_S, WAITING_AGAIN_S = 20.0, 60.0  # until it is said who is missing at the start, and then again
FIRST_PORT, PORTS = 20000, 8000  # below the ephemeral range, where outgoing connections come and go


def main(argv: list[str]) -> int:
    """Start the agents that standard input describes; print their pids as JSON."""
    if argv != ["start"]:
        print("usage: agent.py start < specs.json", file=sys.stderr)
        return 2
    print(json.dumps(start(json.load(sys.stdin))))
    return 0


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Fork one detached agent for each of `request["nodes"]`; return when each has written its state.

    All or nothing, and once: `request["folder"]` holds a lock and, if somebody has decided meanwhile that this start
    never happened, a mark; then nothing starts. `{"started": false, "why": ...}` says so. Raises RuntimeError where an
    agent cannot live; the mark is left then, and those before it are killed.
    """
    umask = os.umask(0o077)
    folder = Path(request["folder"])
    with (folder / START_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / NEVER_SENT).exists():
            return {"started": False, "why": "given up before it started"}
        if any((Path(spec["root"]) / "state.json").exists() for spec in request["nodes"]):
            return {"started": False, "why": "already started"}
        server = None
        for spec in request["nodes"]:
            if spec["node"] == 0:
                server = peers.listen(spec["address"])
        if server is not None:
            for spec in request["nodes"]:
                spec["head"] = server.getsockname()[:2]
        pids: list[int] = []
        try:
            for spec in request["nodes"]:
                pids.append(_fork_agent(spec, server, umask, lock.fileno()))
        except (OSError, RuntimeError):
            (folder / NEVER_SENT).touch()
            for pid in pids:  # they wait for the missing one, and have started nothing
                processes.kill(pid, signal.SIGKILL)
            raise
        return {"started": True, "pids": pids}


def supervise(spec: dict[str, Any], server: socket.socket | None, stops: list[int]) -> dict[str, Any]:
    """Supervise a node from this process, as a container's first one does; return how the job ended, as exit.json.

    `stops` are the signals to stop that came before.
    """
    agent = Agent(spec, server, os.umask(0o077))
    agent.run(stops=stops)
    assert agent.ended is not None
    return agent.ended


def _fork_agent(spec: dict[str, Any], server: socket.socket | None, umask: int, lock: int) -> int:
    """Fork twice, so that init is the agent's parent; return its pid once its state is on disk."""
    ready, announce = os.pipe()
    child = os.fork()
    if child:
        os.close(announce)
        with os.fdopen(ready) as pipe:
            line = pipe.readline()
        os.waitpid(child, 0)
        if not line:
            raise RuntimeError(f"the agent of node {spec['node']} did not start; see {spec['root']}/log/agent.txt")
        return int(line)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(ready)
    os.close(lock)
    if spec["node"] != 0 and server is not None:
        server.close()
    code = 1
    try:
        _detach(Path(spec["root"]))
        Agent(spec, server if spec["node"] == 0 else None, umask).run(announce)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        processes.kill_descendants()
        sys.stderr.flush()
        os._exit(code)


def _detach(root: Path) -> None:
    (root / "log").mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    log = os.open(root / "log" / "agent.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    processes.become_subreaper()
    for signum in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)


class Agent:
    """One node's life, from the first state on disk to exit.json."""

    def __init__(self, spec: dict[str, Any], server: socket.socket | None, umask: int) -> None:
        self.spec = spec
        self.umask = umask  # the user's own, for what the job writes
        self.root = Path(spec["root"])
        self.started_s = time.time()
        self.clock_zero = time.monotonic()
        self.report = Report(spec["node"])
        self.note: str | None = None  # why the job runs on fewer nodes than it was given
        self.boot: subprocess.Popen[bytes] | None = None
        self.asked_to_stop = False
        self.killed = False  # in this generation, by ourselves: then how boot ended is no news
        self.head = peers.Head(server, spec["token"]) if server else None
        self.member = None if server else peers.Member(tuple(spec["head"]), spec["token"])
        self.coordinator = Coordinator(_rules(spec))
        self.times = logtimes.TimeIndex(self.root / "log")
        self.stop_file = self.root / "stop.json"
        self.terminated = False
        self.join_timeout_s: float = spec.get("join_timeout_s", JOIN_TIMEOUT_S)
        self.ended: dict[str, Any] | None = None  # what exit.json holds
        self.tell_missing_s = WAITING_S

    def run(self, announce: int | None = None, stops: Sequence[int] = ()) -> None:
        """Supervise to the end; say on the pipe `announce` that it has begun."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self.terminated = bool(stops)
        durable.reserve(self.root / "reserve")
        self._write_state()
        if announce is not None:
            os.write(announce, b"%d\n" % os.getpid())
            os.close(announce)
        try:
            bundlefile.unpack(Path(self.spec["bundle"]), self.spec["sha256"], self.root)
            durable.write_json(self.root / "spec.json", self.spec["spec"])
        except (OSError, bundlefile.BundleError) as error:
            self._set(phase="exited", code=EXIT_CONFIG, failures=(_failure(f"node {self.spec['node']}: {error}"),))
        try:
            while not self._turn():
                pass
        except Exception as error:  # a fault of ours must not look like a lost machine
            traceback.print_exc()
            self._end(_failed("error", f"the agent of node {self.spec['node']} failed: {error!r}"))

    def _turn(self) -> bool:
        """Look, tell, obey, and wait for news, once; return whether the job is over."""
        self._look()
        desired = self._exchange()
        self.times.note(time.time())
        if desired is None:
            silent_s = self.member.silent_s() if self.member else 0.0
            self._end(_failed("node_failure", f"lost contact with node 0 for {silent_s:.0f} s"))
            return True
        if desired.want == "end":
            assert desired.verdict is not None
            self._end(desired.verdict)
            return True
        self._obey(desired)
        line = self.head or self.member
        assert line is not None
        line.listen(TICK_S)
        return False

    def _look(self) -> None:
        """Bring the report up to date: has boot ended, has somebody asked to stop?"""
        if self.boot is not None and self._boot_code() is not None:
            self._collect()
        if self.report.stop != "now" and (request := durable.read_json(self.stop_file)):
            self._set(stop=request["reason"])  # `now` may come after `user` has waited long enough
        elif self.report.stop is None and self.terminated:
            self._set(stop="preempted")

    def _exchange(self) -> Desired | None:
        """Say how this node is; return what should be, None once node 0 has been silent for too long."""
        if self.member is not None:
            self.member.tell(self.report)
            if self.member.lost(self.join_timeout_s):
                return None
            return self.member.desired or Desired()
        assert self.head is not None
        reports = {**self.head.reports, self.report.node: self.report}
        now_s = time.monotonic() - self.clock_zero
        desired = self.coordinator.decide(reports, self.head.lost(), now_s, self._fresh_port)
        self.head.tell(desired)
        if desired.want == "wait" and now_s >= self.tell_missing_s:
            self.tell_missing_s = now_s + WAITING_AGAIN_S
            missing = ", ".join(str(node) for node in range(self.spec["spec"]["nodes"]) if node not in reports)
            print(f"waiting for node {missing} to start, for {now_s:.0f} s by now", flush=True)
        return desired

    def _fresh_port(self) -> int:
        return _free_port(self.spec["address"], f"{self.spec['job']}-{self.report.generation}")

    def _obey(self, desired: Desired) -> None:
        is_member = self.report.node in desired.nodes or not desired.nodes
        if self.report.phase == "running" and (desired.want == "kill" or not is_member):
            self._kill_ranks()
        elif desired.want == "run" and desired.generation > self.report.generation and is_member:
            self._start_boot(desired)
        elif desired.want == "stop" and not self.asked_to_stop:
            self.asked_to_stop = True
            if self.boot is not None and self.report.phase == "running":
                processes.kill(self.boot.pid, signal.SIGTERM)

    def _kill_ranks(self) -> list[int]:
        """Kill all below; return what could not be killed."""
        if self.report.phase == "running" and not self.killed:
            # Killed for another node's timeout, or for not stopping: the rank to blame may stand here.
            heartbeat.print_stacks(self._result(), heartbeat.STALE_S)
        self.killed = True
        return processes.kill_descendants()

    def _result(self) -> Path:
        return self.root / "result" / str(self.report.generation)

    def _start_boot(self, desired: Desired) -> None:
        processes.kill_descendants()
        self.killed, self.note = False, desired.note
        self._set(generation=desired.generation, phase="running", code=None, failures=(), saved=None)
        result = self._result()
        try:
            result.mkdir(parents=True, exist_ok=True)
            with (self.root / "log" / "boot.log").open("ab") as log:
                self.boot = subprocess.Popen(
                    [self.spec["python"], "-m", "cloudtrain.entrypoints.boot"],
                    cwd=self.root,
                    umask=self.umask,
                    env=self._environment(desired, result),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        except OSError as error:
            message = f"node {self.spec['node']} cannot start {self.spec['python']}: {error}"
            self._set(phase="exited", code=EXIT_CONFIG, failures=(_failure(message),))

    def _environment(self, desired: Desired, result: Path) -> dict[str, str]:
        """Return what boot and the ranks see. The job's own `env` and secrets win over this machine's."""
        spec = self.spec
        beside = {
            "CLOUDTRAIN_JOB": spec["job"],
            "CLOUDTRAIN_ATTEMPT": str(spec["attempt"]),
            "CLOUDTRAIN_NODE_RANK": str(desired.nodes.index(spec["node"])),
            "CLOUDTRAIN_NUM_NODES": str(len(desired.nodes)),
            "CLOUDTRAIN_HEAD": f"{spec['head'][0]}:{desired.port}",
            "CLOUDTRAIN_ADDRESS": spec["address"],
            "CLOUDTRAIN_SPEC": str(self.root / "spec.json"),
            "CLOUDTRAIN_RESTART": str(desired.generation - 1),
            "CLOUDTRAIN_RESULT_DIR": str(result),
            "CLOUDTRAIN_LOG_DIR": str(self.root / "log"),
            "CLOUDTRAIN_CODE_DIR": str(self.root / "code"),
            "CLOUDTRAIN_DEADLINE": f"{self.started_s + spec['max_duration_s']:.0f}",
        }
        # The user's own PYTHONPATH stays, behind the folder that boot and the trainer come from.
        theirs = spec["environment"].get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        path = os.pathsep.join(filter(None, [str(self.root / "runtime"), theirs]))
        # torchrun sets one thread a rank only where it starts several; several nodes on one machine need it too.
        threads = max(1, processes.cores() // (spec["colocated"] * spec["spec"]["nproc_per_node"]))
        defaults = {"OMP_NUM_THREADS": str(threads)}
        return {**defaults, **os.environ, **spec["environment"], **spec["secrets"], **beside, "PYTHONPATH": path}

    def _boot_code(self) -> int | None:
        """Reap every ended child of the subreaper; return boot's exit code once it has one."""
        assert self.boot is not None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.boot.pid:
                    self.boot.returncode = os.waitstatus_to_exitcode(ended[1])
        if self.boot.returncode is None and not processes.stamp(self.boot.pid):
            self.boot.returncode = -signal.SIGKILL  # reaped by kill_descendants
        return self.boot.returncode

    def _collect(self) -> None:
        assert self.boot is not None
        code, self.boot = self.boot.returncode, None
        if code == -signal.SIGTERM and self.asked_to_stop:
            code = EXIT_STOPPED  # asked before it could listen
        processes.kill_descendants()
        result = self._result()
        told = durable.read_json(result / "result.json") or {}
        failures = tuple(told.get("failures", ()))[:MAX_FAILURES]
        if code < 0 and not failures and not self.killed:
            name = signal.Signals(-code).name
            failures = (_failure(f"boot of node {self.spec['node']} was killed by {name}", "signal"),)
        outcome = durable.read_json(result / "outcome.json")
        saved = outcome if code == EXIT_SAVED else None
        self._set(phase="exited", code=code if code >= 0 else EXIT_FAILED, failures=failures, saved=saved)

    def _end(self, verdict: dict[str, Any]) -> None:
        stuck = self._kill_ranks()
        self.times.note(time.time())
        if self.head is not None:
            self.head.close()
        checkpoints = Path(self.spec["environment"]["CLOUDTRAIN_CHECKPOINT_DIR"])
        resumable = verdict["state"] != "succeeded" and has_checkpoint(checkpoints)
        times = {"started_s": self.started_s, "ended_s": time.time()}
        self.ended = {**verdict, "resumable": resumable, **times, "unkillable": stuck}
        self._write("exit.json", self.ended)
        self._set(phase="ended")
        if verdict["state"] == "succeeded":  # `code` stays: a script runs there, and may have written there
            for name in ("runtime", "reserve"):
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _set(self, **changes: Any) -> None:
        self.report = Report(**{**self.report.__dict__, **changes})
        if "stop" not in changes:
            self._write_state()

    def _write_state(self) -> None:
        state = {
            "pid": os.getpid(),
            "stamp": processes.stamp(os.getpid()),
            "phase": self.report.phase,
            "generation": self.report.generation,
            "detail": self.note,
            "started_s": self.started_s,
        }
        self._write("state.json", state)

    def _write(self, name: str, value: dict[str, Any]) -> None:
        try:
            durable.write_json(self.root / name, value)
        except OSError as error:  # the supervisor goes on: killing what runs matters more than saying so
            print(f"agent: {name} cannot be written: {error}", file=sys.stderr)

    def _on_sigterm(self, signum: int, frame: object) -> None:
        self.terminated = True  # the machine shuts down, or somebody asks by hand: stop the job, saving first


def _rules(spec: dict[str, Any]) -> Rules:
    # The trainer saves before its deadline by itself; the signal at the soft one is for scripts.
    return Rules(
        nodes=spec["spec"]["nodes"],
        max_restarts=spec["max_restarts"],
        limit_reason=spec["limit_reason"],
        soft_deadline_s=spec["deadline_s"],
        hard_deadline_s=spec["max_duration_s"],
        grace_s=spec["grace_s"],
        join_timeout_s=spec.get("join_timeout_s", JOIN_TIMEOUT_S),
        fewest=spec["spec"]["min_nodes"],
        sizes=tuple(spec["spec"]["node_counts"]),
    )


def _failure(message: str, kind: str = "config") -> dict[str, Any]:
    return {"rank": None, "kind": kind, "message": message, "time_s": time.time()}


def _failed(reason: str, message: str) -> dict[str, Any]:
    """Return the verdict of a node that cannot hear node 0's."""
    error = {"rank": None, "kind": "lost", "message": message}
    return {"state": "failed", "reason": reason, "error": error, "restarts": 0, "restarted_after": []}


def _free_port(address: str, seed: str) -> int:
    """Return a port that is free on the address now; the same first candidate for the same seed."""
    first = int.from_bytes(seed.encode()[-8:], "big") * 2654435761 % PORTS
    for step in range(PORTS):
        port = FIRST_PORT + (first + step) % PORTS
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            return port
    raise OSError(f"no free port between {FIRST_PORT} and {FIRST_PORT + PORTS} on {address}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
