"""The local cache of an attempt's log: compressed lines, with the backend's cursor after the last line.

A single process writes, under a lock; any number of processes read committed lines. A commit is a registry row with
both the backend's cursor and the file length. If a writer dies between commits, its bytes beyond the committed length
are cut off, and the next writer continues from the committed cursor, so no line is lost or stored twice. An interrupted
call never commits incomplete data. A reader begins at the front or at the back, and skips blocks without matches.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import processes

from ..backend import Cursor, LogLine
from ..errors import ConfigError, UsageError
from ..job import ACTIVE
from ..store.database import Database
from . import blocks
from .view import View

FOLDER = "logs"
BLOCK_LINES = 8192
COMMIT_S = 10.0  # commit interval of a slow log; after a kill, uncommitted lines are read again
COMMIT_BYTES = 1 << 23
ROOM, ROOM_GB = "CLOUDTRAIN_KEPT_LOGS_GB", 5.0
USED_S = 3600.0  # resolution of the last-read time
# A pattern of only these parts matches within a joined text of many lines whenever it matches within a line.
_LOCAL_PATTERN = re.compile(r"(?:[\w %:/=,;'\"@#&<>~!`-]|\\[dwbs.\[\]()/-]|\.|\[[\w -]+\]|\|)+")


@dataclass(frozen=True)
class CachePosition:
    """The committed part of a log."""

    cursor: Cursor | None = None
    """The backend's cursor after the lines."""
    held: tuple[LogLine, ...] = ()
    """Lines before the cursor that waited for earlier lines and are not in the file."""
    size: int = 0
    """Bytes of the file."""
    count: int = 0
    """Lines in the file."""
    is_complete: bool = False
    used_s: float = 0.0
    round: int = 0
    """Counts complete re-reads of the log, and is part of the file names."""


def folder_of(database: Database, job_id: str, attempt: int) -> Path:
    """Return the folder of the attempt's cache."""
    return database.folder / FOLDER / job_id / str(attempt)


def place(database: Database, job_id: str, attempt: int) -> CachePosition | None:
    """Return the committed part of the attempt's log, or None."""
    rows = database.execute("SELECT * FROM kept_logs WHERE job_id = ? AND attempt = ?", (job_id, attempt))
    if not rows or rows[0]["cursor"] is None:
        return None
    row = rows[0]
    fields = json.loads(row["cursor"])
    return CachePosition(
        fields["cursor"],
        tuple(LogLine(*line) for line in fields["held"]),
        row["bytes"],
        row["lines"],
        bool(row["is_complete"]),
        row["used_s"],
        fields["round"],
    )


def is_dropped(database: Database, job_id: str, attempt: int) -> bool:
    """Return whether the attempt's log was cached and then dropped for space: it is cached again only on request."""
    rows = database.execute("SELECT cursor FROM kept_logs WHERE job_id = ? AND attempt = ?", (job_id, attempt))
    return bool(rows) and rows[0]["cursor"] is None


def touch(database: Database, job_id: str, attempt: int, found: CachePosition) -> None:
    """Store the time of use: the least recently used logs are dropped first. Skipped if the registry is locked."""
    if time.time() - found.used_s > USED_S:
        values = (time.time(), job_id, attempt)
        with contextlib.suppress(ConfigError), database.at_once():
            database.execute("UPDATE kept_logs SET used_s = ? WHERE job_id = ? AND attempt = ?", values)


