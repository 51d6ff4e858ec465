"""The SQLite file with all state of a user's cloudtrain: safe for many processes, consistent after any crash.

`registry` stores jobs, `money` stores budgets and reservations, `notices` stores notifications, each in separate
tables. A single file allows a transaction over several of the tables.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import processes

from ..errors import ConfigError
from .home import home

BUSY_TIMEOUT_S = 60.0
FAULTS = (sqlite3.Error, UnicodeDecodeError)  # the second is of a message that holds bytes of a damaged schema
RESERVE, RESERVE_BYTES = "registry.reserve", 1 << 18  # room for SQLite's own files when the disk is full

_SCHEMA = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    backend TEXT NOT NULL,
    created_s REAL NOT NULL,
    config TEXT NOT NULL,
    config_file TEXT NOT NULL,
    bundle TEXT NOT NULL,
    idempotency_key TEXT UNIQUE,
    seq INTEGER NOT NULL UNIQUE
);
CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs(id),
    number INTEGER NOT NULL,
    phase TEXT NOT NULL,
    plan TEXT NOT NULL,
    request TEXT NOT NULL,
    created_s REAL NOT NULL,
    submitter TEXT NOT NULL,
    ref TEXT,
    state TEXT NOT NULL,
    outcome TEXT NOT NULL,
    progress TEXT NOT NULL DEFAULT '{}',
    unreachable_since_s REAL,
    PRIMARY KEY (job_id, number)
);
CREATE INDEX active ON attempts(state) WHERE state IN ('pending', 'running', 'stopping');
CREATE INDEX by_name ON jobs(name);
-- A row for each notification of a job to a channel: written when first due, claimed by one of many followers until
-- `lease_s`, with `told_s` after the receiver has accepted the notification.
CREATE TABLE notices (
    job_id TEXT NOT NULL REFERENCES jobs(id),
    channel TEXT NOT NULL,
    key TEXT NOT NULL,
    due_s REAL NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,
    next_s REAL NOT NULL DEFAULT 0,
    lease_s REAL NOT NULL DEFAULT 0,
    claimer TEXT NOT NULL DEFAULT '',
    told_s REAL,
    error TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (job_id, channel, key)
);
CREATE INDEX untold ON notices(job_id) WHERE told_s IS NULL;
CREATE TABLE budgets (
    project TEXT NOT NULL,
    period TEXT NOT NULL,
    limit_micro INTEGER NOT NULL,
    overcommit_percent INTEGER NOT NULL,
    set_s REAL NOT NULL,
    PRIMARY KEY (project, period)
);
CREATE TABLE reservations (
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    project TEXT NOT NULL,
    amount_micro INTEGER,
    created_s REAL NOT NULL,
    state TEXT NOT NULL,
    spent_micro INTEGER,
    ended_s REAL,
    PRIMARY KEY (job_id, attempt)
);
CREATE INDEX reservations_held ON reservations(state) WHERE state = 'held';
CREATE TABLE spends (
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    month TEXT NOT NULL,
    project TEXT NOT NULL,
    spent_micro INTEGER NOT NULL,
    PRIMARY KEY (job_id, attempt, month)
);
CREATE TABLE ledgers (project TEXT PRIMARY KEY, uri TEXT NOT NULL);
-- An attempt may count in several shared ledgers, each of which hears of it by itself.
CREATE TABLE tellings (
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    ledger TEXT NOT NULL,
    told TEXT NOT NULL,
    PRIMARY KEY (job_id, attempt, ledger)
);
CREATE INDEX tellings_to_do ON tellings(told) WHERE told IN ('joining', 'closing');
-- Data for display: the events of rank 0 (`series`), the extent of the cached log (`logs`), and the rehearsed code and
-- config (`rehearsal`).
CREATE TABLE points (
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL,
    time_s REAL NOT NULL,
    step INTEGER,
    fields TEXT NOT NULL,
    weight INTEGER NOT NULL,
    PRIMARY KEY (job_id, attempt, seq)
);
CREATE TABLE kept_logs (
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    cursor TEXT,
    bytes INTEGER NOT NULL,
    lines INTEGER NOT NULL,
    is_complete INTEGER NOT NULL,
    used_s REAL NOT NULL,
    PRIMARY KEY (job_id, attempt)
);
CREATE TABLE rehearsals (
    key TEXT PRIMARY KEY,
    ended_s REAL NOT NULL,
    verdict TEXT NOT NULL
);
-- The line of an ended job in a list, stored with the end (jobs/listing.py); any later change of the job drops it.
CREATE TABLE listed (
    seq INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL,
    backend TEXT NOT NULL,
    state TEXT NOT NULL,
    ranks TEXT NOT NULL,
    outcome TEXT NOT NULL,
    progress TEXT NOT NULL,
    money TEXT NOT NULL,
    created_s REAL NOT NULL,
    described TEXT NOT NULL,
    form INTEGER NOT NULL,
    project TEXT,
    tags TEXT NOT NULL
);
CREATE INDEX listed_form ON listed(form, seq);
CREATE TABLE segments (
    job_id TEXT NOT NULL REFERENCES jobs(id),
    trial INTEGER NOT NULL,
    rung INTEGER NOT NULL,
    state TEXT NOT NULL,
    value REAL,
    step INTEGER,
    seconds REAL NOT NULL,
    ended_s REAL,
    PRIMARY KEY (job_id, trial, rung)
);
"""
# Added later: a file of version 8 lacks these, and a cloudtrain without them can still use the file. In `blocked`, a
# place that had no machines, or no quota: no job of this home is sent there before `until_s` (jobs/failover.py).
_ADDED = (
    "CREATE TABLE IF NOT EXISTS blocked (place TEXT PRIMARY KEY, until_s REAL NOT NULL, span_s REAL NOT NULL)",
    "CREATE INDEX IF NOT EXISTS tellings_moving ON tellings(told) WHERE told = 'moving'",
)
_VERSION = 8  # of the schema, in the file's user_version; a change to the tables raises the version


