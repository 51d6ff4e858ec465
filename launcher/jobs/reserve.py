"""Reserve a job's worst case before the send: in the installation's ledger with the journal, then in shared ledgers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloudtrain.entrypoints.format import most, whole

from ..job import Attempt
from ..money import shared_ledger_sync
from ..money.conditional import located
from ..plan import Plan
from ..store import ledger
from ..store.budgets import AGENT, MOST_MICRO, OVERALL, Held, Standing
from ..store.registry import Registry
from .refresh import refresh_active


def reserve(registry: Registry, attempt: Attempt, config: Mapping[str, Any]) -> None:
    """Reserve the attempt's worst case, in the transaction that journals the intent to send. Raises BudgetError."""
    held = Held(attempt.job_id, attempt.number, project_of(config), amount_of(attempt.plan), time.time())
    ledger.reserve(registry.database, held, ledgers=ledgers_of(registry, config))


def reconcile(registry: Registry) -> list[str]:
    """Poll active jobs, and write the ends to the shared ledgers; return an error line for each failure."""
    failures = refresh_active(registry, "{job}: {why}; its worst case stays reserved")
    return failures + shared_ledger_sync.push(registry.database, patient=True)


def words(amount_micro: int | None, standings: Sequence[Standing]) -> Iterator[str]:
    """Yield the lines after a reservation: `reserved 12.30 USD of project vision's 100 USD (41.20 left)`."""
    for standing in standings if amount_micro else ():
        yield f"reserved {whole(most(amount_micro))} of {standing.budget.title} ({standing.left_words})"


def project_of(config: Mapping[str, Any]) -> str:
    """Return the project of a stored config, or OVERALL."""
    project = config.get("project") or {}
    return str(project.get("name") or OVERALL)


def ledgers_of(registry: Registry, config: Mapping[str, Any]) -> list[str]:
    """Return the shared ledgers that count a job: its project's, the overall budget's, that of the owner's limit."""
    given = (config.get("project") or {}).get("ledger")
    known = ledger.ledgers(registry.database)
    own = known.get(project_of(config)) if given is None else located(given)
    return list(dict.fromkeys(uri for uri in (own, known.get(OVERALL), known.get(AGENT)) if uri is not None))


def amount_of(plan: Plan) -> int | None:
    """Return what is held for the plan: all starts by the platform, the dearest candidate; None at an unknown price."""
    return None if plan.most_micro is None else min(plan.most_micro, MOST_MICRO)
