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

from cloudtrain.entrypoints.sweep.search import Allowance, best, decide, values_of
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.errors import BudgetError, CloudtrainError, NoSuchJobError, UsageError
from cloudtrain.launcher.job import Job, new_id
from cloudtrain.launcher.jobs import retry, stopping, submit
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.planning import planner
from cloudtrain.launcher.planning.prepare import prepare
from cloudtrain.launcher.store import sweeps
from cloudtrain.launcher.store.sweeps import SegmentRecord, SweepRecord
from cloudtrain.launcher.sweeps import searching
from cloudtrain.launcher.text.units import format_money

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.planning.prepare import Prepared
    from cloudtrain.launcher.store.database import Database
    from cloudtrain.launcher.store.registry import Registry

__all__ = ["advance", "begin", "config_of", "exit_code", "follow", "is_going_on", "stop"]

MOST_TRIES = 3  # of a segment that a fault or its time limit has ended
AT_THE_END = 1_000_000_000  # steps between evaluations: only the last step of a training in epochs has one
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
    return configs.stored(sweep.config, overrides=[*_assigned(sweep, values), *settings])


def advance(registry: Registry, sweep: SweepRecord, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Take the results, send the segments that are due, and return a line of text for each change.

    Of a stopped sweep, only take the results. Returns no line if a concurrent process drives the sweep. A segment that
    cannot be sent now stays due; its error is a line.
    """
    database = registry.database
    if sweep.state == "ended" or not sweeps.lease(database, sweep.id):
        return []
    try:
        told = [line for each in sweeps.segments(database, sweep.id) for line in _collect(registry, sweep, each)]
        if sweeps.find(database, sweep.id).state == "stopped":
            return told
        _choose(registry, sweep)
        due = [each for each in sweeps.segments(database, sweep.id) if each.state == "due"]
        for each in due:
            try:
                told.append(_send(registry, sweep, each, environ))
            except BudgetError as error:
                told.append(error.message)
                sweeps.remove(database, each)
            except CloudtrainError as error:
                told.append(f"{each.job_id} is not sent: {error}")
        if all(each.state in ("done", "failed") for each in sweeps.segments(database, sweep.id)):
            sweeps.set_state(database, sweep.id, "ended")
            told.append(_end(registry, sweep))
        return told
    finally:
        sweeps.free(database, sweep.id)


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
    if sweep.state == "stopped":
        return any(each.state == "sent" for each in sweeps.segments(database, sweep.id))
    return sweep.state == "running"


def exit_code(database: Database, sweep: SweepRecord) -> int:
    """Return 0 if a trial has finished, 9 if the user has stopped the sweep before, 130 while it runs, else 1."""
    search = searching.search_of(sweep.config)
    found = best(search, searching.results_of(sweeps.segments(database, sweep.id)))
    if sweep.state == "running":
        return RUNNING
    if found is not None and found[1] == len(search.rungs) - 1:
        return 0
    return STOPPED if sweep.state == "stopped" else 1


def stop(registry: Registry, sweep: SweepRecord) -> list[Job]:
    """Send no further segment, and ask the running trials to save and stop; return those trials."""
    sweeps.set_state(registry.database, sweep.id, "stopped")
    asked = []
    for each in sweeps.segments(registry.database, sweep.id):
        if each.state == "due":
            sweeps.remove(registry.database, each)
        elif each.state == "sent":
            asked.append(stopping.ask(registry, each.job_id, now=False, agrees=lambda wish: True).job)
    return asked


def _assigned(sweep: SweepRecord, values: Mapping[str, Any]) -> list[str]:
    """Return the settings of a trial: its values, an evaluation at the end at least, and no section `sweep`.

    `args.lr` replaces the word after `--lr`, or adds both words.
    """
    training, words = sweep.config["training"], list(sweep.config["args"])
    found = ["sweep=null"]
    if sweep.config["task"] and training["eval_every"] is None:
        found.append(f"training.eval_every={training['max_steps'] or AT_THE_END}")
    for key, value in values.items():
        if key.startswith("args."):
            option = f"--{key.removeprefix('args.')}"
            at = words.index(option) if option in words else len(words)
            words[at : at + 2] = [option, str(value)]
    found += [f"{key}={json.dumps(value)}" for key, value in values.items() if not key.startswith("args.")]
    return [*found, f"args={json.dumps(words)}"] if words else found


def _end(registry: Registry, sweep: SweepRecord) -> str:
    search = searching.search_of(sweep.config)
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
        sweeps.write(registry.database, replace(segment, state="failed"))
        return [f"{segment.job_id} was removed"]
    if job.active or job.attempt.number < segment.attempt:
        return []
    state = job.attempt.state
    is_whole = state.state == "succeeded" or state.reason == "paused"
    value = None
    if is_whole:
        metric = searching.metric_of(sweep.config)
        value = searching.value_at(registry.database, job.id, segment.until_step, metric)
    elif _may_go_on(job) and segment.tries + 1 < MOST_TRIES:
        again = replace(segment, state="due", attempt=job.attempt.number + 1, tries=segment.tries + 1)
        sweeps.write(registry.database, again)
        return [f"{job.id} ended early ({state.reason or state.state}), and goes on"]
    sweeps.write(registry.database, replace(segment, state="done" if value is not None else "failed", value=value))
    how = f"{searching.metric_of(sweep.config)} {value:.6g}" if value is not None else "no result"
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


def _choose(registry: Registry, sweep: SweepRecord) -> None:
    """Write a row for each segment that the search starts now."""
    database = registry.database
    known = sweeps.segments(database, sweep.id)
    search, results = searching.search_of(sweep.config), searching.results_of(known)
    running = {(each.trial, each.rung) for each in known if each.state in ("due", "sent")}
    allowance, _ = _money(registry, sweep, known)
    if allowance is None:  # the first trial measures the pace
        search = replace(search, parallel=1)
    for chosen in decide(search, results, running, allowance):
        job_id, number = f"{sweep.id}-{chosen.trial}", 1
        if chosen.rung:
            number = registry.find(job_id).attempt.number + 1
        until = chosen.until_step if searching.pauses(sweep.config) else None
        sweeps.write(database, SegmentRecord(sweep.id, chosen.trial, chosen.rung, job_id, number, until))


def _money(
    registry: Registry, sweep: SweepRecord, known: Sequence[SegmentRecord]
) -> tuple[Allowance | None, searching.SegmentPace | None]:
    """Return the allowance, None before the pace is known; and the pace. A sweep without a budget has no limit."""
    ended = [each for each in known if each.state == "done"]
    pairs = [(each, registry.attempt(registry.find(each.job_id), each.attempt)) for each in ended[-20:]]
    pace = searching.pace_of(registry.database, pairs)
    if sweep.limit_micro is None:
        return Allowance(), pace
    if pace is None:
        return None, None
    config = config_of(sweep, {}, ["budget=null"])
    plan = planner.make(config, backends.load(config.backend).capacity(config))
    left_micro = sweep.limit_micro - sum(sweeps.spent_and_held(registry.database, sweep.id))
    return pace.allowance(plan, left_micro), pace


def _send(registry: Registry, sweep: SweepRecord, segment: SegmentRecord, environ: Mapping[str, str]) -> str:
    """Send the segment unless it was sent before, and mark its row. Raises CloudtrainError."""
    known = _job(registry, segment.job_id)
    is_sent = known is not None and known.attempt.number >= segment.attempt and known.attempt.phase != "never_sent"
    if not is_sent:
        settings = _settings(registry, sweep, segment)
        if known is None or registry.never_ran(known):
            _send_first(registry, sweep, segment, settings, environ)
        else:
            submit.resend(registry, known, retry.prepare_next(registry, known, settings), environ)
    number = registry.find(segment.job_id).attempt.number
    sweeps.write(registry.database, replace(segment, state="sent", attempt=number))
    to = f" to step {segment.until_step}" if segment.until_step else ""
    return f"sent: {segment.job_id}, rung {segment.rung + 1}{to}"


def _send_first(
    registry: Registry, sweep: SweepRecord, segment: SegmentRecord, settings: list[str], environ: Mapping[str, str]
) -> None:
    from cloudtrain.launcher.backend import Bundle

    search = searching.search_of(sweep.config)
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
    steps = searching.search_of(sweep.config).rungs
    count = steps[segment.rung] - (steps[segment.rung - 1] if segment.rung else 0)
    longest_s = config_of(sweep, {}).limits.max_duration
    return [*found, "budget=null", f"limits.max_duration={min(pace.limit_s(count), longest_s)}s"]


def _job(registry: Registry, job_id: str) -> Job | None:
    try:
        found = registry.find(job_id)
    except CloudtrainError:
        return None
    return found if found.id == job_id else None
