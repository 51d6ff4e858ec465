"""The stored records of a job on the user's own machines: its handle, with the places on each host."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloudtrain.backends.ssh.hosts import Host
from cloudtrain.launcher.backend import StoredRecord

__all__ = ["SshNode", "SshRef"]


@dataclass(frozen=True)
class SshNode(StoredRecord):
    """A node: its host, the address for the other nodes, and absolute paths on the host.

    `job`: the job's folder; `root`: the attempt's folder of the node. `inputs` and `outputs`: paths by their names.
    """

    host: Host
    root: str
    checkpoints: str
    output: str
    address: str = ""
    job: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SshRef(StoredRecord):
    """The handle of a job: its nodes by number. `can_shrink`: a restart may use fewer nodes, so a rank may move."""

    nodes: list[SshNode]
    nproc_per_node: int
    can_shrink: bool
    job: str = ""
    attempt: int = 0
