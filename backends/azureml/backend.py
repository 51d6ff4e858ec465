"""The Azure ML backend: jobs are command jobs, their lines are in the run's log files, their files in blob storage.

A dry run imports only the modules that plan and render. A command imports the modules that call Azure on first use.
"""

from __future__ import annotations

import time
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, Pace, Terms, lazy_modules, nodes_of
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.prices import catalog

from .records import AzureMLRef, AzureMLSending

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
        prices,
        rehearsal,
        request,
        serving,
        status_history,
    )
    from .api import Azure, AzureAccess
    from .records import Workspace
    from .status_history import Details, RunHistory
else:  # each module is imported on its first use
    globals().update(lazy_modules(__package__))

CANCEL_S = 60  # from the end of limits.timeout until the containers have gone; an assumption: Azure documents no figure
LEAD_S = 300  # for image and mounts before our clock begins, if limits.timeout counts them: Azure documents no rule
LEAST_S = 60  # the service turns less into 60 days: azure-ai-ml 1.35, entities/_job/job_limits.py, bug 1335978
STATE_S = 4.0
LATE_S = 15.0  # from a run's end to the last line in its files, if a container could not report its end of log
RUN_PAUSE_S, WAIT_PAUSE_S = 4.0, 10.0  # the longest pause between two polls for lines
BUSY_S = 10.0  # seconds of silence for each second of pause
MINIMUM_BILL_S = 60  # a virtual machine's first minute, as a bound: bills go by the second


