"""The Vertex AI backend: jobs are custom jobs, their lines are in Cloud Logging, their files in Cloud Storage.

A dry run imports only the modules that plan and render. A command imports the modules that call Google on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.backends.vertex.records import VertexSending
from cloudtrain.launcher import lazily
from cloudtrain.launcher.backend import Capacity, Request, Terms
from cloudtrain.launcher.prices import catalog

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault

_JOBS = "cloudtrain.backends.vertex.jobs"
_require = lazily.of("cloudtrain.backends.vertex.request", "require")

TAIL_S = 60  # from scheduling.timeout until the replicas have gone; an assumption, because Google documents no figure
LEAD_S = 300  # for the image, before our clock begins, in case the timeout counts the pull: Google documents no rule
UNIT_S = 30  # training is billed in steps of 30 s: cloud.google.com/vertex-ai/pricing, 2026-10
# Vertex AI may restart a job up to three times; Google does not document whether the timeout spans the restarts. With
# an enforced budget the request switches restarts off (request.py); otherwise each start counts like the first.
STARTS = 4

request = lazily.of("cloudtrain.backends.vertex.request", "build")
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
doctor = lazily.of("cloudtrain.backends.vertex.doctor", "checks")
quotes = lazily.of("cloudtrain.backends.vertex.prices_quotes", "quotes")
price_region = lazily.of("cloudtrain.backends.vertex.prices_quotes", "region")


def capacity(config: JobConfig) -> Capacity:
    """Return the machine's capacity, with the price of its provisioning kind: standard, spot, flex start, reserved."""
    _require(config)
    from cloudtrain.backends.vertex import prices
    from cloudtrain.backends.vertex.machine import block_of, choose, disk_of, kind_of, location_of, unknown_region

    choice, block, kind = choose(config), block_of(config), kind_of(config)
    is_guarded = config.budget is not None and config.budget.on_limit != "alert"
    terms = Terms(TAIL_S, unit_s=UNIT_S, starts=1 if is_guarded else STARTS, lead_s=LEAD_S)
    if block.price_per_hour is not None:
        source = f"{choice.label}, vertex.price_per_hour"
        return Capacity(choice.count, block.price_per_hour / 1e6, source, terms, machine=choice.label)
    offer = prices.hourly(choice.machine, kind)
    if offer.usd is None:
        where = location_of(block) or "an unknown region (vertex.location)"
        source = catalog.unpriced("vertex", choice.label, where)
        return Capacity(choice.count, None, source, terms, machine=choice.label, unknown_region=unknown_region(config))
    disk_type, disk_gb = disk_of(config, choice)
    disk_usd = prices.disk_hourly(disk_type, disk_gb)
    disk = (
        f"with a disk of {disk_gb} GB" if disk_usd is not None else f"without its disk: {disk_type} has no known price"
    )
    usd, known, is_spot = offer.usd + (disk_usd or 0.0), (offer.uncertainty, offer.as_of), offer.kind == "spot"
    source = f"{offer.source}, {disk}"
    return Capacity(choice.count, usd, source, terms, *known, machine=choice.label, is_spot_price=is_spot)


def check(request: Request) -> list[Fault]:
    """Return the faults for which Vertex AI would refuse the request."""
    from cloudtrain.backends.vertex import check as rules

    return list(rules.faults(request.body, VertexSending.load(request.sending).location))


rehearsal = lazily.of("cloudtrain.backends.vertex.rehearsal", "rehearsal")
rehearsal_service = lazily.of("cloudtrain.backends.vertex.rehearsal_store", "serving")


def where_to_look(request: Request) -> str:
    """Return the gcloud command that shows the job."""
    plan = VertexSending.load(request.sending)
    place = f"--project {plan.project} --region {plan.location}"
    return f"gcloud ai custom-jobs list {place} --filter labels.cloudtrain_run={request.name}"
