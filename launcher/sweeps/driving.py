"""Drives a sweep: takes the results of ended segments, decides, and sends the segments that are due.

Any command may call `advance`, any number of times and at once. A segment's row in the registry precedes its send; the
row names the attempt, and the registry admits each attempt once. So a driver that dies at any point loses no segment,
and sends no segment twice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.sweep.search import HOPELESS, MOST_TRIES, Allowance, best, decide, script_args, values_of

from .. import backend as backends
from ..errors import BudgetError, CloudtrainError, ConfigError, NoSuchJobError, UsageError
from ..job import Job, new_id
from ..jobs import retry, stopping, submit
from ..jobs.refresh import NEVER_SENT, refresh
from ..planning import search_spec
from ..planning.search_spec import is_packed, training_of
from ..store import sweeps
from ..store.sweeps import SegmentRecord, SegmentState, SweepRecord
from ..text.units import format_money
from . import alerts, searching

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..planning.prepare import Prepared
    from ..store.database import Database
    from ..store.registry import Registry

LOOK_S = 2.0  # between two looks of a process that follows a sweep
STOPPED, TIMED_OUT, RUNNING = 9, 124, 130  # exit codes, as of a job


def begin(registry: Registry, prepared: Prepared) -> SweepRecord:
    """Store the sweep of a prepared config; `advance` sends its trials."""
    config = prepared.config
    limit_micro = config.budget.limit if config.budget else None
    sweep = SweepRecord(
        new_id(config.name),
        time.time(),
        config.model_dump(mode="json"),
        str(prepared.config_file.absolute()),
        prepared.bundle.dump(),
        limit_micro,
    )
    sweeps.add(registry.database, sweep)
    return sweep


def config_of(sweep: SweepRecord, values: Mapping[str, Any], settings: Sequence[str] = ()) -> JobConfig:
    """Return the config of a trial with the values, without the section `sweep`. Raises ConfigError."""
    from .. import config as configs  # a look at running trials needs no config, and the import 60 ms

    return configs.stored(sweep.config, overrides=[*_assigned(sweep, values), *settings])


def advance(registry: Registry, sweep: SweepRecord, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Take the results, send the segments that are due, and return a line of text for each change.

    Of a stopped sweep, only take the results. Returns no line if a concurrent process drives the sweep. A segment that
    cannot be sent now stays due; its error is a line.
    """
    database = registry.database
    if is_packed(sweep.config):
        refresh(registry, registry.find(sweep.id))
        return []
    held_s = 0.0 if sweep.state == "ended" else sweeps.lease(database, sweep.id)
    if not held_s:
        return []
    try:
        told = [line for each in sweeps.segments(database, sweep.id) for line in _collect(registry, sweep, each)]
        alerts.look(registry, sweep)
        is_decided = _choose(registry, sweep)
        for each in sweeps.segments(database, sweep.id):
            if each.state != "due":
                continue
            held_s = sweeps.lease(database, sweep.id, held_s)
            if not held_s or not _is_running(registry, sweep):
                return told
            told.append(_try_to_send(registry, sweep, each, environ))
        if is_decided and _has_ended(registry, sweep):
            told.append(_end(registry, sweep))
        alerts.look(registry, sweep)  # the end may be for want of money
        return told
    finally:
        sweeps.free(database, sweep.id, held_s)


def advance_all(registry: Registry) -> list[str]:
    """Advance all running sweeps; an error of a sweep is a line, and hinders no further sweep."""
    told = []
    for sweep in sweeps.sweeps(registry.database, active=True):
        try:
            told += advance(registry, sweep)
        except CloudtrainError as error:
            told.append(f"{sweep.id}: {error}")
    return told


