"""What is told of a job: one headline, a few lines for people, and the same as fields for programs.

The launcher and the job's own agent both tell, each of what it knows; what they say looks the same, and the same thing
has the same key, so that it need not be told twice.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.entrypoints.figures import dollars, span

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
_LEAD_S, _LEAD_SHARE = 900.0, 10  # before a deadline: a quarter of an hour, of a short run a tenth


@dataclass(frozen=True)
class Facts:
    """How a job stands; None is what is not known. Money in micro-dollars, times in unix seconds.

    `cap_at_s`: when its platform ends it; `deadline_at_s`: from when on it leaves, and saves before if it `saves`;
    `resume` goes on with it once it has ended, `resume_words` tell how its sum comes about.
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
    checkpoint: str | None = None
    resume: str | None = None
    resume_words: str = ""
    saves: bool = True

    @property
    def stop(self) -> str | None:
        """The command that stops the job, while it runs."""
        return f"cloudtrain stop {self.job}" if self.state in ("pending", "running") else None


@dataclass(frozen=True)
class Notice:
    """Something to tell. `id` is the same at each try, so that a receiver can know a repeat.

    `event` is what asks for it in `notify.on`; `also` what does, too.
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
        """All of it, for people."""
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
    """Return the notice. `origin` says who tells: the launcher or the job."""
    told = hashlib.sha256(f"{facts.job}\n{key}".encode()).hexdigest()[:24]
    title = f"{facts.job}: {_one_line(headline)}"
    left_s = None if facts.cap_at_s is None else max(0.0, round(facts.cap_at_s - now_s, 1))
    fields = {
        "id": told,
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
    return Notice(told, key, event, title, tuple(_lines(facts, now_s)), fields, also)


def budget_key(percent: int, limit_micro: int) -> str:
    """Return what makes a threshold one: a raised budget has thresholds of its own."""
    return f"budget:{percent}@{limit_micro}"


def threshold(
    percents: Sequence[int], spent_micro: int | None, limit_micro: int | None, *, is_its_end: bool = False
) -> tuple[int, str] | None:
    """Return the highest share of the budget that is spent, in per cent, and the headline; None below the first.

    `is_its_end`: the job has ended at its budget. Then the last one up to 100 is told, though less is spent: the rest
    was kept for prices and bills at their worst, so nobody waits for it.
    """
    if not limit_micro or spent_micro is None:
        return None
    reached = [each for each in percents if spent_micro * 100 >= limit_micro * each]
    last = max((each for each in percents if each <= 100), default=None)
    if is_its_end and last is not None and last not in reached:
        of = f"{dollars(spent_micro)} of {dollars(limit_micro)}"
        return last, f"ended at its budget, {of} spent: the rest is the reserve for prices and bills at their worst"
    if not reached:
        return None
    return max(reached), f"{max(reached)} % of the budget is spent: {dollars(spent_micro)} of {dollars(limit_micro)}"


def leaving(facts: Facts, at_s: float, began_s: float, now_s: float, *, is_money: bool, is_hard: bool) -> str | None:
    """Return the headline of a job that will soon leave, at `at_s`; None long before, or if the job finishes before.

    `is_hard`: the job is ended without a save.
    """
    done_s = facts.finish_at_s
    if now_s < at_s - min(_LEAD_S, (at_s - began_s) / _LEAD_SHARE) or (done_s is not None and done_s <= at_s):
        return None
    when = f"in {span(at_s - now_s)}" if now_s < at_s else "now"
    why = budget_words(facts, at_s, now_s) if is_money else "its time limit"
    return f"{'is stopped' if is_hard else at_deadline(saves=facts.saves)} {when}, because of {why}"


def budget_words(facts: Facts, at_s: float, now_s: float) -> str:
    """Return the budget and its reserve: the part that the job will not have spent when it leaves, at `at_s`."""
    limit, spent, burn = facts.limit_micro, facts.spent_micro, facts.burn_micro_h
    kept = 0 if limit is None or spent is None else limit - spent - round((burn or 0) * max(0.0, at_s - now_s) / 3600)
    reserve = f", of which {dollars(kept)} is the reserve for the save and for bills at their worst" if kept > 0 else ""
    return f"its budget of {dollars(limit)}{reserve}"


def at_deadline(*, saves: bool) -> str:
    """Return what a job does at its deadline: a script gets the signal, and may save nothing."""
    return "saves and leaves" if saves else "gets SIGTERM"


def deadline_key(attempt: int) -> str:
    """Return what makes the warning of an attempt's deadline one."""
    return f"deadline:{attempt}"


def end_key(state: str, reason: str | None, attempt: int) -> str:
    """Return what makes an attempt's end one; where its machines were taken, its platform may begin it again."""
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
        at = facts.checkpoint or (
            f"step {facts.checkpoint_step}" if facts.checkpoint_step is not None else "none known"
        )
        lines.append(f"checkpoint  {_one_line(at)}")
    if facts.stop:
        lines.append(f"stop it     {facts.stop}")
    if facts.resume:
        is_over = facts.state in ("succeeded", "failed", "stopped")
        lines.append(f"go on with  {facts.resume}" if is_over else f"go on       after it has stopped: {facts.resume}")
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
    """Return the text without what would begin a line of its own, or steer a terminal."""
    return "".join(each if each.isprintable() else " " for each in text).strip()
