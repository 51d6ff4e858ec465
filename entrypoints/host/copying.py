"""Verbs for copies between hosts: offer a folder, fetch from a host that offers, return the newest entry."""

from __future__ import annotations

import contextlib
import errno
import random
import secrets
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..replication import copies
from ..replication import entries as listing

# Open until the end of the process, which serves one channel.
_offers: list[copies.Server] = []


def offer(*, folder: str, address: str, ports: list[int] | None = None) -> dict[str, Any]:
    """Offer `folder` on the `address` until the channel ends; return {"address", "port", "token"}.

    `ports`: the lowest and the highest port allowed, by default any free port. Raises Refused.
    """
    low, high = ports or (0, 0)
    token = secrets.token_hex(32)
    for port in random.sample(range(low, high + 1), high + 1 - low):
        try:
            server = copies.Server(Path(folder), address, port, token)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            why = error.strerror or error
            raise Refused(f"cannot offer copies at {address}: {why}; is it an address of this host?") from error
        _offers.append(server)
        return {"address": server.address[0], "port": server.address[1], "token": token}
    raise Refused(f"cannot offer copies at {address}: all ports from {low} to {high} are taken; allow others")


def fetch(*, address: str, port: int, token: str, name: str | None, into: str, note: str | None = None) -> None:
    """Copy the entry `name` from `address`, `port` with the `token` to the folder `into`; all entries for `name` None.

    An entry requested by name sets a different local entry of the same name aside. Of all entries, only missing entries
    are copied, and entries newer than the fetched entry in the `note` (entries.py; optional). Raises
    Refused.
    """
    source, folder, noted = (address, port, token), Path(into), Path(note) if note else None
    try:
        if name is not None:
            copies.fetch(*source, name, folder, note=noted, sets_aside=True)
            return
        for entry in copies.entries(*source):
            here = listing.look(folder, entry.name)
            if here is None or listing.order(here) <= listing.order(entry):
                with contextlib.suppress(copies.AlreadySaved):  # the local entry was saved here
                    copies.fetch(*source, entry.name, folder, note=noted)
    except (copies.CopyError, OSError) as error:
        raise Refused(str(error)) from error


def newest(*, folder: str, or_damaged: bool = False) -> dict[str, Any]:
    """Return {"name", "step", "mtime", "fingerprint"} of the `folder`'s newest whole entry, or {}.

    `mtime` is unix time; `step` is None except for the trainer's checkpoints. `or_damaged`: an entry whose files do not
    fit its manifest counts, too. Raises OSError.
    """
    found = next(iter(listing.list_entries(Path(folder))), None) if or_damaged else listing.newest(Path(folder))
    if found is None:
        return {}
    return {"name": found.name, "step": found.step, "mtime": found.written_ns / 1e9, "fingerprint": found.fingerprint}
