"""The content of a notification: a headline, a few lines for people, and the same facts as fields for programs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..format import dollars, span
from .facts import JobFacts
from .resume_cost import ResumeAdvice, resume_advice

LIMIT_S = 24.0  # for a whole try to send, even if bytes still arrive
_MICRO = 1_000_000


@dataclass(frozen=True)
class Notice:
    """A notification. `id` is the same at each try: a receiver can recognize a repeat.

    `event`: the name in `notify.on` that requests the notification; `also`: further names.
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


class DeliveryError(Exception):
    """A message was not delivered. `cure`: what a person can do; `after_s`: the pause that the receiver asks for.

    `may_have_arrived`: the receiver took the message, and no answer came.
    """

    def __init__(
        self, message: str, cure: str = "", *, after_s: float | None = None, may_have_arrived: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.cure = cure
        self.after_s = after_s
        self.may_have_arrived = may_have_arrived


def compose(
    key: str,
    event: str,
    headline: str,
    facts: JobFacts,
    now_s: float,
    *,
    also: Sequence[str] = (),
    by: str = "launcher",
) -> Notice:
    """Return the notice. `by` is the sender: launcher or job."""
    digest = hashlib.sha256(f"{facts.job}\n{key}".encode()).hexdigest()[:24]
    # One line, without characters that control a terminal.
    title = f"{facts.job}: {''.join(each if each.isprintable() else ' ' for each in headline).strip()}"
    left_s = None if facts.cap_at_s is None else max(0.0, round(facts.cap_at_s - now_s, 1))
    resume = resume_advice(facts)
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
        "deadline_at_s": None if facts.is_hard else facts.deadline_at_s,
        "finish_at_s": facts.finish_at_s,
        "step": facts.progress.step,
        "max_steps": facts.progress.max_steps,
        "checkpoint_step": facts.progress.checkpoint_step,
        "resume": resume and resume.command,
        "resume_words": (resume and resume.words) or None,
        "stop": _stop(facts),
        "time_s": round(now_s, 3),
        "from": by,
    }
    return Notice(digest, key, event, title, tuple(_lines(facts, resume, now_s)), fields, tuple(also))


def at_deadline(*, saves: bool) -> str:
    """Return the action of a job at the deadline: a script gets the signal, and may save nothing."""
    return "saves and leaves" if saves else "gets SIGTERM"


def _stop(facts: JobFacts) -> str | None:
    """Return the command to stop the job, while the job runs."""
    return f"cloudtrain stop {facts.job}" if facts.state in ("pending", "running") else None


def _lines(facts: JobFacts, resume: ResumeAdvice | None, now_s: float) -> list[str]:
    lines, progress = [_money(facts)], facts.progress
    if facts.cap_at_s is not None and facts.is_active:
        lines.append(f"time left   {_time_left(facts, now_s)}")
    if progress.step is not None:
        of = f"/{progress.max_steps}" if progress.max_steps else ""
        done = "" if facts.finish_at_s is None else f", done in {span(facts.finish_at_s - now_s)}"
        cost = f" for {dollars(facts.total_micro)} in all" if done and facts.total_micro else ""
        lines.append(f"progress    step {progress.step}{of}{done}{cost}")
    if facts.state != "succeeded":
        at = "saved, step not reported" if facts.is_saved else "no checkpoint reported"
        lines.append(f"checkpoint  {at if progress.checkpoint_step is None else f'step {progress.checkpoint_step}'}")
    if stop := _stop(facts):
        lines.append(f"stop it     {stop}")
    if resume:
        wait = "resume      after it has stopped:" if facts.is_active else "resume with"
        lines += [f"{wait} {resume.command}", *([f"            ({resume.words})"] if resume.words else [])]
    return lines


def _money(facts: JobFacts) -> str:
    spent = dollars(facts.spent_micro)
    if facts.limit_micro:
        spent += f" of {dollars(facts.limit_micro)}"
        if facts.spent_micro is not None:
            spent += f" ({facts.spent_micro * 100 // facts.limit_micro} %)"
    burn = f", {dollars(facts.burn_micro_h)} an hour" if facts.burn_micro_h else ""
    return f"spent       {spent}{burn}"


def _time_left(facts: JobFacts, now_s: float) -> str:
    assert facts.cap_at_s is not None
    text = f"{span(facts.cap_at_s - now_s)}, until {_clock(facts.cap_at_s)}"
    if facts.deadline_at_s is not None and not facts.is_hard:
        text += f"; it {at_deadline(saves=facts.saves)} {'from' if facts.saves else 'at'} {_clock(facts.deadline_at_s)}"
        text += " on" if facts.saves else ""
    return text


def _clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))


def _dollars(micro: int | None) -> float | None:
    return None if micro is None else round(micro / _MICRO, 6)


def masked(url: str) -> str:
    """Return the address without path, user and query, which may be secret."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "an address that cannot be read"
    if not host:
        return f"{parts.scheme}:..." if parts.scheme else "..."
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}/..."
