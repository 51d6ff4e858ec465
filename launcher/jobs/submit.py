"""Sends a prepared job: reserve the worst case and journal the intent, send, mark as sent.

The journal fixes the platform's name of the job, so a process that dies at any point leaves at most one job, and
`refresh` finds the job by name.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .. import backend as backends
from .. import config as configs
from ..config.schema import JobConfig, carried_by
from ..errors import NOTHING, PASSING, BudgetError, CapacityError, CloudtrainError, Fault, UnreachableError, refuse
from ..job import Attempt, Job, State
from ..money import budget_preview, shared_ledger, shared_ledger_sync
from ..money.conditional import ConditionalObject
from ..planning.prepare import Prepared
from ..planning.request_rules import own_places
from ..store import agent_limit, budgets, ledger
from ..store.registry import Registry, this_process
from ..text import addresses
from ..text.terminal import say, say_each
from . import adopt, failover, listing, mirrors, reserve
from .refresh import refresh

T = TypeVar("T")


def send(
    registry: Registry,
    prepared: Prepared,
    *,
    name: str | None = None,
    key: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Job, bool]:
    """Journal and send the job; return the job, and False if the idempotency key named an existing job.

    If the first of several candidates gets no machines, the job is in line for the next: `queue.drive` sends it.
    Raises UsageError if `name` is taken, ConfigError for a secret that is not set, BudgetError if a budget has no room
    for the worst case, and the errors of the backend.
    """
    others = {each.config.backend: each for each in prepared.candidates}
    prepared, course, in_line = failover.begin(registry, prepared)
    config = prepared.config
    secrets = _secrets(config, environ)
    known = None if key is None else registry.with_key(key)
    if known is not None:
        refresh(registry, known)  # frees the key of a submit that died before the send
    else:
        for each in {**others, config.backend: prepared}.values():
            _require_ready(registry, each)

    def make(job_id: str, number: int) -> Job:
        sent = own_places(config, job_id)
        request = prepared.backend.request(prepared.plan, sent, job_id, number, prepared.bundle.sha256)
        job = Job(
            id=job_id,
            name=config.name,
            backend=config.backend,
            created_s=time.time(),
            config=sent.model_dump(mode="json"),
            config_file=str(prepared.config_file.absolute()),
            bundle=prepared.bundle.dump(),
            attempt=replace(_intent(job_id, number, prepared, request, course), **in_line),
            idempotency_key=key,
        )
        reserve.reserve(registry, job.attempt, job.config)
        return job

    add = partial(registry.add, name or config.name, make, exclusive=name is not None, key=key)
    job, is_new = _with_room(registry, add)
    if is_new and in_line:
        _hold(registry, replace(job.attempt, submitter={}))  # else nothing stays in line
    if not is_new or in_line:
        return job, is_new
    return _send(registry, job, prepared.backend, prepared.bundle, secrets), True


def send_queued(registry: Registry, job: Job, prepare: Callable[[Job], Prepared] | None = None) -> Job | None:
    """Send a job that waits in line; return None if another process sends the job.

    `prepare` returns the candidate to send in place of the stored request. Without capacity the job stays in line.
    Raises ConfigError for a secret that is not set here: then the job stays in line, too; and the errors of `prepare`
    and of the backend: then the job has failed.
    """
    secrets = _secrets(configs.stored(job.config), os.environ)
    if not registry.claim(job.attempt):
        return None
    job = registry.find(job.id)
    if prepare is not None:
        try:
            job = _exchanged(registry, job, prepare(job))
        except BaseException as error:
            _close(registry, job.attempt, error)
            raise
    return _send(registry, job, backends.load(job.backend), backends.Bundle.load(job.bundle), secrets)


def _exchanged(registry: Registry, job: Job, prepared: Prepared) -> Job:
    """Journal the candidate in place of the claimed attempt's request. Raises BudgetError if it may cost more."""
    known = configs.stored(job.config).capacity  # the candidate is prepared alone
    config, number = prepared.config.model_copy(update={"capacity": known}), job.attempt.number
    request = prepared.backend.request(prepared.plan, config, job.id, number, prepared.bundle.sha256)
    plan = replace(prepared.plan, hold_micro=job.attempt.plan.hold_micro)
    submitter = {**job.attempt.submitter, "backend": config.backend}
    attempt = replace(job.attempt, plan=plan, request=request.dump(), created_s=time.time(), submitter=submitter)
    job = replace(job, backend=config.backend, config=config.model_dump(mode="json"), attempt=attempt)
    with registry.database.transaction():
        registry.exchange(attempt, job)
        ledger.cover(registry.database, job.id, number, plan.worst_case_micro, time.time())
    return job


