"""A job as all screens show it: `status`, `list`, `watch`, the page, the report and Python draw from a `JobView`.

A figure or a word that two screens share is made here once; a screen chooses, cuts and colours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import counted, dollars, failure, left, whole
from cloudtrain.entrypoints.terms import worst_case_micro

from ..job import Attempt, Job, State, exit_code
from ..metering import meter
from ..money.forecast import Forecast, forecast, limit_micro, step_s, up_to
from ..store import budgets, gpu_figures, ledger, tries
from ..store.progress import data_share, trial_counts
from ..store.registry import Registry, submitter_lives
from ..text.tables import labelled
from ..text.units import as_usd, clock, quantity
from ..text.visible import shown
from . import causes

if TYPE_CHECKING:
    from cloudtrain.entrypoints.notices.resume_cost import ResumeAdvice

    from ..store.database import Database

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (  # how Python joins tracebacks
    "\nThe above exception was the direct cause of the following exception:\n\n",
    "\nDuring handling of the above exception, another exception occurred:\n\n",
)
_KEPT = ("step", "max_steps", "loss", "metrics", "parent", "run_url", "sweep")  # stay until an attempt reports its own
_REPORTED = (*_KEPT[:-1], "samples_per_s", "tokens_per_s", "mfu", "not_begun")


@dataclass(frozen=True)
class JobView:
    """A job's figures and words at one time; no backend is asked."""

    job: Job
    attempts: Sequence[Attempt]
    """All attempts in order; `job.attempt` is the last."""
    money: Forecast
    now_s: float

    @property
    def state(self) -> State:
        """The state of the newest attempt."""
        return self.job.attempt.state

    @property
    def progress(self) -> dict[str, Any]:
        """The figures of the newest attempt; before its first step, with the last known step of an earlier attempt."""
        return progress_of(self.job, self.attempts)

    @property
    def place(self) -> str:
        """The backend, the ranks and the attempt: `ssh, 2 x 4 = 8 ranks, attempt 1, 2 restarts`."""
        plan, restarts = self.job.attempt.plan, self.state.restarts
        ranks = f"{plan.instances} x {plan.nproc_per_node} = {counted(plan.ranks, 'rank')}"
        again = f", {counted(restarts, 'restart')}" if restarts else ""
        return f"{self.job.backend}, {ranks}, attempt {self.job.attempt.number}{again}"

    @property
    def runs(self) -> list[Attempt]:
        """The attempts without those that are in `tries` alone."""
        return tries.with_machines(self.attempts)

    @property
    def tries(self) -> tuple[tries.Try, ...]:
        """The tries of a job with several candidates, in order, the next one last; empty for other jobs."""
        return tries.tries_of(self.attempts)

    @property
    def share_done(self) -> float | None:
        """The share of steps done, 0 to 1; None if unknown."""
        step, most = self.progress.get("step"), self.progress.get("max_steps")
        return min(1.0, max(0.0, step / most)) if step is not None and most else None

    @property
    def took_s(self) -> float | None:
        """The run time of the newest attempt; None before its start."""
        return meter.held_s(self.job.attempt, self.now_s)

    @property
    def left_s(self) -> float | None:
        """The time to the expected finish; None if unknown."""
        finish_s = self.money.finish_at_s
        return None if finish_s is None else max(0.0, finish_s - self.now_s)

    @property
    def step_s(self) -> float | None:
        """The seconds of a step at the last report of the newest attempt, by which the finish is forecast."""
        return step_s(self.job.attempt.progress)

    @property
    def metrics(self) -> str:
        """The metrics of the last evaluation."""
        values = (self.progress.get("metrics") or {}).items()
        return ", ".join(f"{key} {quantity(value) if isinstance(value, float) else value}" for key, value in values)

    @property
    def spent(self) -> str:
        """The cost and the budget; of an active job also the cost per hour."""
        burn = f"; {dollars(self.money.burn_micro_h)}/h" if self.job.active and self.money.burn_micro_h else ""
        return f"{self.money.words}{burn}"

    @property
    def limit_times(self) -> str:
        """When the job leaves, and when the platform ends the job, by the user's clock; empty without a limit."""
        from cloudtrain.entrypoints.notices.message import at_deadline

        if self.money.cap_at_s is None:
            return ""
        ended = f"is ended at {clock(self.money.cap_at_s, self.now_s)}"
        if self.money.deadline_at_s is None:
            return ended
        return f"{at_deadline(saves=self.job.saves)} at {clock(self.money.deadline_at_s, self.now_s)}, {ended}"

    @property
    def limit_first(self) -> str:
        """Which limit comes before the finish; empty if none does."""
        if not self.job.active or not self.money.hits_limit:
            return ""
        end_s, finish_s = self.money.deadline_at_s or self.money.cap_at_s, self.money.finish_at_s
        if end_s is None or finish_s is None or finish_s <= end_s:
            return "the budget is used up before the finish"
        which = "budget's cap" if self.job.attempt.plan.cap_reason == "budget" else "time limit"
        return f"the {which} comes before the finish"

    @property
    def gpus(self) -> str:
        """The newest figures of all GPUs; empty without figures."""
        return gpu_figures.words(self.progress)

    @property
    def gpu_warning(self) -> str:
        """Which GPUs of an active job idle, and a remedy; empty without an idle GPU."""
        return gpu_figures.warning(self.progress) if self.job.active else ""

    @property
    def likely(self) -> str | None:
        """The likely cause of the failure, and a remedy; None if unknown."""
        return causes.likely(self.state.error, self.job.config)

    @property
    def advice(self) -> ResumeAdvice | None:
        """How to continue an ended job, with the necessary money and time; None for an active and for a done job."""
        if self.job.active or self.state.state == "succeeded":
            return None
        from cloudtrain.entrypoints.notices.resume_cost import resume_advice

        from ..money.job_facts import job_facts

        return resume_advice(job_facts(self.job, self.money, self.attempts))

    @property
    def next_steps(self) -> list[str]:
        """Commands that the user may want to run next."""
        job, attempt = self.job, self.job.attempt
        if attempt.phase == "damaged":
            return [f"cloudtrain rm {job.id}"]
        if attempt.phase == "intent" and not submitter_lives(attempt):
            return [f"cloudtrain status {job.id}", f"cloudtrain stop --forget {job.id}"]
        if attempt.phase == "queued":
            return ["cloudtrain advance", f"cloudtrain stop {job.id}"]
        if job.active:
            return [f"cloudtrain watch {job.id}", f"cloudtrain logs -f {job.id}", f"cloudtrain stop {job.id}"]
        if self.state.state == "succeeded":
            return []
        if attempt.phase == "never_sent":
            return ["submit it again"]
        if self.state.reason == "no_machines":
            return [f"cloudtrain resume {job.id}"]  # no rank has run, so there are no lines to read
        rank = (self.state.error or {}).get("rank")
        of_rank = "" if rank is None else f"--rank {rank} "
        logs = [f"cloudtrain logs {of_rank}--tail 50 {job.id}"] if self.state.state == "failed" else []
        return [*logs, *([] if self.advice is None else [self.advice.command])]

    def as_json(self) -> dict[str, Any]:
        """Return the job for scripts: stable names, money in US dollars, times in unix seconds."""
        job, attempt, state, progress, money = self.job, self.job.attempt, self.state, self.progress, self.money
        return {
            "job": job.id,
            "name": job.name,
            "backend": job.backend,
            "project": job.asked.project,
            "tags": job.asked.tags,
            "state": state.state,
            "phase": attempt.phase,
            "reason": state.reason,
            "resumable": state.resumable,
            "attempt": attempt.number,
            "restarts": state.restarts,
            "platform_name": attempt.name,
            "platform_number": attempt.platform_number,
            "url": state.url,
            "instances": attempt.plan.instances,
            "ranks": attempt.plan.ranks,
            **{name: progress.get(name) for name in _REPORTED},
            "trials": trial_counts(progress),
            "data_share": data_share(progress),
            "gpus": gpu_figures.as_list(progress),
            "eta_s": self.left_s,
            "checkpoint_step": money.checkpoint_step,
            "checkpoint_at_s": money.saved_s,
            "unkept": progress.get("unkept", []),
            "spend_usd": as_usd(money.spent_micro),
            "limit_usd": as_usd(money.limit_micro),
            "burn_usd_per_hour": as_usd(money.burn_micro_h),
            "projected_usd": as_usd(money.projected_micro),
            "projected_finish_s": money.finish_at_s,
            "cap_at_s": money.cap_at_s,
            "deadline_at_s": money.deadline_at_s,
            "hits_limit": money.hits_limit,
            "stalled_s": money.stalled_s,
            "idle_usd": attempt.idle_usd,
            "error": state.error,
            "likely": self.likely,
            "detail": state.detail,
            "queue": state.queue,
            "created_s": job.created_s,
            "started_s": state.started_s,
            "ended_s": state.ended_s,
            "unreachable_since_s": attempt.unreachable_since_s,
            "exit_code": None if job.active else exit_code(state),
            "attempts": [
                _attempt(one, after, self.now_s) for one, after in zip_longest(self.attempts, self.attempts[1:])
            ],
            "tries": [asdict(each) for each in self.tries],
        }


