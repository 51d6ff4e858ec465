"""The next candidate of a job that got no machines (`capacity` in the config): the decision, and its journal.

A try that was refused, and created nothing, keeps the attempt's number: the attempt goes back in line for the next
candidate. A try that was accepted ends with its own state; the transaction that stores the end also journals the next
attempt, in line, which takes over the reservation. jobs/queue.py sends the candidates in line when they are due.

An attempt's `submitter` has the number of its entry in `capacity.try` (`candidate`), the `round`, the `places` of all
candidates in the order of trying, and the refused `tries` under the attempt's number.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import backend as backends
from ..errors import CapacityError, CloudtrainError, UnreachableError
from ..job import Attempt, Job, State, no_machines
from ..store import ledger, tries
from ..store.registry import Registry
from ..text.terminal import say
from ..text.units import moment, stored_s
from . import listing

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..planning.prepare import Prepared

ROUND_S, MOST_ROUND_S = 30.0, 600.0  # the pause after the first round doubles with each round
JITTER = 0.2  # of a pause, up and down: jobs of one submit must not ask together
# A place is left out without quota, and without machines, where the time doubles with each try in a row.
QUOTA_S, NO_MACHINES_S, MOST_BLOCK_S = 3600.0, 600.0, 7200.0
_MOST_TRIES, _OF_A_TRY = 100, ("gave_up_s", "before", "tries", "try")  # refused tries that a row keeps; its own keys
# Keys of the backends' blocks.
_ACCOUNT = ("account", "project", "subscription", "workspace", "profile", "login", "hosts")
_POOL = ("compute", "partition", "persistent_resource", "reservation", "training_plan", "scheduling")


class NextTry(NamedTuple):
    """The candidate to try next; the earliest is the smallest."""

    due_s: float
    """The earliest time of its send."""
    round: int
    position: int
    """Its place in the order of trying."""


def choose(
    position: int, number: int, free_s: Sequence[float], rounds: int | None, until_s: float | None, now_s: float
) -> NextTry | None:
    """Return the try after candidate `position` of round `number`, None if the limits end the search.

    `position` is -1 before the first try. `free_s`: for each candidate, when its place may be asked again. The rest of
    the round follows when it may be asked; a candidate that must wait for longer than the next round is left out of
    this one. Pure but for the jitter.
    """
    found = min(
        (NextTry(max(now_s, free_s[each]), number, each) for each in range(position + 1, len(free_s))), default=None
    )
    if position >= 0:
        pause_s = min(ROUND_S * 2.0 ** min(number - 1, 9), MOST_ROUND_S) * random.uniform(1 - JITTER, 1 + JITTER)
        anew = min(NextTry(max(now_s + pause_s, each_s), number + 1, each) for each, each_s in enumerate(free_s))
        found = anew if found is None else min(found, anew)
    assert found is not None
    is_over = (rounds is not None and found.round > rounds) or (until_s is not None and found.due_s > until_s)
    return None if is_over or math.isinf(found.due_s) else found  # no place can read the job's checkpoints


def is_on(attempt: Attempt) -> bool:
    """Return whether the attempt is a try of several; not after its user has stopped the job."""
    return bool(attempt.submitter.get("places")) and not attempt.submitter.get("stopped")


def begin(
    registry: Registry, prepared: Prepared, before: Attempt | None = None
) -> tuple[Prepared, dict[str, Any], dict[str, Any]]:
    """Return the candidate to begin with, its part of `submitter`, and phase and state if no place may be asked now.

    If the attempt `before` had machines, the job begins with the prepared candidate, even if its place is blocked.
    """
    from ..planning.prepared import store_of

    if not prepared.candidates:
        return prepared, {}, {}
    places = [[each.candidate, *_place(each)] for each in prepared.candidates]
    stores = [store_of(each) for each in prepared.candidates]
    course = {"places": places, "stores": stores}
    _leave_out_short(registry, prepared.candidates, places)
    job = None if before is None else registry.find(before.job_id)
    found = choose(-1, 1, _reached_s(registry, job, course), None, None, now_s := time.time())
    if before is not None and (before.state.started_s is not None or found is None):
        found = NextTry(now_s, 1, [each.candidate for each in prepared.candidates].index(prepared.candidate))
    assert found is not None
    plan = replace(prepared.candidates[found.position].plan, hold_micro=prepared.plan.hold_micro)
    first = replace(prepared.candidates[found.position], plan=plan, settings=prepared.settings)
    worst_micro = max(each.plan.worst_case_micro or 0 for each in prepared.candidates)
    course |= {"candidate": first.candidate, "round": 1, "queued": found.due_s > now_s}
    course |= {"machines": [each.config.resources.instance_type for each in prepared.candidates], "since_s": now_s}
    course |= {"late_micro": plan.spent_micro + max(0, (plan.hold_micro or 0) - worst_micro)}  # or was spent before
    if found.due_s <= now_s:
        return first, course, {}
    return first, course, {"phase": "queued", "state": _in_line("no place may be asked yet", places, found)}


def _leave_out_short(registry: Registry, found: Sequence[Prepared], places: Sequence[Sequence[Any]]) -> None:
    """Leave out the places whose quota is known to be too small; none if that are all."""

    def ask(each: Prepared) -> str:
        return each.backend.short_quota(each.config) if isinstance(each.backend, backends.ListsTypes) else ""

    with ThreadPoolExecutor(len(found)) as pool:  # AWS lists all quotas of a region, page by page
        short = list(pool.map(ask, found))
    with registry.database.transaction():
        for place, words in zip(places, short, strict=True):
            if words and not all(short):
                _block(registry, place, is_quota=True)
                say(f"{tries.name_of(place)} is left out for an hour: {words}")


def same_place(prepared: Prepared, attempt: Attempt) -> Prepared:
    """Return the next attempt's candidate at the place where the attempt has run; else the prepared one."""
    if attempt.state.started_s is None or "places" not in attempt.submitter:
        return prepared
    found = (each for each in prepared.candidates if _place(each) == _place_of(attempt)[1:])
    return replace(next(found, prepared), candidates=prepared.candidates)


