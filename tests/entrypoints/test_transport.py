"""The connection between agents, over real sockets on loopback."""

import socket
from collections.abc import Callable, Iterator

import pytest

from cloudtrain.entrypoints.agent import transport
from cloudtrain.entrypoints.agent.coordinate import Desired, Report
from cloudtrain.entrypoints.contract import ExitReport
from cloudtrain.entrypoints.replication.wire import Seal

Connect = Callable[[str], transport.FollowerEnd]
GARBAGE = [
    *(b"GET / HTTP/1.1\r\n\r\n", b"1\n", b'\0\0\0\x1b{"token": "token", "x": 1}\n', b"\xff\xff\xff\xff\n"),
    Seal("token", "agents", is_server=False).hello() + b"\0\0\0\x02{}" + bytes(32),
]


@pytest.fixture
def head() -> Iterator[transport.LeaderEnd]:
    """Return node 0's listening end."""
    head = transport.LeaderEnd(transport.listen("127.0.0.1"), "token")
    yield head
    head.release()


@pytest.fixture
def connect(head: transport.LeaderEnd) -> Iterator[Connect]:
    """Return a function that connects a follower to the leader."""
    made: list[transport.FollowerEnd] = []

    def connect(token: str = "token") -> transport.FollowerEnd:
        made.append(transport.FollowerEnd(head.address, token))
        return made[-1]

    yield connect
    for member in made:
        member.release()


def exchange(
    head: transport.LeaderEnd, member: transport.FollowerEnd, report: Report, desired: Desired, turns: int = 20
) -> None:
    """Let both ends take turns."""
    for _ in range(turns):
        member.listen(0.01)
        member.send(report)
        head.listen(0.01)
        head.send(desired)


def test_states_cross_the_connection(head: transport.LeaderEnd, connect: Connect) -> None:
    """Each end learns the state of the other end."""
    member = connect("token")
    report = Report(1, 2, "exited", 70, ({"kind": "signal", "message": "é\n"},), None, "user")
    exchange(head, member, report, Desired("kill", 2, nodes=(0, 1), note="é"))
    assert head.reports == {1: report}
    assert member.desired == Desired("kill", 2, nodes=(0, 1), note="é")


def test_stranger_is_ignored(head: transport.LeaderEnd, connect: Connect) -> None:
    """Reports with a wrong token do not count, and their sender gets no answer."""
    member = connect("guess")
    exchange(head, member, Report(1), Desired("run", 1))
    assert head.reports == {}
    assert member.desired is None


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_does_not_end_the_leader(head: transport.LeaderEnd, connect: Connect, garbage: bytes) -> None:
    """Invalid reports are skipped, and valid peers are still heard."""
    with socket.create_connection(head.address) as stranger:
        stranger.sendall(garbage)
        for _ in range(5):
            head.listen(0.01)
    member = connect("token")
    exchange(head, member, Report(1), Desired("run", 1))
    assert set(head.reports) == {1}


def test_closed_connection_is_a_lost_node(
    head: transport.LeaderEnd, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose agent died is lost soon, without the wait for the silence of a cut link."""
    monkeypatch.setattr(transport, "BEAT_S", 0.0)
    monkeypatch.setattr(transport, "CLOSED_S", 0.0)
    member = connect("token")
    exchange(head, member, Report(1), Desired("run", 1))
    assert head.lost() == set()
    member.release()
    for _ in range(5):
        head.listen(0.01)
    assert head.lost() == {1}


def test_silent_leader_is_lost_to_its_followers(head: transport.LeaderEnd) -> None:
    """A follower without any message for a long time fences itself."""
    patient, hasty = (transport.FollowerEnd(head.address, "token", silence_s) for silence_s in (60.0, 0.0))
    for member in (patient, hasty):
        exchange(head, member, Report(1), Desired("run", 1))
    assert (patient.lost(), hasty.lost()) == (False, True)
    for member in (patient, hasty):
        member.release()


def test_verdict_arrives_before_the_close(head: transport.LeaderEnd, connect: Connect) -> None:
    """The close does not reset a connection that still carries the verdict."""
    member = connect("token")
    exchange(head, member, Report(1), Desired("run", 1))
    member.send(Report(1, phase="exited"))
    head.send(Desired("end", 1, verdict=ExitReport("succeeded")))
    head.close(patience_s=0.2)
    for _ in range(5):
        member.listen(0.05)
    assert member.desired.want == "end"
