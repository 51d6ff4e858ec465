"""`cloudtrain hosts`: the users of each GPU on the user's own machines."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import cast

import click

from .. import backend as backends
from ..backend_table import traits
from ..errors import ConfigError, UsageError
from ..text.tables import table, width
from ..text.terminal import print_json, print_lines
from ..text.units import clock, format_duration, size
from .options import DEFAULT_FILE, backend_option, flag, json_option, path_option

HEAD = ("HOST", "GPU", "MODEL", "USED BY")


@click.command("hosts")
@path_option("-f", "--file", default=DEFAULT_FILE, show_default=True)
@backend_option(help="Of ssh or slurm; by default the first that the file has.")
@flag("--disk", help="Show what cloudtrain holds in each machine's work folder instead.")
@json_option
def command(file: Path, backend: str | None, disk: bool, as_json: bool) -> int:
    """Show who uses which GPU of the config's `ssh.hosts`: jobs of all their users, other processes, and jobs in line.

    Of a Slurm cluster: which nodes of the partition are free.

    Exit code 7 if a machine cannot be reached, 3 if its name is unknown, as `submit` has it.
    """
    from .. import config

    if backend is not None and not traits(backend).own_machines:
        raise UsageError(f"`{backend}` has no machines of yours", hint="--backend ssh or --backend slurm")
    able = (backend,) if backend else (*config.backends_configured(file), *backends.BUILT_IN)
    name, example = next((each, text) for each in able if (text := traits(each).own_machines))
    job = config.load(file, backend=name)
    machines = cast("backends.Machines", backends.load(name))
    if disk:
        return _disk(machines.held(job), as_json=as_json)
    found = machines.hosts(job)
    if not found:
        raise ConfigError("the config names no machines of yours", where=str(file), hint=f"as in `{example}`")
    if as_json:
        print_json({"hosts": [asdict(each) for each in found]})
    else:
        print_lines(table(HEAD, [_row(each) for each in found], below=HEAD[-1], shorten={"MODEL": 12}, columns=width()))
    uses = {each.use for each in found}
    return 7 if "unreachable" in uses else 3 if "unknown" in uses else 0


def _disk(held: list[backends.LeftFiles], *, as_json: bool) -> int:
    if as_json:
        print_json({"folders": [asdict(each) for each in held]})
    else:
        rows = [(each.place, each.kept if each.bytes is None else size(each.bytes)) for each in held]
        print_lines(table(("FOLDER", "SIZE"), rows, below="SIZE", columns=width()))
    return 7 if any(each.kept for each in held) else 0


def _row(each: backends.HostUse) -> tuple[str, str, str, str]:
    since = f", for {format_duration(max(1, int(time.time() - each.since_s)))}" if each.since_s else ""
    who = f"{each.user or 'somebody'}: {each.job or 'a process'}{since}"
    at = f", starts by {clock(each.start_s, time.time())}" if each.start_s else ""
    waits = f"waits: {each.user}: {each.job}{since}{at}"
    used = {"free": "free", "held": who, "busy": f"{who} (not of cloudtrain)", "waits": waits}.get(each.use, each.use)
    return each.host, each.unit, each.model, f"{used}{f': {each.detail}' if each.detail else ''}"
