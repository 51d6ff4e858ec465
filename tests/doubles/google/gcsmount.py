"""/gcs in a replica: the buckets' objects as files, as they are when it starts."""

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
    """Return the folder with every bucket in it; an object that is replaced or removed stays here as it was."""
    objects = world.storage.objects
    with objects.lock:
        for bucket in objects.buckets():
            (folder / bucket.name).mkdir(parents=True)
            for name, found in objects.objects(bucket.name).items():
                if PurePosixPath(name).is_absolute() or {"", ".", ".."} & set(name.split("/")):
                    continue  # no file can be called so; the empty objects that consoles make for folders among them
                place = folder / bucket.name / name
                with contextlib.suppress(FileExistsError, NotADirectoryError):  # an object like another one's folder
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.link(found.file, place)
    return folder
