"""All screens of a job show the same figures: the text of `status`, its JSON, `list`, `watch`, the page, the report."""

import html
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.launcher import api
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import listing, overview
from cloudtrain.launcher.jobs.view import JobView, read_view
from cloudtrain.launcher.live import jobview, tableview
from cloudtrain.launcher.live.model import Scene, TailShot, WatchedJob, curves_of
from cloudtrain.launcher.live.view_state import ViewState
from cloudtrain.launcher.report import facts
from cloudtrain.launcher.store import series
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.text.charts import UNICODE
from cloudtrain.launcher.ui import pages, site
from doubles.plans import make_job, plan_of
from doubles.signatures import MakeJob

NOW_S = 1_796_000_000.0
ERROR = {"rank": 1, "node": 0, "kind": "exception", "type": "OutOfMemoryError", "message": "CUDA out of memory"}
RUNS = State("running", started_s=NOW_S - 600)
FAILED = State("failed", "error", True, ERROR, NOW_S - 900, NOW_S - 300)
FAR = {"step": 60, "max_steps": 100, "loss": 0.5, "eta_s": 80.0, "step_s": 0.144, "stepped_s": NOW_S}
FAR |= {"checkpoint_step": 50}
ALL = "status list line live table page report"
# Each fact, its words, and the screens with these words.
SHARED = [
    ("cost", "5.00", ALL),
    ("budget", "40.00", "status line live page report"),
    ("share of the budget", "12 %", "status live table report"),
    ("step", "60/100", "status list line live table"),
    ("step", "60", "page report"),
    ("loss", "0.5", "status list line table page report"),
    ("checkpoint", "50", "status live page"),
]
OF_STATE = {
    "running": [
        ("state", "running", "status list line live table page"),
        ("remaining time", "1m 20s", "status line live table page"),
        ("time of a step", "144 ms", "status live"),
    ],
    "failed": [
        ("state", "failed (error), resumable", "status list line live"),
        ("state", "failed (error)", "table"),
        ("failure", "OutOfMemoryError: CUDA out of memory", "status live page report"),
        ("cause", "the GPU's memory is full", "status page"),
        ("next step", "cloudtrain logs --rank 1 --tail 50 job", "status live page report"),
    ],
}


def screens_of(registry: Registry, view: JobView) -> dict[str, str]:
    """Return the text of each screen."""
    watched, shown = WatchedJob(view), series.read(registry.database, view.job.id)
    rows = {
        "live": jobview.view(watched, TailShot(), ViewState(opened="job"), (160, 60), UNICODE, NOW_S)[0],
        "table": tableview.view(Scene((watched,), NOW_S), ViewState(), (160, 24), UNICODE, ""),
    }
    parts = pages.job_parts(site.Pages(site.assets(), csrf="", is_read_only=True), registry, view.job.id, "").parts
    (line,) = listing.chosen(registry, listing.JobFilter()).lines
    cards, rows_of_plan, failed = facts.headline(view, shown), facts.plan_rows(view), facts.failures(view)
    report = [*cards, *rows_of_plan, *failed, *facts.commands(view)]
    return {
        **{name: "\n".join(row.plain for row in drawn) for name, drawn in rows.items()},
        "status": "\n".join(overview.as_lines(view)),
        "list": f"{line.outcome} {line.progress} {line.money}",
        "line": overview.as_line(view),
        "page": html.unescape(re.sub("<[^>]*>", " ", "\n".join(parts.values()))),
        "report": str(report),
    }


