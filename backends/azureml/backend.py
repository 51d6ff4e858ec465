"""The Azure ML backend: jobs are command jobs, their lines are in the run's log files, their files in blob storage.

A dry run imports only the modules that plan and render. A command imports the modules that call Azure on first use.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, JobRef, Pace, Request, Shipment, Terms
from cloudtrain.launcher.prices import catalog

from ..cloud import CloudAdapter
from .records import AzureMLRef, AzureMLSending

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

CANCEL_S = 60  # from the end of limits.timeout until the containers have gone; an assumption: Azure documents no figure
LEAD_S = 300  # for image and mounts before our clock begins, if limits.timeout counts them: Azure documents no rule
LEAST_S = 60  # the service turns less into 60 days: azure-ai-ml 1.35, entities/_job/job_limits.py, bug 1335978
STATE_S = 4.0
LATE_S = 15.0  # from a run's end to the last line in its files, if a container could not report its end of log
RUN_PAUSE_S, WAIT_PAUSE_S = 4.0, 10.0  # the longest pause between two polls for lines
BUSY_S = 10.0  # seconds of silence for each second of pause
MINIMUM_BILL_S = 60  # a virtual machine's first minute, as a bound: bills go by the second


class AzureMLBackend(CloudAdapter):
    """The backend of the name `azureml`; holds the connections to Azure and the runs' newest answers."""

    FOLDER, CONNECTIONS, REF = __package__, ("status", "RunHistory"), AzureMLRef
    NO_CHECKPOINTS = ("the job has no checkpoint folder in the datastore", "`cloudtrain artifacts` has its files")

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the machine type's capacity, at its on-demand price: our table has no prices of spot machines."""
        from cloudtrain.launcher.text.units import format_duration

        from . import request
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
            where = block.region or "an unknown region (azureml.region)"
            usd, source = catalog.unlisted("azureml", own, f"{name}, azureml.price_per_hour{more}", what, where)
            return Capacity(machine.count, usd, source, terms, machine=name, unknown_region=unknown_region(config))
        source, known = f"{name}, {machine.price_source}{more}", (machine.uncertainty_of(), machine.iso_day())
        return Capacity(machine.count, machine.hourly_usd, source, terms, *known, machine=name)

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Raise ConfigError without the SDK, CredentialError without credentials, UnreachableError without a login."""
        from . import api

        if find_spec("azure") is None or find_spec("azure.ai") is None or find_spec("azure.ai.ml") is None:
            raise api.not_installed(ImportError("No module named 'azure.ai.ml'"))
        access = api.AzureAccess(AzureMLSending.load(request.sending).workspace, self.connections)
        with api.answers("start the job"):
            self.connections.token(access.workspace.cloud, access.control_plane)

    def where_to_look(self, request: Request) -> str:
        """Return the az command that shows the job."""
        place = AzureMLSending.load(request.sending).workspace
        return f"az ml job show -n {request.name} -w {place.name} -g {place.resource_group}"

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: for lines 1 s while lines arrive, then longer and longer pauses.

        The pause stays short for a run that may fail at any moment; a run that waits for machines gets a longer pause.
        """
        from . import logs, status

        name = AzureMLRef.load(ref).name
        answer, quiet_s = self.connections.known.get(name), self.connections.quiet_s(name)
        is_waiting = answer is not None and answer.status in (*status.WAITING, "Preparing")
        lines_s = min(WAIT_PAUSE_S if is_waiting else RUN_PAUSE_S, max(1.0, quiet_s / BUSY_S))
        return Pace(lines_s=lines_s, state_s=STATE_S, late_s=LATE_S, can_kill=False, hold_back_s=logs.HOLD_BACK_S)
