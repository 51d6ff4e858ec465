"""The list of jobs, filtered as by `cloudtrain list`; only a page of jobs is read; sweeps stand above."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from ..job import ACTIVE
from ..jobs import listing
from ..jobs.listing import JobFilter
from ..jobs.view import read_view
from ..store.registry import Registry
from ..sweeps import summary

PAGE = 50
SWEEPS = 10  # above the list; `cloudtrain list` has all
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
        """All filters except the text; without a filter, the jobs of sweeps are left out."""
        name, sign, value = self.tag.partition("=")
        return JobFilter(
            states=frozenset(ACTIVE if self.state == "active" else {self.state} - {""}),
            backends=frozenset({self.backend} - {""}),
            tags=((name.strip(), value.strip() if sign else None),) if self.tag else (),
            hides_trials=not self.is_narrow,
        )

    def query(self, **changes: Any) -> str:
        """Return the query of the address: `?state=failed&page=2`, or an empty text."""
        now = replace(self, **changes)
        words = {"state": now.state, "backend": now.backend, "tag": now.tag, "text": now.text}
        given = {name: word for name, word in words.items() if word} | ({"page": now.page} if now.page > 1 else {})
        return f"?{urlencode(given)}" if given else ""


@dataclass(frozen=True)
class Listed:
    """A page of jobs."""

    jobs: list[dict[str, Any]]
    """Each as in `status --json`."""
    count: int
    """Of all matching jobs."""
    pages: int


def listed(registry: Registry, choice: JobListQuery) -> Listed:
    """Return a page of matching jobs, the newest first."""
    lines = listing.chosen(registry, choice.job_filter).lines
    if choice.text:
        found = {row[0] for row in registry.database.execute(_WITH_TEXT, (choice.text.lower(),))}
        lines = [line for line in lines if line.job_id in found]
    shown = registry.numbered([line.seq for line in lines[PAGE * (choice.page - 1) : PAGE * choice.page]])
    jobs = [read_view(registry, job).as_json() for job in shown]
    return Listed(jobs, len(lines), max(1, -(-len(lines) // PAGE)))


def sweeps(registry: Registry, choice: JobListQuery) -> list[dict[str, Any]]:
    """Return the newest sweeps for the first page of all jobs, each as in `list --json`; no sweep below a filter."""
    if choice.is_narrow or choice.page > 1:
        return []
    return [summary.as_json(sweep) for sweep in summary.chosen(registry.database, JobFilter(limit=SWEEPS))]


def choices(registry: Registry) -> dict[str, list[str]]:
    """Return the backends and the tags (`NAME=VALUE`, the most frequent first) to offer as filters."""
    backends = [row[0] for row in registry.database.execute("SELECT DISTINCT backend FROM jobs ORDER BY backend")]
    tags = registry.database.execute(
        "SELECT t.key || '=' || t.value AS tag, COUNT(*) FROM"
        " (SELECT config FROM jobs ORDER BY seq DESC LIMIT 1000) j, json_each(j.config, '$.tags') t"
        " GROUP BY tag ORDER BY COUNT(*) DESC, tag LIMIT 100"
    )
    return {"backends": backends, "tags": [str(row[0]) for row in tags]}
