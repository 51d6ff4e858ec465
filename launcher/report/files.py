"""The report's file: written completely or not at all; replaces only reports, unless the user agrees."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.planning.bundle import is_report
from cloudtrain.launcher.text.terminal import confirm, is_terminal, say

__all__ = ["require_free", "show", "write"]


def require_free(path: Path, *, force: bool) -> None:
    """Ask before replacing a file that is not a report. Raises UsageError if refused or impossible to ask."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint=f"name a file: -o {path / 'report.html'}")
    if not path.exists():
        return
    if not path.is_file():  # never replace a pipe or a device; reading from either may never end
        raise UsageError(f"{path} is not a file", hint="name a file; --json prints what is in it")
    if force:
        return
    try:
        if is_report(path):
            return
    except OSError as error:
        hint = "name another file: -o"
        raise UsageError(f"{path} is there and cannot be read: {error.strerror}", hint=hint) from error
    if not is_terminal():
        raise UsageError(
            f"{path} exists and is not a cloudtrain report", hint="name another file with -o, or add --force"
        )
    if not confirm(f"{path} is not a cloudtrain report; replace it?", yes=False):
        raise UsageError(f"{path} was left as it is", hint="name another file: -o")


def write(path: Path, text: str) -> None:
    """Write the file, completely or not at all. Raises UsageError if the file cannot be written."""
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
    """Open the file in the user's browser; without a browser print the address."""
    import webbrowser

    address = path.absolute().as_uri()
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER")
    if (os.uname().sysname == "Linux" and not has_screen) or not webbrowser.open(address):
        say(f"there is no browser to open here: {address}")
