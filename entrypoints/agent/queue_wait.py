"""The wait of a queued job's agents for the job's turn: all agents take their locks, or no agent does.

The agents talk as they do while they train (transport.py). Each agent has a ticket on its host and reports the host's
line to node 0. Node 0 decides (queue_turns.decide). At the turn node 0 asks all agents to take their locks; if one
agent cannot, all release. Nothing of the job has started until all agents have their locks.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import atomic_json, processes
from ..contract import EXIT, STATE, STATE_EVERY_S, STOP, AgentSpec, AgentState, ExitReport, has_checkpoint
from . import gpulocks, node_folder, transport
from .coordinate import Desired, Report
from .queue_line import KILL_S, PlacedTicket, held_by
from .queue_turns import SPARED_S, HostLine, QueueTicket, Turn, decide, victims

REQUEUE = "requeue"  # the reason of a stop request to a job that then waits again
TICK_S = 0.25
# Between two looks at the line, for each place in line: the first looks four times a second, the last every 4 s.
LOOK_S, LONGEST_LOOK_S = 0.25, 4.0
NEAR = 3  # places: so near to the front, a change in the folders causes a look at once
SILENCE_S = 30.0  # a waiting agent may be slow on a busy machine; a killed agent closes its connection
TAKE_S = 10.0  # for all agents to take their locks
SAME_S = 1.0  # an expected start that changes by less is not written again


@dataclass(frozen=True)
class Earlier:
    """The job's time before a preemption: the first start in unix seconds, the seconds used, the last preemption."""

    started_s: float = 0.0
    used_s: float = 0.0
    preempted_s: float | None = None


