"""Node 0's decisions: the desired state of a job's nodes, from all nodes' reports. No clock, no socket, no process.

Both directions carry states, not commands: each node sends its own state, node 0 sends the desired state, and a lost
or repeated message changes no decision. A generation is one start of all nodes' torchrun. A restart is the next
generation, on fewer nodes if a node was lost and the job may continue without the lost node. A job on fewer nodes
grows at a save, as soon as nodes are back.

Nodes from `JobSpec.nodes` on are spares: their agents wait without locks. If a node is lost, node 0 calls a spare,
which takes its host's locks and joins the next generation. That generation is a new attempt of `retry.max_attempts`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..contract import AgentSpec, ExitReport, ExitState, sign_of, step_in_words
from ..records import Record
from .boot import EXIT_CONFIG, EXIT_DONE, EXIT_SAVED, root_cause_first

SOON_S = 300.0  # after a start: a repeated peer failure within this time is final
COLLECT_S = 5.0  # from the first failure: time for other nodes' failures, which may hold the root cause
FENCE_S = 5.0  # before a restart: a lost node that is alive fences itself only at about the same time


@dataclass(frozen=True)
class Report(Record):
    """A node's state. `phase`: preparing idle running exited; `stop`: the reason of a stop request to the node.

    `done`: the ranks have ended with success before a stop request reached them, and the agent is finishing the node.
    `address` and `ports` (membership connection, copies) are for connections from other nodes. `newest`: a script's
    newest checkpoint on this node, as its path in the checkpoint folder, and its time in unix seconds. `gpus`: figures
    of each local rank's GPU (gpumeter.py). `queue`: the host's line while the job waits in a queue (queue_wait.py).
    `seat`: of a spare and a node that is back, whether the node holds its locks, and the generation of the answer.
    `life`: the earlier agents of this node (returning.py). `latest`: on the leader of a job that lacks a node, a mark
    of the newest complete checkpoint, empty without a checkpoint.
    """

    node: int
    generation: int = 0
    phase: str = "idle"
    code: int | None = None
    failures: tuple[dict[str, Any], ...] = ()
    saved: dict[str, Any] | None = None
    done: bool = False
    stop: str | None = None
    address: str = ""
    ports: tuple[int, int] = (0, 0)
    newest: tuple[str, float] | None = None
    gpus: tuple[tuple[float | None, ...], ...] = ()
    queue: dict[str, Any] | None = None
    seat: tuple[int, bool] | None = None
    life: int = 0
    latest: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether the ranks have ended with success; boot's exit code is final."""
        return self.code == EXIT_DONE if self.phase == "exited" else self.done


@dataclass(frozen=True)
class Desired(Record):
    """The desired state of every node. `want`: wait run stop kill end; `verdict` is the job's end, with `end` only.

    `nodes` run this generation; a node's position in `nodes` is its rank, and remaining nodes run no ranks. `note`
    tells users why nodes are missing or new. `places`: each node's number, address, and ports as in its report.
    `resume`: the checkpoint that a script resumes from, the same on all nodes, as its path in the checkpoint folder.
    While the job waits in a queue, `want` is wait take go end, and `queue` has the status (queue_wait.py). `gone`: the
    nodes that the job gave up. `called`: the spares that take their locks now. `restarts`: those that count for
    `max_restarts`, which each attempt has anew. `hung`: a hang ended the ranks, whose cause may be on any node.
    """

    want: str = "wait"
    generation: int = 0
    port: int = 0
    nodes: tuple[int, ...] = ()
    note: str | None = None
    reason: str | None = None
    verdict: ExitReport | None = None
    places: tuple[tuple[int, str, int, int], ...] = ()
    resume: str | None = None
    queue: dict[str, Any] | None = None
    gone: tuple[int, ...] = ()
    called: tuple[int, ...] = ()
    restarts: int = 0
    hung: bool = False


WAIT = Desired()


