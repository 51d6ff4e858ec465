"""Jobs whose laptop is off: how much of what they paid for is kept.

The caps are those of launcher/metering/limit.py with each backend's own terms, the moment of the last save is by the
trainer's own rule (entrypoints/rank/agree.py). All else is drawn, and assumed: see ASSUMED. It is no measurement of a
cloud. That no bill exceeds its budget is held by tests/launcher/test_limit.py and test_money_histories.py.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from report import Report

from cloudtrain.entrypoints.rank.agree import margin_s
from cloudtrain.entrypoints.terms import CostRate, Terms, rounded_up, worst_case_micro
from cloudtrain.launcher.metering import limit as caps
from cloudtrain.launcher.metering.limit import Cap

JOBS = 20_000
RATE = CostRate(1, 1_000_000)
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
    "  fifth of the jobs is interrupted once, and resumed with the money left; budgets are 1 to 50 times the smallest",
    "  useful one, so jobs are of minutes to half a day",
)


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


def job(draw: random.Random) -> tuple[list[Run], bool]:
    """Return the attempts of one job, which share its money, and whether they cost more."""
    name = draw.choice(list(PLATFORMS))
    terms, _ = PLATFORMS[name]
    budget = round(worst_case_micro(caps.least_useful_s(terms), RATE, terms) * 50 ** draw.random())
    runs: list[Run] = []
    spent_micro = 0
    while isinstance(found := caps.choose(budget, spent_micro, RATE, terms, 30 * 86_400), Cap):
        is_interrupted = not runs and draw.random() < 0.2
        runs.append(attempt(draw, name, found.cap_s, is_interrupted=is_interrupted))
        billed_s = max(terms.minimum_bill_s, rounded_up(math.ceil(runs[-1].billed_s), terms.unit_s))
        spent_micro += math.ceil(billed_s * RATE.price_micro / 3600)
        if not is_interrupted:
            break
    return runs, spent_micro > budget


def run(jobs: int = JOBS, seed: int = 8) -> Report:
    """Simulate, and report."""
    draw = random.Random(seed)
    ended, are_over = zip(*(job(draw) for _ in range(jobs)), strict=True)
    paid_s = sum(each.billed_s for runs in ended for each in runs)
    kept = 1 - sum(each.lost_s for runs in ended for each in runs) / paid_s
    in_steps = sum(each.kept_s for runs in ended for each in runs) / paid_s
    shares = [1 - sum(each.lost_s for each in runs) / sum(each.billed_s for each in runs) for runs in ended]
    report = Report(f"{jobs} simulated jobs with the laptop off")
    report.timing("over their budget, by a tail longer than planned", f"{100 * sum(are_over) / jobs:.2f} %")
    report.timing(
        "of the paid time kept: all but work that was not saved", f"{100 * kept:.2f} %", ">= 95 %", ok=kept >= 0.95
    )
    report.timing("of the paid time in steps that are kept", f"{100 * in_steps:.2f} %")
    report.timing("jobs that keep less than 95 %", f"{100 * sum(share < 0.95 for share in shares) / jobs:.2f} %")
    late = sum(runs[-1].lost_s > 0 for runs in ended)
    report.timing("jobs whose last save came too late", f"{100 * late / jobs:.2f} %")
    report.notes += ASSUMED
    return report


if __name__ == "__main__":
    run().show()
