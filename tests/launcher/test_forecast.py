"""The forecast of a running job's cost, in numbers, in words, and in `status` and `list`."""

import itertools
import json
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.entrypoints.events import format_line
from cloudtrain.launcher import cli
from cloudtrain.launcher.job import CLOCKS, Attempt, Job, State
from cloudtrain.launcher.jobs import overview
from cloudtrain.launcher.jobs.view import view_of
from cloudtrain.launcher.metering.money import Money
from cloudtrain.launcher.money import unit_cost
from cloudtrain.launcher.money.forecast import Forecast, forecast
from cloudtrain.launcher.money.job_facts import job_facts
from cloudtrain.launcher.store import loss_bins
from cloudtrain.launcher.store.progress import fold
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.text.units import clock, moment
from doubles.plans import plan_of
from doubles.signatures import MakeJob

PLAN = {"instances": 2, "nproc_per_node": 4, "ranks": 8, "hourly_usd": 72.0, "cap_s": 3600, "deadline_s": 3480}


def job_of(*states: State, progress: dict[str, Any] | None = None, **plan: Any) -> tuple[Job, list[Attempt]]:
    """Return a job of 100 USD with the given attempts, on two instances of a cent a second each."""
    attempts = [
        Attempt("j-1", number, "sent", plan_of(**{**PLAN, **plan}), {}, 0.0, {}, {}, state, progress or {})
        for number, state in enumerate(states, 1)
    ]
    return Job("j-1", "j", "ssh", 0.0, {"budget": {"limit": "100 USD"}}, "/x.yaml", {}, attempts[-1]), attempts


def seen(*states: State, now_s: float = 1000.0, progress: dict[str, Any] | None = None, **plan: Any) -> Forecast:
    """Return the forecast of the job."""
    return forecast(*job_of(*states, progress=progress, **plan), now_s)


RUNS = State("running", started_s=0.0)


def test_forecast_of_a_job_that_ends_in_time() -> None:
    """The last reported time left counts from its report; a script may report only its steps, so its speed counts."""
    found = seen(RUNS, progress={"step": 50, "eta_s": 600.0, "stepped_s": 900.0})
    assert (found.spent_micro, found.burn_micro_h, found.limit_micro) == (20_000_000, 72_000_000, 100_000_000)
    assert (found.cap_at_s, found.deadline_at_s, found.finish_at_s) == (3600.0, 3480.0, 1500.0)
    assert (found.projected_micro, found.hits_limit, found.stalled_s) == (30_000_000, False, 100.0)
    lines = [(format_line("step", "", {"step": n, "max_steps": 100, "loss": 1.0}), 10.0 * n) for n in (1, 10, 20)]
    found = seen(RUNS, now_s=200.0, progress=fold({}, lines))
    assert found.finish_at_s == pytest.approx(1000.0)


@pytest.mark.parametrize(("eta_s", "hits"), [(2400, False), (2500, True), (9000, True)])
def test_deadline_before_the_finish_hits_the_limit(eta_s: float, hits: bool) -> None:
    """The job saves and leaves at its deadline, although the cap is later."""
    assert seen(RUNS, progress={"eta_s": eta_s, "stepped_s": 1000.0}).hits_limit is hits


def test_time_in_line_is_no_time_of_the_job() -> None:
    """After a preemption the limits come later by the wait, and during the wait no countdown runs."""
    again = State("running", started_s=0.0, billed_s=100.0, told_s=900.0, billed_by=CLOCKS)
    job, attempts = job_of(again, progress={"eta_s": 2400.0, "stepped_s": 1000.0})
    found = forecast(job, attempts, 1000.0)
    assert (found.cap_at_s, found.deadline_at_s, found.hits_limit) == (4400.0, 4280.0, False)
    assert job_facts(job, found, attempts).began_s == 800.0
    assert "3m 20s of at most 1h" in "\n".join(overview.as_lines(view_of(job, attempts, 1000.0)))
    waits = State("pending", started_s=0.0, ended_s=300.0, billed_s=300.0, billed_by=CLOCKS, queue={"place": 1})
    job, attempts = job_of(waits, progress={"eta_s": 2400.0, "stepped_s": 300.0})
    found = forecast(job, attempts, 1000.0)
    assert (found.burn_micro_h, found.cap_at_s, found.finish_at_s, found.hits_limit) == (0, None, None, None)
    text = "\n".join(overview.as_lines(view_of(job, attempts, 1000.0)))
    assert "waiting     for 11m 40s" in text
    assert "5m of at most 1h, last run ended" in text


