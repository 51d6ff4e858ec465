"""Copies of built environments in a store, so that the machines of later jobs need not build them again.

A copy is a tar file, named by the environment's key. An account that can write to the store can change later jobs.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..stores.store import Store


def bring(uri: str, place: Path) -> None:
    """Unpack the copy of the environment `place`, if the store has a copy. A store's failure is only printed."""
    partial = place.with_suffix(".part")
    with _tolerant(place.with_suffix(".tar"), "the copy cannot be read, so the environment is built"):
        _open(uri).get(f"{place.name}.tar", place.with_suffix(".tar"))
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(place.with_suffix(".tar")) as archive:
            # Nothing is written outside the folder; Python 3.10.11, 3.11.3 and older have no filters.
            archive.extraction_filter = getattr(tarfile, "tar_filter", lambda member, _: member)
            archive.extractall(partial)
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
    shutil.rmtree(partial, ignore_errors=True)


def put(uri: str, place: Path, last: str) -> None:
    """Put a copy of the environment `place` into the store, the file `last` as its end; a failure is only printed."""
    packed, began_s = place.with_suffix(".tar"), time.monotonic()
    with _tolerant(packed, "the environment cannot be kept for later jobs"):
        store = _open(uri)
        with tarfile.open(packed, "w") as archive:
            for name in sorted(os.listdir(place), key=lambda name: name == last):
                archive.add(place / name, name)
        size_mb = packed.stat().st_size / 1e6
        store.put(packed, packed.name)
        print(f"setup: copied to {uri} ({size_mb:.0f} MB, {time.monotonic() - began_s:.0f} s)", flush=True)


def _open(uri: str) -> Store:
    from ..stores.store import open_store  # few jobs need urllib

    return open_store(uri)


@contextmanager
def _tolerant(packed: Path, otherwise: str) -> Iterator[None]:
    """Print a failure in place of raising the error, and remove the packed file at the end."""
    try:
        yield
    except FileNotFoundError:
        pass  # no copy yet
    except (OSError, tarfile.TarError) as error:
        print(f"setup: {otherwise}: {error}", flush=True)
    finally:
        packed.unlink(missing_ok=True)
