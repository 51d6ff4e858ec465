"""The values of the pages (the list, a job, a resume, the costs), and the effects of the buttons.

The list is filtered as by `cloudtrain list`; only a page of jobs is read.
A job has the facts of `status`, the costs the figures of `cost`. A button calls the same functions as
`cloudtrain stop` and `cloudtrain resume`, with the same rules.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from ..errors import BudgetError, UsageError
from ..job import ACTIVE, Job
from ..jobs import listing, poller, queue, retry, submit
from ..jobs.approval import cost_words
from ..jobs.listing import JobFilter
from ..jobs.refresh import refresh
from ..jobs.view import lines_before, read_view
from ..metering import meter
from ..money import budget_text, period, unit_cost
from ..planning.prepare import Prepared
from ..report.data import chart_data
from ..store import ledger, series
from ..store.budgets import month_of, month_span
from ..store.database import Database
from ..store.registry import Registry
from ..sweeps import overview
from .site import Pages
from .sse import Shown

JOB_PARTS = ("head", "actions", "facts", "error", "trials", "attempts", "tries", "stop")
MONTHS = 12
MOST_ROWS = 20
PAGE = 50
STATES = ("active", "pending", "running", "stopping", "succeeded", "failed", "stopped")
MOST_WORD = 200
_WITH_TEXT = (
    "SELECT jobs.id FROM jobs JOIN attempts a ON a.job_id = jobs.id AND a.number ="
    " (SELECT MAX(number) FROM attempts WHERE job_id = jobs.id)"
    " WHERE instr(lower(jobs.id), ?1) OR instr(lower(jobs.config_file), ?1) OR instr(lower(a.outcome), ?1)"
    " OR instr(lower(COALESCE(json_extract(jobs.config, '$.tags'), '')), ?1)"
)


@dataclass(frozen=True)
class JobListQuery:
    """The filters; an empty text selects all jobs."""

    state: str = ""
    backend: str = ""
    tag: str = ""
    """`NAME`, or `NAME=VALUE`."""
    text: str = ""
    page: int = 1
    """Counts from 1."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> JobListQuery:
        """Return the filters of an address; invalid values are ignored."""
        state, page = query.get("state", ""), query.get("page", "1")
        return cls(
            state if state in STATES else "",
            query.get("backend", "")[:MOST_WORD],
            query.get("tag", "").strip()[:MOST_WORD],
            query.get("text", "").strip()[:MOST_WORD],
            min(int(page), 10**6) if page.isascii() and page.isdecimal() and 0 < len(page) < 9 and int(page) else 1,
        )

    @property
    def is_narrow(self) -> bool:
        """Whether a filter is set."""
        return bool(self.state or self.backend or self.tag or self.text)

    @property
    def job_filter(self) -> JobFilter:
        """All filters except the text."""
        name, sign, value = self.tag.partition("=")
        states = frozenset(ACTIVE if self.state == "active" else {self.state} - {""})
        tags = ((name.strip(), value.strip() if sign else None),) if self.tag else ()
        return JobFilter(states=states, backends=frozenset({self.backend} - {""}), tags=tags)

    def query(self, **changes: Any) -> str:
        """Return the query of the address: `?state=failed&page=2`, or an empty text."""
        now = replace(self, **changes)
        words = {"state": now.state, "backend": now.backend, "tag": now.tag, "text": now.text}
        given = {name: word for name, word in words.items() if word} | ({"page": now.page} if now.page > 1 else {})
        return f"?{urlencode(given)}" if given else ""