def under_candidate(attempt: Attempt, config: JobConfig) -> tuple[JobConfig, int]:
    """Return the config under the candidate of a claimed attempt alone, and the part of its budget for a late start."""
    known = attempt.submitter
    if attempt.phase != "intent" or not is_on(attempt):
        return config, 0
    from ..planning.candidates import candidates

    config, machine = candidates(config)[known["candidate"]], known["machines"][_position_of(attempt)]  # or a list
    resources = config.resources.model_copy(update={"instance_type": machine})
    return config.model_copy(update={"resources": resources, "capacity": None}), int(known["late_micro"])


def refused(registry: Registry, job: Job, attempt: Attempt, error: CloudtrainError) -> bool:
    """Put the attempt, which created nothing, in line for the next candidate; return False at the end of the search.

    A platform that does not answer is asked again, if the job was in line before.
    """
    if not isinstance(error, CapacityError):
        return stays(registry, attempt, error)
    is_quota = bool(re.search(r"quota|limit", error.message, re.IGNORECASE))
    if is_quota and _without_type(registry, attempt, error.message):
        return True
    with registry.database.transaction():
        _block(registry, _place_of(attempt), is_quota=is_quota)
        return _to_next(registry, job, attempt, error.message)


def stays(registry: Registry, attempt: Attempt, error: BaseException) -> bool:
    """Put the attempt, which created nothing, back in line after no answer or the command's end; else return False."""
    is_silent = isinstance(error, UnreachableError)
    if (isinstance(error, Exception) and not is_silent) or not (is_on(attempt) and attempt.submitter.get("queued")):
        return False
    again = NextTry(time.time() + ROUND_S * is_silent, attempt.submitter["round"], _position_of(attempt))
    why = error.message if isinstance(error, UnreachableError) else "the command was ended"
    registry.mark_queued(attempt, _in_line(why, attempt.submitter["places"], again).queue or {})
    return True


def is_due(registry: Registry, job: Job) -> bool:
    """Return whether to send the candidate in line now.

    A candidate whose place another job has found without machines meanwhile gives way to the next. After `until` the
    search ends.
    """
    with registry.database.transaction():
        attempt, now_s = registry.attempt(job, job.attempt.number), time.time()
        if attempt.phase != "queued" or not is_on(attempt):
            return False
        _, until_s = _limits(job, attempt)
        is_over = until_s is not None and now_s > until_s
        wait_s = ((attempt.state.queue or {}).get("start_s") or 0.0) - now_s
        if not is_over and 0.0 < wait_s <= MOST_BLOCK_S:  # the clock may be set back
            return False
        if not is_over and _free_s(registry, [_place_of(attempt)])[0] <= now_s:
            return True
        if is_over or not _to_next(registry, job, attempt, "another job found no machines there"):
            why = f"no machines within {'limits.max_wait' if job.asked.waits else 'capacity.limits'}"
            listing.end_unsent(registry, attempt, no_machines(why, detail=why, ended_s=now_s))
            return False
    return is_due(registry, job)


