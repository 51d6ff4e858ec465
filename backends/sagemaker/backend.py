"""The SageMaker backend: jobs are training jobs, their lines are in CloudWatch, their files in S3.

A dry run imports only the modules that plan and render. jobs.py, which calls AWS, is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.backends.sagemaker import check as rules
from cloudtrain.backends.sagemaker.machine import block_of, choose, disk_gb, disk_usd, region_of, unknown_region
from cloudtrain.backends.sagemaker.records import SageMakerSending
from cloudtrain.launcher import lazily
from cloudtrain.launcher.backend import Capacity, Request, Terms
from cloudtrain.launcher.prices import catalog
from cloudtrain.launcher.text.units import format_duration

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault

_JOBS = "cloudtrain.backends.sagemaker.jobs"
_require = lazily.of("cloudtrain.backends.sagemaker.request", "require")

# SageMaker bills from TrainingStartTime to TrainingEndTime. MaxRuntimeInSeconds limits the sum over all attempts that
# SageMaker makes (botocore's model of StoppingCondition and RetryStrategy, 2026-10; facts of 2026-10).
GRACE_S = 120  # between the signal at the limit and the kill, by the same source
UPLOAD_S = 180  # of the output folder after the kill, billed: 18 GB at 100 MB/s; an assumption, not a measurement
LEAD_S = 300  # image and data before our clock begins: 12 GB and 20 GB at 100 MB/s; an assumption, too


def capacity(config: JobConfig) -> Capacity:
    """Return the machine type's capacity, at its on-demand price: spot bills fewer seconds at the same rate."""
    _require(config)
    machine = choose(config)
    warm_s, own = block_of(config).keep_alive or 0, block_of(config).price_per_hour
    # Machines kept warm are billed: ResourceRetainedBillableTimeInSeconds.
    terms = Terms(tail_s=GRACE_S + UPLOAD_S + warm_s, lead_s=LEAD_S, warns=True)
    name = machine.instance_type
    warm = f", with {format_duration(warm_s)} kept warm" if warm_s else ""
    spot = ", on demand: spot machines bill fewer seconds" if config.resources.spot else ""
    if own is not None:
        return Capacity(machine.count, own / 1e6, f"sagemaker.price_per_hour{spot}{warm}", terms, machine=name)
    if machine.hourly_usd is None:
        region = region_of(block_of(config)) or "an unknown region"
        source = catalog.unpriced("sagemaker", name, region)
        return Capacity(machine.count, None, source, terms, machine=name, unknown_region=unknown_region(config))
    size_gb = disk_gb(config)
    disk = disk_usd(name, size_gb)
    source = f"{name}, {machine.price_source}{f', with a disk of {size_gb} GB' if disk else ''}{spot}{warm}"
    usd, known = machine.hourly_usd + disk, (machine.uncertainty, machine.as_of)
    return Capacity(machine.count, usd, source, terms, *known, machine=name)


def check(request: Request) -> list[Fault]:
    """Return the faults for which SageMaker would refuse the request."""
    return list(rules.faults(request.body))


request = lazily.of("cloudtrain.backends.sagemaker.request", "build")
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
doctor = lazily.of("cloudtrain.backends.sagemaker.doctor", "checks")
quotes = lazily.of("cloudtrain.backends.sagemaker.prices", "quotes")
invoice = lazily.of("cloudtrain.backends.sagemaker.prices_invoice", "invoice")
price_region = lazily.of("cloudtrain.backends.sagemaker.prices", "region")
rehearsal = lazily.of("cloudtrain.backends.sagemaker.rehearsal", "rehearsal")


def where_to_look(request: Request) -> str:
    """Return the aws command that shows the job."""
    region = SageMakerSending.load(request.sending).region
    return f"aws sagemaker describe-training-job --region {region} --training-job-name {request.name}"
