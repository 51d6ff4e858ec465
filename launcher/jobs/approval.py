"""The last look before money is spent: what will be sent, what it may cost, and whether it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.entrypoints.format import dollars, up
from cloudtrain.launcher.text.terminal import confirm, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from cloudtrain.launcher.planning.prepare import Prepared
    from cloudtrain.launcher.store.registry import Registry

__all__ = ["approved", "require_allowed"]


def approved(prepared: Prepared, *, yes: bool, more: bool = False, check: Callable[[], None] = lambda: None) -> bool:
    """Show the plan, `check` it, and ask about its worst case, and where nobody knows it.

    `more`: on top of what was spent. A budget that ends the job is the answer to that question; one that only alerts
    is none. Raises UsageError where nobody can be asked, and what `check` raises: nobody is asked in vain.
    """
    for line in prepared.lines():
        say(line)
    check()
    plan, budget = prepared.plan, prepared.config.budget
    if plan.worst_case_usd == 0 or (budget is not None and budget.on_limit != "alert"):
        return True
    cost = (
        "at a price that is not known"
        if plan.worst_case_usd is None
        else f"up to {dollars(up(round(plan.worst_case_usd * 1e6)))}"
    )
    if confirm(f"This may cost {cost}{', on top of what was spent' if more else ''}. Send it?", yes=yes):
        return True
    say("not sent")
    return False


def require_allowed(
    registry: Registry, prepared: Prepared, *, key: str | None = None, force: bool = False
) -> list[str]:
    """Return in lines the budgets that a first sending counts against; a known idempotency key `key` sends no job.

    Raises BudgetError if a budget does not hold the job, ConfigError for a slip in the project's name, and for spot
    machines without a proven resume, unless `force`.
    """
    from cloudtrain.launcher.jobs import submit
    from cloudtrain.launcher.money import foretold

    if key is not None and registry.with_key(key) is not None:
        return []
    if prepared.config.resources.spot and not force:
        from cloudtrain.launcher.planning import proofs

        proofs.require(registry.database, prepared)
    if prepared.plan.worst_case_micro == 0:
        return []
    books = foretold.books_of(prepared.config)
    foretold.require_known_project(books)
    submit.require_room(registry, prepared, is_first=True)
    return books.lines(prepared.plan.worst_case_micro)
