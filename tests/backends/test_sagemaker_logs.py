"""Lines of CloudWatch: no line is lost or repeated, the order holds, and the cursor is JSON."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from cloudtrain.backends.sagemaker import api as clients
from cloudtrain.backends.sagemaker.logs import GROUP, page
from cloudtrain.entrypoints import events
from cloudtrain.launcher.backend import LogLine, LogPage
from cloudtrain.launcher.errors import UnreachableError
from doubles.aws.handle import REGION, Aws

END = events.format_line("end", "node has ended", {})


class Reader:
    """Reads from its cursor on, and passes the cursor through JSON every time, by its own clock."""

    def __init__(self, aws: Aws, nodes: int) -> None:
        self.access = clients.AwsAccess(REGION, None, (("logs", aws.url),))
        self.nodes = nodes
        self.cursor: dict[str, Any] | None = None
        self.now_s = time.time()

    def read(self, after_s: float = 0.0, **more: Any) -> LogPage:
        """Return a page after the given number of seconds."""
        self.now_s += after_s
        found = page(self.access, "j-1", self.nodes, self.cursor, clock=lambda: self.now_s, **more)
        self.cursor = json.loads(json.dumps(found.cursor))
        return found

    def all(self, rounds: int = 60) -> list[LogLine]:
        """Return the lines until a clean page."""
        found: list[LogLine] = []
        for _ in range(rounds):
            try:
                one = self.read(3.0)
            except UnreachableError:
                continue
            found += one.lines
            if one.is_clean:
                return found
        raise AssertionError("no page was clean")


@pytest.fixture
def reader(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Reader]:
    """Return a function that makes a reader of a job with the given number of nodes."""
    for key, value in aws.environ.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(clients, "RENEW_S", 0.0)
    return lambda nodes: Reader(aws, nodes)


def write(aws: Aws, host: int, lines: list[str], at_s: float | None = None, epoch: int = 1) -> None:
    """Write lines of a host, at a time in seconds."""
    stamp = None if at_s is None else int(at_s * 1000)
    aws.write_logs(GROUP, f"j-1/algo-{host}-{epoch}", messages=lines, timestamp=stamp)


def texts(lines: list[LogLine]) -> list[str]:
    """Return the texts of the lines."""
    return [line.text for line in lines]


def test_job_without_a_log_has_no_lines(reader: Any, aws: Aws) -> None:
    """Without a group and a stream the page has no lines, and the log is not complete."""
    found = reader(2).read()
    assert (found.lines, found.is_clean, found.is_complete) == ([], True, False)
    write(aws, 1, ["x"], at_s=1)
    aws.write_logs(GROUP, "j-10/algo-1-1", messages=["another job's"])


def test_line_has_its_rank_its_node_and_its_time(reader: Any, aws: Aws) -> None:
    """The rank comes from the container's prefix; the node's own lines have no rank."""
    write(aws, 2, ["[13] step", "boot: [7] x", "[x] y", ""], at_s=1_000_000.125)
    aws.write_logs(GROUP, "j-10/algo-1-1", messages=["of another job"])
    lines = reader(2).all()
    told = [(line.text, line.rank) for line in lines if line.text]
    assert told == [("step", 13), ("boot: [7] x", None), ("[x] y", None)]
    assert {(line.node, line.time_s) for line in lines} == {(1, 1_000_000.125)}


def test_hosts_are_merged_by_time_and_the_newest_line_comes_at_once(reader: Any, aws: Aws) -> None:
    """The page does not wait for lines that AWS may ingest later: the launcher waits (logs/late_lines.py)."""
    tail = reader(2)
    write(aws, 1, ["b"], at_s=tail.now_s - 0.5)
    write(aws, 2, ["a"], at_s=tail.now_s - 1.0)
    assert texts(tail.read().lines) == ["a", "b"]
    write(aws, 1, ["c"], at_s=tail.now_s)
    assert texts(tail.read().lines) == ["c"]


def test_hosts_after_the_first_page_of_streams_are_read(reader: Any, aws: Aws) -> None:
    """CloudWatch lists 50 streams in a page, and a job may have more hosts."""
    for host in range(1, 53):
        write(aws, host, [f"from {host}"], at_s=1000 + host)
    assert texts(reader(52).all()) == [f"from {host}" for host in range(1, 53)]


def test_hosts_own_order_is_kept_despite_its_clock(reader: Any, aws: Aws) -> None:
    """A clock that goes back does not move a line before an earlier line."""
    write(aws, 1, ["1"], at_s=2000)
    write(aws, 1, ["2"], at_s=1000)
    write(aws, 2, ["other"], at_s=1500)
    assert texts(reader(2).all()) == ["other", "1", "2"]


def test_long_log_comes_in_pieces_whole_and_in_order(reader: Any, aws: Aws) -> None:
    """Several hosts, each with more than a page of short and long lines; the number of held lines stays small."""
    for host in (1, 2, 3):
        for number in range(30):
            lines = [f"[{host - 1}] {number * 400 + n} {'x' * (1000 if host == 3 else 10)}" for n in range(400)]
            write(aws, host, lines, at_s=1000 + number)
    tail = reader(3)
    found: list[LogLine] = []
    while True:
        one = tail.read()
        found += one.lines
        assert len(tail.cursor["held"]) <= 30_000
        if one.is_clean:
            break
    assert [line.time_s for line in found] == sorted(line.time_s for line in found)
    for node in range(3):
        assert [int(line.text.split()[0]) for line in found if line.node == node] == list(range(12_000))


def test_replacement_machine_continues_with_its_own_stream(reader: Any, aws: Aws) -> None:
    """The new stream is found within ten seconds; the old stream is not polled any more when it is quiet."""
    tail = reader(1)
    write(aws, 1, ["before"], at_s=1000)
    assert texts(tail.all()) == ["before"]
    write(aws, 1, ["after"], at_s=2000, epoch=2)
    tail.now_s += 10.0
    assert texts(tail.all()) == ["after"]
    tail.all()
    tail.read(100.0)
    tail.read(1.0)
    before = len(aws.journal("GetLogEvents"))
    tail.read(1.0)
    asked = [call["params"]["logStreamName"] for call in aws.journal("GetLogEvents")[before:]]
    assert set(asked) == {"j-1/algo-1-2"}


def test_long_log_of_a_replaced_machine_is_read_to_its_end(reader: Any, aws: Aws) -> None:
    """The successor's lines wait for the older stream, and the older stream does not wait for them."""
    write(aws, 1, [f"{n}" for n in range(25_000)], at_s=1000)
    write(aws, 1, ["after"], at_s=2000, epoch=2)
    assert texts(reader(1).all()) == [*map(str, range(25_000)), "after"]


