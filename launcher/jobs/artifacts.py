"""A job's output files, fetched to a folder of the user."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from .. import backend as backends
from ..errors import CloudtrainError, ConfigError, CredentialError, UnreachableError, UsageError
from ..job import Job
from ..text.terminal import say, say_each


def fetch(job: Job, folder: Path) -> list[Path]:
    """Copy the job's files to the folder and return their paths.

    A folder that no file reached is removed again. Raises UsageError for a job that was never sent, and for a file in
    the folder's place, CloudtrainError if the job has no files.
    """
    if job.attempt.ref is None:
        raise UsageError(f"{job.id} was never sent: it has left nothing")
    if job.active:
        say(f"{job.id} is still running: what is there may not be whole")
    is_new = not folder.exists()
    if not is_new and not folder.is_dir():
        raise UsageError(f"{folder} is a file: name a folder")
    files: list[Path] = []
    try:
        files = _fetched(job, folder)
    finally:
        if is_new and not any(path.is_file() for path in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
    if is_new and files:  # the folder may be inside the code folder, and must not be shipped
        with contextlib.suppress(OSError):
            (folder / ".gitignore").write_text("*\n")
    return files


def _fetched(job: Job, folder: Path) -> list[Path]:
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
