"""TensorBoard event files of scalars, written with the standard library alone.

A file is a row of TFRecords, each an Event protocol buffer between two masked CRC-32Cs:

    length uint64 | crc(length) uint32 | Event | crc(Event) uint32            little-endian

Sources: tensorflow/core/lib/io/record_writer.cc; tensorboard/compat/proto/event.proto and summary.proto (2.21).
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FLUSH_S = 5.0  # at most this much is lost at a kill, and a network disk gets fewer writes than steps
_MAX_BYTES = 1 << 23  # buffered while the disk is full; then whole events are dropped
_VERSION = b"brain.Event:2"  # readers require this version before they respect session starts
_GROUPS = {"step": "train", "eval": "eval", "checkpoint": "checkpoint"}  # event name: heading in TensorBoard
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class Board:
    """Writes scalars to one new event file in a folder; disk errors never end training.

    The file begins with the first scalar, or by `start`. The file opens with a session start at a step: readers drop
    later steps of the folder's earlier files, so that steps trained again do not show twice.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._handle: int | None = None
        self._waiting = bytearray()  # whole events, the first possibly written in part
        self._flushed_s = time.monotonic()

    def start(self, step: int) -> None:
        """Begin the file with a session from `step` on: the first step to be trained."""
        if self._waiting or self._handle is not None:
            return
        # The first session has a start event too: readers do not treat a folder's first session start as a restart.
        self._add(_event(time.time(), step, _bytes(3, _VERSION)))
        self._add(_event(time.time(), step, _bytes(7, _int(1, 1))))  # session_log { status: START }

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write an event's numbers, as train/loss, eval/loss and so on (events.py); the start event begins the file."""
        step = fields.get("step")
        if not isinstance(step, int):
            return
        if event == "start":
            self.start(step + 1)
        elif event in _GROUPS:
            values = {f"{_GROUPS[event]}/{name}": value for name, value in fields.items()}
            self.scalars(step, {tag: v for tag, v in values.items() if not tag.endswith(("/step", "/max_steps"))})

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Write values by tag at a step, as one event; values other than numbers are left out."""
        numbers = {tag: float(value) for tag, value in values.items() if type(value) in (int, float)}
        if not numbers:
            return
        self.start(step)
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in numbers.items())
        self._add(_event(time.time(), step, _bytes(5, summary)))
        if time.monotonic() - self._flushed_s > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Pass the buffer to the operating system; the bytes that a full disk refuses stay buffered."""
        self._flushed_s = time.monotonic()
        try:
            if self._handle is None and self._waiting:
                self._handle = _open_next(self._folder)
            while self._handle is not None and self._waiting:
                del self._waiting[: os.write(self._handle, self._waiting)]
        except OSError:
            return  # continue next time at the same byte, so that no event is torn

    def close(self) -> None:
        """Flush and close; a later scalar would begin a new file. Call before `os._exit`."""
        self.flush()
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None

    def _add(self, event: bytes) -> None:
        if len(self._waiting) < _MAX_BYTES:
            self._waiting += _record(event)


def _open_next(folder: Path) -> int:
    """Create the event file with the last name in the folder: readers take files in the order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    times = [int(found[1]) for found in map(_NAME.match, os.listdir(folder)) if found]
    # Later than the newest even within the same second, or with a different machine's clock behind.
    begin_s = max([int(time.time()), *(newest + 1 for newest in times)])
    name = f"events.out.tfevents.{begin_s:010d}.{socket.gethostname()}.{os.getpid()}"
    return os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _event(wall_time: float, step: int, what: bytes) -> bytes:
    return struct.pack("<Bd", 1 << 3 | 1, wall_time) + _int(2, step) + what


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", ctypes.c_float(value).value)  # infinite beyond float32


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative int64 is its two's complement
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def _record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + struct.pack("<I", _masked_crc(length)) + event + struct.pack("<I", _masked_crc(event))


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, reflected (RFC 3720)
        table.append(byte)
    return tuple(table)


_CRC_TABLE = _crc_table()


def _crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> int:
    crc = _crc(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