def test_expired_token_loses_and_repeats_no_line(reader: Any, aws: Aws) -> None:
    """CloudWatch's tokens expire after a day; a cursor in the registry may be older."""
    for second in range(3):
        write(aws, 1, [f"{second} {n}" for n in range(3)], at_s=1000 + second)
    tail = reader(1)
    before = texts(tail.all())
    [stream] = tail.cursor["streams"].values()
    stream["token"] = "f/of-last-week/s"
    write(aws, 1, ["same moment"], at_s=1002)
    write(aws, 1, ["later"], at_s=1003)
    assert before + texts(tail.all()) == [f"{s} {n}" for s in range(3) for n in range(3)] + ["same moment", "later"]


def test_ranks_own_line_is_never_an_end_event(reader: Any, aws: Aws) -> None:
    """A script may print a line in the form of an end event."""
    write(aws, 1, [f"[0] {END}", "[0] more"], at_s=1000)
    tail = reader(1)
    assert len(tail.all()) == 2
    assert not any(tail.read(6.0).is_complete for _ in range(3))


def test_end_events_of_all_hosts_complete_the_log(reader: Any, aws: Aws) -> None:
    """After them no wait follows, and they are not shown. A replaced container's end event does not count."""
    tail = reader(2)
    write(aws, 1, ["x", END], at_s=1000)
    write(aws, 2, ["y", END], at_s=1000)
    write(aws, 2, ["z"], at_s=1001, epoch=2)
    assert texts(tail.all()) == ["x", "y", "z"]
    assert not tail.read(3.0).is_complete
    write(aws, 2, [END], at_s=1002, epoch=2)
    assert [tail.read(3.0).is_complete for _ in range(2)] == [False, True]


