"""Data on standard output, everything else on standard error; colour only on a terminal, and never with NO_COLOR."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

import click

from . import tables

_MARK = "cloudtrain: "
METER_S = 0.5  # before a progress bar is drawn, and between two states
_WARNING = "warning:"
# Control characters of a terminal, line separators, direction marks and lone surrogates; all but tab and newline.
_CONTROL = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_LINE_END = "[\r\u2028\u2029]"
RANK_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
_reporter: ContextVar[Callable[[str], None] | None] = ContextVar("reporter", default=None)


@contextmanager
def reporting(to: Callable[[str], None]) -> Iterator[None]:
    """In the block, pass messages for people to the function `to`, in this thread or task, instead of printing them."""
    token = _reporter.set(to)
    try:
        yield
    finally:
        _reporter.reset(token)


def reported(message: str) -> bool:
    """Pass the message to the function of `reporting`; return False outside a block of `reporting`."""
    if (to := _reporter.get()) is not None:
        to(escaped(message).strip("\n"))
    return to is not None


def say(message: str) -> None:
    """Print a message on standard error; on a terminal, break long lines at words, and mark a warning in yellow."""
    if reported(message):
        return
    text = "\n".join(tables.wrapped([escaped(message)], tables.width(sys.stderr)))
    if text.startswith(_WARNING) and _has_style(sys.stderr):
        text = click.style(_WARNING, fg="yellow") + text.removeprefix(_WARNING)
    click.echo(text, err=True)


def say_each(messages: Iterable[str]) -> None:
    """Print each message, as `say` does."""
    for message in messages:
        say(message)


@contextmanager
def meter(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds sent bytes to a progress bar, on a terminal after METER_S; threads may call it."""
    begin_s, sent, drawn_s, lock = time.monotonic(), 0, 0.0, threading.Lock()
    is_shown = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" and _reporter.get() is None

    def add(count: int) -> None:
        nonlocal sent, drawn_s
        with lock:
            sent, now_s = sent + count, time.monotonic()
            if is_shown and now_s - begin_s > METER_S and now_s - drawn_s > METER_S:
                drawn_s, share = now_s, min(1.0, sent / max(total, 1))
                bar = ("#" * round(share * 20)).ljust(20, ".")
                rate = f"{sent / 1e6:.1f} of {total / 1e6:.1f} MB, {sent / 1e6 / (now_s - begin_s):.1f} MB/s"
                click.echo(f"\r\x1b[K{escaped(what)[:40]} [{bar}] {rate}", err=True, nl=False)

    try:
        yield add
    finally:
        if drawn_s:
            click.echo("\r\x1b[K", err=True, nl=False)


def escaped(text: str) -> str:
    """Return a message with each control character as its escape (`\\r`, `\\u2028`), except newlines and tabs."""
    return text if text.isprintable() else re.sub(_CONTROL, _escape, text)


def _escape(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


def aside(message: str) -> None:
    """Print a message between a job's lines: with the prefix `cloudtrain:`, and dim on a terminal."""
    if reported(message):
        return
    lines = [f"{_MARK}{line}" for line in tables.wrapped([escaped(message)], _beside(len(_MARK)))]
    marked = [click.style(line, dim=True) for line in lines] if _has_style(sys.stderr) else lines
    click.echo("\n".join(marked), err=True)


def _has_style(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _beside(room: int) -> int | None:
    width = tables.width(sys.stderr)
    return None if width is None else width - room


def print_json(value: Any) -> None:
    """Print a JSON object on a single line."""
    write(json_line(value) + "\n")


def json_line(value: Any) -> str:
    """Return the value as JSON on a single line, with control characters and lone surrogates escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if text.isprintable():
        return text
    return re.sub("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def print_lines(lines: Sequence[str]) -> None:
    """Print data in a single write, without terminal control codes except colours."""
    if not all(map(str.isprintable, lines)):  # the last check, for text from outside cloudtrain
        from .visible import tame

        lines = [re.sub(_LINE_END, _escape, "\n".join(map(tame, line.split("\n")))) for line in lines]
    if lines:
        write("\n".join(lines) + "\n")


def print_text(lines: Sequence[str]) -> None:
    """Print sentences: on a terminal, break long lines at words."""
    print_lines(tables.wrapped(lines, tables.width()))


class ReaderGoneError(Exception):
    """The reader of standard output has closed the pipe (`cloudtrain logs | head`)."""


def write(text: str) -> None:
    """Write the text to standard output unchanged. Raises ReaderGoneError."""
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:  # the encoding lacks a character, or a platform has sent a lone surrogate
            encoding = sys.stdout.encoding or "utf-8"
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def is_terminal() -> bool:
    """Return whether the user can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def coloured(text: str, number: int) -> str:
    """Return the text in the colour of the number; unchanged without a terminal, or with NO_COLOR."""
    return click.style(text, fg=RANK_COLOURS[number % len(RANK_COLOURS)]) if _has_style(sys.stdout) else text


def confirm(question: str, *, yes: bool) -> bool:
    """Return the user's answer, True with --yes. Raises UsageError if the input is not a terminal."""
    if yes:
        return True
    if not is_terminal():
        from ..errors import UsageError

        hint = f"add -y to answer with yes: {question}"
        raise UsageError("cannot ask for confirmation: the input is not a terminal", hint=hint)
    return click.confirm("\n".join(tables.wrapped([escaped(question)], _beside(len(" [y/N]: ")))), err=True)


def when(time_s: float | None, now_s: float | None = None) -> str:
    """Return the time since `time_s` in the largest whole unit."""
    if time_s is None:
        return "-"
    ago = max(0, int((time.time() if now_s is None else now_s) - time_s))
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if ago >= 2 * size:
            return f"{ago // size}{unit} ago"
    return f"{ago}s ago"
