"""The terminal during a live view: reads keys without Enter, draws changed rows, captures all output.

The terminal is always restored. Output of this process or its children to standard output or error goes to a scratch
file during the view, and can be shown as a note without damage to the picture.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import select
import signal
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

from ..errors import ConfigError

# The alternate screen, no cursor, no wrapping at the right edge: a row wider than expected stays in its row.
_ENTER = b"\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[0m\x1b[2J"
_LEAVE = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_ESCAPE_S = 0.05  # the rest of a key's sequence arrives within this time, also over ssh
_LEAST = (20, 4)
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_STOPS_S = 1.0  # a stop signal takes effect within this time
_LONGEST_LINE, _MOST_SAID = 1 << 16, 1 << 20  # bytes of captured output

ESCAPE = "escape"
# Cursor keys as sent by most terminals, in either mode, and by tmux and the Linux console.
_LETTERS = {b"A": "up", b"B": "down", b"H": "home", b"F": "end"}
_NUMBERS = {b"5": "page up", b"6": "page down", b"1": "home", b"7": "home", b"4": "end", b"8": "end"}
_NAMES = {bytes([code]): chr(code) for code in range(32, 127)}  # a printable key is its own name
_NAMES |= {b"\r": "enter", b"\n": "enter", b"\x7f": "back", b"\x08": "back", b"\x0c": "redraw", b"\x1b": ESCAPE}
_NAMES |= {b"\x1b" + mode + sign: name for sign, name in _LETTERS.items() for mode in (b"[", b"O")}
_NAMES |= {b"\x1b[" + sign + b"~": name for sign, name in _NUMBERS.items()}
# A sequence, Alt and a key, an Escape before an Escape, or a single byte.
_KEY = re.compile(rb"\x1b\[[^@-~]*[@-~]|\x1bO.|\x1b[^\x1b\[O]|\x1b(?=\x1b)|[^\x1b]", re.DOTALL)
_LONGEST = 32  # longer bytes without an end are not a sequence
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # rows should not contain controls; a missed control is removed here
# Synchronized output: a terminal that supports the codes shows the update at once; older terminals ignore them.
_TOGETHER, _DONE = "\x1b[?2026h", "\x1b[?2026l"


class SignalExit(Exception):
    """A signal has ended the view; the exit code is 128 plus its number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Screen:
    """A context manager for the main thread; signals that end the view are raised as SignalExit.

    `still` surrounds a suspension, so that operations which must not be suspended halfway end before.
    """

    def __init__(self, still: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext) -> None:
        self._still = still
        self.is_stale = True  # draw the whole picture: after a resize, or back from the shell
        self._before: dict[int, Any] = {}
        self._typed = b""
        self._read = 0
        self._has_it = False  # the view has the terminal; False while the shell has the terminal

    def __enter__(self) -> Screen:
        self._in = sys.stdin.fileno()
        self._modes = termios.tcgetattr(self._in)
        self._woken, self._waker = os.pipe()
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        sys.stdout.flush()
        sys.stderr.flush()
        self._out, self._err = os.dup(1), os.dup(2)
        self._said = _scratch()
        handlers = dict.fromkeys(_ENDS, self._end)
        handlers |= {signal.SIGWINCH: self._resize, signal.SIGTSTP: self._suspend, signal.SIGCONT: self._go_on}
        self._before |= {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._wakeup_before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        os.dup2(self._said, 1)
        os.dup2(self._said, 2)
        try:
            self._take()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # No signal may raise here until the terminal is restored; no signal is lost, since the view is ending already.
        for ends in (*_ENDS, signal.SIGINT):
            self._before.setdefault(ends, signal.getsignal(ends))
            signal.signal(ends, signal.SIG_IGN)
        self._give_back()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os.dup2(self._out, 1)
        os.dup2(self._err, 2)
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for end in (self._woken, self._waker, self._out, self._err, self._said):
            os.close(end)

    @property
    def size(self) -> tuple[int, int]:
        """The current columns and rows."""
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self._out)
            if columns and lines:  # else a terminal without a known size
                return max(_LEAST[0], columns), max(_LEAST[1], lines)
        return 80, 24

    def write(self, data: bytes) -> None:
        """Write all bytes. Raises SignalExit if the terminal is gone."""
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError as error:
            raise SignalExit(signal.SIGHUP) from error

    def keys(self, wait_s: float) -> list[str]:
        """Return the pressed keys, after at most `wait_s` or at a signal. Raises SignalExit if the terminal is gone."""
        ready, _, _ = select.select([self._in, self._woken], [], [], max(0.0, wait_s))
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 1024)
        if self._in not in ready:
            return []
        self._typed += self._typing()
        keys, self._typed = decode(self._typed)
        while self._typed and select.select([self._in], [], [], _ESCAPE_S)[0]:
            more, self._typed = decode(self._typed + self._typing())
            keys += more
        more, self._typed = decode(self._typed, is_all=True)
        return keys + more

    def said(self) -> list[str]:
        """Return the lines written to standard output or error since the last call."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
            sys.stdout.flush()
        data = os.pread(self._said, _LONGEST_LINE, self._read)
        whole = data if len(data) == _LONGEST_LINE and b"\n" not in data else data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        if self._read > _MOST_SAID and self._read == os.fstat(self._said).st_size:  # all was read: start over
            os.ftruncate(self._said, 0)
            self._read = 0
        return whole.decode(errors="replace").splitlines()

    def _typing(self) -> bytes:
        try:
            data = os.read(self._in, 1024)
        except OSError as error:
            raise SignalExit(signal.SIGHUP) from error
        if not data:
            raise SignalExit(signal.SIGHUP)
        return data

    def _take(self) -> None:
        tty.setcbreak(self._in, termios.TCSANOW)  # not raw: Ctrl-C and Ctrl-Z keep their effect
        self.write(_ENTER)
        self.is_stale = self._has_it = True

    def _give_back(self) -> None:
        """Restore the terminal, if still present."""
        self._has_it = False
        with contextlib.suppress(SignalExit):
            self.write(_LEAVE)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._in, termios.TCSANOW, self._modes)
            termios.tcflush(self._in, termios.TCIFLUSH)  # keys meant for the view must not reach the shell

    def _end(self, number: int, frame: FrameType | None) -> None:
        raise SignalExit(number)

    def _resize(self, number: int, frame: FrameType | None) -> None:
        self.is_stale = True

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        self._give_back()
        try:
            with self._still():
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTSTP)  # the whole process is suspended here until `fg`
                end_s = time.monotonic() + _STOPS_S
                while not self._has_it and time.monotonic() < end_s:
                    time.sleep(0.02)
                if not self._has_it:  # the kernel does not stop an orphaned process group
                    self._go_on(signal.SIGCONT, None)
        finally:
            signal.signal(signal.SIGTSTP, self._suspend)

    def _go_on(self, number: int, frame: FrameType | None) -> None:
        # In the background this call stops the process again until `fg`, as for every program that uses the terminal.
        with contextlib.suppress(termios.error):
            self._take()


def _scratch() -> int:
    """Return an unnamed file in append mode. Raises ConfigError."""
    try:
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("said")
        else:
            with tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    except OSError as error:
        words = f"no space to capture output: {error.strerror}"
        raise ConfigError(words, hint="cloudtrain watch --plain") from error
    return file


def decode(data: bytes, *, is_all: bool = False) -> tuple[list[str], bytes]:
    """Return the keys, and the bytes of an incomplete key; with `is_all` no more bytes come, so Escape is a key.

    Unknown sequences, such as function keys or mouse reports, are skipped completely.
    """
    keys: list[str] = []
    while found := _KEY.match(data):
        keys += [_NAMES[found[0]]] if found[0] in _NAMES else []
        data = data[found.end() :]
    if data and (is_all or len(data) >= _LONGEST):
        return [*keys, ESCAPE], b""
    return keys, data


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
