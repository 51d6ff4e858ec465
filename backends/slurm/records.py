"""The stored record of a job on a Slurm cluster: the handle, with the paths on the shared disk."""

from __future__ import annotations

from dataclasses import dataclass

from cloudtrain.launcher.backend import StoredRecord

from ..channel.hosts import Host


@dataclass(frozen=True)
class SlurmRef(StoredRecord):
    """The handle of a job. `number`: Slurm's, 0 until sbatch has answered. `folder`: the attempt's folder.

    `python`: the interpreter on the compute nodes. `can_shrink`: a restart may use fewer nodes, so a rank may move.
    `limit_reason`: why the time limit ends the job.
    """

    login: Host
    folder: str
    checkpoints: str
    output: str
    nodes: int
    nproc_per_node: int
    python: str = "python3"
    limit_reason: str = "time_limit"
    can_shrink: bool = False
    number: int = 0
    sent_s: float = 0.0
