"""`status` shows a job on a screen of 80x24 in each of its states."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.entrypoints.events import format_line
from cloudtrain.launcher.commands import status as status_command
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.jobs import poller, view
from cloudtrain.launcher.jobs.overview import as_lines
from cloudtrain.launcher.jobs.view import lines_before, saved_step, view_of
from cloudtrain.launcher.store import loss_bins
from cloudtrain.launcher.store.progress import fold
from cloudtrain.launcher.store.registry import Registry

NOW_S = time.time()
CURVE = loss_bins.dump(loss_bins.added(loss_bins.EMPTY, [(NOW_S - 100 + n, 10 * n, 2.0 / n) for n in range(1, 40)]))
STEPS = {
    "step": 390,
    "max_steps": 1000,
    "loss": 0.0512,
    "eta_s": 125.0,
    "samples_per_s": 20480.0,
    "mfu": 0.413,
    "step_s": 0.05,
    "data_s": 0.006,
    "curve": CURVE,
    "checkpoint_step": 300,
    "saved_s": NOW_S - 30,
}
FRAMES = "".join(f'  File "part{n}.py", line {n}, in call\n    return inner({"batch, " * 20})\n' for n in range(9))
ERROR = {
    "rank": 1,
    "kind": "exception",
    "type": "ValueError",
    "message": "label 11 is not below 10\nsample 8812",
    "traceback": f"Traceback (most recent call last):\n{FRAMES}ValueError: label 11",
    "lines": ["a"] * 10,
}


@pytest.fixture(autouse=True)
def _clock_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze the screen's clock, so that a slow machine does not change the result."""
    monkeypatch.setattr(view, "time", SimpleNamespace(time=lambda: NOW_S))


@pytest.fixture
def screen(make_job: Callable[..., Job]) -> Callable[..., str]:
    """Return a function that returns the screen of a job in the given state, on a terminal of 80x24."""

    def show(
        state: State, progress: dict[str, Any] | None = None, earlier: int = 0, keeps: bool = False, **config: Any
    ) -> str:
        job = make_job("digits-x", earlier + 1, config={"task": "task.py", **config})
        attempt = replace(job.attempt, phase="sent", ref={"x": 1}, state=state, progress=progress or {})
        job = replace(job, attempt=replace(attempt, plan=replace(attempt.plan, keeps=keeps)))
        before = [_preempted(attempt, number) for number in range(1, earlier + 1)]
        lines = as_lines(view_of(job, [*before, attempt]), (state.error or {}).get("lines") or (), (80, 24))
        assert len(lines) < 24
        assert max(map(len, lines)) <= 80
        return "\n".join(lines)

    return show


def _preempted(attempt: Attempt, number: int) -> Attempt:
    state = State("failed", "preempted", resumable=True, started_s=NOW_S - 9000, ended_s=NOW_S - 8400)
    return replace(attempt, number=number, state=state, progress={"step": 100 * number, "checkpoint_step": 90 * number})


