"""Jobs whose laptop is off: what they cost against their budget, and how much of what they paid for is kept.

The caps are those of launcher/metering/limit.py with each backend's own terms, the moment of the last save is by the
trainer's own rule (entrypoints/rank/agree.py). All else is drawn, and assumed: see ASSUMED. So "never over" says that
the arithmetic holds from price to cap over all of it; it is no measurement of a cloud.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field

from report import Report

from cloudtrain.entrypoints.rank.agree import margin_s
from cloudtrain.entrypoints.terms import CostRate, Terms, worst_case_micro
from cloudtrain.launcher.metering import limit as caps
from cloudtrain.launcher.metering.limit import Cap
from cloudtrain.launcher.prices import catalog

JOBS = 20_000
SCATTER = 0.3  # sigma of a save's, an upload's and a step's lognormal time about its median
SAVE_EVERY_S = 600.0  # checkpoint.every's default
# Terms as in backends/*/backend.py without warm machines; the grace between the platform's signal and its kill.
PLATFORMS = {
    "sagemaker": (Terms(300, lead_s=300, warns=True), 110.0),
    "azureml": (Terms(60, 60, minimum_bill_s=60, lead_s=300), 25.0),
    "vertex": (Terms(60, unit_s=30, lead_s=300), 25.0),
    "ssh": (Terms(20), 0.0),
}
ASSUMED = (
    f"assumed: saves of 1 to 60 s and steps of 0.05 to 20 s, each scattered by sigma {SCATTER}; a save every 10",
    "  minutes; on Vertex AI half of the jobs upload each save, for as long again; of a cloud's limit 110 s (median,",
    "  20 to 600) are gone before the job's clock begins, and 40 s (median, 5 to 400) are billed after its end; a",
    "  fifth of the jobs is interrupted once, and resumed with the money left; prices lie between the list's and as",
    "  much more as counted; budgets are 1 to 50 times the smallest useful one, so jobs are of minutes to half a day",
)


@dataclass
class Sums:
    """What the jobs came to; times in seconds of all their nodes."""

    jobs: int = 0
    over: int = 0
    over_beyond_tail: int = 0
    lost_work: int = 0
    paid_s: float = 0.0
    lost_s: float = 0.0
    kept_s: float = 0.0
    shares: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One attempt: the seconds billed, those lost because they came after the last save, and those of kept steps."""

    billed_s: float
    lost_s: float
    kept_s: float


def lognormal(draw: random.Random, median: float, sigma: float, least: float, most: float) -> float:
    """Return a drawn time within bounds."""
    return min(most, max(least, median * draw.lognormvariate(0.0, sigma)))


def attempt(draw: random.Random, name: str, cap_s: int, *, is_interrupted: bool) -> Run:
    """Return what becomes of one attempt with this cap, whose rendered numbers are the plan's own."""
    terms, grace_s = PLATFORMS[name]
    own_s = caps.own_limit_s(cap_s, terms)
    signal_s = caps.deadline_s(own_s)  # the agent's signal, if the trainer has not left by then
    is_cloud = name != "ssh"
    lead_s = lognormal(draw, 110, 0.6, 20, 600) if is_cloud else 1.0
    tail_s = lognormal(draw, 40, 0.7, 5, 400) if is_cloud else 2.0
    start_s = draw.uniform(8, 25)  # torch and the process group
    save, step = draw.lognormvariate(1.8, 1.0), draw.lognormvariate(-0.5, 1.2)
    save, step = min(60.0, max(1.0, save)), min(20.0, max(0.05, step))
    uploads = name == "vertex" and draw.random() < 0.5

    def scattered(median: float) -> float:
        return median * draw.lognormvariate(0.0, SCATTER)

    # By the time of the last save the trainer knows its newest one; before the first it has guessed, and clipped that.
    has_saved = own_s > SAVE_EVERY_S + start_s
    guess_s = min(scattered(save) * draw.uniform(0.3, 3.0), 0.1 * own_s)
    known_s = scattered(save) if has_saved else guess_s
    known_upload_s = (scattered(save) if has_saved else guess_s) if uploads else 0.0
    is_saving = draw.random() < save / SAVE_EVERY_S
    stop_s = min(signal_s, own_s - margin_s(known_s, known_upload_s, scattered(step), saving=is_saving))
    stop_s = max(stop_s, start_s) + draw.random() * scattered(step)
    # The platform's own end, by the job's clock: where the lead took longer than was allowed for, it comes first.
    signalled_s = cap_s - lead_s if is_cloud else own_s
    stop_s, end_s = min(stop_s, signalled_s), min(own_s, signalled_s + grace_s)
    if is_interrupted:
        gone_s = draw.uniform(start_s, stop_s) if stop_s > start_s else stop_s
        since_s = min(gone_s - start_s, gone_s % SAVE_EVERY_S + scattered(save))
        return Run(lead_s + gone_s + tail_s, max(0.0, since_s), max(0.0, gone_s - start_s - since_s))
    last_s = (scattered(save) * (1.0 + (draw.random() if is_saving else 0.0))) + (scattered(save) if uploads else 0.0)
    if stop_s + last_s <= end_s:
        return Run(lead_s + stop_s + last_s + tail_s, 0.0, max(0.0, stop_s - start_s))
    lost_s = min(stop_s - start_s, stop_s % SAVE_EVERY_S + scattered(save))
    return Run(lead_s + end_s + tail_s, max(0.0, lost_s), max(0.0, stop_s - start_s - lost_s))