def listed(registry: Registry, choice: JobListQuery) -> dict[str, Any]:
    """Return a page of matching jobs, the newest first, each as in `status --json`; the count of jobs and of pages."""
    lines = listing.chosen(registry, choice.job_filter).lines
    if choice.text:
        found = {row[0] for row in registry.database.execute(_WITH_TEXT, (choice.text.lower(),))}
        lines = [line for line in lines if line.job_id in found]
    shown = registry.numbered([line.seq for line in lines[PAGE * (choice.page - 1) : PAGE * choice.page]])
    jobs = [read_view(registry, job).as_json() for job in shown]
    return {"jobs": jobs, "count": len(lines), "pages": max(1, -(-len(lines) // PAGE))}


def choices(registry: Registry) -> dict[str, list[str]]:
    """Return the backends and the tags (`NAME=VALUE`, the most frequent first) to offer as filters."""
    backends = [row[0] for row in registry.database.execute("SELECT DISTINCT backend FROM jobs ORDER BY backend")]
    tags = registry.database.execute(
        "SELECT t.key || '=' || t.value AS tag, COUNT(*) FROM"
        " (SELECT config FROM jobs ORDER BY seq DESC LIMIT 1000) j, json_each(j.config, '$.tags') t"
        " GROUP BY tag ORDER BY COUNT(*) DESC, tag LIMIT 100"
    )
    return {"backends": backends, "tags": [str(row[0]) for row in tags]}


def job_parts(pages: Pages, registry: Registry, job_id: str, fault: str) -> Shown:
    """Return the current parts of the page; `fault`: the error of the last poll of the job."""
    values = job_values(registry, job_id, fault)
    parts = {name: pages.render(f"_job_{name}.html", **values) for name in JOB_PARTS}
    newest = "SELECT COUNT(*), MAX(attempt), MAX(time_s) FROM points WHERE job_id = ?"
    marks = registry.database.execute(newest, (values["job"]["job"],))[0]
    return Shown(parts, is_live=values["is_active"], curves=tuple(marks))


def job_values(registry: Registry, job_id: str, fault: str = "") -> dict[str, Any]:
    """Return the templates' values of a job. Raises NoSuchJobError."""
    job = registry.find(job_id)
    view = read_view(registry, job)
    shown, state = view.as_json(), view.state
    return {
        "job": shown,
        "view": view,
        "is_active": job.active,
        "can_stop": job.active and job.attempt.ref is not None and state.state != "stopping",
        "can_kill": job.active and poller.pace_of(job).can_kill,
        "can_resume": not job.active and state.state != "succeeded" and not registry.never_ran(job),
        "bought": "" if job.active else unit_cost.in_words(unit_cost.achieved(view.attempts, view.now_s)),
        "attempts": [
            (each, attempt, meter.held_s(attempt, view.now_s))
            for each, attempt in zip(shown["attempts"], view.attempts, strict=True)
            if attempt in view.runs
        ][::-1],
        "before": [] if job.active else lines_before(registry, job),
        "fault": fault,
        "sweep": overview.as_json(registry.database, job) if job.config.get("sweep") else None,
        "words": overview,
    }


def curves(registry: Registry, job_id: str) -> str:
    """Return the data of a job's charts as JSON."""
    view = read_view(registry, registry.find(job_id))
    data = chart_data(view, series.drawable(series.read(registry.database, view.job.id)))
    return json.dumps(data, allow_nan=False)


@dataclass(frozen=True)
class ResumeOffer:
    """The next attempt that a resume would send, described as by `resume` before its question."""

    attempt: int
    """The user agrees to this number and to `worst_micro`; an attempt with different values is not sent."""
    lines: list[str]
    cost: str
    worst_micro: int | None
    """Millionths of a dollar; None if the price is unknown."""
    refusal: str = ""
    """Why a resume would be refused."""


def resume_offer(registry: Registry, job_id: str, budget: str = "") -> ResumeOffer:
    """Return the next attempt, with the budget raised by `+50` or set to `200 USD`. Raises CloudtrainError."""
    job = refresh(registry, registry.find(job_id))
    number = job.attempt.number + 1
    try:
        prepared = _prepared(registry, job, budget)
        submit.require_room(registry, prepared, is_first=False)
    except BudgetError as error:
        return ResumeOffer(number, [], "", None, refusal=str(error))
    lines = prepared.lines(job)
    if job.attempt.state.all_damaged:
        lines.insert(0, retry.ALL_DAMAGED)
    elif not retry.has_saved(registry, job):
        lines.insert(0, "no checkpoint of this job yet: starting from the beginning")
    return ResumeOffer(number, lines, cost_words(prepared.plan), prepared.plan.most_micro)


def resume(registry: Registry, job_id: str, *, attempt: int, worst_micro: int | None, budget: str = "") -> str:
    """Send the next attempt if the offer still holds; return a message. Raises CloudtrainError."""
    job = refresh(registry, registry.find(job_id))
    prepared = _prepared(registry, job, budget)
    if job.attempt.number + 1 != attempt:
        raise UsageError(f"{job.id} was already resumed", hint="look at the job")
    now_micro = prepared.plan.most_micro
    if worst_micro is not None and (now_micro is None or now_micro > worst_micro):
        message = f"it may now cost {cost_words(prepared.plan)}, which is more than was shown"
        raise UsageError(message, hint="look at it again")
    submit.require_room(registry, prepared, is_first=False)
    job = queue.drive(registry, submit.resend(registry, job, prepared, start_over=job.attempt.state.all_damaged))
    return f"{'in line' if job.attempt.phase == 'queued' else 'sent'}: {job.id}, attempt {job.attempt.number}"


def spend_values(database: Database, month: str, by: str) -> dict[str, Any]:
    """Return the page's values for a month (`2026-11`; if invalid, the current month), grouped by `by`."""
    now_s = time.time()
    year, number = map(int, month_of(now_s).split("-"))
    last = year * 12 + number - 1
    names = [f"{count // 12:04d}-{count % 12 + 1:02d}" for count in range(last - MONTHS + 1, last + 1)]
    month = month if month in names else names[-1]
    spans = {name: month_span(name) for name in names}
    sums = period.spent_in(database, spans, now_s)
    chosen = period.labelled(database, sums[month])
    listed = [job for job in chosen if job.state != "removed"]  # a removed job has no page
    tags = sorted({name for job in chosen for name in job.tags})
    kinds = ["backend", "project", "name", *(f"tag:{name}" for name in tags)]
    by = by if by in kinds else "backend"
    groups = period.grouped(chosen, by)
    return {
        "month": month,
        "by": by,
        "kinds": kinds,
        "months": {name: period.total(sums[name]) for name in names},
        "whole": period.total(chosen),
        "groups": groups[:MOST_ROWS],
        "more_groups": max(0, len(groups) - MOST_ROWS),
        "jobs": listed[:MOST_ROWS],
        "more_jobs": max(0, len(listed) - MOST_ROWS),
        "budgets": [(budget_text.cells_of(row), row) for row in budget_text.own_rows(database, now_s)],
        "shared": sorted(set(ledger.ledgers(database).values())),
        "unpriced": ledger.unpriced(database),
    }


def _prepared(registry: Registry, job: Job, budget: str) -> Prepared:
    retry.require_ended(registry, job)
    prepared = retry.prepare_next(registry, job, [retry.budget_setting(job, budget)] if budget else [])
    older = retry.older_start(registry, job, prepared.config)
    retry.require_newest(older, f"cloudtrain resume {job.id} --from-older", from_older=False)
    return prepared
