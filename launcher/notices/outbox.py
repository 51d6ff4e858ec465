"""A transactional outbox with leases: a follower claims a notice for a limited time and marks the delivery.

If a follower dies with a claim, the lease expires and a second follower sends the notice. So a notice is sent twice
only if a follower dies between delivery and mark, and at most once for each dead follower.
"""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass

from cloudtrain.entrypoints.notices.message import LIMIT_S, Notice
from cloudtrain.entrypoints.notices.rules import unsent

from ..store.database import Database

LEASE_S = LIMIT_S + 12.0  # longer than any delivery attempt, including the mark on a busy machine
LONGEST_S = 600.0  # no lease, pause or hold time is longer: a time further ahead is of a clock that was set back since
MOST_TRIES = 40  # about two and a half hours with back-off
TERMINAL = "terminal"
_ONE = "WHERE job_id = ? AND channel = ? AND key = ?"


@dataclass(frozen=True)
class Claim:
    """The result of a claim: `claimed`, `told` already, `given_up`, or `later` (not before `next_s`)."""

    verdict: str
    tries: int = 0
    next_s: float = 0.0


@dataclass(frozen=True)
class Sent:
    """A delivered notice: its key, the time of the first delivery, and the kinds of channels."""

    key: str
    told_s: float
    channels: tuple[str, ...]


def claim(
    database: Database, job_id: str, channel: str, notice: Notice, claimer: str, now_s: float, hold_s: float = 0.0
) -> Claim:
    """Claim the right to send the notice. `hold_s`: how long from its due time the job itself may send the notice."""
    with database.transaction():
        database.execute(
            "INSERT OR IGNORE INTO notices (job_id, channel, key, due_s) VALUES (?, ?, ?, ?)",
            (job_id, channel, notice.key, now_s),
        )
        if not unsent([notice], delivered_keys(database, job_id, channel)):
            return Claim("sent")
        where = (job_id, channel, notice.key)
        row = database.execute(f"SELECT * FROM notices {_ONE}", where)[0]
        next_s = max(row["lease_s"], row["next_s"], row["due_s"] + hold_s)
        if now_s < next_s < now_s + LONGEST_S:
            return Claim("later", row["tries"], next_s)
        if row["tries"] >= MOST_TRIES:
            return Claim("given_up", row["tries"])
        values = (now_s + LEASE_S, claimer, *where)
        database.execute(f"UPDATE notices SET lease_s = ?, claimer = ?, tries = tries + 1 {_ONE}", values)
        return Claim("claimed", row["tries"] + 1)


def mark_sent(database: Database, job_id: str, channel: str, notice: Notice, now_s: float) -> None:
    """Store the delivery; lower thresholds of the same budget count as delivered too."""
    with database.transaction():
        database.execute(
            "INSERT INTO notices (job_id, channel, key, due_s, told_s) VALUES (?1, ?2, ?3, ?4, ?4)"
            " ON CONFLICT DO UPDATE SET told_s = COALESCE(told_s, ?4), lease_s = 0, error = ''",
            (job_id, channel, notice.key, now_s),
        )
        known = delivered_keys(database, job_id, channel)
        for row in database.execute(
            "SELECT key FROM notices WHERE job_id = ? AND channel = ? AND told_s IS NULL", (job_id, channel)
        ):
            if not unsent([Notice("", row["key"], "", "")], known):
                database.execute(f"UPDATE notices SET told_s = ? {_ONE}", (now_s, job_id, channel, row["key"]))


def mark_failed(database: Database, key: tuple[str, str, str], claimer: str, next_s: float, error: str) -> None:
    """Store the error of a failed delivery, and the time of the next attempt; no attempt follows an infinite time."""
    tries, next_s = (MOST_TRIES, 0.0) if next_s == math.inf else (0, next_s)
    database.execute(
        "UPDATE notices SET lease_s = 0, tries = MAX(tries, ?), next_s = ?, error = ?"
        f" {_ONE} AND claimer = ? AND told_s IS NULL",
        (tries, next_s, error, *key, claimer),
    )


def delivered_keys(database: Database, job_id: str, channel: str) -> set[str]:
    """Return the keys of the notices that the channel has received about the job."""
    rows = database.execute(
        "SELECT key FROM notices WHERE job_id = ? AND channel = ? AND told_s IS NOT NULL", (job_id, channel)
    )
    return {row["key"] for row in rows}


def sent(database: Database, job_id: str) -> list[Sent]:
    """Return the notices delivered about the job, the first delivery first."""
    found: dict[str, list[sqlite3.Row]] = {}
    rows = database.execute(
        "SELECT key, channel, told_s FROM notices WHERE job_id = ? AND told_s IS NOT NULL ORDER BY told_s, channel",
        (job_id,),
    )
    for row in rows:
        found.setdefault(row["key"], []).append(row)
    return [
        Sent(key, some[0]["told_s"], tuple(dict.fromkeys(row["channel"].partition("-")[0] for row in some)))
        for key, some in found.items()
    ]


def pending(database: Database, since_s: float) -> list[str]:
    """Return the jobs with undelivered notices that became due since `since_s`."""
    rows = database.execute(
        "SELECT DISTINCT job_id FROM notices WHERE told_s IS NULL AND due_s >= ? AND tries < ?", (since_s, MOST_TRIES)
    )
    return [row["job_id"] for row in rows]
