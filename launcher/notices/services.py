"""Delivery by Apprise's many services, with the extra `apprise`."""

from __future__ import annotations

import logging

from cloudtrain.entrypoints.notices.message import Notice
from cloudtrain.entrypoints.notices.sending import Fault
from cloudtrain.launcher.extras import install

__all__ = ["send"]


def send(url: str, notice: Notice) -> None:
    """Deliver the notice to an address in Apprise's form. Raises Fault."""
    try:
        import apprise
    except ModuleNotFoundError as error:
        if error.name != "apprise":
            raise
        raise Fault("`apprise` is not installed", install("apprise")) from None
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # Apprise would log addresses
    services = apprise.Apprise(asset=apprise.AppriseAsset(async_mode=False))
    if not services.add(url):
        raise Fault("Apprise knows no service of that address", "its forms: github.com/caronc/apprise/wiki")
    body = "\n".join(notice.lines) or notice.title
    if not services.notify(body=body, title=notice.title, body_format=apprise.NotifyFormat.TEXT):
        scheme = url.partition(":")[0]
        raise Fault(f"Apprise could not deliver it ({scheme})", "check the address: `apprise -vv -b test ADDRESS`")
