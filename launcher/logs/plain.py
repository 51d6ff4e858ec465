"""What a person may see of a line: no machine's part, a progress bar's last state alone, no control of the terminal.

A job's output is not trusted: an escape sequence in it could rename the window, fill the clipboard, or hide lines. Of
all of them only colours (SGR) are left, and none where nobody asked for colour.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cloudtrain.entrypoints import events

__all__ = ["MOST_SHOWN", "are_plain", "folded", "shown", "tame"]

MOST_SHOWN = 10_000  # characters of a line; --raw shows all of it

# A colour is kept; else: a control sequence, a string for the terminal with its end, a lone escape, a lone control.
_CONTROL = re.compile(
    "(\x1b\\[[0-9;:]*m)"
    "|\x1b\\[[0-?]*[ -/]*[@-~]?"
    "|(?:\x1b[\\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"
    "|\x9b[0-?]*[ -/]*[@-~]?"
    "|\x1b[ -~]?"
    "|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]"
    "|([\ud800-\udfff])"
)
_DANGEROUS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|[\ud800-\udfff]")
_RESET = "\x1b[0m"


def are_plain(texts: Sequence[str]) -> bool:
    """Return whether all the texts are shown as they are: of most pages, and told quickly."""
    if not all(map(str.isprintable, texts)) or max(map(len, texts), default=0) > MOST_SHOWN:
        return False
    return events.MARK not in "\n".join(texts)


def shown(text: str, *, colour: bool = True) -> str:
    """Return what is shown of a line: its text for people, folded and cut, without any control but colours."""
    if are_plain((text,)):
        return text
    return _cut(_clean(folded(events.parse(text)[0]), colour=colour))


def folded(text: str) -> str:
    """Return what a terminal would show last of a line that was written over and over: a progress bar's last state."""
    if "\r" not in text:
        return text
    for part in reversed(text.split("\r")):
        if part:
            return part if _clean(part, colour=False).strip() else ""  # blanks, or an escape, have wiped it
    return ""


def tame(text: str) -> str:
    """Return the text as it was written, also a progress bar's states, without what a terminal would obey."""
    return _clean(text, colour=True, keep="\r") if _DANGEROUS.search(text) else text


def _clean(text: str, *, colour: bool, keep: str = "") -> str:
    has_colour = False

    def put(match: re.Match[str]) -> str:
        nonlocal has_colour
        if match[1] and colour:
            has_colour = True
            return match[1]
        if match[2]:
            return "\ufffd"
        return match[0] if match[0] == keep else ""

    clean = _CONTROL.sub(put, text)
    return clean + _RESET if has_colour and not clean.endswith((_RESET, "\x1b[m")) else clean


def _cut(text: str) -> str:
    left_out = len(text) - MOST_SHOWN
    return text if left_out <= 0 else f"{text[:MOST_SHOWN]}… [{left_out} more characters: --raw shows them]"
