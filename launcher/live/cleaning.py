"""A job's text made safe for a screen: no line moves the cursor, colours the rest, or is wider than it looks."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["LONGEST", "cleaned"]

LONGEST = 2000  # characters of one line that are looked at: no terminal is wider
_MOST_MARKS = 2  # that one letter may carry: text that grows out of its row is no text

# A sequence of the terminal's: CSI, a string (OSC, DCS, ...) to its end or the line's, or two to three bytes.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)|\x1b[ -/]*.?"
)


def cleaned(text: str) -> str:
    """Return one line as it may be shown: the last state of a progress bar, tabs as blanks, nothing but what prints."""
    if "\r" in text:
        text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    text = text[:LONGEST]
    if text.isascii() and text.isprintable():
        return text
    text = _ESCAPE.sub("", text).expandtabs(8)
    if text.isascii() and text.isprintable():
        return text
    found: list[str] = []
    marks = 0
    for letter in text:
        shown = _shown(letter)
        marks = marks + 1 if shown and unicodedata.combining(letter) else 0
        if shown and marks <= _MOST_MARKS:
            found.append(shown)
    return "".join(found)


def _shown(letter: str) -> str:
    """Return the letter, a blank or `?` in place of it, or nothing.

    Joiners and selectors go: terminals do not agree how wide what they make is, and without them all do.
    """
    if letter.isascii() and letter.isprintable():
        return letter
    kind = unicodedata.category(letter)
    if kind in ("Zl", "Zp", "Zs"):
        return " "
    if kind in ("Cs", "Co", "Cn"):
        return "?"
    is_selector = "\ufe00" <= letter <= "\ufe0f" or "\U000e0100" <= letter <= "\U000e01ef"
    return "" if kind in ("Cc", "Cf") or is_selector else letter
