"""`cloudtrain validate`: the faults of the config file."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cloudtrain.entrypoints.format import counted

from .. import backend
from ..errors import ConfigError, Fault, require_all
from ..planning import secret_files
from ..planning.prepare import few_averages, require_a_plan
from ..planning.request_rules import notes_of
from ..text.terminal import say_each
from .options import Overrides, config_command, config_options, json_option

if TYPE_CHECKING:
    from ..config.schema import JobConfig


@config_command("validate")
@config_options
@json_option
def command(overrides: Overrides, as_json: bool) -> int:
    """Check the config file and the code folder, without network or account.

    All faults are reported at once, each with its place in the file. The exit code is 3 if there are faults.
    """
    file = overrides.file
    try:
        names = overrides.backends()
        jobs: list[JobConfig] = []
        require_all(*(partial(_plan, overrides, name if overrides.compares() else None, jobs) for name in names))
    except ConfigError as exc:
        if not as_json:
            raise
        faults = [_as_json(fault) for fault in exc.faults]
        click.echo(json.dumps({"ok": False, "file": str(file), "faults": faults}, indent=2))
        return exc.exit_code
    job = jobs[-1]
    warnings = [*secret_files.notes_of(job, file), *few_averages(job)]
    if job.resources.accelerators:
        from ..prices import catalog

        if not catalog.rows(job.backend):  # a backend with a table has checked the type
            warnings += filter(None, [catalog.unknown(job.resources.accelerators)])
    for one in jobs:
        warnings += notes_of(backend.load(one.backend).capacity(one).unknown_region)
    say_each(f"warning: {line}" for line in warnings)
    if as_json:
        click.echo(json.dumps({"ok": True, "file": str(file), "faults": [], "warnings": warnings}, indent=2))
        return 0
    instances = job.resources.instances
    on = f"backend{'s' * (len(names) > 1)} {', '.join(names)}"
    click.echo(f"{file if file.exists() else 'the job'}: ok ({on}, {counted(instances, 'instance')})")
    return 0


def _plan(overrides: Overrides, name: str | None, jobs: list[JobConfig]) -> None:
    """Add the config for the backend to `jobs`. Raises ConfigError if the config or the backend's plan is faulty."""
    jobs.append(overrides.load(name))
    with overrides.placing():
        require_a_plan(jobs[-1], overrides.file)


def _as_json(fault: Fault) -> dict[str, Any]:
    """Return the JSON of a fault; line and column are null for a fault without a place in a file."""
    at = fault.as_json()["at"] or {}
    place = {name: at.get(name) or None for name in ("file", "line", "column")}
    return {"message": fault.message, "key": fault.key or None, **place, "hint": fault.hint or None}
