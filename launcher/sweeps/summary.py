"""A sweep as a line in a list: state, trials with a result, best metric, money."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import amount

from ..job import StoredConfig
from ..store import sweeps
from ..store.progress import finite

if TYPE_CHECKING:
    from ..jobs.listing import JobFilter
    from ..store.database import Database
    from ..store.sweeps import SweepRecord


@dataclass(frozen=True)
class Summary:
    """A sweep in short. `done`: the trials with an end on the first rung; `best` is of the highest rung with a result.

    `step` is the step of `best`. Money in micro-dollars.
    """

    sweep: SweepRecord
    metric: str
    done: int
    trials: int
    best: float | None
    step: int | None
    spent_micro: int
    held_micro: int

    @property
    def progress(self) -> str:
        """The trials and the best metric, in words."""
        best = "" if self.best is None else f", {self.metric} {self.best:.4g}"
        return f"{self.done}/{self.trials} trials{best}"

    @property
    def money(self) -> str:
        """The cost so far, and the share of the limit."""
        limit = self.sweep.limit_micro
        return amount(self.spent_micro) + (f" {100 * self.spent_micro // limit}%" if limit else "")


def chosen(database: Database, choice: JobFilter, *, active: bool = False) -> list[Summary]:
    """Return the sweeps that the filter includes, the newest first; no sweep if the filter names states of jobs."""
    if choice.states and not active:
        return []
    chosen = [
        sweep
        for sweep in sweeps.sweeps(database, active=active)
        if choice.includes(sweep.config["backend"], sweep.created_s, StoredConfig.load(sweep.config))
    ]
    return [summary_of(database, sweep) for sweep in chosen[: choice.limit]]


def summary_of(database: Database, sweep: SweepRecord) -> Summary:
    """Return the sweep in short."""
    from ..planning import search_spec

    search, figures = search_spec.search_of(sweep.config), sweeps.rung_figures(database, sweep.id)
    values = [(each.greatest if search.mode == "max" else each.least, each.rung) for each in figures]
    best, rung = next(((value, rung) for value, rung in reversed(values) if value is not None), (None, None))
    done = figures[0].ended if figures and figures[0].rung == 0 else 0
    step = None if rung is None else search.rungs[min(rung, len(search.rungs) - 1)]
    metric = search_spec.metric_of(sweep.config)
    return Summary(sweep, metric, done, search.trials, best, step, *sweeps.spent_and_held(database, sweep.id))


def as_json(found: Summary) -> dict[str, Any]:
    """Return the sweep with stable names: money in dollars."""
    sweep, limit = found.sweep, found.sweep.limit_micro
    return {
        "sweep": sweep.id,
        "name": sweep.config["name"],
        "backend": sweep.config["backend"],
        "state": sweep.state,
        "algorithm": sweep.config["sweep"]["algorithm"],
        "trials_done": found.done,
        "trials": found.trials,
        "metric": found.metric,
        "best": finite(found.best),
        "best_step": found.step,
        "spend_usd": found.spent_micro / 1e6,
        "held_usd": found.held_micro / 1e6,
        "limit_usd": None if limit is None else limit / 1e6,
        "created_s": sweep.created_s,
    }
