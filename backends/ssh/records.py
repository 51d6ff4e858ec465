"""The stored record of a job on the user's own machines: the handle, with the paths on each host."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloudtrain.launcher.backend import StoredRecord

from ..channel.hosts import Host


@dataclass(frozen=True)
class SshNode(StoredRecord):
    """A node; the paths are absolute paths on the host."""

    host: Host
    root: str
    """The node's folder of the attempt."""
    checkpoints: str
    output: str
    job: str = ""
    """The job's folder."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Paths by name."""
    outputs: dict[str, str] = field(default_factory=dict)
    """Paths by name."""
    mirror: str = ""
    """The job's folder of copies of checkpoints, if the mirror is a folder."""


@dataclass(frozen=True)
class SshRef(StoredRecord):
    """The handle of a job."""

    nodes: list[SshNode]
    """By number."""
    nproc_per_node: int
    can_shrink: bool
    """Whether a restart may use fewer nodes, or a spare, so a rank may move."""
    spares: int = 0
    """How many of the nodes, the last ones, began as spares."""
