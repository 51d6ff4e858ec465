"""`cloudtrain artifacts`: the output files of a job."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import click

from cloudtrain.entrypoints.format import counted

from ..errors import CloudtrainError, ConfigError, CredentialError, UnreachableError, UsageError
from ..job import Job
from ..text.terminal import print_json, print_lines, say, say_each
from .options import job_argument, json_option


@click.command("artifacts")
@job_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The folder to copy to.  [default: JOB-output]")
@json_option
def command(job: str, output: Path | None, as_json: bool) -> int:
    """Fetch a job's output folder; of a script also its checkpoint folder, with the files that `keep` names."""
    from ..jobs.refresh import refresh
    from ..store.registry import Registry

    registry = Registry()
    found = refresh(registry, registry.find(job))
    if found.attempt.ref is None:
        raise UsageError(f"{found.id} was never sent: it has left nothing")
    if found.active:
        say(f"{found.id} is still running: what is there may not be whole")
    folder = output or Path(f"{found.id}-output")
    is_new = not folder.exists()
    if not is_new and not folder.is_dir():
        raise UsageError(f"{folder} is a file: -o needs a folder")
    files: list[Path] = []
    try:
        files = _fetched(found, folder)
    finally:
        if is_new and not any(path.is_file() for path in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
    if is_new and files:  # the folder may be inside the code folder, and must not be shipped
        with contextlib.suppress(OSError):
            (folder / ".gitignore").write_text("*\n")
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


def _fetched(job: Job, folder: Path) -> list[Path]:
    """Copy the job's files to the folder and return their paths. Raises CloudtrainError if the job has no files."""
    from .. import backend as backends

    backend, ref = backends.load(job.backend_of(job.attempt)), job.attempt.ref
    assert ref is not None
    if job.asked.task or not isinstance(backend, backends.HasCheckpoints):
        return backend.artifacts(ref, folder)
    files: list[Path] = []
    missing: list[CloudtrainError] = []
    for fetch in (backend.artifacts, backend.checkpoints):
        try:
            files += fetch(ref, folder)
        except (ConfigError, CredentialError, UnreachableError):
            raise
        except CloudtrainError as error:  # one of the two folders may be empty
            missing.append(error)
    if not files and missing:
        raise missing[0]
    say_each(f"nothing came from one of the two folders: {each.message}" for each in missing)
    return files
