"""Notifications by the job itself, if the config asks for them: node 0's agent sends while the launcher may be off.

A thread of the agent, outside the ranks' processes: no step waits for a send, and the job's end waits at most EXIT_S.
Each delivered notification is an event line in rank 0's log, so that a follower of the job does not send the same
again, and is noted beside the checkpoints, so that the job on other machines does not either.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import atomic_json, events
from ..contract import AgentSpec, ExitReport, NoticeSettings, has_checkpoint
from ..terms import CostRate
from . import rules
from .facts import JobFacts, StepFacts, is_limit_first
from .message import DeliveryError, Notice
from .sending import Channel, back_off_s, send, try_all

EXIT_S = 2.5  # the longest wait of a job's end for its notifications
EVERY_S = 5.0
MEMORY = ".told.json"  # beside the checkpoints
TAIL_BYTES = 1 << 20  # of rank 0's log, searched for the last step and save
_FROM_STEP = ("step", "max_steps", "eta_s")


def of_agent(spec: AgentSpec, began_s: float) -> NodeNotifier | None:
    """Return the notifier of the job in this agent's spec; None if the job wants no notifications, or off node 0."""
    return None if spec.job.notices is None or spec.node != 0 else NodeNotifier(spec, spec.job.notices, began_s)


class NodeNotifier(threading.Thread):
    """The thread that notifies. `began_s`: the agent's start, in unix seconds."""

    def __init__(self, spec: AgentSpec, settings: NoticeSettings, began_s: float) -> None:
        super().__init__(name="notices", daemon=True)
        self._spec = spec
        self._settings = settings
        self._began_s = began_s
        self._channels: dict[str, tuple[Channel, tuple[str, ...]]] = {}  # by id, each with the subscribed events
        for each in settings.channels:
            value, is_mail = spec.secrets.get(each.secret, "").strip(), each.kind == "email"
            channel = Channel(each.kind, each.to if is_mail else value, value if is_mail else "", each.sender)
            self._channels[each.id] = (channel, each.on)
        self._log = Path(spec.root) / "log" / "rank-0.log"
        self._folder = Path(spec.environment["CLOUDTRAIN_CHECKPOINT_DIR"])
        known = atomic_json.read_json(self._folder / MEMORY)
        is_own = isinstance(known, dict) and known.get("job") == spec.job.job
        self._sent = {(str(name), str(key)) for name, key in known.get("told", ())} if is_own else set()
        self._tries: dict[tuple[str, str], tuple[int, float]] = {}
        self._marking = threading.Lock()
        self._said: set[str] = set()
        self._verdict: ExitReport | None = None
        self._end_s = 0.0
        self._wall_s = time.time() - time.monotonic()  # measured once: the wall clock may be set meanwhile
        self._is_over = threading.Event()

    def count_earlier(self, used_s: float) -> None:
        """Count the time that the job has used before this start; its limits include the time. Call before `start`."""
        spec = replace(self._spec, used_s=self._spec.used_s + used_s, deadline_s=self._spec.deadline_s - used_s)
        self._spec = replace(spec, max_duration_s=spec.max_duration_s - used_s)

    def end(self, verdict: ExitReport) -> None:
        """Start to notify how the job has ended; return at once."""
        self._verdict, self._end_s = verdict, time.monotonic() + EXIT_S
        self._is_over.set()

    def leave(self) -> None:
        """End the thread without a notification: the job waits in line again, and a later notifier continues."""
        self._is_over.set()

    def finish(self) -> None:
        """Return after the last notification, at most EXIT_S after `end`."""
        self.join(max(0.0, self._end_s - time.monotonic()))

    def due(self, progress: Mapping[str, Any], now_s: float) -> list[Notice]:
        """Return the notifications that are due while the job runs, or after its end, also those already sent."""
        facts = self._facts(progress, now_s)
        return [notice for notice in rules.standing(facts, now_s, "job") if notice.event in rules.JOB_EVENTS]

    def run(self) -> None:
        """Send the due notifications, until the end was notified."""
        every_s = max(0.2, min(EVERY_S, self._spec.max_duration_s / 100))
        again_s: float | None = None
        while not self._is_over.wait(min(every_s, again_s or every_s)):
            again_s = self._tell()
        while True:
            wait_s = self._tell()
            if wait_s is None or time.monotonic() + wait_s > self._end_s:
                return
            time.sleep(wait_s)

    def _tell(self) -> float | None:
        """Send the due notifications; return the seconds until the next retry, None without a retry."""
        now_s = self._now_s()
        due = self._unsent(self.due({}, now_s), now_s)
        if due:  # the log is read only if a notification is due
            saved = {"checkpoint_step": None} if has_checkpoint(self._folder) else {}
            due = self._unsent(self.due(saved | _progress(self._log), now_s), now_s)
        faults = try_all([partial(self._send, name, notice) for name, notice in due])
        for (name, notice), fault in zip(due, faults, strict=True):
            if fault is not None and (name, notice.key) not in self._sent:
                tries = self._tries.get((name, notice.key), (0, 0.0))[0] + 1
                self._tries[name, notice.key] = (tries, self._now_s() + back_off_s(tries, fault))
                self._say(self._channels[name][0], fault)
        waits = [next_s for key, (_, next_s) in self._tries.items() if key not in self._sent]
        return max(0.05, min(waits) - self._now_s()) if waits else None

    def _facts(self, progress: Mapping[str, Any], now_s: float) -> JobFacts:
        """Return the facts by this machine's clock; the costs of earlier attempts and machines count."""
        spec, settings, began_s, verdict = self._spec, self._settings, self._began_s, self._verdict
        job, steps, is_running = spec.job, StepFacts.load(progress), verdict is None
        rate, spent, worst = settings.rate, None, None
        if rate is not None:
            cost = rate.hourly_micro * (now_s - began_s + spec.used_s) / 3600
            spent, worst = round(settings.spent_micro + cost), round(settings.spent_micro + cost * rate.uncertainty)
        finish_at_s = total = None
        if is_running and steps.eta_s is not None:
            finish_at_s = now_s + steps.eta_s
            total = None if spent is None or rate is None else spent + round(rate.hourly_micro * steps.eta_s / 3600)
        leaves_at_s = began_s + spec.deadline_s
        return JobFacts(
            job=job.job,
            backend=settings.backend,
            attempt=job.attempt,
            state="running" if verdict is None else verdict.state,
            reason=None if verdict is None else verdict.reason,
            error=(verdict.error if verdict else None) or {},
            progress=steps,
            spent_micro=spent,
            spent_worst_micro=worst,
            limit_micro=settings.limit_micro,
            burn_micro_h=0 if not is_running else None if rate is None else rate.hourly_micro,
            total_micro=total,
            rate=rate or CostRate(1, 0),
            terms=settings.terms,
            alert_at=settings.alert_at,
            on_limit=settings.on_limit,
            limit_reason=spec.limit_reason,
            began_s=began_s,
            cap_at_s=began_s + spec.max_duration_s,
            deadline_at_s=leaves_at_s,
            finish_at_s=finish_at_s,
            hits_limit=is_limit_first(finish_at_s, leaves_at_s, total, settings.limit_micro),
            is_hard=spec.deadline_s >= spec.max_duration_s,
            saves=job.run.is_own or job.run.on_stop == "save",
            is_saved="checkpoint_step" in progress,
            is_resumable=verdict is not None and verdict.state != "succeeded" and has_checkpoint(self._folder),
        )

    def _now_s(self) -> float:
        return self._wall_s + time.monotonic()

    def _unsent(self, notices: list[Notice], now_s: float) -> list[tuple[str, Notice]]:
        found, sent = [], set(self._sent)  # a copy: the threads of late sends add to the set
        self._tries = {key: value for key, value in self._tries.items() if key[1] in {each.key for each in notices}}
        for name, (_, on) in self._channels.items():
            for notice in rules.unsent(notices, {key for channel, key in sent if channel == name}):
                if rules.wanted(notice, on) and self._tries.get((name, notice.key), (0, 0.0))[1] <= now_s:
                    found.append((name, notice))
        return found

    def _send(self, name: str, notice: Notice) -> None:
        """Deliver the notice and mark it at once, without waiting for other sends. Raises DeliveryError."""
        channel = self._channels[name][0]
        send(channel, notice)
        about = {"channel": name, "key": notice.key}
        line = events.format_line("notice", f"alert sent to {channel.shown}: {notice.title}", about) + "\n"
        with self._marking:
            self._sent.add((name, notice.key))
            try:
                with os.fdopen(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", 0) as log:
                    log.write(line.encode())
                kept = sorted([each, key] for each, key in self._sent if key.startswith(("budget:", "deadline:")))
                atomic_json.write_json(self._folder / MEMORY, {"job": self._spec.job.job, "told": kept})
            except OSError as error:  # a full disk: at worst a notification is sent twice
                print(f"agent: the list of delivered alerts cannot be saved: {error}", flush=True)

    def _say(self, channel: Channel, fault: DeliveryError) -> None:
        words = f"alert not delivered, next try follows: {channel.shown}: {fault}"
        words += f"; {fault.cure}" if fault.cure else ""
        if words not in self._said:
            self._said.add(words)
            print(f"agent: {words}", flush=True)


def _progress(log: Path) -> dict[str, Any]:
    """Return the last step and checkpoint near the end of rank 0's log."""
    found: dict[str, Any] = {}
    lines: list[str] = []
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    for line in lines:
        event = events.parse(line)[1] or {"e": ""}
        if event["e"] in ("start", "step", "done"):
            found |= {key: event[key] for key in _FROM_STEP if key in event}
        elif event["e"] in ("checkpoint", "restart") and event.get("path"):
            found["checkpoint_step"] = event.get("step", found.get("checkpoint_step"))
            found["saved_after"] = found.get("step")
    return found
