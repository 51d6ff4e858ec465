"""A sweep as text and as JSON: rungs, money, running and best trials. Pure but for the registry's rows."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import counted, down, up, usd
from cloudtrain.entrypoints.sweep.search import best, values_of

from ..planning import search_spec
from ..planning.search_spec import is_packed, unit_of
from ..store import sweeps
from ..store.progress import finite
from . import searching

if TYPE_CHECKING:
    from cloudtrain.entrypoints.sweep.search import Search

    from ..store.database import Database
    from ..store.registry import Registry
    from ..store.sweeps import SegmentRecord, SweepRecord

MOST_BEST = 5


def plan_lines(config: dict[str, Any]) -> list[str]:
    """Return the lines about the search for the plan: trials, rungs, and steps as a share of training all trials."""
    search = search_spec.search_of(config)
    # Without `parallel`, the machines of a packed sweep limit the trials: another line of the plan.
    is_told = config["sweep"]["parallel"] or not is_packed(config)
    at_once = f", at most {min(search.parallel, search.trials)} at once" if is_told else ""
    lines = [f"sweep: {search.algorithm} over {counted(search.trials, 'trial')}{at_once}"]
    if len(search.rungs) > 1:
        steps, unit = _steps(search), unit_of(config)
        share = steps / (search.trials * search.rungs[-1])
        lines.append(
            f"rungs at {unit} {', '.join(map(str, search.rungs))}: about {share:.0%} of the {unit} of all trials"
        )
    return lines


def cause_of(registry: Registry, sweep: SweepRecord) -> str:
    """Return why the job of a packed sweep has failed, or which trial its time excludes; empty text for others."""
    if sweep.state == "stopped" and is_packed(sweep.config):
        return str(registry.find(sweep.id).attempt.progress.get("not_begun") or "")
    if sweep.state != "failed":
        return ""
    state = registry.find(sweep.id).attempt.state
    return str((state.error or {}).get("message") or state.detail or state.reason or "see the log")


def as_lines(database: Database, sweep: SweepRecord, cause: str = "") -> list[str]:
    """Return the screen of `status SWEEP`. `cause`: why the sweep has failed."""
    found = as_json(database, sweep)
    money = f"spent {usd(up(round(found['spend_usd'] * 1e6)))}"
    if sweep.limit_micro is not None:
        left = usd(down(max(0, round(found["left_usd"] * 1e6))))
        money += f" of {usd(up(sweep.limit_micro))}; {usd(up(round(found['held_usd'] * 1e6)))} held, {left} left"
    state = f"{sweep.state}: {cause}" if cause else sweep.state
    lines = [f"{sweep.id}: {state}", f"  {plan_lines(sweep.config)[0]}", f"  {money}"]
    for each in found["rungs"]:
        value = "" if each["best"] is None else f", best {found['metric']} {figure(each['best'])}"
        states = ", ".join(f"{each[name]} {name}" for name in ("done", "running", "failed", "stopped") if each[name])
        lines.append(f"  rung {each['rung']} ({place_of(found, each)}): {states or 'no trial yet'}{value}")
    for each in found["best"]:
        result = f"{found['metric']} {figure(each['value'])} at {place_of(found, each)}"
        lines.append(f"  trial {each['trial']}: {result}; {values_text(each['values'])}")
    for each in found["running"][:MOST_BEST]:
        lines.append(f"  running: trial {each['trial']}, rung {each['rung']}{_progress(each)}")
    if len(found["running"]) > MOST_BEST:
        lines.append(f"  and {counted(len(found['running']) - MOST_BEST, 'more trial')} running")
    return lines


def place_of(shown: dict[str, Any], each: dict[str, Any]) -> str:
    """Return the place of a rung or a result, in the unit of the rungs: `step 90`, `epoch 9`, `2880 samples`."""
    unit = shown["unit"]
    if unit == "scripts":  # a rung is the whole script, and a result has a step
        return "the end" if "rung" in each else f"step {each['step']}"
    return f"{each['step']} samples" if unit == "samples" else f"{unit.removesuffix('s')} {each['step']}"


def figure(value: float | str) -> str:
    """Return a metric as text; a value that is not finite is text already."""
    return value if isinstance(value, str) else f"{value:.6g}"


def values_text(values: dict[str, Any]) -> str:
    """Return a trial's values on one line, each with the last word of the key."""
    return ", ".join(
        f"{key.rpartition('.')[2]} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
    )


