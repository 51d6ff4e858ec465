"""A sweep in the commands: list, status, cost, report, resume, watch; rows without real runs."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import Page

from browser import contrast
from cloudtrain.entrypoints import events
from cloudtrain.launcher import api, cli
from cloudtrain.launcher.errors import CloudtrainError, UsageError
from cloudtrain.launcher.job import State
from cloudtrain.launcher.jobs import retry
from cloudtrain.launcher.jobs.view import read_view, unattended
from cloudtrain.launcher.report.sweep_page import best_curve
from cloudtrain.launcher.store import progress, sweeps
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.sweeps import overview
from doubles import swept
from doubles.signatures import MakeJob, OpenTerminal


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs a command in this process; with `--json` it returns the object, else the text."""

    def call(*args: str) -> Any:
        capsys.readouterr()
        cli.cli.main(list(args), standalone_mode=False)
        out = capsys.readouterr().out
        return json.loads(out) if "--json" in args else out

    return call


def test_sweep_is_a_line_of_the_list_and_a_job_of_status(registry: Registry, seed: MakeJob, run: Any) -> None:
    """One line, with the trials and the best value; status has the job's figures, the rungs and the best trials."""
    seed("older", State("succeeded", started_s=1.0, ended_s=2.0))
    job = swept.put(registry, 9)
    lines = run("list").splitlines()
    assert [line.split()[0] for line in lines] == ["JOB", job.id, "older"]
    assert "9/9 trials, loss 0.12" in lines[1]
    shown = run("status", "digits", "--json")
    assert (shown["job"], shown["state"], shown["sweep"]["trials"]) == (job.id, "succeeded", 9)
    assert [each["done"] for each in shown["sweep"]["rungs"]] == [8, 3, 1]
    assert [each["failed"] for each in shown["sweep"]["rungs"]] == [1, 0, 0]
    assert (shown["sweep"]["best"][0]["trained"], shown["limit_usd"]) == (810, 9.0)
    text = run("status", "last")
    assert "rung 3 (step 810): 1 done, best loss 0.12" in text
    assert run("best", "--json")["value"] == shown["sweep"]["best"][0]["value"]
    assert run("rm", "-y", job.id) is not None
    assert sweeps.segments(registry.database, job.id) == []


def test_each_json_of_a_job_has_the_same_sweep_and_trials(registry: Registry, seed: MakeJob, run: Any) -> None:
    """`status`, `wait`, `watch` and Python show all of a sweep; a list only counts the trials."""
    job = swept.put(registry, 9)
    (listed,) = run("list", "--json")["jobs"]
    whole = overview.as_json(registry.database, job)
    counts = {"done": 9, "planned": 9, "metric": "loss", "best": whole["best"][0]["value"]}
    assert (listed["trials"], "sweep" in listed) == (counts, False)
    shown = [run(*words, "--json", job.id) for words in (("status",), ("wait",), ("watch", "--once"))]
    for each in [*shown, api.status(job.id).details]:
        assert (each["sweep"], each["trials"]) == (whole, counts)
    seed("plain", State("succeeded", started_s=1.0, ended_s=2.0))
    assert run("status", "--json", "plain")["sweep"] is run("status", "--json", "plain")["trials"] is None


def test_resumed_sweep_keeps_its_progress_until_its_first_report(registry: Registry, run: Any) -> None:
    """The trials of the earlier attempt count, of the number that the resume has set."""
    job = swept.put(registry, 9)
    again = replace(job.attempt, number=2, phase="intent", state=State("pending"), progress={})
    registry.add_attempt(again, swept.config_of(12), {})
    view = read_view(registry, registry.find(job.id))
    assert progress.shown(view.progress).startswith("9/12 trials, loss 0.12")
    assert view.as_json()["trials"]["planned"] == 12


def test_trial_is_named_only_where_it_is_one(registry: Registry, seed: MakeJob, run: Any) -> None:
    """A trial has lines, and no job: `lr.1` is never the job `lr-1`; trials that do not exist are errors."""
    job = swept.put(registry, 9)
    for name in ("lr", "lr-1"):
        seed(name, State("succeeded", started_s=1.0, ended_s=2.0))
    for words, error in (
        (("logs", f"{job.id}.99"), f"{job.id} has no trial 99"),
        (("logs", "lr.0"), "lr has no trials: it is no sweep"),
        (("logs", "nosuch.0"), "no job `nosuch.0`"),
        (("status", "lr.1"), "no job `lr.1`"),
        (("stop", "-y", "lr.1"), "no job `lr.1`"),
        (("rm", "-y", "lr.1"), "no job `lr.1`"),
        (("status", "lr-2"), "no job `lr-2`"),
        (("status", f"{job.id}.1"), f"trial 1 has no job of its own: the job {job.id} trains it"),
    ):
        with pytest.raises(CloudtrainError) as caught:
            run(*words)
        assert (caught.value.message, bool(caught.value.hint)) == (error, True)


