"""`status` shows a job on a screen of 80x24 in each of its states; a job without a follower has advice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.entrypoints.events import format_line
from cloudtrain.launcher.commands import status as status_command
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.jobs import poller, view
from cloudtrain.launcher.jobs.overview import as_lines
from cloudtrain.launcher.jobs.view import lines_before, saved_step, unattended, view_of
from cloudtrain.launcher.logs.stream import keep_whole
from cloudtrain.launcher.store import loss_bins
from cloudtrain.launcher.store.progress import fold
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job, plan_of
from doubles.signatures import MakeJob

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
def screen() -> Callable[..., str]:
    """Return a function that returns the screen of a job in the given state, on a terminal of 80x24."""

    def show(
        state: State, progress: dict[str, Any] | None = None, earlier: int = 0, keeps: bool = False, **config: Any
    ) -> str:
        config, plan = {"task": "task.py", **config}, plan_of(instances=2, ranks=2, hourly_usd=0.0, keeps=keeps)
        sent = {"phase": "sent", "ref": {"x": 1}, "state": state, "progress": progress or {}}
        job = make_job("digits-x", earlier + 1, config=config, plan=plan, **sent)
        before = [_preempted(job.attempt, number) for number in range(1, earlier + 1)]
        lines = as_lines(view_of(job, [*before, job.attempt]), (state.error or {}).get("lines") or (), (80, 24))
        assert len(lines) < 24
        assert max(map(len, lines)) <= 80
        return "\n".join(lines)

    return show


def text_of(job: Job, *before: Attempt) -> str:
    """Return the lines of the job and its earlier attempts on a terminal of any size."""
    return "\n".join(as_lines(view_of(job, [*before, job.attempt])))


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
        *("39 %  step 390/1000, 2m 5s to go", "20.5k samples/s, mfu 41 %, 50 ms a step, 12 % of it waits for data"),
        *("loss        smoothed ", "steps 10 to 390; last 0.0512"),
        *("step 300, 30s ago; 90 steps since (30s) not yet saved", "cloudtrain watch digits-x"),
    ):
        assert words in shown
    assert shown.isascii() == (language == "C")


def test_status_of_a_script_promises_no_save_at_the_deadline() -> None:
    """The limit's line names the signal that the script gets."""
    plan = plan_of(cap_s=900, deadline_s=800, saves=False)
    shown = text_of(make_job("x", plan=plan, state=State("running", started_s=NOW_S - 60)))
    assert "limit       gets SIGTERM at " in shown
    assert "saves" not in shown


def test_status_of_own_gpus_counts_the_hours_of_all_attempts() -> None:
    """Without a price, the line of the cost has the GPU-hours; an earlier attempt counts too."""
    plan = plan_of(instances=2, gpus_per_instance=4, price_micro=0, hourly_usd=0.0)
    state = State("running", started_s=NOW_S - 3000)
    last = make_job("x", 2, plan=plan, phase="sent", ref={"x": 1}, state=state)
    assert "spend       0.00 USD, 8.00 GPU-hours" in text_of(last, _preempted(last.attempt, 1))
    priced = replace(last.attempt, plan=replace(plan, price_micro=1_000_000))
    assert "GPU-hours" not in text_of(replace(last, attempt=priced))


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


def test_status_shows_saves_without_a_step_and_unkept_files(screen: Callable[..., str]) -> None:
    """The age is shown of a running and of a finished script; what nothing keeps is named, also beside a checkpoint."""
    progress = {"step": 3, "checkpoint_step": None, "saved_s": NOW_S - 4}
    running = screen(State("running", started_s=NOW_S - 200), progress, earlier=1, task=None, script="train.py")
    assert "  checkpoint  saved, step not reported, 4s ago\n" in running
    done = State("succeeded", started_s=NOW_S - 200, ended_s=NOW_S)
    ended = screen(done, progress, task=None, script="train.py")
    assert "  checkpoint  saved, step not reported, 4s ago\n" in ended
    assert ended.endswith("  next        cloudtrain report digits-x")
    lost = "not kept: model.pt; to keep: `keep: [model.pt]` in the config"
    progress = {"step": 3, "unkept": ["model.pt"]}
    running = screen(State("running", started_s=NOW_S - 200), progress, task=None, script="train.py")
    assert f"  checkpoint  no checkpoint yet\n              {lost}\n" in running
    stopped = State("stopped", "user", started_s=NOW_S - 200, ended_s=NOW_S)
    assert lost in screen(stopped, progress, task=None, script="train.py")
    saved = {**progress, "checkpoint_step": 3}
    assert f"  checkpoint  step 3\n              {lost}" in screen(stopped, saved, task=None, script="train.py")