def test_forecast_counts_earlier_attempts_and_the_budget() -> None:
    """The time between attempts does not count; if no cap comes first, the sum hits a budget that only alerts."""
    found = seen(State("failed", started_s=0.0, ended_s=100.0), State("running", started_s=500.0))
    assert (found.spent_micro, found.cap_at_s) == (12_000_000, 4100.0)
    found = seen(RUNS, progress={"eta_s": 5000.0, "stepped_s": 1000.0}, cap_s=86_400, deadline_s=80_000)
    assert (found.projected_micro, found.hits_limit) == (120_000_000, True)


def test_unknown_forecast_is_none() -> None:
    """The cases are before the first step, without a price, before the start, and after the end."""
    assert seen(RUNS).finish_at_s is seen(RUNS).hits_limit is seen(RUNS).stalled_s is seen(RUNS).projected_micro is None
    unpriced = seen(RUNS, progress={"eta_s": 600.0, "stepped_s": 900.0}, hourly_usd=None)
    assert (unpriced.spent_micro, unpriced.burn_micro_h, unpriced.projected_micro) == (None, None, None)
    assert unpriced.hits_limit is False
    waits = seen(State("pending"))
    assert (waits.spent_micro, waits.burn_micro_h, waits.cap_at_s, waits.finish_at_s) == (0, 0, None, None)
    over = seen(State("succeeded", started_s=0.0, ended_s=500.0), progress={"eta_s": 0.0, "stepped_s": 490.0})
    assert (over.projected_micro, over.burn_micro_h, over.finish_at_s, over.cap_at_s) == (10_000_000, 0, None, None)


@pytest.mark.parametrize(
    ("now_s", "step_s", "finish_at_s"),
    [(150.0, None, 160.0), (200.0, None, 200.0), (221.0, None, None), (221.0, 30.0, 221.0), (300.0, 30.0, None)],
)
def test_finish_of_a_stalled_job_becomes_unknown(now_s: float, step_s: float | None, finish_at_s: float | None) -> None:
    """The finish is never in the past: a minute, or three steps, after the forecast finish the forecast is None."""
    found = seen(RUNS, now_s=now_s, progress={"eta_s": 60.0, "stepped_s": 100.0, "step_s": step_s})
    assert (found.finish_at_s, found.stalled_s) == (finish_at_s, now_s - 100.0)
    assert (found.projected_micro is None, found.hits_limit is None) == (finish_at_s is None,) * 2


def test_fold_keeps_the_step_time_and_the_first_forecast() -> None:
    """The pages do not matter; lines without a time give no time and no curve."""
    lines = [(format_line("step", "", {"step": n, "loss": 2.0 / n, "eta_s": 100.0 - n}), 50.0 + n) for n in (1, 2, 3)]
    whole = fold({}, lines)
    assert (whole["stepped_s"], whole["forecast"]) == (53.0, [1, 150.0])
    assert fold(fold({}, lines[:1]), lines[1:]) == whole
    assert len(loss_bins.load(whole["curve"]).bins) == 3
    assert "curve" not in fold({}, [lines[0][0]])


def test_curve_of_any_length_has_a_bounded_size() -> None:
    """20,000 steps give few bins, even in time, the first apart; a clock that goes back makes the curve coarser."""
    rnd = random.Random(3)
    events = [(i * 7.3, i, 5.0 / (1 + i / 1000) + rnd.gauss(0, 0.1)) for i in range(20_000)]
    found = loss_bins.EMPTY
    for begin in range(0, len(events), 777):
        found = loss_bins.load(loss_bins.dump(loss_bins.added(found, events[begin : begin + 777])))
    bins = found.bins
    assert 32 <= len(bins) <= loss_bins.MOST_BINS
    assert len(loss_bins.dump(found)) < 2500
    assert (bins[0].step, bins[0].count, sum(each.count for each in bins)) == (0, 1, 20_000)
    assert sum(each.loss * each.count for each in bins) == pytest.approx(sum(loss for _, _, loss in events), rel=1e-5)
    gaps = [later.time_s - earlier.time_s for earlier, later in itertools.pairwise(bins[1:-1])]
    assert max(gaps) < 1.1 * min(gaps)
    found = loss_bins.added(
        loss_bins.EMPTY, [(100.0, 1, 3.0), (101.0, 2, 2.0), (50.0, 3, 1.0), (102.0, 4, float("nan"))]
    )
    assert [(each.step, each.loss, each.count) for each in found.bins] == [(1, 3.0, 1), (3, 1.5, 2)]


