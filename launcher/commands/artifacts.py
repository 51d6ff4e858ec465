"""`cloudtrain artifacts`: what a job has left in its output folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.options import job_argument, json_option
from cloudtrain.launcher.terminal import print_json, print_lines, say

__all__ = ["command"]


@click.command("artifacts")
@job_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The folder to copy to.  [default: JOB-output]")
@json_option
def command(job: str, output: Path | None, as_json: bool) -> int:
    """Fetch what a job has left in its output folder: the trainer's weights, whatever a script has put there."""
    from cloudtrain.launcher import backend as backends
    from cloudtrain.launcher.refresh import refresh
    from cloudtrain.launcher.registry import Registry

    registry = Registry()
    found = refresh(registry, registry.find(job))
    if found.attempt.ref is None:
        raise UsageError(f"{found.id} was never sent: it has left nothing")
    if found.active:
        say(f"{found.id} is still running: what is there may not be whole")
    folder = output or Path(f"{found.id}-output")
    is_new = not folder.exists()
    files = backends.load(found.backend).artifacts(found.attempt.ref, folder)
    if is_new:  # it may lie in the code folder, and is no code
        with contextlib.suppress(OSError):
            (folder / ".gitignore").write_text("*\n")
    if as_json:
        print_json({"job": found.id, "folder": str(folder), "files": [str(path) for path in files]})
        return 0
    print_lines([str(path) for path in files])
    say(f"{len(files)} file{'s' * (len(files) != 1)} in {folder}")
    return 0
