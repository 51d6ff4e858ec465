"""Checkpoints that are complete or absent, and known to be intact before anything trusts them.

    step-00000120.tmp/ -> state.pt, trainer.json, manifest.json (size and sha256 of each) -> fsync -> rename to
    step-00000120/ -> fsync of the parent -> only then retention

Nothing here is collective: rank 0 calls it, and train.py lets the ranks agree on what came of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

__all__ = ["CheckpointError", "Found", "list_steps", "newest", "open_found", "prepare", "read_state", "retain", "save"]
__all__ += ["set_aside", "verify", "write_weights"]

STATE, TRAINER, MANIFEST = "state.pt", "trainer.json", "manifest.json"

_NAME = re.compile(r"step-(\d{8,})")
_CHUNK_BYTES = 1 << 20


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message says which older one is intact."""


@dataclass(frozen=True)
class Found:
    """A checkpoint whose checksums hold; `trainer` is its trainer.json."""

    path: Path
    step: int
    trainer: dict[str, Any]


def prepare(folder: Path) -> None:
    """Make the folder; remove what an interrupted save or removal left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def list_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every finished checkpoint, the newest first; whether they are intact is not looked at."""
    found = [(int(match[1]), entry) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name))]
    return sorted(found, reverse=True)


def save(folder: Path, step: int, state: dict[str, Any], trainer: dict[str, Any]) -> tuple[Path, int]:
    """Write the checkpoint durably; return its path and size in bytes. Raises CheckpointError, leaving no trace."""
    final = folder / f"step-{step:08d}"
    partial = folder / f"{final.name}.tmp"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        files = {
            STATE: _write_torch(partial / STATE, state),
            TRAINER: _write_json(partial / TRAINER, trainer),
        }
        manifest = _write_json(partial / MANIFEST, {"files": files})
        _fsync_folder(partial)
        if final.exists():  # of an earlier run, or damaged: what we hold is better, but it is not ours to delete
            set_aside(final, "old")
        partial.rename(final)
        _fsync_folder(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(_why_not(folder, step, state, error)) from error
    return final, sum(int(entry["size"]) for entry in (*files.values(), manifest))


def write_weights(path: Path, weights: dict[str, Any]) -> None:
    """Write a plain state dict by write, fsync and rename. Raises OSError, leaving what was there before."""
    partial = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_torch(partial, weights)
        partial.replace(path)
        _fsync_folder(path.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def verify(path: Path) -> str | None:
    """Return what is wrong with the checkpoint in a few words, or None where every byte is as it was written."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        if not {STATE, TRAINER} <= set(files):
            return f"{MANIFEST} does not list {STATE} and {TRAINER}"
        for name, entry in files.items():
            size = (path / name).stat().st_size
            if size != entry["size"]:
                return f"{name} has {size} bytes of {entry['size']}"
            if _sha256(path / name) != entry["sha256"]:
                return f"{name} has another sha256 than when it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"it cannot be read: {error}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    return None


def open_found(path: Path) -> Found:
    """Return the checkpoint at the path. Raises CheckpointError where it is not intact."""
    fault = verify(path)
    if fault:
        raise CheckpointError(f"checkpoint {path} is damaged: {fault}")
    trainer = json.loads((path / TRAINER).read_text())
    return Found(path, int(trainer["step"]), trainer)


def newest(folder: Path) -> tuple[Found | None, list[tuple[Path, str]]]:
    """Return the newest intact checkpoint, and the newer ones that are not, each with what is wrong with it."""
    damaged: list[tuple[Path, str]] = []
    for _, path in list_steps(folder):
        fault = verify(path)
        if fault is None:
            return open_found(path), damaged
        damaged.append((path, fault))
    return None, damaged


def read_state(path: Path) -> dict[str, Any]:
    """Return what `save` was given as `state`, on the CPU. Only tensors and plain values are unpickled."""
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state


def retain(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep`. Call it only after the newest is durable."""
    for _, path in list_steps(folder)[max(keep, 1) :]:
        doomed = path.with_name(path.name + ".tmp")  # half removed, it must not look complete
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def set_aside(path: Path, why: str) -> Path:
    """Rename the checkpoint so that nothing finds it any more; a person still can. Return its new path."""
    aside = path.with_name(f"{path.name}.{why}-{time.time_ns()}")
    path.rename(aside)
    return aside


class _HashingWriter:
    """A file for torch.save that hashes what passes and keeps the first OSError.

    torch turns an exception from `write` into `RuntimeError: unexpected pos`, which names neither file nor cause.
    So after an error the rest is swallowed, and the caller asks for the error.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._size = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                self._file.write(data)
                self._sha256.update(data)
                self._size += size
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Nothing to do: the file is flushed once, before its fsync."""

    def entry(self) -> dict[str, Any]:
        return {"sha256": self._sha256.hexdigest(), "size": self._size}


def _write_torch(path: Path, value: Any) -> dict[str, Any]:
    with path.open("wb") as file:
        writer = _HashingWriter(file)
        torch.save(value, writer)  # type: ignore[arg-type]  # it asks for no more than write and flush
        if writer.error is not None:
            raise writer.error
        file.flush()
        os.fsync(file.fileno())
    return writer.entry()


def _write_json(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(value, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _fsync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _why_not(folder: Path, step: int, state: dict[str, Any], error: OSError) -> str:
    needed = _tensor_bytes(state)
    try:
        free = f"{shutil.disk_usage(folder).free:,} bytes free there"
        kept = [path for _, path in list_steps(folder) if verify(path) is None][:1]
    except OSError:
        free, kept = "free space unknown", []
    intact = (
        f"the checkpoint of step {int(kept[0].name[5:])} is intact ({kept[0]})" if kept else "there is no older one"
    )
    cause = error.strerror or error
    return f"cannot save step {step} in {folder}: {cause}; about {needed:,} bytes needed, {free}; {intact}"


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    return sum(map(_tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0
