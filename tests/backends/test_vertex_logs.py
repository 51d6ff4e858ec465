"""Vertex AI: a job's lines from Cloud Logging, which delivers lines late, twice, in pieces, or never."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cloudtrain.backends.vertex import logs, logs_order
from cloudtrain.backends.vertex.api import VertexAccess
from cloudtrain.entrypoints import events
from cloudtrain.launcher.backend import LogLine, LogPage
from cloudtrain.launcher.errors import UnreachableError
from doubles.google.handle import Google
from doubles.google.names import PROJECT, REGION
from doubles.waiting import until


@dataclass
class Writer:
    """Containers of a job that is not executed, which write like entrypoints/container/log_relay.py."""

    google: Google
    job: str
    counts: dict[str, int] = field(default_factory=dict)

    def write(self, node: int, *texts: str, rank: int | None = 0, life: str | None = None) -> None:
        """Write the node's lines, numbered."""
        life = life or f"life-{node}"
        lines = []
        for text in texts:
            number = self.counts[life] = self.counts.get(life, 0) + 1
            mark = {"l": life, "n": number, "t": int(time.time() * 1000)}
            tag = "" if rank is None else f"[{rank}] "
            lines.append(json.dumps({"severity": "INFO", "message": f"{tag}{text}", "ct": mark}))
        self.google.write_log(self.job, *lines, task=logs_order.task_of(node))

    def end(self, node: int, *, final: bool = True, life: str | None = None) -> None:
        """Write the container's end event."""
        life = life or f"life-{node}"
        fields = {"node": node, "final": final, "life": life, "lines": self.counts.get(life, 0)}
        self.google.write_log(
            self.job, events.format_line("end", "it has ended", fields), task=logs_order.task_of(node)
        )


@dataclass
class Reader:
    """A reader with its cursor, which each page passes through JSON."""

    job: str
    home: Path
    nodes: int = 2
    only: frozenset[int] | None = None
    cursor: dict[str, Any] | None = None
    lines: list[LogLine] = field(default_factory=list)
    access: ClassVar[VertexAccess]
    process: ClassVar[logs.LogReader]

    @classmethod
    def restart(cls) -> None:
        """Forget the connections and the feeds, as the end of the process does."""
        cls.access, cls.process = VertexAccess(PROJECT, REGION), logs.LogReader()

    def page(self, *, is_passing: bool = False) -> LogPage:
        """Read a page."""
        where = (self.job, self.nodes, self.cursor, self.only, self.home)
        found = self.process.page(self.access, *where, is_passing=is_passing)
        self.cursor = json.loads(json.dumps(found.cursor))
        self.lines += found.lines
        return found

    def until(self, is_enough: Callable[[LogPage], bool], timeout_s: float = 60.0) -> LogPage:
        """Read on until a page meets the condition."""
        end_s = time.monotonic() + timeout_s
        while not is_enough(found := self.page()):
            assert time.monotonic() < end_s, f"{len(self.lines)} lines, the last page {found}"
            time.sleep(0.1)
        return found

    def texts(self, node: int) -> list[str]:
        """Return a node's lines so far."""
        return [line.text for line in self.lines if line.node == node]


@pytest.fixture
def job(google_project: Google) -> Iterator[str]:
    """Return the number of a job without containers; pollers of earlier tests are gone."""
    google_project.settings(execute=False)
    Reader.restart()
    yield google_project.submit("j", "true", workers=1)
    Reader.restart()


@pytest.fixture
def writer(google_project: Google, job: str) -> Writer:
    """Return the job's containers."""
    return Writer(google_project, job)


@pytest.fixture
def reader(job: str, tmp_path: Path) -> Reader:
    """Return a reader of the job."""
    return Reader(job, tmp_path)


def complete(page: LogPage) -> bool:
    """Return whether no more lines can come."""
    return page.is_clean and page.is_complete


