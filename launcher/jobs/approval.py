"""The approval of a submit: show the plan, check the budgets, and ask the user about the worst case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.entrypoints.format import most

from ..text.terminal import confirm, say, say_each

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..job import Job
    from ..plan import Plan
    from ..planning.prepare import Prepared
    from ..store.registry import Registry


def approved(
    prepared: Prepared, *, yes: bool, before: Job | None = None, check: Callable[[], None] = lambda: None
) -> bool:
    """Show the plan, call `check`, and return whether the user accepts the worst case, or an unknown price.

    `before`: the job that is resumed; the cost comes on top. A cost of 0 needs no answer, and a budget that ends the
    job replaces the answer. A resume that sends the code and config of a failed attempt again still needs an answer.
    Raises the errors of `check`, before any question, and UsageError if the input is not a terminal.
    """
    from ..advice import memory

    needed = memory.of_plan(prepared, measures=False) if before is None else None
    say_each([*prepared.lines(before), *([memory.line(needed)] if needed else [])])
    check()
    plan, budget = prepared.plan, prepared.config.budget
    if plan.most_micro == 0 or (budget is not None and budget.on_limit != "alert"):
        state = before.attempt.state if before is not None and prepared.is_repeat else None
        has_failed = state is not None and state.reason == "error" and not state.all_damaged  # `resume` asks by itself
        return not has_failed or _agrees("Send the same code and config, which failed?", yes)
    return _agrees(f"This may cost {cost_words(plan)}{', on top of what was spent' if before else ''}. Send it?", yes)


def cost_words(plan: Plan) -> str:
    """Return the additional cost in words, as in the question before a send."""
    worst_micro = plan.most_micro
    if worst_micro is None:
        return "at a price that is not known"
    return "nothing" if worst_micro == 0 else f"up to {most(worst_micro)}"


def _agrees(question: str, yes: bool) -> bool:
    if not (is_agreed := confirm(question, yes=yes)):
        say("not sent")
    return is_agreed


def require_allowed(
    registry: Registry, prepared: Prepared, *, key: str | None = None, force: bool = False
) -> list[str]:
    """Return lines about parent and budgets of a first submit; no lines for a known idempotency key, or a cost of 0.

    A known `key` sends no job. A cost of 0 needs no budget, and the node compares the parent. Raises BudgetError if a
    budget has no room, ConfigError for a typo in the project's name. Without `force`, raises ConfigError also for a
    parent whose weights do not fit, and for a job without a proven resume (`advice.proofs`).
    """
    from ..money import budget_preview
    from . import submit

    if key is not None and registry.with_key(key) is not None:
        return []
    from ..advice import proofs

    for each in prepared.candidates or (prepared,):
        if proofs.is_needed(each.config) and not force:
            proofs.require(registry.database, each)
    if prepared.plan.most_micro == 0:
        return []
    books = budget_preview.books_of(prepared.config)
    budget_preview.require_known_project(books)
    submit.require_room(registry, prepared, is_first=True)
    from ..advice import parents  # with the readers of weights, which a job without costs does not need

    found = [] if force else parents.compared(prepared, asks_stores=True)
    return [*found, *books.lines(prepared.plan.most_micro)]
