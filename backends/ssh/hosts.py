"""A host: how ssh reaches it, and what it needs besides. From the config, or from a job's reference."""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import Config

__all__ = ["Host", "of_config"]


@dataclass(frozen=True)
class Host:
    """One machine. What is None is left to ssh's own configuration, or found out on the host."""

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
    def config(self) -> tuple[str, ...]:
        """Return ssh's arguments that say which configuration it reads."""
        return ("-F", os.path.expanduser(self.ssh_config)) if self.ssh_config else ()  # noqa: PTH111 - "none" is one

    @property
    def target(self) -> tuple[str, ...]:
        """Return ssh's arguments that say which machine; `--` keeps a name from being taken for an option."""
        port = ("-p", str(self.port)) if self.port else ()
        user = ("-l", self.user) if self.user else ()
        return (*self.config, *port, *user, "--", self.name)

    @property
    def by_hand(self) -> str:
        """Return what a user types to get there."""
        return shlex.join(["ssh", *(word for word in self.target if word != "--")])

    @property
    def key(self) -> str:
        """Return what tells this connection from every other."""
        told = (self.name, self.user, self.port, self.ssh_config, self.accepts_new_keys)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def dump(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def of_config(config: Config) -> list[Host]:
    """Return the config's hosts, the block's settings filled in."""
    block = config.ssh
    if block is None:
        return []
    return [
        Host(
            name=each.host,
            user=each.user or block.user,
            port=each.port,
            python=each.python or block.python,
            workdir=each.workdir or block.workdir,
            address=each.address,
            interface=each.interface or block.interface,
            ssh_config=block.ssh_config,
            accepts_new_keys=block.accept_new_host_keys,
        )
        for each in block.hosts
    ]