def ended(registry: Registry, job: Job, attempt: Attempt) -> None:
    """Journal the next try of the attempt that has ended; to be called in the transaction that stores the end.

    After a lack of machines the next candidate follows. A spot machine that was taken is asked for once more first.
    """
    reason, entry, number = attempt.state.reason, attempt.submitter.get("candidate"), attempt.submitter.get("round", 1)
    if not is_on(attempt) or not (reason == "no_machines" or (reason == "preempted" and reason in job.asked.retry_on)):
        return
    places, position = attempt.submitter["places"], _position_of(attempt)
    found: NextTry | None = NextTry(time.time(), number, position)
    if reason == "no_machines":
        _block(registry, _place_of(attempt), is_quota=False)
    before = [each for each in registry.attempts(job) if each.number == attempt.number - 1]
    is_repeat = any(each.state.reason == "preempted" and each.submitter.get("candidate") == entry for each in before)
    if reason == "no_machines" or is_repeat:
        found = choose(
            position, number, _reached_s(registry, job, attempt.submitter), *_limits(job, attempt), time.time()
        )
    if found is None:
        return
    course = {key: value for key, value in attempt.submitter.items() if key not in _OF_A_TRY}
    course |= {"candidate": places[found.position][0], "round": found.round, "queued": True}
    if reason == "preempted" and job.asked.waits:
        course["since_s"] = time.time()  # `max_wait` counts no time with machines
    state = _in_line(tries.why(attempt.state), places, found)
    later = replace(attempt, number=attempt.number + 1, phase="queued", submitter=course, ref=None, state=state)
    registry.add_attempt(replace(later, created_s=time.time()), registry.find(job.id).config, job.bundle)
    ledger.move(registry.database, job.id, attempt.number, later.number, time.time())
    say(f"{job.id}: {tries.name_of(places[position])}: {state.detail}")


def began(registry: Registry, attempt: Attempt) -> None:
    """Free the place of an attempt that has got machines, and shrink the reservation to the attempt's own worst case.

    The reservation stays if the wait was given up: machines that came too late are paid, and the next try is too.
    """
    if is_on(attempt) and "gave_up_s" not in attempt.submitter:
        registry.database.execute("DELETE FROM blocked WHERE place = ?", (json.dumps(_place_of(attempt)[1:]),))
        if attempt.plan.worst_case_micro is not None:
            ledger.shrink(registry.database, attempt.job_id, attempt.number, attempt.plan.worst_case_micro)


def is_past(duration: Any, since_s: float) -> bool:
    """Return whether a duration of a stored config is over; False if not set."""
    most_s = stored_s(duration)
    return most_s is not None and time.time() - since_s > most_s


def _to_next(registry: Registry, job: Job, attempt: Attempt, why: str) -> bool:
    known, places = attempt.submitter, attempt.submitter["places"]
    position, number = _position_of(attempt), int(known.get("round", 1))
    found = choose(position, number, _reached_s(registry, job, known), *_limits(job, attempt), time.time())
    if found is None:
        return False
    refusal = {"candidate": known.get("candidate"), "round": number, "at_s": time.time(), "reason": why}
    course = {"try": known.get("try", 0) + 1, "tries": [*known.get("tries", ()), refusal][-_MOST_TRIES:]}
    course |= {"candidate": places[found.position][0], "round": found.round, "queued": True}
    state = _in_line(why, places, found)
    registry.mark_queued(attempt, state.queue or {}, **course)
    say(f"{job.id}: {tries.name_of(places[position])}: {state.detail}")
    return True


