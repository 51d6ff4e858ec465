"""The notifier of a process that follows jobs: prints due alerts and queues them for the channels."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import click

from cloudtrain.entrypoints.notices.message import Notice
from cloudtrain.entrypoints.notices.rules import JOB_EVENTS, corrects, standing, unsent, wanted

from ..channels import ChannelEntry, desktop, entries
from ..errors import ConfigError
from ..job import Job
from ..money.forecast import forecast
from ..money.job_facts import job_facts
from ..store.registry import Registry
from ..text.tables import width, wrapped
from ..text.terminal import escaped, reported, say
from . import outbox
from .delivery import EXIT_S, Delivery, DeliveryThread

# The process that follows a job prints its start, progress and end by other means.
ON_TERMINAL = ("budget", "projected", "deadline", "stalled")
MARK = "[alert]"  # on standard error, to differ from a job's lines
EVERY_S = 1.0
RECENT_S = 86_400.0  # the end of an unobserved job is reported up to a day later
JOB_SENDS_S = 120.0  # how long a running job may take to send its own notices


class Notifier:
    """The notifier for all jobs that a process follows; call `close` at the end."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._courier = DeliveryThread(registry.folder, _say)
        self._desktop = desktop()
        self._looked: dict[str, tuple[float, Any]] = {}
        self._shown: dict[str, set[str]] = {}

    def look(self, job: Job) -> list[Notice]:
        """Print due alerts and queue them for the channels; return the new alerts. Safe to call often."""
        kind = (job.attempt.number, job.attempt.state.state, job.attempt.state.reason)
        seen_s, before = self._looked.get(job.id, (0.0, None))
        if before == kind and (not job.active or time.monotonic() - seen_s < EVERY_S):
            return []
        self._looked[job.id] = (time.monotonic(), kind)
        now_s = time.time()
        ended_s = job.attempt.state.ended_s
        if not job.active and ended_s is not None and now_s - ended_s > RECENT_S:
            return []
        attempts = self._registry.attempts(job)
        if attempts[-1].number > job.attempt.number and "places" in attempts[-1].submitter:
            job = replace(job, attempt=attempts[-1])  # no end: the job is in line for its next candidate
        facts = job_facts(job, forecast(job, attempts, now_s), attempts)
        keys_sent = {tuple(each) for each in job.attempt.progress.get("told", ())}
        return self.tell(job.id, job.config, standing(facts, now_s), keys_sent=keys_sent, is_active=job.active)

    def tell(
        self,
        job_id: str,
        config: Mapping[str, Any],
        notices: list[Notice],
        *,
        keys_sent: Collection[tuple[str, ...]] = (),
        is_active: bool = False,
    ) -> list[Notice]:
        """Print notices that no process has printed, and queue them for the channels of the config.

        `job_id`: the job under which deliveries are stored. `keys_sent`: channel and key of notices that the job itself
        has sent. An active job (`is_active`) has some time to send a notice by itself.
        """
        now_s = time.time()
        new = self._new(job_id, [notice for notice in notices if notice.event in ON_TERMINAL], now_s)
        for notice in new:
            show(notice)
        places: list[ChannelEntry] = [*entries(config), *([self._desktop] if self._desktop else [])]
        deliveries = []
        for entry in places:
            reported = outbox.delivered_keys(self._registry.database, job_id, entry.id)
            for notice in notices:
                if wanted(notice, entry.on) and corrects(notice, reported):
                    is_waiting = is_active and entry.from_job and notice.event in JOB_EVENTS
                    is_sent = (entry.id, notice.key) in keys_sent
                    deliveries.append(Delivery(job_id, entry, notice, JOB_SENDS_S if is_waiting else 0.0, is_sent))
        self._courier.offer(deliveries)
        return new

    def close(self, wait_s: float = EXIT_S) -> None:
        """Wait briefly for deliveries."""
        self._courier.close(wait_s)

    def _new(self, job_id: str, notices: list[Notice], now_s: float) -> list[Notice]:
        """Return alerts not printed by this process, nor by an earlier process before this process began."""
        shown = self._shown.get(job_id)
        if shown is None:
            shown = self._shown[job_id] = outbox.delivered_keys(self._registry.database, job_id, outbox.TERMINAL)
        new = unsent(notices, shown)
        for notice in new:
            shown.add(notice.key)
            with suppress(ConfigError):  # a full disk must not hide due alerts
                outbox.mark_sent(self._registry.database, job_id, outbox.TERMINAL, notice, now_s)
        return new


def show(notice: Notice) -> None:
    """Print the notice on standard error; a terminal also rings, or shows a desktop notification (OSC 9)."""
    if reported("\n".join((notice.title, *notice.lines))):
        return
    is_terminal = sys.stderr.isatty()
    mark = click.style(MARK, fg="yellow", bold=True) if is_terminal and not os.environ.get("NO_COLOR") else MARK
    columns = width(sys.stderr)
    room = None if columns is None else columns - len(MARK) - 1
    lines = wrapped(map(escaped, (notice.title, *(f"  {line}" for line in notice.lines))), room)
    text = "\n".join(f"{mark} {line}" for line in lines)
    if is_terminal and os.environ.get("TERM", "dumb") != "dumb":
        text += f"\a\033]9;{escaped(notice.title)}\a"
    click.echo(text, err=True)


def _say(words: str) -> None:
    with suppress(OSError, ValueError):  # standard error is closed at the very end
        say(words)
