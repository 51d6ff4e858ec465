"""`cloudtrain doctor`: what stands in the way of a job."""

from __future__ import annotations

from dataclasses import asdict

import click

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.options import json_option
from cloudtrain.launcher.terminal import print_json, print_lines

__all__ = ["command"]


@click.command("doctor")
@click.argument("backend", required=False)
@json_option
def command(backend: str | None, as_json: bool) -> int:
    """Check what stands in the way of a job, on one backend or on all; exit code 1 where something does."""
    checks = {name: backends.load(name).doctor() for name in ([backend] if backend else backends.names())}
    failed = any(check.verdict == "fail" for found in checks.values() for check in found)
    if as_json:
        print_json({name: [asdict(check) for check in found] for name, found in checks.items()})
        return int(failed)
    for name, found in checks.items():
        print_lines(
            [
                f"{check.verdict:4}  {name}: {check.name}: {check.found}{f'  ({check.cure})' if check.cure else ''}"
                for check in found
            ]
        )
    return int(failed)
