"""The lines of an attempt from the backend and the log cache come in order, each exactly once."""

import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.agent import node_logs
from cloudtrain.launcher.backend import LogLine, LogPage, Pace, agent_pages, load
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.logs.late_lines import HoldBack
from cloudtrain.launcher.logs.stream import LogStream
from cloudtrain.launcher.logs.view import View
from cloudtrain.launcher.store.registry import Registry
from doubles.signatures import MakeJob

Open = Callable[..., LogStream]
RUNNING, DONE = State("running", started_s=1.0), State("succeeded", started_s=1.0, ended_s=2.0)


@pytest.fixture
def stream_of(registry: Registry) -> Iterator[Open]:
    """Return a function that opens the stream of a job; the streams are closed at the end of the test."""
    opened: list[LogStream] = []

    def begin(job: Job, view: View | None = None) -> LogStream:
        opened.append(LogStream(registry, job, job.attempt, view))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


def written(home: Path, job: Job, rank: int, *notes: tuple[str, float]) -> None:
    """Append texts to a rank's log, each with its time, as the agent does."""
    log = home / "local" / job.id / "attempt-1" / f"node-{rank}" / "log" / f"rank-{rank}.log"
    with log.open("a") as file, log.with_suffix(".times").open("a") as index:
        for text, time_s in notes:
            file.write(text)
            index.write(f"{file.tell()} {time_s:.3f}\n")


def texts(lines: list[LogLine]) -> list[str]:
    """Return the texts of the lines."""
    return [line.text for line in lines]


def all_of(stream: LogStream) -> list[LogLine]:
    """Return all lines up to the end."""
    found = []
    while not stream.is_over:
        found += stream.read()
    return found


def test_stream_gives_lines_as_they_come(home: Path, seed: MakeJob, stream_of: Open) -> None:
    """Without new lines a stream is empty but not over; `tail` gives the last lines, and `read` the later lines."""
    job = seed("going", RUNNING, {"0": "one\n", "1": ""})
    stream = stream_of(job)
    assert (texts(stream.read()), stream.read(), stream.is_over) == (["one"], [], False)
    written(home, job, 1, ("two\n", 5.0))
    assert texts(stream.read()) == ["two"]
    job = seed("long", RUNNING, {"0": "".join(f"{number}\n" for number in range(50)), "1": ""})
    stream = stream_of(job)
    assert texts(stream.tail(3)) == ["47", "48", "49"]
    written(home, job, 0, ("50\n", 5.0))
    assert texts(stream.read()) == ["50"]


def test_stream_is_over_only_after_the_end_of_the_job(seed: MakeJob, registry: Registry, stream_of: Open) -> None:
    """`update` passes the end to the stream; after the last line, a further read is empty."""
    job = seed("going", RUNNING)
    stream = stream_of(job)
    stream.read()
    registry.set_state(job.attempt, DONE, {})
    stream.update(registry.find("going").attempt)
    assert (all_of(stream), stream.is_over, stream.read()) == ([], True, [])


def test_stream_tail_counts_matching_lines(seed: MakeJob, stream_of: Open) -> None:
    """The tail has the last matching lines, however far back."""
    job = seed("ended", DONE, {"0": "".join(f"{number}\n" for number in range(500)), "1": ""})
    for _ in ("from the files", "from what is kept"):
        stream = stream_of(job)
        assert texts(stream.tail(2, lambda line: line.text.endswith("77"))) == ["377", "477"]
        stream.close()


