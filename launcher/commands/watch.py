"""`cloudtrain watch`: poll jobs, show the jobs live, and send due alerts and retries."""

from __future__ import annotations

import os
import queue
import shutil
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ..errors import UsageError
from ..job import Job, exit_code
from ..jobs import watch_service
from ..store.registry import Registry
from ..text.terminal import print_json, print_lines, print_text, say
from ..text.units import format_duration
from .options import cli_command, completes, duration_option, flag, json_option

if TYPE_CHECKING:
    from ..jobs.poller import Seen

EVERY_S, LEAST_S = 60, 1
CHOOSE_S = 5.0  # for the list of jobs


@cli_command(
    "watch",
    "cloudtrain watch            all jobs, live; arrows choose one, Enter opens it",
    "cloudtrain watch digits     its curves, money and log, until it ends",
    "cloudtrain watch --install  alerts and retries while nobody is logged in",
)
@click.argument("jobs", nargs=-1, shell_complete=completes("jobs"))
@flag("--all", "everything", help="All jobs that are active; the default without JOBS.")
@flag("--once", help="One look at each, as for cron.")
@flag("--plain", help="Lines also on a terminal, instead of the live view.")
@duration_option(
    "--every",
    "every_s",
    help="Time between two looks  [default: 60s; in the live view as often as the backend supports]",
)
@flag("--install", help="Write a unit for the user's systemd; else print a line for cron.")
@flag("--uninstall", help="Remove that unit.")
@json_option
def command(
    jobs: tuple[str, ...],
    everything: bool,
    once: bool,
    plain: bool,
    every_s: int | None,
    install: bool,
    uninstall: bool,
    as_json: bool,
) -> int:
    """Watch jobs: update their state, send alerts and the retries of `retry`.

    A terminal shows the jobs live: a single job with its curves and its log, many jobs in a table; the keys are on the
    screen. Without a terminal each poll prints a line per job. The command ends when the named JOBS have ended, with
    their first exit code other than 0; without JOBS the command never ends. With --json each poll prints an object per
    job.
    """
    if every_s is not None and every_s < LEAST_S:
        raise UsageError(f"--every {every_s}s: too often", hint=f"at least {LEAST_S}s")
    if jobs and everything:
        raise UsageError("name jobs, or take --all")
    if install or uninstall:
        if install and uninstall:
            raise UsageError("--install and --uninstall exclude each other")
        return _install(f"{every_s or EVERY_S}s") if install else _uninstall()
    if not (once or plain or as_json) and _is_live():
        from ..live.main_loop import show

        return show(jobs, every_s or 0.0)
    try:
        return _watch(jobs, every_s or EVERY_S, once=once, as_json=as_json)
    except KeyboardInterrupt:
        say("no longer watching; the jobs continue")
        return 130


def _is_live() -> bool:
    """Return whether input and output are a terminal able to show the live view."""
    is_capable = os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
    return is_capable and sys.stdin.isatty() and sys.stdout.isatty()


def _watch(names: tuple[str, ...], every_s: float, *, once: bool, as_json: bool) -> int:
    from ..jobs import watch as watching
    from ..jobs.poller import Pacing, Poller, Seen

    registry, found = Registry(), queue.SimpleQueue[Seen]()
    selection, logs = watching.Selection(registry, names), watching.LogKeeper(registry.folder)
    if not once:
        watching.chosen(registry, names, time.time())  # an unknown name is an error before any other line
        what = ", ".join(names) or "all jobs"
        say(f"watching {what}, every {format_duration(int(every_s))}; Ctrl-C ends the watch, and no job")
    jobs: list[Job] = []
    codes: dict[str, int] = {}  # of the ended jobs, in the order of their ends
    faults = polls = 0
    begin, pacing = watching.notifying(watching.look), Pacing(every_s=lambda: every_s)
    with Poller(registry.folder, begin, found.put, pacing, once=once) as poller:
        while True:
            if not (once and polls) and (changed := selection.news(time.time())) is not None:
                jobs = changed
                poller.watch(jobs)
            if polls == len(jobs) if once else names and len(codes) == len(jobs):
                break
            with suppress(queue.Empty):
                seen = found.get(timeout=CHOOSE_S)
                polls += 1
                faults += _take(registry, seen, codes, is_named=bool(names), as_json=as_json)
                logs.take(seen)
    logs.close()
    return int(faults > 0) if once else next((code for code in codes.values() if code), 0)


def _take(registry: Registry, seen: Seen, codes: dict[str, int], *, is_named: bool, as_json: bool) -> bool:
    """Print the result of a poll, and store the exit code of an ended job; return whether the poll failed."""
    job = seen.job
    if seen.fault is not None:
        say(f"{job.id}: {seen.fault}")
        return True
    if seen.is_mine:
        if is_named or seen.was_active or job.active:  # print no line for a job ended earlier
            _print(registry, seen, as_json=as_json)
        codes.pop(job.id, None)
        if not job.active:
            codes[job.id] = exit_code(job.attempt.state)
    return False


def _print(registry: Registry, seen: Seen, *, as_json: bool) -> None:
    from ..jobs.overview import as_line
    from ..sweeps.overview import whole_json

    assert seen.view is not None, "a poll without a fault has read the job"
    if not as_json:
        print_text([as_line(seen.view)])
        return
    alerts = [notice.fields for notice in seen.notices]
    print_json({"time_s": round(time.time(), 3), **whole_json(registry, seen.view), "alerts": alerts})


def _install(every: str) -> int:
    if shutil.which("systemctl") is None:
        say("there is no systemd here; this line for `crontab -e` looks once a minute:")
        print_lines([watch_service.cron_line()])
        return 0
    path = watch_service.install(every)
    print_lines([str(path)])
    name, variables = watch_service.NAME, watch_service.environment_file()
    say(f"written, and not enabled:\n  systemctl --user daemon-reload && systemctl --user enable --now {name}")
    say(f"  loginctl enable-linger   has it run while you are logged out\n  {variables}   variables for it: NAME=value")
    return 0


def _uninstall() -> int:
    path = watch_service.uninstall()
    stop = f"systemctl --user disable --now {watch_service.NAME}   ends one that runs"
    say("there is no such unit" if path is None else f"removed {path}\n  {stop}")
    return 0
