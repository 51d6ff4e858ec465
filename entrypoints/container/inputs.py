"""What a node keeps elsewhere: inputs before the job, the time used on earlier machines, the exit report at the end.

If a platform copies or mounts folders by itself, the container order names no folders to copy. The job's time limit and
its deadline include the time on earlier machines; the note of the time is in the checkpoint folder, which the platform
copies to the next machine; if not, a store has a copy too.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import atomic_json, events
from ..contract import ContainerOrder, ExitCodes, ExitReport, sign_fields
from ..stores import claims
from ..stores.store import Store, open_store
from . import folder_sync

EXIT_CODES = ExitCodes(permanent=1, again=143)  # as in a container order, for a node that has no order yet
NAME = ".used.json"
EVERY_S = 30.0  # between two notes
FINISH_S = 20.0  # wait for a slow store
SUPERSEDED = "superseded"  # the reason and the kind of an attempt that ended for the sake of a later attempt
CLAIM_TRIES = 4  # of a request: a store out of reach must not hold the machines


class StagingError(OSError):
    """A file of the job cannot be fetched; the message names the file and the cause.

    `reason` of the exit report: node_failure if a restart may help, SUPERSEDED if the attempt must not run, else error.
    """

    def __init__(self, message: str, reason: str = "error") -> None:
        super().__init__(message)
        self.reason = reason


def order(uri: str, fence: str) -> ContainerOrder:
    """Return the container order, if the order is for this submission. Raises StagingError."""
    folder, _, name = uri.rpartition("/")
    try:
        data, _ = open_store(folder).read(name)
    except OSError as error:
        reason = "error" if isinstance(error, PermissionError) else "node_failure"
        raise StagingError(f"cannot read the job's order: {error}", reason) from error
    if data is None:
        raise StagingError("the container order was withdrawn: this job must not run", SUPERSEDED)
    found: dict[str, Any] = json.loads(data)
    if found.get("fence") != fence:
        raise StagingError("a later submit of this job replaced this one, which must not run", SUPERSEDED)
    return ContainerOrder.load(found)


def require_newest(order: ContainerOrder, root: Path, *, is_head: bool) -> None:
    """Take the claim of the order's attempt on node 0; read the claim on the other nodes. Raises StagingError.

    Without a right on the store, or a package for it, the claim is read where the platform has mounted the store.
    """
    if order.claim_uri is None:
        return
    folder, _, name = order.claim_uri.rpartition("/")
    attempt, places = order.job.attempt, (order.places.checkpoints, order.places.output)
    try:
        claim = claims.take(open_store(folder, CLAIM_TRIES), name, attempt if is_head else 0, starts=is_head)
    except OSError as error:
        copies = (root / place / claims.NAME for place in places)
        claim = next((claims.parsed(copy.read_bytes()) for copy in copies if copy.is_file()), claims.AttemptClaim())
        print(f"the claim of the job's newest attempt cannot be taken: {error}", flush=True)
    if claim.newest > attempt:
        message = f"attempt {claim.newest} of this job has replaced attempt {attempt}, whose machines came too late"
        raise StagingError(f"{message}: nothing was run", SUPERSEDED)


def bring_in(order: ContainerOrder, root: Path) -> ContainerOrder:
    """Fetch the job's inputs, and the folders that continue from an earlier container; return the inputs' paths too.

    An input that the platform has mounted is not copied. Raises StagingError.
    """
    paths = dict(order.places.inputs)
    for name, path in paths.items():  # SageMaker's channel of a single file
        if path.startswith(f"input/data/{name}/") and not (root / path).exists():
            words = f"the input {name}: its address is of a file, and the channel has no {Path(path).name}"
            raise StagingError(f"{words}; end the address of a folder in `/`")
    for name, source in sorted((order.fetched or {}).items()):
        place = Path(source.mounted) if source.mounted else None
        if place is None or not place.exists():
            place = root / "inputs" / name
            if not _bring(f"the input {name}", source.uri, place):
                raise StagingError(f"the input {name}: there is nothing at {source.uri}")
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
    fields |= sign_fields(error) | ({"lines": error["lines"]} if error.get("lines") else {})
    folder, _, name = uri.rpartition("/")
    try:
        open_store(folder).put(json.dumps(fields, default=str).encode(), name)
    except OSError as failure:
        print(f"cloudtrain: the exit report cannot be written: {failure}", flush=True)


def retract(uri: str) -> dict[str, Any]:
    """Delete the exit report of an earlier container, as this container has not ended yet; return the report or {}."""
    folder, _, name = uri.rpartition("/")
    earlier: Any = {}
    with contextlib.suppress(OSError):
        store = open_store(folder)
        with contextlib.suppress(OSError, ValueError):
            earlier = json.loads(store.read(name)[0] or b"{}")
        store.delete(name)
    return earlier if isinstance(earlier, dict) else {}


def _bring(what: str, uri: str, folder: Path) -> int:
    begin_s = time.monotonic()
    try:
        count = folder_sync.bring(uri, folder)
    except OSError as error:
        reason = "error" if isinstance(error, (PermissionError, FileNotFoundError)) else "node_failure"
        raise StagingError(f"cannot fetch {what}: {error}", reason) from error
    if count:
        took_s = time.monotonic() - begin_s
        events.emit("staged", f"fetched {what}: {count} files in {took_s:.1f} s", uri=uri, files=count, seconds=took_s)
    return count


def with_lead_back(order: ContainerOrder, now_s: float) -> ContainerOrder:
    """Return the order with the unused part of the start-up allowance (`lead_s`) added to its limits.

    The platform's clock starts after the submission, so the start-up used at most the time since the submission.
    """
    if order.sent_s is None or now_s < order.sent_s:  # unknown, or the sender's clock is ahead
        return order
    back_s = max(0.0, (order.lead_s or 0) - (now_s - order.sent_s))
    return replace(order, max_duration_s=order.max_duration_s + back_s, deadline_s=order.deadline_s + back_s)


def used_s(folder: Path, job: str, attempt: int, kept_in: str | None = None) -> float:
    """Return the seconds that the attempt has used on earlier machines, 0 at the first start.

    `kept_in`: a store with a copy of the note, as gs://BUCKET/PREFIX. An unreadable store is reported and skipped.
    """
    path = folder / NAME
    found = [_seconds(path, job, attempt)]
    try:
        if kept_in is not None:
            copy = folder / f"{NAME}.kept.tmp"
            open_store(kept_in).get(NAME, copy)
            found.append(_seconds(copy, job, attempt))
            copy.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        print(f"the earlier run time of the job is not known, so its time limit starts again: {error}", flush=True)
    return max(found)


def _seconds(path: Path, job: str, attempt: int) -> float:
    record = atomic_json.read_json(path)
    is_known = isinstance(record, dict) and (record.get("job"), record.get("attempt")) == (job, attempt)
    return float(record["used_s"]) if is_known else 0.0


class Note(threading.Thread):
    """A thread of node 0 that keeps the note up to date."""

    def __init__(self, folder: Path, job: str, attempt: int, before_s: float, kept_in: str | None = None) -> None:
        super().__init__(name="used time", daemon=True)
        self._path = folder / NAME
        self._kept_in = kept_in
        self._store: Store | None = None
        self._record: dict[str, Any] = {"job": job, "attempt": attempt}
        self._begin_s = time.monotonic() - before_s
        self._is_over = threading.Event()

    def finish(self) -> None:
        """Write the note a last time, and end the thread."""
        self._is_over.set()
        self.join(FINISH_S)

    def run(self) -> None:
        """Write the note every EVERY_S, and at the end."""
        while not self._is_over.wait(EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the next write may succeed
            atomic_json.write_json(self._path, {**self._record, "used_s": time.monotonic() - self._begin_s})
            if self._store is None and self._kept_in is not None:
                self._store = open_store(self._kept_in)
            if self._store is not None:
                self._store.put(self._path, NAME)
