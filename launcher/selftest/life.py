"""The life of the selftest's two jobs, step by step; the last step stops and removes what the others have left."""

from __future__ import annotations

import contextlib
import re
import time
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from cloudtrain.entrypoints import events

from ..advice.preparing import prepare
from ..backend import Request, accepted
from ..errors import CloudtrainError, UnreachableError
from ..job import Attempt, Job, exit_code, platform_name
from ..jobs import adopt, approval, follow, queue, remove, retry, stopping
from ..jobs import submit as sending
from ..jobs.view import failure_lines, read_view
from ..logs.view import View
from ..metering import meter
from ..planning.prepare import Prepared
from ..store.registry import Registry
from ..text.terminal import reporting, say, say_each
from . import report
from .report import Facts, ProofReport, TaskLine

NO_RECORD = {"why": "the backend has no record beside our own"}
HEAR_S = 4.0  # between two looks at the platform's record
SILENT_S = 300.0  # without an answer of the platform; then the job is left, and named
AFTER_KILL = 6  # steps from the kill to the stop
GIVE_UP_S, END_S = 900.0, 600.0  # beyond the limits of an attempt; for the end of a job that was asked to stop


@dataclass
class Watched:
    """What is seen of an attempt: states, the platform's own words for them, and the status."""

    states: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    started_s: float = 0.0
    over_s: float = 0.0
    status: Facts = field(default_factory=dict)


