"""The supervisor of a node: starts, restarts and ends boot, detached from the process that started the supervisor.

An agent's folder: `state.json` (phase, pid), `exit.json` (the job's end, written once), `stop.json` (a stop request
from a user or a tool), `log/` (a file per rank), `result/GENERATION/`, `code/` and `runtime/` (the unpacked bundle).
Node 0's agent decides (see coordinate.py). An agent that no longer hears node 0's agent fences itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import atomic_json, foreign, processes
from ..contract import EXIT, STATE, STATE_EVERY_S, STOP, AgentSpec, AgentState, ExitReport
from ..environments.job import Preparation
from ..notices.node_notifier import of_agent
from . import gpulocks, node_folder, transport
from .boot import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, is_done, save_signal
from .boot_environment import boot_environment
from .coordinate import Desired, Report
from .files import NodeFiles
from .membership import Fenced, Membership
from .queue_wait import REQUEUE
from .ranks import Ranks, failure

TICK_S = 0.1
PREPARING = "its packages are being installed"
SPARE = "waits as a spare"
FREE = (0, False)  # the seat of a node that holds no locks


def supervise(spec: AgentSpec, server: socket.socket | None, stops: list[int]) -> ExitReport:
    """Supervise a node from a container's first process; return the exit report. `stops`: earlier stop signals."""
    agent = Agent(spec, server, os.umask(0o077))
    agent.run(stops=stops)
    assert agent.ended is not None
    return agent.ended


