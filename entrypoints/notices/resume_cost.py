"""The advice to resume a job: the command, with the money and the time that another run needs for the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..format import format_duration
from ..terms import PARTS, CostRate, Terms, worst_case_micro
from .facts import JobFacts, StepFacts

# For another run: steps may take longer than the last steps did; the start (torchrun, the import of torch, the
# checkpoint); the time before the limit at which the run saves and leaves, at most a quarter of a short run.
MARGIN, START_S, SAVE_S = 1.1, 30.0, 120.0
_MICRO, _CENT = 1_000_000, 10_000


@dataclass(frozen=True)
class ResumeAdvice:
    """The command, valid once the job has ended, and an explanation of the sum.

    `limit_micro` and `limit_s`: the budget that ends the next run, and its time limit; None without a limit.
    """

    command: str
    words: str = ""
    limit_micro: int | None = None
    limit_s: float | None = None


@dataclass(frozen=True)
class ExtraBudget:
    """The amount to add to a budget: `micro` = cost of the remaining steps + a reserve - the rest of the budget.

    `finish_micro`: None if the number of remaining steps is unknown.
    """

    micro: int
    finish_micro: int | None
    left_micro: int

    @property
    def words(self) -> str:
        """How the sum is composed."""
        if self.finish_micro is None:
            return "the same amount again: the number of remaining steps is unknown"
        reserve_micro = self.micro + self.left_micro - self.finish_micro
        rest = _plain(abs(self.left_micro))
        left = f"less {rest} left" if self.left_micro >= 0 else f"and {rest} over"
        return f"{_plain(self.finish_micro)} to finish, {_plain(reserve_micro)} in reserve for start and end, {left}"


def resume_advice(facts: JobFacts) -> ResumeAdvice | None:
    """Return the resume advice; None if the job is finished, has no checkpoint, or will finish within its limits.

    A job stopped after its last step gets no advice. A failed job may lack files that a resume writes.
    The command includes the money and the time for the remaining steps, so that the resume is not refused.
    """
    is_ended = _is_ended_before_finish(facts) if facts.is_active else facts.is_resumable
    if facts.state == "succeeded" or not is_ended or (facts.state != "failed" and facts.progress.is_complete):
        return None
    # The user fixes the code: after an exception, or an exit code that is not 0.
    is_in_code = facts.state == "failed" and facts.error.get("kind") in ("exception", "exit")
    command = f"cloudtrain resume {facts.job}{' --update-code' if is_in_code else ''}"
    extra, needs_s = _extra(facts), cap_s(facts.progress, facts.terms, _until_s(facts))
    command += " --set training.pause_at=null" if facts.reason == "paused" else ""
    command += "" if extra is None else f" --budget +{amount(extra.micro)}"
    limit_micro, limit_s = None if facts.on_limit == "alert" else facts.limit_micro, facts.max_duration_s
    if limit_micro is not None and extra is not None:
        limit_micro += extra.micro
    if limit_s is not None and needs_s is not None and needs_s > limit_s:
        unit_s = 3600 if needs_s >= 36_000 else 60  # whole minutes, from ten hours on whole hours
        limit_s = math.ceil(needs_s / unit_s) * unit_s
        command += f" --set limits.max_duration={format_duration(limit_s)}"
    return ResumeAdvice(command, "" if extra is None else extra.words, limit_micro, limit_s)


def cap_s(progress: StepFacts, terms: Terms, until_s: float | None = None) -> float | None:
    """Return the time limit within which another run finishes before its deadline; None if unknown.

    Steps since the last checkpoint are counted again. `until_s`: a running job continues for so long, and then saves.
    """
    left_s = _left_s(progress, until_s)
    if left_s is None:
        return None
    run_s = left_s * MARGIN + START_S
    return max(terms.least_s, terms.lead_s + run_s + min(SAVE_S, run_s / 3))


def more(
    limit_micro: int,
    spent_micro: int,
    rate: CostRate,
    terms: Terms,
    progress: StepFacts,
    until_s: float | None = None,
    spent_worst_micro: int = 0,
) -> ExtraBudget | None:
    """Return the amount to add to the budget for the remaining steps, None if the budget suffices.

    `spent_worst_micro` is the highest possible cost of the job so far, to which the next run is added; `until_s` is as
    in `cap_s`. If the number of remaining steps is unknown, the amount is the present limit again.
    """
    needs_s, left_s = cap_s(progress, terms, until_s), _left_s(progress, until_s)
    worst_micro = max(spent_micro, spent_worst_micro)
    if needs_s is None or left_s is None:
        least = worst_case_micro(terms.least_s, rate, terms) + worst_micro - limit_micro
        return ExtraBudget(_readable(max(limit_micro, least)), None, limit_micro - spent_micro)
    if until_s is not None:
        runs_s = min(until_s, progress.eta_s or 0.0)
        worst_micro += round(rate.scaled / PARTS * runs_s / 3600)
        spent_micro += round(rate.hourly_micro * runs_s / 3600)
    lacking = worst_case_micro(math.ceil(needs_s), rate, terms) + worst_micro - limit_micro
    if lacking <= 0:
        return None
    return ExtraBudget(_readable(lacking), round(rate.hourly_micro * left_s / 3600), limit_micro - spent_micro)


def amount(micro: int) -> str:
    """Return the sum as a command line takes it: `12.50USD`, `37USD`."""
    return f"{_plain(micro)}USD"


def _is_ended_before_finish(facts: JobFacts) -> bool:
    """Return whether a limit will end the running job, by the forecast; without a forecast, whether money set the cap.

    A budget with `on_limit: alert` never ends a job.
    """
    if facts.hits_limit is None:
        return facts.limit_reason == "budget"
    finish_s, end_s = facts.finish_at_s, facts.leaves_at_s
    return (finish_s is not None and end_s is not None and finish_s > end_s) or facts.is_short_of_money


def _until_s(facts: JobFacts) -> float | None:
    """Return the seconds from a running job's last step until its deadline, when the job saves and leaves."""
    at_s, rest_s, finish_s = facts.leaves_at_s, facts.progress.eta_s, facts.finish_at_s
    if not facts.is_active or at_s is None or rest_s is None or finish_s is None:
        return None
    return max(0.0, at_s - (finish_s - rest_s))


