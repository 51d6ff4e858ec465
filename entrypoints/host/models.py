"""Verbs for a folder of a host's models: receive a version, verify its files, make the version the current one.

    PLACE/0f3a9c21b7de/      a version: a model folder, named by the first 12 digits of the sha256 of its SHA256SUMS
    PLACE/current            a link to the version in use; a server opens PLACE/current
    PLACE/versions.json      the model's name, and the versions in the order of their pushes, the newest last

A version is complete or absent, and the link changes in one step: a server sees the old model or the new model. The
link tells the current version, also if a process died before it wrote versions.json.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import atomic_json, foreign, processes
from ..errors import Refused
from ..models import folder as folders

CURRENT, VERSIONS = "current", "versions.json"
LOCK = ".lock"  # against other pushes
MARGIN_BYTES = 256 << 20  # free after a model
_VERSION = re.compile(r"[0-9a-f]{12}")
_KEPT = 2  # versions that stay besides the current one
_LEFT_S = 86_400.0  # the age of an interrupted push's files at their removal


def begin(*, place: str, version: str, name: str, files: Mapping[str, int], replaces: bool) -> dict[str, Any]:
    """Return {"place", "kept", "arrived"}: the absolute path, whether the version is complete, the bytes of its files.

    `files`: the sizes by name, with SHA256SUMS. Raises Refused if the disk is too full, if the place is a model folder,
    or if the current version is of a model with a different name and `replaces` is False.
    """
    root = Path(place).expanduser().absolute()
    if (root / folders.SUMS).exists():
        raise Refused(f"{root} is a model folder itself: name a folder for the versions of a model")
    known = _versions(root)
    if known["name"] not in (None, name) and not replaces:
        raise Refused(f"{root} holds the model {known['name']}, not {name}: choose another place, or add --replace")
    if (root / version).is_dir():
        return {"place": str(root), "kept": True, "arrived": {}}
    part = part_of(root, version)
    arrived = {each: path.stat().st_size for each in files if (path := part / each).is_file()}
    needed = sum(size - min(size, arrived.get(each, 0)) for each, size in files.items()) + MARGIN_BYTES
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < needed:
        parts = f"{(needed - MARGIN_BYTES) / 1e6:.1f} MB of the model and {MARGIN_BYTES / 1e6:.0f} MB that stay free"
        raise Refused(f"{root} has {free / 1e6:.0f} MB free, and needs {parts}: make room")
    part.mkdir(exist_ok=True)
    return {"place": str(root), "kept": False, "arrived": arrived}


def put(*, place: str, version: str, name: str, offset: int, payload: bytes = b"") -> None:
    """Write bytes of the version's file from `offset` on. Raises Refused for a name outside the folder."""
    if not foreign.is_inside(name):
        raise Refused(f"{name!r} is no file of a model folder")
    path = part_of(Path(place), version) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(offset)
        file.write(payload)


def keep(*, place: str, version: str) -> dict[str, Any]:
    """Verify the arrived version, and give the version its name; return {"damaged"}: files that must be sent again.

    Also verifies a complete version, for example after a copy from host to host.
    """
    root = Path(place)
    part, whole = part_of(root, version), root / version
    folder = whole if whole.is_dir() else part
    damaged = _damaged(folder, version)
    if folder == part and not damaged:
        for each in filter(Path.is_file, part.rglob("*")):
            with each.open("rb") as file:
                os.fsync(file.fileno())
        part.rename(whole)
        atomic_json.sync(root)
    for name in damaged:
        (folder / name).unlink(missing_ok=True)
    if folder == whole and damaged:
        whole.rename(part)
    return {"damaged": damaged}


def use(*, place: str, version: str, name: str) -> dict[str, Any]:
    """Make the version the current one, and remove all versions but the two before; return {"version"}."""
    root = Path(place)
    with processes.locked(root / LOCK):
        known, dropped = used(_versions(root), version, name)
        _point(root, version)
        atomic_json.write_json(root / VERSIONS, known)
        for old in dropped:
            shutil.rmtree(root / old, ignore_errors=True)
        for part in root.glob(".*.part"):  # of a push that was given up
            with contextlib.suppress(OSError):
                if part == part_of(root, version) or time.time() - part.stat().st_mtime > _LEFT_S:
                    shutil.rmtree(part)
    return {"version": version}


def back(*, place: str) -> dict[str, Any]:
    """Make the version before the current one current again; return {"version"}. Raises Refused."""
    root = Path(place).expanduser()
    if not root.is_dir():
        raise Refused(f"{root} holds no model")
    with processes.locked(root / LOCK):
        known = restored(_versions(root), str(root))
        _point(root, known["current"])
        atomic_json.write_json(root / VERSIONS, known)
    return {"version": known["current"]}


def known_of(data: Any) -> dict[str, Any]:
    """Return name, versions and current version from the content of versions.json, which is empty for a new place.

    Others may write to the place: only what can be a version is taken, as old versions are removed.
    """
    data = data if isinstance(data, dict) else {}
    listed = data.get("versions")
    versions = [each for each in listed if _VERSION.fullmatch(str(each))] if isinstance(listed, list) else []
    current = data.get("current") if data.get("current") in versions else (versions or [None])[-1]
    return {"name": data.get("name"), "versions": versions, "current": current}


def used(known: Mapping[str, Any], version: str, name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the content of versions.json with the version as the current one, and the versions to remove."""
    order = [each for each in known["versions"] if each != version]
    return {"name": name, "versions": [*order[-_KEPT:], version], "current": version}, order[:-_KEPT]


def restored(known: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the content of versions.json with the version before as the current one. Raises Refused without one."""
    versions = known["versions"]
    at = versions.index(known["current"]) if known["current"] in versions else 0
    if at == 0:
        raise Refused(f"{place} has no version before the current one")
    return {**known, "current": versions[at - 1]}


def _point(root: Path, version: str) -> None:
    """Change the link in one step."""
    link = root / f".{CURRENT}.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(version)
    link.replace(root / CURRENT)
    atomic_json.sync(root)


def _versions(root: Path) -> dict[str, Any]:
    """Return the content of versions.json, with the versions that are present, and the version of the link."""
    known = known_of(atomic_json.read_json(root / VERSIONS))
    with contextlib.suppress(OSError):
        known["current"] = (root / CURRENT).readlink().name
    versions = [each for each in known["versions"] if (root / str(each)).is_dir()]
    if known["current"] not in versions and known["current"] and (root / known["current"]).is_dir():
        versions.append(known["current"])
    return {**known, "versions": versions}


def part_of(root: Path, version: str) -> Path:
    """Return the folder of a version that is arriving."""
    return root / f".{version}.part"


def _damaged(folder: Path, version: str) -> list[str]:
    """Return the files that are missing or differ from SHA256SUMS, which has the version's hash itself."""
    with contextlib.suppress(folders.ModelFolderError):
        files, digest = folders.read_sums(folder)
        if digest.startswith(version):
            return [name for name, sha256 in files.items() if not _is_whole(folder / name, sha256)]
    return [folders.SUMS]


def _is_whole(path: Path, sha256: str) -> bool:
    with contextlib.suppress(folders.ModelFolderError):
        return folders.file_sha256(path) == sha256
    return False
