"""A page of log from what agents' files hold: of the backends whose agents are our own to ask."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Mapping
from operator import attrgetter

from cloudtrain.entrypoints.nodelogs import Chunk
from cloudtrain.launcher.backend import LogLine, LogPage

__all__ = ["offsets", "page"]


def offsets(cursor: Mapping[str, int] | None, node: int) -> dict[str, int]:
    """Return where a node's files were read to."""
    prefix = f"{node}/"
    return {key.removeprefix(prefix): offset for key, offset in (cursor or {}).items() if key.startswith(prefix)}


def page(
    cursor: Mapping[str, int] | None, found: Mapping[int, Iterable[Chunk]], ahead_s: Mapping[int, float] | None = None
) -> LogPage:
    """Return the nodes' chunks as one page, merged by time, each file's own order kept.

    `ahead_s`: the seconds that a node's clock is ahead of this machine's.
    """
    read_to, streams = dict(cursor or {}), []
    for node, chunks in found.items():
        for chunk in chunks:
            read_to[f"{node}/{chunk.name}"] = chunk.offset + len(chunk.data)
            streams.append(_lines(chunk, node, (ahead_s or {}).get(node, 0.0)))
    return LogPage(list(heapq.merge(*streams, key=attrgetter("time_s"))), read_to)


def _lines(chunk: Chunk, node: int, ahead_s: float) -> list[LogLine]:
    lines: list[LogLine] = []
    offset, now_s, latest_s = chunk.offset, time.time(), 0.0
    notes, rank = iter(chunk.times), chunk.rank
    note = next(notes, None)
    for text in chunk.data.removesuffix(b"\n").split(b"\n"):
        while note is not None and note[0] <= offset:
            note = next(notes, None)
        latest_s = max(latest_s, now_s if note is None else note[1] - ahead_s)
        lines.append(LogLine(text.decode(errors="replace"), node, rank, latest_s))
        offset += len(text) + 1
    return lines
