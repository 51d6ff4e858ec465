"""The life of the selftest's two jobs, step by step; the last step removes what the others have left."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

from ..backend import JobRef
from ..errors import CloudtrainError
from ..job import Job, exit_code
from ..jobs import adopt, approval, follow, queue, remove, retry, stopping
from ..jobs import submit as sending
from ..jobs.view import read_view
from ..logs.view import View
from ..metering import meter
from ..planning.prepare import Prepared
from ..store.registry import Registry
from ..text.terminal import reporting
from . import checks
from .checks import Facts, TaskLine
from .report import NOT_CHECKED, Report, Row, code_of

AFTER_KILL, LATE_S, GIVE_UP_S, END_S = 6, 15.0, 900.0, 300.0  # steps; seconds
NO_RECORD = "the backend has no record beside our own"
# In order; each step with the steps that must have come to an end before.
STEPS: dict[str, tuple[str, ...]] = {
    "doctor": (),
    "dry run": (),
    "submit": ("dry run",),
    "accepted request": ("submit",),
    "status": ("submit",),
    "kill of a rank": ("status",),
    "stop with save": ("status",),
    "resume": ("stop with save",),
    "artifacts": ("resume",),
    "time limit": ("submit",),
    "states": ("submit",),
    "log lines": ("resume",),
    "losses": ("resume", "time limit"),
    "bill": ("submit",),
    "exit codes": ("resume", "time limit"),
    "cleaning": (),
}


@runtime_checkable
class ShowsAccepted(Protocol):
    """A backend whose platform keeps its own record of a request."""

    def accepted(self, ref: JobRef) -> dict[str, Any]:
        """Return the request as the platform has accepted it, with the keys of the sent request's body."""


class Unchecked(Exception):
    """The step cannot be judged; the message says why, in words of ours."""