@dataclass
class Coordinator:
    """Node 0's memory: the desired state, and its time.

    `spec` has the job's limits, in seconds since the job's start. The trainer saves before its deadline by itself; the
    signal at `deadline_s` is for scripts. A restart needs at least `min_nodes` (None: all), and a number in
    `node_counts`: ranks must share the batch evenly.
    """

    spec: AgentSpec
    desired: Desired = WAIT
    since_s: float = 0.0
    started_s: float = 0.0  # the generation's start
    first_failure_s: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    last_echo: set[tuple[Any, ...]] = field(default_factory=set)
    last_sign: tuple[Any, ...] | None = None
    was_unmet: bool = False  # at the end of the start before: no rank had met another
    missed_s: float | None = None  # since when a node of this generation is lost
    joined: set[int] = field(default_factory=set)  # spares that took a lost node's place
    swaps: int = 0
    lives: dict[int, int] = field(default_factory=dict)  # of this generation's nodes, as in their reports
    words: str = ""  # the generation's own note, without the spares that wait
    saved: str | None = None  # the newest checkpoint at the last look, if nodes wait for the next one

    def decide(
        self, reports: dict[int, Report], lost: set[int], now_s: float, fresh_port: Callable[[], int]
    ) -> Desired:
        """Return the desired state, from every node's last report and the silent nodes.

        `now_s` counts from the job's start; `fresh_port` returns a free port on node 0, when a generation starts.
        """
        before = self.desired
        # A new agent of a node has none of the ranks: the node of this generation is lost, although the node answers.
        lost = lost | {node for node, life in self.lives.items() if node in reports and reports[node].life != life}
        if before.want != "end":
            self.desired = self._next(reports, lost, now_s, fresh_port)
        if replace(self.desired, called=before.called) != before:
            self.since_s = now_s
        if self.desired.generation != before.generation:
            self.started_s = now_s
            self.lives = {node: reports[node].life for node in self.desired.nodes if node in reports}
            self.saved = None
            saved = [each.newest for node, each in reports.items() if node in self.desired.nodes and each.newest]
            resume = max(saved, key=lambda newest: newest[1])[0] if saved else None
            self.desired = replace(self.desired, resume=resume)
        return self.desired

    def _next(self, reports: dict[int, Report], lost: set[int], now_s: float, port: Callable[[], int]) -> Desired:
        members = set(self.desired.nodes) or set(range(self.spec.job.nodes))
        current = [r for r in reports.values() if r.node in members - lost and r.generation == self.desired.generation]
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
        are_done = self._are_done(current)
        if are_done and len(exited) == len(members):
            return self._end("succeeded", None)
        # A user's stop may reach a node alone that waits, as a spare. A node that waits is shut down alone.
        told = [r for r in reports.values() if r.node not in members and r.stop in ("user", "now")]
        reason = next((r.stop for r in [*current, *told] if r.stop), None)
        if self.desired.want == "kill":
            # A node that does not know this generation has none of its ranks.
            idle = [r for r in reports.values() if r.node in members - lost and r.generation < self.desired.generation]
            over = exited + [replace(r, failures=(), code=None) for r in idle if r.phase != "running"]
            return self._after_kill(over, reports, lost, now_s, port, reason)
        silent, lost = lost, lost & members
        if reason == "now":
            return self._end("succeeded", None) if are_done else self._end("stopped", reason)
        if reason or now_s >= self.spec.deadline_s:
            return replace(self.desired, want="stop", reason=reason or self.spec.limit_reason)
        failed = [r for r in exited if r.code != EXIT_DONE]
        if lost or failed:
            return self._failing(failed, len(exited) + len(lost) == len(members), lost, now_s)
        return self._growing(reports, current, silent, now_s)

    def _back(self, reports: dict[int, Report], lost: set[int]) -> list[int]:
        """Return the nodes that are ready and have no place in this generation."""
        known = {*range(self.spec.job.nodes), *self.joined} - lost - set(self.desired.nodes)
        here = [r for r in reports.values() if r.node in known and (r.seat is None or r.seat[1])]
        return sorted(r.node for r in here if r.phase == "idle" or (r.phase == "exited" and r.generation))

    def _growing(self, reports: dict[int, Report], current: list[Report], lost: set[int], now_s: float) -> Desired:
        """Have all ranks killed after a save, if nodes are back or a spare is free; return the desired state.

        The last permitted restart is kept: a node that is lost again must not end a job that could do without the node.
        """
        nodes, spec = self.desired.nodes, self.spec
        is_early, is_late = now_s - self.started_s < spec.grow_s, now_s + spec.grow_s > spec.deadline_s
        may_grow = not is_late and self._restarts_left() > 0 and not any(r.is_done for r in current)
        back = self._back(reports, lost) if may_grow else []
        vacant = spec.job.nodes - len(nodes) - len(back) if may_grow and not is_early else 0
        seated, asked = self._spares(reports, lost, vacant)
        coming, most = [*back, *seated], self._size(len(nodes) + len(back) + len(seated) + len(asked))
        called = (*seated, *asked) if most > len(nodes) else ()
        if self._size(len(nodes) + len(coming)) <= len(nodes):
            self.saved = None
            return replace(self.desired, note=self._with_spares({*self.desired.gone, *lost}), called=called)
        before, self.saved = self.saved, None if is_early or nodes[0] not in reports else reports[nodes[0]].latest
        if None not in (before, self.saved) and before != self.saved:
            return replace(self.desired, want="kill", called=called)
        note = f"{_named(coming, 'is', 'are')} ready to join at a save; {self._going_on(nodes)}"
        return replace(self.desired, note=note, called=called)

    def _grow(self, nodes: list[int], port: Callable[[], int]) -> Desired:
        """Return the start of a generation on more nodes; the start is no restart after a fault."""
        new = set(nodes) - set(self.desired.nodes)
        note = f"{_named(new, 'has', 'have')} joined; {self._going_on(nodes)}"
        self.history.append({"rank": None, "kind": "growth", "message": note})
        return self._run(nodes, port, note, self.desired.restarts, set(self.desired.gone) - new)

    def _going_on(self, nodes: Collection[int]) -> str:
        spares = [node for node in nodes if node >= self.spec.job.nodes]
        words = f"going on with {len(nodes)} of {self.spec.job.nodes} nodes"
        return f"{words}, with spare {numbers(spares)}" if spares else words

    def _size(self, left: int) -> int:
        """Return how many of the remaining nodes a restart uses, 0 if no restart is possible."""
        job = self.spec.job
        allowed = range(1, job.nodes + 1) if job.node_counts is None else job.node_counts
        return max((size for size in allowed if (job.min_nodes or job.nodes) <= size <= left), default=0)

    def _restarts_left(self) -> int:
        return self.spec.job.max_restarts - self.desired.restarts

    def _ranked(self, nodes: Collection[int], size: int) -> list[int]:
        """Return the nodes of the next generation: the leader, then by number; nodes of this generation stay in."""
        places = {node: place for place, node in enumerate(self.desired.nodes)}
        chosen = sorted(nodes, key=lambda node: (places.get(node, len(places)), node))[:size]
        return [*chosen[:1], *sorted(chosen[1:])]

    def _start(self, current: list[Report], lost: set[int], now_s: float, port: Callable[[], int]) -> Desired:
        reason = next((r.stop for r in current if r.stop), None)
        if reason:
            return self._end("stopped", reason)
        broken = [f for r in current if r.phase == "exited" for f in r.failures]
        if broken:  # a node could not unpack the bundle or install the ranks' environment
            return self._end("failed", "error", broken[0])
        if now_s >= self.spec.deadline_s:  # waiting machines are billed like training machines
            return self._end("stopped", self.spec.limit_reason)
        if len(current) == self.spec.job.nodes:
            if any(r.phase == "preparing" for r in current):
                return self.desired
            return self._run(range(self.spec.job.nodes), port, "", 0, set())
        if now_s > self.spec.join_timeout_s:
            if lost:
                return self._end("failed", "node_failure", self._loss(lost, len(current), can_go_on=False))
            here = {r.node for r in current}
            missing = ", ".join(str(n) for n in range(self.spec.job.nodes) if n not in here)
            message = f"node {missing} did not join within {self.spec.join_timeout_s:.0f} s"
            return self._end("failed", "node_failure", {"rank": None, "kind": "rendezvous", "message": message})
        return self.desired

    def _failing(self, failed: list[Report], all_over: bool, lost: set[int], now_s: float) -> Desired:
        """Wait after the first failure for reports of the remaining nodes, then kill all ranks."""
        if self.first_failure_s is None:
            self.first_failure_s = now_s
        if all_over and not lost and failed and all(r.code == EXIT_SAVED for r in failed):
            saved = next((r.saved for r in failed if r.saved), None) or {}
            if saved.get("outcome") == "paused":
                return self._end("stopped", "paused")
            reason = self.spec.limit_reason if saved.get("reason") == "deadline" else "preempted"
            return self._end("stopped", reason)
        broken = [r for r in failed if r.code != EXIT_SAVED]
        # Ranks that wait for a stuck rank seem stuck too; the longest silent rank is known after all nodes' reports.
        certain = any(not f.get("peer_lost") and f["kind"] != "hang" for r in broken for f in r.failures)
        patience_s = COLLECT_S if broken else self.spec.grace_s  # saved nodes wait for nodes that are saving
        if lost or certain or (all_over and broken) or now_s - self.first_failure_s > patience_s:
            hung = any(f["kind"] == "hang" for r in broken for f in r.failures)
            return replace(self.desired, want="kill", hung=hung)
        return self.desired

    def _after_kill(
        self,
        exited: list[Report],
        reports: dict[int, Report],
        lost: set[int],
        now_s: float,
        port: Callable[[], int],
        reason: str | None,
    ) -> Desired:
        missing = lost & set(self.desired.nodes)
        if len(exited) + len(missing) < len(self.desired.nodes) and now_s - self.since_s < self.spec.grace_s:
            return self.desired
        is_growth = self.first_failure_s is None
        left = sorted({*range(self.spec.job.nodes), *self.joined} - lost - {*self.desired.gone})
        if is_growth or self._restarts_left() > 1 or not self._size(len(left)):
            left = sorted({*left, *self._back(reports, lost)})
        is_over = reason is not None or now_s >= self.spec.deadline_s  # a job that must stop does not restart
        is_swap = missing or is_growth
        seated, asked = self._spares(reports, lost, self.spec.job.nodes - len(left) if is_swap else 0)
        size = self._size(len(left) + len(seated))
        nodes = self._ranked([*left, *seated], size)
        if is_growth and not missing:
            if is_over:
                return self._end("stopped", reason or self.spec.limit_reason)
            return self._grow(nodes, port)
        if self.missed_s is not None and (size or asked) and now_s - self.missed_s < FENCE_S:
            return self.desired
        if asked:
            return replace(self.desired, called=(*seated, *asked))
        failures = root_cause_first([{"node": r.node, **f} for r in exited for f in r.failures])
        if missing:  # a lost node explains the failures of its peers, but no rank's own exception
            causes = sum(not f.get("peer_lost") for f in failures)
            failures.insert(causes, self._loss(missing, len(left), can_go_on=size > 0))
        first = failures[0] if failures else {"rank": None, "kind": "exit", "message": "ended without a reason"}
        # A restart may fix a killed or stuck worker, a lost peer, a failed rendezvous; code would fail the same way.
        is_fault = first["kind"] in ("signal", "rendezvous", "hang", "lost") or bool(first.get("peer_lost"))
        is_config = any(r.code == EXIT_CONFIG for r in exited)
        # Only peer failures, soon, and the same as last time: a restart does not help ranks that cannot reach a peer.
        echo = {(f.get("rank"), f.get("type"), f["message"][:80]) for f in failures if f.get("peer_lost")}
        was_soon = (self.first_failure_s or 0.0) - self.started_s < SOON_S
        is_again = bool(failures) and len(echo) == len(failures) and echo == self.last_echo and was_soon
        self.last_echo = echo
        sign = None if missing else sign_of(first)
        if sign is not None and sign == self.last_sign:  # a second start came to the same end
            words = f"the start before ended in the same way {step_in_words(first)}, so a further start would too"
            return self._end("failed", "error", {**first, "message": f"{first['message']}; {words}", "again": True})
        self.last_sign = sign
        is_unmet = _is_unmet(failures)
        if is_unmet and self.was_unmet:
            words = "in two starts no rank has met another, so a further start would not help"
            return self._end("failed", "error", {**first, "message": f"{first['message']}; {words}"})
        self.was_unmet = is_unmet
        may_restart = not set(seated).isdisjoint(nodes) or self._restarts_left() > 0
        if is_fault and not is_config and size and not is_again and may_restart:
            if is_over:
                return self._end("stopped", reason or self.spec.limit_reason, first)
            return self._restart(first, nodes, lost, port)
        return self._end("failed", "node_failure" if first["kind"] in ("signal", "lost") else "error", first)

    def _spares(self, reports: dict[int, Report], lost: set[int], vacant: int) -> tuple[list[int], list[int]]:
        """Return the spares that hold their locks for so many vacant places, and the spares that must answer a call."""
        if self.swaps >= self.spec.swaps:
            return [], []
        away = lost | {*self.desired.gone, *self.joined, *range(self.spec.job.nodes)}
        ready = [r for node, r in sorted(reports.items()) if node not in away and r.phase == "idle" and not r.stop]
        answers = {r.node: r.seat[1] if r.seat and r.seat[0] == self.desired.generation else None for r in ready}
        seated = [node for node, is_held in answers.items() if is_held][: max(0, vacant)]
        asked = [node for node, is_held in answers.items() if is_held is None]
        return seated, asked[: max(0, vacant - len(seated))]

    def _restart(self, cause: dict[str, Any], nodes: list[int], lost: set[int], port: Callable[[], int]) -> Desired:
        going_on = self._going_on(nodes)
        if lost & set(self.desired.nodes):
            cause = {**cause, "message": f"{cause['message']}; {going_on}"}
        self.first_failure_s = self.missed_s = None
        gone = {*self.desired.gone, *lost} - set(nodes)
        self.history.append(cause)
        loss = f"{_named(gone)} lost; {going_on}" if gone else ""
        return self._run(nodes, port, loss, self.desired.restarts + 1, gone)

    def _run(self, nodes: Sequence[int], port: Callable[[], int], words: str, restarts: int, gone: set[int]) -> Desired:
        """Return the start of the next generation. With a new spare it is a new attempt, with all its restarts."""
        new = {node for node in nodes if node >= self.spec.job.nodes} - self.joined
        self.joined |= new
        self.swaps += bool(new)
        self.words = words
        started = Desired("run", self.desired.generation + 1, port(), tuple(nodes), self._with_spares(gone))
        return replace(started, gone=tuple(sorted(gone)), restarts=0 if new else restarts)

    def _with_spares(self, away: set[int]) -> str | None:
        """Return the generation's note, with the spares that wait and may join."""
        last = self.spec.job.nodes + self.spec.spares if self.swaps < self.spec.swaps else 0
        waiting = set(range(self.spec.job.nodes, last)) - self.joined - away
        return "; ".join(filter(None, [self.words, f"spare {numbers(waiting)} waits" if waiting else ""])) or None

    def _loss(self, missing: set[int], left: int, *, can_go_on: bool) -> dict[str, Any]:
        """Return the failure of a lost node, and why the job cannot continue on fewer nodes."""
        message = f"{_named(missing)} lost: its agent is silent"
        fewest = self.spec.job.min_nodes or self.spec.job.nodes
        if not can_go_on and self.swaps < self.spec.swaps:
            message += "; no spare is free"
        if fewest < self.spec.job.nodes and not can_go_on:
            sizes = " or ".join(str(size) for size in self.spec.job.node_counts or () if size >= fewest)
            message += f"; {left} of {self.spec.job.nodes} nodes are left, and "
            message += f"min_instances is {fewest}" if left < fewest else f"the batch can be shared only by {sizes}"
        return {"rank": None, "kind": "lost", "message": message}

    def _stopping(self, current: list[Report], lost: set[int], waited_s: float, now_s: float) -> Desired:
        exited = [r for r in current if r.phase == "exited"]
        are_over = len(exited) + len(lost) == len(self.desired.nodes)
        is_now = any(r.stop == "now" for r in current)
        if not are_over and not is_now and waited_s <= self.spec.grace_s and now_s <= self.spec.max_duration_s:
            return self.desired
        if self._are_done(current):  # the stop request came after the success of all ranks
            return self._end("succeeded", None)
        if are_over:
            failures = root_cause_first([{"node": r.node, **f} for r in exited for f in r.failures])
            return self._end("stopped", self.desired.reason, failures[0] if failures else None)
        leaves_time = self.spec.deadline_s < self.spec.max_duration_s  # to save: not with `on_limit: stop`
        if is_now or (self.desired.reason == self.spec.limit_reason and not leaves_time):
            return self._end("stopped", self.desired.reason)
        # The agents kill at `end`: a rank that has not saved by now has used its time.
        failure = {"rank": None, "kind": "stop", "message": self.spec.job.run.ignored(waited_s)}
        return self._end("stopped", self.desired.reason, failure)

    def _are_done(self, current: list[Report]) -> bool:
        """Return whether the ranks of all nodes have succeeded, by the reports of the nodes that are not lost."""
        return len(current) == len(self.desired.nodes) and all(r.is_done for r in current)

    def _end(self, state: ExitState, reason: str | None, error: dict[str, Any] | None = None) -> Desired:
        restarts, history = max(0, self.desired.generation - 1), tuple(self.history)
        verdict = ExitReport(state, "user" if reason == "now" else reason, error, restarts, restarted_after=history)
        return replace(self.desired, want="end", verdict=verdict)


def _is_unmet(failures: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether no rank has met another: ranks at different places fail by torch's time-out, each start others."""
    unmet = [f.get("unmet") and (f.get("peer_lost") or f["kind"] == "hang") for f in failures]
    return bool(unmet) and all(unmet)


def _named(nodes: Collection[int], one: str = "was", several: str = "were") -> str:
    return f"node {numbers(nodes)} {one}" if len(nodes) == 1 else f"nodes {numbers(nodes)} {several}"


def numbers(nodes: Collection[int]) -> str:
    """Return the nodes' numbers in order, as text."""
    return ", ".join(str(node) for node in sorted(nodes))