class LogCacheWriter:
    """The only writer of an attempt's cache, from `keeper` to `close`. Methods raise OSError and ConfigError."""

    def __init__(self, database: Database, job_id: str, attempt: int, found: CachePosition, lock: int) -> None:
        self._database, self._key, self._lock = database, (job_id, attempt), lock
        self.place = found
        self._folder = folder = folder_of(database, job_id, attempt)
        self._is_alone = found.size > 0  # else files of an earlier round may exist until the first commit
        self._lines = _cut(folder / f"lines-{found.round}", found.size)
        written = sum(1 for _ in blocks.entries(folder / f"index-{found.round}", found.size)) if found.size else 0
        self._index = _cut(folder / f"index-{found.round}", written * blocks.RECORD_BYTES)
        self._index_size = written * blocks.RECORD_BYTES
        self._size, self._count = found.size, found.count
        self._waiting: list[LogLine] = []
        self._waiting_bytes = 0
        self._committed_s = time.monotonic()
        # The arguments of the last add; None while an add or a commit has not ended.
        self._behind: tuple[dict[str, Any] | None, tuple[LogLine, ...], bool] | None = None
        self._safe_size = found.size  # a commit covers at most this length

    def add(
        self, lines: Sequence[LogLine], cursor: Cursor | None, held: Sequence[LogLine], *, is_complete: bool
    ) -> None:
        """Append lines; the other arguments are the fields of CachePosition after these lines.

        An interrupted call, for example by Ctrl-C, is never committed: its lines are read again from the commit before.
        """
        self._behind = None
        for begin in range(0, len(lines), BLOCK_LINES):
            part = lines[begin : begin + BLOCK_LINES]
            self._waiting += part
            self._waiting_bytes += sum([len(line[0]) for line in part])
            if self._waiting_bytes >= blocks.BLOCK_BYTES or len(self._waiting) >= BLOCK_LINES:
                self._write()
        self._behind = cursor, tuple(held), is_complete

    @property
    def is_due(self) -> bool:
        """Whether the lines added since the last commit should be committed now."""
        is_new = self._waiting or self._size > self.place.size
        is_late = time.monotonic() - self._committed_s >= COMMIT_S
        return (bool(is_new) and is_late) or self._size - self.place.size >= COMMIT_BYTES

    def commit(self) -> None:
        """Commit the added lines with their cursor; no effect if the last `add` was interrupted or never happened."""
        if self._behind is None:
            return
        behind, self._behind = self._behind, None
        cursor, held, is_complete = behind
        if self._waiting:
            self._write()
        for file in (self._lines, self._index):
            os.fsync(file)
        now_s = time.time()
        fields = {"cursor": cursor, "held": [list(line) for line in held], "round": self.place.round}
        values = (*self._key, json.dumps(fields), self._size, self._count, is_complete, now_s)
        self._safe_size = self._size
        self._database.execute("INSERT OR REPLACE INTO kept_logs VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        self.place = CachePosition(cursor, held, self._size, self._count, is_complete, now_s, self.place.round)
        self._committed_s, self._behind = time.monotonic(), behind
        if not self._is_alone:
            self._is_alone = True
            for path in self._folder.iterdir():
                if path.name.startswith(("lines-", "index-")) and not path.name.endswith(f"-{self.place.round}"):
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files; cut off uncommitted bytes, and remove files without a commit."""
        if not self._safe_size:
            for name in ("lines", "index"):
                (self._folder / f"{name}-{self.place.round}").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.ftruncate(self._lines, self._safe_size)
        for file in (self._lines, self._index, self._lock):
            os.close(file)

    def _write(self) -> None:
        data, entry = blocks.encoded(self._waiting, self._size)
        _write_at(self._lines, data, self._size)
        _write_at(self._index, blocks.packed(entry), self._index_size)
        self._size += len(data)
        self._index_size += blocks.RECORD_BYTES
        self._count += entry.line_count
        self._waiting, self._waiting_bytes = [], 0


def keeper(database: Database, job_id: str, attempt: int, *, rewrite: bool = False) -> LogCacheWriter | None:
    """Return the attempt's writer, or None if another process writes.

    `rewrite`: write from the beginning into new files; the old files stay until the first commit. Raises OSError if the
    files cannot be created, ConfigError, and blocks.DamagedError if existing files cannot be continued.
    """
    folder = folder_of(database, job_id, attempt)
    processes.make_private(folder)
    lock = processes.try_lock(folder / "lock")
    if lock is None:
        return None
    try:
        found = place(database, job_id, attempt) or CachePosition()
        found = CachePosition(round=found.round + 1) if rewrite else found
        return LogCacheWriter(database, job_id, attempt, found, lock)
    except BaseException:
        os.close(lock)
        raise


def discard(database: Database, job_id: str, attempt: int) -> bool:
    """Drop the attempt's cached log and record the drop; return False if a process is writing the log."""
    folder = folder_of(database, job_id, attempt)
    lock = processes.try_lock(folder / "lock") if folder.is_dir() else -1
    if lock is None:
        return False
    sql = "UPDATE kept_logs SET cursor = NULL, bytes = 0, lines = 0, is_complete = 0 WHERE job_id = ? AND attempt = ?"
    database.execute(sql, (job_id, attempt))
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # holds other attempts' logs
        folder.parent.rmdir()
    if lock >= 0:
        os.close(lock)
    return True


def _cut(path: Path, size: int) -> int:
    """Open the file and cut it off at `size`. Raises DamagedError if the file is shorter."""
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_size < size:
            raise blocks.DamagedError
        os.ftruncate(file, size)
    except BaseException:
        os.close(file)
        raise
    return file


def _write_at(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def room_bytes() -> int:
    """Return the maximum size of all cached logs, compressed: $CLOUDTRAIN_KEPT_LOGS_GB, else 5 GB; 0 disables caching.

    Raises UsageError.
    """
    text = os.environ.get(ROOM, "")
    try:
        found = float(text) if text else ROOM_GB
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e6:
        hint = "set it to a number such as 5, or 0 for none"
        raise UsageError(f"{ROOM}={text} is not a number of gigabytes", hint=hint)
    return int(found * 1e9)


def make_room(database: Database, room: int) -> bool:
    """Drop the least recently read logs of ended attempts until the cache is within `room` bytes.

    Return whether the cache fits; logs that are being written and logs of active jobs stay.
    """
    total = database.execute("SELECT SUM(bytes) AS bytes FROM kept_logs")[0]["bytes"] or 0
    if total <= room:
        return True
    active = ", ".join(f"'{state}'" for state in ACTIVE)
    for row in database.execute(
        "SELECT k.job_id, k.attempt, k.bytes FROM kept_logs k JOIN attempts a ON a.job_id = k.job_id AND "
        f"a.number = k.attempt WHERE a.state NOT IN ({active}) AND k.bytes > 0 ORDER BY k.used_s"
    ):
        if total <= room:
            break
        if discard(database, row["job_id"], row["attempt"]):
            total -= row["bytes"]
    return bool(total <= room)


class Replay:
    """The committed blocks of a cached log, each read once. Every wanted line matches the view.

    The constructor raises blocks.DamagedError.
    """

    def __init__(self, folder: Path, place: CachePosition, view: View) -> None:
        self._ranks, self._since_s = view.ranks, view.since_s
        self._find = view.grep if view.grep is not None and is_of_blocks(view.grep) else None
        self._bits = None if view.ranks is None else sum({blocks.rank_bit(rank) for rank in view.ranks})
        self._next = 0
        self._entries = list(blocks.entries(folder / f"index-{place.round}", place.size))
        try:
            self._file = os.open(folder / f"lines-{place.round}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise blocks.DamagedError from error

    def next(self) -> list[LogLine] | None:
        """Return the next block's lines, None after the last; a call after blocks.DamagedError skips the block."""
        while self._next < len(self._entries):
            self._next += 1
            if lines := self._lines(self._entries[self._next - 1]):
                return lines
        return None

    def last(self, count: int, wants: Callable[[LogLine], bool] | None, *, patient: bool = False) -> list[LogLine]:
        """Return the last wanted lines. Raises blocks.DamagedError, or skips damaged blocks if `patient`."""
        found: list[list[LogLine]] = []
        for entry in reversed(self._entries):
            if count <= 0:
                break
            try:
                lines = self._lines(entry)
            except blocks.DamagedError:
                if not patient:
                    raise
                continue
            lines = [line for line in lines if line.text[-1:] != "\r" and (wants is None or wants(line))]
            found.append(lines[-count:])
            count -= len(found[-1])
        return [line for lines in reversed(found) for line in lines]

    def before(self) -> Counter[tuple[int, int | None]]:
        """Return the number of lines of each node and rank, among the requested ranks, before the block read last.

        A skipped block that is damaged counts zero: a repeated line is better than a lost line.
        """
        counts: Counter[tuple[int, int | None]] = Counter()
        for entry in self._entries[: max(0, self._next - 1)]:
            with contextlib.suppress(blocks.DamagedError):
                block = blocks.read(self._file, entry)
                for stream, lines in Counter(block.whose).items():
                    who = block.streams[stream]
                    if self._ranks is None or who[1] in self._ranks:
                        counts[who] += lines
        return counts

    @property
    def lost(self) -> int:
        """The number of lines in the block read last."""
        return self._entries[self._next - 1].line_count

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _lines(self, entry: blocks.BlockEntry) -> list[LogLine]:
        if self._bits is not None and not entry.ranks & self._bits:
            return []
        if self._since_s is not None and entry.last_s < self._since_s:
            return []
        block = blocks.read(self._file, entry)
        is_absent = self._find is not None and self._find.search(block.text) is None
        # Hidden characters, such as colours, could split a word.
        if is_absent and block.text.replace("\n", "").replace("\t", "").replace("\r", "").isprintable():
            return []
        if self._ranks is None:
            return block.lines()
        return [line for line in block.lines() if line.rank in self._ranks]


def is_of_blocks(pattern: re.Pattern[str]) -> bool:
    """Return whether a block's text matches whenever a line matches; False for patterns with line anchors."""
    return _LOCAL_PATTERN.fullmatch(pattern.pattern) is not None
