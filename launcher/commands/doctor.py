"""`cloudtrain doctor`: what stands in the way of a job."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.options import DEFAULT_FILE, completes, json_option
from cloudtrain.launcher.terminal import print_json, print_text

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import Config

__all__ = ["command"]


@click.command("doctor")
@click.argument("backend", required=False, shell_complete=completes("backends"))
@click.option(
    "-f", "--file", type=click.Path(path_type=Path), help=f"Look at this job.  [default: {DEFAULT_FILE}, if there]"
)
@json_option
def command(backend: str | None, file: Path | None, as_json: bool) -> int:
    """Check what stands in the way of a job, on one backend or on all; exit code 1 where something does.

    Of the clouds without a name only the config's own: each is asked over the network.
    """
    configs = _configs(file, backend)
    wanted = [backend] if backend else list(dict.fromkeys(["local", *configs]))
    config = next(iter(configs.values()), None)
    checks = {name: backends.load(name).doctor(configs.get(name, config)) for name in wanted}
    failed = any(check.verdict == "fail" for found in checks.values() for check in found)
    if as_json:
        print_json({name: [asdict(check) for check in found] for name, found in checks.items()})
        return int(failed)
    for name, found in checks.items():
        print_text(
            [
                f"{check.verdict:4}  {name}: {check.name}: {check.found}{f'  ({check.cure})' if check.cure else ''}"
                for check in found
            ]
        )
    return int(failed)


def _configs(file: Path | None, backend: str | None) -> dict[str, Config]:
    """Return the job to look at, for each of its backends; none where no file is named and none is there."""
    if file is None and not Path(DEFAULT_FILE).exists():
        return {}
    from cloudtrain.launcher import config

    path = file or Path(DEFAULT_FILE)
    names = [backend] if backend else config.backends_asked(path)
    return {name: config.load(path, backend=name if len(names) > 1 else backend) for name in names}
