"""The entries of a config's `notify`: the events of each channel, and its address, resolved only at delivery."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.entrypoints.notices.receivers import RECEIVERS

CHANNEL_KINDS = (*RECEIVERS, "email", "apprise")  # the keys of an entry of `notify`
SMTP = "env:CLOUDTRAIN_SMTP"
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS")
_ON_DESKTOP = ("budget", "stalled", "succeeded", "failed", "stopped")


@dataclass(frozen=True)
class ChannelEntry:
    """A channel, as the config defines the entry: `place` is `env:NAME`, an address, or the recipients of a mail."""

    kind: str
    place: str = field(repr=False)
    on: tuple[str, ...]
    from_job: bool = False  # the job itself should send the notices of JOB_EVENTS
    smtp: str = field(default="", repr=False)
    sender: str = ""

    @property
    def id(self) -> str:
        """A unique id of the channel that does not reveal the address."""
        return f"{self.kind}-{hashlib.sha256(self.place.encode()).hexdigest()[:12]}"

    @property
    def shown(self) -> str:
        """The channel for people, without secrets."""
        if self.kind == "desktop":
            return "the desktop"
        if self.kind == "email" or is_variable(self.place):
            return f"{self.kind} {self.place}"
        if self.kind == "apprise":  # the host, or any part of its addresses, may be the secret
            return f"apprise {self.place.partition('://')[0] if '://' in self.place else '...'}://..."
        return f"{self.kind} {_masked(self.place)}"


def entries(config: Mapping[str, Any]) -> tuple[ChannelEntry, ...]:
    """Return the channels of a config in its stored form."""
    found = []
    for data in config.get("notify") or ():
        kind = next(kind for kind in CHANNEL_KINDS if data.get(kind))
        smtp = (data.get("smtp") or SMTP) if kind == "email" else ""
        from_job, sender = bool(data.get("from_job")), data.get("sender") or ""
        found.append(ChannelEntry(kind, data[kind], tuple(data["on"]), from_job, smtp, sender))
    return tuple(found)


def desktop() -> ChannelEntry | None:
    """Return the desktop if notices can be shown, else None."""
    if any(os.environ.get(name) for name in _DISPLAYS) and shutil.which("notify-send"):
        return ChannelEntry("desktop", "", _ON_DESKTOP)
    return None


def doubts(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield warnings about the channels that people should know before relying on them."""
    found = entries(config)
    for entry in found:
        place = entry.smtp if entry.kind == "email" else entry.place
        if is_variable(place) and not environ.get(place.removeprefix("env:")):
            yield f"notify: {place.removeprefix('env:')} is not set here, so no alerts by {entry.kind}"
        if not is_variable(place) and (entry.kind != "email" or "@" in place):  # a mail server's only with a login
            shown = _masked(place) if entry.kind == "email" else entry.shown
            yield f"notify: the address of {shown} travels with the code; put it into a variable: env:NAME"
    if found and not all(entry.from_job for entry in found):
        yield "notify: only a command that follows the job sends alerts; with from_job: true the job sends them"


def _masked(place: str) -> str:
    from cloudtrain.entrypoints.notices.message import masked  # the checks of a config need no notices

    return masked(place)


def is_variable(place: str) -> bool:
    """Return whether the place names an environment variable that has the address."""
    return place.startswith("env:")
