"""A script's standard output and error: every byte passes at once, and the line of a step gets the machine's part.

The streams write to the same files as before. They never change the script's text, and make two additions: the
machine's part before the newline of a step's line, and now and then a newline after a progress bar. A bar has no
newline before the end, and lines without an end reach no platform's log.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import sys
import time

from . import forms
from .steps import Steps

FIRST_BAR_S, MOST_BAR_S = 1.0, 60.0  # between two newlines in a bar: the first pause, doubled after each newline
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class OutputStream(io.TextIOWrapper):
    """Replaces standard output or standard error."""

    def __init__(self, stream: io.TextIOWrapper, steps: Steps) -> None:
        encoding, errors = stream.encoding, stream.errors
        lines, through = stream.line_buffering, stream.write_through
        super().__init__(stream.detach(), encoding, errors, "\n", lines, through)
        self._steps: Steps | None = steps
        self._write = super().write
        os.register_at_fork(after_in_child=lambda: setattr(self, "_steps", None))  # a forked process is not the rank
        self._line = ""  # the unfinished line, up to the last text read
        self._state = ""  # the newest state of a bar in this line
        self._bar_every_s, self._bar_s = FIRST_BAR_S, 0.0

    def write(self, text: str) -> int:
        """Write the text with the additions; return the text's length."""
        steps = self._steps
        if steps is None or not isinstance(text, str):
            return self._write(text)
        added = text
        try:
            if (
                text == "\n" and not steps.is_asked(self._line) and not self._state
            ):  # the most frequent case: the end of a print
                self._line = ""
            elif "\n" in text or "\r" in text:
                added = self._added(text, steps)
            elif len(self._line) <= forms.MOST:
                self._line += text
        except Exception:  # an unreadable line must not end a training run
            self._line = ""
        self._write(added)
        return len(text)

    def end_line(self) -> None:
        """End the unfinished line."""
        if self._line:
            self._line = self._state = ""
            self._write("\n")

    def end_bar(self) -> None:
        """Repeat the newest state of an unfinished bar as a line, if it has a step: no later state or newline comes."""
        if self._state and self._steps is not None:
            tail, note = self._steps.take(self._state)
            with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
                self._write(f"\r{self._state}{tail}\n{note}" if tail else "")
            self._line = self._state = ""

    def _added(self, text: str, steps: Steps) -> str:
        *whole, rest = text.split("\n")
        parts = []
        for piece in whole:
            tail, note = steps.take(_newest(self._line + piece))
            if not tail and self._state:  # other text stands behind the bar
                tail, note = steps.take(self._state)
            parts += [piece, tail, "\n", note]
            self._line = self._state = ""
        self._line = (self._line + rest)[: forms.MOST + 1]
        if "\r" in rest:
            state = _newest(rest)
            rest += self._bar_end(state, steps)
            self._state = "" if rest.endswith("\n") else state
            self._line = self._state and f"\r{state}"
        return "".join([*parts, rest])

    def _bar_end(self, state: str, steps: Steps) -> str:
        """Return the end of a bar's line, if due."""
        now_s = time.monotonic()
        self._bar_s = self._bar_s or now_s
        if not state or now_s - self._bar_s < self._bar_every_s:
            steps.take(state, is_whole=False)
            return ""
        self._bar_s, self._bar_every_s = now_s, min(2 * self._bar_every_s, MOST_BAR_S)
        tail, note = steps.take(state)
        return f"{tail}\n{note}"


def watch(steps: Steps) -> None:
    """Replace both of Python's streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            made = OutputStream(stream, steps)
            setattr(sys, name, made)
            setattr(sys, f"__{name}__", made)
            atexit.register(made.end_bar)


def say(text: str) -> None:
    """Write our own lines into the rank's log, after the unfinished line; a full disk must not end the script."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, OutputStream):
            with contextlib.suppress(OSError, ValueError):
                stream.end_line()
    with contextlib.suppress(OSError):
        os.write(1, text.encode())


def _newest(line: str) -> str:
    """Return the last state of a line after `\\r`."""
    if "\x1b" in line:
        line = _ESCAPE.sub("", line)
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part.strip()), "")
