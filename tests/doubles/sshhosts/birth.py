"""The first steps of each child of the keeper."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection

from doubles import namespaces

__all__ = ["begin"]


def begin(kept: Collection[int], console: str) -> None:
    """Die with the keeper, close all open files but `kept`, read /dev/null, and write to the end of `console`."""
    namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, standard in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(fd, standard)
    os.close(nothing)
    os.close(written)
