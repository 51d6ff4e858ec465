"""Lines of the nodes' log files: no line is lost or repeated, each byte is read once, and the cursor is JSON."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from cloudtrain.backends import http
from cloudtrain.backends.azureml import logs, status
from cloudtrain.backends.azureml.records import Workspace
from cloudtrain.entrypoints import events
from cloudtrain.launcher.backend import LogLine, LogPage
from cloudtrain.launcher.errors import UnreachableError
from doubles.azure.handle import Azure
from doubles.azure.names import GROUP, REGION, SUBSCRIPTION, WORKSPACE
from doubles.waiting import until

HOME = Workspace(SUBSCRIPTION, GROUP, WORKSPACE)
ROOT = f"https://{REGION}.api.azureml.ms/history/v1.0{HOME.arm_id}"
END = events.format_line("end", "node has ended", {"final": False})


class Reader:
    """Reads from its cursor on, and passes the cursor through JSON every time."""

    def __init__(self, azure: Azure, nodes: int) -> None:
        self.azure, self.nodes = azure, nodes
        self.history = self.client = status.RunHistory()
        self.cursor: dict[str, Any] | None = None
        azure.compute("cpu-cluster", maxNodeCount=100)
        azure.submit("j", "true", {"x": b"x"}, nodes=nodes)
        azure.begin("j")

    def read(self, only: frozenset[int] | None = None) -> LogPage:
        """Return a page."""
        found = logs.page(
            self.client,
            lambda fresh_s: self.history.details(HOME, ROOT, "j", fresh_s=fresh_s),
            self.nodes,
            self.cursor,
            only,
        )
        self.cursor = json.loads(json.dumps(found.cursor))
        return found

    def all(self, rounds: int = 60) -> list[LogLine]:
        """Return the lines until a clean page."""
        found: list[LogLine] = []
        for _ in range(rounds):
            try:
                one = self.read()
            except UnreachableError:
                continue
            found += one.lines
            if one.is_clean:
                return found
        raise AssertionError("no page was clean")

    def texts(self, rounds: int = 60) -> list[str]:
        """Return the texts of all lines."""
        return [line.text for line in self.all(rounds)]


@pytest.fixture
def reader(azure_account: Azure, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Reader]:
    """Return a function that makes a reader of a job with the given number of nodes, which is not executed."""
    monkeypatch.setattr(logs, "SOON_S", 0.0)
    monkeypatch.setattr(http, "PAUSE_S", 0.001)
    azure_account.settings(execute=False)
    return lambda nodes: Reader(azure_account, nodes)


def stamped(second: int, text: str, milli: int = 0) -> str:
    """Return a line as the container's log relay writes one."""
    return f"2026-11-21T00:00:{second:02d}.{milli:03d}Z {text}"


def test_lines_of_all_nodes_come_in_the_order_of_their_times(reader: Callable[[int], Reader], azure: Azure) -> None:
    """Each line has its node, its rank and its time, which the container wrote before the text."""
    one = reader(2)
    azure.write_logs("j", 0, stamped(1, "[0] a"), stamped(3, "[1] c"), stamped(4, "the node's own"))
    azure.write_logs("j", 1, stamped(2, "[2] b"))
    found = one.all()
    told = [(line.text, line.node, line.rank) for line in found]
    assert told == [("a", 0, 0), ("b", 1, 2), ("c", 0, 1), ("the node's own", 0, None)]
    assert found[1].time_s - found[0].time_s == 1.0
    assert one.texts() == []


