"""The SageMaker backend: jobs are training jobs, their lines are in CloudWatch, their files in S3.

A dry run imports only the modules that plan and render. jobs.py, which calls AWS, is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, JobRef, ListsTypes, Pace, Request, Shipment, Terms
from cloudtrain.launcher.prices import catalog
from cloudtrain.launcher.text.units import format_duration

from ..adapter import handed
from ..cloud import CloudAdapter
from .machine import DISK_GB, block_of, choices, choose, disk_usd, region_of, unknown_region
from .records import SageMakerRef, SageMakerSending

if TYPE_CHECKING:
    from pathlib import Path

    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault

# SageMaker bills from TrainingStartTime to TrainingEndTime. MaxRuntimeInSeconds limits the sum over all attempts that
# SageMaker makes (botocore's model of StoppingCondition and RetryStrategy, 2026-10; facts of 2026-10).
GRACE_S = 120  # between the signal at the limit and the kill, by the same source
UPLOAD_S = 180  # of the output folder after the kill, billed: 18 GB at 100 MB/s; an assumption, not a measurement
LEAD_S = 300  # image and data before our clock begins: 12 GB and 20 GB at 100 MB/s; an assumption, too
CALLS_PER_S = 5.0  # for reading logs: all followers share the account's quota, 25 in most regions
STATE_S = 5.0
LATE_S = 15.0  # from a job's end to its last line in CloudWatch, if a container could not report its end of log


class SageMakerBackend(CloudAdapter):
    """The backend of the name `sagemaker`; holds the clients of AWS's services."""

    FOLDER, CONNECTIONS = __package__, ("api", "AwsClients")
    REF, MAY_BE_EMPTY = SageMakerRef, True
    types_at_once = handed(ListsTypes.types_at_once, "machine", is_pure=True)
    short_quota = handed(ListsTypes.short_quota, "doctor")

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the machine type's capacity, at its on-demand price: spot bills fewer seconds at the same rate."""
        from . import request

        request.require(config)
        machine, machines = choose(config), choices(config)
        warm_s, own = block_of(config).keep_alive or 0, block_of(config).price_per_hour
        # Machines kept warm are billed: ResourceRetainedBillableTimeInSeconds.
        terms = Terms(tail_s=GRACE_S + UPLOAD_S + warm_s, lead_s=LEAD_S, warns=True)
        name, names = machine.instance_type, ", ".join(each.instance_type for each in machines)
        dearest = "the dearest type of the list: " if len(machines) > 1 else ""
        warm = f", with {format_duration(warm_s)} kept warm" if warm_s else ""
        spot = ", on demand: spot machines bill fewer seconds" if config.resources.spot else ""
        if own is not None or machine.hourly_usd is None:
            where = region_of(block_of(config)) or "an unknown region"
            usd, source = catalog.unlisted("sagemaker", own, f"sagemaker.price_per_hour{spot}{warm}", name, where)
            return Capacity(machine.count, usd, source, terms, machine=names, unknown_region=unknown_region(config))
        size_gb = config.resources.disk_gb or DISK_GB
        disk = disk_usd(name, size_gb)
        with_disk = f", with a disk of {size_gb} GB" if disk else ""
        source = f"{dearest}{name}, {machine.price_source}{with_disk}{spot}{warm}"
        usd, most = machine.hourly_usd + disk, max(each.uncertainty_of() for each in machines)
        return Capacity(machine.count, usd, source, terms, most, machine.iso_day(), machine=names)

    def check(self, request: Request) -> list[Fault]:
        """Return the faults for which SageMaker would refuse the request."""
        from . import check

        region = SageMakerSending.load(request.sending).region
        return list(check.faults(request.body, region))

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Raise ConfigError without the SDK, CredentialError if the SDK finds no credentials."""
        from . import api

        api.require_credentials(api.AwsAccess.of(SageMakerSending.load(request.sending), self.connections))

    def where_to_look(self, request: Request) -> str:
        """Return the aws command that shows the job."""
        region = SageMakerSending.load(request.sending).region
        return f"aws sagemaker describe-training-job --region {region} --training-job-name {request.name}"

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: each poll costs one call for each host."""
        from . import logs

        lines_s = max(1.0, SageMakerRef.load(ref).nodes / CALLS_PER_S)
        return Pace(lines_s, STATE_S, LATE_S, can_kill=False, retries=True, hold_back_s=logs.HOLD_S)

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Download the archives of the job's output folder; return the files."""
        from . import files

        return files.unpacked(self.connections, SageMakerRef.load(ref), folder)
