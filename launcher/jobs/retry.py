"""The next attempt of a job: requested by `resume`, or due by the config's `retry` while a process follows the job."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.contract import sign_of, step_in_words
from cloudtrain.entrypoints.format import counted
from cloudtrain.entrypoints.records import RecordError
from cloudtrain.entrypoints.sweep.search import FIXED

from .. import backend as backends
from ..backend import Bundle
from ..errors import PASSING, CloudtrainError, ConfigError, Fault, UnreachableError, UsageError
from ..job import faults, last_number
from ..metering.meter import spent_at_worst_micro
from ..money.forecast import budget_micro, newest_save
from ..planning.request_rules import own_places
from ..planning.search_spec import fixed, search_of
from ..store import sweeps
from ..text.addresses import path_of
from ..text.terminal import say
from ..text.units import format_money, parse_money
from . import failover
from .shown_config import differences

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..job import Attempt, Job
    from ..planning.prepare import Prepared
    from ..store.registry import Registry

ALL_DAMAGED = "all checkpoints were damaged at the last start: without an intact one, the job trains from step 0 again"
OTHERS_S = 10.0  # most delay of a concurrent follower with the same poll interval
AGAIN_S, PATIENCE_S = 5.0, 600.0  # between two tries of a follower, and until it gives up


@dataclass(frozen=True)
class OlderStart:
    """The next attempt would start from an older step than the newest known save."""

    message: str
    is_zero: bool
    """Nothing that was saved is found."""
    is_open: bool
    """A user may prevent the loss: a place cannot be read, or nothing is found."""


def older_start(registry: Registry, job: Job, config: JobConfig) -> OlderStart | None:
    """Return what an attempt with `config` would lose; None if it finds the newest known save, or nothing was saved.

    The nodes read a mirror, and compare by themselves (`Plan.saved_step`). Files without a step are not compared.
    """
    attempts = [attempt for attempt in registry.attempts(job) if attempt.ref is not None]
    step, number, _ = newest_save(attempts)
    backend = backends.load(config.backend)
    is_asked = number is not None and config.checkpoint.mirror is None and not job.attempt.state.all_damaged
    if not is_asked or not isinstance(backend, backends.HasCheckpoints):
        return None
    own = [attempt.ref for attempt in attempts if attempt.ref is not None and job.backend_of(attempt) == config.backend]
    files = backend.saved(own, config) if own else backends.SavedFiles()
    if files.is_any and not files.away if step is None or files.step is None else files.step >= step:
        return None
    what = f"a save of attempt {number}" if step is None else f"step {step}"
    place = f"is {files.away}" if files.away else "was saved, and is not found now"
    start = f"step {files.step}" if files.step is not None else "other files" if files.is_any else "the beginning"
    message, is_zero = f"{what} {place}: the next attempt starts from {start}", not files.is_any
    return OlderStart(message, is_zero, is_zero or bool(files.away))


def require_newest(older: OlderStart | None, hint: str, *, from_older: bool) -> None:
    """Say what the next attempt loses. Raises UsageError if a user may prevent the loss, unless `from_older`."""
    if older is not None and older.is_open and not from_older:
        raise UsageError(older.message, hint=hint)
    if older is not None:
        say(older.message)


def prepare_next(
    registry: Registry,
    job: Job,
    settings: Sequence[str] = (),
    *,
    update_code: bool = False,
    update_config: bool = False,
    from_older: bool = False,
) -> Prepared:
    """Return the prepared next attempt, with the submitted code and config, except for `settings`.

    `from_older`: the attempt may start from an older step than the newest save.
    `update_code` takes the code folder as it is now, `update_config` the config file, under the settings of the submit.
    Notes on an unchanged config are left out: the submit has printed the notes.
    Raises ConfigError if the code or the config is unusable, BudgetError if the money is used up, UsageError for a
    changed backend.
    """
    from .. import config as configs
    from ..advice.preparing import prepare
    from ..config.entries import alike

    require_own_backend(job, settings)
    config = _present_config(job, settings) if update_config else configs.stored(job.config, overrides=settings)
    config = alike(config, () if update_config else settings)
    config, late_micro = failover.under_candidate(job.attempt, config)
    config = own_places(config, job.id, job.config)
    if job.config.get("sweep"):
        _require_same_search(job, config)
    shipped = None if update_code else _shipped(job)
    file, spent_micro = Path(job.config_file), _spent_micro(registry, job, config)
    with configs.placing(file, settings) if update_config else contextlib.nullcontext():
        cache = registry.folder / "bundles"
        most_micro = max(spent_micro, late_micro)
        ready = prepare(config, file, cache, dry=False, shipped=shipped, spent_micro=most_micro, job_id=job.id)
    attempts = registry.attempts(job)
    step = None if from_older else newest_save(attempts)[0]
    known: dict[str, Any] = {"saved_step": step, "spent_micro": spent_micro, "faults": faults(attempts)}
    tried = tuple(replace(each, plan=replace(each.plan, **known)) for each in ready.candidates)
    ready = replace(ready, plan=replace(ready.plan, **known), candidates=tried)
    ready = replace(failover.same_place(ready, job.attempt), settings=(*job.attempt.settings, *settings))
    if update_config:
        changes = differences(job, configs.stored(job.config), ready.config) or "as it was submitted"
        return replace(ready, notes=(f"config: {changes}", *ready.notes))
    ready = replace(ready, old=(*ready.old, *_old_config(job, config, settings)))
    if not all(setting.startswith("budget.limit=") for setting in settings):
        return ready
    return replace(ready, notes=(), is_repeat=ready.bundle.sha256 == job.bundle.get("sha256"))


def prepare_other(registry: Registry, job: Job, config: JobConfig, *, update_code: bool = False) -> Prepared:
    """Return a prepared new job with this config and the job's submitted code. Raises ConfigError, BudgetError."""
    from ..advice.preparing import prepare

    shipped, cache = None if update_code else _shipped(job), registry.folder / "bundles"
    return replace(prepare(config, Path(job.config_file), cache, dry=False, shipped=shipped), old=())


