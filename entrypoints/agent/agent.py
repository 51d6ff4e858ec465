"""The supervisor of a node: starts, restarts and ends boot, detached from the process that started the supervisor.

An agent's folder: `state.json` (phase, pid), `exit.json` (the job's end, written once), `stop.json` (a stop request
from a user or a tool), `log/` (a file per rank), `result/GENERATION/`, `code/` and `runtime/` (the unpacked bundle).
Node 0's agent decides (see coordinate.py). An agent that no longer hears node 0's agent fences itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic_json, bundle_file, processes
from ..contract import AgentSpec, AgentState, ExitReport
from ..environments import dockerrun, venvs
from ..environments.job import Preparation
from ..job_files import EXIT, STATE, STATE_EVERY_S, STOP, has_checkpoint
from ..rank import heartbeat
from ..replication import copies
from ..replication.replicas import Replicas
from ..replication.restore import Gathering
from ..scripts.keep import FileKeeper, report_unkept
from ..scripts.newest import newest
from . import gpulocks, gpumeter, log_times, transport
from .boot import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_SAVED,
    EXIT_STOPPED,
    SLURM,
    is_done,
)
from .boot_environment import boot_environment
from .coordinate import Desired, Report
from .membership import Fenced, Membership
from .queue_wait import REQUEUE

if TYPE_CHECKING:
    from ..notices.node_notifier import NodeNotifier

TICK_S = 0.1
KEEP_S = 60.0  # time to copy the kept files at the job's end
NOT_COPIED = f"agent: the kept files were not copied within {KEEP_S:.0f} s"
MAX_FAILURES = 4  # per node, the root cause first: later failures are consequences


def supervise(spec: AgentSpec, server: socket.socket | None, stops: list[int]) -> ExitReport:
    """Supervise a node from this process, a container's first process; return the node's exit report.

    `stops` are the stop signals that arrived before the call.
    """
    agent = Agent(spec, server, os.umask(0o077))
    agent.run(stops=stops)
    assert agent.ended is not None
    return agent.ended


class Agent:
    """The supervision of one node, from the first state on disk to exit.json."""

    def __init__(
        self, spec: AgentSpec, server: socket.socket | None, umask: int, taken: gpulocks.HeldLocks | None = None
    ) -> None:
        self.spec = spec
        self.taken = taken  # the locks, held until this process ends
        self.umask = umask  # the user's own umask, for the files that the job writes
        self.root = Path(spec.root)
        self.started_s = time.time()
        self.report = Report(spec.node)
        self.note: str | None = None  # why the job runs on fewer nodes than planned
        self.boot: subprocess.Popen[bytes] | None = None
        self.asked_to_stop = False
        self.members = spec.job.nodes  # the number of nodes in this generation
        self.ended_s = 0.0  # when the ranks had ended, before the agent copied their files
        self.killed = False  # the agent killed this generation: then boot's signal is no failure
        listener = None
        if spec.succeeds and server is None:  # a successor's listener
            listener = transport.on_free_port(spec, partial(transport.listen, spec.address))
        self.held_port: socket.socket | None = None
        self.line = Membership(spec, server, self._fresh_port, listener)
        if spec.succeeds:
            self.report = replace(self.report, address=spec.address, ports=(self.line.port, 0))
        self.times = log_times.TimeIndex(self.root / "log")
        self.terminated = False
        self.ended: ExitReport | None = None
        # Whether the agents start again after this verdict: then the job has not ended, and has no exit report.
        self.comes_again: Callable[[ExitReport], bool] = lambda verdict: verdict.reason == REQUEUE
        # The job's environment, if `python` alone is not enough: a venv locked against clean-up, or a container.
        self.kept = venvs.hold(spec.environment_lock) if spec.environment_lock else None
        self.container = dockerrun.Container(**spec.container) if spec.container else None
        self.preparation: Preparation | None = None  # the installation for `requirements` and `setup`
        self.written_s = 0.0  # when the state was last written
        self.meter: gpumeter.GpuMeter | None = None
        self.gathering: Gathering | None = None  # before boot starts
        self.launch: Callable[[], None] | None = None  # starts boot, after the gathering
        self.checkpoints = Path(spec.environment["CLOUDTRAIN_CHECKPOINT_DIR"])
        run = spec.job.run
        self.is_task = run.is_own
        where = self.root / "code", self.checkpoints, run.keep, self.root / "log" / "rank-0.log"
        self.keeper = None if self.is_task else FileKeeper(*where)
        self.notifier: NodeNotifier | None = None  # of a job that sends notifications by itself
        if spec.job.notices is not None:
            from ..notices import node_notifier

            self.notifier = node_notifier.of_agent(spec, self.started_s)
        self.replicas: Replicas | None = None
        if spec.copies:
            self._share_checkpoints(Path(spec.copies))

    def _share_checkpoints(self, note: Path) -> None:
        """Serve this node's checkpoints to all nodes; the first successor keeps a copy of the leader's checkpoints."""
        spec, folder = self.spec, self.checkpoints
        server = transport.on_free_port(spec, lambda port: copies.serve(folder, spec.address, port, spec.token))
        self.report = replace(self.report, address=spec.address, ports=(self.line.port, server.address[1]))
        self.replicas = Replicas(folder, self.line.before, spec.token, note)

    def count_earlier(self, started_s: float, used_s: float) -> None:
        """Count the job's time before a preemption: its first start in unix seconds, and the seconds used since."""
        self.started_s = started_s or self.started_s
        self.line.zero_s -= used_s
        if self.notifier is not None:
            self.notifier.count_earlier(used_s)

    def run(self, announce: int | None = None, stops: Sequence[int] = ()) -> None:
        """Supervise to the job's end; write the pid to the pipe `announce` after the start."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self.terminated = bool(stops)
        if self.replicas is not None and self.spec.replicates:
            self.replicas.start()
        atomic_json.reserve(self.root / "reserve")
        self._write_state()
        processes.announce(announce)
        if self.notifier is not None:
            self.notifier.start()
        try:
            bundle_file.unpack(Path(self.spec.bundle), self.spec.sha256, self.root)
            atomic_json.write_json(self.root / "spec.json", self.spec.job.dump())
            self._set(newest=self._newest())
            self._prepare()
        except (OSError, bundle_file.BundleError) as error:
            self._set(phase="exited", code=EXIT_CONFIG, failures=(_failure(f"node {self.spec.node}: {error}"),))
        try:
            while not self._turn():
                pass
        except Exception as error:  # an error of the agent must not look like a lost machine
            traceback.print_exc()
            self._end(_failed("error", f"the agent of node {self.spec.node} failed: {error!r}"))

    def _prepare(self) -> None:
        """Start to install the ranks' environment, if the config has `setup`; ranks start after the installation."""
        if self.spec.job.setup is None:
            return
        first = Desired("run", 1, nodes=tuple(range(self.spec.job.nodes)))
        self.note = "its packages are being installed"
        self.preparation = Preparation(self.spec, self._environment(first, self._result()), self.umask)
        self._set(phase="preparing")

    def _take_prepared(self, made: dict[str, Any]) -> None:
        self.preparation = self.note = None
        if failure := made.get("failure"):
            self._set(phase="exited", code=EXIT_CONFIG, failures=(failure,))
            return
        environment = {**self.spec.environment, **made["environment"]}
        self.spec = replace(self.spec, python=made["python"], environment=environment)
        self._set(phase="idle")

    def _turn(self) -> bool:
        """Poll, report, obey, and wait for messages, once; return whether the job is over."""
        self._look()
        try:
            desired = self.line.exchange(self.report)
        except Fenced as cut:
            self._end(replace(_failed("node_failure", str(cut)), fenced=True))
            return True
        self.times.note(time.time())
        if time.monotonic() - self.written_s > STATE_EVERY_S:
            self._write_state()
            if self.taken is not None:
                self.taken.touch()
        if desired.want == "end":
            assert desired.verdict is not None
            self._end(desired.verdict)
            return True
        self._apply(desired)
        self._report_gpus(desired)
        self.line.listen(TICK_S)
        return False

    def _report_gpus(self, desired: Desired) -> None:
        """Report how busy this node's GPUs are; on rank 0's node, write all nodes' figures into rank 0's log."""
        if self.meter is None:  # no rank has started
            return
        if self.meter.latest != self.report.gpus:
            self.report = replace(self.report, gpus=self.meter.latest)
        if self.report.phase != "running" or desired.nodes[:1] != (self.report.node,):
            return
        reports, ranks = {**self.line.reports, self.report.node: self.report}, self.spec.job.nproc_per_node
        known = [(place * ranks, reports[node].gpus) for place, node in enumerate(desired.nodes) if node in reports]
        figures = [(first + local, each) for first, some in known for local, each in enumerate(some)]
        self.meter.report(self.root / "log" / "rank-0.log", figures)

    def _look(self) -> None:
        """Update the report: check whether boot has ended, and whether a stop request has arrived."""
        if self.preparation is not None and (made := self.preparation.result()) is not None:
            self._take_prepared(made)
        is_here = self.gathering is None or self.gathering.is_done
        if self.launch is not None and is_here and (self.keeper is None or self.keeper.has_opened()):
            missing = self.gathering.missing if self.gathering else ()
            launch, self.launch, self.gathering = self.launch, None, None
            if missing and not self._may_begin_anew():
                words = f"the checkpoint cannot be read, so the job does not start again: {'; '.join(missing)}"
                self._set(phase="exited", code=EXIT_FAILED, failures=(_failure(words, "lost"),))
            else:
                launch()
        if self.boot is not None and not self.report.done and self._is_done(self._boot_code()):
            self._set(done=True)
        if self.boot is not None and self._boot_code() is not None and self._has_kept():
            self._collect()
        if self.report.stop != "now" and (request := atomic_json.read_json(self.root / STOP)):
            self._set(stop=request["reason"])  # a user whose request `user` takes too long may request `now`
        elif self.report.stop is None and self.terminated:
            self._set(stop="preempted")

    def _is_done(self, boot_code: int | None) -> bool:
        """Return whether the ranks of this node have ended with success, while boot or the agent still works.

        After a stop request, a script that exits 0 may have saved only; then boot decides.
        """
        if boot_code is not None:
            return boot_code == EXIT_DONE
        is_asked = self.asked_to_stop or self.terminated
        return (self.is_task or not is_asked) and is_done(self._result(), self.spec.job, self.members)

    def _has_kept(self) -> bool:
        """Kill the processes that the ranks have left; return whether the ranks' files are kept."""
        if self.keeper is None:
            return True
        if not self.keeper.is_closing:
            self._kill_tree()
            self.ended_s = time.monotonic()
        if self.keeper.close():
            return True
        if time.monotonic() - self.ended_s < KEEP_S:
            return False
        print(NOT_COPIED, flush=True)
        return True

    def _newest(self) -> tuple[str, float] | None:
        """Return a script's newest checkpoint on this node; None for the trainer, which finds its own checkpoints."""
        return None if self.is_task else newest(self.checkpoints)

    def _report_unkept(self) -> list[str]:
        """Copy the last kept files; log the names of the script's unkept files, and return these names."""
        if self.keeper is None:
            return []
        if not self.keeper.close(KEEP_S):
            print(NOT_COPIED, flush=True)
        return report_unkept(self.keeper.unkept(), self.keeper.log or self.root / "log" / "boot.log")

    def _may_begin_anew(self) -> bool:
        """Return whether ranks may start although files could not be fetched: a checkpoint exists, or never existed."""
        is_first = self.report.generation == 1 and self.spec.job.attempt == 1
        return is_first or has_checkpoint(self.checkpoints)

    def _fresh_port(self) -> int:
        """Return a port for the next generation's torchrun, reserved for this job until the following generation."""
        if self.held_port is not None:
            self.held_port.close()
        self.held_port = transport.reserved(self.spec)
        return int(self.held_port.getsockname()[1])

    def _apply(self, desired: Desired) -> None:
        is_member = self.report.node in desired.nodes or not desired.nodes
        if self.report.phase == "running" and (desired.want == "kill" or not is_member):
            self._kill_ranks()
        elif desired.want == "run" and desired.generation > self.report.generation and is_member:
            self._start_boot(desired)
        elif desired.want == "stop" and not self.asked_to_stop:
            self.asked_to_stop = True
            self._not_launched(EXIT_STOPPED)
            if self.boot is not None and self.boot.returncode is None and self.report.phase == "running":
                processes.kill(self.boot.pid, signal.SIGUSR1 if SLURM in os.environ else signal.SIGTERM)

    def _kill_ranks(self) -> list[int]:
        """Kill all descendants; return the pids that could not be killed."""
        if self.report.phase == "running" and not self.killed:
            # The cause is another node's timeout, or a rank that does not stop: the stuck rank may be on this node.
            heartbeat.print_stacks(self._result(), heartbeat.STALE_S)
        self.killed = True
        self._not_launched(EXIT_FAILED)
        return self._kill_tree()

    def _not_launched(self, code: int) -> None:
        """Cancel the start of boot, if boot has not started yet."""
        if self.gathering is not None:
            self.gathering.cancel()
        if self.keeper is not None and self.launch is not None:
            self.keeper.close()
        if self.launch is not None:
            self.launch = self.gathering = None
            self._set(phase="exited", code=code)

    def _kill_tree(self) -> list[int]:
        """Kill the container, whose processes are no descendants, and all descendants; return the pids still alive."""
        if self.container is not None and self.report.generation:
            fault = dockerrun.remove(self.container, self._in_container().name)
            if fault:
                print(fault, flush=True)
        return processes.kill_descendants()

    def _in_container(self) -> dockerrun.Start:
        """Return this generation's start in the container."""
        spec = self.spec
        mounts = tuple(dockerrun.Mount(path, is_read_only) for path, is_read_only in spec.mounts)
        who = (spec.job.job, spec.job.attempt, spec.node, self.report.generation)
        return dockerrun.Start(*who, str(self.root), mounts, spec.gpus)

    def _result(self) -> Path:
        return self.root / "result" / str(self.report.generation)

    def _start_boot(self, desired: Desired) -> None:
        self._kill_tree()
        self.killed, self.note, self.members = False, desired.note, len(desired.nodes)
        self._set(generation=desired.generation, phase="running", code=None, failures=(), saved=None, done=False)
        self.launch = lambda: self._launch(desired)
        places = [place for place in self.line.places if place[0] != self.report.node]
        if self.replicas is not None and places and (not self.is_task or self.report.node == desired.nodes[0]):
            sources = [(address, port) for _, address, _, port in places]
            where = self.checkpoints, sources, self.spec.token, self.replicas.note
            merged = self.keeper.tops if self.keeper is not None else ()
            self.gathering = Gathering(*where, newest_alone=self.is_task, merged=merged)

    def _launch(self, desired: Desired) -> None:
        result, resume = self._result(), self._resume_path(desired)
        fault = self.keeper.fault if self.keeper is not None else None
        if resume is not None and not resume.exists():
            fault = f"{desired.resume}, from which the job resumes, is only on another node's disk"
        if fault is not None:
            message = f"node {self.spec.node}: {fault}"
            self._set(phase="exited", code=EXIT_FAILED, failures=(_failure(message, "lost"),))
            return
        try:
            result.mkdir(parents=True, exist_ok=True)
            argv = [self.spec.python, "-m", "cloudtrain.entrypoints.agent.boot"]
            env = self._environment(desired, result)
            if self.container is not None:
                start = self._in_container()
                dockerrun.note(self.container, start)
                argv, env = dockerrun.command(self.container, start, env, self.spec.secrets, argv[1:])
            with (self.root / "log" / "boot.log").open("ab") as log:
                if self.meter is None:
                    self.meter = gpumeter.GpuMeter(env.get("CUDA_VISIBLE_DEVICES"), self.spec.job.nproc_per_node)
                self.boot = subprocess.Popen(
                    argv,
                    cwd=self.root,
                    umask=self.umask,
                    env=env,
                    # The container ends when the agent ends: its standard input closes.
                    stdin=subprocess.DEVNULL if self.container is None else subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                )
            if self.container is not None:
                assert self.boot.stdin is not None
                dockerrun.hand(self.boot.stdin, self.spec.secrets)
        except OSError as error:
            message = f"node {self.spec.node} cannot start {self.spec.python}: {error}"
            self._set(phase="exited", code=EXIT_CONFIG, failures=(_failure(message),))

    def _resume_path(self, desired: Desired) -> Path | None:
        """Return the checkpoint that a script resumes from; None for the first start with `resume: never`."""
        is_first = desired.generation == 1 and self.spec.job.attempt == 1
        if desired.resume is None or (is_first and self.spec.job.checkpoint.resume == "never"):
            return None
        return self.checkpoints / desired.resume

    def _environment(self, desired: Desired, result: Path) -> dict[str, str]:
        """Return the environment of boot and the ranks."""
        line, resume = self.line, self._resume_path(desired)
        return boot_environment(self.spec, desired, result, resume, line.head_address, line.now_s())

    def _boot_code(self) -> int | None:
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

    def _collect(self) -> None:
        assert self.boot is not None
        code, self.boot = self.boot.returncode, None
        self._kill_tree()
        result = self._result()
        written = atomic_json.read_json(result / "result.json") or {}
        if code in (-signal.SIGTERM, -signal.SIGUSR1) and (written or self.asked_to_stop or self.terminated):
            code = written.get("code", EXIT_STOPPED)  # the signal came after or before boot's handler was in place
        failures = tuple(written.get("failures", ()))[:MAX_FAILURES]
        if self.container is not None:
            fault = dockerrun.client_fault(self.container, code, self.root / "log" / "boot.log")
            failures = (_failure(fault),) if fault else failures
            code = EXIT_CONFIG if fault else dockerrun.boot_code(code)
        if code < 0 and not failures and not self.killed:
            name = signal.Signals(-code).name
            failures = (_failure(f"boot of node {self.spec.node} was killed by {name}", "signal"),)
        saved = atomic_json.read_json(result / "outcome.json") if code == EXIT_SAVED else None
        newest = self.keeper.newest if self.keeper is not None else None
        fields = {"failures": failures, "saved": saved, "newest": newest}
        self._set(phase="exited", code=code if code >= 0 else EXIT_FAILED, **fields)

    def _end(self, verdict: ExitReport) -> None:
        if self.notifier is not None:
            self.notifier.leave() if self.comes_again(verdict) else self.notifier.end(verdict)
        if self.meter is not None:
            self.meter.finish()
        stuck = self._kill_ranks()
        self.times.note(time.time())
        self.line.close()
        if self.replicas is not None:
            self.replicas.finish()
        if self.notifier is not None:
            self.notifier.finish()
            self.times.note(time.time())
        self.ended = replace(
            verdict,
            unkept=tuple(self._report_unkept()),
            resumable=verdict.state != "succeeded" and has_checkpoint(self.checkpoints),
            started_s=self.started_s,
            ended_s=time.time(),
            held_s=self.line.held_s(),
            gone_s=self.line.gone_s(),
            unkillable=tuple(stuck),
        )
        if not self.comes_again(verdict):
            self._write(EXIT, self.ended)
        self._set(phase="ended")
        if verdict.state == "succeeded":  # `code` stays: a script runs in `code`, and may have written files
            for name in ("runtime", "reserve"):
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _set(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)
        if "stop" not in changes:
            self._write_state()

    def _write_state(self) -> None:
        state = AgentState(
            pid=os.getpid(),
            stamp=processes.stamp(os.getpid()),
            machine=os.uname().nodename,
            phase=self.report.phase,
            generation=self.report.generation,
            detail=self.note,
            started_s=self.started_s,
            held_s=self.line.now_s(),
            zero_s=self.line.zero_s,
            gone_s=self.line.gone_s(),
        )
        self.written_s = time.monotonic()
        self._write(STATE, state)

    def _write(self, name: str, value: AgentState | ExitReport) -> None:
        try:
            atomic_json.write_json(self.root / name, value.dump())
        except OSError as error:  # the supervisor continues: ending the job matters more than the record
            print(f"agent: {name} cannot be written: {error}", file=sys.stderr)

    def _on_sigterm(self, signum: int, frame: object) -> None:
        self.terminated = True  # the machine shuts down, or a user sent the signal: save, then stop the job


def _failure(message: str, kind: str = "config") -> dict[str, Any]:
    return {"rank": None, "kind": kind, "message": message, "time_s": time.time()}


def _failed(reason: str, message: str) -> ExitReport:
    """Return the verdict of a node that cannot receive node 0's verdict."""
    error = {"rank": None, "kind": "lost", "message": message}
    return ExitReport("failed", reason, error)
