"""The Slurm backend: a batch job's agents run on the nodes, and all files are on the cluster's shared disk.

A dry run imports only the modules that plan and render. A command imports the modules of the channel on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, Pace, SavedFiles, Supersedes, Terms

from ..adapter import HostsAdapter, handed
from .records import SlurmRef

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Copy the job's output folder below `folder`; return the files there. Raises UnreachableError."""
        return self._brought(ref, SlurmRef.load(ref).output, folder)

    def checkpoints(self, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
        """Copy the job's checkpoint folder below `folder`; return the files. Raises UnreachableError."""
        place = f"{SlurmRef.load(ref).checkpoints}/{inner}".rstrip("/")
        return self._brought(ref, place, folder)

    def checkpoint_place(self, ref: JobRef) -> str | None:
        return SlurmRef.load(ref).checkpoints

    def saved(self, refs: Sequence[JobRef], config: JobConfig) -> SavedFiles:
        """Return the files in the job's checkpoint folder. Raises UnreachableError."""
        from .channel import Login

        ref = SlurmRef.load(refs[-1])
        asked = {"folder": ref.checkpoints, "or_damaged": True}
        newest = Login.at(self.connections, ref.login).call("copying.newest", asked)
        return SavedFiles(bool(newest), newest.get("step"))

    def _brought(self, ref: JobRef, place: str, folder: Path) -> list[Path]:
        from ..channel.copies import brought
        from .channel import Login

        login = Login.at(self.connections, SlurmRef.load(ref).login)
        return brought(self.connections, [(login.host, place)], folder)
