"""The screens of the live view: a frozen model in, rows out, independent of time and terminal."""

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.text import Text

from cloudtrain.launcher.backend import LogLine
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.jobs.view import view_of
from cloudtrain.launcher.live import jobview, main_loop, tableview
from cloudtrain.launcher.live.model import Curves, Scene, TailShot, WatchedJob, curves_of
from cloudtrain.launcher.live.screen import Renderer
from cloudtrain.launcher.live.view_state import ViewState, steer
from cloudtrain.launcher.notices.outbox import Sent
from cloudtrain.launcher.store import loss_bins
from cloudtrain.launcher.store.series import Point, Series
from cloudtrain.launcher.text.charts import ASCII, UNICODE
from doubles.plans import make_job, plan_of

NOW = 1_763_820_000.0  # 14:00:00 UTC
Watched = Callable[..., WatchedJob]
PLAN = plan_of(instances=2, ranks=2, hourly_usd=2.4, cap_s=7200, deadline_s=6900)
SIZES = [(80, 24), (120, 40), (40, 10), (40, 12), (200, 60), (20, 4), (33, 7)]
HOSTILE = (
    *("[red]no markup[/red] [/]", "\x1b[2J\x1b[31mred\x1b[0m and \x1b]0;title\x07 on", "10%\r20%\r100% done"),
    *("tab\there\x00\x07\x08\x7f", "\x9b31m and \x90dcs\x9c on"),
    "日本語" * 40,
    "👩‍👩‍👧‍👦🚀 e\u0301" + "\u0301" * 50,
    "\u202eright to left\u2066 \ufeff\u200b",
    "\ud800 lone, private \ue000, none \u0378",
    "x" * 100_000,
    "\u2028two\u2029three",
)


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the time zone to UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def watched() -> Watched:
    """Return a function that makes the model of a job at about 30 %, with given changes."""

    def make(name: str = "digits-4k2pw", state: State | None = None, **changes: Any) -> WatchedJob:
        bins = loss_bins.added(
            loss_bins.EMPTY, [(NOW - 600 + step, step, 2.0 / (1 + step / 50)) for step in range(1, 601, 10)]
        )
        progress = {
            "step": 600,
            "max_steps": 2000,
            "loss": 0.1534,
            "eta_s": 1400.0,
            "step_s": 0.1,
            "stepped_s": NOW,
            "checkpoint_step": 500,
            "saved_s": NOW - 100,
            "metrics": {"accuracy": 0.98765, "loss": "nan"},
            "curve": loss_bins.dump(bins),
        }
        told = State("running", started_s=NOW - 600, restarts=1) if state is None else state
        made = make_job(name)
        now = replace(made.attempt, number=2, plan=PLAN, state=told, progress=changes.pop("progress", progress))
        first = State("failed", "preempted", started_s=NOW - 2000, ended_s=NOW - 1000)
        before = replace(made.attempt, plan=PLAN, state=first)
        job = replace(made, attempt=replace(now, ref={}), created_s=NOW, config={"budget": {"limit": "10 USD"}})
        attempts: tuple[Attempt, ...] = (before, job.attempt)
        return WatchedJob(view_of(job, attempts, NOW), seen_s=NOW, **changes)

    return make


def steps(count: int = 60) -> Series:
    """Return a trainer's events of so many steps."""
    points = [Point(2, "start", NOW - 600, 0, {"device": "cuda:0", "memory_total_bytes": 80 * 2**30})]
    for step in range(10, 10 * count + 1, 10):
        fields = {"loss": 2.0 / (1 + step / 50), "samples_per_s": 8000.0 + 300 * math.sin(step / 40)}
        parts = {"compute_s": 0.08, "communication_s": 0.012, "data_s": 0.006, "checkpoint_s": 0.002, "step_s": 0.1}
        points.append(Point(2, "step", NOW - 600 + step, step, {**fields, **parts, "memory_bytes": 31 * 2**30}))
    points.append(Point(2, "checkpoint", NOW - 100, 500, {"path": "/x"}))
    return Series(tuple(points))


