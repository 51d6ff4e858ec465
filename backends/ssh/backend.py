"""The ssh backend: jobs are agents on the user's own machines, and cloudtrain reaches the machines by ssh alone.

A dry run imports only the modules that plan and render. A command imports the modules that use ssh on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, Terms

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from cloudtrain.launcher.backend import Check, FoundAttempt, HostUse, JobRef, LogPage, Pace, Request, Shipment
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault
    from cloudtrain.launcher.job import State
    from cloudtrain.launcher.plan import Plan
    from cloudtrain.launcher.rehearsal.stage import Rehearsal, Stage

# The agent of node 0 ends the job at the cap by its own clock. The remaining agents end at its message, or after 15 s
# of silence (entrypoints/agent/transport.py); killing the processes takes some seconds more.
TERMS = Terms(tail_s=20)


class SshBackend:
    """The backend of the name `ssh`."""

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the GPUs of a host as the config states them: only a submit asks the hosts."""
        from cloudtrain.backends.ssh.block import Ssh  # a poll of a job's state needs no config

        gpus = int((config.resources.accelerators or ":0").rpartition(":")[2])
        price = config.block(Ssh).price_per_hour
        if price is None:
            return Capacity(gpus, 0.0, "your own machines", TERMS, is_own=True, machine="your hosts")
        return Capacity(gpus, price / 1e6, "ssh.price_per_hour", TERMS, is_own=price == 0, machine="your hosts")

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        """Return the request. Hosts may outnumber the instances: a send takes the first hosts that are fit and free."""
        from cloudtrain.backends.ssh.request import build

        return build(plan, config, job_id, attempt, bundle_sha256)

    def check(self, request: Request) -> list[Fault]:
        """Return the faults in the request that no host would accept."""
        from cloudtrain.backends.ssh import check as rules

        return list(rules.faults(request.body))

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Open the channels that `send` uses. Raises an error if fewer hosts answer than the job needs."""
        from cloudtrain.backends.ssh import jobs_send

        jobs_send.ready(request, shipment)

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        """Start one detached agent on each host, or no agent at all."""
        from cloudtrain.backends.ssh import jobs_send

        return jobs_send.send(request, shipment)

    def find(self, request: Request, home: Path) -> JobRef | None:
        """Return the job if all its agents were started; otherwise close admission, so that None is final."""
        from cloudtrain.backends.ssh import jobs_send

        return jobs_send.find(request, home)

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        """Return the attempts with a running agent on the config's hosts, else on the hosts of this home's jobs."""
        from cloudtrain.backends.ssh import jobs_send

        return jobs_send.jobs(config, home)

    def state(self, ref: JobRef) -> State:
        """Return the job's state, from node 0's answer, else from all nodes' answers. Raises UnreachableError."""
        from cloudtrain.backends.ssh import jobs

        return jobs.state(ref)

    def logs(
        self, ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
    ) -> LogPage:
        """Return the lines after the cursor from all reachable hosts; the lines of unreachable hosts come later."""
        from cloudtrain.backends.ssh import jobs

        return jobs.logs(ref, cursor, ranks, now=now)

    def logs_from(
        self, ref: JobRef, ranks: frozenset[int] | None, *, lines: int | None, since_s: float | None
    ) -> dict[str, Any] | None:
        """Return a cursor before each file's last lines, or before the lines written since the time."""
        from cloudtrain.backends.ssh import jobs

        return jobs.logs_from(ref, ranks, lines=lines, since_s=since_s)

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: a poll is one message each way on an open connection."""
        from cloudtrain.backends.ssh import jobs

        return jobs.pace(ref)

    def stop(self, ref: JobRef, *, now: bool) -> None:
        """Send each agent the stop request; with `now`, kill the agents that do not obey. Raises UnreachableError."""
        from cloudtrain.backends.ssh import jobs

        jobs.stop(ref, now=now)

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Copy the nodes' output folders below `folder`; return the files there. Raises UnreachableError."""
        from cloudtrain.backends.ssh import jobs

        return jobs.artifacts(ref, folder)

    def checkpoints(self, ref: JobRef, folder: Path) -> list[Path]:
        """Copy the nodes' checkpoint folders below `folder`; return the files. Raises UnreachableError."""
        from cloudtrain.backends.ssh import jobs

        return jobs.checkpoints(ref, folder)

    def shell(self, ref: JobRef, node: int, argv: list[str]) -> list[str]:
        """Return the ssh command that runs `argv`, or a shell, in the node's code folder with its ranks' variables."""
        from cloudtrain.backends.ssh import jobs

        return jobs.shell(ref, node, argv)

    def hosts(self, config: JobConfig) -> list[HostUse]:
        """Return the use of each GPU of the config's hosts, in the config's order."""
        from cloudtrain.backends.ssh import doctor

        return doctor.hosts(config)

    def doctor(self, config: JobConfig | None) -> list[Check]:
        """Return the checks of the config's hosts."""
        from cloudtrain.backends.ssh.doctor import checks

        return checks(config)

    def rehearsal(self, request: Request, stage: Stage) -> Rehearsal:
        """Prepare the hosts. Their disks stay from start to start; a shared checkpoint folder is shared here too."""
        from cloudtrain.backends.ssh.rehearsal import rehearsal

        return rehearsal(request, stage)