class QuiesceLock:
    """A reader-writer gate: work that holds a cross-process lock finishes before the process is suspended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant: a signal handler may shut the gate as its thread enters
        self._inside: dict[int, int] = {}  # by thread, the nesting depth
        self._shut = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Run the block inside the gate. A nested block always enters, so that work in progress can finish."""
        me = threading.get_ident()
        with self._changed:
            while self._shut and me not in self._inside:
                self._changed.wait()
            self._inside[me] = self._inside.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[me] -= 1
                if not self._inside[me]:
                    del self._inside[me]
                    self._changed.notify_all()

    @contextmanager
    def shut(self, wait_s: float) -> Iterator[bool]:
        """Close the gate for the block, after at most `wait_s` seconds for workers to leave; yield whether all left."""
        me, end_s = threading.get_ident(), time.monotonic() + wait_s
        with self._changed:
            self._shut += 1
        try:
            with self._changed:
                while (is_busy := bool(self._inside.keys() - {me})) and (left_s := end_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
            yield not is_busy
        finally:
            with self._changed:
                self._shut -= 1
                self._changed.notify_all()


WRITING = QuiesceLock()  # closed before the process is suspended, so that open transactions finish


class Database:
    """The open file, `registry.sqlite` in the home folder. Raises ConfigError if the file cannot be used."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or home()
        self.path = self.folder / "registry.sqlite"
        self._unchecked = {"jobs", "attempts", "reservations", "spends", "budgets"}
        try:
            self._open()
        except (*FAULTS, OSError) as error:
            import shutil  # the import takes 2 ms

            # SQLite writes files even for a read: on a full disk, only the reserve's room lets users see and stop jobs.
            if shutil.disk_usage(self.folder).free > RESERVE_BYTES:
                raise self._unusable(error) from error
            try:
                (self.folder / RESERVE).unlink(missing_ok=True)
                self._open()
            except (*FAULTS, OSError) as again:
                raise self._unusable(again) from again

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return the statement's rows. Raises ConfigError if the file is damaged or the disk is full."""
        try:
            with WRITING.passing():
                return self._db.execute(sql, values).fetchall()
        except FAULTS as error:  # a damaged page or a full disk shows only on access
            raise self._unusable(error) from error

    def execute_each(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run the statement with each row's values. Raises ConfigError as `execute`."""
        try:
            with WRITING.passing():
                self._db.executemany(sql, rows)
        except FAULTS as error:
            raise self._unusable(error) from error

    def require_sound(self, *tables: str) -> None:
        """Raise ConfigError if a page of the tables is damaged: a sum or a search would lack rows without an error."""
        for table in self._unchecked.intersection(tables):
            fault = str(self.execute(f"PRAGMA integrity_check({table})")[0][0]).splitlines()[-1]
            if fault != "ok":
                raise self._unusable(sqlite3.DatabaseError(f"its table {table} is damaged: {fault}"))
            self._unchecked.remove(table)  # once for a connection: of 10,000 jobs a check takes 0.1 s

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """In the block, fail at once instead of waiting for a concurrent writer: for writes that may be skipped."""
        self.execute("PRAGMA busy_timeout = 0")
        try:
            yield
        finally:
            self.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Make all reads in the block see the same state, despite concurrent writers; no writer is blocked."""
        if self._db.in_transaction:
            yield
            return
        self.execute("BEGIN")
        try:
            yield
        finally:
            if self._db.in_transaction:
                self.execute("ROLLBACK")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block as the only writer. Keep all changes, or none after an exception; nested blocks join."""
        if self._db.in_transaction:
            yield
            return
        with WRITING.passing():
            self.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:  # on a full disk, SQLite itself rolls the transaction back
                    self.execute("ROLLBACK")
                raise
            self.execute("COMMIT")

    def _open(self) -> None:
        # Configs may hold secret addresses as plain text. SQLite's additional files get the mode of the file.
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        # A single thread uses the connection, but the garbage collector may close it in a different thread.
        self._db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        closing = weakref.finalize(self, self._db.close)
        # At exit, a second thread may still be using its connection; closing a connection in use crashes SQLite.
        closing.atexit = threading.current_thread() is threading.main_thread()
        if self._version() == 0:
            self._create()
        if (version := self._version()) != _VERSION:
            message = f"it was written by another version of cloudtrain (schema {version}; this version has {_VERSION})"
            raise sqlite3.DatabaseError(message)
        for statement in _ADDED:
            self._db.execute(statement)
        # WAL with NORMAL survives a killed process but not a power cut; an intent must survive both.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")

    def _create(self) -> None:
        # SQLite's busy handler does not cover the switch to WAL, so the first of many processes switches alone.
        with processes.locked(self.folder / "registry.lock"):
            if self._version() == 0:
                self._db.execute("PRAGMA journal_mode = WAL")
                (self.folder / RESERVE).touch(0o600)
                (self.folder / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))
                self._db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}PRAGMA user_version = {_VERSION};COMMIT;")

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _unusable(self, error: Exception) -> ConfigError:
        cure = "free some room, move the file away if it is damaged"
        if "another version of cloudtrain" in str(error):
            cure = "install that version of cloudtrain again, move the file away"
        hint = f"{cure} (`cloudtrain adopt` finds running jobs again), or set CLOUDTRAIN_HOME to another folder"
        return ConfigError(f"the job registry cannot be used: {words_of(error)}", where=self.path, hint=hint)


def words_of(error: Exception) -> str:
    """Return the message of an error of FAULTS, as text."""
    return error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
