"""Finds ranks that gather different blocks under fsdp and hsdp, which would hang, or mix up blocks of the same size.

Each rank notes its gathers and the ends of its forward passes and steps. The ranks compare their notes after the first
step, at each save and after each evaluation. Against a hang, a thread of each rank that has noted nothing for STUCK_S
writes its newest notes into the store, where rank 0 looks for a difference. A slow rank has fewer notes, and no others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ... import atomic_json
from ...errors import TaskError
from ...rank import exchange

STUCK_S = 10.0
_CURE = (
    "under fsdp all ranks must call the same blocks in the same order, in loss and in evaluate: multiply the output of "
    "a layer that is skipped at random by 0 or 1, or set strategy: ddp"
)
_numbers = itertools.count()  # all ranks create their notes in the same order


class GatherNotes:
    """What this rank did: the number of notes, a checksum of all, and the newest with their numbers."""

    def __init__(self) -> None:
        self._count = self._checksum = 0
        self._newest: deque[tuple[int, str]] = deque(maxlen=500)
        threading.Thread(target=self._watch, args=(f"gathers-{next(_numbers)}",), daemon=True).start()

    def add(self, what: str) -> None:
        """Add a note."""
        self._count += 1
        self._checksum = zlib.crc32(what.encode(), self._checksum)
        self._newest.append((self._count, what))

    def compare(self) -> None:
        """Raise TaskError, on all ranks, if their notes differ. All ranks call it."""
        told = exchange.gather([self._count, self._checksum])
        if any(other != told[0] for other in told):
            words = difference(exchange.gather(list(self._newest))) or "the ranks have called different blocks"
            raise TaskError(f"{words}; {_CURE}")

    def _watch(self, prefix: str) -> None:
        names, rank = [f"{prefix}-{number}" for number in range(dist.get_world_size())], dist.get_rank()
        store: Any = dist.distributed_c10d._get_default_store()
        store, last = store.clone(), -1  # the main thread may hold the other while it waits
        with contextlib.suppress(RuntimeError):  # the process with the store has ended
            while True:
                time.sleep(STUCK_S)
                if self._count == last:
                    store.set(names[rank], json.dumps(list(self._newest)))
                    told = [json.loads(store.get(n)) for n in names] if rank == 0 and store.check(names) else [[]]
                    if words := difference(told):
                        _end(f"{words}; {_CURE}")
                last = self._count


def difference(told: list[Any]) -> str | None:
    """Return the first of the newest notes in which a rank differs from rank 0, None without a difference."""
    first = dict(told[0])
    for rank, notes in enumerate(told):
        for number, what in notes:  # notes of a rank that goes on are old, and stay true
            if first.get(number, what) != what:
                return f"rank 0 {first[number]} where rank {rank} {what}"
    return None


def _end(message: str) -> None:
    """End this rank with the error, as agent/worker.py does: the main thread waits for ever."""
    os.write(2, f"TaskError: {message}\n".encode())
    if folder := os.environ.get("CLOUDTRAIN_RESULT_DIR"):
        failure = {"rank": 0, "kind": "config", "type": "TaskError", "message": message, "time_s": time.time()}
        atomic_json.write_json(Path(folder) / "rank-0.json", failure)
    os._exit(64)