def log(*texts: str, rank: int = 0) -> TailShot:
    """Return the end of a log."""
    return TailShot(tuple(LogLine(text, 0, rank, NOW) for text in texts), is_read=True)


def with_job(watched: WatchedJob, job: Job) -> WatchedJob:
    """Return the model with a changed job."""
    return replace(watched, view=replace(watched.view, job=job))


def drawn(rows: list[Text]) -> str:
    """Return the visible text of the rows."""
    return "\n".join(row.plain.rstrip() for row in rows)


JOB_80x24 = """\
digits-4k2pw  running                                          10m of at most 2h
backend    local, 2 x 1 = 2 ranks, attempt 2, 1 restart
progress   step 600/2000 ██████░░░░░░░░░░░░░░░░░ 30 %, done in 23m 20s, at 14:23
loss       █▆▅▄▄▃▃▂▂▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁   0.1538  least 0.1538  largest 1.667
samples/s  ▆███▇▆▄▂▁▁▁▃▅▇██▇▆▄▂▁▁▁▃▅▇███     8195  least 7700    largest 8299
metrics    accuracy 0.9877, loss nan
step time  100 ms ██████▓▒ █compute 80 % ▓communication 12 % ▒data 6 % ░save 2 %
GPU memory ██████░░░░░░░░░░ 39 %, 31.0 GiB of 80.0 GiB at most so far, on rank 0
spend      █░░░░░░░░ 1.07 USD of 10.00 USD, 10 %; 2.40 USD/h; 2.00 USD when done
limit      saves and leaves at 15:45, is ended at 15:50
checkpoint step 500, 1m 40s ago
alerts     13:55:00 50 % of the budget (slack)
before     attempt 1 failed (preempted) after 16m 40s
── log ─────────────────────────────────────────────────────────────────────────
[r0] step 590/2000 loss 0.156
[r0] step 600/2000 loss 0.1534







q quit  l larger log  r ranks  p pause  w wrap  s stop  ? help  up/down scroll
"""

FAILED_TOP = """\
failing  failed (error)                                                       1m
backend    local, 2 x 1 = 2 ranks, attempt 2
progress   no step reported
error      rank 1: ValueError: the data has 3 columns
           and the model wants 4
next       cloudtrain logs --rank 1 --tail 50 failing
spend      ██░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░ 0.71 USD of 10.00 USD, 7 %
before     attempt 1 failed (preempted) after 16m 40s
── log ─────────────────────────────────────────────────────────────────────────
"""

TABLE_80x24 = """\
cloudtrain watch  all jobs                                              14:00:00
  JOB           STATE           DONE  LOSS                   LEFT     USD SPENT
  digits-4k2pw  running         30 %  █▅▄▃▂▂▁▁▁▁▁▁▁▁ 0.1534  23m 20s  1.07, 10 %
▶ queued-abcde  pending                                               0.67, 6 %
  failing       failed (error)                                        0.71, 7 %
















13:59:55 queued-abcde: the backend is slow
3 jobs, 2 active: 2.40 USD/h, 2.45 USD spent
up/down choose  Enter open  s stop a job  q quit  ? help
"""


def picture(
    watched: WatchedJob, tail: TailShot | None = None, size: tuple[int, int] = (80, 24), **changes: Any
) -> list[Text]:
    """Return the screen of a job."""
    choice = changes.pop("choice", ViewState(opened=watched.job.id, is_single=True))
    return jobview.view(watched, tail or TailShot(), choice, size, changes.pop("signs", UNICODE), NOW, **changes)[0]


def test_job_in_80x24_is_shown_completely(watched: Watched) -> None:
    """Figures, curves, money, log have their places; a failure has the first rank's exception and log's command."""
    alerts = (Sent("budget:50@10000000", NOW - 300, ("terminal", "slack")), Sent("started:2", NOW - 600, ("slack",)))
    seen = watched(curves=curves_of(steps()), alerts=alerts)
    rows = picture(seen, log("step 590/2000 loss 0.156", "step 600/2000 loss 0.1534"))
    assert drawn(rows) + "\n" == JOB_80x24
    error = {"rank": 1, "type": "ValueError", "message": "the data has 3 columns\nand the model wants 4"}
    state = State("failed", "error", error=error, started_s=NOW - 60, ended_s=NOW)
    rows = picture(watched("failing", state, progress={}))
    assert drawn(rows[:9]) + "\n" == FAILED_TOP