def _without_type(registry: Registry, attempt: Attempt, why: str) -> bool:
    """Try a list of types again at once without the type whose quota is short; return False for no such type."""
    known, position = attempt.submitter, _position_of(attempt)
    machines, places = [*known["machines"]], [[*place] for place in known["places"]]
    types = (machines[position] or "").split(",")
    rest = [each for each in types if each not in re.findall(r"[\w.-]+", why)]
    if not 0 < len(rest) < len(types):
        return False
    machines[position] = ",".join(rest)
    places[position][4] = places[position][4].replace(",".join(types), machines[position])
    queue = _in_line(why, places, NextTry(time.time(), known["round"], position)).queue or {}
    course = {"machines": machines, "places": places, "try": known.get("try", 0) + 1, "queued": True}
    registry.mark_queued(attempt, queue, **course)
    return True


def _in_line(why: str, places: Sequence[Sequence[Any]], found: NextTry) -> State:
    name = tries.name_of(places[found.position])
    words = f"{why.rstrip('.')}; next: {name}"
    due = "" if found.due_s <= time.time() else f" at {moment(found.due_s)} UTC"
    queue = {"reason": f"{words}{due}", "start_s": found.due_s, "next": name}
    return State("pending", detail=f"{words}{due}", queue=queue)


def _limits(job: Job, attempt: Attempt) -> tuple[int | None, float | None]:
    """Return the most rounds, and the time of the end of the search; for a job in line only that of its wait."""
    limits = job.asked.capacity.get("limits") or {}
    rounds, most_s = limits.get("rounds"), stored_s(limits.get("until"))
    if rounds is most_s is None:
        rounds = 3
    if job.asked.waits:
        rounds, most_s = None, stored_s(job.asked.max_wait)
    return rounds, None if most_s is None else attempt.submitter.get("since_s", job.created_s) + most_s


def _place(prepared: Prepared) -> list[Any]:
    """Return backend, account, region, machine, and whether on spot: what has machines or not, for all jobs.

    The account has the number of machines: two may be free where four are not.
    """
    from ..planning.prepared import region_of

    config = prepared.config
    block = getattr(config, config.backend, None)
    set_to = [[str(getattr(block, key)) for key in keys if getattr(block, key, None)] for keys in (_ACCOUNT, _POOL)]
    account, pool = map(" ".join, set_to)
    account = f"{account} {prepared.plan.instances}".strip()
    machine = config.resources.instance_type or config.resources.accelerators or prepared.plan.machine
    return [config.backend, account, region_of(prepared) or "", f"{machine} {pool}".strip(), config.resources.spot]


def _position_of(attempt: Attempt) -> int:
    """Return the candidate's place in the order of trying."""
    return [place[0] for place in attempt.submitter["places"]].index(attempt.submitter["candidate"])


def _place_of(attempt: Attempt) -> list[Any]:
    return list(attempt.submitter["places"][_position_of(attempt)])


def _free_s(registry: Registry, places: Sequence[Sequence[Any]]) -> list[float]:
    most_s, sql = time.time() + MOST_BLOCK_S, "SELECT place, until_s FROM blocked WHERE until_s <= ?"
    blocked = dict(map(tuple, registry.database.execute(sql, (most_s,))))  # the clock may be set back
    return [blocked.get(json.dumps(list(place[1:])), 0.0) for place in places]


def _reached_s(registry: Registry, job: Job | None, course: Mapping[str, Any]) -> list[float]:
    """Return `_free_s` of the places, but never for a place that cannot read the job's checkpoints."""
    free_s = _free_s(registry, course["places"])
    saved = None if job is None else tries.saved_store(registry.attempts(job))
    stores = course.get("stores") or [saved] * len(free_s)
    return [each_s if saved in (None, store) else math.inf for each_s, store in zip(free_s, stores, strict=True)]


def _block(registry: Registry, place: Sequence[Any], *, is_quota: bool) -> None:
    """Leave the place out for a time, in all jobs of the home; a try that began before the block changes nothing."""
    now_s, key = time.time(), json.dumps(list(place[1:]))
    rows = registry.database.execute("SELECT until_s, span_s FROM blocked WHERE place = ?", (key,))
    until_s, before_s = rows[0] if rows else (0.0, 0.0)
    if now_s < until_s <= now_s + MOST_BLOCK_S:
        return
    is_in_a_row = now_s < until_s + MOST_BLOCK_S
    span_s = min(max(NO_MACHINES_S, 2 * before_s if is_in_a_row else 0.0), MOST_BLOCK_S)
    values = (key, now_s + QUOTA_S, 0.0) if is_quota else (key, now_s + span_s, span_s)
    registry.database.execute("INSERT OR REPLACE INTO blocked VALUES (?, ?, ?)", values)
