"""A plan's advice: the savings of methods that send less or wait less, from the newest diagnosis of the job."""

from __future__ import annotations

from cloudtrain.entrypoints.rank import savings

from ..config.schema import JobConfig
from ..store.home import home
from ..store.registry import Registry

_LONGEST_NAME = 31  # of a job's own name in the name of its diagnosis


def diagnosis_name(name: str) -> str:
    """Return the name of the job that diagnoses the job of this name."""
    return f"{name[:_LONGEST_NAME]}-diagnose"


def advice(config: JobConfig, ranks: int) -> str | None:
    """Return the expected savings on `ranks` ranks; None without a diagnosis, or if the network costs little."""
    if config.training is None or ranks < 2:
        return None
    wanted = diagnosis_name(config.name)
    diagnoses = [job for job in Registry(home()).jobs() if job.name == wanted and job.attempt.progress.get("diagnosis")]
    if not diagnoses:
        return None
    newest = max(diagnoses, key=lambda job: job.created_s)
    step = _measured(newest.attempt.progress["diagnosis"].get("step"))
    if step is None:
        return None
    return f"by {newest.id}, {savings.in_words(step, ranks, savings.expected_steps(step, ranks))}"


def _measured(given: object) -> savings.MeasuredStep | None:
    """Return the step of a diagnosis, or None for invalid values: jobs write the diagnosis."""
    if not isinstance(given, dict):
        return None
    values = [given.get(name) for name in ("compute_s", "gradient_bytes", "bandwidth", "states")]
    ranks_s = given.get("rank_s")
    of_ranks = tuple(ranks_s) if isinstance(ranks_s, list) else ()
    if not all(isinstance(value, int | float) and value >= 0 for value in (*values, *of_ranks)):
        return None
    compute_s, size, bandwidth, states = values
    step = savings.MeasuredStep(compute_s, size, bandwidth, states, of_ranks)  # type: ignore[arg-type]
    return step if min(step.compute_s, step.gradient_bytes, step.bandwidth, *of_ranks) > 0 else None
