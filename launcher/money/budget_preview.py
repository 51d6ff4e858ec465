"""Preview, from local state, of the budgets that apply to a job before its send; no writes, no requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import left, usd, whole

from ..errors import CloudtrainError, ConfigError, Fault
from ..store import agent_limit
from ..store.budgets import AGENT, OVERALL, Standing, refusal
from ..store.home import where
from .budget_text import budget_json
from .conditional import located

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..store.database import Database

MOST_NAMED = 5
LIKENESS = 0.75  # from this ratio of difflib's a name counts as a misspelling


@dataclass(frozen=True)
class ApplicableBudgets:
    """The budgets that apply to a job of `project` on this machine; the ledgers in `shared` are asked at submit.

    `budgeted`: the projects with a budget. `trouble`: the error if the budgets could not be read.
    """

    project: str
    standings: tuple[Standing, ...] = ()
    shared: tuple[str, ...] = ()
    budgeted: tuple[str, ...] = ()
    trouble: str = ""

    @property
    def is_unknown(self) -> bool:
        """Whether some projects have budgets, but not this project (or a job without a project)."""
        return bool(self.budgeted) and self.project not in self.budgeted

    def refused(self, amount_micro: int | None) -> str:
        """Return why a submit would refuse a job with the worst case `amount_micro`; empty if accepted."""
        if amount_micro == 0:
            return ""
        if (slip := _slip(self)) is not None:
            return slip.message + f"; {slip.hint}"
        return "; ".join(text for standing in self.standings for text in refusal(standing, amount_micro))

    def lines(self, amount_micro: int | None) -> Iterator[str]:
        """Yield text: the budgets that apply to a job with this worst case, and whether they have room."""
        if amount_micro == 0:
            return
        for standing in self.standings:
            room = f", room for worst cases of {whole(left(standing.room_micro))}"
            more = room if standing.budget.overcommit_percent != 100 else ""
            yield f"counts against {standing.budget.title} ({standing.left_words}{more})"
            if (above := standing.budget.ask_above_micro) is not None and (amount_micro or 0) > above:
                yield f"more than {usd(above)}: needs the owner's approval"
        for place in self.shared:
            yield f"counts against the shared ledger {place}, checked at submit"
        if self.trouble:
            yield f"the budgets could not be checked: {self.trouble}"
        yield from self.unknown()
        if why := self.refused(amount_micro):
            is_held = any(standing.held for standing in self.standings)
            yield f"would be refused: {why}{' (unless a job has ended since: submit checks again)' if is_held else ''}"

    def unknown(self) -> Iterator[str]:
        """Yield a line if the project has no budget while some projects do; a job may have no project on purpose."""
        if self.project and self.is_unknown:
            named = ", ".join(self.budgeted[:MOST_NAMED]) + (", ..." if len(self.budgeted) > MOST_NAMED else "")
            yield f"project {self.project}: no budget of its own (known: {named})"

    def dump(self, amount_micro: int | None) -> dict[str, Any]:
        """Return the preview for JSON."""
        return {
            "project": self.project or None,
            "against": [
                {key: row[key] for key in ("project", "period", "limit_usd", "left_usd", "room_usd")}
                for row in map(budget_json, self.standings)
            ],
            "shared": list(self.shared),
            "refused": self.refused(amount_micro) or None,
            "unknown_project": self.is_unknown,
            "error": self.trouble or None,
        }


def books_of(config: JobConfig) -> ApplicableBudgets:
    """Return the budgets that apply to a job of this config on this machine; nothing is written."""
    project = config.project.name if config.project else OVERALL
    given = config.project.ledger if config.project else None
    shared = (located(given),) if given else ()
    try:
        folder, agents = where(), list[Standing]()
        if agent_limit.limits():
            from . import shared_ledger  # a dry run without a limit for agents needs no ledger

            agents = shared_ledger.standings(agent_limit.place())
        if not (folder / "registry.sqlite").exists():
            return ApplicableBudgets(project, tuple(agents), shared)
        from ..store import ledger
        from ..store.database import Database  # a dry run without a registry needs no sqlite3

        database = Database(folder)
        known = ledger.ledgers(database)
        own = shared or ((known[project],) if project in known else ())
        places = tuple(dict.fromkeys([*own, *([known[OVERALL]] if OVERALL in known else [])]))
        budgeted = budgeted_in(database) | ({project} if places else set())  # submit checks the shared ledger
        standings = ledger.standings(database, time.time(), project)
        database.close()
        return ApplicableBudgets(project, (*standings, *agents), places, tuple(sorted(budgeted - {OVERALL})))
    except CloudtrainError as error:
        return ApplicableBudgets(project, shared=shared, trouble=error.message)
    except (OSError, RuntimeError) as error:  # RuntimeError: `~nobody`
        return ApplicableBudgets(project, shared=shared, trouble=str(error))


def require_known_project(books: ApplicableBudgets) -> None:
    """Raise ConfigError if the project has no budget and its name looks like a misspelled project with a budget."""
    if (slip := _slip(books)) is not None:
        raise ConfigError([slip])


def budgeted_in(database: Database) -> set[str]:
    """Return the projects with a budget that this installation knows, own or shared."""
    from ..store import ledger

    return ({budget.project for budget in ledger.budgets(database)} | set(ledger.ledgers(database))) - {OVERALL, AGENT}


def _slip(books: ApplicableBudgets) -> Fault | None:
    from difflib import get_close_matches

    if not books.project or not books.is_unknown:
        return None
    near = get_close_matches(books.project, books.budgeted, 1, LIKENESS)
    if not near:
        return None
    hint = f"did you mean `{near[0]}`? Else give it one: cloudtrain budget set {books.project} 100USD"
    return Fault(f"project {books.project} has no budget", key="project", hint=hint)
