"""Writes checkpoints while training continues: a copy in host memory, then a thread, then one manifest for all ranks.

`begin` copies this rank's share of the state and returns; training waits only for the copy. A thread of each rank
writes the copy to its shard. The threads exchange their results over a process group of their own (two threads in one
gloo group abort the process, torch 2.13), and rank 0 gives the checkpoint its name or removes it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..rank import exchange
from . import folder as folders
from . import layout, shards
from .mirror import Background, Uploader

_GROUP_TIMEOUT_S = 3600.0  # the slowest rank's disk or network share


@dataclass(frozen=True)
class Saved:
    """A durable checkpoint. `blocked_s`: how long training waited for the copy; `seconds`: until durable."""

    step: int
    path: Path
    size: int
    blocked_s: float
    seconds: float


@dataclass(frozen=True)
class Failure:
    """Why a step could not be saved, the same on all ranks. `is_sick`: a parameter is nan or infinite."""

    step: int
    message: str
    is_sick: bool = False


@dataclass(frozen=True)
class Snapshot:
    """The state to save: tensors of all ranks or of each rank, and values that only rank 0 writes.

    `parameters` are the names of tensors that must be finite; `best` has the metric and its value for a new best step.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    own: Mapping[str, torch.Tensor]  # of this rank alone
    plain: Any
    trainer: dict[str, Any]
    parameters: frozenset[str] = frozenset()
    best: tuple[str, float] | None = None


