"""The download of a job's output: SageMaker packs the output folder into an archive."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

from cloudtrain.entrypoints import bundle_file
from cloudtrain.launcher.errors import CloudtrainError, ConfigError
from cloudtrain.launcher.text.terminal import say

from . import files
from .api import AwsAccess


def download(access: AwsAccess, uri: str, job: str, folder: Path) -> list[Path]:
    """Unpack the job's output archives below the folder; return the files.

    Raises CloudtrainError if no archive exists yet, ConfigError if the folder cannot be written.
    """
    found: list[Path] = []
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(prefix="cloudtrain-") as scratch:
        for name in ("model.tar.gz", "output.tar.gz"):
            archive = Path(scratch) / name
            if not files.of(access).get(f"{uri.rstrip('/')}/{job}/output/{name}", archive):
                continue
            try:
                found += bundle_file.extract(archive, folder, left_out)
            except (bundle_file.BundleError, tarfile.TarError, EOFError) as error:
                raise CloudtrainError(f"{name} of {job} cannot be unpacked: {error}") from error
            except OSError as error:
                raise ConfigError(f"cannot write there: {error.strerror}", where=str(folder)) from error
    for words in left_out:
        say(f"left out: {words}")
    if not found:
        hint = "the output is uploaded at the job's end, if the job has written any"
        raise CloudtrainError(f"there is no output of {job}", where=uri, hint=hint)
    return found