class Agent:
    """The supervision of one node, from the first state on disk to exit.json."""

    def __init__(
        self,
        spec: AgentSpec,
        server: socket.socket | None,
        umask: int,
        taken: gpulocks.HeldLocks | None = None,
        take: Callable[[], gpulocks.HeldLocks | None] | None = None,
    ) -> None:
        self.spec = spec
        self.seat = gpulocks.Seat(taken, take)
        self.started_s = time.time()
        self.desired = Desired()  # the state that began the present generation
        self.asked_to_stop = False
        self.terminated = False
        self.ended: ExitReport | None = None
        # Whether the agents start again after this verdict: then the job has not ended, and has no exit report.
        self.comes_again: Callable[[ExitReport], bool] = lambda verdict: verdict.reason == REQUEUE
        self.ranks = Ranks(spec, umask)
        listener = None
        if spec.succeeds and server is None:  # a successor's listener
            listener = transport.on_free_port(spec, partial(transport.listen, spec.address))
        self.membership = Membership(spec, server, self.ranks.fresh_port, listener)
        self.files = NodeFiles(spec, self.membership.before)
        self.report = Report(spec.node, life=spec.life, seat=None if take is None else FREE)
        if spec.succeeds or spec.copies:
            self.report = replace(self.report, address=spec.address, ports=(self.membership.port, self.files.port))
        self.preparation: Preparation | None = None  # the installation for `requirements` and `setup`
        self.written_s = 0.0  # when the state was last written
        self.notifier = of_agent(spec, self.started_s)

    @property
    def root(self) -> Path:
        """The agent's folder."""
        return Path(self.spec.root)

    @property
    def _is_spare(self) -> bool:
        """Whether this node waits as a spare, or is back; from its first generation on the node is like any other."""
        return self.seat.take is not None and not self.report.generation

    def count_earlier(self, started_s: float, used_s: float) -> None:
        """Count the job's time before a preemption: its first start in unix seconds, and the seconds used since."""
        self.started_s = started_s or self.started_s
        self.membership.zero_s -= used_s
        if self.notifier is not None:
            self.notifier.count_earlier(used_s)

    def run(self, announce: int | None = None, stops: Sequence[int] = ()) -> None:
        """Supervise to the job's end; write the pid to the pipe `announce` after the start."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if (saves := save_signal(self.spec.job.run)) is not None:
            signal.signal(saves, lambda signum, frame: self.ranks.tell(signum))
        self.terminated = bool(stops)
        self.files.start()
        atomic_json.reserve(self.root / "reserve")
        self._write_state()
        processes.announce(announce)
        if self.notifier is not None:
            self.notifier.start()
        try:
            foreign.unpack(Path(self.spec.bundle), self.spec.sha256, self.root)
            atomic_json.write_json(self.root / "spec.json", self.spec.job.dump())
            self._set(newest=self.files.newest())
            if self.spec.job.setup is not None:  # the ranks start after the installation
                last = self.spec.job.nodes - 1
                first = Desired("run", 1, nodes=(*range(last), max(last, self.spec.node)))
                self.preparation = Preparation(self.spec, self._environment(first), self.ranks.umask)
                self._set(phase="preparing")
        except (OSError, foreign.BundleError) as error:
            self._set(phase="exited", code=EXIT_CONFIG, failures=(failure(f"node {self.spec.node}: {error}"),))
        try:
            while not self._turn():
                pass
        except Exception as error:  # an error of the agent must not look like a lost machine
            traceback.print_exc()
            self._end(_failed("error", f"the agent of node {self.spec.node} failed: {error!r}"))

    def _turn(self) -> bool:
        """Poll, report, obey, and wait for messages, once; return whether the job is over."""
        self._look()
        try:
            desired = self.membership.exchange(self.report)
        except Fenced as cut:
            self._end(replace(_failed("node_failure", str(cut)), fenced=True))
            return True
        self.ranks.times.note(time.time())
        if time.monotonic() - self.written_s > STATE_EVERY_S:
            self._write_state()
            if self.seat.taken is not None:
                self.seat.taken.touch()
        if desired.want == "end":
            assert desired.verdict is not None
            self._end(desired.verdict)
            return True
        self._apply(desired)
        self._report_gpus(desired)
        may_grow = desired.nodes[:1] == (self.report.node,) and len(desired.nodes) < self.spec.job.nodes
        self.report = replace(self.report, latest=self.files.latest() if may_grow else None)
        self.membership.listen(TICK_S)
        return False

    def _report_gpus(self, desired: Desired) -> None:
        """Report how busy this node's GPUs are; on rank 0's node, write all nodes' figures into rank 0's log."""
        meter = self.ranks.meter
        if meter is None:  # no rank has started
            return
        if meter.latest != self.report.gpus:
            self.report = replace(self.report, gpus=meter.latest)
        if self.report.phase != "running" or desired.nodes[:1] != (self.report.node,):
            return
        reports, ranks = {**self.membership.reports, self.report.node: self.report}, self.spec.job.nproc_per_node
        known = [(place * ranks, reports[node].gpus) for place, node in enumerate(desired.nodes) if node in reports]
        figures = [(first + local, each) for first, some in known for local, each in enumerate(some)]
        meter.report(self.root / "log" / "rank-0.log", figures)

    def _look(self) -> None:
        """Update the report: check whether boot has ended, and whether a stop request has arrived."""
        if self.preparation is not None and (made := self.preparation.result()) is not None:
            self.preparation = None
            if fault := made.get("failure"):
                self._set(phase="exited", code=EXIT_CONFIG, failures=(fault,))
            else:
                self.ranks.use(made["python"], made["environment"])
                self._set(phase="idle")
        self._launch()
        if self.ranks.boot is not None:
            code = self.ranks.boot_code()
            # After a stop request, a script that exits 0 may have saved only; then boot decides.
            may_be_done = code is None and (self.files.is_task or not (self.asked_to_stop or self.terminated))
            where = self.ranks.result, self.spec.job, len(self.desired.nodes)
            if not self.report.done and (code == EXIT_DONE or (may_be_done and is_done(*where))):
                self._set(done=True)
            if code is not None and self.files.have_closed(self.ranks.kill_tree):
                self._collect()
        if self.report.stop != "now" and (request := atomic_json.read_json(self.root / STOP)):
            self._set(stop=request["reason"])  # a user whose request `user` takes too long may request `now`
        elif self.report.stop is None and self.terminated:
            self._set(stop="preempted")

    def _collect(self) -> None:
        ended = self.ranks.collect(was_asked=self.asked_to_stop or self.terminated)
        self._set(phase="exited", newest=self.files.newest_kept, **ended)

    def _apply(self, desired: Desired) -> None:
        is_member = self.report.node in desired.nodes or not desired.nodes
        is_short = desired.want == "kill" or (desired.want == "run" and len(desired.nodes) < self.spec.job.nodes)
        if self._is_spare and (self.report.node in desired.called or (self.spec.life and is_short)):
            answer = desired.generation, self.seat.hold()
            if self.report.seat != answer:
                self._set(seat=answer)
        elif self._is_spare and desired.want == "run" and not is_member:
            self.seat.leave()
            self.report = replace(self.report, seat=FREE)
        if desired.generation == self.desired.generation and desired.note != self.desired.note:
            self.desired = replace(self.desired, note=desired.note)
            self._write_state()
        if self.report.phase == "running" and (desired.want == "kill" or not is_member):
            self._kill_ranks(hung=desired.hung)
        elif desired.want == "run" and desired.generation > self.report.generation and is_member:
            self.ranks.begin(desired.generation)
            self.desired = desired
            self._set(generation=desired.generation, phase="running", code=None, failures=(), saved=None, done=False)
            self.files.open(desired, self.membership.places)
            self._launch()
        elif desired.want == "stop" and not self.asked_to_stop:
            self.asked_to_stop = True
            self._not_launched(EXIT_STOPPED)
            if self.report.phase == "running":
                self.ranks.stop()

    def _kill_ranks(self, *, hung: bool = False) -> list[int]:
        """Kill all descendants; return the pids that could not be killed. `hung`: a rank of any node made no step."""
        is_running = self.report.phase == "running"
        self._not_launched(EXIT_FAILED)
        return self.ranks.kill(shows=is_running, hung=hung)

    def _not_launched(self, code: int) -> None:
        """Cancel the start of boot, if boot has not started yet."""
        if self.files.cancel():
            self._set(phase="exited", code=code)

    def _launch(self) -> None:
        """Start boot when the files of the start are here, unless files that the ranks need are missing."""
        if (missing := self.files.opened()) is None:
            return
        resume, fault = self._resume_path(self.desired), self.files.fault
        is_first = self.report.generation == 1 and self.spec.job.attempt == 1
        if missing and not is_first and not self.files.has_checkpoint():
            words = f"the checkpoint cannot be read, so the job does not start again: {'; '.join(missing)}"
            self._set(phase="exited", code=EXIT_FAILED, failures=(failure(words, "lost"),))
            return
        if resume is not None and not resume.exists():
            fault = f"{self.desired.resume}, from which the job resumes, is only on another node's disk"
        if fault is not None:
            message = f"node {self.spec.node}: {fault}"
            self._set(phase="exited", code=EXIT_FAILED, failures=(failure(message, "lost"),))
            return
        try:
            self.ranks.start(self._environment(self.desired))
        except OSError as error:
            message = f"node {self.spec.node} cannot start {self.ranks.spec.python}: {error}"
            self._set(phase="exited", code=EXIT_CONFIG, failures=(failure(message),))

    def _resume_path(self, desired: Desired) -> Path | None:
        """Return the checkpoint that a script resumes from; None for the first start with `resume: never`."""
        is_first = desired.generation == 1 and self.spec.job.attempt == 1
        if desired.resume is None or (is_first and self.spec.job.checkpoint.resume == "never"):
            return None
        return self.files.checkpoints / desired.resume

    def _environment(self, desired: Desired) -> dict[str, str]:
        """Return the environment of boot and the ranks."""
        head, used_s = self.membership.head_address, self.membership.now_s()
        return boot_environment(self.ranks.spec, desired, self.ranks.result, self._resume_path(desired), head, used_s)

    def _end(self, verdict: ExitReport) -> None:
        if self.notifier is not None:
            self.notifier.leave() if self.comes_again(verdict) else self.notifier.end(verdict)
        if self.ranks.meter is not None:
            self.ranks.meter.finish()
        stuck = self._kill_ranks()
        self.ranks.times.note(time.time())
        self.membership.close()
        self.files.finish()
        if self.notifier is not None:
            self.notifier.finish()
            self.ranks.times.note(time.time())
        self.ended = replace(
            verdict,
            unkept=tuple(self.files.report_unkept()),
            resumable=verdict.state != "succeeded" and self.files.has_checkpoint(),
            started_s=self.started_s,
            ended_s=time.time(),
            held_s=self.membership.held_s(),
            gone_s=self.membership.gone_s(),
            joined_s=self.membership.joined_s(),
            unkillable=tuple(stuck),
        )
        if not self.comes_again(verdict):
            node_folder.write(self.root / EXIT, self.ended)
        self._set(phase="ended")
        if verdict.state == "succeeded":  # `code` stays: a script runs in `code`, and may have written files
            for name in ("runtime", "reserve"):
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _set(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)
        if "stop" not in changes:
            self._write_state()

    def _write_state(self) -> None:
        is_preparing = self.preparation is not None and self.report.phase != "ended"
        state = AgentState(
            pid=os.getpid(),
            stamp=processes.stamp(os.getpid()),
            machine=os.uname().nodename,
            phase=self.report.phase,
            generation=self.report.generation,
            detail=PREPARING if is_preparing else SPARE if self._is_spare else self.desired.note,
            started_s=self.started_s,
            # A node that is back does not know for how long the job did without the node.
            held_s=None if self.spec.life else self.membership.now_s(),
            zero_s=None if self.spec.life else self.membership.zero_s,
            gone_s=self.membership.gone_s(),
            joined_s=self.membership.joined_s(),
        )
        self.written_s = time.monotonic()
        node_folder.write(self.root / STATE, state)

    def _on_sigterm(self, signum: int, frame: object) -> None:
        self.terminated = True  # the machine shuts down, or a user sent the signal: save, then stop the job


def _failed(reason: str, message: str) -> ExitReport:
    """Return the verdict of a node that cannot receive node 0's verdict."""
    return ExitReport("failed", reason, {"rank": None, "kind": "lost", "message": message})
