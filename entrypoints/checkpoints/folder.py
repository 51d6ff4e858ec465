"""A job's checkpoints on disk: the list of steps, verification, and retention.

Nothing in this module is collective or needs torch: rank 0 calls most functions, and the ranks agree on the results.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import atomic_json

PLAIN, TRAINER, MANIFEST, BEST = "plain.pt", "trainer.json", "manifest.json", "best.json"
FORMAT = 2

_NAME = re.compile(r"step-(\d{8,})")
_SAVE = re.compile(rb'.{8}\{"__metadata__": ?\{"save": ?"([\w .-]+)"', re.DOTALL)
_SHARD = re.compile(r"shard-(\d+)-of-(\d+)\.safetensors")
_MAYBE_INT, _MAYBE_NUMBER = (int, type(None)), (int, float, type(None))
# The types of trainer.json's fields. `step` is required; the other fields may be absent.
_TRAINER: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("step", "samples", "skipped", "stale", "falls", "world_size"), (int,)),
    **dict.fromkeys(("evaluated_step", "best_step"), _MAYBE_INT),
    **dict.fromkeys(("loss", "best"), _MAYBE_NUMBER),
    "save_s": (int, float),
    "best_of": (str, type(None)),
    "metrics": (dict,),
    "extra": (list,),  # the names of the model's state that is no tensor (`get_extra_state`)
    "parent": (dict, type(None)),
    "tied": (dict,),  # the further names of each tied weight, with the name that its average has
    **dict.fromkeys(("job", "optimizer", "save"), (str,)),
}
# Errors of a path that are faults of the checkpoint. Any other OSError may be a fault of the disk.
_BROKEN_PATH = {
    errno.ENOTDIR: "is a file in the place of a folder",
    errno.ELOOP: "is a link to itself",
    errno.ENAMETOOLONG: "is a name that no file can have",
}


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the older checkpoint that is intact."""


class AllDamagedError(CheckpointError):
    """The job has checkpoints, and all are damaged. The launcher knows this error by its name."""


class Unreadable(CheckpointError):
    """A checkpoint cannot be read on this machine now; the checkpoint may be intact, and must not be skipped."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint whose checksums are right; `trainer` is its trainer.json, `files` is the manifest's list."""

    path: Path
    step: int
    trainer: dict[str, Any]
    files: dict[str, dict[str, Any]]


def step_name(step: int) -> str:
    """Return the folder's name for a step."""
    return f"step-{step:08d}"


def prepare(folder: Path) -> None:
    """Create the folder; remove the remains of an interrupted save or removal."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def list_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every finished checkpoint, the newest first; verifies no checkpoint."""
    found = [(int(match[1]), entry) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name))]
    return sorted(found, reverse=True)


def begin(folder: Path, step: int, needed: int) -> Path:
    """Create and return the folder for the step's files, if the disk has room. Raises OSError."""
    partial = folder / f"{step_name(step)}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)  # a user may have removed the folder
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes needed, {free:,} free there")
    partial.mkdir(parents=True)
    return partial


def finish(folder: Path, step: int, files: dict[str, dict[str, Any]]) -> Path:
    """Write the manifest and give the folder its name; return its path. Raises OSError."""
    final = folder / step_name(step)
    partial = folder / f"{final.name}.tmp"
    text = json.dumps({"format": FORMAT, "files": files}, separators=(",", ":"))
    write_bytes(partial / MANIFEST, f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode())
    atomic_json.sync(partial)
    if final.exists():  # of an earlier run, or damaged: the new folder is better, but the old is not ours to delete
        set_aside(final, "old")
    partial.rename(final)
    atomic_json.sync(folder)
    return final


