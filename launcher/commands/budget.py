"""`cloudtrain budget`: limits on the cost of all jobs or of a project, in total or for each month."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cloudtrain.entrypoints import stores
from cloudtrain.entrypoints.format import left, most, usd, whole

from ..errors import CloudtrainError, ConfigError, UsageError
from ..job import PROJECT_PATTERN
from ..money import budget_text, shared_ledger, shared_ledger_sync
from ..money.conditional import ConditionalObject, located
from ..store import agent_limit
from ..store import ledger as ledgers
from ..store.budgets import AGENT, MOST_OVERCOMMIT_PERCENT, LedgerBudget, Period, Standing
from ..store.database import Database
from ..store.registry import Registry
from ..text.tables import width, wrapped
from ..text.terminal import confirm, print_json, print_lines, say, say_each
from ..text.units import parse_money
from .options import completes, json_option, yes_option

_month = click.option("--month", "monthly", is_flag=True, help="For each calendar month (UTC), not for ever.")
_here = click.option("--here", is_flag=True, help="On this machine alone, though the project's budget is shared.")
_user = click.option(
    "--user",
    expose_value=False,
    callback=lambda _, __, name: setattr(agent_limit, "user", name or ""),
    help="For root: whose limit for agents.",
)


class _Budget(click.Group):
    """Accepts synonyms of `remove`: without them a typed `unset` would get the suggestion `set`, the opposite."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, "remove" if cmd_name in ("unset", "rm", "delete") else cmd_name)


