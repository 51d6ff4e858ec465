"""The renderer: from rows to the bytes that update a terminal, with only the changed rows."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence

from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

__all__ = ["Renderer"]

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # rows should not contain controls; a missed control is removed here

# Synchronized output: a terminal that supports the codes shows the update at once; older terminals ignore them.
_TOGETHER, _DONE = "\x1b[?2026h", "\x1b[?2026l"


class Renderer:
    """Stores the rows on the terminal. With NO_COLOR no colour is used; bold stays, since bold is not a colour."""

    def __init__(self, encoding: str, *, is_coloured: bool | None = None) -> None:
        self._encoding = encoding
        self._is_coloured = not os.environ.get("NO_COLOR") if is_coloured is None else is_coloured
        self._console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
        self._shown: list[Text] = []

    def forget(self) -> None:
        """Forget the terminal's content: the next picture is drawn completely."""
        self._shown = []

    def render(self, rows: Sequence[Text]) -> bytes:
        """Return the bytes to write; empty if no row has changed."""
        changed: list[str] = []
        if not self._shown:
            changed.append("\x1b[0m\x1b[2J")
        for place, text in enumerate(rows):
            if place >= len(self._shown) or self._shown[place] != text:
                changed.append(f"\x1b[{place + 1};1H\x1b[0m\x1b[K{self._ansi(text)}")
        if len(rows) < len(self._shown):
            changed.append(f"\x1b[{len(rows) + 1};1H\x1b[0m\x1b[J")
        self._shown = list(rows)
        if not changed:
            return b""
        return f"{_TOGETHER}{''.join(changed)}{_DONE}".encode(self._encoding, errors="replace")

    def _ansi(self, text: Text) -> str:
        parts: list[str] = []
        for segment in text.render(self._console):
            style, words = segment.style, _CONTROLS.sub("", segment.text)
            if style is not None and not self._is_coloured:
                style = style.without_color
            parts.append(words if style is None else style.render(words, color_system=ColorSystem.STANDARD))
        return "".join(parts)
