"""A job's lines from its nodes' log files: no line is lost or repeated, and each byte is fetched once.

Every node's container has one growing file. Each poll reads a file by range from the end of the last read; the cursor
holds each file's position. entrypoints/container/log_relay.py has put time and rank in front of each line.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from cloudtrain.launcher.backend import Chosen, Cursor, LogLine, LogPage, container_output
from cloudtrain.launcher.errors import UnreachableError

from . import api
from .api import Azure
from .status import Details

PAGE_BYTES, FEWEST_BYTES = 8 << 20, 128 << 10  # of all files together, and the least for each file: bounds the memory
TAIL_BYTES = 64 << 10  # of a file, where the end of the log is searched
WORKERS = 8
HOLD_BACK_S = 2.0  # Azure writes nodes' files at different times
FRESH_S, SOON_S = 10.0, 1.0  # the greatest age of the list of files, and the same while files are missing

_FILE = re.compile(r"user_logs/std_log(?:_process_(\d+))?\.txt")


@dataclass(frozen=True)
class _FileCursor:
    """One file's place in the cursor: bytes read, the file's creation time, the last line's time.

    `pending`: bytes after the last whole line, at the last read. `has_ended`: the container has reported the end of its
    log in the file; after the end of the run, no container follows.
    """

    at: int = 0
    born: str = ""
    last_s: float = 0.0
    pending: int = 0
    has_ended: bool = False
    at_end: bool = False


@dataclass(frozen=True)
class _Piece:
    """The result of a read: whole lines, and the file's new place; `failure` if the file could not be read.

    `has_more`: the file continues after this page.
    """

    place: _FileCursor
    lines: list[bytes]
    failure: api.AzureError | None = None
    has_more: bool = False
    begin: int = 0


def node_of(name: str) -> int | None:
    """Return the node of a log file, or None for any other file."""
    match = _FILE.fullmatch(name)
    return None if match is None else int(match[1] or 0)


def page(
    azure: Azure, ask: Callable[[float], Details], nodes: int, cursor: Cursor | None, only: Chosen = None
) -> LogPage:
    """Return the lines after the cursor, of all nodes or `only` of some, sorted by time.

    `ask` returns the run's details at most so many seconds old, because their addresses expire. Raises UnreachableError
    if no file could be read; if only some files could not be read, the page is not clean.
    """
    wanted = frozenset(range(nodes)) if only is None else only & frozenset(range(nodes))
    places = {name: _FileCursor(**place) for name, place in (cursor or {}).get("files", {}).items()}
    answer = ask(FRESH_S)
    if len(_urls(answer, wanted)) < len(wanted) and not answer.is_over:
        answer = ask(SOON_S)
    urls = _urls(answer, wanted)
    pieces = _read_all(azure, urls, places, answer)
    if any(piece.failure is not None and piece.failure.status in (401, 403) for piece in pieces.values()):
        answer = ask(0.0)
        refused = {name for name, piece in pieces.items() if piece.failure is not None}
        again = {name: url for name, url in _urls(answer, wanted).items() if name in refused}
        pieces |= _read_all(azure, again, places, answer)
    failures = [piece.failure for piece in pieces.values() if piece.failure is not None]
    if failures and len(failures) == len(pieces):
        raise UnreachableError(f"cannot read the log: {failures[0].words}")
    lines_of = {name: _read_lines(piece) for name, piece in pieces.items()}
    # Some files are longer than a page: younger lines of the remaining files must wait.
    ends = [times[-1] for name, (_, times) in lines_of.items() if pieces[name].has_more and times]
    until_s = min(ends, default=None)
    lines = [line for name, piece in pieces.items() for line in _lines(name, piece, *lines_of[name], until_s, places)]
    lines.sort(key=lambda line: line.time_s)
    is_clean = not lines and not failures and all(places[name].at_end for name in urls)
    seen = {node_of(name) for name in urls if places[name].has_ended}
    return LogPage(
        lines,
        {"files": {name: place.__dict__ for name, place in places.items()}},
        is_clean=is_clean,
        is_complete=is_clean and wanted <= seen,
    )


def last_event(azure: Azure, url: str, kind: str) -> dict[str, Any] | None:
    """Return the event of a kind from the end of a container's log file, or None.

    Raises AzureError.
    """
    size = int(azure.call("HEAD", url).headers.get("Content-Length", 0))
    if not size:
        return None
    # Blob storage supports no ranges that count from the end.
    span = {"Range": f"bytes={max(0, size - TAIL_BYTES)}-"}
    text = azure.call("GET", url, headers=span).content.decode(errors="replace")
    return container_output.last_word(text.splitlines(), kind, stamped=True)


def _urls(answer: Details, wanted: frozenset[int]) -> dict[str, str]:
    return {name: url for name, url in sorted(answer.log_files.items()) if node_of(name) in wanted}


def _read_all(
    azure: Azure, urls: Mapping[str, str], places: Mapping[str, _FileCursor], answer: Details
) -> dict[str, _Piece]:
    limit = max(FEWEST_BYTES, PAGE_BYTES // max(1, len(urls)))

    def read(item: tuple[str, str]) -> tuple[str, _Piece]:
        name, url = item
        return name, _read(azure, url, places.get(name, _FileCursor()), limit, is_over=answer.is_over)

    if len(urls) < 2:
        return dict(map(read, urls.items()))
    with ThreadPoolExecutor(min(WORKERS, len(urls))) as pool:
        return dict(pool.map(read, urls.items()))


def _read(azure: Azure, url: str, place: _FileCursor, limit: int, *, is_over: bool) -> _Piece:
    try:
        answer = azure.call("GET", url, headers={"Range": f"bytes={place.at}-{place.at + limit - 1}"})
    except api.AzureError as error:
        if error.status == 416:
            return _at_the_end(azure, url, place, limit, error, is_over=is_over)
        if error.status == 404:  # Azure lists a file before it is written
            return _Piece(replace(place, at_end=True), [])
        return _Piece(replace(place, at_end=False), [], error)
    born = answer.headers.get("x-ms-creation-time", "")
    if place.born and born != place.born:  # the platform has restarted the node, with a new file
        return _read(azure, url, _FileCursor(born=born, last_s=place.last_s), limit, is_over=is_over)
    if answer.status_code != 206:  # a proxy's page, or a server without ranges: no lines
        failure = api.AzureError(0, "", "the log's storage gives something else than was asked for")
        return _Piece(replace(place, at_end=False), [], failure)
    data: bytes = answer.content
    is_full = len(data) >= limit
    whole, newline, rest_of_it = data.rpartition(b"\n")
    is_stuck = is_over and not is_full and place.pending == len(rest_of_it)  # the run is over: no more bytes come
    if rest_of_it and (is_stuck or (is_full and not newline)):  # a line longer than a piece is returned in parts
        whole, newline, rest_of_it = data, b"", b""
    lines = whole.split(b"\n") if whole or newline else []
    taken = len(whole) + len(newline)
    at_end = not is_full and not (is_over and rest_of_it)
    after = replace(place, at=place.at + taken, born=born, pending=len(rest_of_it), at_end=at_end)
    return _Piece(after, lines, has_more=is_full, begin=place.at)


def _at_the_end(
    azure: Azure, url: str, place: _FileCursor, limit: int, error: api.AzureError, *, is_over: bool
) -> _Piece:
    """Return no lines, unless a shorter file has replaced the old file."""
    size = error.headers.get("Content-Range", "").rpartition("/")[2]
    try:
        if not size.isdigit():
            size = azure.call("HEAD", url).headers.get("Content-Length", "0")
    except api.AzureError as failure:
        return _Piece(replace(place, at_end=False), [], failure)
    if int(size) < place.at:
        return _read(azure, url, _FileCursor(last_s=place.last_s), limit, is_over=is_over)
    return _Piece(replace(place, pending=0, at_end=True), [])


def _read_lines(piece: _Piece) -> tuple[list[container_output.ContainerLine], list[float]]:
    """Return the piece's parsed lines, and their times, which never decrease."""
    found = [
        container_output.parse(raw.decode("utf-8", "replace").removesuffix("\r"), stamped=True) for raw in piece.lines
    ]
    # For lines before the first line with a time.
    begin_s = next((line.time_s for line in found if line.time_s is not None), None) or time.time()
    latest_s, times = piece.place.last_s, []
    for line in found:  # a node's lines keep the file's order, whatever its clock does
        latest_s = max(latest_s, line.time_s or 0.0)
        times.append(latest_s or begin_s)
    return found, times


def _lines(
    name: str,
    piece: _Piece,
    lines: list[container_output.ContainerLine],
    times: list[float],
    until_s: float | None,
    places: dict[str, _FileCursor],
) -> Iterator[LogLine]:
    """Yield the lines up to that time, and note in `places` where the next read begins."""
    place, count = piece.place, len(lines) if until_s is None else bisect_right(times, until_s)
    if count < len(lines):
        at = piece.begin + sum(len(raw) + 1 for raw in piece.lines[:count])
        place = replace(place, at=at, at_end=False, pending=0)
    node = node_of(name) or 0
    for line, time_s in zip(lines[:count], times, strict=False):
        if line.time_s is not None:
            place = replace(place, last_s=max(place.last_s, line.time_s))
        if line.own is not None:
            place = replace(place, has_ended=place.has_ended or line.own["e"] == "end")
            continue
        place = replace(place, has_ended=False) if place.has_ended else place  # the platform has restarted the node
        yield LogLine(line.text, node, line.rank, time_s)
    places[name] = place
