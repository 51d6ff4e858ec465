"""The life of the selftest's two jobs, step by step; the last step stops and removes what the others have left."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from tempfile import TemporaryDirectory

from cloudtrain.entrypoints import events

from ..advice.preparing import prepare
from ..backend import Request, accepted
from ..backend.accepted import Accepted, TellsAccepted
from ..errors import CloudtrainError
from ..job import Job, exit_code, platform_name
from ..jobs import adopt, approval, follow, queue, remove, retry, stopping
from ..jobs import submit as sending
from ..jobs.view import failure_lines, read_view
from ..logs.view import View
from ..metering import meter
from ..planning.prepare import Prepared
from ..store.registry import Registry
from ..text.terminal import reporting, say, say_each
from . import checks
from .checks import Facts, TaskLine
from .report import ProofReport

NO_RECORD = "the backend has no record beside our own"
HEAR_S = 4.0  # between two looks at the platform's record
AFTER_KILL = 6  # steps from the kill to the stop
GIVE_UP_S, END_S = 900.0, 600.0  # beyond the limits of an attempt; for the end of a job that was asked to stop


class Selftest:
    """The jobs, and what was seen of them: the lines, and of each attempt the states, the seconds, the exit code."""

    def __init__(self, registry: Registry, prepared: list[Prepared], report: ProofReport) -> None:
        self.registry, self.prepared, self.report = registry, prepared, report
        self.backend, self.file = prepared[0].backend, prepared[0].config_file
        self.lines: list[TaskLine] = []
        self.undisturbed: list[TaskLine] = []
        self.states, self.codes, self.ran_s = dict[int, list[str]](), dict[int, int](), list[float]()
        self.words, self.over_s = dict[int, list[str]](), list[float]()
        self.passed: set[str] = set()
        self.now = copy_context().run  # in it, `say` reaches the user before the step's end

    def run(self) -> None:
        """Run all steps; whatever happens, the last one runs too."""
        *steps, last = self.report.table["steps"]
        try:
            for step in steps:
                self._run(step)
        finally:
            self._run(last)

    def _run(self, step: str) -> None:
        begin_s, words, came = time.monotonic(), list[str](), Facts()
        lacks = [each for each in self.report.table["steps"][step]["needs"] if each not in self.passed]
        judge = getattr(self, f"_{step.replace(' ', '_')}")
        try:
            with reporting(words.append):
                came = {"why": lacks[0]} if lacks else judge()
        except CloudtrainError as error:
            came = {"error": type(error).__name__, "code": _code_of(error)}
            words += str(error).splitlines()
        if self.report.add(step, time.monotonic() - begin_s, came, words):
            self.passed.add(step)

    @property
    def jobs(self) -> list[Job]:
        """The jobs that the registry knows, the oldest first, also one whose send was interrupted."""
        return [job for job in reversed(self.registry.jobs()) if job.config_file == str(self.file.absolute())]

    def _doctor(self) -> Facts:
        config = self.prepared[0].config
        wrong = [check for check in adopt.checks(config.backend, config) if check.verdict != "ok"]
        failed = [f"{check.name}: {check.found}; {check.cure}" for check in wrong if check.verdict == "fail"]
        say_each(failed)
        warned = [f"warning: {check.name}: {check.found}; {check.cure}" for check in wrong if check.verdict != "fail"]
        self.now(say_each, warned)
        return {"failed": len(failed), "warned": len(wrong) - len(failed)}

    def _dry_run(self) -> Facts:
        again = prepare(self.prepared[0].config, self.file, Path(), dry=True)
        return {"same": again.request.dump() == self.prepared[0].request.dump()}

    def _submit(self) -> Facts:
        return _of(self._send(self.prepared[0]))

    def _send(self, prepared: Prepared) -> Job:
        approval.require_allowed(self.registry, prepared)
        return queue.drive(self.registry, sending.send(self.registry, prepared)[0])

    def _accepted_request(self) -> Facts:
        if (record := self._record(self.jobs[0])) is None:
            return {"why": NO_RECORD}
        return accepted.of_requests(record.sent, record.there)

    def _record(self, job: Job) -> Accepted | None:
        """Return the platform's record of the attempt; None if the backend has none beside our own."""
        attempt, backend = job.attempt, self.backend
        if not isinstance(backend, TellsAccepted) or attempt.ref is None:
            return None
        return backend.accepted(Request.load(platform_name(job.id, attempt.number), attempt.request), attempt.ref)

    def _hear(self, job: Job, words: list[str]) -> None:
        """Note the platform's words for the states: its own list, else each new word."""
        with contextlib.suppress(CloudtrainError):  # the next look may have an answer
            heard = record.words if (record := self._record(job)) else ()
            words[:] = heard if len(heard) > 1 else [*words, *({*heard} - {*words[-1:]})]

    def _watch(self, job: Job, lines: list[TaskLine], act: Callable[[Job], None] = lambda job: None) -> Job:
        """Follow an attempt to its end, and note what is seen; `act` gets the job at each poll."""
        plan, started_s, number = job.attempt.plan, None, 3 if lines is self.undisturbed else job.attempt.number
        most_s = time.monotonic() + plan.cap_s + plan.terms.tail_s + GIVE_UP_S
        states, words, heard_s, waits = list[str](), list[str](), 0.0, None
        self.states[number], self.words[number] = states, words
        for attempt, page in follow.read(self.registry, job, View(), following=True):
            for line, event in ((line, events.parse(line.text)[1] or {}) for line in page):
                if event.pop("e", "") == "selftest":
                    late_s = max(0.0, time.time() - (at_s := event.pop("at")))
                    lines.append(TaskLine(attempt, line.rank, **event, late_s=late_s, stamp_off_s=line.time_s - at_s))
            job = self.registry.find(job.id)
            states += [job.attempt.state.state] if states[-1:] != [job.attempt.state.state] else []
            if job.attempt.state.state == "pending" and waits != (waits := job.attempt.state.detail) and waits:
                self.now(say, f"    {waits}")
            started_s = started_s or (time.monotonic() if job.attempt.state.started_s else None)
            act(job)
            if time.monotonic() > heard_s + HEAR_S:
                self._hear(job, words)
                heard_s = time.monotonic()
            if time.monotonic() > most_s:
                raise CloudtrainError(f"{job.id} has not ended within its limits")
        self._hear(job, words)
        self.over_s.append(time.time())
        self.ran_s.append(time.monotonic() - (started_s or time.monotonic()))
        self.codes[number] = exit_code(state := job.attempt.state)
        say("\n".join(failure_lines(state.error)) if state.error else state.detail or "")
        return job

    def _status(self) -> Facts:
        """Follow the first attempt past the kill to the stop; the status is asked for while the job runs."""
        last_step, told, asked = int(self.prepared[0].config.env["KILL_AT"]) + AFTER_KILL, Facts(), list[str]()

        def act(job: Job) -> None:
            is_running = job.attempt.state.state == "running" and bool(job.attempt.progress.get("step"))
            if is_running and not told:
                told.update(read_view(self.registry, job).as_json())
            if is_running and not asked and self._starts() > 1 and self.lines[-1].step >= last_step:
                asked.append(stopping.ask(self.registry, job.id).verdict)

        self._watch(self.jobs[0], self.lines, act)
        return told

    def _starts(self) -> int:
        return len({line.life for line in self.lines if (line.attempt, line.rank) == (1, 1)})

    def _kill_of_a_rank(self) -> Facts:
        return {"starts": self._starts(), **_of(self.jobs[0])}

    def _stop_with_save(self) -> Facts:
        came, steps = _of(self.jobs[0]), [line.step + 1 for line in self.lines]
        return {**came, "undone": max(steps, default=0) - (came["saved_step"] or 0)}

    def _resume(self) -> Facts:
        job = self.jobs[0]
        saved_step = _of(job)["saved_step"] or 0
        retry.require_ended(self.registry, job, is_changed=True)
        prepared = retry.prepare_next(self.registry, job, ['env.PACE_S="0"'])
        sending.require_room(self.registry, prepared, is_first=False)
        job = self._watch(queue.drive(self.registry, sending.resend(self.registry, job, prepared)), self.lines)
        steps = [line.step for line in self.lines if line.attempt == job.attempt.number]
        return {**_of(job), "skipped": min(steps, default=-1) - saved_step}

    def _artifacts(self) -> Facts:
        with TemporaryDirectory(prefix="cloudtrain-") as folder:
            paths = self.backend.artifacts(self.jobs[0].attempt.ref or {}, Path(folder))
            found = {path.name: path.read_bytes() for path in paths if path.name in ("rank-0.txt", "rank-1.txt")}
            return {"files": len(found), "damaged": sum(each != b"selftest\n" for each in found.values())}

    def _time_limit(self) -> Facts:
        job = self._watch(self._send(self.prepared[1]), self.undisturbed)
        took_s, plan = meter.held_s(job.attempt, time.time()) or 0.0, job.attempt.plan
        over_s, early_s = max(0.0, took_s - plan.cap_s - plan.terms.tail_s), max(0.0, plan.deadline_s - took_s)
        return {**_of(job), "took_s": round(took_s, 1), "over_s": round(over_s, 1), "early_s": round(early_s, 1)}

    def _states(self) -> Facts:
        return {f"states_{number}": states for number, states in self.states.items()}

    def _platform_states(self) -> Facts:
        stages = self.report.table["stages"].get(self.prepared[0].config.backend)
        return accepted.of_words([*self.words.values()], stages) if stages else {"why": NO_RECORD}

    def _log_lines(self) -> Facts:
        pace, training = self.backend.pace(self.jobs[0].attempt.ref or {}), self.prepared[0].config.training
        return checks.of_lines(self.lines, (training and training.max_steps) or 0, pace.hold_back_s + pace.late_s)

    def _losses(self) -> Facts:
        return checks.of_losses([*self.lines, *self.undisturbed])

    def _bill(self) -> Facts:
        attempts, now_s = [each for job in self.jobs for each in self.registry.attempts(job)], time.time()
        terms, legs = self.prepared[0].plan.terms, meter.legs_of(attempts)
        apart = [abs(leg.seconds(now_s) - ran_s) for leg, ran_s in zip(legs, self.ran_s, strict=False)]
        apart_s = max(0.0, max(apart, default=0.0) - terms.unit_s - terms.minimum_bill_s)
        over = (micro := meter.spent_micro(legs, now_s) or 0) - sum(each.plan.most_micro or 0 for each in attempts)
        times = [(each.created_s, each.state, over_s) for each, over_s in zip(attempts, self.over_s, strict=False)]
        is_counted = self.prepared[0].config.backend in self.report.table["counted"]
        uncounted = sum(is_counted and each.state.billed_by is None for each in attempts)
        came = {"unwatched": len(legs) - len(apart), "apart_s": round(apart_s, 1), "micro": micro, "over_micro": over}
        return {**came, **checks.of_times(times), "uncounted": uncounted}

    def _exit_codes(self) -> Facts:
        return {f"exit_{number}": code for number, code in self.codes.items()}

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