@pytest.mark.parametrize("state", [RUNS, FAILED], ids=lambda state: state.state)
def test_screens_show_the_same_figures(registry: Registry, monkeypatch: pytest.MonkeyPatch, state: State) -> None:
    """Cost, budget, step, loss, checkpoint, remaining time, state, failure and cause agree on all screens."""
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    plan = plan_of(instances=2, ranks=2, hourly_usd=30.0, worst_case_usd=33.0, cap_s=3600, deadline_s=3300)

    def make(job_id: str, number: int) -> Job:
        return make_job(job_id, number, config={"budget": {"limit": "40 USD"}, "task": "task.py"}, plan=plan)

    job, _ = registry.add("job", make, exclusive=True, key=None)
    registry.mark_sent(job.attempt, {"folder": "/x"})
    registry.set_state(job.attempt, state, FAR)
    view = read_view(registry, registry.find("job"))
    texts = screens_of(registry, view)
    for fact, words, screens in [*SHARED, *OF_STATE[state.state]]:
        for screen in screens.split():
            assert words in texts[screen], f"{screen} shows another {fact}: {texts[screen]}"


def test_second_attempt_without_a_step_shows_the_last_known_progress(registry: Registry) -> None:
    """The step of the first attempt, or of the checkpoint from which the second one starts; no pace of the first."""
    job, _ = registry.add("job", lambda job_id, number: make_job(job_id, number, config={}), exclusive=True, key=None)
    registry.mark_sent(job.attempt, {"folder": "/x"})
    registry.set_state(job.attempt, FAILED, {**FAR, "samples_per_s": 9.0})
    second = replace(job.attempt, number=2)
    registry.add_attempt(second, {}, {})
    registry.mark_sent(second, {"folder": "/x"})
    for own, step in (({}, 60), ({"resumed_step": 50, "checkpoint_step": 50}, 50)):
        registry.set_state(second, State("stopped", "user", True, started_s=NOW_S - 20, ended_s=NOW_S - 10), own)
        view = read_view(registry, registry.find("job"))
        texts = screens_of(registry, view)
        assert all(f"{step}/100" in texts[screen] for screen in ("status", "list", "line", "live", "table")), texts
        assert f"'{step}'" in texts["report"]
        found = view.as_json()
        assert (found["step"], found["max_steps"], found["checkpoint_step"]) == (step, 100, 50)
        assert (api.status("job").step, found["samples_per_s"]) == (step, None)
        assert "steps since" not in texts["status"]


def test_step_time_is_of_the_newest_report_alone(registry: Registry) -> None:
    """A slower first attempt and a save change neither the time of a step, nor the steps per second beside it."""
    job, _ = registry.add("job", lambda job_id, number: make_job(job_id, number, config={}), exclusive=True, key=None)
    registry.mark_sent(job.attempt, {"folder": "/x"})
    registry.set_state(job.attempt, RUNS, FAR)
    points = [
        series.Point(1, "step", NOW_S + step, step, {"step_s": 0.9, "compute_s": 0.9}, seq=step) for step in range(9)
    ]
    parts = {"step_s": 0.144, "compute_s": 0.072, "data_s": 0.072, "checkpoint_s": 0.144}
    points += [series.Point(2, "step", NOW_S + 99 + step, step, parts) for step in (1, 2)]
    curves = curves_of(series.Series(tuple(points)))
    watched = WatchedJob(read_view(registry, registry.find("job")), curves=curves)
    text = "\n".join(
        row.plain for row in jobview.view(watched, TailShot(), ViewState(opened="job"), (160, 60), UNICODE, NOW_S)[0]
    )
    assert re.search(r"step time +144 ms .*compute 25 % .*data 25 % .*save 50 %", text), text
    assert re.search(r"steps/s .* 6\.944 ", text), text


def test_python_has_the_figures_of_the_json(seed: MakeJob, registry: Registry) -> None:
    """A JobStatus holds the figures of `status --json`."""
    job = seed("job", FAILED)
    told: dict[str, Any] = read_view(registry, job).as_json()
    status = api.status("job")
    assert (status.cost_usd, status.limit_usd, status.step) == (told["spend_usd"], told["limit_usd"], told["step"])
    assert (status.state, status.reason, status.exit_code) == (told["state"], told["reason"], told["exit_code"])
    assert status.error == "rank 1: OutOfMemoryError: CUDA out of memory"
