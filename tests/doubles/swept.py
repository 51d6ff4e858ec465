"""A sweep in the registry without a real run: trials that paused at rungs, a failed trial, and the ledger's rows."""

import math
import time
from dataclasses import dataclass
from typing import Any

from cloudtrain.entrypoints.sweep.search import values_of
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.planning import search_spec
from cloudtrain.launcher.store import ledger, series, sweeps
from cloudtrain.launcher.store.budgets import Held
from cloudtrain.launcher.store.registry import Registry, this_process
from cloudtrain.launcher.store.series import Point
from cloudtrain.launcher.store.sweeps import SegmentRecord, SweepRecord
from doubles.plans import plan_of

BEGAN_S = 1_790_000_000.0
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
        "training": {"max_steps": 810, "eval_every": 90, "monitor": {"metric": "loss", "mode": "min"}},
        "budget": {"limit": "9 USD", "alert_at": ["50%", "80%", "100%"], "on_limit": "checkpoint-and-stop"},
        "sweep": {
            "space": SPACE,
            "algorithm": "asha",
            "place": "jobs",
            "metric": None,
            "mode": None,
            "trials": trials,
            "parallel": 4,
            "first_rung": 90,
            "factor": 3,
            "seed": 0,
            **sweep,
        },
    }


@dataclass(frozen=True)
class _Writer:
    """Writes the segments of a sweep one after the other in time."""

    registry: Registry
    sweep: SweepRecord

    def segment(self, trial: int, rung: int, began_s: float, *, is_last: bool, fails: bool = False) -> float:
        """Write the rows of an ended segment; return the time of its end."""
        search = search_spec.search_of(self.sweep.config)
        from_step = search.rungs[rung - 1] if rung else 0
        until = search.rungs[rung]
        ended_s = began_s + START_S + (until - from_step) * STEP_S
        job_id = f"{self.sweep.id}-{trial}"
        attempt = self.journal(job_id, rung + 1, began_s)
        self.registry.mark_sent(attempt, {"folder": "/x", "nodes": 1, "checkpoint_dir": "/x"})
        value = _loss(values_of(search, {}, trial, 0), until)
        state = State("stopped", "paused", resumable=True, started_s=began_s, ended_s=ended_s)
        if is_last:
            state = State("succeeded", started_s=began_s, ended_s=ended_s)
        if fails:
            state = State("failed", "error", started_s=began_s, ended_s=ended_s, error={"message": "no batch"})
        points = [
            Point(rung + 1, "step", began_s + START_S + STEP_S * (step - from_step), step, {"loss": 2 / step}, step)
            for step in range(from_step + 10, until + 1, max(10, (until - from_step) // 8))
        ]
        points.append(Point(rung + 1, "eval", ended_s, until, {"metrics": {"loss": value}}, until + 1))
        series.append(self.registry.database, job_id, points)
        self.registry.set_state(attempt, state, {"step": until, "max_steps": 810, "loss": value})
        row = SegmentRecord(self.sweep.id, trial, rung, job_id, rung + 1, until, "failed" if fails else "done")
        sweeps.write(self.registry.database, row if fails else SegmentRecord(**{**vars(row), "value": value}))
        return ended_s

    def journal(self, job_id: str, number: int, began_s: float) -> Attempt:
        """Write the intent to send an attempt of the trial's job."""
        plan = plan_of(hourly_usd=HOURLY_MICRO / 1e6, price_micro=HOURLY_MICRO, worst_case_usd=1.0)
        who = {**this_process(), "settings": []}
        attempt = Attempt(job_id, number, "intent", plan, {"body": 1}, began_s, who)
        with self.registry.database.transaction():
            config = {key: value for key, value in self.sweep.config.items() if key not in ("sweep", "budget")}
            if number == 1:
                job = Job(job_id, "digits", "local", began_s, config, self.sweep.config_file, {}, attempt)
                self.registry.add(job_id, lambda name, first: job, exclusive=True, key=None)
            else:
                self.registry.add_attempt(attempt, config, {})
            ledger.reserve(self.registry.database, Held(job_id, number, "", 1_000_000, began_s))
        return attempt


def put(
    registry: Registry, trials: int = 9, *, state: str = "ended", limit_micro: int | None = 9_000_000, **sweep: Any
) -> SweepRecord:
    """Store a sweep of which each rung has ended: trial 1 has failed, and the best third of each rung has gone on."""
    config = config_of(trials, **sweep)
    if limit_micro is None:
        config["budget"] = None
    found = SweepRecord("digits-x7k2p", time.time(), config, "/x/cloudtrain.yaml", {}, limit_micro, state)
    search = search_spec.search_of(config)
    with registry.database.transaction():
        sweeps.add(registry.database, found)
        writer, now_s = _Writer(registry, found), BEGAN_S
        ranked = list(range(search.trials))
        for rung in range(len(search.rungs)):
            for trial in sorted(ranked):
                is_last = rung == len(search.rungs) - 1
                now_s = writer.segment(trial, rung, now_s, is_last=is_last, fails=trial == 1 and not rung) + 5
            until = search.rungs[rung]
            ranked = sorted(
                set(ranked) - {1}, key=lambda trial: _loss(values_of(search, {}, trial, 0), until)
            )[: max(1, len(ranked) // search.factor)]  # fmt: skip
    return found


def begin(registry: Registry, sweep: SweepRecord, trial: int) -> None:
    """Write a trial that this process is sending, so that the trial stays active without a backend."""
    job_id = f"{sweep.id}-{trial}"
    _Writer(registry, sweep).journal(job_id, 1, time.time())
    sweeps.write(registry.database, SegmentRecord(sweep.id, trial, 0, job_id, 1, 90, "sent"))


def _loss(values: dict[str, Any], step: int) -> float:
    """Return a loss that falls with the steps, and is lowest at a learning rate of 0.003."""
    off = math.log10(values["training.optimizer.lr"]) + 2.5
    return round(0.1 + 0.2 * off**2 + 0.05 * (values["training.optimizer.name"] == "sgd") + 20 / (step + 20), 6)
