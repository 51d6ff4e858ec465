"""A node's membership among a job's agents: the leader (node 0, or its successor) decides, all followers obey.

If the leader's machine is lost, the next node takes over, if most nodes of this generation reach the next node. The
old leader continues only with half of the nodes or more, so two halves of a split network never both continue.
Of two nodes the second therefore never takes over: a lost machine and a cut cable look the same.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ..contract import AgentSpec
from . import transport
from .coordinate import Coordinator, Desired, Report, numbers

WAITING_S, WAITING_AGAIN_S = 20.0, 60.0  # until a message names missing nodes, and names them again
MOST_SUCCESSORS = 3  # successors that a node tries in turn, before the node gives up


class Fenced(Exception):
    """This node has lost contact, and ends alone; the remaining nodes may continue. The message names the lost node."""


class Membership:
    """A node's membership, from the agent's start to its end."""

    def __init__(
        self,
        spec: AgentSpec,
        server: socket.socket | None,
        fresh_port: Callable[[], int],
        listener: socket.socket | None = None,
    ) -> None:
        """`server` is the leader's listener; `listener` is that of a node that may take over."""
        self.node = spec.node
        head = spec.head or (spec.address, 0)
        self.head_address = head[0]  # the leader's address
        # Of the current nodes: number, address, port of the membership connection, port of the copies.
        self.places: tuple[tuple[int, str, int, int], ...] = ()
        self._spec = spec
        self._fresh_port = fresh_port
        self.zero_s = time.monotonic()  # start of the clock for the node's time in use
        self._coordinator = Coordinator(spec)
        self._head = transport.LeaderEnd(server, spec.token, spec.silence_s) if server else None
        self._member: transport.FollowerEnd | None = None
        if server is None:
            # The starter begins with node 0's agent, so a refused connection means that node 0 has ended.
            refusal_s = transport.BEAT_S + transport.CLOSED_S if spec.head_listens else spec.join_timeout_s
            patience_s = (spec.silence_s, spec.join_timeout_s, refusal_s)
            self._member = transport.FollowerEnd(head, spec.token, *patience_s)
        self._decider = 0
        self._lost_heads: set[int] = set()
        self._last = Desired()  # the desired state when the last leader was lost
        self._took_over_s: float | None = None  # when this node took over, until a new generation starts
        self._report_missing_s = WAITING_S
        self._gone_s: dict[int, float] = {}  # nodes that the job gave up: when
        # Spares that took a lost node's place: when; nodes that are back: when, less their earlier time in use.
        self._joined_s: dict[int, float] = {}
        self._may_succeed = spec.succeeds
        self._listener = listener
        self._turned_s = time.monotonic()
        self._is_open = True
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    @property
    def _agents(self) -> set[int]:
        """The job's nodes and its spares."""
        return set(range(self._spec.job.nodes + self._spec.spares))

    @property
    def port(self) -> int:
        """The port of this node as a successor; 0 if this node never takes over."""
        return int(self._listener.getsockname()[1]) if self._listener else 0

    @property
    def reports(self) -> dict[int, Report]:
        """The followers' newest reports, on the leader; empty on followers."""
        return dict(self._head.reports) if self._head is not None else {}

    def before(self) -> tuple[str, int] | None:
        """Return the leader's address and port of copies, if this node is the first successor."""
        successors = [place[0] for place in self.places if place[0] not in {self._decider, *self._lost_heads}]
        source = next((place for place in self.places if place[0] == self._decider), None)
        return (source[1], source[3]) if source and successors[:1] == [self.node] else None

    def now_s(self) -> float:
        """Return the seconds since this node's start."""
        return time.monotonic() - self.zero_s

    def held_s(self) -> float:
        """Return the mean time in seconds that a node of the job was in use, by the monotonic clock."""
        nodes, now_s = self._spec.job.nodes, self.now_s()
        began_s = {**dict.fromkeys(range(nodes), 0.0), **self._joined_s}
        held_s: float = sum(self._gone_s.get(node, now_s) - begin_s for node, begin_s in began_s.items()) / nodes
        return held_s

    def gone_s(self) -> dict[str, float]:
        """Return the seconds in use of each node that the job gave up, if only for a while; not of unused spares."""
        gone_s, joined_s, now_s = self._gone_s, self._joined_s, self.now_s()
        own = {node for node in gone_s.keys() | joined_s.keys() if node < self._spec.job.nodes}
        gone = sorted(own | (gone_s.keys() & joined_s.keys()))
        return {str(node): gone_s.get(node, now_s) - joined_s.get(node, 0.0) for node in gone}

    def joined_s(self) -> dict[str, float] | None:
        """Return when each spare took a lost node's place, in seconds from the job's start; None without a spare."""
        spares = sorted(node for node in self._joined_s if node >= self._spec.job.nodes)
        return {str(node): self._joined_s[node] for node in spares} or None

    def exchange(self, report: Report) -> Desired:
        """Send this node's report; return the desired state. Raises Fenced."""
        self._catch_up()
        if self._member is not None:
            self._member.send(report)
            if (alone := self._alone(self._member, report)) is not None:
                return alone
            if self._member.lost():
                return self._without_head(report)
            found = self._member.desired or self._last
        else:
            found = self._decide(report)
        self.places = tuple(place for place in found.places if place[0] in found.nodes or not found.nodes)
        now_s, spares = self.now_s(), [node for node in found.nodes if node >= self._spec.job.nodes]
        for node in self._gone_s.keys() & set(found.nodes) - set(found.gone):
            self._joined_s[node] = now_s - (self._gone_s.pop(node) - self._joined_s.get(node, 0.0))
        self._gone_s |= dict.fromkeys(set(found.gone) - self._gone_s.keys(), now_s)
        self._joined_s |= dict.fromkeys(set(spares) - self._joined_s.keys(), now_s)
        return found

    def listen(self, timeout_s: float) -> None:
        """Receive the messages that arrive within the time."""
        self._end().listen(timeout_s)

    def _end(self) -> transport.LeaderEnd | transport.FollowerEnd:
        end = self._head or self._member
        assert end is not None
        return end

    def _catch_up(self) -> None:
        """After a pause of this agent (a slow disk), read the pending messages before any node is judged silent."""
        stalled_s, self._turned_s = time.monotonic() - self._turned_s, time.monotonic()
        if stalled_s > transport.STALLED_S:
            self.listen(0)
            self._end().extend_silence()

    def _beat(self) -> None:
        """Send beats while the agent is busy: with a slow disk, or with processes that do not die."""
        while self._is_open:
            time.sleep(transport.BEAT_S)
            busy_s = time.monotonic() - self._turned_s
            if transport.BEAT_S < busy_s < transport.MAX_STALL_S and self._is_open:
                with contextlib.suppress(AssertionError):  # the node is changing from follower to leader
                    self._end().beat()

    def close(self) -> None:
        """Close the membership, after all followers have read the last message."""
        self._is_open = False
        if self._head is not None:
            self._head.close()

    def _decide(self, report: Report) -> Desired:
        head, coordinator = self._head, self._coordinator
        assert head is not None
        reports = {**head.reports, self.node: report}
        now_s, lost = self.now_s(), head.lost() | self._lost_heads
        nodes = self._voters(coordinator.desired)
        if self._took_over_s is not None:
            absent = self._agents - set(coordinator.desired.gone) - reports.keys() - lost
            if absent and now_s - self._took_over_s < self._spec.silence_s:
                head.send(coordinator.desired)
                return coordinator.desired
            lost |= absent
            # The lost leader may have begun a generation that some nodes do not know yet.
            newest = max(each.generation for each in reports.values())
            coordinator.desired = replace(coordinator.desired, generation=max(newest, coordinator.desired.generation))
            if 2 * len(nodes - lost) <= len(nodes):
                heads = numbers(self._lost_heads)
                raise Fenced(f"lost contact with node {heads}, and with most of the remaining nodes")
        elif self._may_succeed and 2 * len(nodes - lost) < len(nodes):
            raise Fenced(f"lost contact with most of the nodes: {numbers(nodes & lost)}")
        desired = coordinator.decide(reports, lost, now_s, self._fresh_port)
        desired = replace(desired, places=self._known(reports))
        if desired.generation > self._last.generation:
            self._took_over_s = None
        head.send(desired)
        if desired.want == "wait" and now_s >= self._report_missing_s:
            self._report_missing_s = now_s + WAITING_AGAIN_S
            missing = numbers(set(range(self._spec.job.nodes)) - reports.keys())
            print(f"waiting for node {missing} to start, for {now_s:.0f} s so far", flush=True)
        return desired

    def _alone(self, member: transport.FollowerEnd, report: Report) -> Desired | None:
        """Return the end of a node that has never heard node 0, if a stop request came or the time is over.

        The node has nothing to save. An open connection gets CLOSED_S: node 0's answer may be on its way.
        """
        if member.desired is not None or self._lost_heads:
            return None
        coordinator, now_s = self._coordinator, self.now_s()
        desired = coordinator.decide({self.node: replace(report, failures=())}, set(), now_s, self._fresh_port)
        is_answered_soon = member.is_connected and now_s - coordinator.since_s < transport.CLOSED_S
        if desired.verdict is None or desired.verdict.state != "stopped" or is_answered_soon:
            return None
        return replace(desired, verdict=replace(desired.verdict, fenced=True))

    def _without_head(self, report: Report) -> Desired:
        """Return the desired state without a leader: the ranks end, while this node connects to the successor."""
        assert self._member is not None
        last = self._member.desired or self._last
        silent_s = self._member.silent_s()
        self._member.release()
        self._lost_heads.add(self._decider)
        successors = [node for node in last.nodes if node not in self._lost_heads]
        voters = self._voters(last)
        is_torn = 2 * len(voters - self._lost_heads) <= len(voters) or len(self._lost_heads) > MOST_SUCCESSORS
        if not self._may_succeed or last.want in ("wait", "end") or is_torn or not successors:
            was_heard = bool(self._member.desired or self._last.generation)
            what = "lost contact with node {} for" if was_heard else "node {} was not reached within"
            raise Fenced(f"{what.format(self._decider)} {silent_s:.0f} s")
        self._last = last if last.want == "stop" else replace(last, want="kill")
        self._decider = successors[0]
        place = next(place for place in last.places if place[0] == self._decider)
        self.head_address = place[1]
        if self._decider == self.node:
            self._take_over(last)
        else:
            # A busy successor notices the loss later than this node, and gets as long as a node that is already heard.
            silence_s = self._spec.silence_s
            self._member = transport.FollowerEnd(place[1:3], self._spec.token, silence_s, silence_s)
        return self._last

    def _take_over(self, last: Desired) -> None:
        assert self._listener is not None
        print(f"node {numbers(self._lost_heads)} is lost: node {self.node} is the leader now", flush=True)
        self._member, self._took_over_s = None, self.now_s()
        self._head = transport.LeaderEnd(self._listener, self._spec.token, self._spec.silence_s)
        coordinator = self._coordinator
        coordinator.desired, coordinator.since_s = self._last, self.now_s()
        coordinator.first_failure_s = coordinator.missed_s = coordinator.started_s = self.now_s()
        joined_s = self.joined_s() or {}
        coordinator.joined, coordinator.swaps = {*map(int, joined_s)}, len({*joined_s.values()})

    def _voters(self, desired: Desired) -> set[int]:
        """Return the nodes of which more than half must reach a new leader: the generation's nodes, and the spares."""
        spares = self._agents - set(range(self._spec.job.nodes)) - set(desired.gone)
        return {*desired.nodes, *spares} if desired.nodes else set()

    def _known(self, reports: dict[int, Report]) -> tuple[tuple[int, str, int, int], ...]:
        """Return all nodes' addresses and ports, for the copies and for a successor."""
        known = {place[0]: place for place in self._last.places}
        known |= {node: (node, each.address, *each.ports) for node, each in reports.items() if each.address}
        return tuple(known[node] for node in sorted(known))