def test_table_in_80x24_is_shown_completely(watched: Watched) -> None:
    """Each job has a row, the chosen job is marked, the footer has costs and the last note; many jobs scroll."""
    failed = State("failed", "error", error={"message": "x"}, started_s=NOW - 60, ended_s=NOW)
    jobs = (watched(), watched("queued-abcde", State("pending"), progress={}), watched("failing", failed, progress={}))
    scene = Scene(jobs, NOW, ((NOW - 5, "queued-abcde: the backend is slow"),))
    rows = tableview.view(scene, ViewState(chosen="queued-abcde"), (80, 24), UNICODE, "all jobs")
    assert drawn(rows) + "\n" == TABLE_80x24
    scene = Scene(tuple(watched(f"job-{n:02}") for n in range(60)), NOW)
    told = drawn(tableview.view(scene, ViewState(chosen="job-30"), (80, 24), UNICODE, ""))
    assert "▶ job-30" in told
    assert "20 jobs above, 20 below" in told


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("signs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_no_screen_is_larger_than_the_terminal(watched: Watched, size: tuple[int, int], signs: Any) -> None:
    """The size holds for any content and any open question."""
    seen = watched(curves=curves_of(steps()), fault="\x1b[2J[red]" + "far too long " * 40)
    scene = Scene(tuple(with_job(seen, replace(seen.job, id=f"job-{n}" * (n % 5 + 1))) for n in range(40)), NOW)
    choices = [
        ViewState(opened="x"),
        ViewState(opened="x", is_large=True),
        ViewState(opened="x", typing="0,1"),
        ViewState(opened="x", wraps=True),
        ViewState(opened="x", helps=True),
        ViewState(asks="x"),
    ]
    for choice in choices:
        for rows in (
            picture(seen, log(*HOSTILE), size, choice=choice, signs=signs, note="a word of ours " * 20),
            tableview.view(scene, choice, size, signs, "all"),
        ):
            assert len(rows) == size[1]
            assert max(row.cell_len for row in rows) <= size[0]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_line_stays_in_its_row(watched: Watched, text: str) -> None:
    """No escape sequence of a job reaches the terminal, and rich markup is plain text."""
    quiet, loud = (picture(watched(), log(line), (60, 12)) for line in ("x", text))
    data = Renderer("utf-8", is_coloured=False).render(loud)
    ours = Renderer("utf-8", is_coloured=False).render(quiet)
    assert data.count(b"\x1b") == ours.count(b"\x1b")
    text_of = data.decode()
    assert not {letter for letter in text_of if not letter.isprintable()} - {"\x1b"}
    assert [row.plain for row in loud if "[r0]" not in row.plain] == [
        row.plain for row in quiet if "[r0]" not in row.plain
    ]


ODD_PROGRESS: list[dict[str, Any]] = [
    {"step": "1\x1b]0;title\x07", "max_steps": "\x9b2J"},
    {"step": 1, "max_steps": 2, "loss": "\x1b[2Jnan", "metrics": {"a\x1b[2J": "\x1b[2J", "b": 1e999}},
    {"step": 1, "metrics": {"a": 10**400}},
    {"step": [1], "max_steps": {}, "loss": [None], "curve": "True,\x1b"},
    {"step": True, "metrics": [1], "curve": "1.0,2.0;3,True,4,5"},
]


@pytest.mark.parametrize("progress", ODD_PROGRESS, ids=range(len(ODD_PROGRESS)))
def test_invalid_figures_of_a_job_do_not_affect_a_second_job(watched: Watched, progress: dict[str, Any]) -> None:
    """The figures come from untrusted input in the registry, and print no control character."""
    state = State("running", "\x1b[2J\x07", started_s=NOW - 60)
    good = watched()
    odd = with_job(good, replace(good.job, id="odd"))
    odd = with_job(odd, replace(odd.job, attempt=replace(odd.job.attempt, progress=progress, state=state)))
    scene = Scene((odd, good), NOW)
    table = tableview.view(scene, ViewState(), (100, 24), UNICODE, "")
    assert "step 600/2000" not in drawn(picture(odd))
    assert any("digits-4k2pw" in row.plain and "0.1534" in row.plain for row in table)
    for rows in (picture(odd, log("its log")), table):
        assert max(row.cell_len for row in rows) <= 100
        data = Renderer("utf-8", is_coloured=False).render(rows)
        plain = re.sub(rb"\x1b\[[0-9;?]*[HKhlm]", b"", data.removeprefix(b"\x1b[?2026h\x1b[0m\x1b[2J"))
        assert not {letter for letter in plain.decode() if not letter.isprintable()}
    assert "its log" in drawn(picture(odd, log("its log")))


def test_lines_of_the_log_are_shown_for_people(watched: Watched) -> None:
    """Names in brackets are no colours, events are hidden, paths begin at the job's folder, long lines may wrap."""
    assert "[r0] [red]no markup[/red] [/]" in drawn(picture(watched(), log(HOSTILE[0])))
    assert "::ct" not in drawn(picture(watched(), log('step 1/2 loss 3  ::ct {"e":"step","step":1}')))
    line = '  File "/home/me/.cloudtrain/local/digits-4k2pw/attempt-1/node-0/code/train.py", line 7, in main'
    assert '[r0]   File "code/train.py", line 7, in main' in drawn(picture(watched(), log(line)))
    line = "".join(chr(ord("a") + n % 26) for n in range(200))
    rows = drawn(picture(watched(), log(line), choice=ViewState(opened="x", wraps=True))).splitlines()
    begin = next(place for place, row in enumerate(rows) if row.startswith("[r0]"))
    assert "".join(row[5:].rstrip() for row in rows[begin : begin + 3]) == line


def test_rows_follow_the_size_of_the_screen(watched: Watched) -> None:
    """Name, progress and log are always visible, a larger log hides figures, a large screen has curves of 4 rows."""
    told = drawn(picture(watched(curves=curves_of(steps())), log("a", "b", "c"), (60, 10)))
    assert "digits-4k2pw  running" in told
    assert "step 600/2000" in told
    assert "[r0] c" in told
    assert "checkpoint" not in told
    seen, lines = watched(curves=curves_of(steps())), log(*(str(n) for n in range(99)))
    small = drawn(picture(seen, lines)).count("[r0]")
    large = drawn(picture(seen, lines, choice=ViewState(opened="x", is_large=True))).count("[r0]")
    assert (small, large) == (10, 19)
    rows = picture(watched(curves=curves_of(steps())), log("x"), (120, 40))
    begin = next(place for place, row in enumerate(rows) if row.plain.startswith("loss"))
    assert [row.plain[:9].strip() for row in rows[begin : begin + 5]] == ["loss", "", "", "", "samples/s"]


def test_help_shows_every_key_until_a_key_is_pressed(watched: Watched) -> None:
    """The help is the same for a job and for the table."""
    choice, _ = steer(ViewState(opened="x"), "?", ["x"])
    told = drawn(picture(watched(), log("a line"), (80, 40), choice=choice))
    assert ("wrap long lines" in told, "any key closes" in told, "a line" in told) == (True, True, False)
    table = drawn(
        tableview.view(Scene(jobs=(watched(),), now_s=NOW), replace(choice, opened=None), (80, 24), UNICODE, "all")
    )
    assert "wrap long lines" in table
    assert steer(choice, "s", ["x"]) == (ViewState(opened="x"), None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"asks_since_s": NOW - 30}, "local was asked 30s ago, no answer yet"),
        ({"fault": "the disk is full"}, "! the disk is full"),
    ],
)
def test_reason_for_an_old_screen_is_shown(watched: Watched, changes: dict[str, Any], words: str) -> None:
    """The cause is a slow poll or a failed poll."""
    assert words in drawn(picture(watched(**changes)))