@pytest.mark.parametrize(("algorithm", "hint"), [("asha", "--trials +N"), ("pbt", "submit a new sweep")])
def test_done_sweep_goes_on_only_with_more_trials(algorithm: str, hint: str, registry: Registry) -> None:
    """A done sweep is refused like a done job, also with settings that add no trial; the hint works."""
    job = swept.put(registry, 9, algorithm=algorithm)
    narrow: Any = SimpleNamespace(model_dump=lambda mode: swept.config_of(9, algorithm=algorithm, parallel=1))
    for refuse in (partial(retry.require_ended, registry, job), partial(retry._require_same_search, job, narrow)):
        with pytest.raises(UsageError, match=f"{job.id} is done") as caught:
            refuse()
        assert hint in caught.value.hint


def test_detached_sweep_needs_no_command(registry: Registry) -> None:
    """`submit -d` says that the sweep chooses its trials without a launcher."""
    found = unattended(swept.put(registry, 9))
    assert "  goes on     to the end of its trials by itself: no command has to run" in found


def test_interrupted_trials_are_saved_and_short_ends_have_their_step(registry: Registry) -> None:
    """A trial that ran at the job's end is saved; a result has the step that was trained."""
    job = replace(swept.put(registry, 9), config={**swept.config_of(9, steps=810), "task": None})
    swept.begin(registry, 20)
    assert overview.as_json(registry.database, job)["rungs"][0]["saved"] == 1
    assert overview.as_json(registry.database, job)["running"] == []
    end = {"trial": 4, "rung": 2, "step": 400, "value": 0.01, "state": "done", "seconds": 3.0}
    sweeps.take(registry.database, job.id, sweeps.reports_in([(events.format_line("trial", "", end), 1.0)]))
    best = overview.as_json(registry.database, job)["best"][0]
    assert (best["trial"], best["trained"], overview.ended_at({"unit": "steps"}, best)) == (4, 400, "step 400")


def test_reports_that_repeat_count_their_seconds_once_each(registry: Registry) -> None:
    """The seconds of all starts of a segment add up; invalid lines are left out."""
    job = swept.put(registry, 1, first_rung=810)
    lines = [("junk ::ct {", 1.0), (events.format_line("trial", "", {"trial": -1, "rung": 0, "state": "done"}), 1.0)]
    for state in ("running", "saved", "running", "done"):
        fields = {"trial": 5, "rung": 0, "state": state, "seconds": 2.0, "value": float("nan"), "step": 3}
        lines.append((events.format_line("trial", "", fields), 2.0))
    sweeps.take(registry.database, job.id, sweeps.reports_in(lines))
    row = sweeps.segments(registry.database, job.id)[-1]
    assert (row.trial, row.state, row.value, row.step, row.seconds) == (5, "failed", None, None, 8.0)


def test_progress_has_the_trials_and_what_was_not_begun() -> None:
    """The driver's lines carry the count and the best; its last line says which trial the time excludes."""
    summary = {"done": 3, "trials": 9, "metric": "loss", "best": 0.25}
    lines = [
        events.format_line("trial", "", {"trial": 1, "rung": 0, "state": "done", "sweep": summary}),
        events.format_line("step", "", {"trial": 1, "step": 7, "loss": 1.0}),
        events.format_line("preempt", "", {"not_begun": "trial 9 to step 270 needs 13m, 8m are left"}),
    ]
    found = progress.fold({}, lines)
    assert (progress.shown(found), "step" in found) == ("3/9 trials, loss 0.25", False)
    assert found["not_begun"] == "trial 9 to step 270 needs 13m, 8m are left"
    assert "not_begun" not in progress.fold(found, lines[:1])


@pytest.mark.parametrize(
    ("trials", "words"),
    [("+x", "expected a whole number"), ("8", "9 trials of digits-x7k2p began"), ("-3", "expected a whole number")],
)
def test_impossible_growth_is_refused(trials: str, words: str, registry: Registry) -> None:
    """Each refusal says what is wrong; `+18` and `27` are the same."""
    job = swept.put(registry, 9)
    with pytest.raises(UsageError, match=words):
        retry.trials_after(registry, job, trials)
    assert retry.trials_after(registry, job, "+18") == retry.trials_after(registry, job, "27") == 27


def test_grid_population_and_other_jobs_take_no_trials(registry: Registry, seed: MakeJob) -> None:
    """A grid's trials are all in the sweep, a population keeps its size, and a job has no trials."""
    for algorithm in ("grid", "pbt"):
        space = {"training.optimizer.lr": [0.1, 0.01], "training.optimizer.name": ["adamw", "sgd"]}
        job = replace(seed(algorithm), config=swept.config_of(4, algorithm=algorithm, space=space))
        with pytest.raises(UsageError, match=f"{algorithm} keeps its 4 trials"):
            retry.trials_after(registry, job, "+1")
    with pytest.raises(UsageError, match="--trials is for a sweep"):
        retry.trials_after(registry, seed("alone"), "+2")


