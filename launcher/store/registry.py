"""The jobs of this user on this machine, in the database that money and notices share.

An attempt is journalled as an intent before the send, and marked as sent after the backend's answer. A process that
dies in between leaves an intent without a live submitter; `refresh` asks the backend, and settles the intent.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import processes

from ..errors import NoSuchJobError, UsageError
from ..job import ACTIVE, Attempt, Job, State, StoredConfig, new_id
from ..metering.meter import spent_at_worst_micro
from ..text.terminal import say
from ..text.units import parse_money
from . import ledger
from .attempts import NO_ERROR, attempt_of, damaged, object_of
from .database import Database

_JOB_WITH_LAST_ATTEMPT = """
SELECT jobs.*, a.number, a.phase, a.plan, a.request, a.created_s AS sent_s, a.submitter, a.ref, a.outcome, a.progress,
       a.unreachable_since_s
FROM jobs JOIN attempts a ON a.job_id = jobs.id
WHERE a.number = (SELECT MAX(number) FROM attempts WHERE job_id = jobs.id)
"""
_NO_JSON = "CASE WHEN json_valid({0}) AND json_type({0}) = 'object' THEN '{{}}' ELSE {0} END AS {0}"
# The same for a line in a list, without the valid JSON that no line shows.
_LINE_OF_JOB = _JOB_WITH_LAST_ATTEMPT.replace(
    "jobs.*",
    "id, name, backend, jobs.created_s, config_file, bundle, idempotency_key, seq,"
    " CASE WHEN json_valid(config) AND json_extract(config, '$.sweep') IS NULL THEN json_object('budget',"
    " json_extract(config, '$.budget'), 'project', json_extract(config, '$.project'), 'tags',"
    " json_extract(config, '$.tags')) ELSE config END AS config",
)
_LINE_OF_JOB = _LINE_OF_JOB.replace("a.outcome", NO_ERROR).replace(
    "a.progress", "CASE WHEN json_valid(progress) THEN json_remove(progress, '$.curve') ELSE progress END AS progress"
)
for _name in ("bundle", "request", "submitter", "ref"):
    _LINE_OF_JOB = re.sub(rf"(a\.)?\b{_name}\b", _NO_JSON.format(_name), _LINE_OF_JOB)
_ATTEMPTS = "SELECT *, created_s AS sent_s FROM attempts WHERE job_id = ?"
RAN = "SELECT job_id FROM attempts WHERE phase != 'never_sent'"
_TRIAL = re.compile(r"([a-z0-9-]+)\.(\d+)")
_UNSENT = "AND phase IN ('intent', 'queued')"
_UNLESS_OVER = "AND state IN ('pending', 'running', 'stopping')"


class Registry:
    """Jobs and attempts in the open file. Raises ConfigError if the file cannot be used."""

    def __init__(self, folder: Path | None = None) -> None:
        self.database = Database(folder)
        self.folder = self.database.folder
        self._told = set[str]()  # names of several jobs

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    def add(self, name: str, make: Callable[[str, int], Job], *, exclusive: bool, key: str | None) -> tuple[Job, bool]:
        """Journal a job and the intent to send the job; return the job, and whether the job is new.

        `make` gets the job's id and the attempt's number, and returns the job. With `exclusive` (the user chose the
        name; UsageError if the name is taken) the id is the name itself, else a new id. A known idempotency key returns
        the existing job. A job that never ran keeps neither its key nor its name: under the same name the new job
        replaces the old job, with the next attempt number, because a name that a platform may know is never reused.
        """
        with self.database.transaction():
            if key is not None and (known := self._select("AND jobs.idempotency_key = ?", key)):
                if not self.never_ran(known[0]):
                    return known[0], False
                self.database.execute("UPDATE jobs SET idempotency_key = NULL WHERE id = ?", (known[0].id,))
            if exclusive and (known := self._select("AND jobs.id = ?", name)) and self.never_ran(known[0]):
                job = make(name, known[0].attempt.number + 1)
                self._insert_job(job, key)
                return job, True
            if exclusive and self._select("AND (jobs.id = ?1 OR jobs.name = ?1) LIMIT 1", name):
                hint = f"choose another --name, or look at it: cloudtrain status {name}"
                raise UsageError(f"a job named `{name}` exists already", hint=hint)
            job_id = name if exclusive else new_id(name)
            while not exclusive and self.booked(job_id):
                job_id = new_id(name)
            booked = self.booked(job_id)
            if any(row["state"] != "released" for row in booked):
                message = f"a job named `{name}` was removed here; its backend may still have its files under that name"
                raise UsageError(message, hint="choose another --name")
            job = make(job_id, max((row["attempt"] for row in booked), default=0) + 1)
            self._insert_job(job, key)
        return job, True

    def remove(self, job_id: str) -> None:
        """Remove the job from all tables except the ledger, which keeps the cost; the name is not used again."""
        with self.database.transaction():
            self._unlist(job_id)
            for table in ("notices", "points", "kept_logs", "attempts"):
                self.database.execute(f"DELETE FROM {table} WHERE job_id = ?", (job_id,))
            self.database.execute("DELETE FROM jobs WHERE id = ?", (job_id,))

    def add_attempt(self, attempt: Attempt, config: dict[str, Any], bundle: dict[str, Any]) -> None:
        """Journal the intent to send the next attempt; later attempts start from the config and bundle given here.

        Raises UsageError if the last attempt is still active, or if a concurrent process has added the attempt;
        NoSuchJobError if the job was removed.
        """
        with self.database.transaction():
            rows = self.database.execute(f"{_ATTEMPTS} ORDER BY number DESC LIMIT 1", (attempt.job_id,))
            if not rows:  # by another process, or because its only attempt was never sent
                raise NoSuchJobError(f"the job `{attempt.job_id}` was removed meanwhile", hint="cloudtrain submit")
            if rows[0]["state"] in ACTIVE or rows[0]["number"] + 1 != attempt.number:
                hint = f"cloudtrain logs -f {attempt.job_id}"
                raise UsageError(f"`{attempt.job_id}` is being resumed already", hint=hint)
            values = (json.dumps(config), json.dumps(bundle), attempt.submitter.get("backend"), attempt.job_id)
            changes = "config = ?, bundle = ?, backend = COALESCE(?, backend)"
            self.database.execute(f"UPDATE jobs SET {changes} WHERE id = ?", values)
            self._insert(attempt)

    def adopt(self, job: Job, ref: dict[str, Any]) -> None:
        """Add a running attempt without a row, and its job if missing; existing rows stay unchanged."""
        attempt = job.attempt
        with self.database.transaction():
            known = self.database.execute("SELECT number FROM attempts WHERE job_id = ?", (job.id,))
            if attempt.number in [row["number"] for row in known]:
                return
            if known:
                self._insert(attempt)
            else:
                self._insert_job(job, None)
            self.mark_sent(attempt, ref)

    def mark_sent(self, attempt: Attempt, ref: dict[str, Any]) -> None:
        """Store the backend's handle: the attempt exists, even if its submitter was taken for dead.

        Only the first call stores a handle: a late call must not undo a newer state.
        """
        with self.database.transaction():
            if self._update(attempt, "AND phase = 'never_sent'", phase="intent"):
                self._exchange_config(attempt)
            self._update(attempt, "AND phase != 'sent'", State("pending"), phase="sent", ref=json.dumps(ref))
            ledger.revive(self.database, attempt.job_id, attempt.number)

    def release(self, attempt: Attempt) -> None:
        """Store that no process sends the attempt any more; the attempt may exist, and any command may settle it."""
        self._update(attempt, submitter=json.dumps({**attempt.submitter, "stamp": None}))

    def mark_queued(self, attempt: Attempt, queue: dict[str, Any], **marks: Any) -> None:
        """Store that the attempt waits in line to be sent, with its worst case held; `queue` as in State.

        `marks` change the attempt's `submitter`. No change if a concurrent process has claimed the attempt meanwhile.
        """
        place = f"place {queue['place']} of {queue['of']} in line: " if "place" in queue else ""
        state = State("pending", detail=f"{place}{queue.get('reason')}", queue=queue)
        changed: dict[str, Any] = {"submitter": json.dumps({**attempt.submitter, **marks})} if marks else {}
        self._update(attempt, f"{_UNSENT} {_same_try(attempt)}", state, phase="queued", **changed)

    def claim(self, attempt: Attempt) -> bool:
        """Store that this process sends the attempt in line; return whether no other process was faster."""
        number = attempt.submitter.get("try", 0) + 1
        submitter = json.dumps({**attempt.submitter, **this_process(), "queued": True, "try": number})
        only = f"AND phase = 'queued' {_same_try(attempt)}"
        created: dict[str, Any] = {"created_s": time.time()} if "places" in attempt.submitter else {}  # the send begins
        with self.database.transaction():
            return self._update(attempt, only, phase="intent", submitter=submitter, **created)

    def exchange(self, attempt: Attempt, job: Job) -> None:
        """Give the claimed attempt the candidate's plan and request, and the job the candidate's config."""
        plan, request = json.dumps(attempt.plan.dump()), json.dumps(attempt.request)
        changed: dict[str, Any] = {"created_s": attempt.created_s, "submitter": json.dumps(attempt.submitter)}
        with self.database.transaction():
            self._update(attempt, "AND phase = 'intent'", plan=plan, request=request, **changed)
            values = (json.dumps(job.config), job.backend, job.id)
            self.database.execute("UPDATE jobs SET config = ?, backend = ? WHERE id = ?", values)

    def mark(self, attempt: Attempt, **marks: Any) -> bool:
        """Store the marks in the `submitter` of the job's newest attempt; return False if a later attempt exists."""
        newest = "AND number = (SELECT MAX(number) FROM attempts WHERE job_id = ?1)"
        with self.database.transaction():
            rows = self.database.execute(f"{_ATTEMPTS}1 AND number = ?2 {newest}", (attempt.job_id, attempt.number))
            found = [{**object_of(row["submitter"]), **marks} for row in rows]
            return any(self._update(attempt, submitter=json.dumps(submitter)) for submitter in found)

    def mark_never_sent(self, attempt: Attempt, state: State) -> None:
        """Store that the attempt was and will never be sent, and free its worst case; unless sent meanwhile."""
        with self.database.transaction():
            if self._update(attempt, _UNSENT, state, phase="never_sent", unreachable_since_s=None):
                ledger.release(self.database, attempt.job_id, attempt.number, time.time())
                self._exchange_config(attempt)

    def drop_unsent(self, attempt: Attempt) -> None:
        """Remove the row of an attempt that was never sent; it stays if a shared ledger must learn of the release."""
        key = (attempt.job_id, attempt.number)
        ledger.forget(self.database, *key)
        if not self.database.execute("SELECT 1 FROM reservations WHERE job_id = ? AND attempt = ?", key):
            one = "WHERE job_id = ? AND number = ? AND phase = 'never_sent'"
            self.database.execute(f"DELETE FROM attempts {one}", key)

    def set_state(self, attempt: Attempt, state: State, progress: dict[str, Any]) -> bool:
        """Store the state, at the end with the cost; return False, unchanged, for an active state after a known end."""
        is_active = state.state in ACTIVE
        with self.database.transaction():
            only = _UNLESS_OVER if is_active else ""
            stored = self._update(attempt, only, state, progress=json.dumps(progress), unreachable_since_s=None)
            if not is_active:
                self.settle(replace(attempt, state=state))
        return stored

    def settle(self, attempt: Attempt) -> None:
        """Replace the worst case of the ended attempt by its possible cost, with the same uncertainty of the price."""
        state, now_s = attempt.state, time.time()
        spent_micro = spent_at_worst_micro([attempt], now_s)
        ended_s = min(now_s, state.ended_s or now_s)
        ledger.settle(self.database, attempt.job_id, attempt.number, spent_micro, ended_s, started_s=state.started_s)

    def set_unreachable(self, attempt: Attempt) -> None:
        """Store the time since which the backend has not answered; the job's state stays unchanged."""
        if attempt.unreachable_since_s is None:
            self._update(attempt, _UNLESS_OVER, unreachable_since_s=time.time())

    def find(self, key: str, *, sole: Callable[[Job], bool] | None = None) -> Job:
        """Return the job by its id, its name (of several jobs the newest, with a message), a unique prefix, or `last`.

        Raises NoSuchJobError; UsageError for a name of several jobs for which `sole` is true.
        """
        if key in ("last", "-"):
            rows = self._select(f"AND jobs.id IN ({RAN}) ORDER BY jobs.seq DESC LIMIT 1")
            if not rows:
                raise NoSuchJobError("there are no jobs yet", hint="cloudtrain submit")
            return rows[0]
        rows = self._select("AND jobs.id = ?", key) or self._named(key)
        if not rows:
            rows = self._select("AND substr(jobs.id, 1, length(?1)) = ?1 ORDER BY jobs.seq DESC LIMIT 10", key)
        elif sole and rows[0].id != key:
            named = self._select("AND jobs.name = ? ORDER BY jobs.seq DESC", key)
            if len(several := [job for job in named if sole(job)]) > 1:
                ids = ", ".join(job.id for job in several)
                hint = "`rm` and `stop` take ids here"
                raise UsageError(f"`{key}` is the name of {len(several)} jobs: {ids}", hint=hint)
        if len(rows) == 1 and key:
            self._tell_others(key, rows[0])
            return rows[0]
        if not rows and (trial := self.trial(key)) and trial[0].config.get("sweep"):
            job_id, number = trial[0].id, trial[1]
            hint = f"cloudtrain logs {job_id}.{number}, cloudtrain status {job_id}"
            raise NoSuchJobError(f"trial {number} has no job of its own: the job {job_id} trains it", hint=hint)
        if not rows or not key:
            raise NoSuchJobError(f"no job `{key}`", hint=f"{self._meant(key)}cloudtrain list --all shows every job")
        raise NoSuchJobError(f"`{key}` could be any of {', '.join(job.id for job in rows)}", hint="give more of the id")

    def _tell_others(self, key: str, job: Job) -> None:
        """Say once which job is meant by the name of several jobs."""
        if key not in (job.id, *self._told):
            self._told.add(key)
            count = self.database.execute("SELECT COUNT(*) FROM jobs WHERE name = ?", (key,))[0][0]
            if count > 1:
                say(f"`{key}` is the name of {count} jobs; this is {job.id}, the newest")

    def named(self, name: str) -> list[Job]:
        """Return the jobs of this name, the oldest first."""
        return self._select("AND jobs.name = ? ORDER BY jobs.seq", name)

    def trial(self, key: str) -> tuple[Job, int] | None:
        """Return the job and the number in `JOB.17`, with the job's id or name; None for any other key."""
        named = _TRIAL.fullmatch(key)
        rows = self._select("AND jobs.id = ?", named[1]) or self._named(named[1]) if named else []
        return (rows[0], int(named[2])) if named and rows else None

    def _named(self, name: str) -> list[Job]:
        """Return the newest job of the name, if a job has the name."""
        return self._select("AND jobs.name = ? ORDER BY jobs.seq DESC LIMIT 1", name)

    def _meant(self, key: str) -> str:
        """Return the question for a similar name or id, or for `last`, else an empty text."""
        from difflib import get_close_matches

        rows = self.database.execute("SELECT name, id FROM jobs ORDER BY seq DESC LIMIT 500")
        close = get_close_matches(key, ["last", *(text for row in rows for text in row)], 1, 0.75)
        return f"did you mean `{close[0]}`? " if close else ""

    def jobs(self, *, active: bool = False, limit: int | None = None) -> list[Job]:
        """Return jobs, the newest first."""
        only = "AND a.state IN ('pending', 'running', 'stopping') " if active else ""
        found = self._select(only + "ORDER BY jobs.seq DESC LIMIT ?", -1 if limit is None else limit)
        return [job for job in found if job.active or not active]  # a damaged row has no reliable state

    def unlisted(
        self, valid: str, *, active: bool, described: bool, before: int | None = None, limit: int = -1
    ) -> list[Job]:
        """Return jobs without a valid stored line, by the SQL condition `valid` (jobs/listing.py), newest first.

        Either the jobs that may be running or the ended jobs; only jobs with a smaller submit number than `before`.
        Without `described`, an ended job has only what its line needs.
        """
        rows = self.database.execute(
            f"{_JOB_WITH_LAST_ATTEMPT if active or described else _LINE_OF_JOB}"
            f"AND a.state {'' if active else 'NOT '}IN ('pending', 'running', 'stopping')"
            " AND jobs.seq < COALESCE(?, 1e18)"
            f" AND jobs.seq NOT IN (SELECT seq FROM listed WHERE {valid}) ORDER BY jobs.seq DESC LIMIT ?",
            (before, limit),
        )
        return [_job(row, is_line=not (active or described)) for row in rows]

    def numbered(self, seqs: Sequence[int]) -> list[Job]:
        """Return the jobs with the submit numbers, the newest first."""
        return self._select(f"AND jobs.seq IN ({', '.join('?' * len(seqs))}) ORDER BY jobs.seq DESC", *seqs)

    def with_key(self, key: str) -> Job | None:
        """Return the job with the idempotency key, or None."""
        return next(iter(self._select("AND jobs.idempotency_key = ?", key)), None)

    def attempt(self, job: Job, number: int) -> Attempt:
        """Return the attempt with the number. Raises NoSuchJobError."""
        rows = self.database.execute(f"{_ATTEMPTS} AND number = ?", (job.id, number))
        if not rows:
            last = job.attempt.number
            raise NoSuchJobError(f"`{job.id}` has no attempt {number}", hint=f"it has attempts 1 to {last}")
        return attempt_of(rows[0], job.id)

    def attempts(self, job: Job) -> list[Attempt]:
        """Return all attempts in order."""
        rows = self.database.execute(f"{_ATTEMPTS} ORDER BY number", (job.id,))
        return [attempt_of(row, job.id) for row in rows]

    def never_ran(self, job: Job) -> bool:
        """Return whether no attempt was ever sent."""
        return not self.database.execute("SELECT 1 FROM attempts WHERE job_id = ? AND phase != 'never_sent'", (job.id,))

    def booked(self, job_id: str) -> list[sqlite3.Row]:
        """Return the ledger's rows of the attempts with the job id, also for a removed job."""
        return self.database.execute("SELECT attempt, state FROM reservations WHERE job_id = ?", (job_id,))

    def _insert_job(self, job: Job, key: str | None) -> None:
        """Write the job and its attempt as the newest; replace a row of a job with the same id that never ran."""
        self._unlist(job.id)
        seq = self.database.execute("SELECT COALESCE(MAX(seq), 0) + 1 FROM jobs")[0][0]
        columns = ["name", "backend", "created_s", "config", "config_file", "bundle", "idempotency_key", "seq"]
        renewed = ", ".join(f"{name} = excluded.{name}" for name in columns)
        sql = f"INSERT INTO jobs (id, {', '.join(columns)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        sql += f" ON CONFLICT (id) DO UPDATE SET {renewed}"
        values = (job.id, job.name, job.backend, job.created_s, json.dumps(job.config), job.config_file)
        self.database.execute(sql, (*values, json.dumps(job.bundle), key, seq))
        self._insert(job.attempt)

    def _insert(self, attempt: Attempt) -> None:
        self._unlist(attempt.job_id)
        columns = "job_id, number, phase, plan, request, created_s, submitter, state, outcome"
        sent = (json.dumps(attempt.plan.dump()), json.dumps(attempt.request), attempt.created_s)
        state = (json.dumps(attempt.submitter), attempt.state.state, json.dumps(asdict(attempt.state)))
        sql = f"INSERT INTO attempts ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self.database.execute(sql, (attempt.job_id, attempt.number, attempt.phase, *sent, *state))

    def _update(self, attempt: Attempt, only: str = "", state: State | None = None, **columns: Any) -> bool:
        """Write the state and the columns if the SQL condition `only` holds; return whether a row changed."""
        if state is not None:
            columns |= {"state": state.state, "outcome": json.dumps(asdict(state))}
        names = ", ".join(f"{name} = ?" for name in columns)
        sql = f"UPDATE attempts SET {names} WHERE job_id = ? AND number = ? {only} RETURNING 1"
        if changed := self.database.execute(sql, (*columns.values(), attempt.job_id, attempt.number)):
            self._unlist(attempt.job_id)
        return bool(changed)

    def _exchange_config(self, attempt: Attempt) -> None:
        """Give the job the config and the code before the attempt, if kept with the attempt, and keep the job's there.

        Otherwise a repeated `resume --budget +50USD` would add to the budget of an attempt that was never sent.
        """
        job = self.find(attempt.job_id)
        who = job.attempt.submitter
        if job.attempt.number == attempt.number and (before := who.get("before")):
            backend = before["config"].get("backend", job.backend)
            values = (json.dumps(before["config"]), json.dumps(before["bundle"]), backend, job.id)
            self.database.execute("UPDATE jobs SET config = ?, bundle = ?, backend = ? WHERE id = ?", values)
            kept = {"config": job.config, "bundle": job.bundle, "settings": who["settings"]}
            self._update(attempt, submitter=json.dumps({**who, "settings": before["settings"], "before": kept}))

    def _unlist(self, job_id: str) -> None:
        """Drop the job's line in a list (jobs/listing.py), because the job changes."""
        self.database.execute("DELETE FROM listed WHERE seq = (SELECT seq FROM jobs WHERE id = ?)", (job_id,))

    def _select(self, rest: str, *values: Any) -> list[Job]:
        return [_job(row) for row in self.database.execute(f"{_JOB_WITH_LAST_ATTEMPT} {rest}", values)]


