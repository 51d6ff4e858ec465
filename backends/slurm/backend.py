"""The Slurm backend: a batch job's agents run on the nodes, and all files are on the cluster's shared disk.

A dry run imports only the modules that plan and render. A command imports the modules of the channel on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, Pace, Supersedes, Terms

from ..adapter import HostsAdapter, handed
from .records import SlurmRef

if TYPE_CHECKING:
    from cloudtrain.launcher.backend import JobRef, Request
    from cloudtrain.launcher.config.schema import JobConfig

# Slurm's limit is in whole minutes. A node is charged until the last process has ended: KillWait (30 s by default)
# after the limit, and Slurm looks for jobs over their limit every 30 s (seen in 22.05).
TERMS = Terms(tail_s=90, least_s=60, unit_s=60)
LINES_S, STATE_S = 0.3, 1.0
LATE_S = 15.0  # after the verdict, for the end of another node's log


class SlurmBackend(HostsAdapter):
    """The backend of the name `slurm`; its hosts are the login nodes."""

    FOLDER = __package__
    supersede = handed(Supersedes.supersede, "jobs_send")

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the GPUs of a node as the config states them, and the price of a node."""
        from .block import Slurm  # a poll of a job's state needs no config

        gpus, settings = int((config.resources.accelerators or ":0").rpartition(":")[2]), config.block(Slurm)
        price, source = settings.price_per_hour, "slurm.price_per_hour"
        if settings.price_per_gpu_hour is not None and gpus:
            price, source = gpus * settings.price_per_gpu_hour, "slurm.price_per_gpu_hour"
        if price is None:
            return Capacity(gpus, 0.0, "your cluster", TERMS, is_own=True, machine="cluster nodes")
        return Capacity(gpus, price / 1e6, source, TERMS, is_own=price == 0, machine="cluster nodes")

    def where_to_look(self, request: Request) -> str:
        """Return the command that shows whether the request's job is in the queue."""
        login = request.body["settings"]["login"]
        return f"{f'ssh {login} ' if login else ''}squeue --me --name={request.name}"

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: a poll reads files on the login node, and rarely asks Slurm."""
        return Pace(lines_s=LINES_S, state_s=STATE_S, late_s=LATE_S)

    def checkpoint_place(self, ref: JobRef) -> str | None:
        return SlurmRef.load(ref).checkpoints
