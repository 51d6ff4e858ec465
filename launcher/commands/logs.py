"""`cloudtrain logs`: a job's lines, all nodes and ranks merged."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import click

from ..backend_table import ALL
from ..errors import UsageError
from ..job import Attempt, Job
from ..logs.view import View, parse_ranks
from ..store.registry import Registry
from ..store.tries import with_machines
from ..text.terminal import say
from .options import WholeNumber, cli_command, completes, duration_option, flag, job_argument, json_option


def _attempt(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    """Return the attempt's number, or ALL."""
    if value is None or value == ALL:
        return value
    if value.isdecimal() and int(value) >= 1:
        return int(value)
    raise click.BadParameter(f"`{value}` is neither a number from 1 up nor `{ALL}`", ctx, param)


@cli_command(
    "logs",
    "cloudtrain logs -f last",
    "cloudtrain logs digits --rank 0,3-5 --since 10m",
    "cloudtrain logs digits --grep 'nan|error' --attempt all",
)
@job_argument
@flag("-f", "--follow", "following", help="Go on until the job ends; the exit code is the job's.")
@click.option("--rank", "ranks", metavar="RANKS", help="Only these ranks: `0` or `0,3-5`.")
@click.option("--node", type=WholeNumber(min=0), help="Only this node.")
@click.option("-n", "--tail", type=WholeNumber(min=0), help="Only the last lines.")
@duration_option("--since", help="Only lines younger than this: `10m`.")
@click.option("--grep", metavar="REGEX", help="Only lines that match.")
@duration_option(
    "--hold-back",
    "hold_back_s",
    help="How long a line waits for earlier ones of other nodes: `5s`; by default as long as the backend needs.",
)
@flag("--timestamps", help="The time before each line.")
@flag("--raw", help="Lines as they were written, event tails included.")
@click.option(
    "--attempt",
    metavar="N|all",
    callback=_attempt,
    shell_complete=completes("attempts"),
    help="An earlier attempt's lines, or those of all attempts in order.",
)
@json_option
def command(
    job: str,
    following: bool,
    ranks: str | None,
    node: int | None,
    tail: int | None,
    since: int | None,
    grep: str | None,
    hold_back_s: int | None,
    timestamps: bool,
    raw: bool,
    attempt: int | str | None,
    as_json: bool,
) -> int:
    """Print a job's lines. JOB is a name, an id, a unique prefix of one, or `last`; JOB.17 is trial 17 of a sweep."""
    from ..jobs.follow import follow, log_view, show
    from ..jobs.refresh import refresh

    registry = Registry()
    found, trial = registry.trial(job) or (registry.find(job), None)
    found = refresh(registry, found)
    if trial is not None:
        _require_begun(registry, found, trial)
        grep = rf"^(?:\[{trial}\] |trial {trial}, ){f'.*(?:{grep})' if grep else ''}"
    view = View(
        ranks=parse_ranks(ranks) if ranks else None,
        node=node,
        grep=_pattern(grep),
        since_s=None if since is None else time.time() - since,
        timestamps=timestamps,
        raw=raw,
        as_json=as_json,
        hold_back_s=hold_back_s,
    )
    if attempt == ALL:
        return _show_all(registry, found, log_view(found, view), tail, following=following)
    last = found.attempt.number
    chosen = registry.attempt(found, attempt) if isinstance(attempt, int) and attempt != last else found.attempt
    _require_there([chosen], view)
    if attempt is None and len(runs := with_machines(registry.attempts(found))) > 1:
        say(f"attempts {runs[0].number} to {last} of {found.id}; this is {last}: --attempt N, or --attempt all")
    if following and chosen is found.attempt:
        return follow(registry, found, log_view(found, view), tail=tail)
    show(registry, found, chosen, replace(log_view(found, view), attempt=chosen.number), tail=tail)
    return 0


def _show_all(registry: Registry, job: Job, view: View, tail: int | None, *, following: bool) -> int:
    """Print the lines of all attempts in order, each below a heading; with `following`, follow the last attempt."""
    from ..jobs.follow import follow, show, tails
    from ..jobs.view import outcome
    from ..text.terminal import aside

    attempts = with_machines(registry.attempts(job))
    _require_there(attempts, view)
    counts = {} if tail is None else tails(registry, job, attempts, view, tail)
    for each in attempts:
        is_last = each.number == job.attempt.number
        if counts.get(each.number) == 0 and not is_last:
            continue
        aside(f"attempt {each.number} of {job.id}: {outcome(replace(job, attempt=each))}")
        if is_last and following:
            return follow(registry, job, view, tail=tail)
        show(registry, job, each, replace(view, attempt=each.number), tail=counts.get(each.number))
    return 0


def _require_begun(registry: Registry, job: Job, trial: int) -> None:
    """Raise UsageError unless the job is a sweep whose trial has begun."""
    from ..store import sweeps

    if not job.config.get("sweep"):
        raise UsageError(f"{job.id} has no trials: it is no sweep", hint=f"cloudtrain logs {job.id}")
    begun = {each.trial for each in sweeps.segments(registry.database, job.id)}
    if trial not in begun:
        hint = f"its trials so far are {min(begun)} to {max(begun)}" if begun else f"cloudtrain status {job.id}"
        raise UsageError(f"{job.id} has no trial {trial}", hint=hint)


def _require_there(attempts: list[Attempt], view: View) -> None:
    """Raise UsageError if no attempt has the wanted ranks or the wanted node."""
    ranks, nodes = max(each.plan.ranks for each in attempts), max(each.plan.instances for each in attempts)
    job_id = attempts[0].job_id
    if view.ranks and min(view.ranks) >= ranks:
        raise UsageError(f"{job_id} has no such rank", hint=f"its ranks are 0 to {ranks - 1}")
    if view.node is not None and view.node >= nodes:
        raise UsageError(f"{job_id} has no node {view.node}", hint=f"its nodes are 0 to {nodes - 1}")


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text is not None else None
    except re.error as error:
        raise UsageError(f"--grep {text}: {error}", hint="escape special characters with \\") from error