@click.group("budget", cls=_Budget, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Limit the cost of all jobs together, or of a project.

    A job's worst case is reserved before the send; a job without room in a budget is refused. Without PROJECT a budget
    is over all jobs. The budgets of projects need not add up to the overall budget: each is checked alone.
    """
    if context.invoked_subcommand is None:
        context.invoke(show, project=None, as_json=False)


@command.command("set", short_help="Set a limit, ever or by month.")
@click.argument("what", nargs=-1, required=True, metavar="[PROJECT] LIMIT")
@_month
@click.option(
    "--overcommit",
    "factor",
    metavar="FACTOR",
    default="1",
    help="Let worst cases add up to so much more than is left, such as 1.2: jobs seldom cost their worst case.",
)
@click.option("--ledger", metavar="PLACE", help=f"Share it: {', '.join(stores.forms('NAME'))} or a shared disk's path.")
@click.option("--ask-above", metavar="USD", help="Of `agent`: the owner approves each job that may cost more.")
@_user
@_here
def set_(what: tuple[str, ...], monthly: bool, factor: str, ledger: str | None, ask_above: str, here: bool) -> None:
    """Set a limit, such as `cloudtrain budget set vision 5000USD --month`.

    PROJECT is the value of the key `project:` in the config of a job, not the job's name. `agent` limits all jobs of
    this user, from any home; a change needs the owner's word.
    """
    project, limit_micro = _what(what)
    overcommit = _overcommit(factor)
    period: Period = "month" if monthly else "all"
    if project == AGENT and ledger is None and not here and overcommit == 1:
        _limit_agents(limit_micro=limit_micro, period=period, ask_above_micro=_money(ask_above) if ask_above else None)
        return
    if project == AGENT or ask_above or agent_limit.user:
        raise UsageError("the form is: cloudtrain budget set agent 50USD [--month] [--ask-above 10USD] [--user USER]")
    percent, person = round(overcommit * 100), shared_ledger_sync.this_person()
    budget = LedgerBudget(project, period, limit_micro, percent, time.time(), person)
    database = Registry().database
    place = None if here else _place(database, project, ledger)
    if place is None:
        ledgers.set_budget(database, budget)
        standing = ledgers.accounts(database, time.time()).standing(budget, time.time())
    else:
        standing = shared_ledger_sync.set_budget(database, budget, place, may_make=ledger is not None)
    whose = f"project {project}" if project else "all jobs together"
    _say_set(f"the budget of {whose} to {_limit(budget)}" + (f", shared at {place}" if place else ""), standing)
    if percent != 100:
        say(f"worst cases of {whole(left(standing.room_micro))} more may be promised: --overcommit {overcommit:g}")
    if standing.unknown:
        jobs = ", ".join(held.job_id for held in standing.unknown)
        say(f"nobody knows the price of {jobs}: nothing is sent under this budget until their end")
    _say_others(database, place, project, period)
    if project and place is None:
        say_each(_unused(database, project))


def _say_set(what: str, standing: Standing) -> None:
    money = standing.money
    say(f"set {what}: {whole(f'spent {most(money.spent_micro)}, reserved {most(money.held_micro)}')}")
    if standing.room_micro < 0:
        more = whole(most((money.spent_micro or 0) + (money.held_micro or 0) - standing.budget.limit_micro))
        say(f"{more} less than is spent and reserved: what runs goes on, nothing is sent until there is room")
    else:
        say(f"left {whole(left(money.left_micro or 0))}")


@command.command("show", short_help="Show limits, what is spent, reserved, left.")
@click.argument("project", required=False, shell_complete=completes("projects"))
@json_option
def show(project: str | None, as_json: bool) -> None:
    """Show limits, spent, reserved and left sums, and the jobs that hold reservations.

    The platforms are asked about jobs that may have ended, so that their reservations are free.
    """
    from ..jobs.reserve import reconcile

    _require_name(project)
    registry = Registry()
    failures = reconcile(registry)
    database = registry.database
    rows = [] if project == AGENT else budget_text.own_rows(database, time.time(), project)
    for place in sorted(set(ledgers.ledgers(database).values())):
        try:
            rows += shared_ledger.standings(place, project)
        except CloudtrainError as error:
            failures.append(shared_ledger_sync.failure(place, error))
    asked = {each: agent_limit.command("approve", each.id) for each in agent_limit.requests() if not each.job}
    failures = list(dict.fromkeys(failures))  # a ledger may fail twice, at a write and at the read above
    if project is not None and not failures:
        _require_known(database, project, rows)
    months = {name: each for name, each in ledgers.months(database).items() if project in (None, name)}
    if as_json:
        found = {**budget_text.as_json(rows, months, ledgers.unpriced(database)), "failures": failures}
        print_json({**found, "requests": [{"job": each.words, "command": line} for each, line in asked.items()]})
    else:
        columns = width()
        print_lines(wrapped(budget_text.as_lines(rows, columns), columns))
        if unpriced := ledgers.unpriced(database):
            say(f"not counted, for nobody knows their price: {', '.join(unpriced)}")
        if any(row.money.spent_micro for row in rows):
            say(budget_text.COUNTED)
        say_each(f"requested: {each.words}: {line}" for each, line in asked.items())
    say_each(failures)


@command.command("remove", short_help="Remove a limit.")
@click.argument("project", required=False, shell_complete=completes("projects"))
@_month
@_here
@_user
@click.option(
    "--forget", is_flag=True, help="Forget on this machine where the project's budget is shared; change nothing there."
)
def remove(project: str | None, monthly: bool, here: bool, forget: bool) -> None:
    """Remove a limit; what was spent and what is reserved stays known."""
    _require_name(project)
    if project == AGENT:
        _limit_agents(limit_micro=None)
        return
    database = Registry().database
    name = project or ""
    period: Period = "month" if monthly else "all"
    whose = f"project `{project}`" if project else "all jobs together"
    place = None if here else _place(database, name, None)
    if forget:
        if place is None:
            raise UsageError(f"the budget of {whose} is not shared, as this machine knows")
        shared_ledger_sync.forget(database, name, place)
        say(f"forgotten that {place} shares the budget of {whose}; the ends of running jobs are still reported there")
        return
    if place is None:
        is_gone = ledgers.remove_budget(database, name, period)
    else:
        is_gone = shared_ledger_sync.remove_budget(database, place, name, period)
    where = f" at {place}" if place else ""
    if not is_gone:
        others = _others(database, place, name, period)
        own = [each for each in others if each.project == name]
        hint = "; ".join(map(_removal, own or others)) or "cloudtrain budget show lists all budgets"
        raise UsageError(f"there is no {'monthly ' if monthly else ''}budget of {whose}{where}", hint=hint)
    say(f"removed the {'monthly ' if monthly else ''}budget of {whose}{where}")
    _say_others(database, place, name, period)


@command.command("approve", short_help="Approve a job under the limit for agents.")
@click.argument("request")
@_user
def approve(request: str) -> None:
    """Approve one job: the same submit then sends the job."""
    found = [each for each in agent_limit.requests() if each.id == request and not each.job]
    if not found:
        raise UsageError(f"there is no open request `{request}`", hint="cloudtrain budget show lists the requests")
    say(found[0].words)
    owners = agent_limit.ask_owner(f"approve {request}")
    agent_limit.write(replace(owners, approved=(*owners.approved, *found)))
    say("approved for one job: send it again")


def _limit_agents(**changes: Any) -> None:
    """Change the limit for agents. The ledger stays."""
    if changes["limit_micro"] is None and not agent_limit.limits():
        raise UsageError("there is no limit for agents", hint="cloudtrain budget show lists all budgets")
    found, cell = agent_limit.ask_owner("change the limit for agents"), ConditionalObject(agent_limit.place())
    is_missing = cell.read()[0] is None  # also loads what the user may not read
    if agent_limit.known(is_whole=False).key:
        shared_ledger.read(cell)  # damaged: nothing is changed
    agent_limit.write(replace(found, **changes))
    agent_limit.become_user()
    book = shared_ledger.change(cell, lambda book: None, may_make=is_missing)
    whose = f"all jobs of the user {agent_limit.user or shared_ledger_sync.this_person().partition('@')[0]}"
    for limit in agent_limit.limits():
        asks = "" if limit.ask_above_micro is None else f"; above {usd(limit.ask_above_micro)} a job needs an approval"
        standing = shared_ledger.accounts(book).standing(limit, time.time())
        _say_set(f"the limit for agents, on {whose}, to {_limit(limit)}{asks}", standing)
    if changes["limit_micro"] is None:
        say("removed the limit for agents")


def _unused(database: Database, project: str) -> Iterator[str]:
    """Yield a warning if no job, and no config in the working directory, has the project."""
    from .. import config

    named = "CASE WHEN json_valid(config) THEN json_extract(config, '$.project.name') END"
    if database.execute(f"SELECT COUNT(*) FROM jobs WHERE {named} = ?", (project,))[0][0]:
        return
    file, name = Path(config.DEFAULT_FILE), None
    with contextlib.suppress(ConfigError):
        if project in (config.written(file, ("project",)), config.written(file, ("project", "name"))):
            return
        name = config.written(file, ("name",))
    yield f"warning: no job or config here has `project: {project}`: this budget limits no job so far"
    if count := database.execute("SELECT COUNT(*) FROM jobs WHERE ?1 IN (name, id)", (project,))[0][0]:
        whose, them = ("1 job is", "it") if count == 1 else (f"{count} jobs are", "them")
        yield f"  {whose} named {project}; to count {them}, write `project: {project}` in the config"
    elif name == project:
        yield f"  {file} has `name: {project}`; to count its jobs, write `project: {project}` there too"
    else:
        yield f"  to count a job, write `project: {project}` in its config"


def _say_others(database: Database, place: str | None, project: str, period: Period) -> None:
    whose = f"project {project}" if project else "all jobs together"
    for other in _others(database, place, project, period):
        if other.project == project:
            say(f"the budget of {_limit(other)} of {whose} also applies")


def _others(database: Database, place: str | None, project: str, period: Period) -> list[LedgerBudget]:
    """Return the remaining budgets at the same place, budgets of the project first."""
    found = [row.budget for row in shared_ledger.standings(place, project)] if place else ledgers.budgets(database)
    others = [each for each in found if (each.project, each.period) != (project, period)]
    return sorted(others, key=lambda each: (each.project != project, each.project, each.period))


def _limit(budget: LedgerBudget) -> str:
    return f"{usd(budget.limit_micro)} {'in each month (UTC)' if budget.period == 'month' else 'for ever'}"


def _removal(budget: LedgerBudget) -> str:
    """Return the budget's amount and the command to remove the budget."""
    words = ["cloudtrain budget remove", budget.project, "--month" if budget.period == "month" else ""]
    return f"the budget of {_limit(budget)}: {' '.join(filter(None, words))}"


@command.command("close", short_help="Free what a lost machine's job holds in a shared ledger.")
@click.argument("job", shell_complete=completes("jobs"))
@click.argument("spent")
@yes_option
def close(job: str, spent: str, yes: bool) -> None:
    """Put SPENT, what the job of another machine has cost, in place of what it holds in a shared ledger.

    For a machine that is lost: every other one tells of its jobs' ends by itself.
    """
    spent_micro = _money(spent)
    database = Registry().database
    if not confirm(f"Count {spent} for {job}, and take it for ended?", yes=yes):
        return
    for place in sorted(set(ledgers.ledgers(database).values())):
        if shared_ledger_sync.close_others(database, place, job, spent_micro):
            say(f"closed {job} at {place}")
            return
    message = f"no shared ledger that this machine knows holds anything for another machine's `{job}`"
    raise UsageError(message, hint=f"this machine reports the end of its own jobs by itself: cloudtrain status {job}")


def _overcommit(text: str) -> float:
    """Return the overcommit factor from `1.2` or `120%`. Raises UsageError for text outside 1 to the largest factor."""
    most = MOST_OVERCOMMIT_PERCENT / 100
    try:
        factor = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        factor = math.nan
    if not 1 <= factor <= most:  # NaN fails too
        raise UsageError(f"--overcommit is a number from 1 to {most:g}, such as 1.2 or 120%")
    return factor


def _what(words: tuple[str, ...]) -> tuple[str, int]:
    """Return the project ("" for all jobs) and the limit in micro-dollars, typed as `5000USD` or `5000 USD`."""
    given = list(words)
    if len(given) > 1 and given[-1].upper() == "USD":
        given[-2:] = [" ".join(given[-2:])]
    if len(given) > 2:
        raise UsageError("that is more than a project and a limit", hint="cloudtrain budget set [PROJECT] 5000USD")
    if len(given) == 2:
        _require_name(given[0])
    elif re.fullmatch("[a-z][a-z0-9_-]*", given[0]):  # a project's name: no amount begins with a small letter
        raise UsageError(f"the amount is missing: cloudtrain budget set {given[0]} 500USD")
    return (given[0] if len(given) == 2 else ""), _money(given[-1])


def _money(text: str) -> int:
    try:
        return parse_money(text)
    except ValueError as error:
        raise UsageError(f"a sum is to be {error}", hint="cloudtrain budget set [PROJECT] 5000USD") from error


def _require_name(project: str | None) -> None:
    if project not in (None, AGENT) and not re.fullmatch(PROJECT_PATTERN, project):
        hint = "small letters, digits, `-` and `_`, at most 63, a letter or a digit first"
        raise UsageError(f"{project!r} cannot name a project", hint=hint)


def _require_known(database: Database, project: str, rows: list[Standing]) -> None:
    """Raise UsageError for an unknown project: no budget, no spending and no running job."""
    from difflib import get_close_matches

    budgeted = [budget.project for budget in ledgers.budgets(database)] + list(ledgers.ledgers(database))
    known = sorted({*ledgers.projects(database), *budgeted} - {""})
    if project in known or any(row.money.limit_micro is not None and row.budget.project == project for row in rows):
        return
    near = get_close_matches(project, known, 1)
    hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known) or 'none yet'}"
    raise UsageError(f"project `{project}` has no budget here, and has spent nothing", hint=hint)


def _place(database: Database, project: str, given: str | None) -> str | None:
    """Return the place of the project's shared ledger: the given place, else the known place; None if not shared."""
    return ledgers.ledgers(database).get(project) if given is None else located(given)