def test_lines_have_rank_and_node_without_end_events(writer: Writer, reader: Reader) -> None:
    """Each line has its node and rank; the containers' own end events are no lines."""
    writer.write(0, "a", "b", rank=0)
    writer.write(1, "c", rank=9)
    writer.write(1, "node's own", rank=None)
    writer.end(0)
    writer.end(1)
    reader.until(complete)
    told = [(line.node, line.rank, line.text) for line in sorted(reader.lines, key=lambda line: line.node)]
    assert told == [(0, 0, "a"), (0, 0, "b"), (1, 9, "c"), (1, None, "node's own")]


@pytest.mark.slow
def test_late_repeated_and_resent_lines_come_once(google_project: Google, writer: Writer, reader: Reader) -> None:
    """A third of the lines is late, repeated, or sent again under a new key: each appears once, with few calls."""
    google_project.settings(log_late_share=0.15, log_late_s=(1, 4), log_duplicate_share=0.1, log_resent_share=0.1)

    def write() -> None:
        for number in range(150):
            for node in (0, 1):
                writer.write(node, f"{node} {number}")
            time.sleep(0.02)
        for node in (0, 1):
            writer.end(node)

    thread = threading.Thread(target=write)
    begin_s = time.monotonic()
    thread.start()
    reader.until(complete)
    thread.join()
    for node in (0, 1):
        assert sorted(reader.texts(node)) == sorted(f"{node} {number}" for number in range(150))
    lists = [call for call in google_project.journal("logging.list") if call["status"] == 200]
    assert len(lists) <= 4 + (time.monotonic() - begin_s) / 2


@pytest.mark.parametrize("pieces", [3, 40])
def test_cursor_works_in_a_new_process(writer: Writer, reader: Reader, pieces: int) -> None:
    """A cursor saved at any moment repeats no line, misses no line, and keeps the order."""
    for piece in range(4):
        writer.write(0, *(f"{piece}-{number}" for number in range(pieces)))
        before = len(reader.lines)
        reader.until(lambda page, before=before: len(reader.lines) - before >= pieces)
        Reader.restart()
    writer.end(0)
    writer.end(1)
    reader.until(complete)
    assert reader.texts(0) == [f"{piece}-{number}" for piece in range(4) for number in range(pieces)]


@pytest.mark.slow
def test_faults_of_all_kinds_lose_no_line(google_project: Google, writer: Writer, reader: Reader) -> None:
    """Throttled, unavailable, dropped, cut, with expired tokens: the reader continues, and misses no line."""
    google_project.fault("logging.list", "429", every=4)
    google_project.fault("logging.list", "503", every=5)
    google_project.fault("logging.list", "drop", every=7)
    google_project.settings(log_late_share=0.1, log_late_s=(1, 3))
    for number in range(60):
        writer.write(0, f"{number}")
        if number == 30:
            google_project.expire_tokens()
        if number % 10 == 0:
            try_page(reader)
    writer.end(0)
    writer.end(1)
    until(lambda: (page := try_page(reader)) and complete(page), 90, 0.2)
    assert sorted(map(int, reader.texts(0))) == list(range(60))


def try_page(reader: Reader) -> LogPage | None:
    """Read a page if possible."""
    try:
        return reader.page()
    except UnreachableError:
        return None


@pytest.mark.slow
def test_single_lines_come_soon_with_few_calls(google_project: Google, writer: Writer, reader: Reader) -> None:
    """Each of several single lines arrives soon, by a list at most every 2.4 s."""
    reader.page()
    google_project.clear_journal()
    begin_s = time.monotonic()
    for number in range(6):
        writer.write(0, f"{number}")
        reader.until(lambda page, number=number: len(reader.lines) > number, timeout_s=10)
    assert reader.texts(0) == ["0", "1", "2", "3", "4", "5"]
    assert len(google_project.journal("logging.list")) <= 1 + (time.monotonic() - begin_s) / 2.4


def test_long_lines_are_joined(google_project: Google, writer: Writer, reader: Reader) -> None:
    """A line that Cloud Logging has split is one line again."""
    google_project.settings(log_entry_bytes=1000)
    text = "x" * 2500 + "end"
    google_project.write_log(reader.job, text, task="workerpool0-0")
    reader.until(lambda page: bool(reader.lines))
    assert [line.text for line in reader.lines] == [text]


