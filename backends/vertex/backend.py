"""The Vertex AI backend: jobs are custom jobs, their lines are in Cloud Logging, their files in Cloud Storage.

A dry run imports only the modules that plan and render. A command imports the modules that call Google on first use.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, JobRef, Pace, Priced, Request, Shipment, Terms
from cloudtrain.launcher.prices import catalog

from ..adapter import handed
from ..cloud import CloudAdapter
from .records import VertexRef, VertexSending

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault

TAIL_S = 60  # from scheduling.timeout until the replicas have gone; an assumption, because Google documents no figure
LEAD_S = 300  # for the image, before our clock begins, in case the timeout counts the pull: Google documents no rule
UNIT_S = 30  # training is billed in steps of 30 s: cloud.google.com/vertex-ai/pricing, 2026-10
# Vertex AI may restart a job up to three times; Google does not document whether the timeout spans the restarts. With
# an enforced budget the request switches restarts off (request.py); otherwise each start counts like the first.
STARTS = 4
STATE_S = 4.0
LATE_S = 30.0  # from a job's end until Cloud Logging has its last lines, if a container did not report its end of log


class VertexBackend(CloudAdapter):
    """The backend of the name `vertex`; holds the connections to Google and the feeds of lines."""

    FOLDER, CONNECTIONS, REF = __package__, ("logs", "LogReader"), VertexRef
    NO_CHECKPOINTS = ("the job's checkpoints are not in Cloud Storage", "copy them with their store's own tools")
    quotes = handed(Priced.quotes, "prices_list")

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the machine's capacity and the price of its provisioning: standard, spot, flex start, reserved."""
        from . import prices, request
        from .machine import block_of, choose, disk_of, kind_of, region_of, unknown_region

        request.require(config)
        choice, block, kind = choose(config), block_of(config), kind_of(config)
        is_guarded = config.budget is not None and config.budget.on_limit != "alert"
        terms = Terms(TAIL_S, unit_s=UNIT_S, starts=1 if is_guarded else STARTS, lead_s=LEAD_S)
        own, offer = block.price_per_hour, prices.hourly(choice.machine, kind)
        if own is not None or offer.usd is None:
            where = region_of(block) or "an unknown region (vertex.location)"
            usd, source = catalog.unlisted("vertex", own, f"{choice.label}, vertex.price_per_hour", choice.label, where)
            doubt = unknown_region(config)
            return Capacity(choice.count, usd, source, terms, machine=choice.label, unknown_region=doubt)
        disk_type, disk_gb = disk_of(config, choice)
        disk_usd = prices.disk_hourly(disk_type, disk_gb)
        without = f"without its disk: {disk_type} has no known price"
        disk = without if disk_usd is None else f"with a disk of {disk_gb} GB"
        usd, known, is_spot = offer.usd + (disk_usd or 0.0), (offer.uncertainty, offer.as_of), offer.kind == "spot"
        source = f"{offer.source}, {disk}"
        return Capacity(choice.count, usd, source, terms, *known, machine=choice.label, is_spot_price=is_spot)

    def check(self, request: Request) -> list[Fault]:
        """Return the faults for which Vertex AI would refuse the request."""
        from . import check

        return list(check.faults(request.body, VertexSending.load(request.sending).location))

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Raise ConfigError if Google's libraries are missing, CredentialError if the libraries find no credentials."""
        from . import api

        with api.answers("start the job"):
            self.connections.login(VertexSending.load(request.sending).project).credentials()
        if find_spec("google.cloud") is None or find_spec("google.cloud.aiplatform_v1") is None:
            raise api.not_installed(ImportError("No module named 'google.cloud.aiplatform_v1'"))

    def where_to_look(self, request: Request) -> str:
        """Return the gcloud command that shows the job."""
        plan = VertexSending.load(request.sending)
        place = f"--project {plan.project} --region {plan.location}"
        return f"gcloud ai custom-jobs list {place} --filter labels.cloudtrain_run={request.name}"

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: most polls for lines make no call."""
        from . import logs

        return Pace(lines_s=logs.PACE_S, state_s=STATE_S, late_s=LATE_S, can_kill=False, hold_back_s=logs.HOLD_BACK_S)

    def rehearsal_service(self, kept: Path) -> AbstractContextManager[str]:
        from . import rehearsal

        return rehearsal.serving(kept)
