"""What a job's nodes should be doing, decided by node 0 from what every node reports. No clock, no socket, no process.

Both directions carry states, not commands: each node says what it is, node 0 says what should be, and a message lost
or repeated changes nothing. A generation is one start of all nodes' torchrun; a restart is the next generation, on
fewer nodes where one was lost and the job may go on without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cloudtrain.entrypoints.boot import EXIT_CONFIG, EXIT_DONE, EXIT_SAVED, root_cause_first

__all__ = ["WAIT", "Coordinator", "Desired", "Report", "Rules"]

SOON_S = 300.0  # after its start: then a failure like the last one counts as the same
COLLECT_S = 5.0  # how long the first failure waits for the others' accounts, which may hold the root cause
FENCE_S = 5.0  # before the others go on: a lost node that still lives ends its own ranks as late as they miss it


@dataclass(frozen=True)
class Report:
    """What a node says of itself. `phase`: preparing idle running exited; `stop`: why somebody asks it to stop.

    `address` and `ports` (of the line, of copies): where the others find it, should they need to. `newest`: a script's
    newest checkpoint on this node, by its path in the checkpoint folder, and its time in unix seconds. `gpus`: figures
    of each local rank's GPU (gpumeter.py).
    """

    node: int
    generation: int = 0
    phase: str = "idle"
    code: int | None = None
    failures: tuple[dict[str, Any], ...] = ()
    saved: dict[str, Any] | None = None
    stop: str | None = None
    address: str = ""
    ports: tuple[int, int] = (0, 0)
    newest: tuple[str, float] | None = None
    gpus: tuple[tuple[float | None, ...], ...] = ()

    @classmethod
    def load(cls, data: dict[str, Any]) -> Report:
        """Return the report that `dataclasses.asdict` and JSON have carried."""
        line, copies = data.get("ports", (0, 0))
        newest = data.get("newest") and (data["newest"][0], data["newest"][1])
        told = {"failures": tuple(data.get("failures", ())), "ports": (line, copies), "newest": newest}
        told["gpus"] = tuple(tuple(each) for each in data.get("gpus", ()))
        return cls(**{**data, **told})


@dataclass(frozen=True)
class Desired:
    """What every node should be. `want`: wait run stop kill end; `verdict` is the job's end, with `end` only.

    `nodes` run this generation, each with its place among them as its rank; who is not named runs nothing. `note`
    says for people why some are missing. `places`: each node's number, address, and ports as in its report. `resume`:
    the checkpoint that a script resumes from, the same on all nodes, by its path in the checkpoint folder.
    """

    want: str = "wait"
    generation: int = 0
    port: int = 0
    nodes: tuple[int, ...] = ()
    note: str | None = None
    reason: str | None = None
    verdict: dict[str, Any] | None = None
    places: tuple[tuple[int, str, int, int], ...] = ()
    resume: str | None = None

    def dump(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    @classmethod
    def load(cls, data: dict[str, Any]) -> Desired:
        """Return what `dump` and JSON have carried."""
        places = tuple((node, address, line, copies) for node, address, line, copies in data.get("places", ()))
        return cls(**{**data, "nodes": tuple(data.get("nodes", ())), "places": places})


WAIT = Desired()


@dataclass(frozen=True)
class Rules:
    """The job's limits. Times are seconds since its start; `limit_reason` is what set the deadline: time or budget.

    `fewest` nodes may a restart go on with (None: all), of those numbers that `sizes` allows: ranks must share the
    batch evenly.
    """

    nodes: int
    max_restarts: int
    limit_reason: str
    soft_deadline_s: float
    hard_deadline_s: float
    grace_s: float
    join_timeout_s: float
    fewest: int | None = None
    sizes: tuple[int, ...] | None = None

    @property
    def leaves_time(self) -> bool:
        """Whether there is time to save before the end: with `on_limit: stop` there is none, and none is missed."""
        return self.soft_deadline_s < self.hard_deadline_s

    def size(self, left: int) -> int:
        """Return how many of the nodes that are left a restart takes, 0 where it cannot be."""
        fewest = self.nodes if self.fewest is None else self.fewest
        allowed = range(1, self.nodes + 1) if self.sizes is None else self.sizes
        return max((size for size in allowed if fewest <= size <= left), default=0)


@dataclass
class Coordinator:
    """Node 0's memory: what it wants now, and since when."""

    rules: Rules
    desired: Desired = WAIT
    since_s: float = 0.0
    started_s: float = 0.0  # of the generation
    first_failure_s: float | None = None
    restarts: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    last_echo: set[tuple[Any, ...]] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # nodes that the job went on without: not taken back
    missed_s: float | None = None  # since when one of this generation's nodes is lost

    def decide(
        self, reports: dict[int, Report], lost: set[int], now_s: float, fresh_port: Callable[[], int]
    ) -> Desired:
        """Return what should be, given every node's last report and the nodes that went silent.

        `now_s` counts from the job's start; `fresh_port` finds one that is free on node 0, when a generation starts.
        """
        before = self.desired
        if before.want != "end":
            self.desired = self._next(reports, lost, now_s, fresh_port)
        if self.desired != before:
            self.since_s = now_s
        if self.desired.generation != before.generation:
            self.started_s = now_s
            saved = [each.newest for node, each in reports.items() if node in self.desired.nodes and each.newest]
            resume = max(saved, key=lambda newest: newest[1])[0] if saved else None
            self.desired = replace(self.desired, resume=resume)
        return self.desired

    def _next(self, reports: dict[int, Report], lost: set[int], now_s: float, port: Callable[[], int]) -> Desired:
        members = set(self.desired.nodes) or set(range(self.rules.nodes))
        current = [r for r in reports.values() if r.node in members - lost and r.generation == self.desired.generation]
        everyone = len(current) == len(members)
        exited = [r for r in current if r.phase == "exited"]
        waited_s = now_s - self.since_s
        if not lost & members:
            self.missed_s = None
        elif self.missed_s is None:
            self.missed_s = now_s
        if self.desired.want == "wait":
            return self._start(current, lost & members, now_s, port)
        if self.desired.want == "stop":
            return self._stopping(current, lost & members, waited_s, now_s)
        if everyone and len(exited) == len(members) and all(r.code == EXIT_DONE for r in exited):
            return self._end("succeeded", None)
        reason = next((r.stop for r in current if r.stop), None)
        if self.desired.want == "kill":
            # Who has not heard of this generation runs none of it.
            idle = [r for r in reports.values() if r.node in members - lost and r.generation < self.desired.generation]
            over = exited + [replace(r, failures=(), code=None) for r in idle if r.phase != "running"]
            return self._after_kill(over, lost, now_s, port, reason)
        lost = lost & members
        if reason == "now":
            return self._end("stopped", reason)
        if reason or now_s >= self.rules.soft_deadline_s:
            return replace(self.desired, want="stop", reason=reason or self.rules.limit_reason)
        failed = [r for r in exited if r.code != EXIT_DONE]
        if lost or failed:
            return self._failing(failed, len(exited) + len(lost) == len(members), lost, now_s)
        return self.desired

    def _start(self, current: list[Report], lost: set[int], now_s: float, port: Callable[[], int]) -> Desired:
        reason = next((r.stop for r in current if r.stop), None)
        if reason:
            return self._end("stopped", reason)
        broken = [f for r in current if r.phase == "exited" for f in r.failures]
        if broken:  # a node that could not unpack what it was sent, or make ready what the ranks run in
            return self._end("failed", "error", broken[0])
        if now_s >= self.rules.soft_deadline_s:  # machines that wait are billed like machines that train
            return self._end("stopped", self.rules.limit_reason)
        if len(current) == self.rules.nodes:
            if any(r.phase == "preparing" for r in current):
                return self.desired
            return Desired("run", self.desired.generation + 1, port(), tuple(range(self.rules.nodes)))
        if now_s > self.rules.join_timeout_s:
            if lost:
                return self._end("failed", "node_failure", self._loss(lost, len(current), can_go_on=False))
            here = {r.node for r in current}
            missing = ", ".join(str(n) for n in range(self.rules.nodes) if n not in here)
            message = f"node {missing} did not join within {self.rules.join_timeout_s:.0f} s"
            return self._end("failed", "node_failure", {"rank": None, "kind": "rendezvous", "message": message})
        return self.desired

    def _failing(self, failed: list[Report], all_over: bool, lost: set[int], now_s: float) -> Desired:
        """The first failure waits a moment for the other nodes' accounts, then all are killed."""
        if self.first_failure_s is None:
            self.first_failure_s = now_s
        if all_over and not lost and failed and all(r.code == EXIT_SAVED for r in failed):
            saved = next((r.saved for r in failed if r.saved), None) or {}
            reason = self.rules.limit_reason if saved.get("reason") == "deadline" else "preempted"
            return self._end("stopped", reason)
        broken = [r for r in failed if r.code != EXIT_SAVED]
        # Ranks that wait for a stuck one seem stuck as well: the longest silent is known when all have looked.
        certain = any(not f.get("peer_lost") and f["kind"] != "hang" for r in broken for f in r.failures)
        patience_s = COLLECT_S if broken else self.rules.grace_s  # nodes that saved wait for those still saving
        if lost or certain or (all_over and broken) or now_s - self.first_failure_s > patience_s:
            return replace(self.desired, want="kill")
        return self.desired

    def _after_kill(
        self, exited: list[Report], lost: set[int], now_s: float, port: Callable[[], int], reason: str | None
    ) -> Desired:
        missing = lost & set(self.desired.nodes)
        if len(exited) + len(missing) < len(self.desired.nodes) and now_s - self.since_s < self.rules.grace_s:
            return self.desired
        left = [node for node in range(self.rules.nodes) if node not in lost | self.gone]
        size = self.rules.size(len(left))
        if self.missed_s is not None and size and now_s - self.missed_s < FENCE_S:
            return self.desired
        failures = root_cause_first([{"node": r.node, **f} for r in exited for f in r.failures])
        if missing:  # that explains the echoes, but not what a rank raised by itself
            causes = sum(not f.get("peer_lost") for f in failures)
            failures.insert(causes, self._loss(missing, len(left), can_go_on=size > 0))
        first = failures[0] if failures else {"rank": None, "kind": "exit", "message": "ended without a reason"}
        # What code raised it would raise again; a killed or stuck worker, a lost peer or a failed rendezvous may mend.
        is_fault = first["kind"] in ("signal", "rendezvous", "hang", "lost") or bool(first.get("peer_lost"))
        is_config = any(r.code == EXIT_CONFIG for r in exited)
        # Nothing but echoes, soon, and the same as last time: what the ranks cannot reach, no restart brings.
        echo = {(f.get("rank"), f.get("type"), f["message"][:80]) for f in failures if f.get("peer_lost")}
        was_soon = (self.first_failure_s or 0.0) - self.started_s < SOON_S
        is_again = bool(failures) and len(echo) == len(failures) and echo == self.last_echo and was_soon
        self.last_echo = echo
        if is_fault and not is_config and size and not is_again and self.restarts < self.rules.max_restarts:
            if reason or now_s >= self.rules.soft_deadline_s:  # no start for a job that is to stop
                return self._end("stopped", reason or self.rules.limit_reason, first)
            return self._restart(first, left[:size], lost, port)
        return self._end("failed", "node_failure" if first["kind"] in ("signal", "lost") else "error", first)

    def _restart(self, cause: dict[str, Any], nodes: list[int], lost: set[int], port: Callable[[], int]) -> Desired:
        on_fewer = f"going on with {len(nodes)} of {self.rules.nodes} nodes"
        if lost & set(self.desired.nodes):
            cause = {**cause, "message": f"{cause['message']}; {on_fewer}"}
        self.restarts += 1
        self.first_failure_s = self.missed_s = None
        self.gone |= lost
        self.history.append(cause)
        note = f"{_named(self.gone)} lost; {on_fewer}" if self.gone else None
        return Desired("run", self.desired.generation + 1, port(), tuple(nodes), note)

    def _loss(self, missing: set[int], left: int, *, can_go_on: bool) -> dict[str, Any]:
        """Return the failure that a lost node is, with why the others cannot go on where they were meant to."""
        message = f"{_named(missing)} lost: its agent is silent"
        fewest = self.rules.fewest or self.rules.nodes
        if fewest < self.rules.nodes and not can_go_on:
            sizes = " or ".join(str(size) for size in self.rules.sizes or () if size >= fewest)
            message += f"; {left} of {self.rules.nodes} nodes are left, and "
            message += f"min_instances is {fewest}" if left < fewest else f"the batch can be shared only by {sizes}"
        return {"rank": None, "kind": "lost", "message": message}

    def _stopping(self, current: list[Report], lost: set[int], waited_s: float, now_s: float) -> Desired:
        exited = [r for r in current if r.phase == "exited"]
        over = len(exited) + len(lost) == len(self.desired.nodes)
        if over and not lost and all(r.code == EXIT_DONE for r in exited):
            return self._end("succeeded", None)
        if over:
            failures = root_cause_first([{"node": r.node, **f} for r in exited for f in r.failures])
            return self._end("stopped", self.desired.reason, failures[0] if failures else None)
        if any(r.stop == "now" for r in current):
            return self._end("stopped", self.desired.reason)
        if waited_s > self.rules.grace_s or now_s > self.rules.hard_deadline_s:
            if self.desired.reason == self.rules.limit_reason and not self.rules.leaves_time:
                return self._end("stopped", self.desired.reason)
            # The agents kill at `end`: whoever has not saved by now has had its time.
            message = f"did not leave within {waited_s:.0f} s, so it was killed"
            return self._end("stopped", self.desired.reason, {"rank": None, "kind": "stop", "message": message})
        return self.desired

    def _end(self, state: str, reason: str | None, error: dict[str, Any] | None = None) -> Desired:
        verdict = {
            "state": state,
            "reason": "user" if reason == "now" else reason,
            "error": error,
            "restarts": self.restarts,
            "restarted_after": self.history,
        }
        return replace(self.desired, want="end", verdict=verdict)


def _named(nodes: set[int]) -> str:
    numbers = ", ".join(str(node) for node in sorted(nodes))
    return f"node {numbers} was" if len(nodes) == 1 else f"nodes {numbers} were"