def _extra(facts: JobFacts) -> ExtraBudget | None:
    """Return the extra budget for a resume; None if no more money is needed or asked for, or if the need is unknown."""
    limit, spent, rate, terms = facts.limit_micro, facts.spent_micro, facts.rate, facts.terms
    if limit is None or spent is None or not rate.price_micro or facts.on_limit == "alert":
        return None
    worst = spent if facts.spent_worst_micro is None else facts.spent_worst_micro
    is_unknown = facts.progress.eta_s is None and not facts.is_active and facts.reason != "budget"
    if is_unknown and worst_case_micro(terms.least_s, rate, terms) + worst <= limit:
        return None
    return more(limit, spent, rate, terms, facts.progress, _until_s(facts), worst)


def _plain(micro: int) -> str:
    """Return dollars with cents, without cents if whole: `0.84`, `37`."""
    return f"{micro // _MICRO}" if micro % _MICRO == 0 else f"{micro / _MICRO:.2f}"


def _readable(micro: int) -> int:
    """Return the sum rounded up to two significant digits, at least whole cents: 37.2 USD is 38, 204.80 is 210."""
    size = max(_CENT, int(10 ** (len(str(micro)) - 2)))
    return -(-micro // size) * size


def _left_s(progress: StepFacts, until_s: float | None) -> float | None:
    """Return the time that another run needs for its steps, with the steps since the last checkpoint.

    A checkpoint of unknown step counts as of the last step that was reported before the save.
    """
    left_s, step, last, saved = progress.eta_s, progress.step, progress.max_steps, progress.checkpoint_step
    if left_s is None:
        return None
    if until_s is not None:
        return left_s - min(until_s, left_s)
    if step is None or last is None or last <= step:
        return left_s
    saved = min(last, (progress.saved_after or 0) if saved is None else saved)
    return left_s + (step - saved) * left_s / (last - step)
