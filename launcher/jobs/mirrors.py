"""A job's copies of checkpoints in a store (`checkpoint.mirror`), as MIRROR/JOB, read with this machine's credentials.

Folders on hosts are the backends' (`Cleans.left`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cloudtrain.entrypoints.errors import HELD
from cloudtrain.entrypoints.format import one_line
from cloudtrain.entrypoints.stores.store import in_threads, open_store

from ..backend import LeftFiles
from ..errors import ConfigError
from ..job import Job
from ..planning.request_rules import below

TRIES, WORKERS = 1, 8  # of a request; simultaneous removals


def place(job: Job) -> str:
    """Return the address in a store, else an empty text."""
    mirror = str((job.config.get("checkpoint") or {}).get("mirror"))
    return below(mirror, job.id) if re.match("(?!file:).*://", mirror) else ""


def require_new(job: Job) -> None:
    """Raise ConfigError if the place of a new job's copies holds files; a store that cannot be read passes."""
    if any(each.bytes for each in left(job, remove=False)):
        raise ConfigError(HELD.format(place(job)), key="checkpoint.mirror")


def left(job: Job, *, remove: bool) -> Iterator[LeftFiles]:
    """Yield the job's folder with its size, if any; with `remove`, remove its objects."""
    if uri := place(job):
        size, why = None, ""
        try:
            store = open_store(uri, TRIES)
            size = sum((sizes := store.sizes("")).values())
            in_threads(store.delete, sizes if remove else (), WORKERS)
        except OSError as error:
            why = one_line(error)
        if size != 0:
            yield LeftFiles(job.id, uri, size, why)