@pytest.mark.parametrize("language", ["C.UTF-8", "C"])
def test_status_of_a_running_job_shows_progress_and_speed(
    screen: Callable[..., str], monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    """The screen has a bar with the percentage, the time left, the throughput, the loss curve and the unsaved steps."""
    monkeypatch.setenv("LC_ALL", language)
    shown = screen(State("running", started_s=NOW_S - 200), STEPS)
    full = "█" if language == "C.UTF-8" else "#"
    assert full * 7 in shown
    assert full * 8 not in shown.split("loss")[0]
    for words in (
        "39 %  step 390/1000, 2m 5s to go",
        "20.5k samples/s, mfu 41 %, 50 ms a step, 12 % of it waits for data",
        "loss        smoothed ",
        "steps 10 to 390; last 0.0512",
        "step 300, 30s ago; 90 steps since (30s) not yet saved",
        "cloudtrain watch digits-x",
    ):
        assert words in shown
    assert shown.isascii() == (language == "C")


def test_status_of_a_script_promises_no_save_at_the_deadline(make_job: Callable[..., Job]) -> None:
    """The limit's line names the signal that the script gets."""
    made = make_job("x")
    plan = replace(made.attempt.plan, cap_s=900, deadline_s=800, saves=False)
    attempt = replace(made.attempt, plan=plan, state=State("running", started_s=NOW_S - 60))
    shown = "\n".join(as_lines(view_of(replace(made, attempt=attempt), [attempt])))
    assert "limit       gets SIGTERM at " in shown
    assert "saves" not in shown


def test_status_of_own_gpus_counts_the_hours_of_all_attempts(make_job: Callable[..., Job]) -> None:
    """Without a price, the line of the cost has the GPU-hours; an earlier attempt counts too."""
    made = make_job("x")
    plan = replace(made.attempt.plan, instances=2, gpus_per_instance=4, price_micro=0, hourly_usd=0.0)
    sent = replace(made.attempt, plan=plan, phase="sent", ref={"x": 1})
    earlier = replace(sent, state=State("stopped", "preempted", started_s=NOW_S - 9000, ended_s=NOW_S - 7200))
    last = replace(sent, number=2, state=State("running", started_s=NOW_S - 1800))
    shown = "\n".join(as_lines(view_of(replace(made, attempt=last), [earlier, last])))
    assert "spend       0.00 USD, 8.00 GPU-hours" in shown
    priced = replace(last, plan=replace(plan, price_micro=1_000_000))
    assert "GPU-hours" not in "\n".join(as_lines(view_of(replace(made, attempt=priced), [priced])))


def test_status_of_a_stalled_job_has_no_forecast(screen: Callable[..., str]) -> None:
    """A job without a step for longer than its forecast has neither a finish time nor a final price."""
    still = {**STEPS, "stepped_s": NOW_S - 1800, "eta_s": 900.0}
    shown = screen(State("running", started_s=NOW_S - 2000), still)
    assert "step 390/1000, no step for 30m" in shown
    assert "to go" not in shown
    assert "done at" not in shown
    assert "5m to go" in screen(State("running", started_s=NOW_S - 700), {**still, "stepped_s": NOW_S - 600})


def test_status_does_not_invent_unreported_figures(screen: Callable[..., str]) -> None:
    """A script may report no steps."""
    shown = screen(State("running", started_s=NOW_S - 200), task=None, script="train.py")
    assert "no step reported yet\n              (how a script reports steps: docs/scripts.md, Curves)\n" in shown
    told = screen(State("running", started_s=NOW_S - 200), {"step": 3}, task=None, script="train.py")
    assert "no checkpoint yet\n              (how a script keeps checkpoints: docs/scripts.md, Files: keep)\n" in told
    assert "how a script" not in screen(State("running", started_s=NOW_S - 200))
    keeps = screen(State("running", started_s=NOW_S - 200), {"step": 3}, keeps=True, task=None, script="train.py")
    assert ("no checkpoint yet\n" in keeps, "how a script keeps" in keeps) == (True, False)
    assert not any(word in shown for word in ("speed", "loss", "checkpoint  ", "outlook", "%"))


def test_status_shows_the_age_of_a_save_without_a_step(screen: Callable[..., str]) -> None:
    """The age is shown for a running script and after its success, also if an earlier attempt reported a step."""
    progress = {"step": 3, "checkpoint_step": None, "saved_s": NOW_S - 4}
    running = screen(State("running", started_s=NOW_S - 200), progress, earlier=1, task=None, script="train.py")
    assert "  checkpoint  saved, step not reported, 4s ago\n" in running
    done = State("succeeded", started_s=NOW_S - 200, ended_s=NOW_S)
    ended = screen(done, progress, task=None, script="train.py")
    assert "  checkpoint  saved, step not reported, 4s ago\n" in ended
    assert ended.endswith("  next        cloudtrain report digits-x")


def test_status_names_the_files_that_nothing_keeps(screen: Callable[..., str]) -> None:
    """The line is shown while the script runs, with a checkpoint too, and after the end."""
    lost = "not kept: model.pt; to keep: `keep: [model.pt]` in the config"
    progress = {"step": 3, "unkept": ["model.pt"]}
    running = screen(State("running", started_s=NOW_S - 200), progress, task=None, script="train.py")
    assert f"  checkpoint  no checkpoint yet\n              {lost}\n" in running
    stopped = State("stopped", "user", started_s=NOW_S - 200, ended_s=NOW_S)
    assert lost in screen(stopped, progress, task=None, script="train.py")
    saved = {**progress, "checkpoint_step": 3}
    assert f"  checkpoint  step 3\n              {lost}" in screen(stopped, saved, task=None, script="train.py")


def test_attempt_table_marks_a_save_without_a_step(make_job: Callable[..., Job]) -> None:
    """SAVED is a step if the name has the step, else `yes`; `-` if only an earlier attempt has saved."""
    job = make_job("x", 2, config={"script": "train.py"})
    state = State("failed", "preempted", resumable=True, started_s=NOW_S - 60, ended_s=NOW_S)
    attempt = replace(job.attempt, phase="sent", state=state)
    shown = as_lines(view_of(replace(job, attempt=attempt), [replace(attempt, number=1), attempt]))
    assert "  checkpoint  saved, step not reported" in shown
    assert [line.split()[-1] for line in shown if line.startswith(("  1 ", "  2 "))] == ["yes", "-"]
    attempt = replace(attempt, progress={"step": 270, "saved_s": NOW_S - 9})
    known = replace(attempt, number=1, progress=fold({}, [format_line("checkpoint", "", {"path": "out/step_250.pt"})]))
    shown = as_lines(view_of(replace(job, attempt=attempt), [known, attempt]))
    assert [line.split()[-1] for line in shown if line.startswith(("  1 ", "  2 "))] == ["250", "yes"]


def test_status_of_a_pending_job_shows_the_reason(screen: Callable[..., str]) -> None:
    """The line has the time since the submit, and the latest time to give up."""
    shown = screen(State("pending", detail="no capacity for 2 x ml.p4d.24xlarge"), limits={"max_wait": "2h"})
    assert "for 0s: no capacity for 2 x ml.p4d.24xlarge; given up after 2h" in shown
    assert "detail" not in shown


def test_status_of_a_failure_has_the_cause_on_a_screen(screen: Callable[..., str]) -> None:
    """The screen has room for the rank, its exception, its last frames, its earlier lines, and the attempts."""
    shown = screen(State("failed", "error", True, ERROR, started_s=NOW_S - 60, ended_s=NOW_S - 5), STEPS, earlier=3)
    assert "  cloudtrain resume digits-x --update-code" in shown  # the user fixes the script
    assert "rank 1: ValueError: label 11 is not below 10" in shown
    assert "sample 8812" in shown
    assert 'File "part8.py", line 8' in shown
    assert "before it   a" in shown
    assert "cloudtrain logs --rank 1 --tail 50 digits-x" in shown
    assert "90 steps since (25s) were not saved" in shown


@pytest.mark.parametrize("rows", [10, 16, 20, 24, 30, 60])
def test_status_shows_the_frame_of_the_user_code_at_every_size(make_job: Callable[..., Job], rows: int) -> None:
    """Frames of a library are left out first, and a line marks the gap."""
    own = '  File "train.py", line 31, in main\n    loss = model(batch)\n           ^^^^^^^^^^^^\n'
    library = "".join(f'  File "/opt/lib/part{n}.py", line {n}, in call\n    inner()\n' for n in range(30))
    error = {**ERROR, "traceback": f"Traceback (most recent call last):\n{own}{library}ValueError: label 11"}
    state = State("failed", "error", True, error, started_s=NOW_S - 60, ended_s=NOW_S - 5)
    job = make_job("x")
    job = replace(job, attempt=replace(job.attempt, state=state))
    shown = "\n".join(as_lines(view_of(job, [job.attempt]), ["line"] * 10, (80, rows)))
    assert '  File "train.py", line 31, in main\n                  loss = model(batch)\n                ...\n' in shown
    assert "part29.py" in shown or rows < 20


def test_status_prints_no_control_characters(screen: Callable[..., str]) -> None:
    """A job's text sets no title, deletes no line, and shows no event part."""
    error = {
        **ERROR,
        "message": "bad\x1b[2J\x07 batch",
        "lines": ['\x1b]0;title\x07step 3  ::ct {"e":"step","step":3}'],
    }
    shown = screen(State("failed", "error", True, error, started_s=1.0, ended_s=2.0))
    assert shown.replace("\n", "").isprintable()
    assert "::ct" not in shown


def test_resumed_script_has_the_checkpoint_of_the_earlier_attempt(make_job: Callable[..., Job]) -> None:
    """Attempt 2 has saved no file yet: the line names attempt 1 and the age, and has no hint about `keep`."""
    job = make_job("kept", 2, config={"script": "train.py"})
    first = replace(job.attempt, number=1, progress={"step": 9, "checkpoint_step": None, "saved_s": NOW_S - 300})
    last = replace(job.attempt, state=State("running", started_s=NOW_S - 60), progress={"step": 2})
    shown = "\n".join(as_lines(view_of(replace(job, attempt=last), [first, last])))
    assert "  checkpoint  saved, step not reported, 5m ago, in attempt 1\n" in shown
    assert "how a script keeps" not in shown
    assert view_of(replace(job, attempt=last), [first, last]).as_json()["checkpoint_at_s"] == NOW_S - 300


def test_status_lists_the_newest_five_attempts(screen: Callable[..., str]) -> None:
    """Each row has the end, the steps and the checkpoint of an attempt."""
    shown = screen(State("running", started_s=NOW_S - 60), STEPS, earlier=6)
    rows = [line.split() for line in shown.splitlines() if "(preempted)" in line or "running  " in line]
    assert [row[0] for row in rows] == ["3", "4", "5", "6", "7"]
    assert rows[0][-2:] == ["300", "270"]
    assert "and 2 before" in shown
    assert "ATTEMPT" not in screen(State("running", started_s=NOW_S - 60), STEPS)


def test_attempt_killed_after_a_save_has_the_checkpoint_of_its_successor(make_job: Callable[..., Job]) -> None:
    """The attempt could not report its last checkpoint; the start of the next attempt does."""
    job = make_job("digits-x", 2)
    first = replace(_preempted(job.attempt, 1), progress={"step": 25})
    last = replace(job.attempt, phase="sent", state=State("running"), progress={"step": 30, "resumed_step": 20})
    assert saved_step(first, last) == 20
    assert saved_step(last, None) is None
    told = view_of(replace(job, attempt=last), [first, last]).as_json()
    assert [each["checkpoint_step"] for each in told["attempts"]] == [20, None]


def test_wait_prints_the_end_and_cause_of_each_job(cli: Any, seed: Callable[..., Job]) -> None:
    """The text equals the text of `status`, and `next` points there."""
    seed("a", State("succeeded"))
    seed("b", State("failed", "error", error=ERROR))
    done = cli("wait", "a", "b")
    assert done.code == 1
    assert done.stderr.splitlines() == [
        "a  succeeded",
        "b  failed (error)",
        "  error       rank 1: ValueError: label 11 is not below 10",
        "  next        cloudtrain status b",
    ]


def test_status_shows_since_when_a_backend_is_silent(make_job: Callable[..., Job]) -> None:
    """The screen has the last known state."""
    job = make_job("far")
    attempt = replace(job.attempt, phase="sent", state=State("running"), unreachable_since_s=NOW_S - 3600 * 3)
    shown = "\n".join(as_lines(view_of(replace(job, attempt=attempt), [attempt])))
    assert "does not answer, first 3h ago; this is what it said last" in shown


def test_json_has_each_attempt_and_the_likely_cause(make_job: Callable[..., Job]) -> None:
    """Scripts do not need to parse sentences."""
    job = make_job("digits-x", 2, config={"task": "task.py"})
    error = {"rank": 0, "kind": "exception", "type": "OutOfMemoryError", "message": "CUDA out of memory"}
    last = replace(job.attempt, phase="sent", state=State("failed", "error", error=error), progress=STEPS)
    told = view_of(replace(job, attempt=last), [_preempted(job.attempt, 1), last]).as_json()
    assert [(each["number"], each["reason"], each["step"]) for each in told["attempts"]] == [
        (1, "preempted", 100),
        (2, "error", 390),
    ]
    assert "micro_batch_size" in told["likely"]
    assert (told["mfu"], round(told["data_share"], 2)) == (0.413, 0.12)


def test_lines_before_come_from_the_exit_report(seed: Callable[..., Job], home: Path) -> None:
    """Without lines from the platform and without a log cache, the list is empty."""
    registry = Registry()
    assert lines_before(registry, seed("a", State("failed", "error", error=ERROR))) == ["a"] * 10
    assert lines_before(registry, seed("b", State("failed", "error", error={**ERROR, "lines": []}))) == []


def test_lines_before_come_from_a_fuller_log_cache(seed: Callable[..., Job], home: Path) -> None:
    """SageMaker passes on a thousand characters: two of these lines are fewer than the lines in the log cache."""
    from cloudtrain.launcher.logs.stream import keep_whole

    log = "".join(f"shard {n}\n" for n in range(30)) + "Traceback (most recent call last):\n  File x\nValueError: y\n"
    error = {**ERROR, "lines": ["shard 28", "shard 29"]}
    job = seed("c", State("failed", "error", error=error, started_s=1.0, ended_s=2.0), {"1": log})
    registry = Registry()
    assert lines_before(registry, job) == ["shard 28", "shard 29"]
    assert keep_whole(registry, job, job.attempt)
    assert lines_before(registry, job) == [f"shard {n}" for n in range(20, 30)]


def test_lines_before_are_empty_if_the_log_is_only_the_traceback(seed: Callable[..., Job], home: Path) -> None:
    """A rank that fails before its first line has printed nothing, and its traceback is shown once."""
    from cloudtrain.launcher.logs.stream import keep_whole

    log = "Traceback (most recent call last):\n  File x\nValueError: y\n"
    job = seed("d", State("failed", "error", error={**ERROR, "lines": []}, started_s=1.0, ended_s=2.0), {"1": log})
    registry = Registry()
    assert keep_whole(registry, job, job.attempt)
    assert lines_before(registry, job) == []


def test_lines_before_contain_no_part_of_the_traceback(seed: Callable[..., Job], home: Path) -> None:
    """For a restarted rank and a chain of exceptions, the traceback is shown only once, below."""
    from cloudtrain.launcher.logs.stream import keep_whole

    frame = '  File "a.py", line 3, in f\n    return 1 / x\n           ~~^~~'
    trace = f"Traceback (most recent call last):\n{frame}\nValueError: y"
    chain = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    first = "Traceback (most recent call last):\n  File z\n    ^^^\nKeyError: z"
    log = f"hello\n{trace}\nonce more\n{first}{chain}{trace}\n"
    error = {**ERROR, "traceback": trace, "lines": ["           ~~^~~", "ValueError: y", "once more"]}
    job = seed("e", State("failed", "error", error=error, started_s=1.0, ended_s=2.0), {"1": log})
    registry = Registry()
    assert lines_before(registry, job) == ["once more"]
    assert keep_whole(registry, job, job.attempt)
    assert lines_before(registry, job) == ["hello", "once more"]


def test_status_does_not_wait_for_a_backend_that_hangs(
    seed: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job has its last known state, and a note gives the reason."""
    import threading

    seed("hangs", State("running", started_s=NOW_S))
    seed("ended", State("succeeded"))
    release = threading.Event()

    def refresh(registry: Registry, job: Job) -> Job:
        release.wait(60)
        return job

    monkeypatch.setattr(poller, "refresh", refresh)
    monkeypatch.setattr(status_command, "PATIENCE_S", 1.0)
    status_command.command.main(["hangs", "ended"], standalone_mode=False)
    release.set()
    told = capsys.readouterr()
    assert "hangs  running" in told.out
    assert "\n\nended  succeeded" in told.out
    assert "hangs is shown as it was last seen: local has not answered within 1 s" in told.err


def test_status_without_a_name_shows_the_last_job(seed: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    """The last job is the job that was submitted last."""
    seed("first", State("succeeded"))
    seed("second", State("stopped", "user"))
    status_command.command.main([], standalone_mode=False)
    assert capsys.readouterr().out.startswith("second  stopped (user)\n")
