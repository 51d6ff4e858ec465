"""Log pages from the agents' files, for the backends whose agents the launcher asks directly."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, repeat
from operator import itemgetter

from cloudtrain.entrypoints.agent.node_logs import Chunk

from . import LogLine, LogPage

_make = partial(tuple.__new__, LogLine)


@dataclass(frozen=True)
class _Chunk:
    """The texts of a chunk and their times, by the clock of the local machine; the times never decrease."""

    node: int
    chunk: Chunk
    texts: list[str]
    times: list[float]
    until_s: float | None  # later lines of further files wait for the next page; None: no limit


def offsets(cursor: Mapping[str, int] | None, node: int) -> dict[str, int]:
    """Return the offsets up to which a node's files were read, by file name."""
    prefix = f"{node}/"
    return {key.removeprefix(prefix): offset for key, offset in (cursor or {}).items() if key.startswith(prefix)}


def page(
    cursor: Mapping[str, int] | None, found: Mapping[int, Iterable[Chunk]], ahead_s: Mapping[int, float] | None = None
) -> LogPage:
    """Return the nodes' chunks as a page, merged by time; the order within each file stays.

    A chunk may end before its file does, for lack of room. Lines of further files with a later time than the end of the
    chunk are left to the next page. `ahead_s`: the seconds by which a node's clock is ahead of the local clock.
    """
    read_to, now_s, ahead_s = dict(cursor or {}), time.time(), ahead_s or {}
    pieces = [_piece(chunk, node, ahead_s.get(node, 0.0), now_s) for node, chunks in found.items() for chunk in chunks]
    until_s = min((piece.until_s for piece in pieces if piece.until_s is not None), default=None)
    rows, counts = [], list[int]()
    for piece in pieces:
        count = len(piece.times) if until_s is None else bisect_right(piece.times, until_s)
        texts, size, ends = piece.texts, len(piece.chunk.data), [piece.chunk.offset, *piece.chunk.ends]
        if count < len(texts):
            texts, size = texts[:count], sum(map(len, piece.chunk.data.split(b"\n", count)[:count])) + count
            ends = ends[: count + 1]
        counts += piece.chunk.counts[: len(texts)]
        read_to[f"{piece.node}/{piece.chunk.name}"] = ends[-1] if piece.chunk.ends else ends[0] + size
        rows.append(zip(texts, repeat(piece.node), repeat(piece.chunk.rank), piece.times))
    # Sorting merges runs that are already in order, at less cost than a heap.
    lines = list(map(_make, chain.from_iterable(rows)))
    places = sorted(range(len(lines)), key=lambda n: lines[n][3]) if len(counts) == len(lines) else ()
    left_out, counted = sum(piece.chunk.left_out for piece in pieces), tuple(counts[n] for n in places)
    return LogPage(sorted(lines, key=itemgetter(3)), read_to, left_out=left_out, counts=counted)


def _piece(chunk: Chunk, node: int, ahead_s: float, now_s: float) -> _Chunk:
    """Return the chunk's lines with their times; the time of a line is the time of its last byte."""
    sizes = [size - chunk.offset for size, _ in chunk.times]
    latest = list(accumulate((time_s - ahead_s for _, time_s in chunk.times), max))
    counts = map(partial(chunk.data.count, b"\n"), [0, *sizes], sizes)
    times = list(chain.from_iterable(map(repeat, latest, counts)))
    is_noted = bool(sizes) and sizes[-1] >= len(chunk.data)
    last_s = latest[-1] if is_noted else max(now_s, latest[-1] if latest else 0.0)
    times += repeat(last_s, chunk.data.count(b"\n") - len(times))
    text = chunk.data.decode(errors="replace")
    if "\r\n" in text:
        text = text.replace("\r\n", "\n")
    texts = text.split("\n")
    if texts[-1]:
        times.append(last_s)
    else:
        texts.pop()
    return _Chunk(node, chunk, texts, times, last_s if chunk.has_more and is_noted else None)