def test_end_event_of_a_replaced_container_is_not_the_last(reader: Any, aws: Aws) -> None:
    """The successor's stream is searched first, for a moment."""
    tail = reader(1)
    write(aws, 1, ["x", events.format_line("end", "", {"final": False})], at_s=1000)
    assert texts(tail.all()) == ["x"]
    write(aws, 1, ["y"], at_s=1001, epoch=2)
    found = [tail.read(6.0) for _ in range(2)]
    assert [texts(one.lines) for one in found] == [[], ["y"]]
    assert [one.is_complete for one in found] == [False, False]
    write(aws, 1, [events.format_line("end", "", {"final": False})], at_s=1002, epoch=2)
    assert [tail.read(3.0).is_complete for _ in range(4)] == [False, False, True, True]


def test_only_the_hosts_of_some_ranks_are_read(reader: Any, aws: Aws) -> None:
    """A follower of rank 0 of 64 hosts makes one read, not 64."""
    for host in range(1, 5):
        write(aws, host, [f"host {host}"], at_s=1000)
    tail = reader(4)
    assert texts(tail.read(only=frozenset({2})).lines) == ["host 3"]
    assert {call["params"]["logStreamName"] for call in aws.journal("GetLogEvents")} == {"j-1/algo-3-1"}


@pytest.mark.parametrize("kind", ["throttle", "500", "drop", "empty", "expired"])
def test_faults_lose_and_repeat_no_line(reader: Any, aws: Aws, kind: str) -> None:
    """Each fault occurs alone and often; `make soak` combines all faults."""
    for host in (1, 2):
        write(aws, host, [f"{host} {n}" for n in range(500)], at_s=1000)
    once = {"count": 3} if kind == "expired" else {"every": 2, "count": 20}
    aws.fault(["GetLogEvents", "DescribeLogStreams"], kind, **once)
    found = texts(reader(2).all())
    assert sorted(found) == sorted(f"{host} {n}" for host in (1, 2) for n in range(500))
    assert [text for text in found if text.startswith("2 ")] == [f"2 {n}" for n in range(500)]


def test_unreadable_host_does_not_hide_the_rest(reader: Any, aws: Aws, monkeypatch: Any) -> None:
    """Lines of readable hosts arrive and the page is not clean; if no host is readable, an error is raised."""
    for host in (1, 2):
        write(aws, host, [f"host {host}"], at_s=1000)
    tail = reader(2)
    real = clients.client(tail.access, "logs")

    class OneBroken:
        def describe_log_streams(self, **query: Any) -> Any:
            return real.describe_log_streams(**query)

        def get_log_events(self, **query: Any) -> Any:
            return real.get_log_events(**{**query, "limit": 0 if "algo-1" in query["logStreamName"] else 10})

    with monkeypatch.context() as patch:  # AWS refuses a limit of 0
        patch.setattr(tail.access.clients, "get", lambda *_, **__: OneBroken())
        found = tail.read(3.0)
    assert (texts(found.lines), found.is_clean) == (["host 2"], False)
    assert texts(tail.all()) == ["host 1"]
    aws.fault(["GetLogEvents", "DescribeLogStreams"], "error", code="AccessDeniedException", message="no logs for you")
    with pytest.raises(UnreachableError, match="no logs for you"):
        tail.read(20.0)
