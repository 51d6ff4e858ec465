"""The delivery of a notice through a channel: the desktop, Apprise's services, mail, or a web service."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping

from cloudtrain.entrypoints.notices.message import DeliveryError, Notice
from cloudtrain.entrypoints.notices.sending import TIMEOUT_S, Channel, send

from ..channels import ChannelEntry, is_variable
from ..text.extras import install


def deliver(entry: ChannelEntry, notice: Notice, environ: Mapping[str, str] = os.environ) -> None:
    """Send the notice. Raises DeliveryError with a message without addresses."""
    if entry.kind == "desktop":
        _show(notice)
    elif entry.kind == "apprise":
        _send_by_apprise(_resolved(entry.place, environ), notice)
    elif entry.kind == "email":
        smtp = _resolved(entry.smtp, environ)
        send(Channel("email", entry.place, smtp, entry.sender), notice)
    else:
        send(Channel(entry.kind, _resolved(entry.place, environ)), notice)


def _show(notice: Notice) -> None:
    """Show the notice on the desktop. Raises DeliveryError."""
    urgency = "normal" if notice.event in ("succeeded", "started") else "critical"
    body = "\n".join(notice.lines).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    command = ["notify-send", "--app-name=cloudtrain", f"--urgency={urgency}", "--", notice.title, body]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeliveryError(f"notify-send: {type(error).__name__}") from None
    if done.returncode != 0:
        raise DeliveryError(f"notify-send ended with code {done.returncode}")


def _send_by_apprise(url: str, notice: Notice) -> None:
    """Deliver the notice to an address in Apprise's form. Raises DeliveryError."""
    try:
        import apprise
    except ModuleNotFoundError as error:
        if error.name != "apprise":
            raise
        raise DeliveryError("`apprise` is not installed", install("apprise")) from None
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # Apprise would log addresses
    services = apprise.Apprise(asset=apprise.AppriseAsset(async_mode=False))
    if not services.add(url):
        raise DeliveryError("Apprise knows no service of that address", "its forms: github.com/caronc/apprise/wiki")
    body = "\n".join(notice.lines) or notice.title
    if not services.notify(body=body, title=notice.title, body_format=apprise.NotifyFormat.TEXT):
        scheme = url.partition(":")[0]
        raise DeliveryError(
            f"Apprise could not deliver it ({scheme})", "check the address: `apprise -vv -b test ADDRESS`"
        )


def _resolved(place: str, environ: Mapping[str, str]) -> str:
    if not is_variable(place):
        return place
    name = place.removeprefix("env:")
    value = environ.get(name, "").strip()
    if not value:
        raise DeliveryError(f"the variable {name}, which has its address, is not set here", f"export {name}=...")
    return value