def write_json(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """Write the object durably; return size and crc32 for the manifest. Raises OSError."""
    return write_bytes(path, json.dumps(value, separators=(",", ":")).encode())


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """Write the bytes durably; return size and crc32 for the manifest. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}


def read(path: Path) -> bytes:
    """Return the file's bytes. Raises OSError, ValueError if the path is no regular file: a pipe never ends."""
    _size(path)
    return path.read_bytes()


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return the files that the checkpoint must have. Raises OSError, and the errors of `parse_manifest`."""
    return parse_manifest(read(path / MANIFEST), path)


def parse_manifest(data: bytes, path: object) -> dict[str, dict[str, Any]]:
    """Return the files that a manifest lists; `path` is for messages.

    Raises ValueError if the manifest is damaged, Unreadable for another format.
    """
    text, _, checksum = data.decode().partition("\n")
    if checksum != f"{zlib.crc32(text.encode()):08x}\n":
        raise ValueError(f"{MANIFEST} is not readable: its checksum differs from the stored checksum")
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            here = f"this trainer reads format {FORMAT}: another version wrote the checkpoint"
            raise Unreadable(f"{path} has format {manifest['format']}, {here}")
        files: dict[str, dict[str, Any]] = {
            name: {"size": entry["size"], "crc32": entry["crc32"]} for name, entry in manifest["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is not readable: {error}") from error
    shards = [match.groups() for match in map(_SHARD.fullmatch, files) if match]
    whole = [(f"{number:05d}", f"{len(shards):05d}") for number in range(len(shards))]
    if not shards or sorted(shards) != whole or not {TRAINER, PLAIN} <= set(files):
        raise ValueError(f"{MANIFEST} does not list all files of a checkpoint, but {', '.join(sorted(files))[:200]}")
    if outside := [name for name in files if "/" in name or "\0" in name]:
        raise ValueError(f"{MANIFEST} lists {outside[0]!r:.80}, which is no file of this folder")
    return files


def read_trainer(path: Path, name: str | None = None) -> dict[str, Any]:
    """Return trainer.json. Raises OSError, ValueError if its fields contradict each other or the folder's name.

    `name`: the folder's name, if `path` does not have it yet.
    """
    try:
        trainer = json.loads(read(path / TRAINER))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{TRAINER} is not readable: {error}") from error
    if not isinstance(trainer, dict):
        raise ValueError(f"{TRAINER} holds no object")
    for field, kinds in _TRAINER.items():
        value = trainer.get(field)
        is_wrong = type(value) not in kinds or (type(value) is int and value < 0 and kinds != _MAYBE_NUMBER)
        if is_wrong and (field in trainer or field == "step"):
            raise ValueError(f"{TRAINER} has {value!r:.80} as its {field}")
    step = trainer["step"]
    for field in ("evaluated_step", "best_step"):
        if (trainer.get(field) or 0) > step:
            raise ValueError(f"{TRAINER} is of step {step}, and its {field} is {trainer[field]}")
    name = name or path.name
    if _NAME.fullmatch(name) and name != step_name(step):
        raise ValueError(f"{TRAINER} is of step {step}, which contradicts the folder's name {name}")
    return trainer


def verify(path: Path, only: Iterable[str] | None = None) -> str | None:
    """Return the fault of the checkpoint in a few words, or None if every byte is as written.

    Raises Unreadable if the checkpoint cannot be read for an outside reason. `only`: the files whose bytes are read,
    and of a shard the name of its save (which loader.open_reader also compares); other files are checked for presence
    and size. The content of trainer.json is always checked.
    """
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return f"{path.name} {_BROKEN_PATH[errno.ENOTDIR]}"
        files = read_manifest(path)
        for name, entry in files.items():
            size = _size(path / name)
            if size != entry["size"]:
                return f"{name} has {size} bytes of {entry['size']}"
        for name in files if only is None else only:
            if _crc32(path / name) != files[name]["crc32"]:
                return f"the checksum of {name} differs from the manifest"
        save = read_trainer(path).get("save")
        for name in filter(_SHARD.fullmatch, files if only is None else only):
            if save is not None and _save_of(path / name) != save:
                return f"{name} is of another save than {TRAINER}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        if error.errno in _BROKEN_PATH:
            return f"{Path(error.filename or path).name} {_BROKEN_PATH[error.errno]}"
        raise Unreadable(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        return str(error)
    return None


def open_found(path: Path) -> FoundCheckpoint:
    """Return the checkpoint at the path, its small files verified. Raises CheckpointError for a damaged checkpoint."""
    fault = verify(path, only=(TRAINER, PLAIN))
    if fault:
        raise CheckpointError(f"checkpoint {path} is damaged: {fault}")
    trainer = read_trainer(path)
    return FoundCheckpoint(path, trainer["step"], trainer, read_manifest(path))


def retain(folder: Path, keep: int, spared: int | None = None) -> None:
    """Remove all but the newest `keep`, the best and `spared`. Call it only after the newest is durable."""
    best = best_step(folder)
    for step, path in list_steps(folder)[max(keep, 1) :]:
        if step not in (best, spared):
            doomed = path.with_name(path.name + ".tmp")  # a half-removed checkpoint must not look complete
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def mark_best(folder: Path, step: int, metric: str, value: float) -> None:
    """Record the best step so far; `retain` spares the step. Raises OSError."""
    note = {"step": step, "metric": metric, "value": value, "path": step_name(step)}
    atomic_json.write_json(folder / BEST, note)


def best_step(folder: Path) -> int | None:
    """Return the step that `mark_best` recorded last; None without a record, and for a damaged one."""
    best = atomic_json.read_json(folder / BEST)
    step = best.get("step") if isinstance(best, dict) else None
    return step if type(step) is int and best.get("path") == step_name(step) else None


def choose(folder: Path, wanted: str | None) -> Path:
    """Return the wanted checkpoint of the folder: best, last or step-N; None: the best if recorded, else the last.

    Raises CheckpointError if the folder lacks the checkpoint, OSError if the folder cannot be read.
    """
    steps, best = dict(list_steps(folder)), best_step(folder)
    if wanted is None and best is None and (folder / BEST).exists():
        raise CheckpointError(f"{folder / BEST} is damaged, so the best step is not known: name a step, or last")
    step = max(steps, default=None)
    if wanted == "best" or (wanted is None and best in steps):
        step = best
    elif wanted not in (None, "last"):
        step = int(str(wanted).rpartition("-")[2])
    if step in steps:
        return steps[step]
    there = ", ".join(f"step-{each}" for each in sorted(steps)) or "none"
    why = ": no best step is recorded, as `checkpoint.keep_best` does" if wanted == "best" and best is None else ""
    raise CheckpointError(f"{folder} has no checkpoint {wanted or ''}{why}; there: {there}")


def set_aside(path: Path, why: str) -> Path:
    """Rename the checkpoint so that no reader finds it; a person still can. Return its new path."""
    aside = path.with_name(f"{path.name}.{why}-{time.time_ns()}")
    path.rename(aside)
    return aside


def why_not(folder: Path, step: int, error: Exception) -> str:
    """Return a sentence with the reason for the failed save, and the intact checkpoint to resume from."""
    try:
        kept = [path for _, path in list_steps(folder) if verify(path) is None][:1]
    except (OSError, CheckpointError):
        kept = []
    older = f"the checkpoint of step {int(kept[0].name[5:])} is intact ({kept[0]})" if kept else "there is no older one"
    cause: object = error
    if isinstance(error, OSError) and error.errno:
        why = os.strerror(error.errno)
        cause = why if why == error.strerror else f"{why}: {error.strerror}"
    return f"cannot save step {step} in {folder}: {cause}; {older}"


def _size(path: Path) -> int:
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path.name} is no regular file")
    return about.st_size


def _save_of(path: Path) -> str | None:
    """Return the name of the save at the beginning of a shard's header (shards.marked). Raises OSError."""
    with path.open("rb") as file:
        found = _SAVE.match(file.read(200))
    return found[1].decode() if found else None


def _crc32(path: Path) -> str:
    checksum = 0
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(view[:count], checksum)
    return f"{checksum:08x}"