def _same_try(attempt: Attempt) -> str:
    """Return the SQL condition that no try to send the attempt has begun since it was read."""
    return f"AND COALESCE(json_extract(submitter, '$.try'), 0) = {int(attempt.submitter.get('try', 0))}"


def this_process() -> dict[str, Any]:
    """Return the identity of this process for a later process, on this or a different machine."""
    return {"host": platform.node(), "pid": os.getpid(), "stamp": processes.stamp(os.getpid())}


def submitter_lives(attempt: Attempt) -> bool:
    """Return whether the process that journalled the attempt may still be sending the attempt.

    A process on a different machine (a home folder on a network) counts as alive for ten minutes.
    """
    who = attempt.submitter
    if who.get("host") != platform.node():
        return abs(time.time() - attempt.created_s) < 600  # further ahead is of a clock that was set back since
    return processes.alive(who["pid"], who["stamp"])


@lru_cache(maxsize=256)
def _of_line(text: str) -> tuple[dict[str, Any], StoredConfig]:
    """Return the values of a line's config, which many jobs share."""
    return (config := object_of(text)), StoredConfig.load(config)


def _job(row: sqlite3.Row, *, is_line: bool = False) -> Job:
    attempt = attempt_of(row, row["id"])
    try:
        config, asked = _of_line(row["config"]) if is_line else (object_of(row["config"]), None)
        bundle, created_s = object_of(row["bundle"]), float(row["created_s"])
        if (limit := (config.get("budget") or {}).get("limit")) is not None:
            parse_money(limit)
    except (ValueError, TypeError, AttributeError) as error:
        config, bundle, created_s, attempt = {}, {}, attempt.created_s, damaged(row, row["id"], error)
        asked = None
    job = Job(
        id=row["id"],
        name=row["name"],
        backend=row["backend"],
        created_s=created_s,
        config=config,
        config_file=row["config_file"],
        bundle=bundle,
        idempotency_key=row["idempotency_key"],
        seq=row["seq"],
        attempt=attempt,
    )
    if asked is not None:
        vars(job)["asked"] = asked  # where the cached property keeps it
    return job