@dataclass
class QueueWait:
    """An agent that waits. `locks` is the start request's: folder, about, and `queue`, with this host's name and locks.

    `queue["holders"]` are the nodes with a ticket: on one machine node 0 alone, and the rest gets GPUs from node 0.
    """

    spec: AgentSpec
    server: socket.socket | None
    locks: Mapping[str, Any]
    earlier: Earlier = Earlier()
    report: Report = field(init=False)
    placed: PlacedTicket | None = None
    taken: gpulocks.HeldLocks | None = None  # stays None on nodes that hold no locks
    stop: str | None = None
    seen: HostLine | None = None  # the line on which node 0 decides
    _looked: tuple[float, tuple[int, ...]] = (0.0, ())
    _decided: tuple[float, Any] = (0.0, None)
    _written: tuple[float, Any] = (0.0, None)

    def __post_init__(self) -> None:
        self.report = Report(self.spec.node, phase="queued")
        self.root, self.queue = Path(self.spec.root), self.locks["queue"]
        self._holders = frozenset(self.queue["holders"])
        self._silence_s = max(SILENCE_S, self.spec.silence_s)
        self.began_s, self.round, self.asked_s = time.monotonic(), 0, 0.0
        self.looks = 0  # the number of the line that the report has

    def run(self, announce: int | None = None) -> AgentSpec | None:
        """Return the message with the job's GPUs at the job's turn, or None if the wait has ended: exit.json says why.

        Writes the pid to the pipe `announce` once the agent waits. Raises gpulocks.Unusable.
        """
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop", "preempted"))
        if self.spec.node in self._holders:
            folder = gpulocks.folder(self.locks["folder"])
            self.placed = PlacedTicket(folder, self._ticket(), self.queue["host"], tuple(self.queue["units"]))
        self._write_state("waits in line", None)
        processes.announce(announce)
        try:
            desired = self._lead(self.server) if self.server is not None else self._follow()
        finally:
            if self.placed is not None:
                self.placed.close()
        if desired.want == "go":
            return self._with_gpus(desired)
        assert desired.verdict is not None
        self._end(desired.verdict)
        return None

    def _ticket(self) -> QueueTicket:
        queue, cap_s = self.queue, self.spec.max_duration_s - self.earlier.used_s + KILL_S
        return QueueTicket(self.spec.job.job, "", queue["priority"], queue["time_s"], cap_s, queue["needs"])

    # -- node 0 -------------------------------------------------------------------------------------------------------

    def _lead(self, server: socket.socket) -> Desired:
        """Return `go` when all agents have their locks, or the end of the wait."""
        head = transport.LeaderEnd(server.dup(), self.spec.token, self._silence_s)
        desired = Desired()
        while desired.want not in ("go", "end"):
            self._look()
            desired = self._next({**head.reports, 0: self.report}, head.lost(), desired)
            self._obey(desired)
            head.send(desired)
            head.listen(TICK_S)
        head.close()
        return desired

    def _next(self, reports: dict[int, Report], lost: set[int], before: Desired) -> Desired:
        nodes, waited_s = self.spec.job.nodes, time.monotonic() - self.began_s
        if verdict := self._verdict(reports, lost, waited_s):
            return Desired("end", self.round, verdict=verdict)
        known = [(each.queue or {}).get("line") for node, each in sorted(reports.items()) if node in self._holders]
        raw = [line for line in known if line is not None]
        if len(reports) < nodes or len(raw) < len(self._holders):
            return before
        if before.want == "take":
            answers = [(each.queue or {}).get("took") for each in reports.values() if each.generation == self.round]
            if len(answers) == nodes and all(answers):
                return replace(before, want="go", queue={**(before.queue or {}), "units": self._units()})
            is_late = time.monotonic() - self.asked_s > TAKE_S
            return replace(before, want="wait") if is_late or not all(answers) else before
        if any(each.generation == self.round and (each.queue or {}).get("took") for each in reports.values()):
            return before  # an agent has not released its locks yet
        if raw == self._decided[1] and time.monotonic() - self._decided[0] < self._pace_s():
            return before
        assert self.placed is not None
        self._decided = time.monotonic(), raw
        ticket, lines = self.placed.ticket, list(map(HostLine.load, raw))
        turn = decide(ticket, lines, time.time(), preempts=self.queue["preempt"])
        looks = {str(node): (each.queue or {}).get("look") for node, each in reports.items()}
        shown = {**self._shown(turn), "looks": looks}
        if turn.starts:
            self.round, self.asked_s = self.round + 1, time.monotonic()
            return Desired("take", self.round, queue=shown)
        gone = victims(ticket, lines, time.time()) if self.queue["preempt"] else []
        hosts = {line.host: [each.root for each in line.held if each in gone] for line in lines}
        note = f"place {turn.place} of {turn.of} in line: {turn.reason}"  # the launcher adds times by the user's clock
        return Desired("wait", self.round, note=note, queue={**shown, "preempts": hosts})

    def _verdict(self, reports: dict[int, Report], lost: set[int], waited_s: float) -> ExitReport | None:
        stop = next((each.stop for each in reports.values() if each.stop), None)
        if stop is not None:
            return ExitReport("stopped", "user" if stop == "now" else stop)
        if lost:
            return _failed(f"the waiting agent of node {', '.join(map(str, sorted(lost)))} was lost")
        missing = [str(node) for node in range(self.spec.job.nodes) if node not in reports]
        if missing and waited_s > self.spec.join_timeout_s:
            return _failed(f"node {', '.join(missing)} did not join within {self.spec.join_timeout_s:.0f} s")
        most_s = self.queue["max_wait_s"]
        if most_s is not None and time.time() - self.queue["time_s"] > most_s and not self.earlier.started_s:
            return ExitReport("failed", "no_machines", _error("no machines within limits.max_wait"))
        return None

    def _shown(self, turn: Turn) -> dict[str, Any]:
        """Return the status for users, with a start that changes only by SAME_S or more."""
        assert self.placed is not None
        start_s, before_s = turn.start_s, self.placed.ticket.start_s
        if start_s is not None and before_s is not None and abs(start_s - before_s) < SAME_S:
            start_s = before_s
        return {"place": turn.place, "of": turn.of, "start_s": start_s, "reason": turn.reason}

    # -- all nodes ----------------------------------------------------------------------------------------------------

    def _follow(self) -> Desired:
        """Return `go` or `end` of node 0, or the end of a node that has lost node 0."""
        assert self.spec.head is not None
        join_s = self.spec.join_timeout_s
        refusal_s = transport.BEAT_S + transport.CLOSED_S if self.spec.head_listens else join_s
        member = transport.FollowerEnd(self.spec.head, self.spec.token, self._silence_s, join_s, refusal_s)
        try:
            while True:
                self._look()
                member.send(self.report)
                if (desired := member.desired) is not None:
                    self._obey(desired)
                    if desired.want in ("go", "end"):
                        return desired
                if member.lost():
                    fault = _failed("the waiting agent of node 0 was lost")
                    return Desired("end", verdict=replace(fault, fenced=True))
                if desired is None and self.stop is not None:
                    return Desired("end", verdict=ExitReport("stopped", "user", fenced=True))
                member.listen(TICK_S)
        finally:
            member.release()

    def _look(self) -> None:
        """Update the report: the stop request, and the host's line if a look is due."""
        if request := atomic_json.read_json(self.root / STOP):
            if request["reason"] == REQUEUE:  # came after the job had left its locks
                (self.root / STOP).unlink(missing_ok=True)
            else:
                self.stop = request["reason"]
        self.report = replace(self.report, stop=self.stop)
        if self.placed is None or self.taken is not None:
            return
        looked_s, stamps = self._looked
        locks, now_s = self.placed.locks, time.monotonic()
        # A taken or released lock and a new ticket change the times of the folders.
        found = tuple(folder.stat().st_mtime_ns for folder in (locks, locks / "queue"))
        is_near = self.seen is None or len(self.seen.tickets) < NEAR
        if now_s - looked_s < self._pace_s() and not (is_near and found != stamps):
            return
        before, self._looked, self.seen = self.seen, (now_s, found), self.placed.line()
        self.looks += before != self.seen
        self.report = replace(self.report, queue={"line": self.seen.dump(), "look": self.looks, "took": None})

    def _pace_s(self) -> float:
        ahead = 0 if self.seen is None else len(self.seen.tickets)
        return min(LOOK_S * (ahead + 1), LONGEST_LOOK_S)

    def _obey(self, desired: Desired) -> None:
        """Take or release the locks; show the status; write the expected start into the ticket."""
        shown = desired.queue or {}
        is_current = shown.get("looks", {}).get(str(self.spec.node)) == self.looks  # else decided on an older line
        if desired.want == "take" and desired.generation > self.report.generation:
            is_held = True
            if self.placed is not None:
                assert self.seen is not None
                if is_current:
                    self.taken = self.placed.take(self.seen, self._about())
                is_held = self.taken is not None
            answer = {**(self.report.queue or {}), "took": is_held}
            self.report = replace(self.report, generation=desired.generation, queue=answer)
        elif desired.want in ("wait", "end") and (self.report.queue or {}).get("took") is not None:
            if self.taken is not None:
                self.taken.release()
            self.taken, self._looked = None, (0.0, ())
            self.report = replace(self.report, queue={**(self.report.queue or {}), "took": None})
        if desired.want == "wait" and self.placed is not None:
            if is_current and self.seen is not None:
                self.placed.promise(shown["start_s"], self.seen)
            self._preempt((shown.get("preempts") or {}).get(self.placed.host, ()))
        self._write_state(desired.note or "waits in line", shown or None)

    def _preempt(self, roots: Sequence[str]) -> None:
        """Ask the jobs with the folders to save and to wait again, if they still hold locks of this host."""
        if roots and self.placed is not None:
            held = {each.root for each in held_by(self.placed.locks) if each.root is not None}
            for root in map(Path, held.intersection(roots)):
                if not (root / STOP).exists():
                    node_folder.ask_to_stop(root, REQUEUE)

    def _about(self) -> dict[str, Any]:
        """Return the note of the locks: until when the job holds them at most, and whether the job can be preempted."""
        spared_s = 0.0 if self.earlier.preempted_s is None else self.earlier.preempted_s + SPARED_S
        until_s, run = time.time() + self._ticket().cap_s, self.spec.job.run
        root = self.spec.root if run.is_own or run.on_stop == "save" or run.keep else None
        more = {"priority": self.queue["priority"], "root": root, "spared_until_s": spared_s}
        return {**self.locks["about"], "until_s": until_s, **more}

    def _units(self) -> list[str]:
        names = self.taken.files if self.taken is not None else {}
        return [unit for unit in self.queue["units"] if unit in names]

    def _with_gpus(self, desired: Desired) -> AgentSpec:
        """Return the message with the job's GPUs: on one machine, each node has its share of node 0's GPUs."""
        units = self._units()
        if len(self._holders) < self.spec.job.nodes:
            units = list((desired.queue or {}).get("units") or ())
            share = len(units) // self.spec.job.nodes
            units = units[self.spec.node * share : (self.spec.node + 1) * share]
        if not units or units[0] == gpulocks.MACHINE:
            return self.spec
        values = self.queue.get("values") or {}
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(values.get(unit, unit) for unit in units)}
        gpus = tuple(units) if self.spec.gpus else ()
        return replace(self.spec, environment={**self.spec.environment, **visible}, gpus=gpus)

    def _write_state(self, detail: str, shown: dict[str, Any] | None) -> None:
        if self._written[1] == (detail, shown) and time.monotonic() - self._written[0] < STATE_EVERY_S:
            return
        self._written = time.monotonic(), (detail, shown)
        if self.placed is not None:
            self.placed.touch()
        status = {key: (shown or {}).get(key) for key in ("place", "of", "start_s", "reason")} if shown else {}
        state = AgentState(
            pid=os.getpid(),
            stamp=processes.stamp(os.getpid()),
            machine=os.uname().nodename,
            phase="queued",
            detail=detail,
            queue=status,
            started_s=self.earlier.started_s,
            held_s=self.earlier.used_s or None,
            ended_s=self.earlier.preempted_s,
        )
        node_folder.write(self.root / STATE, state)

    def _end(self, verdict: ExitReport) -> None:
        checkpoints = Path(self.spec.environment["CLOUDTRAIN_CHECKPOINT_DIR"])
        self._write_state((verdict.error or {}).get("message") or "left the line", None)
        started_s, used_s = self.earlier.started_s or None, self.earlier.used_s
        ended = replace(verdict, resumable=has_checkpoint(checkpoints), ended_s=time.time())
        node_folder.write(self.root / EXIT, replace(ended, started_s=started_s, held_s=used_s))


def _error(message: str) -> dict[str, Any]:
    return {"rank": None, "kind": "queue", "message": message}


def _failed(message: str) -> ExitReport:
    return ExitReport("failed", "node_failure", _error(message))