def test_watch_of_an_ended_sweep_shows_its_trials(registry: Registry, terminal: OpenTerminal) -> None:
    """The live view of the job has the rungs."""
    job = swept.put(registry, 9)
    screen = terminal(job.id)
    screen.see("rung 3 (step 810)")
    screen.press("q")
    assert screen.end() == 0
    assert screen.is_given_back()


def test_cost_of_a_sweep_adds_up(registry: Registry, run: Any) -> None:
    """Trials, rungs and idle slots add up to the job's cost; the saving follows from the untrained steps."""
    job = swept.put(registry, 9)
    found = run("cost", job.id, "--json")
    trials = found["sweep"]
    assert [each["segments"] for each in trials["rungs"]] == [9, 3, 1]
    seconds = 13 * swept.START_S + swept.STEP_S * (9 * 90 + 3 * 180 + 540)
    spent = seconds / swept.SLOTS / 0.9 / 1000
    assert found["spend_usd"] == pytest.approx(spent)
    for parts in (trials["rungs"], trials["trials"]):
        assert sum(each["usd"] for each in parts) == pytest.approx(0.9 * spent)
    assert trials["idle_usd"] == pytest.approx(0.1 * spent, abs=1e-6)
    # 5 trials paused at step 90 and 2 at step 270 of 810; trial 1 has failed, and one has finished.
    assert trials["saved_steps"] == 5 * 720 + 2 * 540
    text = run("cost", job.id)
    assert "idle        0.06" in text or "idle        0.07" in text
    assert len(run("cost", job.id, "--csv").splitlines()) == 1 + 9 + 1
    assert sum(line.strip().endswith("finished") for line in text.splitlines()) == 1


def test_cost_table_of_many_trials_is_short(registry: Registry, run: Any) -> None:
    """The most expensive trials are shown with the sums of all; --csv has all trials."""
    job = swept.put(registry, 60)
    assert sum(line.strip().endswith("paused") for line in run("cost", job.id).splitlines()) < 20
    assert len(run("cost", job.id, "--csv").splitlines()) == 1 + 60 + 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_of_a_sweep_in_a_browser(
    scheme: str, registry: Registry, tmp_path: Path, run: Any, open_page: Callable[..., Page]
) -> None:
    """The page draws all trials and the best so far, without an error or a request; every text is legible."""
    job = swept.put(registry, 27)
    path = tmp_path / "sweep.html"
    assert run("report", job.id, "-o", str(path)).strip() == str(path)
    page = open_page(path.as_uri(), color_scheme=scheme)
    rows = page.locator("#rungs tbody tr").all_inner_texts()
    wanted = (["1", "step 90", "26", "0", "1"], ["2", "step 270", "9", "0", "0"], ["3", "step 810", "3", "0", "0"])
    assert [row.split("\t")[:5] for row in rows] == list(wanted)
    best = run("status", job.id, "--json")["sweep"]["best"][0]
    assert page.locator("#trials tbody tr").count() == 27
    assert page.locator("#trials tbody tr").first.inner_text().split()[:3] == [str(best["trial"]), "0.128819", "810"]
    assert page.locator("#parallel polyline").count() == 27
    assert page.locator("#parallel polyline.sw-best").text_content().startswith(f"trial {best['trial']}: loss")
    assert page.locator("#parallel polyline.sw-none").text_content().startswith("trial 1: failed")
    assert page.locator("#best circle").count() == 26 + 9 + 3
    assert page.evaluate("getComputedStyle(document.querySelector('#parallel .sw-best')).strokeWidth") == "3px"
    assert contrast(page)[0][0] >= 4.5


def test_best_so_far_is_a_staircase_over_money() -> None:
    """The line never rises for a metric that falls, ends at the best result, and each result is a dot."""
    curve = best_curve([(1_000_000, 3.0, "a"), (2_000_000, 4.0, "b"), (4_000_000, 1.0, "c")], "min")
    places = [tuple(map(float, each.split(","))) for each in curve.points.split()]
    heights = [y for _, y in places]
    assert heights == sorted(heights)  # the greater the y, the lower on the page
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert heights[-1] == curve.dots[2][1]
    assert [text for _, text in curve.x.ticks] == ["0 USD", "1 USD", "2 USD", "3 USD", "4 USD"]
    assert best_curve([(1, float("inf"), "a")], "min") is None


def test_report_follows_the_rank_and_a_new_sweep_has_one(registry: Registry, run: Any, tmp_path: Path) -> None:
    """Trials without a result are at the end; a sweep that has only begun has a report too."""
    job = swept.put(registry, 9)
    found = run("report", job.id, "--json")
    assert [each["trial"] for each in found["ends"][:5]] == [each["trial"] for each in found["best"]]
    assert [each["step"] for each in found["ends"]] == [810, 270, 270, 90, 90, 90, 90, 90, None]
    assert found["ends"][-1]["state"] == "failed"
    for trials in ([20], []):
        sweeps.forget(registry.database, job.id)
        for trial in trials:
            swept.begin(registry, trial)
        run("report", job.id, "-o", str(tmp_path / "r.html"))
        assert "All trials" in (tmp_path / "r.html").read_text()
