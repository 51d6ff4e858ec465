"""The SageMaker backend: jobs are training jobs, their lines are in CloudWatch, their files in S3.

A dry run imports only the modules that plan and render. jobs.py, which calls AWS, is imported on first use.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, Pace, Terms, lazy_modules, nodes_of
from cloudtrain.launcher.prices import catalog
from cloudtrain.launcher.text.units import format_duration

from .machine import block_of, choose, disk_gb, disk_usd, region_of, unknown_region
from .records import SageMakerRef, SageMakerSending

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from cloudtrain.launcher.backend import (
        Check,
        FoundAttempt,
        JobRef,
        LogPage,
        Request,
        ServedModel,
        ServingFiles,
        Shipment,
    )
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault
    from cloudtrain.launcher.job import State
    from cloudtrain.launcher.metering.rate import Quote
    from cloudtrain.launcher.plan import Plan
    from cloudtrain.launcher.rehearsal.stage import Rehearsal, Stage

    from . import (
        api,
        check,
        doctor,
        files,
        jobs,
        logs,
        outputs,
        prices,
        rehearsal,
        request,
        serving,
    )
    from .api import AwsAccess, AwsClients
else:  # each module is imported on its first use
    globals().update(lazy_modules(__package__))


# SageMaker bills from TrainingStartTime to TrainingEndTime. MaxRuntimeInSeconds limits the sum over all attempts that
# SageMaker makes (botocore's model of StoppingCondition and RetryStrategy, 2026-10; facts of 2026-10).
GRACE_S = 120  # between the signal at the limit and the kill, by the same source
UPLOAD_S = 180  # of the output folder after the kill, billed: 18 GB at 100 MB/s; an assumption, not a measurement
LEAD_S = 300  # image and data before our clock begins: 12 GB and 20 GB at 100 MB/s; an assumption, too
CALLS_PER_S = 5.0  # for reading logs: all followers share the account's quota, 25 in most regions
STATE_S = 5.0
LATE_S = 15.0  # from a job's end to its last line in CloudWatch, if a container could not report its end of log


class SageMakerBackend:
    """The backend of the name `sagemaker`; holds the clients of AWS's services."""

    @cached_property
    def clients(self) -> AwsClients:
        """The clients, each made on first use."""
        return api.AwsClients()

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the machine type's capacity, at its on-demand price: spot bills fewer seconds at the same rate."""
        request.require(config)
        machine = choose(config)
        warm_s, own = block_of(config).keep_alive or 0, block_of(config).price_per_hour
        # Machines kept warm are billed: ResourceRetainedBillableTimeInSeconds.
        terms = Terms(tail_s=GRACE_S + UPLOAD_S + warm_s, lead_s=LEAD_S, warns=True)
        name = machine.instance_type
        warm = f", with {format_duration(warm_s)} kept warm" if warm_s else ""
        spot = ", on demand: spot machines bill fewer seconds" if config.resources.spot else ""
        if own is not None or machine.hourly_usd is None:
            source = catalog.unpriced("sagemaker", name, region_of(block_of(config)) or "an unknown region")
            source = source if own is None else f"sagemaker.price_per_hour{spot}{warm}"
            usd, doubt = None if own is None else own / 1e6, unknown_region(config)
            return Capacity(machine.count, usd, source, terms, machine=name, unknown_region=doubt)
        size_gb = disk_gb(config)
        disk = disk_usd(name, size_gb)
        source = f"{name}, {machine.price_source}{f', with a disk of {size_gb} GB' if disk else ''}{spot}{warm}"
        usd, known = machine.hourly_usd + disk, (machine.uncertainty, machine.as_of)
        return Capacity(machine.count, usd, source, terms, *known, machine=name)

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        return request.build(plan, config, job_id, attempt, bundle_sha256)

    def check(self, request: Request) -> list[Fault]:
        """Return the faults for which SageMaker would refuse the request."""
        return list(check.faults(request.body))

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Raise ConfigError without the SDK, CredentialError if the SDK finds no credentials."""
        api.require_credentials(self._access(SageMakerSending.load(request.sending)))

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        return jobs.send(self.clients, request, shipment)

    def find(self, request: Request, home: Path) -> JobRef | None:
        return jobs.find(self.clients, request, home)

    def where_to_look(self, request: Request) -> str:
        """Return the aws command that shows the job."""
        region = SageMakerSending.load(request.sending).region
        return f"aws sagemaker describe-training-job --region {region} --training-job-name {request.name}"

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        return jobs.jobs(self.clients, config, home)

    def state(self, ref: JobRef) -> State:
        return jobs.state(self.clients, ref)

    def logs(
        self, ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
    ) -> LogPage:
        """Return the lines after the cursor."""
        handle = SageMakerRef.load(ref)
        access, only = self._access(handle), nodes_of(ranks, handle.nproc_per_node)
        found = logs.page(access, handle.name, handle.nodes, cursor, only)
        return found if ranks is None else found.only(ranks)

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: each poll costs one call for each host."""
        lines_s = max(1.0, SageMakerRef.load(ref).nodes / CALLS_PER_S)
        return Pace(lines_s, STATE_S, LATE_S, can_kill=False, retries=True, hold_back_s=logs.HOLD_S)

    def stop(self, ref: JobRef, *, now: bool) -> None:
        """Ask SageMaker to stop the job; SageMaker signals the containers, which save, and kills them after 120 s.

        `now` makes no difference there.
        """
        handle = SageMakerRef.load(ref)
        access = self._access(handle)
        with api.answers(f"stop {handle.name}"):
            try:
                api.client(access, "sagemaker").stop_training_job(TrainingJobName=handle.name)
            except Exception as error:
                described = jobs.describe(access, handle.name) if api.code_of(error) == "ValidationException" else None
                if described is None or described["TrainingJobStatus"] == "InProgress":
                    raise

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Download the archives of the job's output folder; return the files."""
        handle = SageMakerRef.load(ref)
        return outputs.download(self._access(handle), handle.output_uri, handle.name, folder)

    def checkpoints(self, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
        """Download the job's checkpoint folder, also while the job runs; return the files."""
        handle = SageMakerRef.load(ref)
        found = files.of(self._access(handle))
        return found.download(f"{handle.checkpoint_uri}/{inner}".rstrip("/"), folder, may_be_empty=True)

    def saved_shapes(self, ref: JobRef, *, averaged: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the job's saved weights, by the headers alone."""
        from cloudtrain.entrypoints.models import saved

        handle = SageMakerRef.load(ref)
        with api.answers("read the checkpoints"):
            return saved.shapes(files.of(self._access(handle)).open_at(handle.checkpoint_uri), averaged=averaged)

    def checkpoint_place(self, ref: JobRef) -> str | None:
        """Return the place of the checkpoint folder, for a later job."""
        return SageMakerRef.load(ref).checkpoint_uri

    def doctor(self, config: JobConfig | None) -> list[Check]:
        return doctor.checks(self.clients, config)

    def price_region(self, config: JobConfig | None) -> str | None:
        return prices.region(config)

    def quotes(self, config: JobConfig | None, region: str, types: tuple[str, ...]) -> list[Quote]:
        return prices.quotes(self.clients, config, region, types)

    def serving(self, model: ServedModel, config: JobConfig) -> ServingFiles:
        return serving.files(model, config)

    def rehearsal(self, request: Request, stage: Stage) -> Rehearsal:
        return rehearsal.rehearsal(request, stage)

    def _access(self, data: SageMakerRef | SageMakerSending) -> AwsAccess:
        return api.AwsAccess.of(data, self.clients)