class Selftest:
    """The jobs, and what was seen of the attempts: 1 and 2 of the first job, 3 of the second."""

    def __init__(self, registry: Registry, prepared: list[Prepared], proof: ProofReport) -> None:
        self.registry, self.prepared, self.proof = registry, prepared, proof
        self.backend, self.config, self.file = prepared[0].backend, prepared[0].config, prepared[0].config_file
        self.seen, self.lines, self.passed = dict[int, Watched](), list[TaskLine](), set[str]()
        self.now = copy_context().run  # in it, `say` reaches the user before the step's end

    def run(self) -> None:
        """Run all steps; whatever happens, the last one runs too."""
        *steps, last = self.proof.table["steps"]
        try:
            for step in steps:
                self._run(step)
        finally:
            self._run(last)

    def _run(self, step: str) -> None:
        begin_s, words = time.monotonic(), list[str]()
        lacks = [each for each in self.proof.table["steps"][step]["needs"] if each not in self.passed]
        try:
            with reporting(words.append):
                came = {"why": lacks[0]} if lacks else getattr(self, f"_{step.replace(' ', '_')}")()
        except CloudtrainError as error:
            came = {"error": type(error).__name__, "code": _code_of(error)}
            words += str(error).splitlines()
        if self.proof.add(step, time.monotonic() - begin_s, came, words):
            self.passed.add(step)

    @property
    def jobs(self) -> list[Job]:
        """The jobs that the registry knows, the oldest first, also one whose send was interrupted."""
        return [job for job in reversed(self.registry.jobs()) if job.config_file == str(self.file.absolute())]

    @property
    def _attempts(self) -> list[tuple[Job, Attempt]]:
        return [(job, attempt) for job in self.jobs for attempt in self.registry.attempts(job)]

    def _doctor(self) -> Facts:
        wrong = [check for check in adopt.checks(self.config.backend, self.config) if check.verdict != "ok"]
        failed = [f"{check.name}: {check.found}; {check.cure}" for check in wrong if check.verdict == "fail"]
        say_each(failed)
        warned = [f"warning: {check.name}: {check.found}; {check.cure}" for check in wrong if check.verdict != "fail"]
        self.now(say_each, warned)
        return {"failed": len(failed), "warned": len(wrong) - len(failed)}

    def _dry_run(self) -> Facts:
        again = prepare(self.config, self.file, Path(), dry=True)
        return {"same": again.request.dump() == self.prepared[0].request.dump()}

    def _submit(self, number: int = 0) -> Facts:
        approval.require_allowed(self.registry, self.prepared[number])
        return _of(queue.drive(self.registry, sending.send(self.registry, self.prepared[number])[0]))

    def _record(self, job: Job, attempt: Attempt) -> accepted.Accepted | None:
        """Return the platform's record of the attempt; None if the backend has none beside our own."""
        if not isinstance(self.backend, accepted.TellsAccepted) or attempt.ref is None:
            return None
        return self.backend.accepted(Request.load(platform_name(job.id, attempt.number), attempt.request), attempt.ref)

    def _watch(self, job: Job, number: int) -> Job:
        """Follow an attempt to its end, and note what is seen; stop the first attempt some steps after the kill."""
        seen, plan, heard_s, is_asked = self.seen.setdefault(number, Watched()), job.attempt.plan, 0.0, False
        stop_step, waits = int(self.config.env["KILL_AT"]) + AFTER_KILL, None
        most_s = time.monotonic() + plan.cap_s + plan.terms.tail_s + GIVE_UP_S + (self.config.limits.max_wait or 0.0)

        def hear() -> None:
            with contextlib.suppress(CloudtrainError):  # the next look may have an answer
                heard = record.words if (record := self._record(job, job.attempt)) else ()
                seen.words[:] = heard if len(heard) > 1 else [*seen.words, *({*heard} - {*seen.words[-1:]})]

        for _, page in follow.read(self.registry, job, View(), following=True):
            for line, event in ((line, events.parse(line.text)[1] or {}) for line in page):
                if event.pop("e", "") == "selftest":
                    late_s, stamp_off_s = time.time() - event["at"], line.time_s - event.pop("at")
                    self.lines.append(TaskLine(number, line.rank, **event, late_s=late_s, stamp_off_s=stamp_off_s))
            job = self.registry.find(job.id)
            seen.states += {job.attempt.state.state} - {*seen.states[-1:]}
            if job.attempt.state.state == "pending" and waits != (waits := job.attempt.state.detail) and waits:
                self.now(say, f"    {waits}")
            if job.attempt.state.started_s:
                seen.started_s = seen.started_s or time.time()
            if job.attempt.state.state == "running" and job.attempt.progress.get("step"):
                seen.status = seen.status or read_view(self.registry, job).as_json()
                if not is_asked and number == 1 and self._starts() > 1 and self.lines[-1].step >= stop_step:
                    is_asked = bool(stopping.ask(self.registry, job.id))
            if time.monotonic() > heard_s + HEAR_S:
                hear()
                heard_s = time.monotonic()
            if time.time() - (job.attempt.unreachable_since_s or time.time()) > SILENT_S:
                self._record(job, job.attempt)  # raises the platform's own error
                raise UnreachableError(f"there was no answer about {job.id} for {SILENT_S:.0f} s")
            if time.monotonic() > most_s:
                raise CloudtrainError(f"{job.id} has not ended within its limits")
        hear()
        seen.over_s, state = time.time(), job.attempt.state
        say("\n".join(failure_lines(state.error)) if state.error else state.detail or "")
        return job

    def _status(self) -> Facts:
        """Follow the first attempt past the kill to the stop; the status was asked for while the job ran."""
        self._watch(self.jobs[0], 1)
        return self.seen[1].status

    def _starts(self) -> int:
        return len({line.life for line in self.lines if (line.attempt, line.rank) == (1, 1)})

    def _kill_of_a_rank(self) -> Facts:
        came, steps = _of(self.jobs[0]), [line.step + 1 for line in self.lines]
        return {**came, "starts": self._starts(), "undone": max(steps, default=0) - (came["saved_step"] or 0)}

    _stop_with_save = _kill_of_a_rank  # a step takes the facts that its row of the table names

    def _resume(self) -> Facts:
        job = self.jobs[0]
        saved_step = _of(job)["saved_step"] or 0
        retry.require_ended(self.registry, job, is_changed=True)
        prepared = retry.prepare_next(self.registry, job, ['env.PACE_S="0"'])
        sending.require_room(self.registry, prepared, is_first=False)
        job = self._watch(queue.drive(self.registry, sending.resend(self.registry, job, prepared)), 2)
        steps = [line.step for line in self.lines if line.attempt == 2]
        return {**_of(job), "skipped": min(steps, default=-1) - saved_step}

    def _artifacts(self) -> Facts:
        with TemporaryDirectory(prefix="cloudtrain-") as folder:
            paths = self.backend.artifacts(self.jobs[0].attempt.ref or {}, Path(folder))
            found = {path.name: path.read_bytes() for path in paths if path.name in ("rank-0.txt", "rank-1.txt")}
            return {"files": len(found), "damaged": sum(each != b"selftest\n" for each in found.values())}

    def _time_limit(self) -> Facts:
        self._submit(1)
        job = self._watch(self.jobs[-1], 3)
        took_s, plan = meter.held_s(job.attempt, time.time()) or 0.0, job.attempt.plan
        over_s, early_s = max(0.0, took_s - plan.cap_s - plan.terms.tail_s), max(0.0, plan.deadline_s - took_s)
        return {**_of(job), "took_s": round(took_s, 1), "over_s": round(over_s, 1), "early_s": round(early_s, 1)}

    def _accepted_request(self) -> Facts:
        records = [record for each in self._attempts if (record := self._record(*each))]
        return accepted.of_requests(records) if records else NO_RECORD

    def _states(self) -> Facts:
        pace, training = self.backend.pace(self.jobs[0].attempt.ref or {}), self.config.training
        most_steps, late_s = (training and training.max_steps) or 0, pace.hold_back_s + pace.late_s
        came = report.of_losses(self.lines)
        for (number, seen), (_, attempt) in zip(self.seen.items(), self._attempts, strict=False):
            came |= {f"states_{number}": seen.states, f"exit_{number}": exit_code(attempt.state)}
        return came | report.of_lines([line for line in self.lines if line.attempt < 3], most_steps, late_s)

    _log_lines = _losses = _exit_codes = _states

    def _platform_states(self) -> Facts:
        stages = self.proof.table["stages"].get(self.config.backend)
        return accepted.of_words([seen.words for seen in self.seen.values()], stages) if stages else NO_RECORD

    def _bill(self) -> Facts:
        attempts, now_s, plan = [attempt for _, attempt in self._attempts], time.time(), self.prepared[0].plan
        legs, watched = meter.legs_of(attempts), [seen for seen in self.seen.values() if seen.over_s]
        ran_s = [seen.over_s - (seen.started_s or seen.over_s) for seen in watched]
        apart = [abs(leg.seconds(now_s) - seconds) for leg, seconds in zip(legs, ran_s, strict=False)]
        apart_s = max(0.0, max(apart, default=0.0) - plan.terms.unit_s - plan.terms.minimum_bill_s)
        over = (micro := meter.spent_micro(legs, now_s) or 0) - sum(each.plan.most_micro or 0 for each in attempts)
        times = [(each.created_s, each.state, seen.over_s) for each, seen in zip(attempts, watched, strict=False)]
        is_counted = self.config.backend in self.proof.table["counted"]
        uncounted = sum(is_counted and each.state.billed_by is None for each in attempts)
        came = {"unwatched": len(legs) - len(apart), "apart_s": round(apart_s, 1), "micro": micro, "over_micro": over}
        return {**came, **report.of_times(times), "uncounted": uncounted}

    def _cleaning(self) -> Facts:
        for job in self.jobs:
            if job.active:
                stopping.ask(self.registry, job.id, now=True)
                follow.wait(self.registry, [job], END_S, lambda _: None, quiet=True, retrying=False)
        over = [job for job in self.jobs if not job.active]
        why = {each.place: each.kept for each in remove.elsewhere(self.registry, over, remove=True)}
        left = {each.place: each.job for each in remove.elsewhere(self.registry, over) if each.bytes != 0 or each.kept}
        say("\n".join(f"{place} is not removed: {why.get(place) or 'it is still listed'}" for place in left))
        for job in over:
            if job.id not in left.values():
                remove.remove(self.registry, job)
        return {"active": sum(job.active for job in self.jobs), "left": len(left)}


def _of(job: Job) -> Facts:
    state, progress = job.attempt.state, job.attempt.progress
    steps = {"saved_step": progress.get("checkpoint_step"), "resumed_step": progress.get("resumed_step")}
    known = {"state": state.state, "reason": state.reason, "resumable": state.resumable, "restarts": state.restarts}
    return {**known, "attempt": job.attempt.number, **steps, "code": (state.error or {}).get("kind")}


def _code_of(error: CloudtrainError) -> str:
    """Return the platform's code of the error, such as AccessDeniedException; else the name of our own error."""
    response = getattr(error.__cause__, "response", None)
    codes = [response.get("Error", {}).get("Code")] if isinstance(response, dict) else []
    codes += [getattr(error.__cause__, name, None) for name in ("code", "status_code", "reason")]
    return next((str(each) for each in codes if re.fullmatch(r"\w{1,60}", str(each or ""))), type(error).__name__)
