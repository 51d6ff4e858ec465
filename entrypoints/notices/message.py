"""The content of a notification: one headline, a few lines for people, and the same facts as fields for programs.

The launcher and the job's own agent both notify, each with the known facts. Both use the same form, and the same key
for the same event: no event is sent twice.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.entrypoints.format import dollars, span

__all__ = [
    "Facts",
    "Notice",
    "at_deadline",
    "budget_key",
    "budget_words",
    "compose",
    "deadline_key",
    "end_key",
    "leaving",
    "threshold",
]

_MICRO = 1_000_000
_LEAD_S, _LEAD_SHARE = 900.0, 10  # before a deadline: a quarter of an hour, or a tenth of a short run


@dataclass(frozen=True)
class Facts:
    """The state of a job; None means unknown. Money in micro-dollars, times in unix seconds.

    `cap_at_s`: when the platform ends the job; `deadline_at_s`: when the job begins to leave, after a save if it
    `saves`; `saved`: a checkpoint is known, perhaps without a step; `resume`: the command that continues the ended
    job, `resume_words`: how the command's sum is composed.
    """

    job: str
    backend: str
    attempt: int
    state: str = "running"
    reason: str | None = None
    spent_micro: int | None = None
    limit_micro: int | None = None
    burn_micro_h: int | None = None
    total_micro: int | None = None
    cap_at_s: float | None = None
    deadline_at_s: float | None = None
    finish_at_s: float | None = None
    step: int | None = None
    max_steps: int | None = None
    checkpoint_step: int | None = None
    saved: bool = False
    resume: str | None = None
    resume_words: str = ""
    saves: bool = True

    @property
    def stop(self) -> str | None:
        """The command that stops the job, while the job runs."""
        return f"cloudtrain stop {self.job}" if self.state in ("pending", "running") else None


@dataclass(frozen=True)
class Notice:
    """A notification. `id` is the same at each try, so that a receiver can recognize a repeat.

    `event` is the name in `notify.on` that requests the notification; `also` holds further names.
    """

    id: str
    key: str
    event: str
    title: str
    lines: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole notification, for people."""
        return "\n".join((self.title, *(f"  {line}" for line in self.lines)))


def compose(
    key: str,
    event: str,
    headline: str,
    facts: Facts,
    now_s: float,
    *,
    also: tuple[str, ...] = (),
    origin: str = "launcher",
) -> Notice:
    """Return the notice. `origin` is the sender: launcher or job."""
    digest = hashlib.sha256(f"{facts.job}\n{key}".encode()).hexdigest()[:24]
    title = f"{facts.job}: {_one_line(headline)}"
    left_s = None if facts.cap_at_s is None else max(0.0, round(facts.cap_at_s - now_s, 1))
    fields = {
        "id": digest,
        "event": event,
        "key": key,
        "job": facts.job,
        "backend": facts.backend,
        "attempt": facts.attempt,
        "state": facts.state,
        "reason": facts.reason,
        "title": title,
        "spend_usd": _dollars(facts.spent_micro),
        "limit_usd": _dollars(facts.limit_micro),
        "burn_usd_h": _dollars(facts.burn_micro_h),
        "total_usd": _dollars(facts.total_micro),
        "left_s": left_s,
        "cap_at_s": facts.cap_at_s,
        "deadline_at_s": facts.deadline_at_s,
        "finish_at_s": facts.finish_at_s,
        "step": facts.step,
        "max_steps": facts.max_steps,
        "checkpoint_step": facts.checkpoint_step,
        "resume": facts.resume,
        "resume_words": facts.resume_words or None,
        "stop": facts.stop,
        "time_s": round(now_s, 3),
        "from": origin,
    }
    return Notice(digest, key, event, title, tuple(_lines(facts, now_s)), fields, also)


def budget_key(percent: int, limit_micro: int) -> str:
    """Return the key of a threshold; a raised budget has new thresholds."""
    return f"budget:{percent}@{limit_micro}"


def threshold(
    percents: Sequence[int], spent_micro: int | None, limit_micro: int | None, *, is_its_end: bool = False
) -> tuple[int, str] | None:
    """Return the highest threshold reached, in per cent of the budget, and the headline; None below the first.

    `is_its_end`: the job has ended at its budget. Then the last threshold up to 100 counts as reached, though less is
    spent: the rest is the reserve for the highest prices and bills, and will never be spent.
    """
    if not limit_micro or spent_micro is None:
        return None
    reached = [each for each in percents if spent_micro * 100 >= limit_micro * each]
    last = max((each for each in percents if each <= 100), default=None)
    if is_its_end and last is not None and last not in reached:
        rest = "the rest is the reserve for the highest possible prices and bills"
        return last, f"ended at its budget, {dollars(spent_micro)} of {dollars(limit_micro)} spent: {rest}"
    if not reached:
        return None
    return max(reached), f"{max(reached)} % of the budget is spent: {dollars(spent_micro)} of {dollars(limit_micro)}"


