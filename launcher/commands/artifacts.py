"""`cloudtrain artifacts`: the output files of a job."""

from __future__ import annotations

from pathlib import Path

import click

from cloudtrain.entrypoints.format import counted

from ..text.terminal import print_json, print_lines, say
from .options import job_argument, json_option, path_option


@click.command("artifacts")
@job_argument
@path_option("-o", "--output", help="The folder to copy to.  [default: JOB-output]")
@json_option
def command(job: str, output: Path | None, as_json: bool) -> int:
    """Fetch a job's output folder; of a script also its checkpoint folder, with the files that `keep` names."""
    from ..jobs import artifacts
    from ..jobs.refresh import refresh
    from ..store.registry import Registry

    registry = Registry()
    found = refresh(registry, registry.find(job))
    folder = output or Path(f"{found.id}-output")
    files = artifacts.fetch(found, folder)
    if as_json:
        print_json({"job": found.id, "folder": str(folder), "files": [str(path) for path in files]})
        return 0
    print_lines([str(path) for path in files])
    if files:
        say(f"{counted(len(files), 'file')} in {folder}")
    else:
        say(f"{found.id} has no output files{' yet' if found.active else ''}")
    if not files and not found.asked.task:
        say("  hint: `keep` in the config names the script's files and folders to keep (docs/scripts.md, Files: keep)")
    return 0