def _progress(running: dict[str, Any]) -> str:
    """Return the step and the loss of a running trial; without a step, the state."""
    if running["step"] is None:
        return f": {running['state']}"
    until = "" if running["until_step"] is None else f" of {running['until_step']}"
    loss = "" if running["loss"] is None else f", loss {figure(running['loss'])}"
    return f": step {running['step']}{until}{loss}"


def as_json(database: Database, sweep: SweepRecord) -> dict[str, Any]:
    """Return the sweep with stable names: money in dollars; a number that is not finite is text (`nan`, `inf`)."""
    search, segments = search_spec.search_of(sweep.config), sweeps.segments(database, sweep.id)
    results = searching.results_of(segments)
    spent, held = sweeps.spent_and_held(database, sweep.id)
    winner = best(search, results)
    found = {
        "sweep": sweep.id,
        "state": sweep.state,
        "algorithm": search.algorithm,
        "metric": search_spec.metric_of(sweep.config),
        "unit": unit_of(sweep.config),
        "trials": len({each.trial for each in segments}),
        "planned": search.trials,
        "spend_usd": spent / 1e6,
        "held_usd": held / 1e6,
        "limit_usd": None if sweep.limit_micro is None else sweep.limit_micro / 1e6,
        "left_usd": None if sweep.limit_micro is None else (sweep.limit_micro - spent - held) / 1e6,
        "is_finished": winner is not None and winner[1] == len(search.rungs) - 1,
        "rungs": [_rung(search, number, segments) for number in range(len(search.rungs))],
        "best": _best(search, results, _own_ends(unit_of(sweep.config), search, segments)),
        "running": [_running(each) for each in sweeps.running(database, sweep.id)],
        "jobs": sorted({each.job_id for each in segments}),
    }
    return {name: finite(value) for name, value in found.items()}


def _running(row: dict[str, Any]) -> dict[str, Any]:
    progress = row.pop("progress")
    return {**row, "rung": row["rung"] + 1, "step": progress.get("step"), "loss": progress.get("loss")}


def _rung(search: Search, number: int, segments: list[SegmentRecord]) -> dict[str, Any]:
    at = [each for each in segments if each.rung == number]
    values = [each.value for each in at if each.value is not None and not math.isnan(each.value)]
    choose = max if search.mode == "max" else min
    return {
        "rung": number + 1,
        "step": search.rungs[number],
        "done": sum(each.state == "done" for each in at),
        "running": sum(each.state in ("due", "sent") for each in at),
        "failed": sum(each.state == "failed" for each in at),
        "stopped": sum(each.state == "stopped" for each in at),
        "best": choose(values) if values else None,
    }


def _own_ends(unit: str, search: Search, segments: list[SegmentRecord]) -> dict[tuple[int, int], int]:
    """Return the step, by (trial, rung), of each result of a trial that ended by itself, not at the rung's step."""
    if unit in ("samples", "epochs"):
        return {}
    ends = [(each.trial, each.rung, each.until_step) for each in segments if each.state == "done"]
    is_whole = unit == "scripts"
    return {
        (trial, rung): step
        for trial, rung, step in ends
        if step is not None and (is_whole or step < search.rungs[rung])
    }


def _best(
    search: Search, results: dict[tuple[int, int], float | None], short: dict[tuple[int, int], int]
) -> list[dict[str, Any]]:
    """Return the best trials: the highest rung first, then the value. `short`: the steps of earlier ends."""
    left, found = dict(results), list[dict[str, Any]]()
    while len(found) < MOST_BEST and (key := best(search, left)) is not None:
        trial, rung = key
        values = values_of(search, results, trial, rung)
        step = short.get(key, search.rungs[rung])
        found.append({"trial": trial, "value": results[key], "step": step, "values": values})
        left = {each: value for each, value in left.items() if each[0] != trial}
    return found


def _steps(search: Search) -> int:
    """Return the steps of all trials if each rung promotes 1/factor of its trials, and at least one trial."""
    count, steps, before = search.trials, 0, 0
    for step in search.rungs:
        steps += count * (step - before)
        count, before = max(1, count // search.factor), step
    return steps
