"""Whether a parent's weights fit the task's model, by names and shapes alone: the check of `init_from` before a submit.

    python -m cloudtrain.entrypoints.trainer.fitting SPEC PLACE

Runs in the code folder, as memory.py. Prints one JSON line: `fits` (the number of weights), `fault` (the text that the
node would report), or `why` there was no comparison. Of the parent only manifest, index and headers are read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.checkpoints import matching
from cloudtrain.entrypoints.contract import InitSettings
from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.models import tensors
from cloudtrain.entrypoints.models.folder import INDEX, WEIGHTS
from cloudtrain.entrypoints.stores.store import Store, in_threads, open_store, plain
from cloudtrain.entrypoints.trainer.initial import same_tensors
from cloudtrain.entrypoints.trainer.memory import reason, without_data
from cloudtrain.entrypoints.trainer.settings import read_spec
from cloudtrain.entrypoints.trainer.task import load_task

__all__ = ["compare", "main", "saved_shapes"]

THREADS = 16
FIRST_BYTES = 1 << 16  # holds the header of most files
_MANIFEST_OF_STEP = re.compile(r"step-\d{8,}/" + re.escape(folders.MANIFEST))

Shapes = dict[str, tuple[int, ...]]


def main(spec_file: str, place: str) -> None:
    """Print the result of the comparison."""
    out = sys.stdout
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # the task may print
        try:
            found = compare(spec_file, place)
        except Exception as error:  # of the task: the node will tell
            found = {"why": reason(error)}
    print(json.dumps(found), file=out, flush=True)


def compare(spec_file: str, place: str) -> dict[str, Any]:
    """Return the result of the comparison. Raises the errors of the task."""
    spec = read_spec(spec_file)
    wanted = spec.init_from or InitSettings()
    try:
        saved = saved_shapes(place, averaged=wanted.what == "weights")
    except (OSError, ValueError) as error:
        return {"why": plain(error)}
    module = without_data(load_task(spec.target), spec.params, FakeTensorMode(allow_non_fake_inputs=True))
    live = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    shapes = {name: tuple(value.shape) for name, value in live.items()}
    wishes = matching.Wishes(wanted.rename, tuple(wanted.skip), wanted.strict)
    try:
        return {"fits": len(matching.pair(saved, shapes, wishes, same_tensors(live)).sources)}
    except TaskError as error:
        return {"fault": str(error)}


def saved_shapes(place: str, *, averaged: bool = True) -> Shapes:
    """Return the shapes of the weights at a path or uri by the model's names; of several checkpoints, of the newest.

    All checkpoints of a job have the same shapes. Raises OSError, and ValueError for files without an index.
    """
    folder, _, last = place.rstrip("/").rpartition("/")
    is_file = last.endswith((".safetensors", ".pt"))
    store = open_store(folder if is_file else place)
    if is_file:
        return _shapes(store, [last])
    above = ""
    if (manifest := store.read(folders.MANIFEST)[0]) is None:
        steps = [name for name in store.names("step-") if _MANIFEST_OF_STEP.fullmatch(name)]
        if steps:
            manifest, above = store.read(max(steps))[0], max(steps).partition("/")[0] + "/"
    if manifest is not None:
        files = json.loads(manifest.partition(b"\n")[0])["files"]
        found = _shapes(store, [above + name for name in files if name.startswith("shard-")])
        return {name: found[full] for name, full in matching.saved_names(found, averaged=averaged).items()}
    index = store.read(INDEX)[0]
    return _shapes(store, [WEIGHTS] if index is None else set(json.loads(index)["weight_map"].values()))


def _shapes(store: Store, files: Collection[str]) -> Shapes:
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # a task may leave threads
