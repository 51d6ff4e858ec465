"""`watch`: a single watcher polls each job, faults of a job stay with the job, and a service keeps `watch` running."""

import configparser
import errno
import fcntl
import json
import os
import queue
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
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.launcher.errors import CapacityError, UnreachableError
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.jobs import poller, retry, submit, watch_service
from cloudtrain.launcher.jobs import watch as watching
from cloudtrain.launcher.jobs.overview import as_line
from cloudtrain.launcher.jobs.poller import Pacing, Poller, Seen
from cloudtrain.launcher.jobs.watch import LogKeeper
from cloudtrain.launcher.logs import cache
from cloudtrain.launcher.notices.notifier import Notifier
from cloudtrain.launcher.store.registry import Registry
from doubles.signatures import MakeJob, MakeProject, SetAnswers
from doubles.waiting import until


def runs() -> State:
    """Return the state of a job that has run for a minute, counted from the test and not from its collection."""
    return State("running", started_s=time.time() - 60)


@pytest.fixture
def look(home: Path) -> Callable[[Job], Seen]:
    """Return a function that polls a job as a watcher."""
    registry = Registry()
    notifier = Notifier(registry)

    def seen(job: Job) -> Seen:
        return watching.look(registry, notifier, job)

    return seen


def test_only_a_single_watcher_acts_on_a_job(seed: MakeJob, look: Any, home: Path, tmp_path: Path) -> None:
    """A process locks a byte of the lock file per job; the lock ends with the process."""
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
        until((tmp_path / "holds").exists)
        assert not look(job).is_mine
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert look(job).is_mine