def test_stream_tail_of_a_long_log_reads_only_the_end(
    seed: MakeJob, stream_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty lines of an uncached log of 900,000 lines take a read of fewer than 50 lines."""
    job = seed("ended", DONE, {"0": "".join(f"{number}\n" for number in range(900_000)), "1": "other\n"})
    looks: list[int] = []
    real = load("local").logs

    def counting(*args: Any, **named: Any) -> Any:
        page = real(*args, **named)
        looks.append(len(page.lines))
        return page

    monkeypatch.setattr(load("local"), "logs", counting)
    stream = stream_of(job)
    found = texts(stream.tail(20))
    assert (len(found), sum(looks) < 50) == (20, True)
    assert {"899999", "other"} & set(found)


def test_stream_orders_the_lines_of_ranks_across_pages(
    home: Path, seed: MakeJob, stream_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank writes ten times as much as its neighbour, so that pages of equal size would drift apart."""
    monkeypatch.setattr(node_logs, "FILE_BYTES", 1000)
    monkeypatch.setattr(node_logs, "PAGE_BYTES", 2000)
    job = seed("ended", DONE, {"0": "", "1": ""})
    for rank, each in ((0, 1), (1, 10)):
        written(
            home, job, rank, *(("".join(f"{rank} {tenth} {i}\n" for i in range(each)), tenth) for tenth in range(400))
        )
    stream = stream_of(job)
    found = all_of(stream)
    assert [line.time_s for line in found] == sorted(line.time_s for line in found)
    for rank, each in ((0, 1), (1, 10)):
        wanted = [f"{rank} {tenth} {i}" for tenth in range(400) for i in range(each)]
        assert [line.text for line in found if line.rank == rank] == wanted


def page_of(folder: Path, cursor: dict[str, int], *limits: Any) -> LogPage:
    """Return the page after the cursor of a job with a single node."""
    return agent_pages.page(cursor, {0: node_logs.read(folder, agent_pages.offsets(cursor, 0), *limits)})


def log_in(folder: Path, text: str) -> Path:
    """Write the log of rank 0, and return its path."""
    (folder / "log").mkdir()
    (folder / "log" / "rank-0.log").write_text(text)
    return folder / "log" / "rank-0.log"


def test_pages_keep_the_order_of_each_file_if_its_clock_goes_back(tmp_path: Path) -> None:
    """The lines of a file keep their written order for any times, each exactly once."""
    chance = random.Random(7)
    folder = tmp_path / "log"
    folder.mkdir()
    for rank in range(4):
        size = 0
        with (folder / f"rank-{rank}.log").open("w") as file, (folder / f"rank-{rank}.times").open("w") as index:
            for number in range(2000):
                size += file.write(f"{number}\n")
                index.write(f"{size} {number + chance.uniform(-50, 50):.3f}\n")
    (tmp_path / "exit.json").write_text("{}")
    cursor: dict[str, int] = {}
    found: dict[int | None, list[int]] = {}
    while (page := page_of(tmp_path, cursor, None, 1)).lines:
        cursor = json.loads(json.dumps(page.cursor))
        for line in page.lines:
            found.setdefault(line.rank, []).append(int(line.text))
    assert found == {rank: list(range(2000)) for rank in range(4)}


def test_pages_of_two_nodes_end_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Younger lines of a quiet node do not overtake older lines of a verbose node."""
    monkeypatch.setattr(node_logs, "FILE_BYTES", 500)
    for node, each in ((0, 1), (1, 20)):
        folder = tmp_path / f"node-{node}" / "log"
        folder.mkdir(parents=True)
        with (folder / f"rank-{node}.log").open("w") as file, (folder / f"rank-{node}.times").open("w") as index:
            for tenth in range(300):
                file.write("".join(f"{tenth} {i}\n" for i in range(each)))
                index.write(f"{file.tell()} {tenth}\n")
    cursor: dict[str, int] = {}
    times: list[float] = []
    while True:
        found = {
            node: node_logs.read(tmp_path / f"node-{node}", agent_pages.offsets(cursor, node), None, 500)
            for node in (0, 1)
        }
        page = agent_pages.page(cursor, found)
        if not page.lines:
            break
        cursor, times = page.cursor, times + [line.time_s for line in page.lines]
    assert (len(times), times) == (300 * 21, sorted(times))


def test_running_progress_bar_arrives_in_states(tmp_path: Path) -> None:
    """A bar may have no newline for hours: its states arrive as written, each once."""
    log = log_in(tmp_path, "begin\n\r 10%\r 20%\r 3")
    first = page_of(tmp_path, {})
    assert texts(first.lines) == ["begin", "\r 10%\r 20%\r"]
    with log.open("a") as file:
        file.write("0%\r100%\nafter\n")
    assert texts(page_of(tmp_path, first.cursor).lines) == [" 30%\r100%", "after"]


def test_line_without_end_arrives_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a hundred megabytes must not stay in memory until its newline."""
    monkeypatch.setattr(node_logs, "LINE_BYTES", 1000)
    monkeypatch.setattr(node_logs, "FILE_BYTES", 100)
    log_in(tmp_path, "x" * 3500)
    cursor: dict[str, int] = {}
    sizes = []
    while (page := page_of(tmp_path, cursor, None, 1)).lines:
        cursor = page.cursor
        sizes.append(len(page.lines[0].text))
    assert sizes == [1000, 1000, 1000]


def test_last_line_without_newline_waits_for_the_end(tmp_path: Path) -> None:
    """The line may be incomplete."""
    log_in(tmp_path, "a\r\nb")
    assert texts(page_of(tmp_path, {}).lines) == ["a"]
    (tmp_path / "exit.json").write_text("{}")
    assert texts(page_of(tmp_path, {}).lines) == ["a", "b"]


@pytest.mark.parametrize(
    ("lines", "since_s", "wanted"), [(2, None, "789"), (0, None, "9"), (None, 6.5, "789"), (1, 3.0, "89")]
)
def test_near_end_never_skips_a_requested_line(
    tmp_path: Path, lines: int | None, since_s: float | None, wanted: str
) -> None:
    """The offset includes an extra line, because the last line may be incomplete."""
    log = log_in(tmp_path, "".join(f"{number}\n" for number in range(10)))
    log.with_suffix(".times").write_text("".join(f"{2 * (number + 1)} {number}.0\n" for number in range(10)))
    offset = node_logs.near_end(tmp_path, lines=lines, since_s=since_s)["rank-0.log"]
    found = log.read_text()[offset:].split()
    assert "".join(found).endswith(wanted)
    assert len(found) <= len(wanted) + 1


# -- hold-back of lines for earlier lines ----------------------------------------------------------------------------


def held_line(text: str, node: int, time_s: float) -> LogLine:
    """Return a line of a node's first rank."""
    return LogLine(text, node, node, time_s)


def test_hold_back_waits_for_earlier_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line within the time is put in order; a later line comes on arrival."""
    now_s = 100.0
    monkeypatch.setattr("time.time", lambda: now_s)
    hold_back = HoldBack(2.0)
    assert hold_back.pass_on([held_line("b", 0, 99.9)]) == []
    assert hold_back.pass_on([held_line("a", 1, 99.5)]) == []
    now_s = 102.5
    assert texts(hold_back.pass_on([])) == ["a", "b"]
    assert hold_back.held == []


def test_hold_back_ends_at_the_next_whole_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line waits for a whole page requested after it came: before, an earlier line of another node may be unread.

    A page without a node may leave a late request, whose answer the next page takes.
    """
    monkeypatch.setattr("time.time", itertools.count(100.0, 0.001).__next__)
    hold_back = HoldBack(60.0)
    assert hold_back.pass_on([held_line("b", 0, 100.0)], is_whole=True) == []
    assert texts(hold_back.pass_on([held_line("a", 1, 99.9), held_line("c", 1, 100.1)], is_whole=True)) == ["a", "b"]
    assert hold_back.pass_on([held_line("d", 0, 100.2)]) == []
    assert texts(hold_back.pass_on([], is_whole=True)) == ["c"]
    assert texts(hold_back.pass_on([], is_whole=True)) == ["d"]


def test_hold_back_keeps_the_order_of_each_stream() -> None:
    """The order holds even if the stream's clock goes back."""
    hold_back = HoldBack(1.0)
    found = hold_back.pass_on([held_line("1", 0, 50.0), held_line("2", 0, 10.0), held_line("x", 1, 20.0)])
    assert texts(found) == ["x", "1", "2"]


@pytest.mark.parametrize(
    ("limit", "most", "length", "count", "passed"), [("MOST_HELD", 10, 1, 25, 15), ("MOST_CHARACTERS", 100, 40, 4, 2)]
)
def test_hold_back_is_bounded(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int, length: int, count: int, passed: int
) -> None:
    """Above the limit the oldest lines pass on; a few long lines count as much as many short lines."""
    monkeypatch.setattr(f"cloudtrain.launcher.logs.late_lines.{limit}", most)
    monkeypatch.setattr("time.time", lambda: 100.0)
    hold_back = HoldBack(60.0)
    lines = [chr(ord("a") + number) * length for number in range(count)]
    found = hold_back.pass_on([held_line(text, 0, 100.0) for text in lines])
    assert (texts(found), len(hold_back.held)) == (lines[:passed], count - passed)


def test_hold_back_time_comes_from_the_backend_or_the_user(
    seed: MakeJob, stream_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--hold-back 0` shows a line at once and overrides the backend's time."""
    now_s = 1000.0
    monkeypatch.setattr("cloudtrain.launcher.logs.late_lines.time.time", lambda: now_s)
    monkeypatch.setattr("cloudtrain.launcher.backend.agent_pages.time.time", lambda: now_s)
    monkeypatch.setattr(load("local"), "pace", lambda ref: Pace(hold_back_s=60.0))
    job = seed("going", RUNNING)
    waiting, at_once = stream_of(job), stream_of(job, View(hold_back_s=0.0))
    assert (waiting.read(), len(at_once.read())) == ([], 2)
    now_s += 61
    assert len(waiting.read()) == 2


def test_held_lines_come_at_the_end_of_the_log(
    seed: MakeJob, registry: Registry, stream_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that wait for earlier lines of other nodes are shown when the log ends, and stored."""
    monkeypatch.setattr("cloudtrain.launcher.logs.late_lines.time.time", lambda: 1000.0)
    monkeypatch.setattr("cloudtrain.launcher.backend.agent_pages.time.time", lambda: 1000.0)
    monkeypatch.setattr(load("local"), "pace", lambda ref: Pace(hold_back_s=60.0))
    job = seed("going", RUNNING)
    stream = stream_of(job)
    assert stream.read() == []
    registry.set_state(job.attempt, DONE, {})
    stream.update(registry.find("going").attempt)
    assert sorted(texts(all_of(stream))) == ["hello from node 0", "hello from node 1"]


# -- an unreachable backend ------------------------------------------------------------------------------------------


def unreachable(*args: Any, **named: Any) -> Any:
    """Raise the error of an unreachable backend."""
    raise UnreachableError("the backend is away")


def test_cached_stream_does_not_use_the_backend(
    home: Path, seed: MakeJob, stream_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of an ended job are readable without credentials and without the machine."""
    job = seed("ended", DONE)
    first = stream_of(job)
    found = all_of(first)
    first.close()
    monkeypatch.setattr(load("local"), "logs", unreachable)
    monkeypatch.setattr(load("local"), "pace", unreachable)
    shutil.rmtree(home / "local")
    again = stream_of(job)
    assert all_of(again) == found


def test_stream_shows_cached_lines_of_an_unreachable_backend(
    home: Path, seed: MakeJob, stream_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last cached lines are better than an error; after them the stream raises, and then loses no line."""
    job = seed("going", RUNNING, {"0": "zero\none\n", "1": ""})
    first = stream_of(job)
    first.read()
    first.close()
    written(home, job, 0, ("two\n", 5.0))
    with monkeypatch.context() as outage:
        outage.setattr(load("local"), "logs", unreachable)
        assert texts(stream_of(job).tail(1)) == ["one"]
        again = stream_of(job)
        assert texts(again.read()) == ["zero", "one"]
        with pytest.raises(UnreachableError):
            again.read()
    assert texts(again.read()) == ["two"]


@pytest.mark.parametrize("state", [RUNNING, DONE], ids=lambda state: state.state)
def test_search_makes_only_the_lines_that_may_match(
    home: Path, seed: MakeJob, registry: Registry, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    """The backend searches: all matching lines come in order with their times, and nothing is stored as the log."""
    monkeypatch.setattr(node_logs, "FILE_BYTES", 1000)
    monkeypatch.setattr(node_logs, "PAGE_BYTES", 4000)
    chance, job = random.Random(1), seed("searched", state, {"0": "", "1": ""})
    for rank in (0, 1):
        notes = [(f"{rank} line {n}{chance.choice([' rare', '', ''])}\n", n / 9) for n in range(900)]
        written(
            home, job, rank, *notes, (f"{rank} r\x1b[31mare\n{rank} é\n", 101.0), (f"{rank} rare, the last\n", 102.0)
        )
    with_all = LogStream(registry, job, job.attempt, now=True)
    view = View(grep=re.compile("rare|the last"))
    wanted = view.chosen([line for lines in with_all.backlog() for line in lines])
    registry.database.execute("DELETE FROM kept_logs")
    pages: list[LogPage] = []
    real = load("local").logs_with  # type: ignore[attr-defined]
    monkeypatch.setattr(
        load("local"), "logs_with", lambda *asked, **more: pages.append(real(*asked, **more)) or pages[-1]
    )
    stream = LogStream(registry, job, job.attempt, view, now=True)
    found = [line for lines in stream.backlog() for line in lines]
    assert view.chosen(found) == wanted
    assert len(wanted) <= sum(len(page.lines) for page in pages) <= len(wanted) + 2 * 20
    assert len(pages) > 5
    stream.close()
    assert not registry.database.execute("SELECT 1 FROM kept_logs")


def test_search_for_the_mark_of_events_leaves_out_none(home: Path, seed: MakeJob, registry: Registry) -> None:
    """The search by which a job's state is read leaves out steps: the user's search for the same text does not."""
    steps = [f'x  ::ct {{"e":"step","step":{n},"loss":1.0}}' for n in range(5000)]
    job = seed("marked", DONE, {"0": "\n".join(steps), "1": ""})
    view = View(grep=re.compile("  ::ct "), ranks=frozenset({0}))
    stream = LogStream(registry, job, job.attempt, view, now=True)
    assert [line.text for lines in stream.backlog() for line in lines] == steps
