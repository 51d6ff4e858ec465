"""The ssh backend: jobs are agents on the user's own machines, and cloudtrain reaches the machines by ssh alone.

A dry run imports only the modules that plan and render. A command imports the modules that use ssh on first use.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, Pace, Terms, lazy_modules

from .records import SshRef

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from cloudtrain.launcher.backend import (
        Check,
        FoundAttempt,
        HostUse,
        JobRef,
        LogPage,
        PushedModel,
        PushOutcome,
        Request,
        Shipment,
    )
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault
    from cloudtrain.launcher.job import State
    from cloudtrain.launcher.plan import Plan
    from cloudtrain.launcher.rehearsal.stage import Rehearsal, Stage

    from ..channel.calls import Fleet
    from . import block, check, doctor, jobs, jobs_send, models, rehearsal, request
else:  # each module is imported on its first use
    globals().update(lazy_modules(__package__))

# The agent of node 0 ends the job at the cap by its own clock. The remaining agents end at its message, or after 15 s
# of silence (entrypoints/agent/transport.py); killing the processes takes some seconds more.
TERMS = Terms(tail_s=20)
LINES_S, STATE_S = 0.3, 1.0
HOLD_BACK_S = 0.5  # hosts answer one after the other, and their clock differences are known to a quarter second
LATE_S = 15.0  # after node 0's verdict, for the end of another node's log


class SshBackend:
    """The backend of the name `ssh`; holds the channels to all hosts."""

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
        """Return the GPUs of a host as the config states them: only a submit asks the hosts."""
        gpus = int((config.resources.accelerators or ":0").rpartition(":")[2])
        price = config.block(block.Ssh).price_per_hour
        if price is None:
            return Capacity(gpus, 0.0, "your own machines", TERMS, is_own=True, machine="your hosts")
        return Capacity(gpus, price / 1e6, "ssh.price_per_hour", TERMS, is_own=price == 0, machine="your hosts")

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        return request.build(plan, config, job_id, attempt, bundle_sha256)

    def check(self, request: Request) -> list[Fault]:
        """Return the faults in the request that no host would accept."""
        return list(check.faults(request.body))

    def ready(self, request: Request, shipment: Shipment) -> None:
        jobs_send.ready(self.fleet, request)

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        return jobs_send.send(self.fleet, request, shipment)

    def find(self, request: Request, home: Path) -> JobRef | None:
        return jobs_send.find(self.fleet, request, home)

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        return jobs_send.jobs(self.fleet, config, home)

    def state(self, ref: JobRef) -> State:
        return jobs.state(self.fleet, ref)

    def logs(
        self, ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
    ) -> LogPage:
        return jobs.logs(self.fleet, ref, cursor, ranks, now=now)

    def logs_from(
        self, ref: JobRef, ranks: frozenset[int] | None, *, lines: int | None, since_s: float | None
    ) -> dict[str, Any] | None:
        return jobs.logs_from(self.fleet, ref, ranks, lines=lines, since_s=since_s)

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: a poll is one message each way on an open connection."""
        return Pace(lines_s=LINES_S, state_s=STATE_S, late_s=LATE_S, hold_back_s=HOLD_BACK_S)

    def stop(self, ref: JobRef, *, now: bool) -> None:
        jobs.stop(self.fleet, ref, now=now)

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Copy the nodes' output folders below `folder`; return the files there. Raises UnreachableError."""
        from ..channel import copies

        return copies.brought(self.fleet, [(node.host, node.output) for node in SshRef.load(ref).nodes], folder)

    def checkpoints(self, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
        """Copy the nodes' checkpoint folders below `folder`; return the files. Raises UnreachableError."""
        from ..channel import copies

        places = [(node.host, f"{node.checkpoints}/{inner}".rstrip("/")) for node in SshRef.load(ref).nodes]
        return copies.brought(self.fleet, places, folder)

    def checkpoint_place(self, ref: JobRef) -> str | None:
        """Return the place of the checkpoint folder, for a later job."""
        return SshRef.load(ref).nodes[0].checkpoints

    def shell(self, ref: JobRef, node: int, argv: list[str]) -> list[str]:
        return jobs.shell(self.fleet, ref, node, argv)

    def hosts(self, config: JobConfig) -> list[HostUse]:
        return doctor.hosts(self.fleet, config)

    def push_model(
        self, config: JobConfig | None, hosts: Sequence[str], place: str, model: PushedModel, *, replaces: bool
    ) -> dict[str, PushOutcome]:
        return models.push(self.fleet, config, hosts, place, model, replaces=replaces)

    def restore_model(self, config: JobConfig | None, hosts: Sequence[str], place: str) -> dict[str, PushOutcome]:
        return models.restore(self.fleet, config, hosts, place)

    def doctor(self, config: JobConfig | None) -> list[Check]:
        return doctor.checks(self.fleet, config, self.capacity)

    def rehearsal(self, request: Request, stage: Stage) -> Rehearsal:
        return rehearsal.rehearsal(request, stage)
