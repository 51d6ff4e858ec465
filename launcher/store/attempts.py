"""A stored row becomes an attempt."""

from __future__ import annotations

import json
import sqlite3
from functools import lru_cache
from typing import Any, get_args

from ..job import Attempt, JobState, State
from ..plan import Plan
from ..text import sanitize
from . import progress

# The outcome without the error, whose traceback may be long.
NO_ERROR = "CASE WHEN json_valid(outcome) THEN json_remove(outcome, '$.error') ELSE outcome END AS outcome"
# The columns of an attempt `a` that its cost needs, under the names that `attempt_of` reads.
COST_COLUMNS = (
    f"a.number, a.phase, a.plan, a.created_s AS sent_s, {NO_ERROR}, a.unreachable_since_s, '{{}}' AS request,"
    " '{}' AS submitter, '{}' AS progress, NULL AS ref"
)

_STATES, _NUMBERS = get_args(JobState), {float, int, bool, type(None)}


def attempt_of(row: sqlite3.Row, job_id: str) -> Attempt:
    """Return the attempt; for a damaged row a placeholder with the readable fields, so that lists still work."""
    try:
        outcome, known = object_of(row["outcome"]), State.__dataclass_fields__
        # A newer version adds to all fields; an unknown name in the place of a known name is damage, a TypeError.
        state = State(**({name: outcome[name] for name in known} if outcome.keys() >= known.keys() else outcome))
        found = Attempt(
            job_id=job_id,
            number=row["number"],
            phase=row["phase"],
            plan=_plan_of(row["plan"]),
            request=object_of(row["request"]),
            created_s=float(row["sent_s"]),
            submitter=object_of(row["submitter"]),
            ref=object_of(row["ref"]) if row["ref"] else None,
            state=sanitize.state_of(state),
            progress=progress.sound(object_of(row["progress"])),
            unreachable_since_s=row["unreachable_since_s"],
        )
        parts = [found.progress.get(key) or {} for key in ("metrics", "cursor", "gpus")]
        figures = [figure for rank in parts[2].values() for figure in rank.values()]
        times = (state.started_s, state.ended_s, found.unreachable_since_s, *figures)
        if not {*map(type, parts)} <= {dict}:
            raise ValueError("its progress is not whole")
        if state.state not in _STATES or not {*map(type, times)} <= _NUMBERS:
            raise ValueError(f"its state is {state.state!r}")
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        return damaged(row, job_id, error)
    return found


def damaged(row: sqlite3.Row, job_id: str, error: Exception) -> Attempt:
    """Return the placeholder of a damaged row."""
    detail = f"its row in the registry is damaged, so whether it runs is not known here: {error}"
    created_s = row["sent_s"] if isinstance(row["sent_s"], float | int) else 0.0
    plan = Plan.load({"instances": 0, "nproc_per_node": 0, "ranks": 0, "cap_s": 0})
    return Attempt(job_id, row["number"], "damaged", plan, {}, created_s, {}, None, State("failed", detail=detail))


@lru_cache(maxsize=256)
def _plan_of(text: str) -> Plan:
    """Return the stored plan; many jobs have the same plan."""
    return Plan.load(object_of(text))


def object_of(text: str) -> dict[str, Any]:
    """Return a stored JSON object. Raises ValueError."""
    found: Any = {} if text == "{}" else json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    return found
