"""The file with the events of rank 0's log: every event counts once, whatever is missing or damaged."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.backends.channel import copies
from cloudtrain.backends.channel.calls import HostAnswer
from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.agent import node_logs
from cloudtrain.entrypoints.agent.node_logs import Chunk, TimeIndex
from cloudtrain.entrypoints.host import files
from cloudtrain.launcher.backend import agent_pages

PAGE = 4000


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a node that has ended; the pages are short."""
    monkeypatch.setattr(node_logs, "PAGE_BYTES", PAGE)
    monkeypatch.setattr(node_logs, "FILE_BYTES", PAGE)
    (tmp_path / "log").mkdir()
    (tmp_path / "exit.json").write_text("{}")
    return tmp_path


def write(node: Path, count: int = 900, index: TimeIndex | None = None, first: int = 0) -> Path:
    """Append `count` lines of many forms to the log, a third with an event, while the agent looks at the log."""
    log, chance, index = node / "log" / "rank-0.log", random.Random(first), index or TimeIndex(node / "log")
    for n in range(first, first + count):
        plain = chance.choice([f"line {n}", "é\x1b[31m", "50 %\r99 %", ""])
        event = (
            f'x{chance.choice(["", "ü"])}  ::ct {{"e": "{"step" if n % 9 else "eval"}", "step": {n}, "loss": {n / 7}}}'
        )
        with log.open("a") as file:
            file.write(f"{event if n % 3 == 0 else plain}\n")
        index.note(float(n))
    return log


def found(node: Path, offset: int = 0) -> list[Chunk]:
    """Return the pages of a search for events behind the offset."""
    pages: list[Chunk] = []
    while news := node_logs.read(
        node, {"rank-0.log": pages[-1].ends[-1] if pages else offset}, {0}, node_logs.PAGE_BYTES, pattern=events.MARK
    ):
        pages += news
    return pages


def counted(pages: list[Chunk]) -> int:
    """Return the number of events for which the lines of the pages stand."""
    return sum(sum(page.counts) for page in pages)


def events_behind(log: Path, offset: int) -> int:
    """Return the number of events in the log behind the offset."""
    return log.read_bytes()[offset:].count(events.MARK.encode())


def rows(pages: list[Chunk]) -> list[tuple[str, int, float]]:
    """Return each line with its end in the log and its time."""
    ends = [end for page in pages for end in page.ends[:-1]]
    lines = b"".join(page.data for page in pages).decode().splitlines()
    times = [line.time_s for page in pages for line in agent_pages.page(None, {0: [page]}).lines]
    return list(zip(lines, ends, times, strict=True))


def test_blocks_hold_what_a_search_of_the_log_finds(node: Path) -> None:
    """Lines, times and offsets are those of the log, in fewer pages."""
    log = write(node)
    pages = found(node)
    log.with_suffix(".events").unlink()
    searched = found(node)
    assert rows(pages) == rows(searched)
    assert [time_s for _, _, time_s in rows(pages)] == [3.0 * n for n in range(300)]
    assert counted(pages) == counted(searched) == 300
    assert len(pages) < len(searched)


@pytest.mark.parametrize("offset", [0, 1, 777, PAGE, 2 * PAGE + 5, 5 * PAGE])
def test_reader_within_a_block_counts_each_event_once(node: Path, offset: int) -> None:
    """A reader that has read a part of a block reads the rest from the log, and the next blocks from their file."""
    log = write(node)
    offset = log.read_bytes().find(b"\n", offset) + 1
    assert counted(found(node, offset)) == events_behind(log, offset)


