"""The channels of this process's ssh backend."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import cast

from cloudtrain.backends.channel.calls import Fleet
from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.entrypoints import processes
from cloudtrain.launcher import backend as backends


def fleet() -> Fleet:
    """Return the channels, opened on the first call."""
    return cast(SshBackend, backends.load("ssh")).connections


def forget() -> None:
    """Let the next call open new channels, as in a new process."""
    backends._made.cache_clear()


def end(home: Path) -> None:
    """End this process's channels and masters: the next call acts as a new command."""
    fleet().close()
    forget()
    for pid in processes.with_environment(CLOUDTRAIN_HOME=str(home)):
        processes.kill(pid, signal.SIGKILL)
