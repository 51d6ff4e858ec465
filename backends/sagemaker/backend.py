"""The SageMaker backend: jobs are training jobs, their lines are in CloudWatch, their files in S3.

What plans and renders is here, and imported by a dry run; what talks to AWS is in jobs.py, imported on first use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.sagemaker import check as rules
from cloudtrain.backends.sagemaker import request as requests
from cloudtrain.backends.sagemaker.machine import block_of, choose, region_of
from cloudtrain.launcher.backend import Capacity, Check, JobRef, LogPage, Pace, Request, Shipment
from cloudtrain.launcher.units import format_duration

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import Config
    from cloudtrain.launcher.errors import Fault
    from cloudtrain.launcher.job import State
    from cloudtrain.launcher.plan import Plan

__all__ = ["artifacts", "capacity", "check", "doctor", "find", "logs", "pace", "request", "send", "state", "stop"]

CALLS_PER_S = 5.0  # of reading logs: the account's quota, 25 in most regions, is shared by all who look
STATE_S = 5.0
LATE_S = 15.0  # from a job's end to its last line in CloudWatch, where a container could not say its last word


def capacity(config: Config) -> Capacity:
    """Return what the machine type brings, at its price on demand: spot bills fewer seconds at the same rate."""
    machine = choose(config)
    warm_s, own = block_of(config).keep_alive or 0, block_of(config).price_per_hour
    warm = f", with {format_duration(warm_s)} kept warm" if warm_s else ""
    spot = ", on demand: spot machines bill fewer seconds" if config.resources.spot else ""
    if own is not None:
        return Capacity(machine.count, own / 1e6, f"sagemaker.price_per_hour{spot}{warm}", warm_s)
    if machine.hourly_usd is None:
        region = region_of(block_of(config)) or "an unknown region"
        return Capacity(machine.count, None, f"no price of {machine.instance_type} in {region}", warm_s)
    source = f"{machine.instance_type}, {machine.price_source}{spot}{warm}"
    return Capacity(machine.count, machine.hourly_usd, source, warm_s)


def request(plan: Plan, config: Config, job_id: str, attempt: int, bundle_sha256: str) -> Request:
    """Return the CreateTrainingJob request. Raises ConfigError where the config does not say enough for one."""
    return requests.build(plan, config, job_id, attempt, bundle_sha256)


def check(request: Request) -> list[Fault]:
    """Return what SageMaker would refuse."""
    return list(rules.faults(request.body))


def send(request: Request, shipment: Shipment) -> JobRef:
    """Upload what is not there yet, claim the job's name, and start it."""
    from cloudtrain.backends.sagemaker import jobs

    return jobs.send(request, shipment)


def find(request: Request, home: Path) -> JobRef | None:
    """Return the job that the request has started, or close the door to one that is still under way."""
    from cloudtrain.backends.sagemaker import jobs

    return jobs.find(request, home)


def state(ref: JobRef) -> State:
    """Return what SageMaker says of the job."""
    from cloudtrain.backends.sagemaker import jobs

    return jobs.state(ref)


def logs(
    ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
) -> LogPage:
    """Return the lines after the cursor."""
    from cloudtrain.backends.sagemaker import jobs

    return jobs.logs(ref, cursor, ranks, now=now)


def pace(ref: JobRef) -> Pace:
    """Return how often to ask: each look costs a call a host."""
    return Pace(
        lines_s=max(1.0, ref["nodes"] / CALLS_PER_S), state_s=STATE_S, late_s=LATE_S, can_kill=False, retries=True
    )


def stop(ref: JobRef, *, now: bool) -> None:
    """Ask SageMaker to stop the job; `now` is no quicker there."""
    from cloudtrain.backends.sagemaker import jobs

    jobs.stop(ref)


def artifacts(ref: JobRef, folder: Path) -> list[Path]:
    """Download what the job has left in its output folder; return the files."""
    from cloudtrain.backends.sagemaker import jobs

    return jobs.artifacts(ref, folder)


def doctor(config: Config | None) -> list[Check]:
    """Return what stands in the way of a job on this account."""
    from cloudtrain.backends.sagemaker import doctor

    return doctor.checks(config)
