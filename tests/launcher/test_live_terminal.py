"""The live view on a real terminal: its content, and the restored terminal after any end of the watch."""

import os
import signal
import sys
from pathlib import Path

import pytest

from cloudtrain.launcher.job import State
from cloudtrain.launcher.live import screen as screens
from cloudtrain.launcher.live.screen import Screen
from doubles.signatures import MakeJob, OpenTerminal
from doubles.terminals import COMMAND, ENTER, LEAVE, Terminal
from doubles.waiting import until

ENDED = State("failed", "error", error={"rank": 1, "type": "ValueError", "message": "no such thing"}, ended_s=1.0)


def waits(seed: MakeJob, name: str = "waits") -> str:
    """Add a job that this process is submitting, so that the job stays active during the test."""
    return seed(name).id


def waiting(terminal: OpenTerminal, seed: MakeJob) -> Terminal:
    """Return a terminal with the view of such a job."""
    shown = terminal(waits(seed))
    shown.see("pending")
    return shown


def test_single_job_is_shown_until_the_user_leaves(terminal: OpenTerminal, seed: MakeJob) -> None:
    """The view has the log and the advice; the status stays on the terminal, and the exit code is the job's."""
    seed("ended", ENDED, {"0": "a line of rank 0\n"})
    shown = terminal("ended")
    shown.see("ValueError: no such thing")
    shown.see("a line of rank 0")
    shown.press("q")
    assert shown.end() == 1
    until(lambda: "no such thing" in shown.after())
    assert shown.is_given_back()


def test_many_jobs_are_opened_and_left_again(terminal: OpenTerminal, seed: MakeJob) -> None:
    """Arrows and Enter open a job; Escape goes back, and q ends."""
    seed("first", ENDED, {"0": "said by the first\n"})
    seed("second", ENDED, {"0": "said by the second\n"})
    shown = terminal("first", "second")
    shown.see("2 jobs, 0 active")
    shown.press("\x1b[B\r")
    at = shown.see("said by the second")
    assert b"said by the first" not in shown.output
    shown.press("\x1b")
    at = shown.see("2 jobs, 0 active", since=at)
    shown.press("q")
    assert shown.end() == 1
    assert shown.is_given_back()


@pytest.mark.parametrize(
    ("how", "code"), [("\x03", 130), ("\x1c", 131), (signal.SIGTERM, 143), (signal.SIGHUP, 129), ("q", 130)]
)
def test_terminal_is_restored_after_any_end_of_the_watch(
    terminal: OpenTerminal, seed: MakeJob, how: str | int, code: int
) -> None:
    """The job runs on."""
    shown = waiting(terminal, seed)
    if isinstance(how, str):
        shown.press(how)
    else:
        shown.process.send_signal(how)
    assert shown.end() == code
    assert shown.is_given_back()


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash, whose job control is used")
def test_watch_can_be_suspended_and_continued(terminal: OpenTerminal, seed: MakeJob, tmp_path: Path) -> None:
    """After Ctrl-Z the shell has its terminal, and after `fg` the view is drawn again."""
    modes = tmp_path / "modes"
    script = f"set -m; {COMMAND} watch {waits(seed)}; stty -a > {modes}; echo in the shell; fg; echo code $?"
    shown = terminal(argv=["/bin/bash", "--norc", "-c", script])
    shown.see("pending")
    shown.press("\x1a")
    at = shown.see(LEAVE.decode())
    at = shown.see("in the shell", since=at)
    assert " icanon" in modes.read_text()
    at = shown.see(ENTER.decode(), since=at)
    at = shown.see("pending", since=at)
    shown.press("q")
    shown.see("code 130", since=at)
    shown.end()
    assert shown.is_given_back()


def test_view_follows_sizes_suspensions_and_questions(terminal: OpenTerminal, seed: MakeJob) -> None:
    """A nearly empty view, a suspension without a shell, and a stop of a job that is being submitted end no view."""
    shown = terminal(waits(seed))
    at = shown.see("\x1b[24;1H")
    for columns, rows in ((120, 40), (40, 10), (20, 4), (80, 24)):
        shown.resize(columns, rows)
        at = shown.see(f"\x1b[{rows};1H", since=at)
    shown.press("\x1a")  # in a window without a shell the kernel stops no process
    at = shown.see(LEAVE.decode(), since=at)
    at = shown.see(ENTER.decode(), since=at)
    at = shown.see("pending", since=at)
    shown.press("s")
    at = shown.see("Stop waits and let it save? [y/N]", since=at)
    shown.press("y")
    shown.see("waits is just being submitted", since=at)
    shown.press("q")
    assert shown.end() == 130
    assert shown.is_given_back()


BROKEN = """\
from cloudtrain.launcher.live import jobview
def broken(*args): raise ZeroDivisionError("by nothing")
jobview.view = broken
from cloudtrain.launcher.cli import main
main()
"""


