"""The alerts that are due for a job now: its start and restarts, budget thresholds, nearby limits, a stall, its end.

The launcher and the job's own agent decide by the same rules, each by the facts that it knows. The same event has the
same key for both: no event is sent twice. Keys are stored, so a new version must not change a key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeAlias

from ..format import counted, dollars, span
from .facts import JobFacts
from .message import Notice, at_deadline, compose

JOB_EVENTS = ("budget", "deadline", "succeeded", "failed", "stopped")  # which the job's own agent sends
STALLED_S = 120.0  # the shortest time that counts as a stall
STEPS = 10  # and at least the time of STEPS steps
UNREACHABLE_S = 600.0
SURE_PART = 10  # of the time left: an estimate within a tenth of the limit does not correct a forecast
SURE_S, SURE_SHARE = 60.0, 20  # a run's first steps are slow and give no forecast
_LEAD_S, _LEAD_SHARE = 900.0, 10  # before a deadline: a quarter of an hour, or a tenth of a short run

_Due: TypeAlias = tuple[str, str, str, tuple[str, ...]]  # key, event, headline, further events


def standing(facts: JobFacts, now_s: float, origin: str = "launcher") -> list[Notice]:
    """Return all notices that hold for the job now, including notices already reported. `origin`: the sender."""
    rules = (_life, _threshold, _projected, _deadline, _stalled) if facts.is_active else (_threshold, _end)
    due = [each for rule in rules for each in rule(facts, now_s)]
    return [compose(key, event, headline, facts, now_s, also=also, by=origin) for key, event, headline, also in due]


def unsent(notices: list[Notice], keys: Collection[str]) -> list[Notice]:
    """Return the notices not in the reported `keys`; no threshold below a reported one, even after a corrected cost."""
    return [each for each in notices if each.key not in keys and not _is_lower(each.key, keys) and corrects(each, keys)]


def corrects(notice: Notice, keys: Collection[str]) -> bool:
    """Return True unless the notice corrects a forecast that was never reported."""
    kind, _, which = notice.key.partition(":")
    return kind != "within" or f"projected:{which}" in keys


def wanted(notice: Notice, on: Collection[str]) -> bool:
    """Return whether a channel with the events `on` receives the notice; `budget` includes forecasts and deadlines."""
    return not {notice.event, *notice.also}.isdisjoint(on)


def _life(facts: JobFacts, now_s: float) -> Iterator[_Due]:
    """Yield the notices of the attempt's start, restarts and lost contact, and of the move to its candidate."""
    number, restarts, since_s = facts.attempt, facts.restarts, facts.unreachable_since_s
    if facts.moved:
        yield f"moved:{number}:{facts.moves}", "moved", facts.moved, ()
    if facts.state == "running":
        again = f"attempt {number} runs" if number > 1 else "it runs"
        yield f"started:{number}", "started", again, ("restarted",) if number > 1 and not facts.moved else ()
    if restarts:
        headline = f"its ranks were started again ({counted(restarts, 'time')})"
        yield f"restarted:{number}:{restarts}", "restarted", headline, ()
    if since_s is not None and now_s - since_s >= UNREACHABLE_S:
        headline = f"{facts.backend} has not answered for {span(now_s - since_s)}; the job is unaffected"
        yield f"unreachable:{number}:{since_s:.0f}", "unreachable", headline, ()


def _threshold(facts: JobFacts, _now_s: float) -> Iterator[_Due]:
    """Yield the highest budget threshold that the cost has reached; a raised budget has new thresholds.

    After an end at the budget, the last threshold up to 100 % counts as reached, though less is spent: the rest is the
    reserve for the highest prices and bills, and will never be spent.
    """
    limit, spent = facts.limit_micro, facts.spent_micro
    if not limit or spent is None:
        return
    reached = [each for each in facts.alert_at if spent * 100 >= limit * each]
    last = max((each for each in facts.alert_at if each <= 100), default=None)
    if not facts.is_active and facts.reason == "budget" and last is not None and last not in reached:
        rest = "the rest is the reserve for the highest possible prices and bills"
        headline = f"ended at its budget, {dollars(spent)} of {dollars(limit)} spent: {rest}"
        yield f"budget:{last}@{limit}", "budget", headline, ()
    elif reached:
        headline = f"{max(reached)} % of the budget is spent: {dollars(spent)} of {dollars(limit)}"
        if max(reached) >= 100 and facts.is_active and facts.on_limit == "alert":
            headline += "; it runs on (on_limit: alert)"
        yield f"budget:{max(reached)}@{limit}", "budget", headline, ()