class Selftest:
    """The jobs, and what was seen of them; `show` gets each row as it ends."""

    def __init__(
        self, registry: Registry, prepared: list[Prepared], report: Report, show: Callable[[Row], None]
    ) -> None:
        self.registry, self.prepared, self.report, self.show = registry, prepared, report, show
        self.lines: tuple[list[TaskLine], list[TaskLine]] = ([], [])
        self.states: list[list[str]] = []
        self.watched: list[tuple[float, float]] = []  # when each attempt was first seen to run, and to have ended
        self.ended: set[str] = set()
        self.facts: dict[str, tuple[Facts, Facts]] = {}
        self.codes: Facts = {}

    def run(self) -> None:
        """Run all steps; whatever happens, the last one stops and removes the jobs."""
        *steps, last = STEPS
        try:
            for step in steps:
                self._run(step)
        finally:
            self._run(last)

    def _run(self, step: str) -> None:
        begin_s = time.monotonic()
        words: list[str] = []
        try:
            if lacks := next((each for each in STEPS[step] if each not in self.ended), None):
                raise Unchecked(f"it needs the step `{lacks}`")
            with reporting(words.append):
                expected, came = getattr(self, f"_{step.replace(' ', '_')}")()
            self.ended.add(step)
            row = Row.judged(step, time.monotonic() - begin_s, expected, came, tuple(words))
        except Unchecked as why:
            row = Row(step, NOT_CHECKED, words=(str(why),), why=str(why))
        except CloudtrainError as error:
            came, said = {"error": type(error).__name__, "code": code_of(error)}, (*words, *str(error).splitlines())
            row = Row.judged(step, time.monotonic() - begin_s, {"error": None}, came, said)
        self.show(row)
        self.report.add(row)

    @property
    def jobs(self) -> list[Job]:
        """The selftest's jobs that the registry knows, in order, also one whose send was interrupted."""
        own = str(self.prepared[0].config_file.absolute())
        return [job for job in reversed(self.registry.jobs()) if job.config_file == own]

    def _doctor(self) -> tuple[Facts, Facts]:
        config = self.prepared[0].config
        verdicts = [check.verdict for check in adopt.checks(config.backend, config)]
        return {"failed": 0}, {"failed": verdicts.count("fail"), "warned": verdicts.count("warn")}

    def _dry_run(self) -> tuple[Facts, Facts]:
        from ..advice.preparing import prepare

        first = self.prepared[0]
        again = prepare(first.config, first.config_file, Path(), dry=True)
        return checks.of_requests(first.request.body, again.request.body)

    def _submit(self) -> tuple[Facts, Facts]:
        job = self._send(0)
        return {"state": "pending", "attempt": 1}, {"state": job.attempt.state.state, "attempt": job.attempt.number}

    def _send(self, number: int) -> Job:
        prepared = self.prepared[number]
        approval.require_allowed(self.registry, prepared)
        return queue.drive(self.registry, sending.send(self.registry, prepared)[0])

    def _accepted_request(self) -> tuple[Facts, Facts]:
        job, backend = self.jobs[0], self.prepared[0].backend
        if not isinstance(backend, ShowsAccepted) or job.attempt.ref is None:
            raise Unchecked(NO_RECORD)
        return checks.of_requests(job.attempt.request["body"], backend.accepted(job.attempt.ref))

    def _watch(self, job: Job, number: int, act: Callable[[Job], None] = lambda job: None) -> Job:
        """Follow an attempt to its end, and note its states and lines; `act` gets the job at each poll."""
        states, lines, begin_s = list[str](), self.lines[number], time.monotonic()
        self.states.append(states)
        runs_s = most_s = begin_s + job.attempt.plan.cap_s + job.attempt.plan.terms.tail_s + GIVE_UP_S
        for attempt, page in follow.read(self.registry, job, View(), following=True):
            now_s, found = time.time(), self.registry.find(job.id)
            lines += [line for each in page if (line := checks.line_of(attempt, each, now_s))]
            if states[-1:] != [found.attempt.state.state]:
                states.append(found.attempt.state.state)
            if found.attempt.state.started_s is not None:
                runs_s = min(runs_s, time.monotonic())
            act(found)
            if time.monotonic() > most_s + (job.asked.max_wait is not None) * END_S:
                raise CloudtrainError(f"{job.id} has not ended within its limits")
        self.watched.append((runs_s, time.monotonic()))
        return self.registry.find(job.id)

    def _status(self) -> tuple[Facts, Facts]:
        """Follow the first attempt, past the kill, to the stop; `status` is asked while the job runs."""
        kill_at, told = self.prepared[0].config.params["kill_at"], dict[str, Any]()

        def act(job: Job) -> None:
            newest = self.lines[0][-1].step if self.lines[0] else 0
            lives = {line.life for line in self.lines[0] if line.rank == 1}
            if job.attempt.state.state == "running" and len(lives) > 1 and newest >= kill_at + AFTER_KILL and not told:
                told.update(read_view(self.registry, job).as_json())
                stopping.ask(self.registry, job.id)

        job = self._watch(self.jobs[0], 0, act)
        state, progress, lines = job.attempt.state, job.attempt.progress, self.lines[0]
        lives, last = {line.life for line in lines if line.rank == 1}, max((line.step for line in lines), default=-1)
        self.facts["kill of a rank"] = (
            {"starts": 2, "attempt": 1, "resumed_step": {"least": 1, "most": kill_at}},
            {
                "starts": len(lives),
                "attempt": job.attempt.number,
                "restarts": state.restarts,
                **_of(progress, "resumed_step"),
            },
        )
        saved = {"least": last, "most": last + 1}  # a step that was under way is undone
        self.facts["stop with save"] = (
            {"state": "stopped", "reason": "user", "resumable": True, "saved_step": saved},
            {
                "state": state.state,
                "reason": state.reason,
                "resumable": state.resumable,
                "saved_step": progress.get("checkpoint_step"),
            },
        )
        self.codes["stop"] = exit_code(state)
        came = _of(told, "state", "ranks", "instances", "attempt", "step")
        return {"state": "running", "ranks": 2, "instances": 2, "attempt": 1, "step": {"least": 1}}, came

    def _kill_of_a_rank(self) -> tuple[Facts, Facts]:
        return self.facts["kill of a rank"]

    def _stop_with_save(self) -> tuple[Facts, Facts]:
        return self.facts["stop with save"]

    def _resume(self) -> tuple[Facts, Facts]:
        job = self.jobs[0]
        retry.require_ended(self.registry, job, is_changed=True)
        prepared = retry.prepare_next(self.registry, job, ["params.pace_s=0"])
        sending.require_room(self.registry, prepared, is_first=False)
        job = self._watch(queue.drive(self.registry, sending.resend(self.registry, job, prepared)), 0)
        saved = max((line.step for line in self.lines[0] if line.attempt == 1), default=0)
        first = next((line.step for line in self.lines[0] if line.attempt == job.attempt.number), None)
        self.codes["resume"] = exit_code(job.attempt.state)
        expected = {"state": "succeeded", "attempt": 2, "step": {"least": saved, "most": saved + 1}}
        return expected, {"state": job.attempt.state.state, "attempt": job.attempt.number, "step": first}

    def _artifacts(self) -> tuple[Facts, Facts]:
        job, backend = self.jobs[0], self.prepared[0].backend
        assert job.attempt.ref is not None
        with TemporaryDirectory(prefix="cloudtrain-") as folder:
            names = {path.name for path in backend.artifacts(job.attempt.ref, Path(folder))}
        return {"files": 2}, {"files": len(names & {"rank-0.txt", "rank-1.txt"})}

    def _time_limit(self) -> tuple[Facts, Facts]:
        job = self._watch(self._send(1), 1)
        state, plan = job.attempt.state, job.attempt.plan
        self.codes["time_limit"] = exit_code(state)
        took_s = round(meter.held_s(job.attempt, time.time()) or 0.0, 1)
        came = {"state": state.state, "reason": state.reason, "saved_step": job.attempt.progress.get("checkpoint_step")}
        most = {"most": plan.cap_s + plan.terms.tail_s}
        return {"state": "stopped", "reason": "time_limit", "saved_step": {"least": 1}, "took_s": most}, came | {
            "took_s": took_s
        }

    def _states(self) -> tuple[Facts, Facts]:
        came = {f"states_{number}": each for number, each in enumerate(self.states, 1)}
        ends = ("stopped", "succeeded", "stopped")
        return {
            f"states_{number}": {"order": ["pending", "running", "stopping", end]} for number, end in enumerate(ends, 1)
        }, came

    def _log_lines(self) -> tuple[Facts, Facts]:
        job, training = self.jobs[0], self.prepared[0].config.training
        assert training is not None
        assert job.attempt.ref is not None
        pace = self.prepared[0].backend.pace(job.attempt.ref)
        return checks.of_lines(self.lines[0], training.max_steps - 1, LATE_S + pace.hold_back_s + pace.late_s)

    def _losses(self) -> tuple[Facts, Facts]:
        return checks.of_losses(*self.lines)

    def _bill(self) -> tuple[Facts, Facts]:
        """Compare the platform's seconds with ours: two differences of clocks, the unit, the least (docs/budget.md)."""
        attempts = [each for job in self.jobs for each in self.registry.attempts(job)]
        plan, now_s = self.prepared[0].plan, time.time()
        legs = meter.legs_of(attempts)
        apart = [
            abs(leg.seconds(now_s) - (end_s - runs_s)) for leg, (runs_s, end_s) in zip(legs, self.watched, strict=False)
        ]
        least_s = plan.terms.unit_s + plan.terms.minimum_bill_s + 2 * LATE_S
        most_micro = sum(each.plan.worst_case_micro or 0 for each in attempts)
        came = {
            "attempts": len(apart),
            "apart_s": round(max(apart, default=0.0), 1),
            "micro": meter.spent_micro(legs, now_s),
        }
        return {"attempts": len(attempts), "apart_s": {"most": least_s}, "micro": {"most": most_micro}}, came

    def _exit_codes(self) -> tuple[Facts, Facts]:
        return {"stop": 9, "resume": 0, "time_limit": 1}, self.codes

    def _cleaning(self) -> tuple[Facts, Facts]:
        """Stop and remove the jobs, here and elsewhere."""
        for job in self.jobs:
            if job.active:
                stopping.ask(self.registry, job.id, now=True)
                follow.wait(self.registry, [job], END_S, lambda _: None, quiet=True, retrying=False)
        jobs = self.jobs
        over = [job for job in jobs if not job.active]
        left = [each for each in remove.elsewhere(self.registry, over, remove=True) if each.kept]
        for job in over:
            remove.remove(self.registry, job)
        return {"running": 0, "left": 0}, {"running": len(jobs) - len(over), "left": len(left)}


def _of(facts: Facts, *names: str) -> Facts:
    return {name: facts.get(name) for name in names}
