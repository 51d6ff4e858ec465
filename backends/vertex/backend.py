"""The Vertex AI backend: jobs are custom jobs, their lines are in Cloud Logging, their files in Cloud Storage.

A dry run imports only the modules that plan and render. A command imports the modules that call Google on first use.
"""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, Pace, Terms, lazy_modules, nodes_of
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.prices import catalog

from .records import VertexRef, VertexSending

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
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
        prices,
        prices_list,
        rehearsal,
        rehearsal_store,
        request,
        serving,
    )
    from .api import Google, VertexAccess
    from .logs import LogReader
else:  # each module is imported on its first use
    globals().update(lazy_modules(__package__))


TAIL_S = 60  # from scheduling.timeout until the replicas have gone; an assumption, because Google documents no figure
LEAD_S = 300  # for the image, before our clock begins, in case the timeout counts the pull: Google documents no rule
UNIT_S = 30  # training is billed in steps of 30 s: cloud.google.com/vertex-ai/pricing, 2026-10
# Vertex AI may restart a job up to three times; Google does not document whether the timeout spans the restarts. With
# an enforced budget the request switches restarts off (request.py); otherwise each start counts like the first.
STARTS = 4
STATE_S = 4.0
LATE_S = 30.0  # from a job's end until Cloud Logging has its last lines, if a container did not report its end of log


