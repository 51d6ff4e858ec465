"""`cloudtrain plan`: what a job will be, before anything is sent."""

from __future__ import annotations

from pathlib import Path

import click

from cloudtrain.launcher.options import config_options, json_option, overrides_of
from cloudtrain.launcher.terminal import print_json, print_lines

__all__ = ["command"]


@click.command("plan")
@config_options
@json_option
def command(
    file: Path,
    backend: str | None,
    instances: int | None,
    instance_type: str | None,
    spot: bool | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show ranks, batch split, time limit and price; sends nothing."""
    from cloudtrain.launcher.prepare import prepare

    overrides = overrides_of(file, backend, instances, instance_type, spot, settings)
    prepared = prepare(overrides.load(), file, Path(), dry=True)
    if as_json:
        print_json({"backend": prepared.config.backend, **prepared.plan.dump(), "bundle": prepared.bundle.dump()})
        return
    print_lines([f"backend {prepared.config.backend}", *prepared.plan.lines(), f"code: {prepared.bundle.summary()}"])
    print_lines([f"  {size / 1e6:8.2f} MB  {name}" for name, size in prepared.bundle.largest])