class Saver(Background[Saved]):
    """One rank's part of all saves of a job, one save at a time. All ranks create it together."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        keep: int,
        uploads: Uploader | None = None,
        holders: Sequence[int] | None = None,
    ) -> None:
        """`uploads` copies durable checkpoints to a second place; `holders` as in layout.py, all ranks by default."""
        super().__init__(_GROUP_TIMEOUT_S)
        self.folder = folder
        self._rank = dist.get_rank()
        self._holders = range(dist.get_world_size()) if holders is None else holders
        self._keep = keep
        self._uploads = uploads
        self._is_pinned = device.type == "cuda"
        self._writers = visible_to(folder)
        self._boxes: list[shards.Box] = []
        self._head = b""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._views: list[torch.Tensor] = []
        self._parameters: frozenset[str] = frozenset()
        self.failure: Failure | None = None

    def begin(self, snapshot: Snapshot, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Copy the state and return; a thread does the rest. Waits for the previous save. All ranks call.

        If an earlier save has failed, `failure` is set and nothing is saved. `meanwhile` is called as in `wait`.
        """
        begin_s = time.perf_counter()
        self.wait(meanwhile)
        if self.failure is not None:
            return
        self._parameters = snapshot.parameters
        own = [(layout.local_box(f"rank.{self._rank}.{n}", t), t) for n, t in snapshot.own.items()]
        is_writer = self._rank in self._writers
        pieces = layout.pieces(snapshot.tensors, self._rank, self._writers, self._holders)
        if max(len(self._holders), len(self._writers)) < dist.get_world_size():
            pieces += layout.foreign_pieces(snapshot.tensors, self._rank, self._writers)
        self._copy(pieces + (own if is_writer else []))
        plain = io.BytesIO()
        # A file that is copied from elsewhere has another name of its save than trainer.json.
        save = f"{snapshot.trainer.get('job')} {snapshot.step} {os.urandom(8).hex()}"
        if self._rank == 0:
            torch.save({**snapshot.plain, "save": save}, plain)
        blocked_s = time.perf_counter() - begin_s
        trainer = {**snapshot.trainer, "writers": len(self._writers), "save": save}
        write = functools.partial(self._write, snapshot.step, plain.getvalue(), trainer, snapshot.best)
        self._start("checkpoint", self._run, snapshot.step, write, begin_s, blocked_s)

    def mark_best(self, step: int, best: tuple[str, float], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Record the step of the begun save as the best, and remove the best before; rank 0 only."""
        self.wait(meanwhile)
        with contextlib.suppress(OSError):  # as in `_settle`
            folders.mark_best(self.folder, step, *best)
            folders.retain(self.folder, self._keep, self._uploads.step if self._uploads else None)

    def meet(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for all ranks, up to the slowest disk; all ranks call, with no save under way."""
        self._start("meeting", dist.barrier, self._group)
        self.wait(meanwhile)

    def _copy(self, pieces: Sequence[layout.Piece]) -> None:
        boxes = [box for box, _ in pieces]
        if boxes != self._boxes:  # the first save, or the first after the optimizer has created its state
            self._head, positions, size = shards.place(boxes)
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
            self._views = [
                self._buffer[at : at + box.nbytes].view(box.dtype).view(box.shape)
                for box, at in zip(boxes, positions, strict=True)
            ]
            self._boxes = boxes
        for view, (_, values) in zip(self._views, pieces, strict=True):
            view.copy_(values.detach(), non_blocking=self._is_pinned)
        if self._is_pinned:
            torch.cuda.synchronize()

    def _run(self, step: int, write: Callable[[], Any], begin_s: float, blocked_s: float) -> None:
        try:
            answer = write()
        except Exception as error:  # a peer is gone: the training thread will notice too
            answer = {"error": folders.why_not(self.folder, step, error)}
        if "error" in answer:
            self.failure = Failure(step, answer["error"], answer.get("sick", False))
            return
        seconds = time.perf_counter() - begin_s
        self._news.append(Saved(step, Path(answer["path"]), answer["size"], blocked_s, seconds))
        if self._uploads is not None:
            self._uploads.offer(Path(answer["path"]), self._own_names(), passes_over=answer["is_uploading"])

    def _write(self, step: int, plain: bytes, trainer: dict[str, Any], best: tuple[str, float] | None) -> Any:
        """Write this rank's files and agree on the result; return `path` and `size`, or `error`, equal on all ranks."""
        is_uploading = self._uploads is not None and self._uploads.is_busy
        asked = exchange.gather([len(self._head) + self._buffer.nbytes, is_uploading], self._group)
        needed = sum(size for size, _ in asked)
        agreed: dict[str, Any] = {}
        if self._rank == 0:
            try:
                partial = folders.begin(self.folder, step, needed + len(plain))
                agreed = {"partial": str(partial), "save": trainer["save"]}
            except OSError as error:
                agreed = {"error": folders.why_not(self.folder, step, error)}
        agreed = exchange.share(agreed, self._group)
        if "error" in agreed:
            return agreed
        partial = Path(agreed["partial"])
        written = self._write_files(partial, step, plain, {**trainer, "save": agreed["save"]})
        answers = exchange.gather(written, self._group)
        agreed = {}
        if self._rank == 0:
            agreed = self._settle(partial, step, answers, best)
        agreed = exchange.share(agreed, self._group)
        return {**agreed, "is_uploading": any(is_busy for _, is_busy in asked)}

    def _own_names(self) -> list[str]:
        small = [folders.PLAIN, folders.TRAINER] if self._rank == 0 else []
        return small + ([self._shard_name()] if self._rank in self._writers else [])

    def _shard_name(self) -> str:
        return f"shard-{self._writers.index(self._rank):05d}-of-{len(self._writers):05d}.safetensors"

    def _write_files(self, partial: Path, step: int, plain: bytes, trainer: dict[str, Any]) -> dict[str, Any]:
        """Write this rank's files; return their sizes and checksums, or the fault."""
        values = zip(self._boxes, self._views, strict=True)
        sick = next((box.name for box, view in values if _is_sick(box, view, self._parameters)), None)
        if sick is not None:
            return {"sick": sick}
        files: dict[str, Any] = {}
        try:
            if self._rank in self._writers:
                name = self._shard_name()
                files[name] = shards.write(partial / name, shards.marked(self._head, trainer["save"]), self._buffer)
            if self._rank == 0:
                files[folders.PLAIN] = folders.write_bytes(partial / folders.PLAIN, plain)
                files[folders.TRAINER] = folders.write_json(partial / folders.TRAINER, trainer)
        except (OSError, ValueError, TypeError) as error:
            return {"error": folders.why_not(self.folder, step, error)}
        return {"files": files}

    def _settle(
        self, partial: Path, step: int, answers: list[dict[str, Any]], best: tuple[str, float] | None
    ) -> dict[str, Any]:
        """Give the checkpoint its name, or remove its partial folder; rank 0 only."""
        sick = next((answer["sick"] for answer in answers if "sick" in answer), None)
        if sick is not None:
            shutil.rmtree(partial, ignore_errors=True)
            what = sick.partition(".")[2]
            return {"error": f"the parameter {what} is nan or infinite after step {step}", "sick": True}
        error = next((answer["error"] for answer in answers if "error" in answer), None)
        try:
            if error is None:
                files = {name: entry for answer in answers for name, entry in answer["files"].items()}
                path = folders.finish(self.folder, step, files)
                with contextlib.suppress(OSError):  # a checkpoint too many is harmless, and the next save tries again
                    if best is not None:
                        folders.mark_best(self.folder, step, *best)
                    folders.retain(self.folder, self._keep, self._uploads.step if self._uploads else None)
                return {"path": str(path), "size": sum(int(entry["size"]) for entry in files.values())}
        except OSError as fault:
            error = folders.why_not(self.folder, step, fault)
        shutil.rmtree(partial, ignore_errors=True)
        return {"error": error}


def visible_to(folder: Path) -> list[int]:
    """Return the ranks that see rank 0's folder; rank 0 creates the folder if absent. All ranks call.

    Without a shared file system the ranks of one machine see the folder, and write for all ranks.
    """
    fault = None
    mark = folder / f".seen-{time.time_ns():x}"
    if dist.get_rank() == 0:
        try:
            folders.prepare(folder)
            mark.touch()
        except OSError as error:
            fault = f"checkpoints cannot be kept in {folder}: {error.strerror}"
    fault, name = exchange.share([fault, mark.name])
    if fault:
        raise folders.CheckpointError(fault)
    seen = exchange.gather(_appears(folder / name))
    if dist.get_rank() == 0:
        mark.unlink(missing_ok=True)
    return [rank for rank, sees in enumerate(seen) if sees]


def _appears(path: Path, patience_s: float = 3.0) -> bool:
    """Return whether the file exists; a network share may show the file a little later."""
    if not path.parent.is_dir():
        return False
    end = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _is_sick(box: shards.Box, values: torch.Tensor, parameters: frozenset[str]) -> bool:
    """Return whether the weights are invalid. A buffer may hold infinities (a mask), but no nan."""
    if not box.name.startswith("model.") or not box.dtype.is_floating_point:
        return False
    bad = ~torch.isfinite(values) if box.name in parameters else torch.isnan(values)
    return bool(bad.any())
