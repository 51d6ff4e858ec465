"""Alerts on the terminal: on standard error, marked to differ from a job's lines, with a bell on a terminal."""

from __future__ import annotations

import os
import sys

import click

from cloudtrain.entrypoints.notices.message import Notice

from ..text.tables import width, wrapped
from ..text.terminal import escaped, reported

# The process that follows a job prints its start, progress and end by other means.
ON_TERMINAL = ("budget", "projected", "deadline", "stalled")
MARK = "[alert]"


def show(notice: Notice) -> None:
    """Print the notice; a capable terminal also shows a desktop notification (OSC 9)."""
    if reported("\n".join((notice.title, *notice.lines))):
        return
    is_terminal = sys.stderr.isatty()
    colour = "yellow" if is_terminal and not os.environ.get("NO_COLOR") else None
    mark = click.style(MARK, fg=colour, bold=True) if colour else MARK
    columns = width(sys.stderr)
    lines = wrapped(
        map(escaped, (notice.title, *(f"  {line}" for line in notice.lines))),
        None if columns is None else columns - len(MARK) - 1,
    )
    text = "\n".join(f"{mark} {line}" for line in lines)
    click.echo(f"{text}{_bell(escaped(notice.title)) if is_terminal else ''}", err=True)


def _bell(title: str) -> str:
    if os.environ.get("TERM", "dumb") == "dumb":
        return ""
    return f"\a\033]9;{title}\a"