def test_internal_fault_or_a_lost_terminal_ends_the_watch(terminal: OpenTerminal, seed: MakeJob) -> None:
    """The fault is printed to the restored terminal; no person can see the view on a lost terminal."""
    shown = terminal(argv=[sys.executable, "-c", BROKEN, "watch", waits(seed)])
    assert shown.end() == 1
    shown.see("cloudtrain itself failed: ZeroDivisionError")
    assert "ZeroDivisionError" in shown.after()
    assert shown.is_given_back()
    shown = terminal(waits(seed, "lost"))
    shown.see("pending")
    shown.lose()
    assert shown.end() in (129, -signal.SIGHUP)


LOUD = """\
import os, subprocess
from cloudtrain.launcher.jobs import watch
def look(registry, notifier, job):
    os.write(1, b"by the process itself\\n")
    subprocess.run(["sh", "-c", "echo by a child of it >&2"])
    return watch.Seen(job)
watch.look = look
from cloudtrain.launcher.cli import main
main()
"""


def test_foreign_output_is_a_note_and_is_printed_after_the_view(terminal: OpenTerminal, seed: MakeJob) -> None:
    """The output never appears inside the view."""
    shown = terminal(argv=[sys.executable, "-c", LOUD, "watch", waits(seed)])
    shown.see("by a child of it")
    during = shown.output
    assert during.count(b"by a child of it") == during.count(b"! by a child of it")
    shown.press("q")
    shown.end()
    until(lambda: "by the process itself\r\nby a child of it" in shown.after())


SLOW = """\
import os, time
from cloudtrain.launcher.jobs import stopping
def ask(registry, name, *, now=False, first=stopping.ask):
    while not os.path.exists(os.environ["ANSWERS"]):
        time.sleep(0.01)
    return first(registry, name, now=now)
stopping.ask = ask
from cloudtrain.launcher.cli import main
main()
"""


@pytest.mark.parametrize("leaves", ["q", "\x03"])
def test_stop_is_not_lost_if_the_user_leaves_at_once(
    terminal: OpenTerminal, seed: MakeJob, tmp_path: Path, leaves: str
) -> None:
    """The view ends, and the command waits for the answer and prints the answer, because a stop saves money."""
    answers = tmp_path / "answers"
    shown = terminal(argv=[sys.executable, "-c", SLOW, "watch", waits(seed)], ANSWERS=str(answers))
    shown.see("pending")
    shown.press("sy")
    at = shown.see("asking waits to stop")
    shown.press(leaves)
    at = shown.see(LEAVE.decode(), since=at)
    at = shown.see("asking waits to stop; Ctrl-C does not wait", since=at)
    answers.touch()
    shown.see("waits is just being submitted", since=at)
    assert shown.end() == 130
    assert shown.is_given_back()


def test_stop_without_an_answer_is_reported_as_unknown(terminal: OpenTerminal, seed: MakeJob, tmp_path: Path) -> None:
    """The message has the command that asks again."""
    shown = terminal(argv=[sys.executable, "-c", SLOW, "watch", waits(seed)], ANSWERS=str(tmp_path / "never"))
    shown.see("pending")
    shown.press("sy")
    at = shown.see("asking waits to stop")
    shown.press("q")
    at = shown.see("asking waits to stop; Ctrl-C does not wait", since=at)
    shown.press("\x03")
    at = shown.see("it is not known whether waits was asked to stop", since=at)
    shown.see("ask again: cloudtrain stop waits", since=at)
    assert shown.end() == 130


@pytest.mark.parametrize(("args", "environ"), [(["--plain"], {}), ([], {"TERM": "dumb"}), (["--once"], {})])
def test_lines_are_plain_without_a_live_view(
    terminal: OpenTerminal, seed: MakeJob, args: list[str], environ: dict[str, str]
) -> None:
    """The terminal may not support the view, or the user may not want the view."""
    seed("ended", ENDED)
    shown = terminal("ended", *args, **environ)
    shown.end()
    shown.see("ended  failed (error)")
    assert ENTER not in shown.output


def test_foreign_output_of_any_size_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without an end delays no line, and the file does not grow with the length of the watch."""
    monkeypatch.setattr(screens, "_MOST_SAID", 1 << 17)
    screen = Screen()
    screen._said = screens._scratch()
    try:
        os.write(screen._said, b"x" * (1 << 17) + b"\nthe next\nnot yet ended")
        said = [screen.said() for _ in range(4)]
        assert [len(words) for each in said for words in each] == [1 << 16, 1 << 16, 0, 8]
        os.write(screen._said, b", and now it is\n")
        assert screen.said() == ["not yet ended, and now it is"]
        assert os.fstat(screen._said).st_size == 0
        os.write(screen._said, b"anew\n")
        assert screen.said() == ["anew"]
    finally:
        os.close(screen._said)
