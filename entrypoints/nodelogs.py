"""Lines out of an agent's log files, by byte offset: a stream taken up again repeats nothing and loses nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.entrypoints import durable, logtimes, processes
from cloudtrain.entrypoints.places import EXIT, STATE

__all__ = ["PAGE_BYTES", "Chunk", "read"]

PAGE_BYTES = 1 << 20  # of each file
BOOT = "boot.log"


@dataclass(frozen=True)
class Chunk:
    """A file's next whole lines. `times` are the notes of when they were written (logtimes.between).

    The last line is without its newline where there is none to come, or not for long.
    """

    name: str
    offset: int
    data: bytes
    times: tuple[tuple[int, float], ...] = ()

    @property
    def rank(self) -> int | None:
        """Whose lines they are, None of the node's own."""
        return _rank(self.name)


def read(root: Path, offsets: Mapping[str, int], ranks: Collection[int] | None = None) -> list[Chunk]:
    """Return what stands behind the offsets in the node's log files, at most a page of each, none without news.

    With `ranks`, only theirs. A last line without newline is held back until the node has ended, or its agent is gone.
    """
    state = durable.read_json(root / STATE)
    has_ended = (root / EXIT).exists() or (state is not None and not processes.alive(state["pid"], state["stamp"]))
    chunks = (_chunk(path, offsets.get(path.name, 0), has_ended) for path in _files(root / "log", ranks))
    return [chunk for chunk in chunks if chunk.data]


def _files(folder: Path, ranks: Collection[int] | None) -> Iterator[Path]:
    if ranks is None and (folder / BOOT).exists():
        yield folder / BOOT
    found = ((_rank(path.name), path) for path in folder.glob("rank-*.log"))
    yield from (
        path for rank, path in sorted((r, p) for r, p in found if r is not None) if ranks is None or rank in ranks
    )


def _rank(name: str) -> int | None:
    match = re.fullmatch(r"rank-(\d+)\.log", name)
    return int(match[1]) if match else None


def _chunk(path: Path, offset: int, has_ended: bool) -> Chunk:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(PAGE_BYTES)
    is_page = len(data) == PAGE_BYTES
    whole = data[: data.rfind(b"\n") + 1]
    if (has_ended and not is_page) or (is_page and not whole):  # the log's end, or one line longer than a page
        whole = data
    times = logtimes.between(path, offset, offset + len(whole)) if whole else []
    return Chunk(path.name, offset, whole, tuple(times))
