"""The entries of a config's `notify`: the events of each channel, and its address, resolved only at delivery."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.entrypoints.notices.message import Notice
from cloudtrain.entrypoints.notices.sending import TIMEOUT_S, Channel, Fault, masked, send

__all__ = ["JOB_EVENTS", "Entry", "deliver", "desktop", "doubts", "entries", "told_by_job"]

KINDS = ("webhook", "slack", "email", "apprise")
SMTP = "env:CLOUDTRAIN_SMTP"
# Events that the job's own agent sends if `from_job` is set (entrypoints/notices/teller.py).
JOB_EVENTS = ("budget", "deadline", "succeeded", "failed", "stopped")
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS")
_ON_DESKTOP = ("budget", "stalled", "succeeded", "failed", "stopped")


@dataclass(frozen=True)
class Entry:
    """A channel, as the config defines the entry: `place` is `env:NAME`, an address, or the recipients of a mail."""

    kind: str
    place: str = field(repr=False)
    on: tuple[str, ...]
    from_job: bool = False
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
        if self.kind == "email" or _is_variable(self.place):
            return f"{self.kind} {self.place}"
        if self.kind == "apprise":  # the host, or any part of its addresses, may be the secret
            return f"apprise {self.place.partition('://')[0] if '://' in self.place else '...'}://..."
        return f"{self.kind} {masked(self.place)}"


def entries(config: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Return the channels of a config in its stored form."""
    return tuple(_entry(each) for each in config.get("notify") or ())


def desktop() -> Entry | None:
    """Return the desktop if notices can be shown, else None."""
    if any(os.environ.get(name) for name in _DISPLAYS) and shutil.which("notify-send"):
        return Entry("desktop", "", _ON_DESKTOP)
    return None


def deliver(entry: Entry, notice: Notice, environ: Mapping[str, str] = os.environ) -> None:
    """Send the notice. Raises Fault with a message without addresses."""
    if entry.kind == "desktop":
        _show(notice)
    elif entry.kind == "apprise":
        from cloudtrain.launcher.notices import services

        services.send(_resolved(entry.place, environ), notice)
    elif entry.kind == "email":
        smtp = _resolved(entry.smtp, environ)
        send(Channel("email", entry.place, smtp, entry.sender), notice)
    else:
        send(Channel(entry.kind, _resolved(entry.place, environ)), notice)


def told_by_job(entry: Entry, notice: Notice) -> bool:
    """Return whether the job itself should send the notice."""
    return entry.from_job and notice.event in JOB_EVENTS


def doubts(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield warnings about the channels that people should know before relying on them."""
    found = entries(config)
    for entry in found:
        place = entry.smtp if entry.kind == "email" else entry.place
        if _is_variable(place) and not environ.get(place.removeprefix("env:")):
            yield f"notify: {place.removeprefix('env:')} is not set here, so no alerts by {entry.kind}"
        if not _is_variable(place) and _lets_in(entry.kind, place):
            shown = masked(place) if entry.kind == "email" else entry.shown
            yield f"notify: the address of {shown} travels with the code; put it into a variable: env:NAME"
    if found and not all(entry.from_job for entry in found):
        yield "notify: only a command that follows the job sends alerts; with from_job: true the job sends them"


def _show(notice: Notice) -> None:
    """Show the notice on the desktop by notify-send. Raises Fault."""
    urgency = "normal" if notice.event in ("succeeded", "started") else "critical"
    body = "\n".join(notice.lines).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    command = ["notify-send", "--app-name=cloudtrain", f"--urgency={urgency}", "--", notice.title, body]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Fault(f"notify-send: {type(error).__name__}") from None
    if done.returncode != 0:
        raise Fault(f"notify-send ended with code {done.returncode}")


def _entry(data: Mapping[str, Any]) -> Entry:
    kind = next(kind for kind in KINDS if data.get(kind))
    smtp = (data.get("smtp") or SMTP) if kind == "email" else ""
    return Entry(kind, data[kind], tuple(data["on"]), bool(data.get("from_job")), smtp, data.get("sender") or "")


def _resolved(place: str, environ: Mapping[str, str]) -> str:
    if not _is_variable(place):
        return place
    name = place.removeprefix("env:")
    value = environ.get(name, "").strip()
    if not value:
        raise Fault(f"the variable {name}, which has its address, is not set here", f"export {name}=...")
    return value


def _lets_in(kind: str, place: str) -> bool:
    """Return whether knowledge of the address grants access; for a mail server only if the address contains a login."""
    return kind != "email" or "@" in place


def _is_variable(place: str) -> bool:
    return place.startswith("env:")
