"""cloudtrain from Python: for notebooks and pipelines, by the functions that the command line uses.

    from cloudtrain.launcher.api import Config, submit, wait

    job = submit(Config("cloudtrain.yaml", training={"max_steps": 100}))
    print(wait(job).state)

The import path has three parts because `cloudtrain` is a namespace package, to which plug-ins add packages: no file
`cloudtrain/__init__.py` can hold names.

No function prompts or prints. Messages for people go to the logger `cloudtrain` at level INFO. No question is asked
about costs: set `budget`. The functions raise the exceptions of `cloudtrain.launcher.errors`, listed there. All
functions block; in an asyncio loop call `await asyncio.to_thread(wait, job)`. Every call opens the registry itself, so
threads need no lock. Ctrl-C leaves the job running. `list` is `jobs` under the command's name, left out of `import *`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from cloudtrain.entrypoints.format import counted, dollars

from .errors import UnreachableError, UsageError
from .job import ACTIVE, Job, JobState, require_name
from .jobs import listing, stopping
from .jobs.poller import ask
from .jobs.refresh import refresh, refresh_active
from .jobs.view import failure_lines, read_view
from .money import period
from .store import series
from .store.registry import Registry
from .sweeps.costs import bill_json
from .sweeps.overview import whole_json
from .text.python_words import in_python, speaking
from .text.terminal import say_each

if TYPE_CHECKING:
    from .config import schema
    from .planning.prepare import Prepared

__all__ = ["Config", "DryRun", "JobCost", "JobLine", "JobStatus", "submit", "status", "wait", "logs", "stop"]
__all__ += ["resume", "jobs", "cost", "curves", "artifacts", "sweeps", "trials"]

_PATIENCE_S = 60.0  # for a backend's answer, as `cloudtrain status` waits
_log = logging.getLogger("cloudtrain")


class Config:
    """A checked config, with all defaults. `values` has the keys of cloudtrain.yaml; `file` is the place on disk.

    Config("cloudtrain.yaml", backend="sagemaker")      a file; keywords and `overrides` win over the file
    Config({"name": "digits", "task": "task.py"})       a mapping
    Config(name="digits", task="task.py")               keywords

    Relative paths count from the file's folder, else from `folder` (default: the working folder). `overrides` are
    `a.b=value`, as behind `--set`. Raises ConfigError with every fault.
    """

    values: schema.JobConfig
    file: Path

    def __init__(
        self,
        source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        /,
        *,
        folder: str | os.PathLike[str] = ".",
        backend: str | None = None,
        overrides: Sequence[str] = (),
        **keys: Any,
    ) -> None:
        from . import config
        from .planning.prepare import refused

        with speaking(_log.info):
            if source is None or isinstance(source, Mapping):
                self.file, self._settings = Path(folder) / "Config(...)", tuple(overrides)
                data = {**(source or {}), **keys}
                self.values = config.load(self.file, data=data, backend=backend, overrides=overrides, further=refused)
            else:
                self.file, self._settings = Path(source), (*_settings(keys), *overrides)
                self.values = config.load(self.file, backend=backend, overrides=self._settings, further=refused)

    def __repr__(self) -> str:
        return f"<Config {self.values.name} for {self.values.backend}: {self.file}>"

    def _prepared(self, cache: Path, *, dry: bool) -> Prepared:
        from .advice.preparing import prepare
        from .config import placing

        with placing(self.file, self._settings):
            return replace(prepare(self.values, self.file, cache, dry=dry), settings=self._settings)


@dataclass(frozen=True)
class DryRun:
    """The request of a submit, not sent. `text` is the request as --dry-run prints it; `plan` has ranks and prices."""

    backend: str
    request: dict[str, Any]
    text: str
    files: Mapping[str, str]
    plan: dict[str, Any]
    worst_case_usd: float | None
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<DryRun {self.backend}: {_usd(self.worst_case_usd)} at most, {counted(len(self.warnings), 'warning')}>"


@dataclass(frozen=True)
class JobStatus:
    """A job as last seen.

    `reason`: user, budget, time_limit, paused, preempted, no_machines, node_failure or error. `exit_code`: of
    `cloudtrain wait`, None for an active job. `unreachable`: the backend did not answer. `details`: the JSON of
    `cloudtrain status`. A job that was never sent has the state `failed`, and `details["phase"]` is `never_sent`.
    """

    id: str
    name: str
    backend: str
    state: JobState
    reason: str | None
    resumable: bool
    attempt: int
    step: int | None
    max_steps: int | None
    loss: float | None
    checkpoint_step: int | None
    cost_usd: float | None
    limit_usd: float | None
    error: str | None
    url: str | None
    exit_code: int | None
    unreachable: bool
    details: dict[str, Any] = field(repr=False)

    def __repr__(self) -> str:
        state = self.state if self.reason is None else f"{self.state} ({self.reason})"
        steps = "" if self.step is None else f", step {self.step}" + (f"/{self.max_steps}" if self.max_steps else "")
        loss = f", loss {self.loss:.4g}" if isinstance(self.loss, float) else ""
        return f"<JobStatus {self.id} on {self.backend}: {state}{steps}{loss}, {_usd(self.cost_usd)}>"

    @property
    def active(self) -> bool:
        """Whether the job may still run."""
        return self.state in ACTIVE


@dataclass(frozen=True)
class JobLine:
    """One line of a job's log. A node's own messages have no `rank`; `event` holds the fields of an event line."""

    text: str
    node: int
    rank: int | None
    time_s: float
    attempt: int
    event: dict[str, Any] | None


@dataclass(frozen=True)
class JobCost:
    """The cost of a job or a span of time; `rows`: legs, jobs or sums; `details`: the JSON of `cloudtrain cost`."""

    cost_usd: float | None
    limit_usd: float | None
    rows: tuple[dict[str, Any], ...]
    details: dict[str, Any]

    def __repr__(self) -> str:
        return f"<JobCost of {self.details.get('job', 'all jobs')}: {_usd(self.cost_usd)}>"


@overload
def submit(config: Config, *, dry_run: Literal[True]) -> DryRun: ...


@overload
def submit(
    config: Config, *, name: str | None = None, idempotency_key: str | None = None, force: bool = False
) -> JobStatus: ...


def submit(
    config: Config,
    *,
    dry_run: bool = False,
    name: str | None = None,
    idempotency_key: str | None = None,
    force: bool = False,
) -> JobStatus | DryRun:
    """Send a job and return its status at once; with `dry_run` return the request and send no job.

    A second call with the same `idempotency_key` returns the first call's job. `force` allows spot machines without a
    rehearsal, and a parent that seems not to fit. Raises ConfigError, UsageError (a `name` that is taken), BudgetError,
    CredentialError, CapacityError, UnreachableError (the job may have been sent: use `idempotency_key` to retry).
    """
    from .config import placing
    from .jobs import queue
    from .jobs import submit as sending
    from .jobs.approval import require_allowed

    if name is not None:
        require_name(name)
    if dry_run:
        with speaking(_log.info):
            prepared = config._prepared(Path(), dry=True)
        request, plan = prepared.request, prepared.plan
        shown = (request.body, request.text, dict(request.files), plan.dump(), plan.worst_case_usd)
        return DryRun(config.values.backend, *shown, tuple(map(in_python, (*prepared.notes, *prepared.warnings))))
    with _opened() as registry:
        prepared = config._prepared(registry.folder / "bundles", dry=False)
        with placing(config.file, config._settings):
            require_allowed(registry, prepared, key=idempotency_key, force=force)
        job, _ = sending.send(registry, prepared, name=name, key=idempotency_key)
        return _status_of(registry, queue.drive(registry, job))


def status(job: str | JobStatus) -> JobStatus:
    """Return the job's status. `job` is an id, a name, a unique prefix, `last`, or an earlier status.

    A backend that is silent for a minute sets `unreachable`. Raises NoSuchJobError, CredentialError, ConfigError.
    """
    with _opened() as registry:
        answers = ask(registry, [registry.find(_id(job))], _PATIENCE_S)
        for fault in answers.faults.values():
            if not isinstance(fault, UnreachableError):
                raise fault
        seen = _status_of(registry, answers.jobs[0])
        return replace(seen, unreachable=seen.unreachable or bool(answers.faults))


def wait(job: str | JobStatus, *, timeout_s: float | None = None) -> JobStatus:
    """Wait for the job's end and return its status; retries of the config and notices are sent meanwhile.

    Raises TimeoutError if the job has not ended after `timeout_s`; a failed job raises no exception.
    """
    from .jobs import follow

    with _opened() as registry:
        found = registry.find(_id(job))
        if follow.wait(registry, [found], timeout_s, lambda _: None, quiet=True) == 124:
            raise TimeoutError(f"{found.id} has not ended after {timeout_s:g} s")
        return _status_of(registry, registry.find(found.id))


def logs(
    job: str | JobStatus,
    *,
    follow: bool = False,
    ranks: Iterable[int] | None = None,
    tail: int | None = None,
    attempt: int | None = None,
) -> Iterator[JobLine]:
    """Return the job's lines of all nodes and ranks, in time order; with `follow` until the job ends.

    `ranks` limits the lines to these ranks, `tail` to the last lines; `attempt` names an earlier attempt. Following
    sends retries and notices, as `wait` does. Raises NoSuchJobError, UnreachableError (not while following).
    """
    with _opened() as registry:
        found = refresh(registry, registry.find(_id(job)))
        if attempt is not None and attempt != found.attempt.number:
            found, follow = replace(found, attempt=registry.attempt(found, attempt)), False
    return _lines(found, None if ranks is None else frozenset(ranks), tail, follow)


def stop(job: str | JobStatus, *, now: bool = False) -> JobStatus:
    """Ask the job to save and stop, and return at once; `now` ends the job without saving, if the backend can.

    Raises NoSuchJobError, UsageError (the job is being submitted), UnreachableError, CredentialError.
    """
    with _opened() as registry:
        asked = stopping.ask(registry, _id(job), now=now)
        if asked.verdict == "doubtful":
            raise UnreachableError(asked.words, hint=f"try again later, or look: {stopping.where_to_look(asked.job)}")
        if asked.verdict == "unsent":
            raise UsageError(asked.words)
        _log.info("%s", asked.words)
        return _status_of(registry, registry.find(asked.job.id))


def resume(
    job: str | JobStatus,
    *,
    budget: str | None = None,
    trials: str | None = None,
    overrides: Sequence[str] = (),
    update_code: bool = False,
    update_config: bool = False,
    start_over: bool = False,
    from_older: bool = False,
    **keys: Any,
) -> JobStatus:
    """Send the next attempt of an ended job, from the newest checkpoint; return the status at once.

    Code and config are the submitted ones, but for `overrides`, keywords (`resources={"instances": 4}`) and `budget`
    ("+50USD" or "200USD"); `trials` ("+40" or "67") is for a sweep; `update_code` packs the code folder again,
    `update_config` reads the config file. If all checkpoints are damaged, the job trains from step 0 with `start_over`,
    else UsageError is raised. If the newest checkpoint cannot be reached, the job goes on from an older step with
    `from_older`, else UsageError is raised. A done job goes on only with a change, for example more steps. Raises what
    `submit` raises.
    """
    from .jobs import queue, retry
    from .jobs import submit as sending

    with _opened() as registry:
        found = refresh(registry, registry.find(_id(job)))
        is_changed = bool(overrides or keys or trials or update_code or update_config)
        retry.require_ended(registry, found, is_changed=is_changed)
        if (all_damaged := found.attempt.state.all_damaged) and not start_over:
            raise UsageError(retry.ALL_DAMAGED, hint="add start_over=True")
        settings = [*_settings(keys), *overrides, *([retry.budget_setting(found, budget)] if budget else [])]
        settings += [f"sweep.trials={retry.trials_after(registry, found, trials)}"] if trials else []
        updates = {"update_code": update_code, "update_config": update_config, "from_older": from_older}
        prepared = retry.prepare_next(registry, found, settings, **updates)
        older = retry.older_start(registry, found, prepared.config)
        retry.require_newest(older, "add from_older=True", from_older=from_older)
        sending.require_room(registry, prepared, is_first=False)
        sent = sending.resend(registry, found, prepared, start_over=all_damaged)
        return _status_of(registry, queue.drive(registry, sent))


def jobs(
    *,
    active: bool = False,
    states: Iterable[str] = (),
    backends: Iterable[str] = (),
    project: str | None = None,
    tags: Mapping[str, str | None] | None = None,
    since: str | None = None,
    limit: int | None = None,
) -> Sequence[JobStatus]:
    """Return the jobs of this home, the newest first; those that may run are asked for their state, all at once.

    `tags`: their values, None for any value. `since`: `7d`, or a day such as `2026-11-03`. `unreachable`: as last seen.
    """
    with _opened() as registry:
        wanted, since_s = frozenset(ACTIVE if active else states), None if since is None else period.begin_of(since)
        choice = listing.JobFilter(wanted, frozenset(backends), project, tuple((tags or {}).items()), since_s, limit)
        listed = listing.chosen(registry, choice, ask, described=True)
        found = (_status(json.loads(row.described)) for row in listed.lines)
        return [replace(each, unreachable=each.unreachable or each.id in listed.faults) for each in found]


def cost(
    job: str | JobStatus | None = None, *, month: str | None = None, since: str | None = None, by: str | None = None
) -> JobCost:
    """Return the cost of a job, or of all jobs in a month (`2026-11`, by default the present one) or `since` (`7d`).

    `by` sums by `project`, `backend`, `name` or `tag:NAME`. Raises NoSuchJobError, UsageError.
    """
    with _opened() as registry:
        if job is None:
            span_s = period.span_of(month, since)
            period.require_by(by)
            say_each(refresh_active(registry))
            spent = period.spent_between(registry.database, *span_s, time.time(), labels=True)
            found = period.as_json(spent, None if by is None else period.grouped(spent, by))
        else:
            found = bill_json(registry.database, read_view(registry, refresh(registry, registry.find(_id(job)))))
    rows = next(found[name] for name in ("legs", "groups", "jobs") if name in found)
    return JobCost(found["spend_usd"], found.get("limit_usd"), tuple(rows), found)


def curves(job: str | JobStatus) -> dict[str, Sequence[Any]]:
    """Return the points that the report draws in columns of equal length, as pandas.DataFrame takes them.

    A point is of a step (loss, and what else the job reports) or of an evaluation (its metrics), by attempt, time_s in
    unix seconds, and step. None stands for an absent number.
    """
    with _opened() as registry:
        points = series.read(registry.database, refresh(registry, registry.find(_id(job))).id).points
    rows = []
    for each in (point for point in points if point.kind in ("step", "eval")):
        told = each.fields if each.kind == "step" else each.fields.get("metrics") or {}
        rows.append({"attempt": each.attempt, "time_s": each.time_s, "step": each.step, **told})
    found = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    return {name: [float(each) if isinstance(each, str) else each for each in of] for name, of in found.items()}


def artifacts(job: str | JobStatus, folder: str | os.PathLike[str] | None = None) -> Sequence[Path]:
    """Fetch the job's output files to the folder, by default JOB-output, and return their paths."""
    from .jobs import artifacts

    with _opened() as registry:
        found = refresh(registry, registry.find(_id(job)))
        return artifacts.fetch(found, Path(folder or f"{found.id}-output"))


