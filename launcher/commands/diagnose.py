"""`cloudtrain diagnose`: the bottleneck of a training step, and the advice."""

from __future__ import annotations

from dataclasses import replace

import click

from ..errors import UsageError
from ..jobs.approval import approved
from ..text.terminal import print_json, say
from .options import Overrides, WholeNumber, config_command, config_options, json_option, yes_option


@config_command("diagnose")
@config_options
@click.option("--steps", type=WholeNumber(min=5), default=30, show_default=True, help="Steps of each of the runs.")
@yes_option
@json_option
def command(overrides: Overrides, steps: int, yes: bool, as_json: bool) -> int:
    """Find the bound of a step: network, data or compute.

    A job of its own makes short runs of the config's task: as it trains, without communication, and with data that is
    loaded already. Nothing is trained or saved. The shares go to standard output.
    """
    from ..advice.methods import diagnosis_name
    from ..advice.preparing import prepare
    from ..jobs import submit
    from ..jobs.follow import wait
    from ..store.home import home
    from ..store.registry import Registry

    measuring = (f"training.diagnose_steps={steps}", "checkpoint.uri=null")
    if overrides.load().task is None:
        raise UsageError("only a `task` can be diagnosed", hint="a script's steps are its own: profile it with torch")
    overrides = replace(overrides, settings=(*overrides.settings, *measuring))
    config = overrides.load()
    config = config.model_copy(update={"name": diagnosis_name(config.name)})
    folder = home()
    with overrides.placing():
        prepared = prepare(config, overrides.file, folder / "bundles", dry=False)
    if not approved(prepared, yes=yes):
        return 1
    registry = Registry(folder)
    job, _ = submit.send(registry, prepared)
    say(f"measuring: {job.id}")
    try:
        code = wait(registry, [job], None, lambda _: None)
    except KeyboardInterrupt:
        say(f"\nleft running: {job.id}\n  its lines   cloudtrain logs -f {job.id}")
        return 130
    job = registry.find(job.id)
    found = job.attempt.progress.get("diagnosis")
    if found is None:
        message = (job.attempt.state.error or {}).get("message", "it ended without a result")
        say(f"{job.id}: {message}\n  its lines   cloudtrain logs {job.id}")
        return code or 1
    if as_json:
        print_json({"job": job.id, **found})
    else:
        click.echo(found["sentence"])
    return code
