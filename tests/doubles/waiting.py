"""Waits for conditions, and finds the processes of containers by a mark."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Seen = TypeVar("Seen")


def until(condition: Callable[[], Seen], timeout_s: float = 30.0, every_s: float = 0.02) -> Seen:
    """Wait for the condition's first true value, and return it. Raises AssertionError after the time.

    The pause is at least twice as long as the condition took: conditions that run commands leave the processor to the
    process under test.
    """
    end = time.monotonic() + timeout_s
    while True:
        begin = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        assert now < end, f"did not come true within {timeout_s:.0f} s"
        time.sleep(max(every_s, 2 * (now - begin)))


def new_mark() -> str:
    """Return a unique number of seconds to sleep: parallel runs of a test must not share the number."""
    return str(random.randint(10**6, 10**8))


def sleepers(mark: str) -> list[str]:
    """Return the machine's processes that sleep for `mark` seconds."""
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if _command(path) == f"sleep\0{mark}\0"]


def _command(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
