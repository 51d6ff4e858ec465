"""The trials of a sweep as text and as JSON: rungs, running and best trials. All else is its job's."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import counted, span, up, usd
from cloudtrain.entrypoints.sweep.search import COPYING, ranked, values_of

from ..planning import search_spec
from ..planning.search_spec import unit_of
from ..store import sweeps
from ..store.progress import finite

if TYPE_CHECKING:
    from cloudtrain.entrypoints.sweep.search import Results, Search

    from ..job import Job
    from ..jobs.view import JobView
    from ..plan import Plan
    from ..store.database import Database
    from ..store.registry import Registry
    from ..store.sweeps import SegmentRecord

MOST_BEST = 5


def plan_lines(config: dict[str, Any], plan: Plan) -> list[str]:
    """Return the lines about the search for the plan: trials, rungs, and what the time and the money must buy."""
    search, unit = search_spec.search_of(config), unit_of(config)
    teams = plan.instances // plan.slot_instances
    at_once = min(search.parallel, search.trials, teams * plan.slots)
    idle = (teams - min(teams, at_once)) * plan.slot_instances
    idles = f"; {counted(idle, 'instance')} without work" if idle else ""
    lines = [f"sweep: {search.algorithm} over {counted(search.trials, 'trial')}, at most {at_once} at once{idles}"]
    if len(search.rungs) > 1:
        steps = _steps(search)
        share = steps / (search.trials * search.rungs[-1])
        places = ", ".join(map(str, search.rungs))
        lines.append(f"rungs at {unit} {places}: about {share:.0%} of the {unit} of all trials")
    longest_s = plan.deadline_s * min(1.0, at_once * search.rungs[-1] / _steps(search))
    worst = "" if plan.worst_case_micro is None else f", at worst {usd(up(plan.worst_case_micro))}"
    paid = f"all trials together have {span(plan.deadline_s)}{worst}"
    return [*lines, f"{paid}: enough if a whole training takes at most {span(longest_s)}"]


def as_lines(found: dict[str, Any], not_begun: str = "") -> list[str]:
    """Return the trials of `as_json` for the screen of `status`. `not_begun`: a trial without enough time."""
    lines = []
    for each in found["rungs"]:
        value = "" if each["best"] is None else f", best {found['metric']} {figure(each['best'])}"
        states = ", ".join(f"{each[name]} {name}" for name in ("done", "running", "failed", "saved") if each[name])
        lines.append(f"rung {each['rung']} ({place_of(found, each)}): {states or 'no trial yet'}{value}")
    for each in found["best"]:
        result = f"{found['metric']} {figure(each['value'])} at {ended_at(found, each)}"
        lines.append(f"trial {each['trial']}: {result}; {values_text(each['values'])}")
    lines += [f"running: trial {each['trial']}, rung {each['rung']}" for each in found["running"][:MOST_BEST]]
    if len(found["running"]) > MOST_BEST:
        lines.append(f"and {counted(len(found['running']) - MOST_BEST, 'more trial')} running")
    return [*lines, f"not begun: {not_begun}"] if not_begun else lines


def trial_lines(database: Database, job: Job) -> list[str]:
    """Return the trials of a sweep as `as_lines`, as the registry knows them; no line for any other job."""
    if not job.config.get("sweep"):
        return []
    return as_lines(as_json(database, job), job.attempt.progress.get("not_begun", ""))


def place_of(shown: dict[str, Any], each: dict[str, Any]) -> str:
    """Return the place of a rung in its unit: `step 90`, `epoch 9`, `2880 samples`, `the end`."""
    unit = shown["unit"]
    if unit == "scripts":
        return "the end"
    return f"{each['step']} samples" if unit == "samples" else f"{unit.removesuffix('s')} {each['step']}"


def ended_at(shown: dict[str, Any], each: dict[str, Any]) -> str:
    """Return the step at which a trial has its result; the rung for a report without one."""
    return place_of(shown, each) if each["trained"] is None else f"step {each['trained']}"


def figure(value: float | str) -> str:
    """Return a metric as text; a value that is not finite is text already."""
    return value if isinstance(value, str) else f"{value:.6g}"


def values_text(values: dict[str, Any]) -> str:
    """Return a trial's values on one line, each with the last word of the key."""
    return ", ".join(f"{key.rpartition('.')[2]} {value_text(value)}" for key, value in values.items())


def value_text(value: Any) -> str:
    """Return a value of a key as text."""
    return value if isinstance(value, str) else json.dumps(value)


def as_json(database: Database, job: Job) -> dict[str, Any]:
    """Return the trials of a sweep's job with stable names; a number that is not finite is text (`nan`, `inf`)."""
    search, segments = search_spec.search_of(job.config), sweeps.segments(database, job.id)
    results = results_of(segments)
    best, trained = ranked(search, results), {(each.trial, each.rung): each.step for each in segments}
    running = [each for each in segments if each.state == "running"] if job.active else []
    found = {
        "algorithm": search.algorithm,
        "metric": search_spec.metric_of(job.config),
        "unit": unit_of(job.config),
        "trials": len({each.trial for each in segments}),
        "planned": search.trials,
        "is_finished": len(search.rungs) - 1 in best.values(),
        "rungs": [_rung(search, number, segments, is_active=job.active) for number in range(len(search.rungs))],
        "best": [_result(search, results, trained[key], *key) for key in islice(best.items(), MOST_BEST)],
        "running": [{"trial": each.trial, "rung": each.rung + 1} for each in running],
    }
    return {name: finite(value) for name, value in found.items()}


def whole_json(registry: Registry, view: JobView) -> dict[str, Any]:
    """Return a job for scripts, a sweep with its trials in `sweep`: lists leave `sweep` out."""
    is_sweep = bool(view.job.config.get("sweep"))
    return view.as_json() | {"sweep": as_json(registry.database, view.job) if is_sweep else None}


def results_of(segments: Sequence[SegmentRecord]) -> dict[tuple[int, int], float | None]:
    """Return the results of the ended segments by (trial, rung); None for a failed segment."""
    return {(each.trial, each.rung): each.value for each in segments if each.state in sweeps.ENDED}


def _rung(search: Search, number: int, segments: list[SegmentRecord], *, is_active: bool) -> dict[str, Any]:
    at = [each for each in segments if each.rung == number]
    values = [each.value for each in at if each.value is not None and not math.isnan(each.value)]
    choose = max if search.mode == "max" else min
    return {
        "rung": number + 1,
        "step": search.rungs[number],
        "done": sum(each.state == "done" for each in at),
        "running": sum(each.state == "running" for each in at) if is_active else 0,
        "failed": sum(each.state == "failed" for each in at),
        "saved": sum(each.state == "saved" or (each.state == "running" and not is_active) for each in at),
        "best": choose(values) if values else None,
    }


def _result(search: Search, results: Results, trained: int | None, trial: int, rung: int) -> dict[str, Any]:
    """Return the result of a trial on a rung. `trained`: the step that the trial reached."""
    at = {"step": search.rungs[rung], "trained": trained}
    values = values_of(search, results, trial, rung)
    return {"trial": trial, "value": results[trial, rung], **at, "values": values}


def _steps(search: Search) -> int:
    """Return the steps of all trials if each rung promotes 1/factor of its trials, and at least one trial; pbt all."""
    if search.algorithm in COPYING:
        return search.trials * search.rungs[-1]
    count, steps, before = search.trials, 0, 0
    for step in search.rungs:
        steps += count * (step - before)
        count, before = max(1, count // search.factor), step
    return steps