def resend(
    registry: Registry,
    job: Job,
    prepared: Prepared,
    environ: Mapping[str, str] = os.environ,
    *,
    start_over: bool = False,
) -> Job:
    """Journal and send the job's next attempt, which resumes from the newest checkpoint.

    `start_over`: the attempt, and no later attempt, may train from step 0 if all checkpoints are damaged. An unset
    address that only notifications need (`from_job`) is no error: a follower sends the notifications instead. No row
    stays of an attempt that was refused for a reason that may pass: a retry stays due, and the refusal counts for none.
    """
    prepared, course, in_line = failover.begin(registry, prepared, job.attempt)
    prepared = replace(prepared, config=own_places(prepared.config, job.id, job.config))
    sent = _without_unknown_addresses(prepared.config, environ)
    if start_over:
        checkpoint = sent.checkpoint.model_copy(update={"all_damaged": "start-over"})
        sent = sent.model_copy(update={"checkpoint": checkpoint})
    secrets = _secrets(sent, environ)
    _require_ready(registry, prepared)
    number = job.attempt.number + 1
    request = prepared.backend.request(prepared.plan, sent, job.id, number, prepared.bundle.sha256)
    attempt = replace(_intent(job.id, number, prepared, request, course), **in_line)
    attempt.submitter["before"] = {"config": job.config, "bundle": job.bundle, "settings": list(job.attempt.settings)}
    config, bundle = prepared.config.model_dump(mode="json"), prepared.bundle.dump()

    def add() -> None:
        with registry.database.transaction():
            registry.add_attempt(attempt, config, bundle)
            reserve.reserve(registry, attempt, config)

    _with_room(registry, add)
    job = replace(job, backend=prepared.config.backend, attempt=attempt, config=config, bundle=bundle)
    if in_line:
        _hold(registry, replace(attempt, submitter={}))
        return job
    return _send(registry, job, prepared.backend, prepared.bundle, secrets)


def _require_ready(registry: Registry, prepared: Prepared) -> None:
    """Raise the error of a send for a missing library or for missing credentials, before the job is journalled."""
    if isinstance(prepared.backend, backends.Ready):
        base = prepared.config_file.absolute().parent
        try:
            prepared.backend.ready(prepared.request, backends.Shipment(prepared.bundle, registry.folder, base))
        except UnreachableError as error:
            error.message += f"; {NOTHING}"
            raise


def require_room(registry: Registry, prepared: Prepared, *, is_first: bool) -> None:
    """Raise BudgetError if a budget has no room for the worst case; checked before any question, without a reservation.

    `is_first`: also raise ConfigError for a likely typo of a project's name in a shared ledger. Raises the errors of a
    shared ledger: if the ledger cannot be read, no job is sent.
    """
    config, amount_micro = prepared.config.model_dump(mode="json", include={"project"}), prepared.plan.most_micro
    project = reserve.project_of(config)

    def look() -> None:
        now_s = time.time()
        own = ledger.standings(registry.database, now_s, project)
        budgets.require_room(own, amount_micro)
        places = reserve.ledgers_of(registry, config)
        is_budgeted = any(standing.budget.project == project for standing in own)
        for uri in places:
            book = shared_ledger.read(ConditionalObject(uri))
            if book is None:  # `_hold` reports a missing ledger
                continue
            if uri == places[0] and not is_budgeted and not agent_limit.is_place(uri):  # the project's own ledger
                others = budget_preview.budgeted_in(registry.database) - {project}  # a known address alone is no budget
                names = ({name for name, _ in book.budgets} - {budgets.OVERALL}) | others
                books = budget_preview.ApplicableBudgets(project, budgeted=tuple(sorted(names)))
                if is_first:
                    budget_preview.require_known_project(books)
                say_each(books.unknown())
            if uri == places[0] and (config["project"] or {}).get("ledger") is not None:
                ledger.remember_ledger(registry.database, project, uri)  # for `budget show`
            budgets.require_room(shared_ledger.accounts(book).standings(now_s, project), amount_micro, uri)

    if amount_micro != 0:
        _with_room(registry, look)