def test_prices_of_progress_span_a_resume() -> None:
    """The axis is the cost of both attempts, on different machines at different prices."""
    first, second = (
        loss_bins.added(loss_bins.EMPTY, ((t, int(t), 4.0 - t / 100) for t in range(begin, begin + 101)))
        for begin in (0, 100)
    )
    _, attempts = job_of(
        State("failed", started_s=0.0, ended_s=100.0), State("succeeded", started_s=100.0, ended_s=200.0)
    )
    attempts[0] = replace(attempts[0], progress={"epoch": 1.0, "curve": loss_bins.dump(first)})
    dear = plan_of(**{**PLAN, "instances": 8, "price_micro": 36_000_000})
    attempts[1] = replace(attempts[1], plan=dear, progress={"epoch": 2.0, "curve": loss_bins.dump(second)})
    points = unit_cost.points(attempts, 1000.0)
    assert [point.spent_micro for point in points] == sorted(point.spent_micro for point in points)
    assert points[-1].spent_micro == 10_000_000
    found = unit_cost.achieved(attempts, 1000.0)
    assert (found.epoch_micro, found.last_micro) == (5_000_000, 2_000_000)
    assert found.last_loss == pytest.approx(0.25, rel=0.1)  # 8 cents a second buy less than 2 cents did


def test_rising_loss_has_no_price() -> None:
    """The text names the rise; a free job has no price either."""
    rising = loss_bins.dump(loss_bins.added(loss_bins.EMPTY, ((float(t), t, 1.0 + t / 100) for t in range(101))))
    job, attempts = job_of(State("failed", started_s=0.0, ended_s=100.0), progress={"curve": rising, "epoch": 1.0})
    found = unit_cost.achieved(attempts, 200.0)
    assert found.loss_micro is None
    assert unit_cost.last_words(found) == "for the last 0.40 USD it rose by 0.21"
    assert unit_cost.last_words(replace(found, last_loss=0.0)).endswith("it stayed the same")
    free = [replace(job.attempt, plan=plan_of(**{**PLAN, "hourly_usd": 0.0}))]
    assert unit_cost.in_words(unit_cost.achieved(free, 200.0)) == ""


def test_status_names_the_limit_that_comes_first() -> None:
    """The text fits 80 columns, with times by the user's clock."""
    now_s = time.time()
    told = {"step": 120, "max_steps": 2000, "loss": 1.234, "eta_s": 7200.0, "stepped_s": now_s, "samples_per_s": 8100.0}
    cases = (("budget", "the budget's cap comes before the finish"), ("time_limit", "the time limit comes"))
    for reason, words in cases:
        job = job_of(State("running", started_s=now_s - 600), progress=told, cap_reason=reason)
        lines = overview.as_lines(view_of(*job, now_s))
        text = "\n".join(lines)
        assert words in text
        assert "12.00 USD of 100.00 USD, 12 %; 72.00 USD/h" in text
        assert "in 2h, for 156.00 USD" in text
        assert max(map(len, lines)) <= 80
    told["eta_s"] = 600.0
    assert "  outlook     done at" in "\n".join(
        overview.as_lines(view_of(*job_of(State("running", started_s=now_s), progress=told)))
    )


def test_status_of_an_ended_job_shows_its_cost() -> None:
    """The line also has the prices of progress; scripts rely on the names of the JSON."""
    over = State("succeeded", started_s=0.0, ended_s=100.0)
    lines = overview.as_lines(view_of(*job_of(over, progress={"epoch": 4.0, "samples": 1000})))
    assert "  cost        2.00 USD of 100.00 USD, 2 % (0.50 USD an epoch, 2000.00 USD per 1M samples)" in lines
    found = view_of(*job_of(RUNS, progress={"eta_s": 1.0})).as_json()
    names = "limit_usd burn_usd_per_hour projected_usd projected_finish_s cap_at_s deadline_at_s hits_limit stalled_s"
    assert set(names.split()) <= set(found)
    assert json.dumps(found, allow_nan=False)


def test_list_shows_running_cost_and_odd_jobs(seed: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of an earlier version is listed; of a missing backend in its last state with a reason."""
    seed("old", State("succeeded", started_s=0.0, ended_s=10.0))
    cli.cli.main(["list"], standalone_mode=False)
    assert "0.00" in capsys.readouterr().out
    cli.cli.main(["list", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert (len(found["jobs"]), found["running"], found["burn_usd_per_hour"]) == (1, 0, 0)
    seed("ended", State("succeeded", started_s=0.0, ended_s=10.0))
    seed("lost", State("running", started_s=0.0))
    Registry().database.execute("UPDATE jobs SET backend = 'gone' WHERE id = 'lost'")
    cli.cli.main(["list"], standalone_mode=False)
    said = capsys.readouterr()
    assert all(each in said.out for each in ("ended", "lost"))
    assert "lost is listed as it was last seen: " in said.err


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (Money(None, 0, 5_000_000, None).words, "unknown of 5.00 USD"),
        (Money(1_000_000, 0, 0, None).words, "1.00 USD of 0.00 USD"),
        (moment(None), "-"),
        (len(clock(1e9, 1e9)), 8),
        (len(clock(1e9, 0)), 12),
    ],
)
def test_money_and_time_in_words(text: object, wanted: object) -> None:
    """Amounts show cents above a dollar, and two significant digits below; times show a unit or two."""
    assert text == wanted