def _shipped(job: Job) -> Bundle:
    """Return the archive of the submitted code. Raises ConfigError if the archive is gone, or its row is damaged."""
    hint = "cloudtrain resume --update-code takes the code folder as it is now"
    try:
        shipped = Bundle.load(job.bundle)
    except RecordError as error:
        raise ConfigError(f"the registry's row about the code of {job.id} is damaged: {error}", hint=hint) from error
    if not shipped.path.exists():
        raise ConfigError("the code as it was submitted is no longer here", where=shipped.path, hint=hint)
    return shipped


def _require_same_search(job: Job, config: JobConfig) -> None:
    """Raise UsageError for changes by which the results of a sweep would belong to other values or steps."""
    before, after = job.config, config.model_dump(mode="json")
    old, new = fixed(before), fixed(after) if after["sweep"] else {}
    if changed := [key for key in old if old[key] != new.get(key)]:
        message = f"the search of {job.id} cannot change ({', '.join(changed)}): its results would have no meaning"
        raise UsageError(message, hint="submit a new sweep; `sweep.trials` and `sweep.parallel` may change")
    if job.attempt.state.state == "succeeded" and search_of(after).trials <= search_of(before).trials:
        raise _done(job)


def _done(job: Job) -> UsageError:
    """Return the refusal of an attempt with nothing to do."""
    hint = "to train further: raise the steps and resume it with --update-config"
    if job.config.get("sweep"):
        grows = search_of(job.config).algorithm not in FIXED
        hint = f"more trials: cloudtrain resume {job.id} --trials +N" if grows else "submit a new sweep"
    return UsageError(f"{job.id} is done", hint=hint)


def trials_after(registry: Registry, job: Job, text: str) -> int:
    """Return the number of a sweep's trials after `+40` or `67`. Raises UsageError."""
    if not job.config.get("sweep"):
        raise UsageError("--trials is for a sweep", hint=f"{job.id} has no section `sweep`")
    search, written = search_of(job.config), text.strip()
    number = written.removeprefix("+")
    if not (number.isascii() and number.isdecimal()):
        raise UsageError(f"--trials {text}: expected a whole number", hint="+40 adds trials, 67 sets their number")
    if search.algorithm in FIXED:
        message = f"--trials {text}: {search.algorithm} keeps its {search.trials} trials"
        raise UsageError(message, hint="submit a new sweep")
    count = search.trials + int(number) if written.startswith("+") else int(number)
    begun = max((each.trial for each in sweeps.segments(registry.database, job.id)), default=-1) + 1
    if count < max(1, begun):
        hint = f"at least --trials {max(1, begun)}"
        raise UsageError(f"--trials {text}: {counted(begun, 'trial')} of {job.id} began already", hint=hint)
    return count