def leaving(facts: Facts, at_s: float, began_s: float, now_s: float, *, is_money: bool, is_hard: bool) -> str | None:
    """Return the headline of a job that leaves at `at_s`; None long before, or if the job will finish before.

    `is_hard`: the job is ended without a save.
    """
    done_s = facts.finish_at_s
    if now_s < at_s - min(_LEAD_S, (at_s - began_s) / _LEAD_SHARE) or (done_s is not None and done_s <= at_s):
        return None
    when = f"in {span(at_s - now_s)}" if now_s < at_s else "now"
    why = budget_words(facts, at_s, now_s) if is_money else "its time limit"
    return f"{'is stopped' if is_hard else at_deadline(saves=facts.saves)} {when}, because of {why}"


def budget_words(facts: Facts, at_s: float, now_s: float) -> str:
    """Return the budget and its reserve: the part that the job will not have spent at `at_s`, when the job leaves."""
    limit, spent, burn = facts.limit_micro, facts.spent_micro, facts.burn_micro_h
    kept = 0 if limit is None or spent is None else limit - spent - round((burn or 0) * max(0.0, at_s - now_s) / 3600)
    reserve = f", of which {dollars(kept)} is the reserve for the save and for the highest possible bills"
    return f"its budget of {dollars(limit)}{reserve if kept > 0 else ''}"


def at_deadline(*, saves: bool) -> str:
    """Return what a job does at its deadline: a script gets the signal, and may save nothing."""
    return "saves and leaves" if saves else "gets SIGTERM"


def deadline_key(attempt: int) -> str:
    """Return the key of the warning before an attempt's deadline."""
    return f"deadline:{attempt}"


def end_key(state: str, reason: str | None, attempt: int) -> str:
    """Return the key of an attempt's end; after a preemption the platform may start the attempt again."""
    return f"{'preempted' if reason == 'preempted' else state}:{attempt}"


def _lines(facts: Facts, now_s: float) -> list[str]:
    lines = [_money(facts)]
    if facts.cap_at_s is not None and facts.state in ("pending", "running", "stopping"):
        lines.append(f"time left   {_time_left(facts, now_s)}")
    if facts.step is not None:
        of = f"/{facts.max_steps}" if facts.max_steps else ""
        done = "" if facts.finish_at_s is None else f", done in {span(facts.finish_at_s - now_s)}"
        cost = f" for {dollars(facts.total_micro)} in all" if done and facts.total_micro else ""
        lines.append(f"progress    step {facts.step}{of}{done}{cost}")
    if facts.state != "succeeded":
        at = "saved, step not reported" if facts.saved else "no checkpoint reported"
        lines.append(f"checkpoint  {at if facts.checkpoint_step is None else f'step {facts.checkpoint_step}'}")
    if facts.stop:
        lines.append(f"stop it     {facts.stop}")
    if facts.resume:
        is_over = facts.state in ("succeeded", "failed", "stopped")
        lines.append(f"resume with {facts.resume}" if is_over else f"resume      after it has stopped: {facts.resume}")
    if facts.resume_words:
        lines.append(f"            ({facts.resume_words})")
    return lines


def _money(facts: Facts) -> str:
    spent = dollars(facts.spent_micro)
    if facts.limit_micro:
        spent += f" of {dollars(facts.limit_micro)}"
        if facts.spent_micro is not None:
            spent += f" ({facts.spent_micro * 100 // facts.limit_micro} %)"
    burn = f", {dollars(facts.burn_micro_h)} an hour" if facts.burn_micro_h else ""
    return f"spent       {spent}{burn}"


def _time_left(facts: Facts, now_s: float) -> str:
    assert facts.cap_at_s is not None
    text = f"{span(facts.cap_at_s - now_s)}, until {_clock(facts.cap_at_s)}"
    if facts.deadline_at_s is not None:
        text += f"; it {at_deadline(saves=facts.saves)} {'from' if facts.saves else 'at'} {_clock(facts.deadline_at_s)}"
        text += " on" if facts.saves else ""
    return text


def _clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))


def _dollars(micro: int | None) -> float | None:
    return None if micro is None else round(micro / _MICRO, 6)


def _one_line(text: str) -> str:
    """Return the text as one line, without characters that control a terminal."""
    return "".join(each if each.isprintable() else " " for each in text).strip()
