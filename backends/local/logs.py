"""Lines out of the agents' log files, by byte offset: a stream taken up again repeats nothing and loses nothing."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.logtimes import Clock
from cloudtrain.launcher.backend import LogLine, LogPage

__all__ = ["page"]

PAGE_BYTES = 1 << 20  # of each file


def page(folder: Path, nodes: int, cursor: dict[str, Any] | None, ranks: frozenset[int] | None) -> LogPage:
    """Return the lines after the cursor, merged by time, each file's own order kept.

    With `ranks`, only theirs. A last line without newline is held back until its node has ended.
    """
    offsets: dict[str, int] = dict(cursor or {})
    streams: list[list[LogLine]] = []
    for node in range(nodes):
        root = folder / f"node-{node}"
        ended = (root / "exit.json").exists()
        for path in _files(root / "log", ranks):
            key = f"{node}/{path.name}"
            lines, offsets[key] = _read(path, offsets.get(key, 0), node, ended)
            streams.append(lines)
    return LogPage(list(heapq.merge(*streams, key=attrgetter("time_s"))), offsets)


def _files(folder: Path, ranks: frozenset[int] | None) -> Iterator[Path]:
    if ranks is None and (folder / "boot.log").exists():
        yield folder / "boot.log"
    found = ((_rank(path), path) for path in folder.glob("rank-*.log"))
    yield from (path for rank, path in sorted(found) if ranks is None or rank in ranks)


def _rank(path: Path) -> int:
    match = re.fullmatch(r"rank-(\d+)\.log", path.name)
    return int(match[1]) if match else -1


def _read(path: Path, offset: int, node: int, ended: bool) -> tuple[list[LogLine], int]:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(PAGE_BYTES)
    whole, newline, rest = data.rpartition(b"\n")
    if rest and (ended or len(data) == PAGE_BYTES) and not newline:
        whole, newline, rest = rest, b"", b""  # one line longer than a page, or the end of a line cut short
    elif rest and ended and len(data) < PAGE_BYTES:
        whole, newline, rest = data, b"", b""
    if not whole and not newline:
        return [], offset
    clock, now_s, rank = Clock(path), time.time(), _rank(path)
    lines = []
    latest = 0.0
    for text in whole.split(b"\n"):
        latest = max(latest, clock.at(offset) or now_s)
        lines.append(LogLine(text.decode(errors="replace"), node, rank if rank >= 0 else None, latest))
        offset += len(text) + 1
    return lines, offset if newline else offset - 1