def _present_config(job: Job, settings: Sequence[str] = ()) -> JobConfig:
    """Return the config file now, with the job's name, backend and settings, and `settings`. Raises ConfigError."""
    from .. import config as configs
    from ..planning.candidates import candidates

    overrides, file = [*job.attempt.settings, *settings], Path(job.config_file)
    present, name = None, {"name": job.config["name"]}
    if any("backend" in entry for entry in job.asked.capacity.get("try", ())):  # the job may have moved from the file's
        known = candidates(configs.load(file, overrides=overrides))
        present = next((each for each in known if each.backend == job.backend), None)
    present = present or configs.load(file, backend=job.backend, overrides=overrides)
    return present.model_copy(update=name)


def _old_config(job: Job, config: JobConfig, settings: Sequence[str]) -> list[str]:
    """Return a warning that the attempt runs `config`, the submitted one, though the config file has changed since."""
    file = Path(job.config_file)
    if not file.is_file() or file.stat().st_mtime <= job.attempt.created_s:
        return []
    try:
        present = _present_config(job, settings)
        paths = {name: uri.rstrip("/") for name, uri in present.inputs.items()}
        alike = {name: uri for name, uri in config.inputs.items() if path_of(uri).rstrip("/") == paths.get(name)}
        changes = differences(job, config, present.model_copy(update={"inputs": present.inputs | alike}))
    except ConfigError:
        changes = "faults: cloudtrain validate names them"
    use = "this attempt runs the submitted config: --update-config takes the new config"
    return [f"warning: {file.name} changed since the submit ({changes}); {use}"] if changes else []


def require_ended(registry: Registry, job: Job, *, is_changed: bool = False) -> None:
    """Raise UsageError if the job runs, is done or was never sent, ConfigError if the job's folder is gone.

    A done job that has saved can go on with a changed config or code (`is_changed`).
    """
    if job.active:
        raise UsageError(f"{job.id} has not ended", hint=f"cloudtrain logs -f {job.id}")
    if job.attempt.state.state == "succeeded" and not has_saved(registry, job):
        raise UsageError(f"{job.id} is done, and has no checkpoint", hint="submit a new job, with more steps")
    if job.attempt.state.state == "succeeded" and not is_changed:
        raise _done(job)
    if not Path(job.config_file).parent.is_dir():
        raise ConfigError("the job's folder is gone", where=Path(job.config_file).parent, hint="submit it again")
    if registry.never_ran(job):
        raise UsageError(f"{job.id} was never sent", hint="submit it again")


def require_own_backend(job: Job, settings: Sequence[str]) -> None:
    """Raise UsageError for a setting that changes the backend: the job's checkpoints are within reach of its own."""
    for setting in settings:
        key, _, value = setting.partition("=")
        name = value.strip(" '\"[]")
        if key.strip() == "backend" and name != job.backend:
            hint = f"submit a new job with --backend {name or 'NAME'}"
            raise UsageError(f"a job stays on its backend ({job.backend})", hint=hint)


def has_saved(registry: Registry, job: Job) -> bool:
    """Return whether any attempt has saved, as far as the last poll and the log show."""
    state = job.attempt.state
    if state.resumable or (state.state == "succeeded" and job.config.get("sweep")):
        return True
    return any(attempt.progress.get("checkpoint") for attempt in registry.attempts(job))


def budget_setting(job: Job, text: str) -> str:
    """Return the setting that raises or sets the job's budget. Raises UsageError."""
    return f"budget.limit={format_money(budget_after(job.id, budget_micro(job), text))}"


def budget_after(name: str, before_micro: int | None, text: str) -> int:
    """Return the budget of a job or a sweep after `+50USD`, or `200USD`, in micro-dollars. Raises UsageError."""
    wanted = text.strip()
    try:
        micro = parse_money(wanted.removeprefix("+"))
    except ValueError as error:
        raise UsageError(f"--budget: expected {error}", hint="+50USD adds to the budget, 200USD sets it") from None
    if not wanted.startswith("+"):
        return micro
    if before_micro is None:
        raise UsageError(f"{name} has no budget to add to", hint=f"--budget {wanted[1:]} sets one")
    return before_micro + micro


