"""`cloudtrain plan`: what a job will be, before anything is sent."""

from __future__ import annotations

from pathlib import Path

import click

from cloudtrain.launcher.options import Overrides, config_options, json_option
from cloudtrain.launcher.terminal import print_json, print_lines

__all__ = ["command"]


@click.command("plan")
@config_options
@json_option
def command(overrides: Overrides, as_json: bool) -> None:
    """Show ranks, batch split, time limit and price; sends nothing."""
    from cloudtrain.launcher.prepare import prepare

    config = overrides.load()
    with overrides.placing():
        prepared = prepare(config, overrides.file, Path(), dry=True)
    if as_json:
        print_json({"backend": prepared.config.backend, **prepared.plan.dump(), "bundle": prepared.bundle.dump()})
        return
    print_lines([f"backend {prepared.config.backend}", *prepared.lines()])
    print_lines([f"  {size / 1e6:8.2f} MB  {name}" for name, size in prepared.bundle.largest])
