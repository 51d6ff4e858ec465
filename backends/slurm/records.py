"""The stored record of a job on a Slurm cluster: the handle, with the paths on the shared disk."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloudtrain.launcher.backend import StoredRecord

from ..channel.hosts import Host


@dataclass(frozen=True)
class SlurmRef(StoredRecord):
    """The handle of a job."""

    login: Host
    folder: str
    """The attempt's folder."""
    checkpoints: str
    output: str
    nodes: int
    nproc_per_node: int
    python: str = "python3"
    """The interpreter on the compute nodes."""
    limit_reason: str = "time_limit"
    """Why the time limit ends the job."""
    can_shrink: bool = False
    """Whether a restart may use fewer nodes, so a rank may move."""
    number: int = 0
    """Slurm's, 0 until sbatch has answered."""
    sent_s: float = 0.0
    outputs: dict[str, str] = field(default_factory=dict)
    """Paths by name."""
    mirror: str = ""
    """The job's folder of copies of checkpoints, if the mirror is a folder."""