def test_status_shows_the_run_at_a_tracker(screen: Callable[..., str]) -> None:
    """The newest link counts; a later line that is no web address changes nothing."""
    urls = ("https://wandb.ai/a/1", "https://me:pw@wandb.ai/a/2?apiKey=s", "javascript:alert(1)", 7)
    progress = fold({}, [format_line("tracker", "", {"url": url}) for url in urls])
    shown = screen(State("running", started_s=NOW_S - 200), progress | {"step": 3}, task=None, script="train.py")
    assert "  run         https://wandb.ai/a/2\n" in shown


def test_attempt_table_marks_a_save_without_a_step() -> None:
    """SAVED is a step if the name has the step, else `yes`; `-` if only an earlier attempt has saved."""
    state = State("failed", "preempted", resumable=True, started_s=NOW_S - 60, ended_s=NOW_S)
    job = make_job("x", 2, config={"script": "train.py"}, phase="sent", state=state)
    named = fold({}, [format_line("checkpoint", "", {"path": "out/step_250.pt"})])
    unnamed = {"step": 270, "saved_s": NOW_S - 9}
    for first, last, saved in (({}, {}, ["yes", "-"]), (named, unnamed, ["250", "yes"])):
        now = replace(job, attempt=replace(job.attempt, progress=last))
        shown = text_of(now, replace(now.attempt, number=1, progress=first)).splitlines()
        assert [line.split()[-1] for line in shown if line.startswith(("  1 ", "  2 "))] == saved
        assert "  checkpoint  saved, step not reported" in shown or first


def test_status_of_a_pending_or_silent_job_shows_the_reason(screen: Callable[..., str]) -> None:
    """The line has the time since the submit and the latest time to give up, or since when the backend is silent."""
    shown = screen(State("pending", detail="no capacity for 2 x ml.p4d.24xlarge"), limits={"max_wait": "2h"})
    assert "for 0s: no capacity for 2 x ml.p4d.24xlarge; given up after 2h" in shown
    assert "detail" not in shown
    job = make_job("far", phase="sent", state=State("running"), unreachable_since_s=NOW_S - 3600 * 3)
    assert "does not answer, first 3h ago; this is what it said last" in text_of(job)


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
def test_status_shows_the_frame_of_the_user_code_at_every_size(rows: int) -> None:
    """Frames of a library are left out first, and a line marks the gap."""
    own = '  File "train.py", line 31, in main\n    loss = model(batch)\n           ^^^^^^^^^^^^\n'
    library = "".join(f'  File "/opt/lib/part{n}.py", line {n}, in call\n    inner()\n' for n in range(30))
    error = {**ERROR, "traceback": f"Traceback (most recent call last):\n{own}{library}ValueError: label 11"}
    state = State("failed", "error", True, error, started_s=NOW_S - 60, ended_s=NOW_S - 5)
    job = make_job("x", state=state)
    shown = "\n".join(as_lines(view_of(job, [job.attempt]), ["line"] * 10, (80, rows)))
    assert '  File "train.py", line 31, in main\n                  loss = model(batch)\n                ...\n' in shown
    assert "part29.py" in shown or rows < 20


def test_status_prints_no_control_characters(screen: Callable[..., str]) -> None:
    """A job's text sets no title, deletes no line, and shows no event part."""
    lines = ['\x1b]0;title\x07step 3  ::ct {"e":"step","step":3}']
    error = {**ERROR, "message": "bad\x1b[2J\x07 batch", "lines": lines}
    shown = screen(State("failed", "error", True, error, started_s=1.0, ended_s=2.0))
    assert shown.replace("\n", "").isprintable()
    assert "::ct" not in shown


def test_resumed_script_has_the_checkpoint_of_the_earlier_attempt() -> None:
    """Attempt 2 has saved no file yet: the line names attempt 1 and the age, and has no hint about `keep`."""
    state = State("running", started_s=NOW_S - 60)
    job = make_job("kept", 2, config={"script": "train.py"}, state=state, progress={"step": 2})
    first = replace(job.attempt, number=1, progress={"step": 9, "checkpoint_step": None, "saved_s": NOW_S - 300})
    shown = text_of(job, first)
    assert "  checkpoint  saved, step not reported, 5m ago, in attempt 1\n" in shown
    assert "how a script keeps" not in shown
    assert view_of(job, [first, job.attempt]).as_json()["checkpoint_at_s"] == NOW_S - 300


def test_status_lists_the_newest_five_attempts(screen: Callable[..., str]) -> None:
    """Each row has the end, the steps and the checkpoint of an attempt."""
    shown = screen(State("running", started_s=NOW_S - 60), STEPS, earlier=6)
    rows = [line.split() for line in shown.splitlines() if "(preempted)" in line or "running  " in line]
    assert [row[0] for row in rows] == ["3", "4", "5", "6", "7"]
    assert rows[0][-2:] == ["300", "270"]
    assert "and 2 before" in shown
    assert "ATTEMPT" not in screen(State("running", started_s=NOW_S - 60), STEPS)


