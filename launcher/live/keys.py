"""Decode pressed keys from the bytes that a terminal sends."""

from __future__ import annotations

__all__ = ["ESCAPE", "decode"]

ESCAPE = "escape"

# Cursor keys as sent by most terminals, in either mode, and by tmux and the Linux console.
_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1bOH": "home",
    b"\x1b[1~": "home",
    b"\x1b[7~": "home",
    b"\x1b[F": "end",
    b"\x1bOF": "end",
    b"\x1b[4~": "end",
    b"\x1b[8~": "end",
}
_SINGLE = {b"\r": "enter", b"\n": "enter", b"\x7f": "back", b"\x08": "back", b"\x0c": "redraw"}
_LONGEST = 32  # longer bytes without an end are not a sequence


def decode(data: bytes, *, is_all: bool = False) -> tuple[list[str], bytes]:
    """Return the keys, and the bytes of an incomplete key; with `is_all` no more bytes come, so Escape is a key.

    A printable key is its own name. Unknown sequences, such as function keys or mouse reports, are skipped completely.
    """
    keys: list[str] = []
    while data:
        if data[:1] == b"\x1b":
            length = _length(data)
            if length is None and not is_all and len(data) < _LONGEST:
                return keys, data
            if length is None or length == 1:
                keys.append(ESCAPE)
                data = b"" if length is None else data[1:]
                continue
            if name := _SEQUENCES.get(data[:length]):
                keys.append(name)
            data = data[length:]
            continue
        if name := _SINGLE.get(data[:1]):
            keys.append(name)
        elif 32 <= data[0] < 127:
            keys.append(chr(data[0]))
        data = data[1:]
    return keys, b""


def _length(data: bytes) -> int | None:
    """Return the length of the first sequence: 1 for an Escape before an Escape; None if incomplete."""
    if len(data) == 1:
        return None
    if data[1:2] == b"O":
        return 3 if len(data) > 2 else None
    if data[1:2] != b"[":
        return 1 if data[1:2] == b"\x1b" else 2  # Alt and a key
    for place, byte in enumerate(data[2:], 2):
        if 0x40 <= byte <= 0x7E:
            return place + 1
    return None
