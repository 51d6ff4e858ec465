"""The checksums of files, computed in parallel with a transfer."""

from __future__ import annotations

import hashlib
import queue
import threading
import zlib

BLOCK = 1 << 18  # bytes; 1.5 times the rate of 4 MiB blocks: a block is hashed and written while still in a CPU cache


class Sums:
    """Computes the SHA-256 of one file after another, and the CRC-32 if requested, in parallel with the transfer.

    `block()` lends the next of three buffers, `add` takes the filled buffer; the last buffer but one is free again by
    then. A file of a single block is hashed in the caller's thread, because small files are many.
    """

    def __init__(self, *, with_crc: bool) -> None:
        self._with_crc = with_crc
        self._blocks = [memoryview(bytearray(BLOCK)) for _ in range(3)]
        self._next = 0
        self._todo: queue.Queue[memoryview | None] = queue.Queue(1)
        self._thread: threading.Thread | None = None
        self._begin()

    def block(self) -> memoryview:
        """Return the buffer for the next bytes."""
        self._next = (self._next + 1) % len(self._blocks)
        return self._blocks[self._next]

    def add(self, block: memoryview, *, is_all: bool = False) -> None:
        """Add a file's next bytes. `is_all`: the bytes are the whole file."""
        if is_all:
            self._update(block)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
            self._thread.start()
        self._todo.put(block)

    def take(self) -> tuple[str, str]:
        """Return the file's SHA-256 and CRC-32 in hexadecimal digits, and start the next file."""
        self._todo.join()
        found = self._sha256.hexdigest(), f"{self._crc32:08x}"
        self._begin()
        return found

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._todo.put(None)

    def _begin(self) -> None:
        self._sha256 = hashlib.sha256()
        self._crc32 = 0

    def _run(self) -> None:
        while (block := self._todo.get()) is not None:
            self._update(block)
            self._todo.task_done()

    def _update(self, block: memoryview) -> None:
        self._sha256.update(block)
        if self._with_crc:
            self._crc32 = zlib.crc32(block, self._crc32)
