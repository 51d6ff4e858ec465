"""A host: how ssh reaches the machine, and the host's settings. From a config, or from a job's reference."""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import dataclass

from cloudtrain.launcher.backend import StoredRecord

HERE = "this machine"  # as a host's name: calls go to a process here, without ssh


@dataclass(frozen=True)
class Host(StoredRecord):
    """One machine. A field that is None is left to ssh's own configuration, or to the host."""

    name: str
    user: str | None = None
    port: int | None = None
    python: str = "python3"
    workdir: str = "~/.cloudtrain"
    address: str | None = None
    interface: str | None = None
    ssh_config: str | None = None
    accepts_new_keys: bool = False

    @property
    def is_here(self) -> bool:
        """Whether the host is this machine, reached without ssh."""
        return self.name == HERE

    @property
    def config(self) -> tuple[str, ...]:
        """Return ssh's arguments for the configuration file."""
        return ("-F", os.path.expanduser(self.ssh_config)) if self.ssh_config else ()  # noqa: PTH111 - "none" is one

    @property
    def target(self) -> tuple[str, ...]:
        """Return ssh's arguments for the machine; `--` prevents ssh from reading the name as an option."""
        port = ("-p", str(self.port)) if self.port else ()
        user = ("-l", self.user) if self.user else ()
        return (*self.config, *port, *user, "--", self.name)

    @property
    def by_hand(self) -> str:
        """Return the command that a user types to log in."""
        if self.is_here:
            return "sh -c"
        return shlex.join(["ssh", *(word for word in self.target if word != "--")])

    @property
    def key(self) -> str:
        """Return a key that identifies the connection's settings."""
        identity = (self.name, self.user, self.port, self.ssh_config, self.accepts_new_keys)
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
