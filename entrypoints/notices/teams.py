"""The form of a message for Microsoft Teams' webhooks: an adaptive card, whose text runs have no markup.

Source: learn.microsoft.com, "Create incoming webhooks with Workflows for Microsoft Teams" and the card schema 1.4.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from .message import Notice

_HOSTS = (".webhook.office.com", ".logic.azure.com", ".api.powerplatform.com")


def is_teams(url: str) -> bool:
    """Return whether the address belongs to a Teams channel."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return host.endswith(_HOSTS)


def body(notice: Notice) -> dict[str, Any]:
    """Return the message with one card."""
    runs = [_run(notice.title, weight="Bolder"), *(_run(line, fontType="Monospace") for line in notice.lines)]
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "body": runs,
    }
    form = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": form, "contentUrl": None, "content": card}]}


def _run(text: str, **style: str) -> dict[str, Any]:
    return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text, **style}]}
