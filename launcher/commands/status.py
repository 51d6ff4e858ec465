"""`cloudtrain status`: one screen about one job."""

from __future__ import annotations

import click

from cloudtrain.launcher.options import job_argument, json_option
from cloudtrain.launcher.terminal import print_json, print_text

__all__ = ["command"]


@click.command("status")
@job_argument
@json_option
def command(job: str, as_json: bool) -> None:
    """Show how a job is: state, progress, spend, the first failing rank's exception, what to do next."""
    from cloudtrain.launcher.describe import as_json as describe
    from cloudtrain.launcher.describe import as_lines
    from cloudtrain.launcher.refresh import refresh
    from cloudtrain.launcher.registry import Registry

    registry = Registry()
    found = refresh(registry, registry.find(job))
    if as_json:
        print_json(describe(found, registry.attempts(found)))
    else:
        print_text(as_lines(found, registry.attempts(found)))
