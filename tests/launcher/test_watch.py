"""Watching: one look at each job, by one watcher, whatever is wrong with another; and what keeps it running."""

from __future__ import annotations

import configparser
import errno
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import retry, watch_service
from cloudtrain.launcher.jobs import watch as watching
from cloudtrain.launcher.jobs.log_fetcher import LogKeeper
from cloudtrain.launcher.logs import kept
from cloudtrain.launcher.notices.herald import Notifier
from cloudtrain.launcher.store.registry import Registry


def runs() -> State:
    """Return how a job is that has run for a minute, by the time of the test and not of its collection."""
    return State("running", started_s=time.time() - 60)


@pytest.fixture
def look(home: Path) -> Callable[[Job], watching.Seen | None]:
    """Return a watcher's look at a job."""
    registry = Registry()
    herald = Notifier(registry)

    def seen(job: Job) -> watching.Seen | None:
        return watching.look(registry, herald, job)

    return seen


def states(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], State]) -> None:
    """Have the local backend say so."""
    local = backends.load("local")
    monkeypatch.setattr(local, "state", answer)
    monkeypatch.setattr(local, "logs", lambda *args, **kwargs: backends.LogPage([], {}))


def test_jobs_that_are_active_or_ended_of_late_are_watched(seed: Callable[..., Job]) -> None:
    """The end that nobody saw is told, and not years later."""
    now_s = time.time()
    for name, state in {
        "runs": runs(),
        "ended": State("failed", "error", ended_s=now_s - 60),
        "old": State("failed", "error", ended_s=now_s - 90_000),
    }.items():
        seed(name, state)
    registry = Registry()
    assert {job.id for job in watching.chosen(registry, (), now_s)} == {"runs", "ended"}
    assert [job.id for job in watching.chosen(registry, ("old", "old"), now_s)] == ["old"]
    registry.close()


