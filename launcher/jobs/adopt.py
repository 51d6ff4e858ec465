"""Running jobs without a row in the registry: a backend finds the jobs, and the rows are added again.

A registry may be deleted while jobs run. Each send leaves a record with the job itself (`Shipment.record`). Budgets
hold the worst case of an adopted attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import backend as backends
from ..backend import Check, FoundAttempt
from ..config.schema import JobConfig
from ..errors import CloudtrainError, ConfigError, UsageError
from ..job import Attempt, Job, require_name
from ..money import shared_ledger_sync
from ..plan import Plan
from ..planning.prepare import doubts_of_runtime
from ..store import ledger
from ..store.budgets import Held
from ..store.home import where
from ..store.registry import Registry, this_process
from . import reserve


def record_of(job: Job) -> dict[str, Any]:
    """Return the fields of a registry row, without the config's alerts: an address of an alert may be a secret."""
    attempt, config = job.attempt, {**job.config, "notify": []}
    kept = {key: getattr(job, key) for key in ("name", "created_s", "config_file", "bundle")}
    plan, request = attempt.plan.dump(), attempt.request
    return {**kept, "config": config, "plan": plan, "request": request, "sent_s": attempt.created_s}


def unknown(name: str, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
    """Return the running attempts on the backend without a row, none of a backend that lists no jobs; makes no home."""
    if not isinstance(backend := backends.load(name), backends.Lists):
        return []
    known: set[tuple[str, int]] = set()
    if (home / "registry.sqlite").exists():
        registry = Registry(home)
        rows = registry.database.execute("SELECT job_id, number FROM attempts")
        known = {(row["job_id"], row["number"]) for row in rows}
        registry.close()
    return [found for found in backend.jobs(config, home) if (found.job_id, found.number) not in known]


def checks(name: str, config: JobConfig | None) -> list[Check]:
    """Return doctor's checks of the backend, with a line for jobs that the registry does not know."""
    results = [*backends.load(name).doctor(config), *(doubts_of_runtime(config) if config else ())]
    try:
        found = unknown(name, config, where())
    except CloudtrainError as error:
        if any(check.verdict == "fail" for check in results):  # a line says why already
            return results
        return [*results, Check("jobs", "warn", f"cannot be listed: {error.message}", error.hint)]
    own = sorted({each.job_id for each in found if each.is_own})
    others = sorted({each.job_id for each in found if not each.is_own})
    if own:
        what = f"the registry does not know {len(own)} running: {', '.join(own)}"
        results = [*results, Check("jobs", "warn", what, f"adopt them: cloudtrain adopt --backend {name}")]
    if others:
        what = f"{len(others)} running, sent from other homes: {', '.join(others)}"
        results = [*results, Check("other jobs", "ok", what, "if one is yours: cloudtrain adopt JOB")]
    return results


def row_of(backend: str, found: FoundAttempt) -> Job:
    """Return the job for the registry. Raises ConfigError for a record that is missing or damaged."""
    try:
        require_name(found.job_id)
        record: Mapping[str, Any] = found.record or {}
        plan, request = Plan.load(dict(record["plan"])), dict(record["request"])
        who = {**this_process(), "backend": backend}
        attempt = Attempt(found.job_id, found.number, "intent", plan, request, float(record["sent_s"]), who)
        return Job(
            id=found.job_id,
            name=str(record["name"]),
            backend=backend,
            created_s=float(record["created_s"]),
            config=dict(record["config"]),
            config_file=str(record["config_file"]),
            bundle=dict(record["bundle"]),
            attempt=attempt,
        )
    except (KeyError, TypeError, ValueError, UsageError) as error:
        message = f"{found.job_id} cannot be adopted: its record is missing or damaged"
        hint = "on ssh give the config with all its hosts (-f); else stop the job with the platform's own tools"
        raise ConfigError(message, where=backend, hint=hint) from error


def adopt(registry: Registry, job: Job, found: FoundAttempt) -> None:
    """Add the job's row, and reserve its worst case in all budgets, whether they have room or not."""
    attempt, database = job.attempt, registry.database
    places = reserve.ledgers_of(registry, job.config) if found.is_own else []
    with database.transaction():
        registry.adopt(job, dict(found.ref))
        project, amount_micro = reserve.project_of(job.config), reserve.amount_of(attempt.plan)
        held = Held(job.id, attempt.number, project, amount_micro, attempt.created_s)
        ledger.adopt(database, held, ledgers=places)
    shared_ledger_sync.push(database)
