"""A JSON object by HTTP POST: for any receiver of webhooks, for Slack, and for Microsoft Teams.

Sources: docs.slack.dev, Block Kit reference (header 150 characters, section 3000) and "Formatting message text";
learn.microsoft.com, "Create incoming webhooks with Workflows for Microsoft Teams" and the card schema 1.4.
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from .message import DeliveryError, Notice, masked

_SLACK_TITLE, _SLACK_TEXT = 150, 3000
_TEAMS_HOSTS = (".webhook.office.com", ".logic.azure.com", ".api.powerplatform.com")


def body(kind: str, url: str, notice: Notice) -> dict[str, Any]:
    """Return the message in the form of the receiver at the address."""
    if kind == "slack":
        return slack_body(notice)
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
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "body": runs,
    }
    form = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": form, "contentUrl": None, "content": card}]}


def post(url: str, what: dict[str, Any], key: str, timeout_s: float) -> None:
    """Deliver the object; any 2xx counts as a receipt. Raises DeliveryError."""
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "cloudtrain", "Idempotency-Key": key}
    try:
        if not url.lower().startswith(("http://", "https://")):
            raise ValueError
        request = urllib.request.Request(url, json.dumps(what).encode(), headers, method="POST")
        with (
            urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as answer,
            suppress(OSError, http.client.HTTPException),  # a 2xx is a receipt, even if the body fails
        ):
            answer.read(1000)
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(url, error.code, error.headers.get("Retry-After")) from None
    except urllib.error.URLError as error:
        raise _unreachable(url, error.reason) from None
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, http.client.InvalidURL):
            raise DeliveryError("the address is no http(s) address", "check it for spaces and line ends") from None
        if isinstance(error, TimeoutError):  # urllib wraps all errors before the answer in URLError
            words = f"{masked(url)} has accepted the message and does not answer"
            raise DeliveryError(words, may_have_arrived=True) from None
        raise _unreachable(url, error) from None
    except ValueError:
        raise DeliveryError("the address is no http(s) address", "it begins with https://") from None


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


def _refused(url: str, code: int, after: str | None) -> DeliveryError:
    where = masked(url)
    if code in (408, 429) or code >= 500:
        after_s = float(after) if after is not None and after.strip().isdigit() else None
        return DeliveryError(f"{where} answers with HTTP {code}", after_s=after_s)
    if 300 <= code < 400:
        return DeliveryError(f"{where} redirects to another address (HTTP {code})", "use the target address")
    cure = "the receiver does not know this webhook: make a new webhook there, and use its address"
    return DeliveryError(f"{where} refuses it: HTTP {code}", cure)


def _unreachable(url: str, reason: object) -> DeliveryError:
    if isinstance(reason, TimeoutError):
        return DeliveryError(f"{masked(url)} does not answer")
    if isinstance(reason, ssl.SSLError):
        return DeliveryError(f"{masked(url)} shows no certificate that can be trusted: {reason.reason}")
    words = getattr(reason, "strerror", None) or type(reason).__name__
    return DeliveryError(f"{masked(url)} cannot be reached: {words}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a redirected POST would arrive as a GET without its body."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
