"""`cloudtrain evaluate`: a further job that tests the weights of a job on a held-back split."""

from __future__ import annotations

from dataclasses import replace

import click

from ..text.terminal import print_json, print_lines, say, say_each
from .options import backend_option, cli_command, count_option, flag, json_option, required_job, set_option, yes_option


@cli_command("evaluate", "cloudtrain evaluate digits", "cloudtrain evaluate digits --checkpoint step-200 --split test")
@required_job
@click.option("--checkpoint", metavar="NAME", help="best, last or step-N.  [default: the best if kept, else the last]")
@click.option("--split", default="test", show_default=True, help="The split: `dataset(params, split)` of the task.")
@backend_option(metavar="NAME", help="Where; only a backend that reads the job's checkpoints.")
@count_option("--instances", metavar="N", help="Machines.  [default: 1, or a sharded job's]")
@flag("--update-code", help="Take the code folder as it is now, not the job's code.")
@set_option
@yes_option
@json_option
def command(
    job: str,
    checkpoint: str | None,
    split: str,
    backend: str | None,
    instances: int | None,
    update_code: bool,
    settings: tuple[str, ...],
    yes: bool,
    as_json: bool,
) -> int:
    """Test the weights of an ended job, and print the figures. The test is a job of its own, in the ledger.

    The time limit is an hour, or the job's limit if shorter; the code is the job's. Of a job that keeps its best
    checkpoint, the last is tested beside the best. Each test is counted: a split on which models were chosen gives too
    good figures.
    """
    from ..jobs import evaluations, submit
    from ..jobs.approval import approved, require_allowed
    from ..jobs.follow import wait
    from ..jobs.refresh import refresh
    from ..jobs.retry import prepare_other
    from ..store.registry import Registry

    registry = Registry()
    parent = refresh(registry, registry.find(job))
    typed = [*([f"backend={backend}"] if backend else []), *([f"resources.instances={instances}"] if instances else [])]
    config = evaluations.config_of(parent, split, checkpoint, [*settings, *typed])
    prepared = replace(prepare_other(registry, parent, config, update_code=update_code), settings=settings)
    if seen := evaluations.looks(evaluations.tests_of(registry, parent), split):
        say(f"{parent.id} was evaluated on {split} {seen} x before: a choice by these figures makes them too good")
    if not approved(prepared, yes=yes, check=lambda: say_each(require_allowed(registry, prepared))):
        return 1
    child, _ = submit.send(registry, prepared)
    say(f"testing: {child.id}")
    try:
        code = wait(registry, [child], None, lambda _: None)
    except KeyboardInterrupt:
        say(f"\nleft running: {child.id}\n  its lines   cloudtrain logs -f {child.id}")
        return 130
    child = registry.find(child.id)
    found = [each for each in evaluations.tests_of(registry, parent) if each.job_id == child.id]
    if not found:
        message = (child.attempt.state.error or {}).get("message", "it ended without figures")
        say(f"{child.id}: {message}\n  its lines   cloudtrain logs {child.id}")
        return code or 1
    if as_json:
        print_json({"job": child.id, "parent": parent.id, "figures": dict(found[-1].figures)})
        return code
    print_lines(evaluations.lines(found[-1]))
    say(f"all figures: cloudtrain artifacts {child.id}, metrics-{split}.json")
    say_each(evaluations.headline(evaluations.tests_of(registry, parent)))
    return code
