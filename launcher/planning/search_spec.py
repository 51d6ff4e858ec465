"""The search of a config with the section `sweep`: its settings with their defaults, and its form in the job spec.

A sweep is one job, whose node 0 drives the search, and whose slots train the trials.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.sweep.search import BATCH, COPYING, FIXED, PAUSING, Search, rungs, script_args, steps_of
from cloudtrain.entrypoints.sweep.space import SpaceError, dimensions, grid

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..plan import Plan

TRIALS = 27  # a default: three rungs of a factor of 3
PARALLEL = 4  # trials at once on a machine without GPUs
ALL = 10_000  # trials at once: all that fit
FIRST_SHARE = 81  # the first rung is max_steps / 81: source: the measurements of docs/sweeps.md
GENERATIONS = 20  # of pbt
AT_THE_END = 1_000_000_000  # steps between evaluations: only the last step of a training in epochs has one


def ends_itself(config: Mapping[str, Any]) -> bool:
    """Return whether the steps of a trial are unknown, so that a script trains to its own end."""
    return not (config["task"] or config["sweep"]["steps"])


def pauses(config: Mapping[str, Any]) -> bool:
    """Return whether the algorithm pauses trials."""
    return config["sweep"]["algorithm"] in PAUSING


def search_of(config: Mapping[str, Any]) -> Search:
    """Return the search of a config."""
    return Search.load(_search(config))


def metric_of(config: Mapping[str, Any]) -> str:
    """Return the name of the metric."""
    monitor = (config.get("training") or {}).get("monitor") or {}
    return str(config["sweep"]["metric"] or monitor.get("metric") or "loss")


def unit_of(config: Mapping[str, Any]) -> str:
    """Return the unit of the rungs: epochs for a training in epochs, samples if the batch size varies, else steps.

    `scripts` if a script trains to its own end: a rung is the whole script.
    """
    if ends_itself(config):
        return "scripts"
    if config["task"] and config["training"]["epochs"]:
        return "epochs"
    return "samples" if BATCH in config["sweep"]["space"] else "steps"


def fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of the search that a further attempt cannot change."""
    found = _search(config)
    may_grow = () if found["algorithm"] in FIXED else ("trials",)
    return {key: value for key, value in found.items() if key not in ("parallel", *may_grow)}


def training_of(config: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the section `training` of a trial: an evaluation at the end at least, and the steps of its batch size."""
    training = dict(config["training"])
    if values and unit_of(config) == "samples":
        training["max_steps"] = steps_of(_search(config)["rungs"][-1], values)
    if training["eval_every"] is None:
        training["eval_every"] = training["max_steps"] or AT_THE_END
    return training


def trial_config(config: Mapping[str, Any], values: Mapping[str, Any]) -> JobConfig:
    """Return the config of a trial alone, with the values: without the section `sweep` and the budget."""
    from .. import config as configs  # a look at running trials needs no config, and the import 60 ms

    found, words = ["sweep=null", "budget=null"], script_args(config["args"], values)
    if config["task"]:
        training = training_of(config, values)
        found += [f"training.{key}={json.dumps(training[key])}" for key in ("max_steps", "eval_every")]
    found += [f"{key}={json.dumps(value)}" for key, value in values.items() if not key.startswith("args.")]
    return configs.stored(dict(config), overrides=[*found, f"args={json.dumps(words)}"] if words else found)


def sweep_spec(config: Mapping[str, Any], plan: Plan, kind: str) -> dict[str, Any]:
    """Return the field `sweep` of the job spec (entrypoints/sweep/segments.py); `kind`: task, script or module."""
    sweep = config["sweep"]
    return {
        "search": _search(config),
        "slots": plan.slot_ranks,
        "instances": plan.slot_instances,
        "nproc_per_node": plan.devices_per_node,
        "metric": sweep["metric"],
        "keep": sweep["keep"],
        "until": "end" if ends_itself(config) else "rung",
        **({} if kind == "task" else {"kind": kind}),
    }


def _search(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the search in its JSON form."""
    sweep, training = config["sweep"], config.get("training") or {}
    algorithm, trials = sweep["algorithm"], sweep["trials"] or TRIALS
    if algorithm == "grid":
        with contextlib.suppress(SpaceError):  # of a faulty file: the config's rules report the fault
            trials = min(len(grid(dimensions(sweep["space"]))), sweep["trials"] or 10_000)
    unit = unit_of(config)
    last, least = training.get("max_steps") or sweep["steps"] or 1, training.get("eval_every") or 1
    if unit == "epochs":
        last, least = training["epochs"], 1
    scale = (training.get("global_batch_size") or 1) if unit == "samples" else 1
    steps: tuple[int, ...] = (last,)
    if algorithm in COPYING:
        first = sweep["first_rung"] or max(last // GENERATIONS, least)
        steps = (*range(first, last, first), last)
    elif pauses(config):
        steps = rungs(sweep["first_rung"] or max(last // FIRST_SHARE, least), sweep["factor"], last)
    return {
        "algorithm": algorithm,
        "space": sweep["space"],
        "trials": trials,
        "parallel": sweep["parallel"] or ALL,
        "rungs": tuple(scale * step for step in steps),
        "factor": sweep["factor"],
        "mode": sweep["mode"] or (training.get("monitor") or {}).get("mode") or "min",
        "seed": sweep["seed"],
    }
