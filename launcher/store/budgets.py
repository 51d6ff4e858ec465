"""Budgets: limit, remaining money, and whether a job's worst case fits; pure functions, the same for every ledger.

Money is in whole micro-dollars. A budget limits the costs of a project, or of all projects together, in total or in a
calendar month (UTC). An active job counts at its worst case, in the current month: what it has spent until now, and the
rest as held. A job that runs into the next month had its worst case reserved before, so earlier jobs never push a month
over its limit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cloudtrain.entrypoints.format import first_of, left, most, usd, whole

from ..errors import BudgetError
from ..metering.meter import share_micro
from ..metering.money import Money
from ..text.units import format_money

OVERALL = ""  # the project of the overall budget, and of a job without a project
AGENT = "agent"  # in place of a project: the owner's limit on all jobs of a user (agent_limit.py)
MOST_MICRO = 10**16  # ten billion USD: above any budget, and sums still fit into SQLite's integers
MOST_OVERCOMMIT_PERCENT = 1000
Period = Literal["all", "month"]
LEAST_KNOWN = 3  # the number of ended jobs needed for a mean
_LATEST_S = 253_402_300_799.0  # the last second of the year 9999
_MONTH = re.compile(r"^(\d{4})-(0[1-9]|1[0-2])$")
_NAMED = 3  # jobs that a refusal names


@dataclass(frozen=True)
class LedgerBudget:
    """A limit. An `overcommit_percent` over 100 lets the worst cases add up to so much more than the unspent money."""

    project: str
    period: Period
    limit_micro: int
    overcommit_percent: int = 100
    set_s: float = 0.0
    set_by: str = ""
    ask_above_micro: int | None = None  # of AGENT: the owner approves each job that may cost more

    @property
    def title(self) -> str:
        """Return the owner and the limit: `project vision's monthly 100 USD`."""
        monthly = "monthly " if self.period == "month" else ""
        whose = {OVERALL: "the overall", AGENT: "the agent's"}.get(self.project, f"project {self.project}'s")
        more = f" (overcommitted {self.overcommit_percent / 100:g} times)" if self.overcommit_percent != 100 else ""
        return f"{whose} {monthly}{usd(self.limit_micro)}{more}"


@dataclass(frozen=True)
class Held:
    """An attempt that may still cost money; `amount_micro` is its worst case, None at an unknown price.

    `used_micro`: the part that it has spent until now, at worst; 0 for an attempt of another machine.
    """

    job_id: str
    attempt: int
    project: str
    amount_micro: int | None
    created_s: float
    by: str = ""
    used_micro: int = field(default=0, compare=False)

    @property
    def held_micro(self) -> int | None:
        """The most that the attempt may still cost; None at an unknown price."""
        return None if self.amount_micro is None else max(0, self.amount_micro - self.used_micro)


@dataclass(frozen=True)
class End:
    """An attempt that has ended. `months`: the cost in each calendar month; empty if the cost is zero."""

    project: str
    amount_micro: int | None
    ended_s: float
    months: Mapping[str, int]


@dataclass(frozen=True)
class Standing:
    """A budget's state; `money` counts at worst, without a limit if only the sums of a project are asked for.

    `mean_percent`: the cost of ended jobs in percent of their worst cases, rounded up; None below LEAST_KNOWN jobs. The
    projected money takes active jobs at this share. `place`: the address of a shared ledger, None for this machine.
    """

    budget: LedgerBudget
    month: str
    money: Money
    held: tuple[Held, ...] = ()
    mean_percent: int | None = None
    place: str | None = None

    @property
    def left_words(self) -> str:
        """What is left, for brackets: `17.97 left`."""
        return f"{whole(left(self.money.left_micro or 0)).removesuffix(' USD')} left"

    @property
    def unknown(self) -> tuple[Held, ...]:
        """Active attempts at an unknown price."""
        return tuple(each for each in self.held if each.amount_micro is None)

    @property
    def room_micro(self) -> int:
        """The worst case that still fits: what remains, or more with an overcommitment; negative if over the limit."""
        unspent = self.budget.limit_micro - (self.money.spent_micro or 0)
        more = unspent * self.budget.overcommit_percent // 100 if unspent > 0 else unspent
        return more - (self.money.held_micro or 0)


@dataclass(frozen=True)
class Accounts:
    """All sums of a ledger: the active attempts, and of each project the cost by month and the means.

    `means`: project -> the number, the cost and the worst cases of its ended attempts.
    """

    budgets: Sequence[LedgerBudget]
    held: Sequence[Held]
    months: Mapping[str, Mapping[str, int]]
    means: Mapping[str, tuple[int, int, int]]

    def standings(self, now_s: float, project: str | None = None) -> list[Standing]:
        """Return the state of each budget, or of each budget that applies to the project's jobs (and the overall)."""
        budgets = [each for each in self.budgets if project is None or each.project in (OVERALL, AGENT, project)]
        return [self.standing(each, now_s) for each in sorted(budgets, key=lambda each: (each.project, each.period))]

    def standing(self, budget: LedgerBudget, now_s: float, *, limited: bool = True) -> Standing:
        """Return the state of the budget: its active attempts, and the cost of its ended ones, by month if monthly.

        Spending after this month counts too: a clock may have been put back.
        """
        month, whose = month_of(now_s), {budget.project}
        if budget.project in (OVERALL, AGENT):
            whose = {*self.months, *self.means, *(each.project for each in self.held)}
        held = tuple(each for each in self.held if each.project in whose)
        ended = [part for project in whose for part in self.months.get(project, {}).items()]
        spent_micro = sum(each.used_micro for each in held)
        spent_micro += sum(micro for when, micro in ended if budget.period == "all" or when >= month)
        means = [self.means.get(project, (0, 0, 0)) for project in whose]
        count, settled, expected = (sum(each[place] for each in means) for place in range(3))
        percent = -(-settled * 100 // expected) if count >= LEAST_KNOWN and expected else None
        projected_micro = None
        if percent is not None:
            whole_micro = (max(each.used_micro, -(-(each.amount_micro or 0) * percent // 100)) for each in held)
            projected_micro = spent_micro + sum(whole_micro) - sum(each.used_micro for each in held)
        held_micro = sum(each.held_micro or 0 for each in held)
        money = Money(spent_micro, held_micro, budget.limit_micro if limited else None, projected_micro)
        return Standing(budget, month, money, held, percent)


def require_room(standings: Sequence[Standing], amount_micro: int | None, where: str = "") -> None:
    """Raise BudgetError if a budget has no room for the amount; None, an unknown price, fits into no budget."""
    refused = [text for standing in standings for text in refusal(standing, amount_micro)]
    if not refused:
        return
    raise BudgetError("\n".join(refused), where=where, hint=_hint(standings, amount_micro))


def refusal(standing: Standing, amount_micro: int | None) -> Iterator[str]:
    """Yield the reason if the budget has no room: limit, spent, reserved (with the holders), left and needed money."""
    title = standing.budget.title
    if amount_micro is None:
        yield f"the price of this job is unknown, so {title} cannot reserve its worst case"
        return
    if amount_micro == 0:
        return
    if standing.unknown:
        yield f"{title} cannot be checked: active jobs without a known price: {_names(standing.unknown)}"
        return
    if amount_micro <= standing.room_micro:
        unspent_micro = standing.budget.limit_micro - (standing.money.spent_micro or 0)
        if amount_micro > unspent_micro:  # overcommitment is for many jobs together, not for a single job
            yield whole(
                f"{title} does not hold this job's worst case of {most(amount_micro)}: alone it may exceed the"
                f" {left(unspent_micro)} that is unspent; an overcommitment does not cover a single job"
            )
        return
    holders, held_micro = [each for each in standing.held if each.held_micro], standing.money.held_micro
    held = f", reserved {most(held_micro)} by {_names(holders)}" if holders else ""
    when = f" in {standing.month}" if standing.budget.period == "month" else ""
    room = "left" if standing.budget.overcommit_percent == 100 else "may still be promised"
    yield whole(
        f"{title} does not hold this job's worst case of {most(amount_micro)}: spent {most(standing.money.spent_micro)}"
        f"{when}{held}, {room} {left(standing.room_micro)}"
    )


def month_of(time_s: float) -> str:
    """Return the calendar month, UTC: `2026-11`."""
    from datetime import datetime, timedelta  # time.gmtime counts the leap seconds of the file that TZ names

    return f"{datetime(1970, 1, 1) + timedelta(seconds=max(0.0, min(time_s, _LATEST_S))):%Y-%m}"


def month_span(month: str) -> tuple[float, float]:
    """Return the start and end of a month in UTC: `2026-11`. Raises ValueError with the expected form."""
    from datetime import datetime, timedelta, timezone

    match = _MONTH.match(month)
    if match is None or not 1970 <= int(match[1]) < 9999:
        raise ValueError("a month such as `2026-11`")
    begin = datetime(int(match[1]), int(match[2]), 1, tzinfo=timezone.utc)
    return begin.timestamp(), (begin + timedelta(days=31)).replace(day=1).timestamp()


def by_month(total_micro: int, start_s: float | None, end_s: float) -> dict[str, int]:
    """Return the sum split over calendar months in proportion to time; the parts add up to the sum exactly."""
    end_s = max(0.0, min(end_s, _LATEST_S))
    start_s = end_s if start_s is None else max(0.0, start_s)
    if total_micro <= 0 or start_s >= end_s or month_of(start_s) == month_of(end_s):
        return {month_of(end_s): total_micro} if total_micro else {}
    parts, done, borders_s = dict[str, int](), 0, [start_s]
    while (next_s := month_span(month_of(borders_s[-1]))[1]) < end_s:
        borders_s.append(next_s)
    for begin_s, border_s in itertools.pairwise([*borders_s, end_s]):
        until = share_micro(total_micro, start_s, end_s, border_s)
        parts[month_of(begin_s)] = until - done
        done = until
    return {month: micro for month, micro in parts.items() if micro}


def _names(held: Iterable[Held]) -> str:
    return first_of([f"{each.job_id}{f' of {each.by}' if each.by else ''}" for each in held], _NAMED)


def _hint(standings: Sequence[Standing], amount_micro: int | None) -> str:
    if amount_micro is None:
        return "say what an instance costs: `price_per_hour` in the backend's block of the config"
    short = [standing for standing in standings if any(refusal(standing, amount_micro))]
    if any(standing.unknown for standing in short):
        return "wait for its end, or stop it: cloudtrain budget show"
    wait = ", wait for a job's end" if any(standing.money.held_micro for standing in short) else ""
    if any(standing.budget.project == AGENT for standing in short):
        return f"take fewer or shorter machines{wait}; only the owner can raise the agent's limit"
    raised = " && ".join(raising(standing, amount_micro) for standing in short)
    smaller = "take a shorter limits.max_duration, fewer instances or a smaller budget.limit"
    return f"{smaller}{wait}, or raise the budget: {raised}"


def raising(standing: Standing, amount_micro: int) -> str:
    """Return the command that raises the limit by just enough, rounded up to whole cents."""
    percent = standing.budget.overcommit_percent
    unspent_micro = max(amount_micro, -(-((standing.money.held_micro or 0) + amount_micro) * 100 // percent))
    limit_micro = -(-((standing.money.spent_micro or 0) + unspent_micro) // 10_000) * 10_000
    words = ["cloudtrain budget set", standing.budget.project, format_money(limit_micro).replace(" ", "")]
    words += ["--month"] if standing.budget.period == "month" else []
    words += [f"--overcommit {percent / 100:g}"] if percent != 100 else []
    return " ".join(word for word in words if word)
