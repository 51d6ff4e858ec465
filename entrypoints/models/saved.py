"""The shapes of saved weights, by manifest, index and headers alone: of a checkpoint, or of safetensors files.

No torch, and no value of a weight is read, so a laptop can look at a checkpoint in a bucket.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from ..checkpoints import folder as folders
from ..checkpoints import matching
from ..stores.store import Store, in_threads, open_store
from . import tensors
from .folder import INDEX, WEIGHT_FILES, WEIGHTS

THREADS = 16
FIRST_BYTES = 1 << 16  # holds the header of most files
_MANIFEST_OF_STEP = re.compile(r"step-\d{8,}/" + re.escape(folders.MANIFEST))

Shapes = dict[str, tuple[int, ...]]


class NoShapesError(Exception):
    """The weights may be whole, but no header has their shapes: a file of torch.save."""


def at(place: str, *, averaged: bool = True) -> Shapes:
    """Return the shapes at a path or uri, of a folder or a file. Raises as `shapes`."""
    if "://" in place:
        is_file, (folder, _, name) = place.endswith((".safetensors", ".pt")), place.rpartition("/")
    else:
        is_file, folder, name = Path(place).is_file(), str(Path(place).parent), Path(place).name
    return _of_files(open_store(folder), [name]) if is_file else shapes(open_store(place), averaged=averaged)


def shapes(store: Store, *, averaged: bool = True) -> Shapes:
    """Return the shapes of the weights by the model's names; of several checkpoints, of the newest.

    All checkpoints of a job have the same shapes. `averaged`: of the average, if kept. Raises the errors of the store,
    FileNotFoundError without weights, ValueError for damaged files, CheckpointError for another version's manifest,
    NoShapesError.
    """
    above = ""
    if (manifest := store.read(folders.MANIFEST)[0]) is None:
        steps = [name for name in store.names("step-") if _MANIFEST_OF_STEP.fullmatch(name)]
        if steps:
            manifest, above = store.read(max(steps))[0], max(steps).partition("/")[0] + "/"
    if manifest is not None:
        files = folders.parse_manifest(manifest, "the checkpoint")
        found = _of_files(store, [above + name for name in files if name.startswith("shard-")])
        return {name: found[full] for name, full in matching.saved_names(found, averaged=averaged).items()}
    if (index := store.read(INDEX)[0]) is not None:
        return _of_files(store, _listed(index))
    try:
        return _of_files(store, [WEIGHTS])
    except FileNotFoundError:
        other = WEIGHT_FILES[-1]  # of torch.save
    try:
        store.head(other, 1)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is neither a checkpoint nor {', '.join(WEIGHT_FILES)}") from None
    return _of_files(store, [other])


def _listed(index: bytes) -> set[str]:
    """Return the files that an index names. Raises ValueError."""
    try:
        files = set(json.loads(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{INDEX} is damaged: it is no list of files by weights") from error
    if wrong := [name for name in files if not isinstance(name, str) or "/" in name or "\0" in name]:
        raise ValueError(f"{INDEX} names {wrong[0]!r:.80}, which is no file of this folder")
    if not files:
        raise ValueError(f"{INDEX} names no file")
    return files


def _of_files(store: Store, files: Collection[str]) -> Shapes:
    if other := [name for name in files if not name.endswith(".safetensors")]:
        raise NoShapesError(f"{other[0]} has no header with shapes")
    headers: dict[str, bytes] = {}

    def fetch(name: str) -> None:
        data = store.head(name, FIRST_BYTES)
        length = int.from_bytes(data[:8], "little")
        if not 0 < length <= tensors.HEADER_BYTES:
            raise ValueError(f"{name} has no header")
        headers[name] = (data if len(data) >= 8 + length else store.head(name, 8 + length))[8 : 8 + length]

    in_threads(fetch, files, THREADS)
    return tensors.shapes(headers)
