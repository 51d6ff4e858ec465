"""The report of a sweep as a single HTML file: rungs, the best result over money, all trials, curves of the best."""

from __future__ import annotations

from typing import Any

from cloudtrain.entrypoints.format import amount, dollars
from cloudtrain.entrypoints.sweep.search import Search, best, values_of

from ..planning import search_spec
from ..store import sweeps
from ..store.progress import finite
from ..store.registry import Registry
from ..store.sweeps import SegmentRecord, SweepRecord
from ..sweeps import costs, overview, searching
from ..sweeps.costs import SweepCost
from ..text.money import moment
from ..text.units import percent
from . import comparing, page
from .sweep_charts import HEIGHT, WIDTH, TrialEnd, best_curve, parallel


def sweep_html(registry: Registry, sweep: SweepRecord, now_s: float) -> str:
    """Return the report of a sweep, as known at `now_s`."""
    database, search = registry.database, search_spec.search_of(sweep.config)
    found, cost = overview.as_json(database, sweep), costs.costs_of(database, sweep, now_s)
    ends = ends_of(search, sweeps.segments(database, sweep.id), cost)
    best = [] if cost.is_shared else [each.job for each in ends[: overview.MOST_BEST] if each.step]
    jobs = [job for job in registry.jobs() if job.id in best] if best else []  # the user may have removed some
    jobs.sort(key=lambda job: best.index(job.id))
    axes, lines = parallel(search.space, ends, found["metric"])
    return page.rendered(
        "sweep.html",
        comparing.compared(registry, jobs, now_s).drawn if jobs else (),
        title=f"{sweep.id}: {sweep.state}",
        as_of=f"{moment(now_s)} UTC",
        sweep=found,
        plan=overview.plan_lines(sweep.config),
        cards=_cards(found, cost),
        width=WIDTH,
        height=HEIGHT,
        curve=best_curve(_results(cost, found["metric"]), search.mode),
        axes=axes,
        lines=lines,
        names=[job.id for job in jobs],
        keys=[each.key for each in search.space],
        trials=[_row(each) for each in ends],
        figure=overview.figure,
    )


def sweep_json(registry: Registry, sweep: SweepRecord, now_s: float) -> dict[str, Any]:
    """Return the data of the report with stable names: the status, the cost, and all trials in the order of rank."""
    database, search = registry.database, search_spec.search_of(sweep.config)
    cost = costs.costs_of(database, sweep, now_s)
    ends = ends_of(search, sweeps.segments(database, sweep.id), cost)
    trials = [
        {name: value for name, value in vars(each).items() if name != "micro"}
        | {"value": finite(each.value), "usd": None if each.micro is None else each.micro / 1e6}
        for each in ends
    ]
    return {**overview.as_json(database, sweep), "cost": costs.as_json(cost), "ends": trials}


def ends_of(search: Search, segments: list[SegmentRecord], cost: SweepCost) -> list[TrialEnd]:
    """Return the trials at their last results: the best first, trials without a result last."""
    left = searching.results_of(segments)
    results, rank = dict(left), dict[int, int]()
    while (key := best(search, left)) is not None:
        rung = key[1]
        some = sorted(trial for trial, at in left if at == rung)
        ranked = sorted(some, key=lambda trial: _order(search, left[trial, rung], trial))
        for trial in ranked:
            if (value := left[trial, rung]) is not None and value == value:
                rank.setdefault(trial, len(rank))
        left = {each: value for each, value in left.items() if each[1] < rung}
    last: dict[int, SegmentRecord] = {}
    for each in segments:
        if each.trial not in last or each.state in sweeps.ENDED:
            last[each.trial] = each
    trials = sorted(last, key=lambda trial: (rank.get(trial, len(last)), trial))
    return [_end(search, results, last[trial], trial in rank, cost) for trial in trials]


def _order(search: Search, value: float | None, trial: int) -> tuple[float, int]:
    sign = -1.0 if search.mode == "max" else 1.0
    return (float("inf") if value is None or value != value else sign * value), trial


def _end(
    search: Search, results: dict[tuple[int, int], float | None], last: SegmentRecord, is_ranked: bool, cost: SweepCost
) -> TrialEnd:
    done = [rung for (trial, rung), value in results.items() if trial == last.trial and value is not None]
    rung = max(done) if is_ranked and done else None
    return TrialEnd(
        last.trial,
        last.job_id,
        values_of(search, results, last.trial, last.rung),
        None if rung is None else results[last.trial, rung],
        None if rung is None else search.rungs[rung],
        costs.state_of(cost, last.trial),
        costs.total(cost.trials[last.trial]),
    )


def _results(cost: SweepCost, metric: str) -> list[tuple[int, float, str]]:
    """Return each result with the money spent until its end; an unknown price counts as 0."""
    spent, found = 0, list[tuple[int, float, str]]()
    for each in sorted(cost.segments, key=lambda each: each.ended_s or float("inf")):
        spent += each.micro or 0
        row = each.segment
        if row.state == "done" and row.value is not None:
            at = overview.place_of({"unit": cost.unit}, {"step": cost.rungs[row.rung]})
            text = f"trial {row.trial}, {at}: {metric} {row.value:.6g}, {dollars(spent)} spent"
            found.append((spent, row.value, text))
    return found


def _cards(found: dict[str, Any], cost: SweepCost) -> list[tuple[str, str, str]]:
    first = found["best"][0] if found["best"] else None
    limit = "no budget" if found["limit_usd"] is None else f"of {dollars(found['limit_usd'] * 1e6)}"
    cards = []
    if first is not None:
        at = f"trial {first['trial']} at {overview.place_of(found, first)}"
        cards.append((f"Best {found['metric']}", overview.figure(first["value"]), at))
    cards.append(("Trials", str(found["trials"]), f"of {found['planned']} planned"))
    cards.append(("Spent", dollars(cost.spent_micro), limit))
    if cost.starts_share is not None:
        cards.append(("Starts", percent(cost.starts_share), "of the paid time"))
    if cost.paused and cost.saved_micro is not None:
        steps = f"an estimate: {cost.saved_steps:,} untrained {cost.unit}"
        cards.append(("Saved by pauses", dollars(cost.saved_micro), steps))
    return cards


def _row(each: TrialEnd) -> list[str]:
    values = [value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)
              for value in each.values.values()]  # fmt: skip
    result = "-" if each.value is None else overview.figure(each.value)
    step, cost = "-" if each.step is None else str(each.step), "?" if each.micro is None else amount(each.micro)
    return [str(each.trial), result, step, each.state, cost, *values]
