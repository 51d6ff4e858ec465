"""The form of a message for Slack's incoming webhooks; Mattermost takes the same form.

Source: docs.slack.dev, Block Kit reference (header 150 characters, section 3000) and "Formatting message text".
"""

from __future__ import annotations

from typing import Any

from .message import Notice

TITLE, TEXT = 150, 3000


def body(notice: Notice) -> dict[str, Any]:
    """Return the message; `text` is shown in places without blocks, for example in a notification."""
    title = {"type": "plain_text", "text": _cut(notice.title, TITLE), "emoji": False}
    lines = escaped("\n".join(notice.lines), TEXT - 6)
    blocks: list[dict[str, Any]] = [{"type": "header", "text": title}]
    if lines:
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": f"```{lines}```"}})
    return {"text": escaped(notice.title, TEXT), "blocks": blocks}


def escaped(text: str, most: int) -> str:
    """Return the text without links, mentions or an end of the block, cut to the length `most`."""
    whole = "".join({"&": "&amp;", "<": "&lt;", ">": "&gt;", "`": "'"}.get(each, each) for each in text)
    if len(whole) <= most:
        return whole
    return whole[: most - 1].rpartition("&")[0] + "…" if "&" in whole[most - 6 : most - 1] else whole[: most - 1] + "…"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