@pytest.mark.parametrize(("number", "is_seen"), [(errno.ENOLCK, False), (errno.EINVAL, True)])
def test_lock_that_cannot_be_taken_is_a_fault_of_the_job(
    seed: MakeJob, look: Any, answers: SetAnswers, monkeypatch: pytest.MonkeyPatch, number: int, is_seen: bool
) -> None:
    """ENOLCK means a file system without locks; EINVAL means a kernel with process locks only, which then serve."""

    def refused(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    job = seed("held", runs())
    answers(lambda ref: runs())
    monkeypatch.setattr(fcntl, "fcntl", refused)
    fault = look(job).fault
    assert fault is None if is_seen else os.strerror(number) in str(fault)


def test_threads_of_a_watcher_exclude_each_other_per_job(seed: MakeJob, look: Any, answers: SetAnswers) -> None:
    """A process lock would not separate threads, and would end with the first poll that ends."""
    looked, goes_on = threading.Event(), threading.Event()

    def slow(ref: Any) -> State:
        looked.set()
        goes_on.wait(30)
        return runs()

    answers(lambda ref: slow(ref) if "slow" in ref["folder"] else runs())
    job, other = seed("slow", runs()), seed("other", runs())

    def watch() -> None:
        registry = Registry()
        watching.look(registry, Notifier(registry), job)
        registry.close()

    thread = threading.Thread(target=watch)
    thread.start()
    assert looked.wait(30)
    try:
        assert look(other).is_mine
        assert not look(job).is_mine
    finally:
        goes_on.set()
        thread.join()
    assert look(job).is_mine


def test_watch_stores_the_log_of_an_ended_job(registry: Registry, cli: Any, seed: MakeJob) -> None:
    """Any watcher that sees an end stores the log; a recent end is reported, an old end is not."""
    seed("ended", State("failed", "error", ended_s=time.time()), {"0": "its last words\n"})
    assert cli("watch", "--once").code == 0
    place = cache.place(registry.database, "ended", 1)
    assert place.is_complete
    now_s = time.time()
    for name, state in {"runs": runs(), "old": State("failed", "error", ended_s=now_s - 90_000)}.items():
        seed(name, state)
    assert {job.id for job in watching.chosen(registry, (), now_s)} == {"runs", "ended"}
    assert [job.id for job in watching.chosen(registry, ("old", "old"), now_s)] == ["old"]


def test_slow_log_storing_delays_no_poll(seed: MakeJob, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls continue, and `close` waits for all logs or until its limit."""
    began, goes_on, done = threading.Event(), threading.Event(), list[str]()

    def keep(registry: Registry, job: Job, attempt: Attempt) -> None:
        began.set()
        assert goes_on.wait(60)
        done.append(job.id)
        if job.id == "a":
            raise KeyError("a fault of ours")

    monkeypatch.setattr(watching.stream, "keep_whole", keep)
    logs = LogKeeper(home)
    for name in ("a", "b"):
        job = seed(name, State("failed", "error", ended_s=time.time()))
        logs.take(Seen(job, ended=job.attempt))
    logs.take(Seen(seed("runs", runs())))
    assert began.wait(60)
    closing = threading.Timer(0.2, goes_on.set)
    closing.start()
    logs.close()
    closing.join()
    assert done == ["a", "b"]


def test_faults_stay_with_their_job(seed: MakeJob, look: Any, answers: SetAnswers) -> None:
    """A silent backend leaves the state and is named in the line; an internal error stays with its job."""

    def silent(ref: Any) -> State:
        raise UnreachableError("no route to host")

    answers(silent)
    seen = look(seed("far", runs()))
    assert (seen.fault, seen.job.attempt.state.state) == (None, "running")
    assert "local does not answer" in as_line(seen.view)
    broken, fine = seed("broken", runs()), seed("fine", runs())
    answers(lambda ref: {}["no such"] if "broken" in ref["folder"] else runs())
    assert str(look(broken).fault) == "cloudtrain itself failed: KeyError: 'no such'"
    assert look(fine).fault is None


def test_watch_sends_an_earned_retry_after_a_recent_end(
    seed: MakeJob, look: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job stays active with the new attempt; a job that ended long ago is not restarted."""
    asked: list[str] = []

    def send_if_due(registry: Registry, job: Job) -> Job:
        asked.append(job.id)
        return replace(job, attempt=replace(job.attempt, number=2, state=State("pending")))

    monkeypatch.setattr(retry, "send_if_due", send_if_due)
    look(seed("old", State("failed", "preempted", ended_s=time.time() - 7200)))
    assert asked == []
    seen = look(seed("gone", State("failed", "preempted", ended_s=time.time() - 60)))
    assert (asked, seen.job.attempt.number, seen.job.active) == (["gone"], 2, True)


def test_watch_tries_again_if_the_hosts_of_a_retry_are_not_ready(
    seed: MakeJob, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that boots, or that still ends the attempt before, delays the retry and does not cancel it."""
    obstacles = iter([CapacityError("h4 is held"), UnreachableError("h4 does not answer"), None])
    ended = State("failed", "node_failure", ended_s=time.time() - 60)

    def prepare(*args: Any, **kwargs: Any) -> Any:
        if (obstacle := next(obstacles)) is not None:
            raise obstacle
        return SimpleNamespace(config=None)

    def resend(registry: Registry, job: Job, prepared: Any) -> Job:
        return replace(job, attempt=replace(job.attempt, number=2))

    monkeypatch.setattr(retry, "is_due", lambda job, attempts: True)
    monkeypatch.setattr(retry, "prepare_next", prepare)
    monkeypatch.setattr(retry, "older_start", lambda *args: None)
    monkeypatch.setattr(retry, "_of_another", lambda *args: None)
    monkeypatch.setattr(submit, "resend", resend)
    monkeypatch.setattr(poller, "_SILENT_S", 0.01)
    job, shown = seed("gone", ended), queue.SimpleQueue[Seen]()
    with Poller(home, watching.notifying(watching.look), shown.put, Pacing(least_s=0.0, rest=0.0)) as polls:
        polls.take(job)
        seen = [shown.get(timeout=30) for _ in range(3)]
    assert [str(each.fault or "") for each in seen] == ["h4 is held", "h4 does not answer", ""]
    assert [each.job.attempt.number for each in seen] == [1, 1, 2]


def test_watch_once_prints_a_line_per_job(cli: Any, seed: MakeJob) -> None:
    """The output is a line for people and an object for scripts; a named job exits with the code of its end."""
    seed("ended", State("failed", "error", ended_s=time.time()))
    done = cli("watch", "--once", "ended")
    assert (done.code, "ended  failed (error)" in done.stdout) == (0, True), done.stderr
    told = json.loads(cli("watch", "--once", "--json", "ended").stdout)
    assert (told["job"], told["state"], told["alerts"]) == ("ended", "failed", [])
    assert cli("watch", "--once").stdout == ""  # a job that ended earlier is polled without a line
    seed("stopped", State("stopped", "user", ended_s=time.time()))
    assert cli("watch", "stopped").code == 9


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
def test_watch_refuses_invalid_arguments(cli: Any, args: list[str], code: int, words: str) -> None:
    """The command exits before the first poll."""
    done = cli("watch", *args)
    assert (done.code, words in done.stderr) == (code, True), done.stderr
    assert "watching" not in done.stderr
    assert "itself failed" not in done.stderr


def test_unit_is_written_and_not_enabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd can read the unit for any folder name, and `uninstall` removes the unit."""
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


def test_install_without_systemd_prints_the_cron_line(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is written; cron reads an unescaped % as a line end."""
    empty = tmp_path / "bin"
    empty.mkdir()
    done = cli("watch", "--install", env={"PATH": str(empty), "XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert (done.code, "watch --all --once" in done.stdout) == (0, True), done.stderr
    assert not (tmp_path / "config").exists()
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "100% mine"))
    line = watch_service.cron_line()
    minute, command = line[:10], line[10:]
    assert minute == "* * * * * "
    assert r"100\% mine" in command
    done = subprocess.run(command.replace(r"\%", "%"), shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.slow
def test_watch_sends_the_earned_retry_of_a_real_job(cli: Any, project: MakeProject) -> None:
    """A detached job fails, the watcher sends the retry, and then leaves the job alone because no attempt is left."""
    where = project("retry: {max_attempts: 2, on: [error]}\n", text="raise SystemExit('boom')\n")
    cli.ok("submit", "-d", "-y", "--name", "again", cwd=where)
    watched = cli("watch", "again", "--every", "1s", "--json", cwd=where)
    told = [json.loads(line) for line in watched.stdout.splitlines()]
    assert (watched.code, told[-1]["attempt"], told[-1]["state"]) == (1, 2, "failed"), watched.stderr
    assert "attempt 2 of at most 2 begins" in watched.stderr
    assert cli("watch", "--once", cwd=where).code == 0
    assert cli("status", "again", "--json").json["attempt"] == 2