def follow(
    registry: Registry,
    sweep: SweepRecord,
    say: Callable[[str], object],
    *,
    once: bool = False,
    until_s: float | None = None,
) -> int:
    """Drive the sweep to its end; with `once`, look a single time. Return the exit code of the sweep (`exit_code`).

    At the time `until_s`, return 124. The trials of a stopped sweep are waited for.
    """
    while True:
        for line in advance(registry, sweep):
            say(line)
        sweep = sweeps.find(registry.database, sweep.id)
        if once or not is_going_on(registry.database, sweep):
            break
        if until_s is not None and time.time() >= until_s:
            say(f"still running: {sweep.id}")
            return TIMED_OUT
        time.sleep(LOOK_S)
    if once:
        say(f"cloudtrain advance {sweep.id} sends the next trials; cloudtrain status {sweep.id} shows the sweep")
        return 0
    return exit_code(registry.database, sweep)


def is_going_on(database: Database, sweep: SweepRecord) -> bool:
    """Return whether the sweep may send trials, or a trial of the stopped sweep still saves."""
    if sweep.state == "stopped" and not is_packed(sweep.config):
        return any(each.state == "sent" for each in sweeps.segments(database, sweep.id))
    return sweep.state == "running"


def exit_code(database: Database, sweep: SweepRecord) -> int:
    """Return 0 if a trial has finished, 9 if the user has stopped the sweep before, 130 while it runs, else 1."""
    search = search_spec.search_of(sweep.config)
    found = best(search, searching.results_of(sweeps.segments(database, sweep.id)))
    if sweep.state == "running":
        return RUNNING
    if found is not None and found[1] == len(search.rungs) - 1:
        return 0
    return STOPPED if sweep.state == "stopped" else 1


def stop(registry: Registry, sweep: SweepRecord) -> list[Job]:
    """Send no further segment, and ask the running trials to save and stop; return those trials.

    Raises the first error of a backend, after all trials were asked.
    """
    sweeps.set_state(registry.database, sweep.id, "stopped")
    asked, errors = [], list[CloudtrainError]()
    for each in sweeps.segments(registry.database, sweep.id):
        if each.state == "due" and not _is_sent(_job(registry, each.job_id), each):
            sweeps.remove(registry.database, each)
        elif each.state in ("due", "sent"):  # the sender of a due segment may have died after the send
            try:
                asked.append(stopping.ask(registry, each.job_id).job)
            except CloudtrainError as error:
                errors.append(error)
    if errors:
        raise errors[0]
    return asked


def _is_running(registry: Registry, sweep: SweepRecord) -> bool:
    return sweeps.find(registry.database, sweep.id).state == "running"


def _has_ended(registry: Registry, sweep: SweepRecord) -> bool:
    """Store the sweep's end if all segments have ended; return whether the sweep has ended now."""
    database = registry.database
    with database.transaction():
        ended = all(each.state in sweeps.ENDED for each in sweeps.segments(database, sweep.id))
        if ended := ended and _is_running(registry, sweep):
            sweeps.set_state(database, sweep.id, "ended")
    return ended


def _assigned(sweep: SweepRecord, values: Mapping[str, Any]) -> list[str]:
    """Return the settings of a trial: its values, an evaluation at the end at least, and no section `sweep`."""
    found, words = ["sweep=null"], script_args(sweep.config["args"], values)
    if sweep.config["task"]:
        training = training_of(sweep.config, values)
        found += [f"training.{key}={json.dumps(training[key])}" for key in ("max_steps", "eval_every")]
    found += [f"{key}={json.dumps(value)}" for key, value in values.items() if not key.startswith("args.")]
    return [*found, f"args={json.dumps(words)}"] if words else found


def _end(registry: Registry, sweep: SweepRecord) -> str:
    search = search_spec.search_of(sweep.config)
    found = best(search, searching.results_of(sweeps.segments(registry.database, sweep.id)))
    if found is None:
        return f"{sweep.id} has ended without a result: cloudtrain status {sweep.id}"
    return f"{sweep.id} has ended; the best is trial {found[0]}: cloudtrain best {sweep.id}"