def _with_room(registry: Registry, add: Callable[[], T]) -> T:
    """Return the result of `add`; if a budget is full, update the jobs that have ended, and try once more."""
    try:
        return add()
    except BudgetError:
        before = ledger.held(registry.database)
        reserve.reconcile(registry)
        if ledger.held(registry.database) == before:
            raise
        return add()


def _hold(registry: Registry, attempt: Attempt) -> None:
    """Hold the worst case in the shared ledger too, and print the reservations. Without a hold, no job is sent."""
    try:
        try:
            shared = shared_ledger_sync.hold(registry.database, attempt.job_id, attempt.number, time.time())
        except BudgetError:
            reserve.reconcile(registry)  # ended jobs of this home may still hold their worst case in the ledger
            shared = shared_ledger_sync.hold(registry.database, attempt.job_id, attempt.number, time.time())
        agent_limit.require_approved(registry.find(attempt.job_id))
    except BaseException as error:
        # A ledger that does not answer cannot be updated now either.
        _close(registry, attempt, error, syncs=not isinstance(error, UnreachableError))
        raise
    held = ledger.reservation(registry.database, attempt.job_id, attempt.number)
    own = [] if held is None else ledger.standings(registry.database, time.time(), held["project"])
    say_each(reserve.words(reserve.amount_of(attempt.plan), [*own, *shared]))


def _close(
    registry: Registry, attempt: Attempt, error: BaseException, *, syncs: bool = True, is_known: bool = False
) -> None:
    """Store that no job was sent, and free the money here and in the shared ledger; a submit leaves no job behind.

    A job that ran before, or was in line, stays. `is_known`: the platform may know the attempt's name, so the attempt's
    number is not used again.
    """
    if failover.stays(registry, attempt, error):
        if isinstance(error, KeyboardInterrupt):
            words = f"{attempt.job_id} stays in line, with its sum reserved: cloudtrain stop {attempt.job_id}"
            raise KeyboardInterrupt(words) from None
        return
    why = error.message if isinstance(error, CloudtrainError) else repr(error)
    reason = "no_machines" if isinstance(error, CapacityError) else "error"
    state = State("failed", reason, detail=f"not sent: {why}", ended_s=time.time())
    listing.end_unsent(registry, attempt, state)
    if syncs:
        shared_ledger_sync.push(registry.database)
    was_queued = attempt.submitter.get("queued")
    if not was_queued and registry.never_ran(job := registry.find(attempt.job_id)):
        registry.remove(attempt.job_id)
        if not is_known:
            agent_limit.give_back(job)
            ledger.forget(registry.database, attempt.job_id, attempt.number)
    elif not was_queued and isinstance(error, PASSING) and not is_known:
        with registry.database.transaction():
            registry.drop_unsent(attempt)
            listing.keep(registry, attempt.job_id)
    if isinstance(error, KeyboardInterrupt):
        raise KeyboardInterrupt(NOTHING) from None


def _intent(
    job_id: str, number: int, prepared: Prepared, request: backends.Request, course: Mapping[str, Any]
) -> Attempt:
    sent = f"{prepared.config.model_dump_json()} {prepared.plan.most_micro} {prepared.bundle.sha256}"
    submitter = {**this_process(), "backend": prepared.config.backend, "settings": list(prepared.settings), **course}
    submitter["digest"] = hashlib.sha256(sent.encode()).hexdigest()  # what an owner of a limit for agents approves
    return Attempt(job_id, number, "intent", prepared.plan, request.dump(), time.time(), submitter)


