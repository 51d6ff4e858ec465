"""/gcs in a replica: the buckets' objects as files, in the state at the replica's start."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from doubles.google.world import World

__all__ = ["PLACE", "lay_out"]

PLACE = "/gcs"


def lay_out(world: World, folder: Path) -> Path:
    """Return the folder with every bucket; an object replaced or removed later keeps its old file in the folder."""
    objects = world.storage.objects
    with objects.lock:
        for bucket in objects.buckets():
            (folder / bucket.name).mkdir(parents=True)
            for name, found in objects.objects(bucket.name).items():
                if PurePosixPath(name).is_absolute() or {"", ".", ".."} & set(name.split("/")):
                    continue  # not a valid file name; consoles make empty objects with these names as folders
                place = folder / bucket.name / name
                with contextlib.suppress(FileExistsError, NotADirectoryError):  # the name is a folder's, too
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.link(found.file, place)
    return folder
