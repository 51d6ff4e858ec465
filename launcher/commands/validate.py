"""`cloudtrain validate`: is the config file right?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import config
from cloudtrain.launcher import plan as plans
from cloudtrain.launcher.errors import ConfigError, Fault

__all__ = ["command"]


@click.command("validate", short_help="Check the config file, without network or account.")
@click.option(
    "-f", "--file", "file", type=click.Path(path_type=Path), default=config.DEFAULT_FILE, show_default=True,
    help="Config file.",
)  # fmt: skip
@click.option("--backend", metavar="NAME", help="Backend, in place of the file's.")
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Value in place of the file's; repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def command(ctx: click.Context, file: Path, backend: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check the config file and the code files it names, without network or account.

    All that is wrong is reported at once, each with its place in the file. Exits 3 if anything is.
    """
    try:
        job = config.load(file, backend=backend, overrides=overrides)
        _require_a_plan(job)
    except ConfigError as exc:
        if not as_json:
            raise
        faults = [_as_json(fault) for fault in exc.faults]
        click.echo(json.dumps({"ok": False, "file": str(file), "faults": faults}, indent=2))
        ctx.exit(exc.exit_code)
    if as_json:
        click.echo(json.dumps({"ok": True, "file": str(file), "faults": []}, indent=2))
        return
    instances = job.resources.instances
    click.echo(f"{file}: ok (backend {job.backend}, {instances} instance{'s' * (instances != 1)})")


def _require_a_plan(job: config.Config) -> None:
    """Raise what `plan` would, the batch split above all; a backend that is not here yet cannot be asked."""
    if job.backend not in backends.ANNOUNCED or job.backend in backends.names():
        plans.make(job, backends.load(job.backend).capacity(job))


def _as_json(fault: Fault) -> dict[str, Any]:
    """Return one object; line and column are null for what has no place in a file."""
    place = fault.place
    return {
        "message": fault.message,
        "key": fault.key or None,
        "file": place.file if place else None,
        "line": place.line or None if place else None,
        "column": place.column or None if place else None,
        "hint": fault.hint or None,
    }