def test_note_about_a_job_ends_with_the_job(watched: Watched) -> None:
    """A note from before the end disappears; a newer note stays for a while."""
    ended = watched("over", State("stopped", "user", started_s=NOW - 60, ended_s=NOW - 5))
    state = main_loop.FrameState(ViewState(opened="over"), UNICODE, stays=True)
    for seen, at_s, words in ((ended, NOW - 9, ""), (ended, NOW - 1, "said"), (watched("over"), NOW - 9, "said")):
        assert main_loop._note(Scene((seen,), NOW, ((at_s, "said"),)), state) == words


def test_silent_backend_is_shown_with_the_duration(watched: Watched) -> None:
    """The job keeps its state."""
    seen = watched()
    silent = replace(seen.job, attempt=replace(seen.job.attempt, unreachable_since_s=NOW - 185))
    told = drawn(picture(with_job(seen, silent)))
    assert "local has not answered for 3m 5s" in told
    assert "running" in told
    table = tableview.view(Scene((with_job(seen, silent),), NOW), ViewState(), (80, 24), UNICODE, "")
    assert "running (no answer)" in drawn(table)


def test_odd_losses_are_visible(watched: Watched) -> None:
    """A non-finite loss is in capitals; a loss that has fallen far has a log scale, named by its label."""
    told = (*steps(3).points, Point(2, "step", NOW, 40, {"loss": "nan"}))
    assert "NAN  least" in drawn(picture(watched(curves=curves_of(Series(told)))))
    falls = tuple(Point(2, "step", NOW, step, {"loss": 10.0 ** (-step / 10)}) for step in range(41))
    told = drawn(picture(watched(curves=curves_of(Series(falls)))))
    line = next(line for line in told.splitlines() if line.startswith("loss (log)"))
    assert set("▁▂▃▄▅▆▇█") <= set(line)
    assert "\nloss  " in drawn(picture(watched(curves=curves_of(steps()))))


