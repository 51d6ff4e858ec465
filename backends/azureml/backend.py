"""The Azure ML backend: jobs are command jobs, their lines are in the run's log files, their files in blob storage.

What plans and renders is imported by a dry run, what talks to Azure by the commands that do, each on first use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.backend import Capacity, Check, JobRef, LogPage, Pace, Request, Shipment

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import Config
    from cloudtrain.launcher.errors import Fault
    from cloudtrain.launcher.job import State
    from cloudtrain.launcher.plan import Plan

__all__ = ["artifacts", "capacity", "check", "doctor", "find", "logs", "pace", "request", "send", "state", "stop"]

STATE_S = 4.0
LATE_S = 15.0  # from a run's end to the last line in its files, where a container could not say its last word
CLUSTER_IDLE_S = 120  # before a cluster lets its machines go: Azure's default, which a cluster may change


def capacity(config: Config) -> Capacity:
    """Return what the machine type brings, at its price on demand: what spot machines cost is not in our table."""
    from cloudtrain.backends.azureml.machine import block_of, choose

    machine, block = choose(config), block_of(config)
    idle_s = CLUSTER_IDLE_S if block.compute else 0
    more = f", with {idle_s // 60}m in which the cluster idles" if idle_s else ""
    more += ", on demand: spot machines cost less" if config.resources.spot else ""
    if block.price_per_hour is not None:
        what = machine.instance_type or block.compute
        return Capacity(machine.count, block.price_per_hour / 1e6, f"{what}, azureml.price_per_hour{more}", idle_s)
    if machine.hourly_usd is None:
        what = machine.instance_type or f"the machines of {block.compute}"
        where = block.region or "an unknown region (azureml.region)"
        return Capacity(machine.count, None, f"no price of {what} in {where}: set azureml.price_per_hour", idle_s)
    return Capacity(machine.count, machine.hourly_usd, f"{machine.instance_type}, {machine.price_source}{more}", idle_s)


def request(plan: Plan, config: Config, job_id: str, attempt: int, bundle_sha256: str) -> Request:
    """Return the command job. Raises ConfigError where the config does not say enough for one."""
    from cloudtrain.backends.azureml import request as requests

    return requests.build(plan, config, job_id, attempt, bundle_sha256)


def check(request: Request) -> list[Fault]:
    """Return what Azure ML would refuse."""
    from cloudtrain.backends.azureml import check as rules

    return list(rules.faults(request.body))


def send(request: Request, shipment: Shipment) -> JobRef:
    """Upload what is not there yet, and start the job."""
    from cloudtrain.backends.azureml import jobs

    return jobs.send(request, shipment)


def find(request: Request, home: Path) -> JobRef | None:
    """Return the job that the request has started."""
    from cloudtrain.backends.azureml import jobs

    return jobs.find(request, home)


def state(ref: JobRef) -> State:
    """Return what Azure says of the job."""
    from cloudtrain.backends.azureml import jobs

    return jobs.state(ref)


def logs(
    ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
) -> LogPage:
    """Return the lines after the cursor."""
    from cloudtrain.backends.azureml import jobs

    return jobs.logs(ref, cursor, ranks, now=now)


def pace(ref: JobRef) -> Pace:
    """Return how often to ask."""
    from cloudtrain.backends.azureml import jobs

    return Pace(lines_s=jobs.pace_s(ref), state_s=STATE_S, late_s=LATE_S, can_kill=False)


def stop(ref: JobRef, *, now: bool) -> None:
    """Ask Azure to cancel the job; `now` is no quicker there."""
    from cloudtrain.backends.azureml import jobs

    jobs.stop(ref)


def artifacts(ref: JobRef, folder: Path) -> list[Path]:
    """Download what the job has left in its output folder; return the files."""
    from cloudtrain.backends.azureml import jobs

    return jobs.artifacts(ref, folder)


def doctor(config: Config | None) -> list[Check]:
    """Return what stands in the way of a job in the workspace."""
    from cloudtrain.backends.azureml import doctor

    return doctor.checks(config)
