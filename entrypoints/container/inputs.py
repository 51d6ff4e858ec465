"""Copies files between a bucket and a node without a shared disk: inputs before the job, the exit report at the end.

If a platform copies or mounts folders by itself, the container order names no folders to copy.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import events
from ..contract import ContainerOrder, ExitCodes, ExitReport
from ..stores.store import open_store
from . import folder_sync

EXIT_CODES = ExitCodes(permanent=1, again=143)  # as in a container order, for a node that has no order yet


class StagingError(OSError):
    """A file of the job cannot be fetched; the message names the file and the cause. `may_mend`: a restart may help."""

    def __init__(self, message: str, *, may_mend: bool) -> None:
        super().__init__(message)
        self.may_mend = may_mend


def order(uri: str, fence: str) -> ContainerOrder:
    """Return the container order, if the order is for this submission. Raises StagingError."""
    folder, _, name = uri.rpartition("/")
    try:
        data, _ = open_store(folder).read(name)
    except OSError as error:
        lasts = isinstance(error, PermissionError)
        raise StagingError(f"cannot read the job's order: {error}", may_mend=not lasts) from error
    if data is None:
        raise StagingError("the container order was withdrawn: this job must not run", may_mend=False)
    found: dict[str, Any] = json.loads(data)
    if found.get("fence") != fence:
        raise StagingError("a later submit of this job replaced this one, which must not run", may_mend=False)
    return ContainerOrder.load(found)


def bring_in(order: ContainerOrder, root: Path) -> ContainerOrder:
    """Fetch the job's inputs, and the folders that continue from an earlier container; return the inputs' paths too.

    An input that the platform has mounted is not copied. Raises StagingError.
    """
    paths = dict(order.places.inputs)
    for name, source in sorted((order.fetched or {}).items()):
        place = Path(source.mounted) if source.mounted else None
        if place is None or not place.exists():
            place = root / "inputs" / name
            if not _bring(f"the input {name}", source.uri, place):
                raise StagingError(f"the input {name}: there is nothing at {source.uri}", may_mend=False)
            one_object = place / source.uri.rpartition("/")[2]
            place = one_object if one_object.is_file() else place
        paths[name] = str(place)
    for each in order.carried:
        if each.back:
            _bring(f"the folder {each.place}", each.uri, root / each.place)
    return replace(order, places=replace(order.places, inputs=paths))


def report(uri: str, verdict: ExitReport) -> None:
    """Write the exit report for the launcher; if the write fails, log the failure."""
    error = verdict.error or {}
    fields: dict[str, Any] = {key: getattr(verdict, key) for key in ("state", "reason", "resumable", "restarts")}
    fields |= {key: error.get(key) for key in ("rank", "kind", "type", "message", "traceback")}
    fields |= {"lines": error["lines"]} if error.get("lines") else {}
    folder, _, name = uri.rpartition("/")
    try:
        open_store(folder).put(json.dumps(fields, default=str).encode(), name)
    except OSError as failure:
        print(f"cloudtrain: the exit report cannot be written: {failure}", flush=True)


def retract(uri: str) -> None:
    """Delete the exit report of an earlier container; this container has not ended yet."""
    folder, _, name = uri.rpartition("/")
    with contextlib.suppress(OSError):
        open_store(folder).delete(name)


def _bring(what: str, uri: str, folder: Path) -> int:
    begin_s = time.monotonic()
    try:
        count = folder_sync.bring(uri, folder)
    except OSError as error:
        lasts = isinstance(error, (PermissionError, FileNotFoundError))
        raise StagingError(f"cannot fetch {what}: {error}", may_mend=not lasts) from error
    if count:
        took_s = time.monotonic() - begin_s
        events.emit("staged", f"fetched {what}: {count} files in {took_s:.1f} s", uri=uri, files=count, seconds=took_s)
    return count