def view_of(job: Job, attempts: Sequence[Attempt], now_s: float | None = None) -> JobView:
    """Return the job at `now_s`, by default now; `attempts` are all attempts, and `job.attempt` replaces the last."""
    known = up_to(job.attempt, attempts)
    now_s = time.time() if now_s is None else now_s
    return JobView(job, known, forecast(job, known, now_s), now_s)


def progress_of(job: Job, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the progress as in the job's view."""
    own = job.attempt.progress
    if own.keys() & {"step", "test", "sweep"}:
        return own
    some = (each.progress for each in reversed(attempts))
    earlier = next((progress for progress in some if progress.keys() & {"step", "sweep"}), {})
    known = {name: earlier[name] for name in _KEPT if name in earlier}
    if known and own.get("resumed_step") is not None:
        known["step"] = own["resumed_step"]
    if "sweep" in known and job.config.get("sweep"):  # a resume may have added trials
        from ..planning.search_spec import search_of

        known["sweep"] = known["sweep"] | {"trials": search_of(job.config).trials}
    return known | own


def read_view(registry: Registry, job: Job) -> JobView:
    """Return the job now."""
    return view_of(job, registry.attempts(job))


def _attempt(attempt: Attempt, after: Attempt | None, now_s: float) -> dict[str, Any]:
    state = attempt.state
    return {
        "number": attempt.number,
        "state": state.state,
        "phase": attempt.phase,
        "reason": state.reason,
        "created_s": attempt.created_s,
        "started_s": state.started_s,
        "ended_s": state.ended_s,
        "spend_usd": as_usd(meter.spent_micro(meter.legs_of([attempt]), now_s)),
        "step": attempt.progress.get("step"),
        "checkpoint_step": saved_step(attempt, after),
    }


def saved_step(attempt: Attempt, after: Attempt | None) -> int | None:
    """Return the step of an attempt's newest checkpoint; the next attempt, `after`, may have found a newer checkpoint.

    An attempt that dies right after a save may not have reported the save.
    """
    steps = [attempt.progress.get("checkpoint_step"), after.progress.get("resumed_step") if after else None]
    return max((step for step in steps if step is not None), default=None)


def failure_lines(error: dict[str, Any]) -> list[str]:
    """Return the failure, without terminal control codes; the first line is `rank 1: ValueError: no batch`."""
    text = failure(error.get("rank"), error.get("type"), str(error.get("message") or ""))
    return [shown(line, colour=False) for line in text.splitlines()] or [""]


def with_reason(state: State) -> str:
    """Return the state with its reason: `failed (preempted)`."""
    return f"{state.state} ({state.reason})" if state.reason else state.state


def outcome(job: Job) -> str:
    """Return the state in words: `stopped (user), resumable`."""
    state = job.attempt.state
    if job.attempt.word != state.state:
        return job.attempt.word
    if state.reason == "paused":
        step, most = job.attempt.progress.get("step"), job.attempt.progress.get("max_steps")
        return "paused" if step is None else f"paused (step {step}{f' of {most}' if most else ''})"
    return with_reason(state) + (", resumable" if state.resumable else "")


def in_line(job: Job) -> str:
    """Return the place of a waiting job: `2 of 3 in line`, or its next candidate; empty for a job not in line."""
    if words := tries.next_words(job):
        return words
    queue = job.attempt.state.queue if job.attempt.word == "queued" else None
    return f"{queue['place']} of {queue['of']} in line" if queue and queue.get("place") else ""


def lacking_budgets(database: Database, view: JobView) -> list[str]:
    """Return a line for each budget of this installation that would refuse the advised resume, with the command first.

    The worst case of the next run is chosen as a resume chooses it, by the terms of the last plan.
    """
    from ..metering import limit

    plan, resume = view.job.attempt.plan, view.advice
    longest_s = (resume and resume.limit_s) or plan.cap_s
    if resume is None or not (rate := plan.rate) or not rate.price_micro:
        return []
    amount_micro = worst_case_micro(int(longest_s), rate, plan.terms)
    if resume.limit_micro is not None:
        spent_micro = meter.spent_at_worst_micro(view.attempts, view.now_s) or 0
        chosen = limit.choose(resume.limit_micro, spent_micro, rate, plan.terms, int(longest_s))
        if isinstance(chosen, limit.LimitRefusal):
            return []
        amount_micro = chosen.worst_case_micro
    return [
        f"{standing.budget.title} has {whole(left(standing.room_micro))}"
        f" {'left' if standing.budget.overcommit_percent == 100 else 'to promise'}: "
        f"{budgets.raising(standing, amount_micro)} first"
        for standing in ledger.standings(database, view.now_s, view.job.asked.project or budgets.OVERALL)
        if any(budgets.refusal(standing, amount_micro)) and not standing.unknown
    ]


def unattended(job: Job) -> list[str]:
    """Return how to follow and to stop the job, and how to get alerts if alerts need a follower."""
    rows = [("follow it", f"cloudtrain logs -f {job.id}"), ("stop it", f"cloudtrain stop {job.id}")]
    if job.config.get("sweep"):
        rows.append(("goes on", "to the end of its trials by itself: no command has to run"))
    places = job.asked.notify
    others = [place for place in places if not place.get("from_job")]
    if others:
        channels = "all that `notify` names" if len(others) == len(places) else "those of `notify` without `from_job`"
        rows.append(("get alerts", f"cloudtrain watch {job.id}"))
        rows.append(("", f"(while no command follows the job, {channels} receive nothing;"))
        rows.append(("", "`from_job: true` in an entry of `notify` makes the job itself send alerts)"))
    elif not places and limit_micro(job) is not None:
        rows.append(("get alerts", f"cloudtrain watch {job.id}   (of its budget; or set `notify`)"))
    return labelled(rows)


def lines_before(registry: Registry, job: Job) -> list[str]:
    """Return the last lines of the failing rank: from the exit report, else from the cached log.

    A platform may pass on few lines of an exit report, or no lines. No backend is asked.
    """
    error = job.attempt.state.error or {}
    # A rank that was restarted has printed the traceback of its first start.
    repeated = {line.strip() for line in str(error.get("traceback") or "").splitlines()}
    lines: list[str] = [line for line in error.get("lines") or () if str(line).strip() not in repeated]
    rank = error.get("rank")
    if job.active or rank is None:
        return lines
    from cloudtrain.entrypoints.agent import node_logs

    from ..logs import cache

    if len(lines) >= node_logs.MOST_LAST:
        return lines
    place = cache.place(registry.database, job.id, job.attempt.number)
    if place is None or not place.is_complete:
        return lines
    from ..logs.stream import LogStream
    from ..logs.view import View

    with closing(LogStream(registry, job, job.attempt, View(ranks=frozenset({rank})))) as stream:
        text = "\n".join(line.text for line in stream.tail(300))
    before, mark, _ = text.rpartition(_TRACEBACK)
    while before.endswith(_CHAINED) and _TRACEBACK in before:  # the exceptions that led to the last exception
        before = before.rpartition(_TRACEBACK)[0]
    printed = [line for line in node_logs.last_lines_of(before if mark else text) if line.strip() not in repeated]
    return printed if len(printed) > len(lines) else lines
