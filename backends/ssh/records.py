"""The stored record of a job on the user's own machines: the handle, with the paths on each host."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloudtrain.launcher.backend import StoredRecord

from ..channel.hosts import Host


@dataclass(frozen=True)
class SshNode(StoredRecord):
    """A node: the host, the node's address for its peers, and absolute paths on the host.

    `job`: the job's folder; `root`: the node's folder of the attempt. `inputs` and `outputs`: paths by name.
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
    """The handle of a job: the nodes by number. `can_shrink`: a restart may use fewer nodes, so a rank may move."""

    nodes: list[SshNode]
    nproc_per_node: int
    can_shrink: bool
    job: str = ""
    attempt: int = 0
