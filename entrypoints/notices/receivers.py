"""The receivers that get a JSON object by HTTP POST: a webhook (Microsoft Teams too) and Slack.

The launcher reads the table for the config and the search for secrets, so here is no import of HTTP.
Sources: docs.slack.dev, Block Kit reference (header 150 characters, section 3000) and "Formatting message text";
learn.microsoft.com, "Create incoming webhooks with Workflows for Microsoft Teams" and the card schema 1.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from .message import Notice

_SLACK_TITLE, _SLACK_TEXT = 150, 3000
_TEAMS_HOSTS = (".webhook.office.com", ".logic.azure.com", ".api.powerplatform.com")


@dataclass(frozen=True)
class PostReceiver:
    """A kind of channel whose address gets a POST."""

    help: str
    """The text of the kind's key below `notify`."""
    example: str
    """A value of the key."""
    body: Callable[[str, Notice], dict[str, Any]]
    """The message in the receiver's form, of the address and the notice."""
    secret: tuple[str, str, str] | None = None
    """For an address that is a secret by its shape: the name, a fixed part, and the regular expression."""


def webhook_body(url: str, notice: Notice) -> dict[str, Any]:
    """Return the message in the form of the receiver at the address: a card for a Teams channel, else our fields."""
    return teams_body(notice) if is_teams(url) else {**notice.fields, "text": notice.text}  # `text` is for people


def slack_body(notice: Notice) -> dict[str, Any]:
    """Return the message for Slack; `text` is shown in places without blocks, for example in a notification."""
    title = {"type": "plain_text", "text": _cut(notice.title, _SLACK_TITLE), "emoji": False}
    lines = _escaped("\n".join(notice.lines), _SLACK_TEXT - 6)
    blocks: list[dict[str, Any]] = [{"type": "header", "text": title}]
    if lines:
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": f"```{lines}```"}})
    return {"text": _escaped(notice.title, _SLACK_TEXT), "blocks": blocks}


def is_teams(url: str) -> bool:
    """Return whether the address belongs to a Teams channel."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return host.endswith(_TEAMS_HOSTS)


def teams_body(notice: Notice) -> dict[str, Any]:
    """Return the message for Teams: an adaptive card, whose text runs have no markup."""
    runs = [_run(notice.title, weight="Bolder"), *(_run(line, fontType="Monospace") for line in notice.lines)]
    schema = "http://adaptivecards.io/schemas/adaptive-card.json"
    card = {"$schema": schema, "type": "AdaptiveCard", "version": "1.4", "msteams": {"width": "Full"}, "body": runs}
    form = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": form, "contentUrl": None, "content": card}]}


def _escaped(text: str, most: int) -> str:
    """Return the text without links, mentions or an end of the block, cut to the length `most`."""
    whole = "".join({"&": "&amp;", "<": "&lt;", ">": "&gt;", "`": "'"}.get(each, each) for each in text)
    if len(whole) <= most:
        return whole
    return whole[: most - 1].rpartition("&")[0] + "…" if "&" in whole[most - 6 : most - 1] else whole[: most - 1] + "…"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _run(text: str, **style: str) -> dict[str, Any]:
    return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text, **style}]}


RECEIVERS = {
    "webhook": PostReceiver(
        "Address that gets a JSON POST, a Teams channel a card; `env:NAME` reads it from a variable.",
        "env:HOOK_URL",
        webhook_body,
    ),
    "slack": PostReceiver(
        "Slack's incoming webhook, the same way; Mattermost's too.",
        "env:SLACK_URL",
        lambda _, notice: slack_body(notice),
        (
            "a Slack webhook",
            "hooks.slack.com",
            r"(?:https://)?hooks\.slack\.com/(?:services|workflows|triggers)/[\w+/]{43}",
        ),
    ),
}