def test_log_is_shown_without_figures_or_scrolled(watched: Watched) -> None:
    """Without steps no curve is drawn; scrolled lines stay fixed while new lines arrive."""
    told = drawn(picture(watched(progress={}, curves=Curves()), log("hello")))
    assert "no step reported yet" in told
    assert "samples/s" not in told
    assert "[r0] hello" in told
    held = log(*(f"line {n}" for n in range(100))).lines
    choice = ViewState(opened="x", held=tuple(held), back=40)
    told = drawn(picture(watched(), log("newer"), choice=choice))
    assert "line 59\n" in told
    assert "newer" not in told
    assert "PAUSED" in told


def test_only_changed_rows_are_painted_again(watched: Watched) -> None:
    """Without a change, no byte is written."""
    renderer = Renderer("utf-8", is_coloured=True)
    seen = watched(curves=curves_of(steps()))
    whole = renderer.render(picture(seen, log("a")))
    assert renderer.render(picture(seen, log("a"))) == b""
    assert len(renderer.render(picture(seen, log("a", "b")))) < len(whole) / 20
    renderer.forget()
    assert renderer.render(picture(seen, log("a", "b"))).startswith(b"\x1b[?2026h\x1b[0m\x1b[2J")


def test_plain_terminal_gets_bold_or_ascii_alone(watched: Watched) -> None:
    """With NO_COLOR only bold stays; in an ASCII locale a non-ASCII character of a job becomes a question mark."""
    rows = picture(watched(curves=curves_of(steps())), log("a"))
    plain, coloured = (Renderer("utf-8", is_coloured=is_it).render(rows).decode() for is_it in (False, True))
    assert "\x1b[1m" in plain
    assert "\x1b[36m" not in plain
    assert "\x1b[36m" in coloured
    rows = picture(watched(curves=curves_of(steps())), log("日本語 é"), signs=ASCII)
    data = Renderer("ascii", is_coloured=False).render(rows)
    assert data.isascii()
    assert b"[r0] ??? ?" in data
