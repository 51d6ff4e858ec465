"""Data of `inputs` that came along, on a host: `data/HASH/` below the work folder, complete or absent, read-only.

Jobs share the data; `files.prune` removes what no submit has used for 30 days.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from typing import Any

from .. import foreign
from ..errors import Refused
from .calls import Here


def there(here: Here, *, digests: list[str]) -> dict[str, Any]:
    """Return the hashes of the data that this host has `kept`, and note that they are in use."""
    kept = [each for each in digests if (here.workdir / "data" / each).is_dir()]
    for each in kept:
        os.utime(here.workdir / "data" / each)
    return {"kept": kept}


def unfold(here: Here, *, sha256: str, digest: str) -> None:
    """Unpack the archive that has arrived as the data `digest`, and remove the archive. Raises Refused."""
    archive, place = here.workdir / "cache" / f"{sha256}.tar.gz", here.workdir / "data" / digest
    scratch = place.with_name(f".{digest}.{secrets.token_hex(4)}")
    try:
        foreign.unpack(archive, sha256, scratch)
        for file in scratch.rglob("*"):
            if file.is_file():
                file.chmod(0o444)
        os.utime(scratch)
        scratch.rename(place)
    except (OSError, foreign.BundleError) as error:  # a host with the same disk may have been faster
        shutil.rmtree(scratch, ignore_errors=True)
        if not place.is_dir():
            raise Refused(f"the data cannot be unpacked in {place.parent}: {error}") from error
    with suppress(FileNotFoundError):
        archive.unlink()
