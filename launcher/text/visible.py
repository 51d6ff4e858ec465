"""The visible text of a log line: no machine-readable part, only a progress bar's last state, no terminal control.

A job's output is untrusted: an escape sequence could rename the window, fill the clipboard, or hide lines. Only colours
(SGR) are kept, if requested. Characters that change the text direction are removed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from cloudtrain.entrypoints import events

MOST_SHOWN = 10_000  # characters of a line; --raw shows the whole line
LONGEST = 2000  # characters of a screen row; wider than any terminal
_MOST_MARKS = 2  # combining marks per letter; more would grow out of the row

# Colours and weights, without blinking and hidden text (8). The pattern is unambiguous, so matching is fast.
_SGR = (
    r"(?:[34]8(?:;5;\d{1,3}|;2;\d{1,3};\d{1,3};\d{1,3}|:[\d:]{1,20})"
    r"|0?[0-479]|2[1-9]|3[0-79]|4[0-79]|9[0-7]|10[0-7])?"
)
# Keep colours. Remove control sequences, strings for the terminal, lone escapes and lone control characters.
# Compiled on first use, in 1 ms: most lists and pages of lines are plain.
_CONTROL = (
    f"(\x1b\\[{_SGR}(?:;{_SGR})*m)"
    "|\x1b\\[[0-?]*[ -/]*[@-~]?"
    "|(?:\x1b[\\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"
    "|\x9b[0-?]*[ -/]*[@-~]?"
    "|\x1b[ -/]*[0-~]?"
    "|([\n\u2028\u2029])"
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
    "|([\ud800-\udfff])"
)
_DANGEROUS = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|[\ud800-\udfff]"
_RESET = "\x1b[0m"


def are_plain(texts: Sequence[str]) -> bool:
    """Return whether all texts are shown unchanged; a fast check, true for most pages."""
    if not all(map(str.isprintable, texts)) or max(map(len, texts), default=0) > MOST_SHOWN:
        return False
    return events.MARK not in "\n".join(texts)


def shown(text: str, *, colour: bool = True) -> str:
    """Return the visible text of a line: without event data, folded and truncated, without controls except colours."""
    if are_plain((text,)):
        return text
    text = folded(events.parse(text)[0])
    left_out = len(text) - MOST_SHOWN
    if left_out <= 0:
        return _clean(text, colour=colour)
    # Truncate first, so that the code that ends a colour is not cut off.
    return f"{_clean(text[:MOST_SHOWN], colour=colour)}… [{left_out} more characters: --raw shows them]"


def cleaned(text: str) -> str:
    """Return the visible text for a screen row: without colours, and of the same width on every terminal.

    Joiners and selectors are removed, since terminals differ in the width of the combined characters.
    """
    text = text if are_plain((text,)) else shown(text, colour=False).expandtabs(8)
    text = text[:LONGEST]
    if text.isascii() and text.isprintable():
        return text
    found, marks = "", 0
    for letter in text:
        seen = _in_a_row(letter)
        marks = marks + 1 if seen and unicodedata.combining(letter) else 0
        found += seen if marks <= _MOST_MARKS else ""
    return found


def folded(text: str) -> str:
    """Return the text that a terminal would show last after carriage returns: a progress bar's last state."""
    if "\r" not in text:
        return text
    part = next(filter(None, reversed(text.split("\r"))), "")
    return part if _clean(part, colour=False).strip() else ""  # wiped by blanks or an escape


def tame(text: str) -> str:
    """Return the text unchanged, including a progress bar's states, but without unsafe terminal controls."""
    return _clean(text, colour=True, keep="\r") if re.search(_DANGEROUS, text) else text


def _clean(text: str, *, colour: bool, keep: str = "") -> str:
    def put(match: re.Match[str]) -> str:
        if match[1] and colour:
            return match[1]
        if match[2]:
            return " "
        if match[3]:
            return "\ufffd"
        return match[0] if match[0] == keep else ""

    clean = re.sub(_CONTROL, put, text)
    return clean + _RESET if "\x1b" in clean and not clean.endswith((_RESET, "\x1b[m")) else clean


def _in_a_row(letter: str) -> str:
    """Return the letter, a blank or `?` as a replacement, or the empty string."""
    if letter.isascii() and letter.isprintable():
        return letter
    kind = unicodedata.category(letter)
    if kind in ("Zl", "Zp", "Zs"):
        return " "
    if kind in ("Cs", "Co", "Cn") or letter == "\ufffd":
        return "?"
    is_selector = "\ufe00" <= letter <= "\ufe0f" or "\U000e0100" <= letter <= "\U000e01ef"
    return "" if kind in ("Cc", "Cf") or is_selector else letter