def _collect(registry: Registry, sweep: SweepRecord, segment: SegmentRecord) -> list[str]:
    """Store the result of a segment that has ended, and return its line."""
    if segment.state != "sent":
        return []
    try:
        job = refresh(registry, registry.find(segment.job_id))
    except NoSuchJobError:
        sweeps.update(registry.database, segment, replace(segment, state="failed"))
        return [f"{segment.job_id} was removed"]
    if job.active or job.attempt.number < segment.attempt:
        return []
    state = job.attempt.state
    is_whole = state.state == "succeeded" or state.reason == "paused"
    value = None
    if is_whole:
        metric = search_spec.metric_of(sweep.config)
        value = searching.value_at(registry.database, job.id, segment.until_step, metric)
    elif _may_go_on(job) and (tries := segment.tries + (state.detail != NEVER_SENT)) < MOST_TRIES:
        again = replace(segment, state="due", attempt=job.attempt.number + 1, tries=tries)
        sweeps.update(registry.database, segment, again)
        return [f"{job.id} ended early ({state.reason or state.state}), and goes on"]
    kept: SegmentState
    if value is not None:
        kept, how = "done", f"{search_spec.metric_of(sweep.config)} {value:.6g}"
    elif state.reason == "user":
        kept, how = "stopped", "stopped"
    else:
        kept, how = "failed", f"no result: {(state.error or {}).get('message', state.state)}"
    sweeps.update(registry.database, segment, replace(segment, state=kept, value=value))
    return [f"{job.id}, rung {segment.rung + 1}: {how}"]


def _may_go_on(job: Job) -> bool:
    state = job.attempt.state
    is_fault = job.attempt.phase == "never_sent" or state.reason in (
        "preempted",
        "node_failure",
        "time_limit",
        "budget",
    )
    return is_fault and state.reason != "user"


def _choose(registry: Registry, sweep: SweepRecord) -> bool:
    """Write a row for each segment that the search starts now; return False if a concurrent process was faster."""
    database = registry.database
    known = sweeps.segments(database, sweep.id)
    search, results = search_spec.search_of(sweep.config), searching.results_of(known)
    running = {(each.trial, each.rung) for each in known if each.state in ("due", "sent")}
    if len(running) >= search.parallel or (len(results) >= HOPELESS and all(each is None for each in results.values())):
        return True
    allowance, _ = _money(registry, sweep, known)
    if allowance is None:  # the first trial measures the pace
        search = replace(search, parallel=1)
    rows = []
    for chosen in decide(search, results, running, allowance):
        job_id = f"{sweep.id}-{chosen.trial}"
        job = _job(registry, job_id)
        number = 1 if job is None or registry.never_ran(job) else job.attempt.number + 1
        until = chosen.until_step if search_spec.pauses(sweep.config) else None
        row = SegmentRecord(sweep.id, chosen.trial, chosen.rung, job_id, number, until)
        is_removed = job is None and chosen.rung > 0  # by the user
        rows.append(replace(row, state="failed") if is_removed else row)
    with database.transaction():
        is_current = sweeps.segments(database, sweep.id) == known and _is_running(registry, sweep)
        for row in rows if is_current else ():
            sweeps.write(database, row)
    return is_current


def _money(
    registry: Registry, sweep: SweepRecord, known: Sequence[SegmentRecord]
) -> tuple[Allowance | None, searching.SegmentPace | None]:
    """Return the allowance, None before the pace is known; and the pace. A sweep without a budget has no limit."""
    ended = [each for each in known if each.state == "done"]
    jobs = ((each, _job(registry, each.job_id)) for each in ended[-20:])
    pairs = [(each, registry.attempt(job, each.attempt)) for each, job in jobs if job is not None]
    pace = searching.pace_of(registry.database, pairs)
    if sweep.limit_micro is None:
        return Allowance(), pace
    if pace is None:
        return None, None
    from ..planning import planner

    config = config_of(sweep, {}, ["budget=null"])
    plan = planner.make(config, backends.load(config.backend).capacity(config))
    left_micro = sweep.limit_micro - sum(sweeps.spent_and_held(registry.database, sweep.id))
    return pace.allowance(plan, left_micro), pace


def _try_to_send(registry: Registry, sweep: SweepRecord, segment: SegmentRecord, environ: Mapping[str, str]) -> str:
    """Send the segment, and return a line of text. Without room in the budget, the segment is removed."""
    try:
        return _send(registry, sweep, segment, environ)
    except BudgetError as error:
        sweeps.remove(registry.database, segment)
        return error.message
    except CloudtrainError as error:
        if _is_valid(registry, sweep, segment):
            return f"{segment.job_id} is not sent: {error}"
        sweeps.update(registry.database, segment, replace(segment, state="failed"))
        return f"{segment.job_id} fails, because its values do not fit together: {error}"