def test_one_pass_reads_all_pages_and_ends(google_project: Google, writer: Writer, reader: Reader) -> None:
    """`logs` reads page by page, with short and empty pages, and then ends without a wait."""
    google_project.settings(log_page_cap=40, log_empty_every=3)
    for piece in range(5):
        writer.write(0, *(f"{piece * 50 + number}" for number in range(50)))
    begin_s = time.monotonic()
    while not reader.page(is_passing=True).is_clean:
        assert time.monotonic() - begin_s < 10
    assert reader.texts(0) == [str(number) for number in range(250)]


def test_one_pass_with_a_cursor_of_an_earlier_process_asks_once(writer: Writer, reader: Reader) -> None:
    """A line written after a follower's last poll is read at once, not 10 s later."""
    writer.write(0, "early")
    reader.until(lambda page: bool(reader.lines) and page.is_clean)
    Reader.restart()
    writer.write(0, "late")
    while not reader.page(is_passing=True).is_clean:
        time.sleep(0.1)
    assert reader.texts(0) == ["early", "late"]


def test_single_node_is_read_alone(writer: Writer, reader: Reader) -> None:
    """Only the wanted node's lines are requested; its end completes the log."""
    writer.write(0, "head")
    writer.write(1, "other")
    writer.end(1)
    reader.only = frozenset({1})
    reader.until(complete)
    assert [line.text for line in reader.lines] == ["other"]


def test_restarted_container_counts_from_one(writer: Writer, reader: Reader) -> None:
    """After a preemption the same replica has a new container, whose lines begin at one."""
    writer.write(0, "before", life="first")
    writer.end(0, final=False, life="first")
    reader.until(lambda page: bool(reader.lines))
    assert not reader.page().is_complete
    writer.write(0, "after", life="second")
    writer.end(0, life="second")
    writer.end(1)
    reader.until(complete)
    assert reader.texts(0) == ["before", "after"]


def test_lines_of_service_and_image_are_shown(google_project: Google, writer: Writer, reader: Reader) -> None:
    """Lines of the service or the image before our container have no rank and are not lost."""
    google_project.write_log(reader.job, "an image's greeting", task="workerpool1-0")
    reader.until(lambda page: bool(reader.texts(1)))
    assert "an image's greeting" in reader.texts(1)


def test_several_readers_share_the_calls(google_project: Google, writer: Writer, tmp_path: Path, job: str) -> None:
    """A follower and a progress poll in the same process together make the calls of one."""
    one, other = Reader(job, tmp_path), Reader(job, tmp_path, only=frozenset({0}))
    one.page()
    other.page()
    google_project.clear_journal()
    writer.write(0, *map(str, range(10)))
    end_s = time.monotonic() + 20
    while len(one.lines) < 10 or len(other.lines) < 10:
        one.page()
        other.page()
        assert time.monotonic() < end_s
        time.sleep(0.1)
    assert len(google_project.journal("logging.list")) <= 1 + (time.monotonic() - end_s + 20) / 2.4


def test_calls_stay_below_the_limit(google_project: Google, writer: Writer, reader: Reader) -> None:
    """Calls of all processes of the home folder count, in any number."""
    quota = logs.LogQuota(reader.home, PROJECT)
    for _ in range(logs.FOLLOWING):
        assert quota.may_ask(logs.PASSING)
    reader.cursor = {"order": None, "backlog": None, "listed_s": 0.0}
    writer.write(0, "unseen")
    page = reader.page()
    assert (page.lines, page.is_clean) == ([], False)
    assert google_project.journal("logging.list") == []


def numbered(google: Google, reader: Reader, number: int, age_s: float, node: int = 0) -> None:
    """Add a container's line now with an earlier time."""
    mark = {"l": f"life-{node}", "n": number, "t": int((time.time() - age_s) * 1000)}
    line = json.dumps({"severity": "INFO", "message": f"[0] {number}", "ct": mark})
    google.write_log(reader.job, line, task=logs_order.task_of(node), at_s=time.time() - age_s)


