"""The SageMaker backend, as far as this version goes: the plan and the request, which the vendor's own CLI can send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.backends.sagemaker import check as rules
from cloudtrain.backends.sagemaker import request as requests
from cloudtrain.backends.sagemaker.machine import block_of, choose, region_of
from cloudtrain.launcher.backend import Capacity, Request

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import Config
    from cloudtrain.launcher.errors import Fault
    from cloudtrain.launcher.plan import Plan

__all__ = ["capacity", "check", "request"]


def capacity(config: Config) -> Capacity:
    """Return what the machine type brings, at its price on demand: spot bills fewer seconds at the same rate."""
    machine = choose(config)
    warm_s = block_of(config).keep_alive or 0
    if machine.hourly_usd is None:
        region = region_of(block_of(config)) or "an unknown region"
        return Capacity(machine.count, None, f"no price of {machine.instance_type} in {region}", warm_s)
    warm = f", with {warm_s} s kept warm" if warm_s else ""
    return Capacity(machine.count, machine.hourly_usd, f"{machine.instance_type}, {machine.price_source}{warm}", warm_s)


def request(plan: Plan, config: Config, job_id: str, attempt: int, bundle_sha256: str) -> Request:
    """Return the CreateTrainingJob request. Raises ConfigError where the config does not say enough for one."""
    return requests.build(plan, config, job_id, attempt, bundle_sha256)


def check(request: Request) -> list[Fault]:
    """Return what SageMaker would refuse."""
    return list(rules.faults(request.body))