def _projected(facts: JobFacts, now_s: float) -> Iterator[_Due]:
    """Yield a forecast that a limit comes before the last step, once reliable, or the correction of a forecast."""
    began_s, finish_s, limit, spent = facts.began_s, facts.finish_at_s, facts.limit_micro or 0, facts.spent_micro or 0
    if facts.hits_limit is None or began_s is None or finish_s is None or 0 < limit <= spent:  # reported as a threshold
        return
    at_s = facts.leaves_at_s or finish_s
    needs = "" if facts.total_micro is None else f", for {dollars(facts.total_micro)} in all"
    done, which = f"done in {span(finish_s - now_s)}", f"{facts.attempt}@{limit}"
    if not facts.hits_limit:
        if finish_s + (finish_s - now_s) / SURE_PART <= at_s:
            headline = f"will finish within its limits, by the newest estimate: {done}{needs}"
            yield f"within:{which}", "projected", headline, ("budget",)
        return
    is_spent, cap_s = bool(limit) and spent * SURE_SHARE >= limit, (facts.cap_at_s or at_s) - began_s
    if not is_spent and now_s - began_s < min(SURE_S, cap_s / SURE_SHARE):
        return
    if facts.is_over_budget or facts.is_short_of_money:
        headline = f"will not finish within {_budget(facts, at_s, now_s)}: {done}{needs}"
    else:
        headline = f"will reach its time limit before it finishes: {done}, and it has {span(at_s - now_s)}"
    yield f"projected:{which}", "projected", headline, ("budget",)


def _deadline(facts: JobFacts, now_s: float) -> Iterator[_Due]:
    """Yield a notice that the job's deadline is near, unless the job will finish before."""
    at_s, began_s, finish_s = facts.leaves_at_s, facts.began_s, facts.finish_at_s
    if at_s is None or began_s is None or (finish_s is not None and finish_s <= at_s):
        return
    if now_s < at_s - min(_LEAD_S, (at_s - began_s) / _LEAD_SHARE):
        return
    when = f"in {span(at_s - now_s)}" if now_s < at_s else "now"
    why = _budget(facts, at_s, now_s) if facts.limit_reason == "budget" else "its time limit"
    leaves = "is stopped" if facts.is_hard else at_deadline(saves=facts.saves)
    yield f"deadline:{facts.attempt}", "deadline", f"{leaves} {when}, because of {why}", ("budget",)


def _stalled(facts: JobFacts, _now_s: float) -> Iterator[_Due]:
    """Yield a notice of a stall: no step for half the hang timeout, and at least for STEPS steps' time."""
    if facts.stalled_s is None or facts.state != "running":
        return
    rest_s, step, last = facts.progress.eta_s, facts.progress.step, facts.progress.max_steps
    step_s = rest_s / (last - step) if rest_s and step is not None and last and last > step else 0.0
    if facts.stalled_s >= max(STALLED_S, facts.hang_s / 2, STEPS * step_s):
        headline = f"no progress for {span(facts.stalled_s)}; it costs money all the same"
        yield f"stalled:{facts.attempt}@{step}", "stalled", headline, ()


def _end(facts: JobFacts, _now_s: float) -> Iterator[_Due]:
    """Yield the end of the attempt; after a preemption the platform may start the attempt again."""
    state, reason, number = facts.state, facts.reason, facts.attempt
    headline = f"{state}{f' ({reason})' if reason else ''}{', resumable' if facts.is_resumable else ''}"
    if state != "succeeded" and number < facts.most_attempts:
        headline += f"; attempt {number} of at most {facts.most_attempts}"
    if message := facts.error.get("message"):
        headline += f": {str(message)[:300]}"
    also = (reason,) if reason in ("preempted", "budget") else ()
    yield f"{'preempted' if reason == 'preempted' else state}:{number}", state, headline, also


def _budget(facts: JobFacts, at_s: float, now_s: float) -> str:
    """Return the budget and its reserve: the part that the job will not have spent at `at_s`, when the job leaves."""
    limit, spent, burn = facts.limit_micro, facts.spent_micro, facts.burn_micro_h
    kept = 0 if limit is None or spent is None else limit - spent - round((burn or 0) * max(0.0, at_s - now_s) / 3600)
    reserve = f", of which {dollars(kept)} is the reserve for the save and for the highest possible bills"
    return f"its budget of {dollars(limit)}{reserve if kept > 0 else ''}"


def _is_lower(key: str, keys: Collection[str]) -> bool:
    """Return whether a higher threshold of the same limit has been reported."""
    percent, limit = _threshold_of(key)
    return bool(percent) and any(_threshold_of(each)[0] > percent for each in keys if _threshold_of(each)[1] == limit)


def _threshold_of(key: str) -> tuple[int, str]:
    kind, _, rest = key.partition(":")
    percent, _, limit = rest.partition("@")
    return (int(percent), limit) if kind == "budget" else (0, "")
