"""The Azure ML backend: jobs are command jobs, their lines are in the run's log files, their files in blob storage.

A dry run imports only the modules that plan and render. A command imports the modules that call Azure on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.backends.azureml.records import AzureMLSending
from cloudtrain.launcher import lazily
from cloudtrain.launcher.backend import Capacity, Request, Terms
from cloudtrain.launcher.prices import catalog

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault

_JOBS = "cloudtrain.backends.azureml.jobs"
_require = lazily.of("cloudtrain.backends.azureml.request", "require")
CANCEL_S = 60  # from the end of limits.timeout until the containers have gone; an assumption: Azure documents no figure
LEAD_S = 300  # for image and mounts before our clock begins, if limits.timeout counts them: Azure documents no rule
LEAST_S = 60  # the service turns less into 60 days: azure-ai-ml 1.35, entities/_job/job_limits.py, bug 1335978
MINIMUM_BILL_S = 60  # a virtual machine's first minute, as a bound: bills go by the second


def capacity(config: JobConfig) -> Capacity:
    """Return the machine type's capacity, at its on-demand price: our table has no prices of spot machines."""
    _require(config)
    from cloudtrain.backends.azureml.machine import block_of, choose, idle_s_of, unknown_region
    from cloudtrain.launcher.text.units import format_duration

    machine, block = choose(config), block_of(config)
    idle_s = idle_s_of(block)
    terms = Terms(CANCEL_S + idle_s, LEAST_S, minimum_bill_s=MINIMUM_BILL_S, lead_s=LEAD_S)
    more = f", with {format_duration(idle_s)} in which the cluster idles" if idle_s else ""
    more += ", on demand: spot machines cost less" if config.resources.spot else ""
    name = machine.instance_type or str(block.compute)
    if block.price_per_hour is not None:
        source = f"{name}, azureml.price_per_hour{more}"
        return Capacity(machine.count, block.price_per_hour / 1e6, source, terms, machine=name)
    if machine.hourly_usd is None:
        what = machine.instance_type or f"the machines of {block.compute}"
        where = block.region or "an unknown region (azureml.region)"
        source = catalog.unpriced("azureml", what, where)
        return Capacity(machine.count, None, source, terms, machine=name, unknown_region=unknown_region(config))
    source = f"{name}, {machine.price_source}{more}"
    return Capacity(machine.count, machine.hourly_usd, source, terms, machine.uncertainty, machine.as_of, machine=name)


def check(request: Request) -> list[Fault]:
    """Return the faults for which Azure ML would refuse the request."""
    from cloudtrain.backends.azureml import check as rules

    return list(rules.faults(request.body))


request = lazily.of("cloudtrain.backends.azureml.request", "build")
ready = lazily.of(_JOBS, "ready")
send = lazily.of(_JOBS, "send")
find = lazily.of(_JOBS, "find")
jobs = lazily.of(_JOBS, "jobs")
state = lazily.of(_JOBS, "state")
logs = lazily.of(_JOBS, "logs")
pace = lazily.of(_JOBS, "pace")
stop = lazily.of(_JOBS, "stop")
artifacts = lazily.of(_JOBS, "artifacts")
checkpoints = lazily.of(_JOBS, "checkpoints")
doctor = lazily.of("cloudtrain.backends.azureml.doctor", "checks")
quotes = lazily.of("cloudtrain.backends.azureml.prices", "quotes")
price_region = lazily.of("cloudtrain.backends.azureml.prices", "region")
rehearsal = lazily.of("cloudtrain.backends.azureml.rehearsal", "rehearsal")


def where_to_look(request: Request) -> str:
    """Return the az command that shows the job."""
    place = AzureMLSending.load(request.sending).workspace
    return f"az ml job show -n {request.name} -w {place.name} -g {place.resource_group}"