def _send(
    registry: Registry, job: Job, backend: backends.Backend, bundle: backends.Bundle, secrets: Mapping[str, str]
) -> Job:
    attempt = job.attempt
    request = backends.Request.load(attempt.name, attempt.request)
    base, record = Path(job.config_file).parent, adopt.record_of(job)
    data = {name: uri for name, uri in job.config["inputs"].items() if addresses.path_of(uri) != uri}
    shipment = backends.Shipment(bundle, registry.folder, base, secrets, record=record, data=data)
    _hold(registry, attempt)
    try:
        if attempt.number == 1:
            mirrors.require_new(job)
        else:
            shipment.sending.prepares()
            _supersede(registry, job)
            shipment.sending.creates()
        ref = backend.send(request, shipment)
        shipment.sending.creates()
        registry.mark_sent(attempt, ref)
    except BaseException as error:
        is_refused = shipment.sending.is_nothing_sent(error) and failover.is_on(attempt)
        if is_refused and isinstance(error, PASSING) and failover.refused(registry, job, attempt, error):
            return registry.find(job.id)
        if shipment.sending.is_nothing_sent(error) and job.asked.waits and isinstance(error, CapacityError):
            registry.mark_queued(attempt, {"reason": error.message, "tried_s": time.time()})
            return replace(job, attempt=registry.attempt(job, attempt.number))
        if shipment.sending.is_nothing_sent(error):
            _close(registry, attempt, error, is_known=shipment.sending.may_exist)
            if isinstance(error, CapacityError):
                line = "--queue" if attempt.number == 1 else "--set queue.wait=true"
                others = "" if job.asked.capacity else "or name other places under `capacity.try`"
                error.hint = "; ".join(filter(None, [f"wait in line: {line}", error.hint, others]))
            if isinstance(error, UnreachableError):
                error.message += f"; {NOTHING}"
            raise
        registry.release(attempt)  # this process may continue as a follower; any command may settle the attempt
        where = f"{job.id} may have been sent, as {attempt.name}: cloudtrain status {job.id} looks for it"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{where}, cloudtrain stop {job.id} stops it") from None
        if isinstance(error, UnreachableError):
            error.message += f"; {where}"
        raise
    return replace(job, attempt=replace(attempt, phase="sent", ref=ref))


def _supersede(registry: Registry, job: Job) -> None:
    """Refuse late starts of the attempts before, or say that a store does not let us. Raises UnreachableError.

    Each store refuses the starts of its own attempts; before the last attempt that was sent, the send of that attempt
    has done the same.
    """
    for each in [each for each in reversed(registry.attempts(job)) if each.number < job.attempt.number]:
        backend = backends.load(job.backend_of(each))
        try:
            if isinstance(backend, backends.Supersedes):
                request = backends.Request.load(each.name, each.request)
                started = backend.supersede(request, job.attempt.number)
                if each.ref is not None and each.state.started_s is None and started >= each.number:
                    say(f"warning: {each.name} started after its end was told, and is stopped")
                    backend.stop(each.ref, now=True)
        except PASSING:
            raise
        except CloudtrainError as error:
            say(f"warning: if {each.name} starts late, nothing refuses it: {error.message}")
        if each.phase == "sent":
            return


def _without_unknown_addresses(config: JobConfig, environ: Mapping[str, str]) -> JobConfig:
    """Return the config without secrets for notifications that are not set here; print a note for each."""
    addresses = {name for entry in config.notify for name in carried_by(entry)}
    unknown = [name for name in config.secrets if name in addresses and name not in environ]
    say_each(f"notify: {name} is not set here, so this attempt does not tell by itself (from_job)" for name in unknown)
    return config.model_copy(update={"secrets": tuple(name for name in config.secrets if name not in unknown)})


def _secrets(config: JobConfig, environ: Mapping[str, str]) -> dict[str, str]:
    unset, why = [name for name in config.secrets if name not in environ], "is not set in your environment"
    refuse(Fault(f"the secret `{name}` {why}", key="secrets", hint=f"export {name}=...") for name in unset)
    return {name: environ[name] for name in config.secrets}
