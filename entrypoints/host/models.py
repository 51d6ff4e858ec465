"""Verbs for a folder of a host's models: receive a version, verify its files, make the version the current one.

    PLACE/0f3a9c21b7de/      a version: a model folder, named by the first 12 digits of the sha256 of its SHA256SUMS
    PLACE/current            a link to the version in use; a server opens PLACE/current
    PLACE/versions.json      the model's name, and the versions in the order of their use, the newest last

A version is complete or absent, and the link changes in one step: a server sees the old model or the new model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import atomic_json, bundle_file
from cloudtrain.entrypoints.errors import Refused

__all__ = ["CURRENT", "SUMS", "VERSIONS", "back", "begin", "keep", "part_of", "put", "restored", "use", "used"]

CURRENT, SUMS = "current", "SHA256SUMS"
VERSIONS = "versions.json"
_KEPT = 2  # older versions that stay
MARGIN_BYTES = 256 << 20  # free after a model


def begin(*, place: str, version: str, name: str, files: Mapping[str, int], replaces: bool) -> dict[str, Any]:
    """Return {"place", "kept", "arrived"}: the absolute path, whether the version is complete, the bytes of its files.

    `files`: the sizes by name, with SHA256SUMS. Raises Refused if the disk is too full, or if the current version is of
    a model with a different name and `replaces` is False.
    """
    root = Path(place).expanduser()
    known = _versions(root)
    if known["name"] not in (None, name) and not replaces:
        raise Refused(f"{root} holds the model {known['name']}, not {name}: choose another place, or add --replace")
    if (root / version).is_dir():
        return {"place": str(root), "kept": True, "arrived": {}}
    part = part_of(root, version)
    part.mkdir(parents=True, exist_ok=True)
    arrived = {each: path.stat().st_size for each in files if (path := part / each).is_file()}
    needed = sum(size - min(size, arrived.get(each, 0)) for each, size in files.items()) + MARGIN_BYTES
    free = shutil.disk_usage(root).free
    if free < needed:
        raise Refused(f"{root} has {free / 1e6:.0f} MB free, and the model needs {needed / 1e6:.0f} MB: make room")
    return {"place": str(root), "kept": False, "arrived": arrived}


def put(*, place: str, version: str, name: str, offset: int, payload: bytes = b"") -> dict[str, Any]:
    """Write bytes of a file of the version from `offset` on; return {}."""
    path = part_of(Path(place), version) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(offset)
        file.write(payload)
    return {}


def keep(*, place: str, version: str) -> dict[str, Any]:
    """Verify the arrived version, and give the version its name; return {"damaged"}: files that must be sent again.

    Also verifies a complete version, for example after a copy from host to host.
    """
    root = Path(place)
    part, whole = part_of(root, version), root / version
    folder = whole if whole.is_dir() else part
    damaged = _damaged(folder, version)
    if folder == part and not damaged:
        for each in sorted(part.rglob("*")):
            with each.open("rb") if each.is_file() else contextlib.nullcontext() as file:
                if file is not None:
                    os.fsync(file.fileno())
        part.rename(whole)
        atomic_json.sync(root)
    for name in damaged:
        (folder / name).unlink(missing_ok=True)
    if folder == whole and damaged:
        whole.rename(part)
    return {"damaged": damaged}


def use(*, place: str, version: str, name: str) -> dict[str, Any]:
    """Make the version the current one, and remove all versions but the two before; return {"before"}, "" without."""
    root = Path(place)
    before = _versions(root)["versions"]
    known, dropped = used(_versions(root), version, name)
    _point(root, version)
    atomic_json.write_json(root / VERSIONS, known)
    for old in dropped:
        shutil.rmtree(root / old, ignore_errors=True)
    return {"before": before[-1] if before else ""}


def back(*, place: str) -> dict[str, Any]:
    """Make the version before the current one current again; return {"version"}. Raises Refused."""
    root = Path(place).expanduser()
    known = _versions(root)
    if len(known["versions"]) < 2:
        raise Refused(f"{root} has no version before the current one")
    known = restored(known)
    _point(root, known["versions"][-1])
    atomic_json.write_json(root / VERSIONS, known)
    return {"version": known["versions"][-1]}


def used(known: Mapping[str, Any], version: str, name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the content of versions.json with the version as the current one, and the versions to remove."""
    order = [each for each in known["versions"] if each != version]
    return {"name": name, "versions": [*order[-_KEPT:], version]}, order[:-_KEPT]


def restored(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of versions.json with the version before the current one as the current one.

    The version that was current becomes the oldest: a second call goes on to the version before.
    """
    *older, current = known["versions"]
    return {"name": known["name"], "versions": [current, *older]}


def _point(root: Path, version: str) -> None:
    """Change the link in one step."""
    link = root / f".{CURRENT}.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(version)
    link.replace(root / CURRENT)
    atomic_json.sync(root)


def _versions(root: Path) -> dict[str, Any]:
    """Return the content of versions.json, with the versions that are present."""
    found = atomic_json.read_json(root / VERSIONS) or {}
    present = [each for each in found.get("versions") or () if (root / each).is_dir()]
    return {"name": found.get("name"), "versions": present}


def part_of(root: Path, version: str) -> Path:
    """Return the folder of a version that is arriving."""
    return root / f".{version}.part"


def _damaged(folder: Path, version: str) -> list[str]:
    """Return the files that are missing or differ from SHA256SUMS, which has the version's hash itself."""
    sums = folder / SUMS
    if not sums.is_file() or bundle_file.sha256_of(sums)[: len(version)] != version:
        return [SUMS]
    found = []
    for line in sums.read_text().splitlines():
        sha256, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file() or bundle_file.sha256_of(path) != sha256:
            found.append(name)
    return found