def _spent_micro(registry: Registry, job: Job, config: JobConfig) -> int:
    """Return the worst-case cost of all attempts so far. Raises ConfigError if a budget needs an unknown cost.

    A price given now also counts for attempts without a price.
    """
    typed: int | None = getattr(getattr(config, config.backend, None), "price_per_hour", None)
    spent_micro = spent_at_worst_micro(registry.attempts(job), time.time(), typed)
    if spent_micro is None and config.budget is not None:
        message = "what the job has cost so far is not known: an earlier attempt had no price"
        hint = "add --price-per-hour USD: one instance's, for an hour"
        raise ConfigError([Fault(message, key="budget.limit", hint=hint)])
    return spent_micro or 0


def is_due(job: Job, attempts: Sequence[Attempt]) -> bool:
    """Return whether a retry is due by the config's `retry`, and the platform makes no retries by itself."""
    attempt, state = job.attempt, job.attempt.state
    if not state.is_fault or attempt.ref is None or state.reason not in job.asked.retry_on:
        return False
    if state.reason == "preempted" and "places" in attempt.submitter:  # the search, or a user's stop, has decided
        return False
    pace = backends.load(job.backend_of(attempt)).pace(attempt.ref)
    return attempt.number < last_number(job, attempts) and not pace.retries


def send_if_due(registry: Registry, job: Job) -> Job | None:
    """Send a retry if the config's `retry` asks for it; return the job with the retry, or None.

    A concurrent follower may be faster, or may know a secret that is missing here: then the follower's attempt is
    returned. The reason for not sending is printed.

    Raises CapacityError, UnreachableError if the job is as before, so that a later try can send the retry.
    """
    attempts = registry.attempts(job)
    if not is_due(job, attempts):
        return None
    from . import submit

    number, most = job.attempt.number + 1, last_number(job, attempts)
    error = job.attempt.state.error or {}
    signs = [sign_of(each.state.error) for each in attempts if each.state.reason != "no_machines"][-2:]
    if error.get("again") or (len(signs) == 2 and signs[0] is not None and signs[0] == signs[1]):
        say(f"no retry: the start before ended in the same way {step_in_words(error)}: correct the code, then resume")
        return None
    say(f"{job.id}: {job.attempt.state.reason}; attempt {number} of at most {most} begins")
    try:
        return submit.resend(registry, job, prepare_unasked(registry, job))
    except (CloudtrainError, OSError) as error:
        known = registry.find(job.id)
        if isinstance(error, UnreachableError) and known.attempt.number == number and known.active:
            say(f"whether attempt {number} was sent is not known yet: {error}")
            return known
        found = _of_another(registry, job)
        if found is None and isinstance(error, PASSING) and registry.find(job.id).attempt.number < number:
            raise
        if found is None:
            say(f"no retry: {error}")
        return found


def send_patiently(registry: Registry, job: Job, most_s: float = PATIENCE_S) -> Job | None:
    """Do as `send_if_due`, and try again for at most `most_s` while the reason for not sending may pass."""
    end_s = time.monotonic() + most_s
    while True:
        try:
            return send_if_due(registry, job)
        except PASSING as error:
            if time.monotonic() + AGAIN_S > end_s:
                say(f"no retry: {error}")
                return None
            say(f"no retry yet: {error}")
            time.sleep(AGAIN_S)


def prepare_unasked(registry: Registry, job: Job) -> Prepared:
    """Return the prepared next attempt, which nobody is asked about: it may lose some steps, and not all."""
    prepared = prepare_next(registry, job, from_older=True)
    older = older_start(registry, job, prepared.config)
    require_newest(older, f"cloudtrain resume {job.id} --from-older", from_older=older is None or not older.is_zero)
    return prepared


def _of_another(registry: Registry, job: Job) -> Job | None:
    """Return the job with a retry that a concurrent follower has sent, or sends within OTHERS_S; else None."""
    end = time.monotonic() + OTHERS_S
    while True:
        found = registry.find(job.id)
        if found.attempt.number > job.attempt.number and found.attempt.phase != "never_sent":
            return found
        if time.monotonic() > end:
            return None
        time.sleep(0.5)
