"""The Azure ML backend: jobs are command jobs, their lines are in the run's log files, their files in blob storage.

What plans and renders is imported by a dry run, what talks to Azure by the commands that do, each on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.launcher import lazily
from cloudtrain.launcher.backend import Capacity, Request

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import Config
    from cloudtrain.launcher.errors import Fault

__all__ = ["artifacts", "capacity", "check", "doctor", "find", "logs", "pace", "request", "send", "state", "stop"]

_JOBS = "cloudtrain.backends.azureml.jobs"
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


def check(request: Request) -> list[Fault]:
    """Return what Azure ML would refuse."""
    from cloudtrain.backends.azureml import check as rules

    return list(rules.faults(request.body))


request = lazily.of("cloudtrain.backends.azureml.request", "build")
send = lazily.of(_JOBS, "send")
find = lazily.of(_JOBS, "find")
state = lazily.of(_JOBS, "state")
logs = lazily.of(_JOBS, "logs")
pace = lazily.of(_JOBS, "pace")
stop = lazily.of(_JOBS, "stop")
artifacts = lazily.of(_JOBS, "artifacts")
doctor = lazily.of("cloudtrain.backends.azureml.doctor", "checks")