def test_one_watcher_acts_on_a_job_at_a_time(
    seed: Callable[..., Job], look: Callable[..., Any], home: Path, tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    """Another process that holds the job's byte has it; with that process the hold goes."""
    job = seed("held", runs())
    other = os.fork()
    if other == 0:
        try:
            with (home / watching.LOCK).open("a") as lock:
                fcntl.lockf(lock, fcntl.LOCK_EX, 1, zlib.crc32(b"held"))
                (tmp_path / "holds").touch()
                signal.pause()
        finally:
            os._exit(1)
    try:
        wait_until((tmp_path / "holds").exists)
        assert look(job) is None
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert look(job) is not None


@pytest.mark.parametrize(("number", "is_seen"), [(errno.ENOLCK, False), (errno.EINVAL, True)])
def test_lock_that_cannot_be_had_is_a_fault_and_no_end(
    seed: Callable[..., Job], look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, number: int, is_seen: bool
) -> None:
    """A home on a file system without locks; a kernel that only knows a process's own has that one taken."""

    def refused(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    job = seed("held", runs())
    states(monkeypatch, lambda ref: runs())
    monkeypatch.setattr(fcntl, "fcntl", refused)
    fault = look(job).fault
    assert fault == "" if is_seen else os.strerror(number) in fault


def test_threads_of_one_watcher_exclude_each_other_and_no_other_job(
    seed: Callable[..., Job], look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process's own lock would be none between them, and go with the first look that ends."""
    looked, goes_on = threading.Event(), threading.Event()

    def slow(ref: Any) -> State:
        looked.set()
        goes_on.wait(30)
        return runs()

    states(monkeypatch, lambda ref: slow(ref) if "slow" in ref["folder"] else runs())
    job, other = seed("slow", runs()), seed("other", runs())

    def watch() -> None:
        registry = Registry()
        watching.look(registry, Notifier(registry), job)
        registry.close()

    thread = threading.Thread(target=watch)
    thread.start()
    assert looked.wait(30)
    try:
        assert look(other) is not None
        assert look(job) is None
    finally:
        goes_on.set()
        thread.join()
    assert look(job) is not None


def test_log_of_a_job_that_has_ended_is_brought_home(cli: Callable[..., Any], seed: Callable[..., Job]) -> None:
    """By any watcher that sees the end: the machine may soon be gone."""
    seed("ended", State("failed", "error", ended_s=time.time()), {"0": "its last words\n"})
    assert cli("watch", "--once").code == 0
    registry = Registry()
    place = kept.place(registry.database, "ended", 1)
    registry.close()
    assert place is not None
    assert place.is_complete


def test_log_that_takes_long_to_bring_home_holds_up_nobody(
    seed: Callable[..., Job], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks go on, and whoever closes waits for all of them, or no longer than it says."""
    began, goes_on, done = threading.Event(), threading.Event(), list[str]()

    def keep(registry: Registry, seen: watching.Seen) -> None:
        began.set()
        assert goes_on.wait(60)
        done.append(seen.job.id)
        if seen.job.id == "a":
            raise KeyError("a fault of ours")

    monkeypatch.setattr(watching, "keep", keep)
    logs = LogKeeper(home)
    for name in ("a", "b"):
        job = seed(name, State("failed", "error", ended_s=time.time()))
        logs.take(watching.Seen(job, ended=job.attempt))
    logs.take(watching.Seen(seed("runs", runs())))
    assert began.wait(60)
    closing = threading.Timer(0.2, goes_on.set)
    closing.start()
    logs.close()
    closing.join()
    assert done == ["a", "b"]


def test_unreachable_backend_says_nothing_of_the_job(
    seed: Callable[..., Job], look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays what it was, and the line says who does not answer."""

    def silent(ref: Any) -> State:
        raise UnreachableError("no route to host")

    states(monkeypatch, silent)
    seen = look(seed("far", runs()))
    assert (seen.fault, seen.job.attempt.state.state) == ("", "running")
    assert "local does not answer" in watching.line(seen)


def test_fault_of_one_job_is_said_and_stands_in_no_others_way(
    seed: Callable[..., Job], look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it our own."""
    broken, fine = seed("broken", runs()), seed("fine", runs())
    states(monkeypatch, lambda ref: {}["no such"] if "broken" in ref["folder"] else runs())
    assert look(broken).fault == "cloudtrain itself failed: KeyError: 'no such'"
    assert look(fine).fault == ""


@pytest.mark.parametrize(("ago_s", "is_sent"), [(60, True), (7200, False)])
def test_earned_attempt_is_sent_though_another_command_saw_the_end(
    seed: Callable[..., Job], look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, ago_s: float, is_sent: bool
) -> None:
    """A job that ended long ago is not begun anew by surprise."""
    asked: list[str] = []
    monkeypatch.setattr(retry, "earned", lambda registry, job: asked.append(job.id))
    look(seed("gone", State("failed", "preempted", ended_s=time.time() - ago_s)))
    assert bool(asked) is is_sent


def test_attempt_that_was_sent_is_what_is_seen(
    seed: Callable[..., Job], look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on."""

    def earned(registry: Registry, job: Job) -> Job:
        return replace(job, attempt=replace(job.attempt, number=2, state=State("pending")))

    monkeypatch.setattr(retry, "earned", earned)
    seen = look(seed("gone", State("failed", "preempted", ended_s=time.time())))
    assert (seen.is_again, seen.job.attempt.number, seen.job.active) == (True, 2, True)


def test_watch_once_prints_a_line_a_job(cli: Callable[..., Any], seed: Callable[..., Job]) -> None:
    """For people, and as one object for scripts."""
    seed("ended", State("failed", "error", ended_s=time.time()))
    done = cli("watch", "--once", "ended")
    assert (done.code, "ended  failed (error)" in done.stdout) == (0, True), done.stderr
    told = json.loads(cli("watch", "--once", "--json", "ended").stdout)
    assert (told["job"], told["state"], told["alerts"]) == ("ended", "failed", [])
    assert cli("watch", "--once").stdout == ""  # what had ended before is only looked through


def test_watch_of_a_named_job_ends_with_it(cli: Callable[..., Any], seed: Callable[..., Job]) -> None:
    """With the job's exit code."""
    seed("ended", State("stopped", "user", ended_s=time.time()))
    assert cli("watch", "ended").code == 9


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nosuch"], 8, "no job `nosuch`"),
        (["--every", "soon"], 2, "a duration with a unit"),
        (["--every", "0s"], 2, "too often"),
        (["--all", "x"], 2, "name jobs, or take --all"),
        (["--install", "--uninstall"], 2, "exclude each other"),
    ],
)
def test_watch_refuses_what_makes_no_sense(cli: Callable[..., Any], args: list[str], code: int, words: str) -> None:
    """Before it watches anything."""
    done = cli("watch", *args)
    assert (done.code, words in done.stderr) == (code, True), done.stderr
    assert "itself failed" not in done.stderr


def test_unit_is_written_and_not_enabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd reads it, whatever the folders are called; and removed."""
    odd = tmp_path / 'a folder %h "quoted" $HOME'
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "con fig"))
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(odd))
    path = watch_service.install("30s")
    assert path == tmp_path / "con fig" / "systemd" / "user" / "cloudtrain-watch.service"
    read = configparser.RawConfigParser(strict=False)
    read.read_string(path.read_text())
    command = shlex.split(read["Service"]["ExecStart"].replace("$$", "$"))
    assert command[1:] == ["watch", "--all", "--every", "30s"]
    assert Path(command[0]).exists()
    home = str(odd).replace("%", "%%").replace('"', '\\"')
    assert f'Environment="CLOUDTRAIN_HOME={home}"' in path.read_text()
    if shutil.which("systemd-analyze"):
        told = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        checked = subprocess.run(
            ["systemd-analyze", "verify", "--user", path], env=told, capture_output=True, text=True, check=False
        )
        assert "cloudtrain-watch" not in checked.stderr
    assert watch_service.uninstall() == path
    assert watch_service.uninstall() is None


def test_cron_line_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A % in it would be a line's end to cron."""
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "100% mine"))
    line = watch_service.cron_line()
    minute, command = line[:10], line[10:]
    assert minute == "* * * * * "
    assert r"100\% mine" in command
    done = subprocess.run(command.replace(r"\%", "%"), shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_install_without_systemd_prints_the_cron_line(cli: Callable[..., Any], tmp_path: Path) -> None:
    """And writes nothing."""
    empty = tmp_path / "bin"
    empty.mkdir()
    done = cli("watch", "--install", env={"PATH": str(empty), "XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert (done.code, "watch --all --once" in done.stdout) == (0, True), done.stderr
    assert not (tmp_path / "config").exists()


@pytest.mark.slow
def test_watch_sends_the_attempt_that_a_real_job_has_earned(
    cli: Callable[..., Any], project: Callable[..., Path]
) -> None:
    """Detached, failed, begun anew by the watcher, and left alone when no attempt is left."""
    where = project("retry: {max_attempts: 2, on: [error]}\n", text="raise SystemExit('boom')\n")
    sent = cli("submit", "-d", "-y", "--name", "again", cwd=where)
    assert sent.code == 0, sent.stderr
    watched = cli("watch", "again", "--every", "1s", "--json", cwd=where)
    told = [json.loads(line) for line in watched.stdout.splitlines()]
    assert (watched.code, told[-1]["attempt"], told[-1]["state"]) == (1, 2, "failed"), watched.stderr
    assert "attempt 2 of at most 2 begins" in watched.stderr
    assert cli("watch", "--once", cwd=where).code == 0
    assert cli("status", "again", "--json").json["attempt"] == 2