class AzureMLBackend:
    """The backend of the name `azureml`; holds the connections to Azure and the runs' newest answers."""

    def __init__(self) -> None:
        self._last_line_s: dict[str, float] = {}  # by job

    @cached_property
    def azure(self) -> Azure:
        """The connections."""
        return api.Azure()

    @cached_property
    def history(self) -> RunHistory:
        """The runs' newest answers."""
        return status_history.RunHistory(self.azure)

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the machine type's capacity, at its on-demand price: our table has no prices of spot machines."""
        from cloudtrain.launcher.text.units import format_duration

        from .machine import block_of, choose, idle_s_of, unknown_region

        request.require(config)
        machine, block = choose(config), block_of(config)
        idle_s = idle_s_of(block)
        terms = Terms(CANCEL_S + idle_s, LEAST_S, minimum_bill_s=MINIMUM_BILL_S, lead_s=LEAD_S)
        more = f", with {format_duration(idle_s)} in which the cluster idles" if idle_s else ""
        more += ", on demand: spot machines cost less" if config.resources.spot else ""
        name = machine.instance_type or str(block.compute)
        own = block.price_per_hour
        if own is not None or machine.hourly_usd is None:
            what = machine.instance_type or f"the machines of {block.compute}"
            source = catalog.unpriced("azureml", what, block.region or "an unknown region (azureml.region)")
            source = source if own is None else f"{name}, azureml.price_per_hour{more}"
            usd, doubt = None if own is None else own / 1e6, unknown_region(config)
            return Capacity(machine.count, usd, source, terms, machine=name, unknown_region=doubt)
        source, known = f"{name}, {machine.price_source}{more}", (machine.uncertainty, machine.as_of)
        return Capacity(machine.count, machine.hourly_usd, source, terms, *known, machine=name)

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        return request.build(plan, config, job_id, attempt, bundle_sha256)

    def check(self, request: Request) -> list[Fault]:
        """Return the faults for which Azure ML would refuse the request."""
        return list(check.faults(request.body))

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Raise ConfigError without the SDK, CredentialError without credentials, UnreachableError without a login."""
        if find_spec("azure") is None or find_spec("azure.ai") is None or find_spec("azure.ai.ml") is None:
            raise api.not_installed(ImportError("No module named 'azure.ai.ml'"))
        access = self._access(AzureMLSending.load(request.sending).workspace)
        with api.answers("start the job"):
            self.azure.token(access.workspace.cloud, access.control_plane)

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        return jobs.send(self.azure, request, shipment)

    def find(self, request: Request, home: Path) -> JobRef | None:
        return jobs.find(self.azure, request, home)

    def where_to_look(self, request: Request) -> str:
        """Return the az command that shows the job."""
        place = AzureMLSending.load(request.sending).workspace
        return f"az ml job show -n {request.name} -w {place.name} -g {place.resource_group}"

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        return jobs.jobs(self.azure, config, home)

    def state(self, ref: JobRef) -> State:
        return jobs.state(self.azure, self.history, ref)

    def logs(
        self, ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
    ) -> LogPage:
        """Return the lines after the cursor."""
        handle = AzureMLRef.load(ref)
        root = jobs.root_of(self._access(handle.workspace), ref, handle)

        def ask(fresh_s: float) -> Details:
            return self.history.details(handle.workspace, root, handle.name, fresh_s=fresh_s)

        found = logs.page(self.azure, ask, handle.nodes, cursor, nodes_of(ranks, handle.nproc_per_node))
        if found.lines:
            self._last_line_s[handle.name] = time.monotonic()
        return found if ranks is None else found.only(ranks)

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: for lines 1 s while lines arrive, then longer and longer pauses.

        The pause stays short for a run that may fail at any moment; a run that waits for machines gets a longer pause.
        """
        name, now_s = AzureMLRef.load(ref).name, time.monotonic()
        answer, quiet_s = self.history.known(name), now_s - self._last_line_s.setdefault(name, now_s)
        is_waiting = answer is not None and answer.status in (*status_history.WAITING, "Preparing")
        lines_s = min(WAIT_PAUSE_S if is_waiting else RUN_PAUSE_S, max(1.0, quiet_s / BUSY_S))
        return Pace(lines_s=lines_s, state_s=STATE_S, late_s=LATE_S, can_kill=False, hold_back_s=logs.HOLD_BACK_S)

    def stop(self, ref: JobRef, *, now: bool) -> None:
        """Ask Azure to cancel the job; Azure signals the containers, which save, and kills them later.

        `now` makes no difference there.
        """
        handle = AzureMLRef.load(ref)
        access = self._access(handle.workspace)
        with api.answers(f"stop {handle.name}"):
            try:
                api.arm(access, "POST", f"/jobs/{handle.name}/cancel", version=jobs.JOB_VERSION)
            except api.AzureError as error:
                there = jobs.describe(access, handle.name) if error.status in (400, 409) else None
                if there is None or there["properties"].get("status") not in status_history.OVER:
                    raise

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Download the job's output folder, also while the job runs; return the files."""
        handle = AzureMLRef.load(ref)
        return files.download(self._access(handle.workspace), handle.output_uri, folder)

    def checkpoints(self, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
        """Download the job's checkpoint folder, also while the job runs; return the files."""
        handle = AzureMLRef.load(ref)
        if handle.checkpoint_uri is None:
            raise ConfigError(
                "the job has no checkpoint folder in the datastore", hint="`cloudtrain artifacts` has its files"
            )
        uri = f"{handle.checkpoint_uri}/{inner}".rstrip("/")
        return files.download(self._access(handle.workspace), uri, folder)

    def saved_shapes(self, ref: JobRef, *, averaged: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the job's saved weights, by the headers alone."""
        handle = AzureMLRef.load(ref)
        return files.saved_shapes(self._access(handle.workspace), str(handle.checkpoint_uri), averaged=averaged)

    def checkpoint_place(self, ref: JobRef) -> str | None:
        """Return the place of the checkpoint folder, for a later job."""
        return AzureMLRef.load(ref).checkpoint_uri

    def doctor(self, config: JobConfig | None) -> list[Check]:
        return doctor.checks(self.azure, config)

    def price_region(self, config: JobConfig | None) -> str | None:
        return prices.region(config)

    def quotes(self, config: JobConfig | None, region: str, types: tuple[str, ...]) -> list[Quote]:
        return prices.quotes(self.azure, config, region, types)

    def serving(self, model: ServedModel, config: JobConfig) -> ServingFiles:
        return serving.files(model, config)

    def rehearsal(self, request: Request, stage: Stage) -> Rehearsal:
        return rehearsal.rehearsal(request, stage)

    def _access(self, workspace: Workspace) -> AzureAccess:
        return api.AzureAccess(workspace, self.azure)
