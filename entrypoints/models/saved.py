"""The shapes of saved weights, by manifest, index and headers alone: of a checkpoint, or of safetensors files.

No torch, and no value of a weight is read, so a laptop can look at a checkpoint in a bucket.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.checkpoints import matching
from cloudtrain.entrypoints.models import tensors
from cloudtrain.entrypoints.models.folder import INDEX, WEIGHTS
from cloudtrain.entrypoints.stores.store import Store, in_threads, open_store

__all__ = ["at", "shapes"]

THREADS = 16
FIRST_BYTES = 1 << 16  # holds the header of most files
_MANIFEST_OF_STEP = re.compile(r"step-\d{8,}/" + re.escape(folders.MANIFEST))

Shapes = dict[str, tuple[int, ...]]


def at(place: str, *, averaged: bool = True) -> Shapes:
    """Return the shapes at a path or uri, of a folder or a file. Raises as `shapes`."""
    folder, _, last = place.rstrip("/").rpartition("/")
    if last.endswith((".safetensors", ".pt")):
        return _of_files(open_store(folder), [last])
    return shapes(open_store(place), averaged=averaged)


def shapes(store: Store, *, averaged: bool = True) -> Shapes:
    """Return the shapes of the weights by the model's names; of several checkpoints, of the newest.

    All checkpoints of a job have the same shapes. `averaged`: of the average, if kept. Raises the errors of the store,
    OSError, and ValueError for files without headers.
    """
    above = ""
    if (manifest := store.read(folders.MANIFEST)[0]) is None:
        steps = [name for name in store.names("step-") if _MANIFEST_OF_STEP.fullmatch(name)]
        if steps:
            manifest, above = store.read(max(steps))[0], max(steps).partition("/")[0] + "/"
    if manifest is not None:
        files = json.loads(manifest.partition(b"\n")[0])["files"]
        found = _of_files(store, [above + name for name in files if name.startswith("shard-")])
        return {name: found[full] for name, full in matching.saved_names(found, averaged=averaged).items()}
    index = store.read(INDEX)[0]
    return _of_files(store, [WEIGHTS] if index is None else set(json.loads(index)["weight_map"].values()))


def _of_files(store: Store, files: Collection[str]) -> Shapes:
    if other := [name for name in files if not name.endswith(".safetensors")]:
        raise ValueError(f"{other[0]} has no header with shapes")
    headers: dict[str, bytes] = {}

    def fetch(name: str) -> None:
        data = store.head(name, FIRST_BYTES)
        length = int.from_bytes(data[:8], "little")
        if not 0 < length <= tensors.HEADER_BYTES:
            raise ValueError(f"{name} has no header")
        headers[name] = (data if len(data) >= 8 + length else store.head(name, 8 + length))[8 : 8 + length]

    in_threads(fetch, files, THREADS)
    return tensors.shapes(headers)