def job(draw: random.Random, prices: list[tuple[str, int]], sums: Sums) -> None:
    """Add one job, with its attempts, which share its money."""
    name, price = draw.choice(prices)
    terms, _ = PLATFORMS[name]
    rate = CostRate(draw.choice([1, 1, 2, 4, 8, 16, 64]), price, draw.choice([1.0, 1.05, 1.1025]))
    least = worst_case_micro(caps.least_useful_s(terms), rate, terms)
    budget = round(least * 50 ** draw.random())
    real_price = price * draw.uniform(1.0, rate.uncertainty)
    spent_worst = paid = excess = 0.0
    runs: list[Run] = []
    while True:
        found = caps.choose(budget, int(spent_worst) + (spent_worst > 0), rate, terms, 30 * 86_400)
        if not isinstance(found, Cap):
            break
        is_interrupted = not runs and draw.random() < 0.2
        run = attempt(draw, name, found.cap_s, is_interrupted=is_interrupted)
        runs.append(run)
        billed_s = max(terms.minimum_bill_s, -(-run.billed_s // terms.unit_s) * terms.unit_s)
        paid += billed_s * rate.instances * real_price / 3600
        beyond_s = run.billed_s - found.cap_s - terms.tail_s  # what its platform billed more than was planned for
        excess += max(0.0, beyond_s + terms.unit_s) * rate.instances * real_price / 3600
        spent_worst += billed_s * rate.instances * price * rate.uncertainty / 3600
        if not is_interrupted:
            break
    nodes = rate.instances
    total_s, lost_s = nodes * sum(run.billed_s for run in runs), nodes * sum(run.lost_s for run in runs)
    sums.jobs += 1
    sums.over += paid > budget + 1
    sums.over_beyond_tail += paid > budget + excess + 1
    sums.lost_work += runs[-1].lost_s > 0
    sums.paid_s, sums.lost_s = sums.paid_s + total_s, sums.lost_s + lost_s
    sums.kept_s += nodes * sum(run.kept_s for run in runs)
    sums.shares.append(1 - lost_s / total_s)


def run(jobs: int = JOBS, seed: int = 8) -> Report:
    """Simulate, and report."""
    draw, sums = random.Random(seed), Sums()
    prices = [(name, round(float(row["usd_per_hour"]) * 1e6)) for name in PLATFORMS if name != "ssh"
              for row in catalog.rows(name) if row["usd_per_hour"]]  # fmt: skip
    prices += [("ssh", price) for price in (500_000, 2_500_000, 20_000_000) for _ in range(20)]
    for _ in range(jobs):
        job(draw, prices, sums)
    report = Report(f"{sums.jobs} simulated jobs with the laptop off")
    report.count("over their budget beyond the stop tail", sums.over_beyond_tail, 0)
    report.timing("over their budget, by a tail longer than planned", f"{100 * sums.over / jobs:.2f} %")
    kept = 1 - sums.lost_s / sums.paid_s
    report.timing(
        "of the paid node time kept: all but work that was not saved", f"{100 * kept:.2f} %", ">= 95 %", ok=kept >= 0.95
    )
    report.timing("of the paid node time in steps that are kept", f"{100 * sums.kept_s / sums.paid_s:.2f} %")
    shares = sorted(sums.shares)
    report.timing("jobs that keep less than 95 %", f"{100 * sum(share < 0.95 for share in shares) / jobs:.2f} %")
    report.timing("jobs whose last save came too late", f"{100 * sums.lost_work / jobs:.2f} %")
    report.notes += ASSUMED
    return report


if __name__ == "__main__":
    found = run()
    found.show()
    sys.exit(int(found.failed))