class VertexBackend:
    """The backend of the name `vertex`; holds the connections to Google and the feeds of lines."""

    def __init__(self) -> None:
        self._over: set[str] = set()  # jobs whose end this process has seen

    @cached_property
    def google(self) -> Google:
        """The connections."""
        return api.Google()

    @cached_property
    def log_reader(self) -> LogReader:
        """The readers' common feeds."""
        return logs.LogReader()

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the machine's capacity and the price of its provisioning: standard, spot, flex start, reserved."""
        from .machine import block_of, choose, disk_of, kind_of, location_of, unknown_region

        request.require(config)
        choice, block, kind = choose(config), block_of(config), kind_of(config)
        is_guarded = config.budget is not None and config.budget.on_limit != "alert"
        terms = Terms(TAIL_S, unit_s=UNIT_S, starts=1 if is_guarded else STARTS, lead_s=LEAD_S)
        own, offer = block.price_per_hour, prices.hourly(choice.machine, kind)
        if own is not None or offer.usd is None:
            where = location_of(block) or "an unknown region (vertex.location)"
            source = catalog.unpriced("vertex", choice.label, where)
            source = source if own is None else f"{choice.label}, vertex.price_per_hour"
            price, doubt = None if own is None else own / 1e6, unknown_region(config)
            return Capacity(choice.count, price, source, terms, machine=choice.label, unknown_region=doubt)
        disk_type, disk_gb = disk_of(config, choice)
        disk_usd = prices.disk_hourly(disk_type, disk_gb)
        without = f"without its disk: {disk_type} has no known price"
        disk = without if disk_usd is None else f"with a disk of {disk_gb} GB"
        usd, known, is_spot = offer.usd + (disk_usd or 0.0), (offer.uncertainty, offer.as_of), offer.kind == "spot"
        source = f"{offer.source}, {disk}"
        return Capacity(choice.count, usd, source, terms, *known, machine=choice.label, is_spot_price=is_spot)

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        return request.build(plan, config, job_id, attempt, bundle_sha256)

    def check(self, request: Request) -> list[Fault]:
        """Return the faults for which Vertex AI would refuse the request."""
        return list(check.faults(request.body, VertexSending.load(request.sending).location))

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Raise ConfigError if Google's libraries are missing, CredentialError if the libraries find no credentials."""
        with api.answers("start the job"):
            self.google.login(VertexSending.load(request.sending).project).credentials()
        if find_spec("google.cloud") is None or find_spec("google.cloud.aiplatform_v1") is None:
            raise api.not_installed(ImportError("No module named 'google.cloud.aiplatform_v1'"))

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        return jobs.send(self.google, request, shipment)

    def find(self, request: Request, home: Path) -> JobRef | None:
        return jobs.find(self.google, request, home)

    def where_to_look(self, request: Request) -> str:
        """Return the gcloud command that shows the job."""
        plan = VertexSending.load(request.sending)
        place = f"--project {plan.project} --region {plan.location}"
        return f"gcloud ai custom-jobs list {place} --filter labels.cloudtrain_run={request.name}"

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        return jobs.jobs(self.google, config, home)

    def state(self, ref: JobRef) -> State:
        """Return the job's state at Vertex AI; once the job is over, remove its secrets."""
        handle = VertexRef.load(ref)
        found, is_over = jobs.state(self.google, handle)
        if is_over:
            self._over.add(handle.name)
        return found

    def logs(
        self, ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
    ) -> LogPage:
        """Return the lines after the cursor."""
        from cloudtrain.launcher.store.home import home

        handle = VertexRef.load(ref)
        found = self.log_reader.page(
            self._access(handle),
            handle.job,
            handle.nodes,
            cursor,
            nodes_of(ranks, handle.nproc_per_node),
            home(),
            is_passing=now,
            is_over=handle.name in self._over,
        )
        return found if ranks is None else found.only(ranks)

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: most polls for lines make no call."""
        return Pace(lines_s=logs.PACE_S, state_s=STATE_S, late_s=LATE_S, can_kill=False, hold_back_s=logs.HOLD_BACK_S)

    def stop(self, ref: JobRef, *, now: bool) -> None:
        """Ask Vertex AI to cancel the job; Vertex AI signals the containers, which save. `now` makes no difference."""
        handle = VertexRef.load(ref)
        with api.answers(f"stop {handle.label}"):
            jobs.cancel(self._access(handle), handle.name)

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Download the job's output folder, also while the job runs; return the files."""
        handle = VertexRef.load(ref)
        with api.answers("download the outputs", needs=files.ROLE):
            return files.of(self._access(handle)).download(handle.output_uri, folder)

    def checkpoints(self, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
        """Download the job's checkpoint folder, also while the job runs; return the files."""
        handle = VertexRef.load(ref)
        if handle.checkpoint_uri is None:
            raise ConfigError(
                "the job's checkpoints are not in Cloud Storage", hint="copy them with their store's own tools"
            )
        with api.answers("download the checkpoints", needs=files.ROLE):
            uri = f"{handle.checkpoint_uri}/{inner}".rstrip("/")
            return files.of(self._access(handle)).download(uri, folder)

    def saved_shapes(self, ref: JobRef, *, averaged: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the job's saved weights, by the headers alone."""
        from cloudtrain.entrypoints.models import saved

        handle = VertexRef.load(ref)
        with api.answers("read the checkpoints", needs=files.ROLE):
            return saved.shapes(files.of(self._access(handle)).open_at(str(handle.checkpoint_uri)), averaged=averaged)

    def checkpoint_place(self, ref: JobRef) -> str | None:
        """Return the place of the checkpoint folder, for a later job."""
        return VertexRef.load(ref).checkpoint_uri

    def doctor(self, config: JobConfig | None) -> list[Check]:
        return doctor.checks(self.google, config)

    def price_region(self, config: JobConfig | None) -> str | None:
        return prices_list.region(config)

    def quotes(self, config: JobConfig | None, region: str, types: tuple[str, ...]) -> list[Quote]:
        return prices_list.quotes(self.google, config, region, types)

    def serving(self, model: ServedModel, config: JobConfig) -> ServingFiles:
        return serving.files(model, config)

    def rehearsal(self, request: Request, stage: Stage) -> Rehearsal:
        return rehearsal.rehearsal(request, stage)

    def rehearsal_service(self, kept: Path) -> AbstractContextManager[str]:
        return rehearsal_store.serving(kept)

    def _access(self, handle: VertexRef) -> VertexAccess:
        return api.VertexAccess.of(handle, self.google)