def _is_valid(registry: Registry, sweep: SweepRecord, segment: SegmentRecord) -> bool:
    """Return whether the values of the segment's trial make a valid config with a plan."""
    from ..planning import planner

    search = search_spec.search_of(sweep.config)
    results = searching.results_of(sweeps.segments(registry.database, sweep.id))
    try:
        config = config_of(sweep, values_of(search, results, segment.trial, segment.rung), ["budget=null"])
        planner.make(config, backends.load(config.backend).capacity(config))
    except ConfigError:
        return False
    return True


def _send(registry: Registry, sweep: SweepRecord, segment: SegmentRecord, environ: Mapping[str, str]) -> str:
    """Send the segment unless it was sent before, and mark its row. Raises CloudtrainError."""
    known = _job(registry, segment.job_id)
    if not _is_sent(known, segment):
        settings = _settings(registry, sweep, segment)
        if known is None or registry.never_ran(known):
            _send_first(registry, sweep, segment, settings, environ)
        else:
            submit.resend(registry, known, retry.prepare_next(registry, known, settings), environ)
    number = registry.find(segment.job_id).attempt.number
    sweeps.update(registry.database, segment, replace(segment, state="sent", attempt=number))
    if not _is_running(registry, sweep):  # the user has stopped the sweep during the send
        stopping.ask(registry, segment.job_id)
    to = f" to step {segment.until_step}" if segment.until_step else ""
    return f"sent: {segment.job_id}, rung {segment.rung + 1}{to}"


def _is_sent(job: Job | None, segment: SegmentRecord) -> bool:
    """Return whether the segment's attempt was sent, or may have been."""
    return job is not None and job.attempt.number >= segment.attempt and job.attempt.phase != "never_sent"


def _send_first(
    registry: Registry, sweep: SweepRecord, segment: SegmentRecord, settings: list[str], environ: Mapping[str, str]
) -> None:
    from ..advice.preparing import prepare
    from ..backend import Bundle

    search = search_spec.search_of(sweep.config)
    values = values_of(search, searching.results_of(sweeps.segments(registry.database, sweep.id)), segment.trial, 0)
    config, bundle = config_of(sweep, values, settings), Bundle.load(sweep.bundle)
    if not bundle.path.exists():
        raise UsageError("the code of the sweep is no longer here", hint="submit the sweep again")
    file, cache = Path(sweep.config_file), registry.folder / "bundles"
    prepared = prepare(config, file, cache, dry=False, shipped=bundle)
    prepared = replace(prepared, settings=(*_assigned(sweep, values), *settings))
    submit.send(registry, prepared, name=segment.job_id, key=f"{sweep.id}/{segment.trial}", environ=environ)


def _settings(registry: Registry, sweep: SweepRecord, segment: SegmentRecord) -> list[str]:
    """Return the settings of a segment's attempt: the step of the pause, and the limit of time or money."""
    found = [f"training.pause_at={segment.until_step}"] if segment.until_step is not None else []
    known = sweeps.segments(registry.database, sweep.id)
    _, pace = _money(registry, sweep, known)
    if sweep.limit_micro is None:
        return found
    if pace is None:  # the whole budget limits the first trial, and its end frees the rest
        left_micro = sweep.limit_micro - sum(sweeps.spent_and_held(registry.database, sweep.id))
        return [*found, f"budget.limit={format_money(left_micro)}"]
    steps = search_spec.search_of(sweep.config).rungs
    count = steps[segment.rung] - (steps[segment.rung - 1] if segment.rung else 0)
    longest_s = config_of(sweep, {}).limits.max_duration
    return [*found, "budget=null", f"limits.max_duration={min(pace.limit_s(count), longest_s)}s"]


def _job(registry: Registry, job_id: str) -> Job | None:
    try:
        found = registry.find(job_id)
    except CloudtrainError:
        return None
    return found if found.id == job_id else None
