"""The file that a report is written to: whole or not at all, and never over something else unasked."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.terminal import confirm, is_terminal, say

__all__ = ["GENERATOR", "is_report", "require_free", "show", "write"]

GENERATOR = "cloudtrain report"
_BEGINNING = 4000  # bytes within which a report says that it is one


def is_report(path: Path) -> bool:
    """Return whether the file is a report or a comparison of ours, which a newer one may replace. Raises OSError."""
    with path.open("rb") as file:
        return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(_BEGINNING)


def require_free(path: Path, *, force: bool) -> None:
    """Ask before a file that is no report of ours is replaced. Raises UsageError where nobody can be asked, or no."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint=f"name a file: -o {path / 'report.html'}")
    if not path.exists():
        return
    if not path.is_file():  # a pipe or a device is not replaced, and reading from it may never end
        raise UsageError(f"{path} is no file", hint="name a file; --json prints what is in it")
    if force:
        return
    try:
        if is_report(path):
            return
    except OSError as error:
        hint = "name another file: -o"
        raise UsageError(f"{path} is there and cannot be read: {error.strerror}", hint=hint) from error
    if not is_terminal():
        raise UsageError(f"{path} is there, and is no report of ours", hint="name another file with -o, or add --force")
    if not confirm(f"{path} is no report of ours; replace it?", yes=False):
        raise UsageError(f"{path} was left as it is", hint="name another file: -o")


def write(path: Path, text: str) -> None:
    """Write the file, whole or not at all. Raises UsageError where that cannot be done."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        hint = "name a file in a folder that is there and can be written to: -o"
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint=hint) from error


def show(path: Path) -> None:
    """Open the file in the user's browser; where there is none, say where it lies."""
    import webbrowser

    address = path.absolute().as_uri()
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER")
    if (os.uname().sysname == "Linux" and not has_screen) or not webbrowser.open(address):
        say(f"there is no browser to open here: {address}")
