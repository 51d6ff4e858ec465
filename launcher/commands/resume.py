"""`cloudtrain resume`: a new attempt of a job, from its newest checkpoint; or more trials and money for a sweep."""

from __future__ import annotations

from functools import partial
from shlex import quote
from typing import TYPE_CHECKING

import click

from cloudtrain.entrypoints.format import up

from ..errors import BudgetError
from ..job import Job
from ..jobs.approval import approved
from ..store.registry import Registry
from ..text.terminal import confirm, is_terminal, print_json, say, say_each
from ..text.units import format_money
from .options import (
    cli_command,
    count_option,
    flag,
    json_option,
    price_option,
    price_setting,
    require_one_budget,
    required_job,
    set_option,
    yes_option,
)

if TYPE_CHECKING:
    from ..planning.prepare import Prepared


@cli_command(
    "resume",
    "cloudtrain resume last",
    "cloudtrain resume digits --update-code --instances 4",
    "cloudtrain resume digits --budget +50USD",
    "cloudtrain resume digits-x7k2p --trials +40 --budget +50USD",
)
@required_job
@count_option("--instances", help="Continue with another number of instances.")
@click.option("--backend", "asked", hidden=True)  # answered, not obeyed: a job stays on its backend
@set_option
@click.option("--trials", metavar="[+]N", help="Of a sweep: add +40 trials, or set their number to 67.")
@click.option("--budget", metavar="[+]USD", help="Raise the budget by +50USD, or set it to 200USD.")
@price_option
@flag("--update-code", help="Use the present code folder, not the submitted code.")
@flag("--update-config", help="Use the present config file, not the submitted config.")
@flag("--from-older", help="Start from an older step if the newest save cannot be reached.")
@flag("--dry-run", help="Print the request of the next attempt and the plan; send nothing.")
@flag("-d", "--detach", help="Return once the job is sent; else follow it.")
@yes_option
@json_option
def command(
    job: str,
    instances: int | None,
    asked: str | None,
    settings: tuple[str, ...],
    trials: str | None,
    budget: str | None,
    price_micro: int | None,
    update_code: bool,
    update_config: bool,
    from_older: bool,
    dry_run: bool,
    detach: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Resume from a job's newest checkpoint, with the code and the config as they were submitted.

    A sweep continues with its interrupted trials, and with more trials or money.
    """
    from ..jobs import retry
    from ..jobs.refresh import refresh

    if budget is not None:
        require_one_budget(settings)
    registry = Registry()
    found = refresh(registry, registry.find(job))
    if trials is not None:
        settings = (*settings, f"sweep.trials={retry.trials_after(registry, found, trials)}")
    retry.require_own_backend(found, [*settings, *([f"backend={asked}"] if asked is not None else [])])
    is_changed = bool(settings or update_code or update_config)
    retry.require_ended(registry, found, is_changed=is_changed)
    typed = [f"resources.instances={instances}"] if instances is not None else []
    if not retry.has_saved(registry, found) and not found.attempt.state.all_damaged:
        say("no checkpoint of this job yet: starting from the beginning")
    typed += [retry.budget_setting(found, budget)] if budget is not None else []
    typed += [price_setting(found.backend, price_micro)] if price_micro is not None else []
    try:
        typed = [*settings, *typed]
        updates = {"update_code": update_code, "update_config": update_config, "from_older": from_older}
        prepared = retry.prepare_next(registry, found, typed, **updates)
    except BudgetError as error:
        flags = [*(["--update-code"] if update_code else []), *(["--update-config"] if update_config else [])]
        raise _with_command(error, found, [*_as_typed(instances, settings, price_micro), *flags]) from error
    if dry_run:
        return _dry_run(found, prepared, as_json=as_json)
    older = retry.older_start(registry, found, prepared.config)
    if older is not None and older.is_open and not from_older and not yes and is_terminal():  # -y agrees to the cost
        if not confirm(f"{older.message}. Go on?", yes=False):
            say("not sent")
            return 1
    else:
        retry.require_newest(older, f"cloudtrain resume {found.id} --from-older", from_older=from_older)
    return _send(registry, found, prepared, yes=yes, detach=detach, as_json=as_json)


def _send(registry: Registry, job: Job, prepared: Prepared, *, yes: bool, detach: bool, as_json: bool) -> int:
    """Send the job's next attempt if the user approves, and follow the job."""
    from ..jobs import queue, retry, submit
    from ..jobs.follow import follow, log_view
    from ..jobs.view import unattended
    from ..logs.view import View

    check = partial(submit.require_room, registry, prepared, is_first=False)
    if not approved(prepared, yes=yes, before=job, check=check):
        return 1
    start_over = job.attempt.state.all_damaged
    if start_over and not confirm(f"{retry.ALL_DAMAGED}. Send it?", yes=yes):
        say("not sent")
        return 1
    job = queue.drive(registry, submit.resend(registry, job, prepared, start_over=start_over))
    new = "sent" if job.attempt.phase != "queued" else "in line, nothing is sent yet"
    say(f"{new}: {job.id}, attempt {job.attempt.number}")
    if as_json:
        print_json({"job": job.id, "backend": job.backend, "attempt": job.attempt.number})
    if detach:
        say("\n".join(unattended(job)))
        return 0
    return follow(registry, job, log_view(job, View(as_json=as_json)))


def _dry_run(job: Job, prepared: Prepared, *, as_json: bool) -> int:
    """Print the request of the next attempt, and the whole plan after the request."""
    number, plan = job.attempt.number + 1, prepared.plan
    request = prepared.backend.request(plan, prepared.config, job.id, number, prepared.bundle.sha256)
    if as_json:
        data = {"job": job.id, "backend": job.backend, "attempt": number, "request": request.body, "plan": plan.dump()}
        print_json(data)
    else:
        click.echo(request.text, nl=False)
    say_each([*prepared.lines(), "dry run: nothing was sent"])
    return 0


def _as_typed(instances: int | None, settings: tuple[str, ...], price_micro: int | None) -> list[str]:
    """Return the options that change the next attempt, quoted for a shell; without a `--set budget.limit=`."""
    kept = [each for each in settings if not each.strip().startswith("budget.limit=")]  # the hint has --budget
    return [
        *([f"--instances {instances}"] if instances is not None else []),
        *(f"--set {quote(each)}" for each in kept),
        *([f"--price-per-hour {format_money(price_micro).replace(' ', '')}"] if price_micro is not None else []),
    ]


def _with_command(error: BudgetError, job: Job, given: list[str]) -> BudgetError:
    """Return the refusal with an acceptable command as hint: the smallest sufficient budget and the given options."""
    from ..money.forecast import budget_micro

    before = budget_micro(job)
    if error.enough_micro is None or before is None:
        return error
    more_micro = error.enough_micro - before
    sign, micro = ("+", more_micro) if more_micro > 0 else ("", error.enough_micro)
    more = sign + format_money(up(micro)).replace(" ", "")
    command = " ".join([f"cloudtrain resume {job.id}", f"--budget {more}", *given])
    hint = f"{error.hint.partition(';')[0]}, at least: {command}"
    return BudgetError(error.message, where=error.where, hint=hint)
