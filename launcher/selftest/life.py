"""The life of the selftest's two jobs, step by step; the last step stops and removes what the others have left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

from cloudtrain.entrypoints import events

from ..advice.preparing import prepare
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
from ..text.terminal import reporting, say
from . import checks
from .checks import Facts, TaskLine
from .report import Report

AFTER_KILL = 6  # steps from the kill to the stop
GIVE_UP_S, END_S = 900.0, 300.0  # beyond the limits of an attempt; for the end of a job that was asked to stop


@runtime_checkable
class ShowsAccepted(Protocol):
    """A backend whose platform keeps its own record of a request."""

    def accepted(self, ref: JobRef) -> dict[str, Any]:
        """Return the request as the platform has accepted it, with the keys of the sent request's body."""


class Selftest:
    """The jobs, and what was seen of them: the lines, and of each attempt the states, and the seconds it ran."""

    def __init__(self, registry: Registry, prepared: list[Prepared], report: Report) -> None:
        self.registry, self.prepared, self.report = registry, prepared, report
        self.backend, self.file = prepared[0].backend, prepared[0].config_file
        self.lines: list[list[TaskLine]] = [[], []]
        self.states, self.ran_s, self.codes = list[list[str]](), list[float](), list[int]()
        self.told: Facts = {}
        self.ended: set[str] = set()

    def run(self) -> None:
        """Run all steps; whatever happens, the last one runs too."""
        *steps, last = self.report.table["steps"]
        try:
            for step in steps:
                self._run(step)
        finally:
            self._run(last)

    def _run(self, step: str) -> None:
        begin_s, words, came = time.monotonic(), list[str](), dict[str, Any]()
        lacks = [each for each in self.report.table["steps"][step]["needs"] if each not in self.ended]
        why = f"it needs the step: {lacks[0]}" if lacks else ""
        try:
            with reporting(words.append):
                came = {} if why else getattr(self, f"_{step.replace(' ', '_')}")()
            self.ended |= {step} - {*lacks}
        except CloudtrainError as error:
            came = {"error": type(error).__name__, "code": _code_of(error)}
            words += str(error).splitlines()
        why = why or came.pop("why", "")
        self.report.add(step, time.monotonic() - begin_s, came, tuple(words), why)

    @property
    def jobs(self) -> list[Job]:
        """The jobs that the registry knows, the oldest first, also one whose send was interrupted."""
        return [job for job in reversed(self.registry.jobs()) if job.config_file == str(self.file.absolute())]

    def _doctor(self) -> Facts:
        config = self.prepared[0].config
        found = adopt.checks(config.backend, config)
        for check in found:
            if check.verdict == "fail":
                say(f"{check.name}: {check.found}; {check.cure}")
        verdicts = [check.verdict for check in found]
        return {"failed": verdicts.count("fail"), "warned": verdicts.count("warn")}

    def _dry_run(self) -> Facts:
        again = prepare(self.prepared[0].config, self.file, Path(), dry=True)
        return checks.of_requests(self.prepared[0].request.body, again.request.body)

    def _submit(self) -> Facts:
        return _of(self._send(0))

    def _send(self, number: int) -> Job:
        approval.require_allowed(self.registry, self.prepared[number])
        return queue.drive(self.registry, sending.send(self.registry, self.prepared[number])[0])

    def _accepted_request(self) -> Facts:
        attempt = self.jobs[0].attempt
        if not isinstance(self.backend, ShowsAccepted) or attempt.ref is None:
            return {"why": "the backend has no record beside our own"}
        return checks.of_requests(attempt.request["body"], self.backend.accepted(attempt.ref))

    def _watch(self, job: Job, number: int, act: Callable[[Job], None] = lambda job: None) -> Job:
        """Follow an attempt to its end, and note what is seen; `act` gets the job at each poll."""
        states, plan, started_s = list[str](), job.attempt.plan, None
        most_s = time.monotonic() + plan.cap_s + plan.terms.tail_s + GIVE_UP_S
        self.states.append(states)
        for attempt, page in follow.read(self.registry, job, View(), following=True):
            for line in page:
                _, event = events.parse(line.text)
                if event and event["e"] == "selftest":
                    late_s = max(0.0, time.time() - event["at"])
                    self.lines[number].append(
                        TaskLine(attempt, line.rank, event["life"], event["step"], event["loss"], late_s)
                    )
            job = self.registry.find(job.id)
            states += [job.attempt.state.state] if states[-1:] != [job.attempt.state.state] else []
            started_s = started_s or (time.monotonic() if job.attempt.state.started_s else None)
            act(job)
            if time.monotonic() > most_s:
                raise CloudtrainError(f"{job.id} has not ended within its limits")
        self.ran_s.append(time.monotonic() - started_s if started_s else 0.0)
        job = self.registry.find(job.id)
        self.codes.append(exit_code(job.attempt.state))
        return job

    def _status(self) -> Facts:
        """Follow the first attempt past the kill to the stop; the status is asked for while the job runs."""
        kill_at = self.prepared[0].config.params["kill_at"]

        def act(job: Job) -> None:
            is_past = len(self._starts()) > 1 and self.lines[0][-1].step >= kill_at + AFTER_KILL
            if is_past and job.attempt.state.state == "running" and not self.told:
                self.told = read_view(self.registry, job).as_json()
                stopping.ask(self.registry, job.id)

        self._watch(self.jobs[0], 0, act)
        return self.told

    def _starts(self) -> set[str]:
        return {line.life for line in self.lines[0] if (line.attempt, line.rank) == (1, 1)}

    def _last(self, attempt: int) -> list[int]:
        return sorted(line.step for line in self.lines[0] if line.attempt == attempt) or [-1]

    def _kill_of_a_rank(self) -> Facts:
        job = self.jobs[0]
        return {"starts": len(self._starts()), "restarts": job.attempt.state.restarts, **_of(job)}

    def _stop_with_save(self) -> Facts:
        came = _of(self.jobs[0])
        return {**came, "undone": self._last(1)[-1] + 1 - (came["saved_step"] or 0)}

    def _resume(self) -> Facts:
        job = self.jobs[0]
        retry.require_ended(self.registry, job, is_changed=True)
        prepared = retry.prepare_next(self.registry, job, ["params.pace_s=0"])
        sending.require_room(self.registry, prepared, is_first=False)
        saved = job.attempt.progress.get("checkpoint_step") or 0
        job = self._watch(queue.drive(self.registry, sending.resend(self.registry, job, prepared)), 0)
        return {**_of(job), "skipped": self._last(2)[0] - saved}

    def _artifacts(self) -> Facts:
        with TemporaryDirectory(prefix="cloudtrain-") as folder:
            paths = self.backend.artifacts(self.jobs[0].attempt.ref or {}, Path(folder))
            return {"files": len({path.name for path in paths} & {"rank-0.txt", "rank-1.txt"})}

    def _time_limit(self) -> Facts:
        job = self._watch(self._send(1), 1)
        took_s, plan = meter.held_s(job.attempt, time.time()) or 0.0, job.attempt.plan
        return {
            **_of(job),
            "took_s": round(took_s, 1),
            "over_s": round(max(0, took_s - plan.cap_s - plan.terms.tail_s), 1),
        }

    def _states(self) -> Facts:
        return {f"states_{number}": states for number, states in enumerate(self.states, 1)}

    def _log_lines(self) -> Facts:
        pace, training = self.backend.pace(self.jobs[0].attempt.ref or {}), self.prepared[0].config.training
        return checks.of_lines(self.lines[0], (training and training.max_steps) or 0, pace.hold_back_s + pace.late_s)

    def _losses(self) -> Facts:
        return checks.of_losses([*self.lines[0], *self.lines[1]])

    def _bill(self) -> Facts:
        attempts = [each for job in self.jobs for each in self.registry.attempts(job)]
        terms, legs, now_s = self.prepared[0].plan.terms, meter.legs_of(attempts), time.time()
        apart = [abs(leg.seconds(now_s) - ran_s) for leg, ran_s in zip(legs, self.ran_s, strict=False)]
        apart_s = max(apart, default=0.0) - terms.unit_s - terms.minimum_bill_s
        micro, worst_micro = meter.spent_micro(legs, now_s), sum(each.plan.worst_case_micro or 0 for each in attempts)
        over = None if micro is None else max(0, micro - worst_micro)
        return {
            "unwatched": len(legs) - len(apart),
            "apart_s": round(max(0.0, apart_s), 1),
            "micro": micro,
            "over_micro": over,
        }

    def _exit_codes(self) -> Facts:
        return {f"exit_{number}": code for number, code in enumerate(self.codes, 1)}

    def _cleaning(self) -> Facts:
        for job in self.jobs:
            if job.active:
                stopping.ask(self.registry, job.id, now=True)
                follow.wait(self.registry, [job], END_S, lambda _: None, quiet=True, retrying=False)
        active = [job for job in self.jobs if job.active]
        over = [job for job in self.jobs if not job.active]
        left = [each for each in remove.elsewhere(self.registry, over, remove=True) if each.kept]
        for each in left:
            say(f"{each.place} is not removed: {each.kept}")
        for job in over:
            remove.remove(self.registry, job)
        for job in active:
            say(f"it may still run: cloudtrain stop {job.id}")
        return {"active": len(active), "left": len(left)}


def _of(job: Job) -> Facts:
    state, progress = job.attempt.state, job.attempt.progress
    steps = {"saved_step": progress.get("checkpoint_step"), "resumed_step": progress.get("resumed_step")}
    return {
        "state": state.state,
        "reason": state.reason,
        "resumable": state.resumable,
        "attempt": job.attempt.number,
        **steps,
    }


def _code_of(error: CloudtrainError) -> str:
    """Return the platform's code of the error, such as AccessDeniedException; else the name of our own error."""
    response = getattr(error.__cause__, "response", None)
    codes = [response.get("Error", {}).get("Code")] if isinstance(response, dict) else []
    codes += [getattr(error.__cause__, name, None) for name in ("code", "status_code", "reason")]
    return next((str(each) for each in codes if re.fullmatch(r"\w{1,60}", str(each or ""))), type(error).__name__)
