"""A sweep in the registry without a real run: a job of trials that paused at rungs; trial 1 has failed."""

import math
import time
from typing import Any

from cloudtrain.entrypoints.sweep.search import values_of
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.planning import search_spec
from cloudtrain.launcher.store import ledger, sweeps
from cloudtrain.launcher.store.budgets import Held
from cloudtrain.launcher.store.registry import Registry, this_process
from cloudtrain.launcher.store.sweeps import SegmentRecord
from doubles.plans import plan_of

JOB, SLOTS = "digits-x7k2p", 2
START_S, STEP_S = 20.0, 0.5
HOURLY_MICRO = 3_600_000  # so a second costs 1,000 micro-dollars
SPACE = {
    "training.optimizer.lr": {"log": [1e-5, 1e-1]},
    "params.width": {"int": [16, 256]},
    "training.optimizer.name": ["adamw", "sgd"],
}


def config_of(trials: int, **sweep: Any) -> dict[str, Any]:
    """Return the stored config of a sweep by asha with rungs at the steps 90, 270 and 810."""
    return {
        "name": "digits",
        "backend": "local",
        "task": "task.py",
        "args": [],
        "tags": {"team": "vision"},
        "training": {"max_steps": 810, "epochs": None, "eval_every": 90, "monitor": {"metric": "loss", "mode": "min"}},
        "budget": {"limit": "9 USD", "alert_at": ["50%", "80%", "100%"], "on_limit": "checkpoint-and-stop"},
        "sweep": {
            "space": SPACE,
            "algorithm": "asha",
            "metric": None,
            "mode": None,
            "trials": trials,
            "parallel": 4,
            "instances": 1,
            "first_rung": 90,
            "factor": 3,
            "seed": 0,
            "steps": None,
            **sweep,
        },
    }


def put(registry: Registry, trials: int = 9, *, state: str = "succeeded", **sweep: Any) -> Job:
    """Store a sweep's job: the best third of each rung has gone on; return the job.

    A job that is not active has ended, after the seconds of all its segments on two slots, a tenth of them idle.
    """
    config = config_of(trials, **sweep)
    search, rows = search_spec.search_of(config), list[SegmentRecord]()
    ranked, began_s = list(range(search.trials)), time.time() - 86_400
    for rung, until in enumerate(search.rungs):
        seconds = START_S + (until - (search.rungs[rung - 1] if rung else 0)) * STEP_S
        for trial in sorted(ranked):
            value = None if trial == 1 else _loss(values_of(search, {}, trial, 0), until)
            ended_s = began_s + sum(each.seconds for each in rows) / SLOTS
            rows.append(SegmentRecord(trial, rung, "failed" if trial == 1 else "done", value, until, seconds, ended_s))
        values = {trial: _loss(values_of(search, {}, trial, 0), until) for trial in ranked if trial != 1}
        ranked = sorted(values, key=values.__getitem__)[: max(1, len(ranked) // search.factor)]
    return _put(registry, config, rows, state, began_s)


def _put(registry: Registry, config: dict[str, Any], rows: list[SegmentRecord], state: str, began_s: float) -> Job:
    price = {"hourly_usd": HOURLY_MICRO / 1e6, "price_micro": HOURLY_MICRO, "worst_case_usd": 1.0}
    attempt = Attempt(JOB, 1, "intent", plan_of(slots=SLOTS, slot_ranks=1, **price), {}, began_s, this_process())
    ended_s = began_s + sum(each.seconds for each in rows) / SLOTS / 0.9
    done = [each.value for each in rows if each.value is not None]
    summary = {"done": sum(not each.rung for each in rows), "trials": config["sweep"]["trials"], "metric": "loss"}
    with registry.database.transaction():
        job = Job(JOB, "digits", "local", began_s, config, "/x/cloudtrain.yaml", {}, attempt)
        registry.add(JOB, lambda name, first: job, exclusive=True, key=None)
        ledger.reserve(registry.database, Held(JOB, 1, "", 9_000_000, began_s))
        registry.mark_sent(attempt, {"folder": "/x", "nodes": 1, "checkpoint_dir": "/x"})
        sweeps.take(registry.database, JOB, rows)
        is_active = state == "running"
        found = State(state, started_s=began_s, ended_s=None if is_active else ended_s)  # type: ignore[arg-type]
        registry.set_state(attempt, found, {"sweep": {**summary, "best": min(done)}})
    return registry.find(JOB)


def begin(registry: Registry, trial: int) -> None:
    """Store that a trial runs."""
    sweeps.take(registry.database, JOB, [SegmentRecord(trial, 0, "running")])


def _loss(values: dict[str, Any], step: int) -> float:
    """Return a loss that falls with the steps, and is lowest at a learning rate of 0.003."""
    off = math.log10(values["training.optimizer.lr"]) + 2.5
    return round(0.1 + 0.2 * off**2 + 0.05 * (values["training.optimizer.name"] == "sgd") + 20 / (step + 20), 6)
