"""Relays a node's log files to standard output: managed platforms keep only a container's standard output.

Ranks write into their own files and never wait for the relay. The platform has one stream per node, so a rank's lines
get the rank as a prefix, `[3] `; the node's own lines get no prefix. For a platform without times (form `stamped`), the
prefix includes the time when the relay read the line: `2026-11-21T23:59:59.123Z [3] `. For a platform that may lose
the order, or a line, and reads JSON objects (Cloud Logging; form `json`), each line becomes an object: `message`,
`severity`, and `ct`: the container's id `l`, the line's number `n`, from 1, and its time `t` in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import threading
import time
from pathlib import Path
from typing import Literal

Form = Literal["plain", "stamped", "json"]

LOOK_S = 0.1
PIECE_BYTES = 1 << 20  # per file and round, so that no file waits long
GIVE_BYTES = 64 << 20  # relayed bytes of a file, before their disk space is freed
MAX_LINE_BYTES = 1 << 16  # a longer line is split: CloudWatch refuses events over 256 KB

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h

_LOG = re.compile(r"boot\.log|rank-(\d+)\.log")
_LEVEL = re.compile(r"\b(DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b|Traceback \(most recent|Error: ")
_LEVEL_IN = 80  # characters from the line's beginning: a later level is part of the message
_SEVERITIES = {"WARN": "WARNING", "FATAL": "CRITICAL"}


class LogRelay(threading.Thread):
    """A thread that relays log lines, from `start` to `finish`."""

    def __init__(self, folder: Path, out: int = 1, *, form: Form = "plain") -> None:
        super().__init__(name="pump", daemon=True)
        self._folder = folder
        self._out = out
        self._form = form
        self.life = secrets.token_hex(4)
        self.count = 0  # lines written
        self._offsets: dict[Path, int] = {}
        self._given: dict[Path, int] = {}  # end of the freed disk space in each file
        self._is_over = threading.Event()

    def finish(self) -> None:
        """Copy the rest, including last lines without a newline, and return."""
        self._is_over.set()
        self.join()

    def write(self, text: str) -> None:
        """Write a line of the node itself, without a file; not between `start` and `finish`."""
        with contextlib.suppress(OSError):  # standard output has no reader
            _write(self._out, self._formed("", [text.encode(errors="replace")]))

    def run(self) -> None:
        """Copy existing and new lines."""
        with contextlib.suppress(OSError):  # standard output has no reader: the job continues
            while not self._is_over.wait(LOOK_S):
                self._copy(is_last=False)
            while self._copy(is_last=True):
                pass

    def _copy(self, *, is_last: bool) -> bool:
        """Copy a piece of every file; return whether a line was copied."""
        found = False
        for path in sorted(self._folder.glob("*.log")):
            match = _LOG.fullmatch(path.name)
            if match is None:
                continue
            lines: list[bytes] = []
            with contextlib.suppress(OSError):  # an unreadable file must not stop the remaining files
                lines, self._offsets[path] = _read(path, self._offsets.get(path, 0), is_last=is_last)
            if lines:
                _write(self._out, self._formed(f"[{match[1]}] " if match[1] else "", lines))
                found = True
            if self._offsets.get(path, 0) - self._given.get(path, 0) >= GIVE_BYTES:
                _give_back(path, self._offsets[path])
                self._given[path] = self._offsets[path]
        return found

    def _formed(self, rank: str, lines: list[bytes]) -> bytes:
        """Return the lines in the platform's form."""
        begin, self.count = self.count + 1, self.count + len(lines)
        if self._form != "json":
            tag = f"{_now() if self._form == 'stamped' else ''}{rank}".encode()
            return b"".join(tag + line + b"\n" for line in lines)
        now_ms = int(time.time() * 1000)
        texts = (f"{rank}{line.decode(errors='replace')}" for line in lines)
        found = [
            {"severity": _severity(text), "message": text, "ct": {"l": self.life, "n": number, "t": now_ms}}
            for number, text in enumerate(texts, begin)
        ]
        return "".join(f"{json.dumps(each, ensure_ascii=False, separators=(',', ':'))}\n" for each in found).encode()


def _severity(text: str) -> str:
    """Return the level that the line names: the platform itself only distinguishes INFO and ERROR in the output."""
    level = _LEVEL.search(text, 0, _LEVEL_IN)
    if level is None:
        return "INFO"
    return _SEVERITIES.get(level[1], level[1]) if level[1] else "ERROR"


def _now() -> str:
    now_s = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{int(now_s * 1000) % 1000:03d}Z "


def _read(path: Path, offset: int, *, is_last: bool) -> tuple[list[bytes], int]:
    """Return the whole lines after the offset, and the offset of the following lines."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(PIECE_BYTES)
    whole, newline, rest = data.rpartition(b"\n")
    if rest and (len(rest) >= MAX_LINE_BYTES or (is_last and len(data) < PIECE_BYTES)):
        whole, newline = data, b""
    if not whole and not newline:
        return [], offset
    lines = []
    for line in whole.split(b"\n"):
        lines += [line[at : at + MAX_LINE_BYTES] for at in range(0, max(len(line), 1), MAX_LINE_BYTES)]
    return lines, offset + len(whole) + len(newline)


def _give_back(path: Path, size: int) -> None:
    """Free the disk space of the file's first bytes (fallocate(2)): the length stays, and writers are unaffected.

    A job with days of logs must not fill the disk with lines that the platform keeps. No effect without fallocate.
    """
    with contextlib.suppress(OSError, AttributeError), path.open("r+b") as file:
        fallocate = ctypes.CDLL(None).fallocate
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
        fallocate(file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, 0, size)


def _write(out: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]