def test_pages_of_two_long_files_keep_the_order_of_times(
    reader: Callable[[int], Reader], azure: Azure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If both files are longer than a page, a page ends at the earlier end: node 0 writes ten times as much."""
    monkeypatch.setattr(logs, "PAGE_BYTES", 400)
    monkeypatch.setattr(logs, "FEWEST_BYTES", 200)
    one = reader(2)
    often = [(number // 10, number % 10 * 100) for number in range(200)]
    azure.write_logs("j", 0, *(stamped(second, "[0] a", milli) for second, milli in often))
    azure.write_logs("j", 1, *(stamped(second, "[1] b", 50) for second in range(20)))
    times = [line.time_s for line in one.all(200)]
    assert (len(times), times) == (220, sorted(times))


def test_line_without_a_time_has_the_previous_time(reader: Callable[[int], Reader], azure: Azure) -> None:
    """A node's own order is the order of the file, despite its clock."""
    one = reader(1)
    azure.write_logs("j", 0, stamped(5, "[0] a"), "bare", stamped(2, "[0] the clock went back"))
    assert [(line.text, line.time_s % 60) for line in one.all()] == [("a", 5), ("bare", 5), ("the clock went back", 5)]


def test_first_line_without_a_time_has_the_next_time(reader: Callable[[int], Reader], azure: Azure) -> None:
    """A shell's line before the container's start must not lift all later times to the present."""
    one = reader(1)
    azure.write_logs("j", 0, "bash: no job control in this shell", stamped(7, "[0] a"))
    assert [line.time_s % 60 for line in one.all()] == [7, 7]


def test_half_a_line_waits_for_its_other_half(reader: Callable[[int], Reader], azure: Azure) -> None:
    """Half a character waits too; after the run's end no writer completes the line, and it is returned as is."""
    one = reader(1)
    file, whole = "user_logs/std_log.txt", "[0] grün\n".encode()
    azure.write_log("j", file, whole[:7])
    assert one.texts() == []
    azure.write_log("j", file, whole[7:] + b"[0] unfin")
    assert one.texts() == ["grün"]
    azure.write_log("j", file, b"ished")
    azure.end("j")
    one.history.known.clear()
    assert one.texts() == ["unfinished"]
    assert one.texts() == []


def test_bytes_are_fetched_once(reader: Callable[[int], Reader], azure: Azure) -> None:
    """The fetched bytes add up to the files despite many polls, and idle polls fetch no bytes."""
    one, total = reader(3), 0
    came: list[str] = []
    for number in range(12):
        for node in range(3):
            text = "".join(f"[{node}] line {number} {n} {'x' * 80}\n" for n in range(200))
            total += len(text)
            azure.write_log("j", f"user_logs/std_log_process_{node}.txt", text)
        came += one.texts()
        one.texts()
    assert len(came) == 12 * 3 * 200
    fetched = sum(call["sent"] for call in azure.journal("blob.get") if call["status"] == 206)
    assert total <= fetched <= 1.1 * total


def test_piece_that_ends_within_a_line(
    reader: Callable[[int], Reader], azure: Azure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are read in pieces that may end inside a line; a line longer than a piece arrives in several."""
    monkeypatch.setattr(logs, "PAGE_BYTES", 100)
    monkeypatch.setattr(logs, "FEWEST_BYTES", 100)
    one = reader(1)
    azure.write_log("j", "user_logs/std_log.txt", "".join(f"[0] {n} {'é' * (n % 40)}\n" for n in range(300)))
    assert one.texts(600) == [f"{n} {'é' * (n % 40)}" for n in range(300)]
    azure.write_log("j", "user_logs/std_log.txt", "y" * 350 + "\n[0] after\n")
    texts = one.texts()
    assert ("".join(texts[:-1]), texts[-1]) == ("y" * 350, "after")


@pytest.mark.parametrize("longer", [False, True])
def test_replaced_file_is_read_from_its_start(reader: Callable[[int], Reader], azure: Azure, longer: bool) -> None:
    """After a restart a new file may replace the old one, shorter or longer than the part already read."""
    one = reader(1)
    azure.write_logs("j", 0, *(f"[0] old {n}" for n in range(10)))
    assert len(one.texts()) == 10
    time.sleep(1.01)  # blob storage gives creation times in whole seconds
    azure.settings(restart_logs="replace")
    azure.preempt("j")
    until(lambda: azure.log("j") == "")
    azure.begin("j")
    azure.write_logs("j", 0, *(f"[0] new {n}" for n in range(100 if longer else 3)))
    assert one.texts() == [f"new {n}" for n in range(100 if longer else 3)]


@pytest.mark.parametrize(
    ("operation", "kind", "more"),
    [
        ("blob.get", "500", {"every": 2}),
        ("blob.get", "throttle", {"every": 3, "retry_after": "0"}),
        ("blob.get", "drop", {"every": 2}),
        ("blob.get", "cut", {"every": 3}),
        ("blob.get", "sas_expired", {}),
        ("run.details", "expired", {}),
        ("run.details", "500", {"every": 2}),
        ("run.details", "throttle", {"every": 2, "retry_after": "0"}),
        ("run.details", "drop", {"every": 2}),
        ("run.details", "error", {"status": 401, "count": 1}),
        ("blob.get", "error", {"status": 403, "count": 3}),
        ("token", "500", {"every": 2, "count": 2}),
    ],
    ids=str,
)
def test_faults_lose_no_line(
    reader: Callable[[int], Reader], azure: Azure, operation: str, kind: str, more: dict[str, Any]
) -> None:
    """Despite any fault between two reads, every line arrives once, in the order of its node."""
    one = reader(4)
    azure.fault(operation, kind, **more)
    came: list[LogLine] = []
    for number in range(10):
        for node in range(4):
            azure.write_logs("j", node, *(f"[{node}] {number * 5 + n}" for n in range(5)))
        one.history.known.clear()
        if number == 5 and "expired" in kind:
            azure.fault(operation, kind, **more)
        came += one.all()
    for node in range(4):
        assert [int(line.text) for line in came if line.node == node] == list(range(50))


def test_unreadable_log_is_reported(reader: Callable[[int], Reader], azure: Azure) -> None:
    """The message omits the address, which would allow any reader to read the log."""
    one = reader(1)
    azure.write_logs("j", 0, "[0] a")
    azure.fault("blob.get", "error", status=404, code="ContainerNotFound", message="gone")
    azure.fault("blob.get", "error", status=500, code="InternalError", message="broken")
    assert one.read().lines == []
    azure.clear_faults()
    azure.fault("blob.get", "drop")
    with pytest.raises(UnreachableError) as caught:
        one.read()
    assert "sig=" not in str(caught.value)
    azure.clear_faults()
    assert one.texts() == ["a"]


def test_log_is_complete_after_every_nodes_end_event(reader: Callable[[int], Reader], azure: Azure) -> None:
    """No more lines can follow; the end events themselves are not shown."""
    one = reader(2)
    azure.write_logs("j", 0, "[0] a", END)
    azure.write_logs("j", 1, "[1] b", events.format_line("ended", "rank 1: boom", {"state": "failed"}), "[1] c")
    assert sorted(one.texts()) == ["a", "b", "c"]
    assert not one.read().is_complete
    azure.write_logs("j", 1, END)
    assert one.texts() == []
    assert one.read().is_complete
    azure.write_logs("j", 1, "[1] begun anew")
    assert one.texts() == ["begun anew"]
    assert not one.read().is_complete


def test_only_some_nodes_are_read(reader: Callable[[int], Reader], azure: Azure) -> None:
    """Files of further nodes are not fetched."""
    one = reader(12)
    for node in range(12):
        azure.write_logs("j", node, f"[{node}] from {node}")
    before = len(azure.journal("blob.get"))
    assert [line.text for line in one.read(frozenset({10})).lines] == ["from 10"]
    assert len(azure.journal("blob.get")) == before + 1


def test_system_logs_are_no_lines_of_the_job(reader: Callable[[int], Reader], azure: Azure) -> None:
    """Files that the user's code puts next to the logs do not count either."""
    one = reader(1)
    azure.write_log("j", "system_logs/cs_capability.log", "noise\n")
    azure.write_log("j", "user_logs/mine.txt", "noise\n")
    azure.write_logs("j", 0, "[0] a")
    assert one.texts() == ["a"]
    ends = ("", "_process_0", "_process_07", "_ps")
    assert [logs.node_of(f"user_logs/std_log{end}.txt") for end in ends] == [0, 0, 7, None]


def test_many_nodes_are_read_in_one_page(reader: Callable[[int], Reader], azure: Azure) -> None:
    """One page has the lines of 64 files."""
    one = reader(64)
    for node in range(64):
        azure.write_logs("j", node, f"[{node}] a", f"[{node}] b")
    begin = time.monotonic()
    assert len(one.read().lines) == 128
    assert time.monotonic() - begin < 10


def test_throttled_reader_waits_as_requested(reader: Callable[[int], Reader], azure: Azure) -> None:
    """The reader waits up to ten seconds in place; for longer waits, all calls until then are refused."""
    one = reader(1)
    azure.fault("run.details", "throttle", retry_after="60")
    for _ in range(2):
        with pytest.raises(UnreachableError, match="gave an unexpected answer"):
            one.read()
    assert len(azure.journal("run.details")) == 1


def test_exit_report_is_from_the_last_container(reader: Callable[[int], Reader], azure: Azure) -> None:
    """Reports of an earlier container, or printed by a rank, are ignored."""
    told = events.format_line("ended", "so it ended", {"state": "failed"})
    one = reader(1)
    azure.write_logs("j", 0, "[0] a", told, END)
    url = one.history.details(HOME, ROOT, "j").log_files["user_logs/std_log.txt"]
    found = logs.last_event(one.client, url, "ended")
    assert found["state"] == "failed"
    azure.write_logs("j", 0, "[0] begun anew")
    assert logs.last_event(one.client, url, "ended") is None
    azure.write_logs("j", 0, f"[0] {told}", END)
    assert logs.last_event(one.client, url, "ended") is None
    assert one.texts()


def test_proxys_page_is_no_log(reader: Callable[[int], Reader], azure: Azure, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy's page with status 200 moves no cursor: its lines are dropped, and the job's lines arrive later."""
    one = reader(1)
    azure.write_logs("j", 0, "[0] a")
    real = one.client.call

    def through_a_portal(method: str, url: str, **more: Any) -> Any:
        answer = real(method, url, **more)
        if "std_log" in url:
            answer.status_code, answer._content = 200, b"<html>\nsign in\n</html>\n"
        return answer

    monkeypatch.setattr(one.client, "call", through_a_portal)
    with pytest.raises(UnreachableError, match="something else than was asked for"):
        one.read()
    monkeypatch.setattr(one.client, "call", real)
    assert one.texts() == ["a"]