def test_wait_prints_the_end_and_cause_of_each_job(cli: Any, seed: MakeJob) -> None:
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


def test_json_has_each_attempt_and_the_likely_cause() -> None:
    """Scripts do not need to parse sentences; the start of an attempt reports the last checkpoint of a killed one."""
    error = {"rank": 0, "kind": "exception", "type": "OutOfMemoryError", "message": "CUDA out of memory"}
    state, config = State("failed", "error", error=error), {"task": "task.py"}
    job = make_job("digits-x", 2, config=config, phase="sent", state=state, progress=STEPS)
    told = view_of(job, [_preempted(job.attempt, 1), job.attempt]).as_json()
    shown = [(each["number"], each["reason"], each["step"]) for each in told["attempts"]]
    assert shown == [(1, "preempted", 100), (2, "error", 390)]
    assert "micro_batch_size" in told["likely"]
    assert (told["mfu"], round(told["data_share"], 2)) == (0.413, 0.12)
    progress = {"step": 30, "resumed_step": 20}
    job = make_job("digits-x", 2, phase="sent", state=State("running"), progress=progress)
    first = replace(_preempted(job.attempt, 1), progress={"step": 25})
    assert saved_step(first, job.attempt) == 20
    assert saved_step(job.attempt, None) is None
    told = view_of(job, [first, job.attempt]).as_json()
    assert [each["checkpoint_step"] for each in told["attempts"]] == [20, None]


FRAME = '  File "a.py", line 3, in f\n    return 1 / x\n           ~~^~~'
TRACE = f"Traceback (most recent call last):\n{FRAME}\nValueError: y"
CHAIN = "\n\nThe above exception was the direct cause of the following exception:\n\n"
FIRST = "Traceback (most recent call last):\n  File z\n    ^^^\nKeyError: z"
SHORT = "Traceback (most recent call last):\n  File x\nValueError: y\n"


@pytest.mark.parametrize(
    ("told", "log", "reported", "cached"),
    [
        ({}, "", ["a"] * 10, ["a"] * 10),
        # SageMaker passes on a thousand characters: two of these lines are fewer than the lines in the log cache.
        (
            {"lines": ["shard 28", "shard 29"]},
            "".join(f"shard {n}\n" for n in range(30)) + SHORT,
            ["shard 28", "shard 29"],
            [f"shard {n}" for n in range(20, 30)],
        ),
        ({"lines": []}, SHORT, [], []),  # a rank that fails before its first line has printed nothing
        # For a restarted rank and a chain of exceptions, the traceback is shown only once, below.
        (
            {"traceback": TRACE, "lines": ["           ~~^~~", "ValueError: y", "once more"]},
            f"hello\n{TRACE}\nonce more\n{FIRST}{CHAIN}{TRACE}\n",
            ["once more"],
            ["hello", "once more"],
        ),
    ],
    ids=["exit report", "fuller log cache", "only a traceback", "parts of tracebacks"],
)
def test_lines_before_come_from_the_exit_report_or_a_fuller_log_cache(
    seed: MakeJob, registry: Registry, told: dict[str, Any], log: str, reported: list[str], cached: list[str]
) -> None:
    """Without lines from the platform and without a log cache, the list is empty; no line is of the traceback."""
    job = seed("a", State("failed", "error", error={**ERROR, **told}, started_s=1.0, ended_s=2.0), {"1": log})
    assert lines_before(registry, job) == reported
    assert keep_whole(registry, job, job.attempt)
    assert lines_before(registry, job) == cached


def test_status_does_not_wait_for_a_backend_that_hangs(
    seed: MakeJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job has its last known state, and a note gives the reason."""
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


def test_status_without_a_name_shows_the_last_job(seed: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    """The last job is the job that was submitted last."""
    seed("first", State("succeeded"))
    seed("second", State("stopped", "user"))
    status_command.command.main([], standalone_mode=False)
    assert capsys.readouterr().out.startswith("second  stopped (user)\n")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"notify": [{"slack": "env:A"}]}, "all that `notify` names receive nothing"),
        ({"notify": [{"slack": "env:A"}, {"slack": "env:B", "from_job": True}]}, "without `from_job` receive nothing"),
        ({"budget": {"limit": "1 USD"}}, "get alerts  cloudtrain watch one"),
        ({}, None),
        ({"notify": [{"slack": "env:B", "from_job": True}]}, None),
    ],
)
def test_alert_receivers_need_a_follower(config: dict[str, Any], said: str | None) -> None:
    """The job itself may send alerts instead, and a job without alerts needs no follower either."""
    lines = unattended(make_job("one", config=config))
    text = "\n".join(lines)
    assert len(lines) == 2 if said is None else said in text
    assert "cloudtrain stop one" in text
