"""Leader election: node 0, then the next node that reaches most nodes. Real sockets, no processes."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cloudtrain.entrypoints.agent import transport
from cloudtrain.entrypoints.agent.coordinate import Desired, Report
from cloudtrain.entrypoints.agent.membership import Fenced, Membership
from cloudtrain.entrypoints.contract import AgentSpec

SILENCE_S = 0.5
HOST = "127.0.0.1"


@dataclass
class Node:
    """An agent without processes: its ranks obey every decision."""

    line: Membership
    report: Report
    wants: list[str] = field(default_factory=list)
    desired: Desired = field(default_factory=Desired)
    cut: str = ""

    def turn(self) -> None:
        """Exchange report and decision once; obey."""
        try:
            self.desired = self.line.exchange(self.report)
        except Fenced as cut:
            self.cut = str(cut)
            return
        self.wants.append(self.desired.want)
        if self.desired.want == "kill" and self.report.phase == "running":
            self.report = replace(self.report, phase="exited", code=70)
        elif self.report.node in self.desired.called:
            self.report = replace(self.report, seat=(self.desired.generation, True))
        elif self.report.node in self.runs and self.desired.generation > self.report.generation:
            self.report = replace(self.report, generation=self.desired.generation, phase="running", code=None)
        self.line.listen(0.01)

    @property
    def runs(self) -> tuple[int, ...]:
        """The nodes of its current group."""
        return self.desired.nodes if self.desired.want == "run" and not self.cut else ()

    def vanish(self) -> None:
        """Vanish silently, as a machine without power."""
        self.line._is_open = False
        for end in (self.line._head, self.line._member):
            if end is not None:
                end.release()


Start = Callable[..., list[Node]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts the connections of the given number of nodes, and waits until all run."""
    monkeypatch.setattr(transport, "BEAT_S", 0.05)
    monkeypatch.setattr(transport, "CLOSED_S", SILENCE_S)
    monkeypatch.setattr("cloudtrain.entrypoints.agent.coordinate.FENCE_S", 0.1)
    made: list[Node] = []

    def begin(count: int, fewest: int, spares: int = 0, swaps: int = 0) -> list[Node]:
        server, nodes, more = transport.listen(HOST), [], {"spares": spares, "swaps": swaps}
        more |= {"succeeds": count + spares > 2}
        for number in range(count + spares):
            spec = _spec(number, count, fewest, server.getsockname()[:2], **more)
            line = Membership(
                spec, server if number == 0 else None, lambda: 0, transport.listen(HOST) if number else None
            )
            nodes.append(Node(line, Report(number, address=HOST, ports=(line.port, 0))))
        made.extend(nodes)
        until(nodes, lambda: all(len(node.runs) == count for node in nodes))
        until(nodes, lambda: len(nodes[0].line.reports) == count + spares - 1)
        return nodes

    yield begin
    for node in made:
        node.vanish()
        if node.line._listener is not None:
            node.line._listener.close()


def _spec(number: int, count: int, fewest: int, head: Any, **more: Any) -> AgentSpec:
    job = {"nodes": count, "min_nodes": fewest, "node_counts": list(range(1, count + 1)), "max_restarts": 3}
    limits = {"limit_reason": "time_limit", "deadline_s": 600, "max_duration_s": 600, "grace_s": 10}
    own = {"node": number, "address": HOST, "head": head, "token": "token", "silence_s": SILENCE_S}
    own |= {"root": "", "bundle": "", "sha256": "", "python": "", "workdir": "", "succeeds": count > 2}
    return AgentSpec.load({**own, **limits, "spec": job, "join_timeout_s": 10.0, **more})