def sweeps(**filters: Any) -> Sequence[JobStatus]:
    """Return the sweeps of this home, with the filters of `jobs`."""
    return [job for job in jobs(**filters) if job.details.get("trials") is not None]


def trials(job: str | JobStatus) -> Sequence[dict[str, Any]]:
    """Return all trials of a sweep that have begun, the best first, those without a result last, for a DataFrame.

    `value` is the metric at `step`, the last result; `values` has the keys. Raises UsageError for any other job.
    """
    from .report.sweep_page import sweep_json

    with _opened() as registry:
        found = refresh(registry, registry.find(_id(job)))
        if not found.config.get("sweep"):
            raise UsageError(f"{found.id} is no sweep: it has no trials")
        ends: Sequence[dict[str, Any]] = sweep_json(registry, found, time.time())["ends"]
        return ends


def _usd(usd: float | None) -> str:
    return "price unknown" if usd is None else dollars(usd * 1e6)


@contextlib.contextmanager
def _opened() -> Iterator[Registry]:
    with speaking(_log.info), contextlib.closing(Registry()) as registry:
        yield registry


def _id(job: str | JobStatus) -> str:
    return job if isinstance(job, str) else job.id


def _settings(keys: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield nested keywords as `a.b=value`, with the value as JSON, which is YAML; dotted keys stay in their value."""
    for key, value in keys.items():
        if isinstance(value, Mapping) and value and not any("." in each for each in value):
            yield from _settings(value, f"{above}{key}.")
        else:
            yield f"{above}{key}={re.sub(r'[$]{(?!CLOUDTRAIN_)', '$${', json.dumps(value, default=os.fspath))}"


def _status_of(registry: Registry, job: Job) -> JobStatus:
    return _status(whole_json(registry, read_view(registry, job)))


def _status(found: dict[str, Any]) -> JobStatus:
    """Return the status of a job's JSON; of a job that cannot be described, the JSON has few keys and `fault`."""
    told = failure_lines(found["error"])[0] if found.get("error") else found.get("detail") or found.get("fault")
    known: dict[str, Any] = {each.name: found.get(each.name) for each in fields(JobStatus)}
    known |= {"id": found["job"], "cost_usd": found.get("spend_usd"), "error": told and in_python(told)}
    return JobStatus(**known | {"unreachable": found.get("unreachable_since_s") is not None, "details": found})


def _lines(job: Job, ranks: frozenset[int] | None, tail: int | None, following: bool) -> Iterator[JobLine]:
    from cloudtrain.entrypoints import events

    from .jobs.follow import read
    from .logs.view import View

    with contextlib.closing(Registry()) as registry:
        pages = read(registry, job, View(ranks=ranks), tail=tail, following=following)
        try:
            while True:
                with speaking(_log.info):  # ends before the yield, which runs the caller's code
                    number, lines = next(pages, (0, None))
                if lines is None:
                    return
                for line in lines:
                    text, event = events.parse(line.text)
                    yield JobLine(text, line.node, line.rank, line.time_s, number, event)
        finally:
            with speaking(_log.info):
                pages.close()


list = jobs
