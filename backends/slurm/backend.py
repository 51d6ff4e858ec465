"""The Slurm backend: a batch job's agents run on the nodes, and all files are on the cluster's shared disk.

A dry run imports only the modules that plan and render. A command imports the modules of the channel on first use.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, Pace, Terms, lazy_modules

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from cloudtrain.launcher.backend import Check, FoundAttempt, HostUse, JobRef, LogPage, Request, Shipment
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault
    from cloudtrain.launcher.job import State
    from cloudtrain.launcher.plan import Plan
    from cloudtrain.launcher.rehearsal.stage import Rehearsal, Stage

    from ..channel.calls import Fleet
    from . import (
        block,
        channel,
        check,
        doctor,
        jobs,
        jobs_send,
        records,
        rehearsal,
        request,
    )
    from .channel import Login
    from .records import SlurmRef
else:  # each module is imported on its first use
    globals().update(lazy_modules(__package__))

# Slurm's limit is in whole minutes. A node is charged until the last process has ended: KillWait (30 s by default)
# after the limit, and Slurm looks for jobs over their limit every 30 s (seen in 22.05).
TERMS = Terms(tail_s=90, least_s=60, unit_s=60)
LINES_S, STATE_S = 0.3, 1.0
LATE_S = 15.0  # after the verdict, for the end of another node's log


class SlurmBackend:
    """The backend of the name `slurm`; holds the channels to the login nodes."""

    def __init__(self) -> None:
        self._fleet: Fleet | None = None
        self._opening = threading.Lock()

    @property
    def fleet(self) -> Fleet:
        """The channels, the same object in every thread."""
        from ..channel import calls

        with self._opening:
            self._fleet = self._fleet or calls.open_fleet()
            return self._fleet

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the GPUs of a node as the config states them, and the price of a node."""
        gpus, settings = int((config.resources.accelerators or ":0").rpartition(":")[2]), config.block(block.Slurm)
        price, source = settings.price_per_hour, "slurm.price_per_hour"
        if settings.price_per_gpu_hour is not None and gpus:
            price, source = gpus * settings.price_per_gpu_hour, "slurm.price_per_gpu_hour"
        if price is None:
            return Capacity(gpus, 0.0, "your cluster", TERMS, is_own=True, machine="cluster nodes")
        return Capacity(gpus, price / 1e6, source, TERMS, is_own=price == 0, machine="cluster nodes")

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        return request.build(plan, config, job_id, attempt, bundle_sha256)

    def check(self, request: Request) -> list[Fault]:
        """Return the faults in the request that a cluster would refuse, or would accept and never run."""
        return list(check.faults(request.body))

    def ready(self, request: Request, shipment: Shipment) -> None:
        jobs_send.ready(self.fleet, request)

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        return jobs_send.send(self.fleet, request, shipment)

    def find(self, request: Request, home: Path) -> JobRef | None:
        return jobs_send.find(self.fleet, request, home)

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        return jobs_send.jobs(self.fleet, config, home)

    def where_to_look(self, request: Request) -> str:
        """Return the command that shows whether the request's job is in the queue."""
        login = request.body["settings"]["login"]
        return f"{f'ssh {login} ' if login else ''}squeue --me --name={request.name}"

    def state(self, ref: JobRef) -> State:
        return jobs.state(*self._at(ref))

    def logs(
        self, ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
    ) -> LogPage:
        return jobs.logs(*self._at(ref), cursor, ranks)

    def logs_from(
        self, ref: JobRef, ranks: frozenset[int] | None, *, lines: int | None, since_s: float | None
    ) -> dict[str, Any] | None:
        return jobs.logs_from(*self._at(ref), ranks, lines=lines, since_s=since_s)

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: a poll reads files on the login node, and rarely asks Slurm."""
        return Pace(lines_s=LINES_S, state_s=STATE_S, late_s=LATE_S)

    def stop(self, ref: JobRef, *, now: bool) -> None:
        jobs.stop(*self._at(ref), now=now)

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Copy the job's output folder below `folder`; return the files there. Raises UnreachableError."""
        return self._brought(ref, records.SlurmRef.load(ref).output, folder)

    def checkpoints(self, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
        """Copy the job's checkpoint folder below `folder`; return the files. Raises UnreachableError."""
        place = f"{records.SlurmRef.load(ref).checkpoints}/{inner}".rstrip("/")
        return self._brought(ref, place, folder)

    def checkpoint_place(self, ref: JobRef) -> str | None:
        """Return the place of the checkpoint folder, for a later job."""
        return records.SlurmRef.load(ref).checkpoints

    def shell(self, ref: JobRef, node: int, argv: list[str]) -> list[str]:
        return jobs.shell(*self._at(ref), node, argv)

    def rehearsal(self, request: Request, stage: Stage) -> Rehearsal:
        return rehearsal.rehearsal(request, stage)

    def doctor(self, config: JobConfig | None) -> list[Check]:
        return doctor.checks(self.fleet, config, self.capacity)

    def hosts(self, config: JobConfig) -> list[HostUse]:
        return doctor.hosts(self.fleet, config)

    def _at(self, ref: JobRef) -> tuple[Login, SlurmRef]:
        handle = records.SlurmRef.load(ref)
        return channel.Login.at(self.fleet, handle.login), handle

    def _brought(self, ref: JobRef, place: str, folder: Path) -> list[Path]:
        from ..channel.copies import brought

        login, _ = self._at(ref)
        return brought(self.fleet, [(login.host, place)], folder)