def until(nodes: list[Node], condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Let the nodes have their turns until the condition holds."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, [(n.report.node, n.desired, n.cut, n.wants[-3:]) for n in nodes]
        for node in nodes:
            if not node.cut:
                node.turn()


def test_next_node_takes_over(start: Start) -> None:
    """The survivors kill their ranks, find the new leader, and continue without the lost node in a new generation."""
    zero, one, two = start(3, 2)
    zero.vanish()
    until([one, two], lambda: one.runs == two.runs == (1, 2))
    assert (one.desired.generation, two.desired.generation) == (2, 2)
    assert "kill" in two.wants
    assert (one.line.head_address, two.line.head_address) == (HOST, HOST)
    assert "node 0 was lost" in (one.desired.note or "")
    assert set(one.line.gone_s()) == {"0"}
    assert 0 < one.line.gone_s()["0"] <= one.line.now_s()


def test_third_node_takes_over_if_two_are_lost(start: Start) -> None:
    """Three of five nodes are a majority."""
    nodes = start(5, 3)
    for node in nodes[:2]:
        node.vanish()
    until(nodes[2:], lambda: all(node.runs == (2, 3, 4) for node in nodes[2:]))


def test_slow_successor_is_not_given_up(start: Start) -> None:
    """Followers wait for a successor as long as for a leader: a busy machine notices the loss of the leader late."""
    zero, one, two = start(3, 2)
    zero.vanish()
    until([two], lambda: two.line._decider == 1)
    slow_s = time.monotonic() + 0.6 * SILENCE_S
    until([two], lambda: time.monotonic() > slow_s)
    until([one, two], lambda: one.runs == two.runs == (1, 2))


def test_new_leader_knows_when_earlier_nodes_left(start: Start) -> None:
    """A node lost before the leader keeps its own, earlier time of loss."""
    nodes = start(4, 2)
    nodes[3].vanish()
    until(nodes[:3], lambda: all(node.runs == (0, 1, 2) for node in nodes[:3]))
    seen_s = nodes[1].line.now_s()
    until(nodes[:3], lambda: nodes[1].line.now_s() > seen_s + 0.3)
    nodes[0].vanish()
    until(nodes[1:3], lambda: all(node.runs == (1, 2) for node in nodes[1:3]))
    gone_s = nodes[1].line.gone_s()
    assert gone_s["3"] <= seen_s < gone_s["0"]


def test_job_that_needs_all_ends_with_a_verdict(start: Start) -> None:
    """All remaining nodes learn the verdict from the new leader."""
    zero, one, two = start(3, 3)
    zero.vanish()
    until([one, two], lambda: one.desired.want == two.desired.want == "end")
    assert (one.desired.verdict.state, one.desired.verdict.reason) == ("failed", "node_failure")
    assert one.desired.verdict == two.desired.verdict


def test_second_of_two_never_takes_over(start: Start) -> None:
    """The second node cannot tell a lost machine from a cut cable; the first node may always continue."""
    zero, one = start(2, 1)
    one.vanish()
    until([zero], lambda: zero.runs == (0,))
    zero, one = start(2, 1)
    zero.vanish()
    until([one], lambda: bool(one.cut))
    assert "lost contact with node 0" in one.cut


def test_less_than_half_never_continue(start: Start) -> None:
    """Neither the leader nor a node without a leader continues: each ends alone."""
    zero, one, two = start(3, 1)
    one.vanish()
    two.vanish()
    until([zero], lambda: bool(zero.cut))
    assert "lost contact with most of the nodes" in zero.cut


def test_half_of_the_nodes_never_continue(start: Start) -> None:
    """A new leader that reaches only half of the nodes ends: the other half may continue with the old leader."""
    zero, one, two, three = start(4, 1)
    zero.vanish()
    two.vanish()
    until([one, three], lambda: bool(one.cut) or one.desired.generation > 1)
    assert "and with most of the remaining nodes" in one.cut
    one.vanish()
    until([three], lambda: bool(three.cut))


def test_node_that_alone_has_lost_the_leader_ends(start: Start) -> None:
    """The next node still reaches node 0, and becomes no leader."""
    zero, one, two = start(3, 2)
    two.line._member.head = (HOST, 1)  # the connection between the two nodes is cut
    two.line._member.release()
    until([zero, one, two], lambda: bool(two.cut) and one.runs == (0, 1) == zero.runs)


def test_stop_continues_under_the_next_node(start: Start) -> None:
    """A lost machine does not cancel a user's stop."""
    zero, one, two = start(3, 1)
    two.report = replace(two.report, stop="user")
    until([zero, one, two], lambda: one.desired.want == two.desired.want == "stop")
    zero.vanish()
    for node in (one, two):
        node.report = replace(node.report, phase="exited", code=75)
    until([one, two], lambda: one.desired.want == two.desired.want == "end")
    assert (one.desired.verdict.state, one.desired.verdict.reason) == ("stopped", "user")


# -- spares ---------------------------------------------------------------------------------------------------------


def test_spare_joins_and_the_bill_has_each_node_for_its_own_time(start: Start) -> None:
    """The lost node counts until its loss, the spare from its first generation: two nodes at any time."""
    zero, one, two = start(2, 2, spares=1, swaps=1)
    assert two.line.joined_s() is None
    one.vanish()
    until([zero, two], lambda: zero.runs == two.runs == (0, 2))
    seen_s = zero.line.now_s()
    until([zero, two], lambda: zero.line.now_s() > seen_s + 0.3)
    assert zero.line.gone_s() == {"1": pytest.approx(zero.line.joined_s()["2"], abs=0.1)}
    assert zero.line.held_s() == pytest.approx(zero.line.now_s(), abs=0.1)
    assert two.line.held_s() == pytest.approx(two.line.now_s(), abs=0.3)


def test_spare_that_leaves_costs_nothing(start: Start) -> None:
    """A lost spare is no lost node of the bill."""
    zero, one, two, three = start(2, 2, spares=2, swaps=1)
    two.vanish()
    until([zero, one, three], lambda: zero.line._head.lost() == {2})
    one.vanish()
    until([zero, three], lambda: zero.runs == three.runs == (0, 3))
    assert set(zero.line.gone_s()) == {"1"}
    assert set(zero.line.joined_s()) == {"3"}


def test_second_of_two_takes_over_with_a_spare(start: Start) -> None:
    """Two of three agents are most, so a waiting spare also replaces node 0; twice, with the spare as the leader."""
    zero, one, two, three = start(2, 2, spares=2, swaps=2)
    zero.vanish()
    until([one, two, three], lambda: one.runs == two.runs == (1, 2))
    assert "node 0 was lost" in (one.desired.note or "")
    one.vanish()
    until([two, three], lambda: two.runs == three.runs == (2, 3))
    assert (set(two.line.gone_s()), set(two.line.joined_s())) == ({"0", "1"}, {"2", "3"})
    assert two.line.held_s() == pytest.approx(two.line.now_s(), abs=0.2)


def test_new_leader_counts_the_attempts_of_the_old_one(start: Start) -> None:
    """The only attempt of the spares was used before the loss of node 0."""
    zero, one, two, three = start(2, 2, spares=2, swaps=1)
    one.vanish()
    until([zero, two, three], lambda: zero.runs == two.runs == (0, 2))
    zero.vanish()
    until([two, three], lambda: two.desired.want == three.desired.want == "end")
    assert (two.desired.verdict.state, two.desired.verdict.reason) == ("failed", "node_failure")


def test_new_leader_has_all_restarts_of_the_spares_attempt(start: Start) -> None:
    """The spare's attempt has a restart of its own, which the loss of node 0 uses."""
    zero, one, two, three = nodes = start(3, 1, spares=1, swaps=1)
    for node in nodes:
        spec = node.line._coordinator.spec
        node.line._coordinator.spec = replace(spec, job=replace(spec.job, max_restarts=1))
    one.vanish()
    until([zero, two, three], lambda: zero.runs == two.runs == three.runs == (0, 2, 3))
    zero.vanish()
    until([two, three], lambda: two.runs == three.runs == (2, 3))


def test_leader_alone_with_a_cut_line_does_not_go_on_beside_the_others(start: Start) -> None:
    """Node 0 that has lost the second node and the spare ends; both may go on without it."""
    zero, one, two = start(2, 1, spares=1, swaps=1)
    one.vanish()
    two.vanish()
    until([zero], lambda: bool(zero.cut))
    assert "lost contact with most of the nodes" in zero.cut


# -- a node that never reaches node 0 -------------------------------------------------------------------------------


class Deaf:
    """The second of two nodes, with `address` in place of node 0's address."""

    def __init__(self, address: Any, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        self.passed_s = 0.0  # in addition to the real time
        self.line = Membership(_spec(1, 2, 2, address, **more), None, lambda: 0)
        monkeypatch.setattr(self.line, "now_s", lambda: time.monotonic() - self.line.zero_s + self.passed_s)
        self.report = Report(1)

    def ends(self, limit_s: float = 20.0) -> dict[str, Any]:
        """Return the verdict with which the node ends, at the latest when the limit is over."""
        end_s = time.monotonic() + limit_s
        while (desired := self.line.exchange(self.report)).want != "end":
            assert time.monotonic() < end_s, "the node still waits"
            self.line.listen(0.01)
        assert desired.verdict is not None
        return desired.verdict


@pytest.fixture(params=["closed", "silent", "full"])
def nowhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield an address: a closed port, a port that never answers, or a port whose packets are dropped."""
    monkeypatch.setattr(transport, "CLOSED_S", 0.3)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        if request.param == "full":  # as behind a firewall: neither a connection nor a refusal
            for _ in range(2):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(server.getsockname())
        address = server.getsockname()
        if request.param == "closed":
            server.close()
        yield address


@pytest.mark.parametrize(("asked", "reason"), [("user", "user"), ("now", "user"), ("preempted", "preempted")])
def test_node_without_node_0_ends_at_once_when_asked(
    nowhere: Any, monkeypatch: pytest.MonkeyPatch, asked: str, reason: str
) -> None:
    """The node has no work to save, so no join timeout counts; the reason is the given one."""
    node = Deaf(nowhere, monkeypatch, join_timeout_s=1800.0)
    assert node.line.exchange(node.report).want == "wait"
    node.report = replace(node.report, stop=asked)
    verdict = node.ends()
    assert (verdict.state, verdict.reason, verdict.fenced) == ("stopped", reason, True)


def test_node_without_node_0_ends_at_its_deadline(nowhere: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting machine costs money: the budget ends the wait before the join timeout does."""
    node = Deaf(nowhere, monkeypatch, join_timeout_s=1800.0, limit_reason="budget")
    node.passed_s = 500.0
    assert node.line.exchange(node.report).want == "wait"
    node.passed_s = 600.0
    verdict = node.ends()
    assert (verdict.state, verdict.reason) == ("stopped", "budget")


def test_node_without_node_0_ends_at_the_join_timeout(nowhere: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of the node's own, such as waits for a connection, do not prolong the wait."""
    monkeypatch.setattr(transport, "STALLED_S", 0.0)
    node = Deaf(nowhere, monkeypatch, join_timeout_s=1.0)
    with pytest.raises(Fenced, match="node 0 was not reached within"):
        node.ends()


def test_node_does_not_wait_for_a_node_0_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The starter begins with node 0's agent, so a refused connection means that node 0 has ended."""
    monkeypatch.setattr(transport, "CLOSED_S", 0.1)
    monkeypatch.setattr(transport, "BEAT_S", 0.1)
    with socket.create_server((HOST, 0)) as server:
        address = server.getsockname()
    node = Deaf(address, monkeypatch, join_timeout_s=1800.0, head_listens=True)
    with pytest.raises(Fenced, match="node 0 was not reached"):
        node.ends()


def test_node_that_returns_is_billed_without_its_absence(start: Start) -> None:
    """A new agent of the node joins at a save; the node is in use until the loss, and from the return on."""
    zero, one, two = start(3, 2)
    zero.line._coordinator.spec = replace(zero.line._coordinator.spec, grow_s=0.0)
    two.vanish()
    until([zero, one], lambda: zero.runs == one.runs == (0, 1))
    used_s = zero.line.gone_s()["2"]
    spec = _spec(2, 3, 2, zero.line._head.address if zero.line._head else None, life=1)
    line = Membership(spec, None, lambda: 0, transport.listen(HOST))
    back = Node(line, Report(2, address=HOST, ports=(line.port, 0), life=1))
    nodes = [zero, one, back]
    until(nodes, lambda: "ready to join" in (zero.desired.note or ""))
    for name in ("step-1", "step-2"):
        zero.report = replace(zero.report, latest=name)
        zero.turn()
    until(nodes, lambda: zero.runs == one.runs == back.runs == (0, 1, 2))
    away_s = zero.line.now_s() - zero.line.gone_s()["2"]
    assert 0 < used_s <= zero.line.gone_s()["2"]
    until(nodes, lambda: zero.line.gone_s()["2"] > used_s + 0.2)
    assert zero.line.now_s() - zero.line.gone_s()["2"] == pytest.approx(away_s, abs=0.01)
    assert zero.line.held_s() == pytest.approx(zero.line.now_s() - away_s / 3, abs=0.01)
    assert zero.line.joined_s() is None
    back.vanish()
    line._listener.close() if line._listener else None