@pytest.mark.parametrize(
    ("before", "late"),
    [([(2, 14), (3, 0)], (1, 15)), ([(1, 300), (3, 19), (4, 0)], (2, 20)), ([(1, 60), (3, 30), (5, 0)], (2, 31))],
    ids=["the first line", "after a long silence", "one of several"],
)
def test_missing_line_is_requested_at_its_place(
    google_project: Google, reader: Reader, before: list[tuple[int, float]], late: tuple[int, float]
) -> None:
    """A very late line is requested between its neighbours, at any distance."""
    for number, age_s in before:
        numbered(google_project, reader, number, age_s)
    reader.until(lambda page: len(reader.lines) == len(before))
    numbered(google_project, reader, *late)
    reader.until(lambda page: str(late[0]) in reader.texts(0), 30)


@pytest.mark.slow
def test_permanent_gap_does_not_block_later_lines(google_project: Google, reader: Reader) -> None:
    """Sixty lines are lost to an exclusion filter, but a further late line is still requested in its turn."""
    for number in range(1, 120, 2):
        numbered(google_project, reader, number, 6000 - number * 40)
    numbered(google_project, reader, 120, 0)
    reader.until(lambda page: len(reader.lines) == 61)
    numbered(google_project, reader, 118, 6000 - 118 * 40)
    reader.until(lambda page: "118" in reader.texts(0), 20)


@pytest.mark.slow
@pytest.mark.soak
def test_replica_whose_lines_are_ingested_late_is_shown(google_project: Google, reader: Reader) -> None:
    """All lines of node 1 come 15 s late and in order, so no gap is known: the lines are still shown."""
    for number in range(1, 9):
        numbered(google_project, reader, number, 0)
        numbered(google_project, reader, number, 15, node=1)
        before = len(reader.texts(1))
        reader.until(lambda page, before=before: len(reader.texts(1)) > before, 14)
    assert reader.texts(1) == [str(number) for number in range(1, 9)]


@pytest.mark.slow
def test_newest_container_of_each_node_counts(writer: Writer, reader: Reader) -> None:
    """Nodes that ended and were restarted are followed further; the log is complete when all have ended again."""
    for node in (0, 1):
        writer.write(node, "before", life=f"first-{node}")
        writer.end(node, life=f"first-{node}")
    reader.until(complete)
    for node in (0, 1):
        writer.write(node, "after", life=f"second-{node}")
    reader.until(lambda page: reader.texts(0)[-1:] == ["after"] == reader.texts(1)[-1:], 20)
    writer.end(0, life="second-0")
    reader.until(lambda page: page.is_clean, 20)
    assert not reader.page().is_complete
    writer.end(1, life="second-1")
    reader.until(complete, 20)


def test_follower_keeps_its_limit_in_a_backlog(google_project: Google, writer: Writer, reader: Reader) -> None:
    """A follower leaves calls to further readers, even with a large backlog."""
    google_project.settings(log_page_cap=20)
    for piece in range(10):
        writer.write(0, *(f"{piece}-{number}" for number in range(100)))
    while reader.page().lines:
        pass
    assert len(google_project.journal("logging.list")) <= logs.FOLLOWING


def test_refused_call_pauses_all_calls(google_project: Google, writer: Writer, reader: Reader) -> None:
    """After a 429 no call is made for a while, in the backlog too."""
    google_project.fault("logging.list", "429")
    writer.write(0, "x")
    for _ in range(10):
        assert reader.page().is_clean is False
    assert len(google_project.journal("logging.list")) == 1


def test_clock_that_steps_back_changes_no_order(google_project: Google, reader: Reader) -> None:
    """A machine's clock is set shortly after its start: the order is by the lines' numbers."""
    now_ms = int(time.time() * 1000)
    for number, stepped in ((1, 0), (2, 3000)):
        mark = {"l": "l", "n": number, "t": now_ms - stepped}
        line = json.dumps({"severity": "INFO", "message": f"[0] {number}", "ct": mark})
        google_project.write_log(reader.job, line, task="workerpool0-0")
    reader.until(lambda page: len(reader.lines) == 2)
    assert reader.texts(0) == ["1", "2"]
