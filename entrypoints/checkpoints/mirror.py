"""The mirror of checkpoints: copies in the background of training and of the next save, and their way back.

Every rank uploads the files that the rank wrote, so many machines send at once; after all have arrived, rank 0 uploads
the manifest and publishes the step as the latest. A published checkpoint is therefore complete. Uploads do not overlap:
a checkpoint that becomes durable during an upload is skipped, but the job's last checkpoint is always uploaded.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from ..errors import TaskError
from ..foreign import is_inside
from ..rank import exchange
from ..stores.store import Store, StoreError, open_store
from . import folder as folders

_News = TypeVar("_News")
LATEST = "latest.json"  # in the mirror: the newest published step
_GROUP_TIMEOUT_S = 6 * 3600.0  # the slowest rank's upload


def open_mirror(uri: str | None, job: str) -> Store | None:
    """Return a job's own store below the mirror's address: the next submit of the same file is a new job.

    None without an address. Raises TaskError for a faulty address.
    """
    try:
        return None if uri is None else open_store(f"{uri.rstrip('/')}/{job}")
    except StoreError as error:
        raise TaskError(f"checkpoint.mirror {error}") from error


def latest(source: Store) -> int | None:
    """Return the step that the mirror has published, None without a published step. Raises OSError."""
    try:
        data, _ = source.read(LATEST)
        return None if data is None else int(json.loads(data)["step"])
    except FileNotFoundError:  # the folder is made by the first upload
        return None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise OSError(f"the mirror's {LATEST} is damaged: {error!r}") from error


def fetch(source: Store, folder: Path, *, replace: bool = False) -> Path | None:
    """Copy the published checkpoint into the folder, unless present; return its path, None if none is published.

    `replace`: a present checkpoint is damaged, and is set aside once the copy is complete. Raises OSError.
    """
    found = latest(source)
    if found is None:
        return None
    name = folders.step_name(found)
    target = folder / name
    if not replace and (target / folders.MANIFEST).exists():
        return target
    partial = folder / f"{name}.tmp"
    items = source.names(f"{name}/")
    if f"{name}/{folders.MANIFEST}" not in items:
        raise FileNotFoundError(f"{LATEST} names {name}, which is not there")
    for item in filter(is_inside, items):
        source.get(item, partial / item.partition("/")[2])
    if os.path.lexists(target):
        folders.set_aside(target, "damaged")
    partial.rename(target)
    return target


@dataclass(frozen=True)
class Uploaded:
    """How the upload of a step ended, the same on all ranks: `fault` is None if the mirror has the checkpoint."""

    step: int
    seconds: float
    fault: str | None


class Background(Generic[_News]):
    """One rank's thread for saves or uploads, one at a time, with a process group of its own."""

    def __init__(self, group_timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=group_timeout_s))
        self._thread: threading.Thread | None = None
        self._news: list[_News] = []

    @property
    def is_busy(self) -> bool:
        """Whether this rank's thread is at work; the ranks' answers may differ."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, meanwhile: Callable[[], None] = lambda: None, limit_s: float = math.inf) -> None:
        """Return after this rank's work, or at the limit; call `meanwhile` once a second."""
        end_s = time.monotonic() + limit_s
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < end_s:
            self._thread.join(1.0)
            meanwhile()

    def news(self) -> list[_News]:
        """Return the results since the last call."""
        found, self._news = self._news, []
        return found

    def _start(self, name: str, run: Callable[..., object], *work: Any) -> None:
        self._thread = threading.Thread(target=run, args=work, name=name, daemon=True)
        self._thread.start()


class Uploader(Background[Uploaded]):
    """One rank's part of all uploads of a job. All ranks create the Uploader together."""

    def __init__(self, to: Store, keep: int) -> None:
        super().__init__(_GROUP_TIMEOUT_S)
        self.to = to
        self._keep = keep
        self._newest: tuple[Path, list[str]] | None = None
        self._published: Path | None = None
        self._path: Path | None = None
        self._begin_s = 0.0

    @property
    def step(self) -> int | None:
        """The step being uploaded, which must not be removed meanwhile. Rank 0 is the last rank to finish an upload."""
        return int(self._path.name[5:]) if self._path is not None and self.is_busy else None

    @property
    def seconds(self) -> float:
        """How long the upload under way has taken so far, else 0."""
        return time.perf_counter() - self._begin_s if self.is_busy else 0.0

    def offer(self, path: Path, names: list[str], *, passes_over: bool) -> None:
        """Start to upload this rank's files of a durable checkpoint. All ranks call, with the same `passes_over`.

        `passes_over`: a rank is still uploading, or the checkpoint is of an earlier start: this checkpoint is uploaded
        at the end, if no newer checkpoint follows.
        """
        self._newest = path, names
        if not passes_over:
            self._begin(path, names)

    def finish(self, meanwhile: Callable[[], None] = lambda: None, limit_s: float = math.inf) -> None:
        """Return once the newest checkpoint is in the mirror, or was tried again, or at the limit.

        All ranks call, with no save under way.
        """
        end_s = time.monotonic() + limit_s
        self.wait(meanwhile, limit_s)
        if self._newest is not None and self._published != self._newest[0] and not self.is_busy:
            self._begin(*self._newest)
            self.wait(meanwhile, end_s - time.monotonic())

    def _begin(self, path: Path, names: list[str]) -> None:
        self._path, self._begin_s = path, time.perf_counter()
        self._start("mirror", self._run, path, names)

    def _run(self, path: Path, names: list[str]) -> None:
        try:
            fault = _upload(self.to, path, names, self._keep, self._group)
        except Exception as error:  # a peer is gone: the training thread will notice too
            fault = str(error)
        if fault is None:
            self._published = path
        self._news.append(Uploaded(int(path.name[5:]), time.perf_counter() - self._begin_s, fault))


def _upload(to: Store, path: Path, names: list[str], keep: int, group: dist.ProcessGroup | None) -> str | None:
    """Copy the checkpoint's files, each rank its own, then publish; return the fault or None. All ranks call.

    A mirror that fails does not end the training: the checkpoint itself is durable, and the next upload tries again.
    """
    fault = None
    try:
        for name in names:
            to.put(path / name, f"{path.name}/{name}")
    except Exception as error:  # any kind of a store's errors: the other ranks wait for the result
        fault = f"{type(error).__name__}: {error}"
    faults = [found for found in exchange.gather(fault, group) if found]
    if dist.get_rank(group) == 0 and not faults:
        try:
            to.put(path / folders.MANIFEST, f"{path.name}/{folders.MANIFEST}")
            to.put(json.dumps({"path": path.name, "step": int(path.name[5:])}).encode(), LATEST)
            _retain(to, keep, int(path.name[5:]), folders.best_step(path.parent))
        except Exception as error:
            faults = [f"{type(error).__name__}: {error}"]
    shared: list[str] = exchange.share(faults, group)
    return shared[0] if shared else None


def _retain(to: Store, keep: int, published: int, best: int | None) -> None:
    """Keep the published step and earlier steps, `keep` in all, and the best step, if the mirror has it.

    Later steps belong to a run that the user went back behind: they stay until training reaches them and writes them
    again.
    """
    steps: dict[int, list[str]] = {}
    for name in to.names("step-"):
        steps.setdefault(int(name.partition("/")[0][5:]), []).append(name)
    for step in sorted((step for step in steps if step <= published), reverse=True)[max(keep, 1) :]:
        if step != best:
            # The manifest first: a half-removed checkpoint must not look complete.
            for name in sorted(steps[step], key=lambda name: not name.endswith(folders.MANIFEST)):
                to.delete(name)
