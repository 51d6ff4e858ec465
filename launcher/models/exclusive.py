"""A mark in a store admits a single process, on any machine: for a registry without idempotent requests."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator

from cloudtrain.entrypoints.stores.store import Store

from ..errors import UnreachableError

SUFFIX = ".registering"  # beside the folder: a registry copies all files in the folder
STALE_S = 600.0  # the age of a mark whose process is dead: a registration is given up earlier
WAIT_S, PAUSE_S = 300.0, 0.2


@contextlib.contextmanager
def alone(open_at: Callable[[str], Store], uri: str) -> Iterator[None]:
    """Run the block while no further process is in a block for the same folder. Raises UnreachableError after WAIT_S.

    `open_at` opens the store at a folder, and `uri` is the registered folder. Raises the store's errors.
    """
    above, _, name = uri.rstrip("/").rpartition("/")
    store, name = open_at(above), name + SUFFIX
    end_s = time.monotonic() + WAIT_S
    own = {"by": secrets.token_hex(8), "since": time.time()}
    mark = json.dumps(own).encode()
    while True:
        data, version = store.read(name)
        if data == mark or (_is_free(data) and store.put_if(mark, name, version)):
            break
        if time.monotonic() > end_s:
            raise UnreachableError(f"another process registers {uri}", hint="look for it, and try again later")
        time.sleep(PAUSE_S)
    try:
        yield
    finally:
        if store.read(name)[0] == mark:
            store.delete(name)


def _is_free(data: bytes | None) -> bool:
    """Return whether the mark is missing, or left by a dead process."""
    if data is None:
        return True
    try:
        since_s = float(json.loads(data)["since"])
    except (ValueError, KeyError, TypeError):
        return True
    return time.time() - since_s > STALE_S