def test_search_of_a_long_log_reads_only_the_file_of_events(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the log the reader needs what follows the last block: a page at most, however long the log is."""
    log, read = write(node, 3000), list[int]()
    real = node_logs._piece

    def piece(path: Path, offset: int, length: int) -> bytes:
        data = real(path, offset, length)
        read.append(len(data))
        return data

    monkeypatch.setattr(node_logs, "_piece", piece)
    assert counted(found(node)) == 1000
    assert sum(read) <= PAGE < log.stat().st_size / 10


def test_killed_writer_costs_no_event(node: Path) -> None:
    """A file of events that ends anywhere, as after a kill, loses nothing; the next agent continues it."""
    log = write(node)
    whole = log.with_suffix(".events").read_bytes()
    for size in range(0, len(whole), 331):
        log.with_suffix(".events").write_bytes(whole[:size])
        assert counted(found(node)) == 300
    write(node, 900, first=900)
    assert counted(found(node)) == 600
    assert log.with_suffix(".events").read_bytes().count(b"\n") >= log.stat().st_size // PAGE - 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: b"\0" * len(line),
        lambda line: b"\n",
        lambda line: line.replace(b'"counts": [1', b'"counts": ["1"'),
        lambda line: line.replace(b'"counts": [1, ', b'"counts": ['),
        lambda line: line.replace(b'"times": [[', b'"times": [[null, null], ['),
        lambda line: line.replace(b'"ends": [', b'"ends": [1, '),
        lambda line: line.split(b" ", 2)[0] + b" " + line.split(b" ", 2)[1] + b" " + b"[" * 10_000 + b"\n",
    ],
)
def test_damaged_block_is_read_from_the_log(node: Path, damage: Callable[[bytes], bytes]) -> None:
    """A script may write anything beside its log; the log decides."""
    log = write(node)
    lines = log.with_suffix(".events").read_bytes().splitlines(keepends=True)
    log.with_suffix(".events").write_bytes(b"".join([*lines[:2], damage(lines[2]), *lines[3:]]))
    assert lines[2] != damage(lines[2])
    assert counted(found(node)) == 300


def test_blocks_of_a_removed_log_are_dropped(node: Path) -> None:
    """A log that became shorter is another log: its events come from it alone."""
    index = TimeIndex(node / "log")
    log = write(node, 900, index)
    log.unlink()
    write(node, 30, index, first=300)
    assert counted(found(node)) == 10
    write(node, 600, index, first=330)
    assert counted(found(node)) == 210


def test_steps_of_a_long_log_stay_few(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of a log of steps adds fewer lines than the first; from any block on, each step counts once."""
    monkeypatch.setattr(node_logs, "PAGE_BYTES", 25 * PAGE)
    log, index, kept = node / "log" / "rank-0.log", TimeIndex(node / "log"), list[int]()
    for half in range(2):
        for first in range(half * 60_000, (half + 1) * 60_000, 100):
            with log.open("a") as file:
                file.write(
                    "".join(f'x  ::ct {{"e":"step","step":{n},"loss":{n % 97}}}\n' for n in range(first, first + 100))
                )
            index.note(1.0)
        kept.append(sum(len(page.counts) for page in found(node)))
    assert kept[0] < 8000
    assert kept[1] - kept[0] < 0.75 * kept[0]
    blocks = log.with_suffix(".events").read_text().splitlines()
    for offset in (int(blocks[n].split()[n % 2]) for n in (0, 1, 12, 25, -1)):
        assert counted(found(node, offset)) == events_behind(log, offset)


def test_hosts_send_the_events_with_their_counts(node: Path) -> None:
    """A poll over ssh, or through Slurm's login node, gets the page that a poll of this machine gets."""
    write(node, 3000)
    asked = {"ranks": [0], "page_bytes": PAGE, "pattern": events.MARK}
    wanted = agent_pages.page(None, {0: found(node)[:1]})
    for is_shared in (False, True):
        reply = files.logs(offsets={str(node): {}}, is_shared=is_shared, **asked)
        answer = HostAnswer(json.loads(json.dumps({"nodes": reply["nodes"]})), reply["payload"])
        page = agent_pages.page(None, dict(enumerate(copies.chunks(answer))))
        assert (page.lines, page.cursor, page.counts) == (wanted.lines, wanted.cursor, wanted.counts)
    assert sum(wanted.counts) > 50
