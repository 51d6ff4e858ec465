"""A sweep as a whole in the commands: list, cost, compare, report, wait, watch, resume; rows without real runs."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from browser import contrast
from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.sweep.search import Allowance, decide, values_of
from cloudtrain.launcher import cli
from cloudtrain.launcher.errors import CloudtrainError, UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.live.sweep import view
from cloudtrain.launcher.planning import search_spec
from cloudtrain.launcher.report.sweep_page import best_curve
from cloudtrain.launcher.store import sweeps
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.store.sweeps import SweepRecord
from cloudtrain.launcher.sweeps import alerts, growing, overview, searching
from cloudtrain.launcher.text.charts import ASCII, UNICODE
from doubles import receivers, swept
from doubles.terminals import Terminal


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs a command in this process; with `--json` it returns the object, else the text."""

    def call(*args: str) -> Any:
        capsys.readouterr()
        cli.cli.main(list(args), standalone_mode=False)
        out = capsys.readouterr().out
        return json.loads(out) if "--json" in args else out

    return call


# -- list -------------------------------------------------------------------------------------------------------------


def test_list_shows_a_sweep_as_one_line(registry: Registry, seed: Callable[..., Job], run: Callable[..., Any]) -> None:
    """Trials are hidden below their sweep, and do not push older jobs from the list; --all and --state show trials."""
    seed("older", State("succeeded", started_s=1.0, ended_s=2.0))
    sweep = swept.put(registry, 30)
    lines = run("list").splitlines()
    assert [line.split()[0] for line in lines] == ["JOB", sweep.id, "older"]
    assert "sweep ended" in lines[1]
    assert "30/30 trials, loss 0.12" in lines[1]
    assert len(run("list", "--all").splitlines()) == 1 + 1 + 30 + 1
    failed = run("list", "--state", "failed").splitlines()
    assert [line.split()[0] for line in failed] == ["JOB", f"{sweep.id}-1"]


def test_list_shows_and_chooses_sweeps_as_jobs(registry: Registry, run: Callable[..., Any]) -> None:
    """JSON has the sweep beside all jobs, with the cost by the ledger; filters and names of jobs hold for sweeps."""
    sweep = swept.put(registry, 9)
    found = run("list", "--json")
    (shown,) = found["sweeps"]
    assert len(found["jobs"]) == 9
    assert (shown["sweep"], shown["state"], shown["trials_done"], shown["trials"]) == (sweep.id, "ended", 9, 9)
    assert (shown["best_step"], shown["limit_usd"]) == (810, 9.0)
    seconds = 13 * swept.START_S + swept.STEP_S * (9 * 90 + 3 * 180 + 540)
    assert shown["spend_usd"] == pytest.approx(seconds * swept.HOURLY_MICRO / 3600 / 1e6, rel=0.01)
    for name in (sweep.id, "digits", sweep.id[:-1], "last"):  # a trial has a name of its own
        assert run("status", name, "--json")["sweep"] == sweep.id
    for name in (f"{sweep.id}.3", f"{sweep.id}-3"):
        assert run("status", name, "--json")["job"] == f"{sweep.id}-3"
    assert shown["best"] == run("status", sweep.id, "--json")["best"][0]["value"]
    counts = {"--active": 0, "--tag team=vision": 1, "--tag team=x": 0, "--since 1h": 1, "-n1": 1}
    assert {args: len(run("list", *args.split(), "--json")["sweeps"]) for args in counts} == counts
    sweeps.set_state(registry.database, sweep.id, "running")  # active also between two trials
    assert [each["sweep"] for each in run("list", "--active", "--json")["sweeps"]] == [sweep.id]
    assert "sweep running" in run("list", "--active")


# -- resume -----------------------------------------------------------------------------------------------------------


def test_grown_sweep_keeps_the_values_of_its_trials(registry: Registry) -> None:
    """More trials and more money change no value of a known trial, and the stored config has both."""
    sweep = swept.put(registry, 9)
    grown = growing.grown(registry.database, sweep, "+18", "+1.50USD")
    before, after = search_spec.search_of(sweep.config), search_spec.search_of(grown.config)
    assert (after.trials, grown.limit_micro, grown.state) == (27, 10_500_000, "running")
    assert grown.config["budget"]["limit"] == "10.50 USD"
    assert [values_of(before, {}, n, 0) for n in range(9)] == [values_of(after, {}, n, 0) for n in range(9)]
    assert growing.grown(registry.database, sweep, "12", "20USD").limit_micro == 20_000_000
    growing.go_on(registry, grown)
    assert sweeps.find(registry.database, sweep.id) == grown
    results = searching.results_of(sweeps.segments(registry.database, sweep.id))
    assert [each.key for each in decide(before, results, [], Allowance())] == []
    assert [each.key for each in decide(after, results, [], Allowance())] == [(n, 0) for n in range(9, 13)]


@pytest.mark.parametrize(
    ("trials", "budget", "words"),
    [
        (None, None, "has ended"),
        ("+x", None, "expected a whole number"),
        ("8", None, "9 trials of digits-x7k2p began already"),
        ("-3", None, "expected a whole number"),
        ("+40000", None, "at most 10000"),
        (None, "1USD", "has spent and holds 1.2"),
        (None, "+much", "expected an amount"),
    ],
)
def test_impossible_growth_is_refused(trials: str | None, budget: str | None, words: str, registry: Registry) -> None:
    """Each refusal says what is wrong, and changes no row."""
    sweep = swept.put(registry, 9)
    with pytest.raises(CloudtrainError, match=words):
        growing.grown(registry.database, sweep, trials, budget)
    assert sweeps.find(registry.database, sweep.id) == sweep


def test_grid_and_population_take_no_more_trials(registry: Registry) -> None:
    """A grid's trials are all in the sweep, and a population keeps its size."""
    space = {"training.optimizer.lr": [0.1, 0.01], "training.optimizer.name": ["adamw", "sgd"]}
    sweep = swept.put(registry, 4, algorithm="grid", space=space)
    with pytest.raises(UsageError, match="the grid has 4 trials"):
        growing.grown(registry.database, sweep, "+1", None)
    of_pbt = replace(sweep, config=swept.config_of(4, algorithm="pbt"))
    with pytest.raises(UsageError, match="a population keeps its 4 trials"):
        growing.grown(registry.database, of_pbt, "+1", None)


def test_sweep_without_a_budget_gets_one(registry: Registry) -> None:
    """`+` needs a budget to add to; a plain sum sets the first one."""
    sweep = swept.put(registry, 9, limit_micro=None)
    with pytest.raises(UsageError, match="no budget to add to"):
        growing.grown(registry.database, sweep, None, "+5USD")
    assert growing.grown(registry.database, sweep, None, "5USD").config["budget"]["limit"] == "5 USD"


def test_options_of_a_job_are_refused_for_a_sweep(
    registry: Registry, seed: Callable[..., Job], run: Callable[..., Any]
) -> None:
    """A sweep keeps its machines and its code, and a job has no trials."""
    sweep = swept.put(registry, 9)
    with pytest.raises(UsageError, match="--instances is for a job"):
        run("resume", sweep.id, "--instances", "2")
    seed("alone", State("stopped", "user", started_s=1.0, ended_s=2.0))
    with pytest.raises(UsageError, match="--trials is for a sweep"):
        run("resume", "alone", "--trials", "+2")


@pytest.mark.parametrize(("state", "shown"), [("failed", "failed"), ("succeeded", "ended"), ("stopped", "stopped")])
def test_packed_sweep_has_the_state_of_its_job(
    state: Any, shown: str, registry: Registry, seed: Callable[..., Job], cli: Any
) -> None:
    """A sweep whose trials all failed says so, with the cause."""
    why = "no trial has a result; the first failure: rank 0: KeyError: 'lr'"
    job = replace(seed("packed", State(state, error={"message": why})), config=swept.put(registry, 9).config)
    sweeps.follow_packed(registry.database, job, [], state)
    first = cli("status", "packed").stdout.splitlines()[0]
    assert first == (f"packed: failed: {why}" if state == "failed" else f"packed: {shown}")
    assert f"sweep {shown}" in cli("list").stdout


def test_script_that_ended_early_has_its_own_step(registry: Registry, seed: Callable[..., Job]) -> None:
    """The status of a packed sweep names the step of the result, not that of the rung."""
    config = {**swept.put(registry, 9).config, "task": None}
    rung = search_spec.search_of(config).rungs[0]
    job = replace(seed("packed", State("running")), config=config)
    end = {"trial": 0, "rung": 0, "step": rung - 40, "value": 0.5, "state": "done"}
    reports = sweeps.reports_in([(events.format_line("trial", "", end), 1.0)])
    sweeps.follow_packed(registry.database, job, reports, "running")
    shown = overview.as_json(registry.database, sweeps.find(registry.database, "packed"))
    assert [each["step"] for each in shown["best"]] == [rung - 40]


# -- watch and wait ---------------------------------------------------------------------------------------------------


def running_sweep(registry: Registry) -> SweepRecord:
    """Return a running sweep of nine trials, two of which run."""
    sweep = swept.put(registry, 9, state="running")
    for trial, rung in ((3, 1), (6, 2)):
        row = sweeps.SegmentRecord(sweep.id, trial, rung, f"{sweep.id}-{trial}", 1, (90, 270, 810)[rung], "sent")
        sweeps.write(registry.database, row)
    return sweep


def test_screen_of_a_sweep_has_rungs_money_and_trials(registry: Registry) -> None:
    """The screen fits any terminal, and leaves trials out where the terminal is low."""
    sweep = running_sweep(registry)
    shot = overview.as_json(registry.database, sweep), ("sent: digits-x7k2p-3, rung 2",)
    rows = [each.plain for each in view(shot, (100, 30), UNICODE, 0.0)]
    assert len(rows) == 30
    text = "\n".join(rows)
    assert "digits-x7k2p  running  asha, 9 of 9 trials began" in rows[0]
    assert "1.21 USD of 9.00 USD spent" in rows[1]
    assert [row.split() for row in rows[4:7]] == [
        ["1", "90", "8", "0", "1", "0.286541"],
        ["2", "270", "3", "1", "0", "0.173688"],
        ["3", "810", "0", "1", "0", "-"],
    ]
    assert re.search(r"3  rung 2 +.*step 90/270, loss", text)
    assert re.search(r"6  loss 0.173688 at step 270  lr 0.0045", text)
    assert rows[-2] == "sent: digits-x7k2p-3, rung 2"
    for size in ((20, 4), (40, 10), (300, 80)):
        found = view(shot, size, ASCII, 0.0)
        assert len(found) == size[1]
        assert all(each.cell_len <= size[0] for each in found)


def test_watch_of_an_ended_sweep_ends_at_once(
    registry: Registry, terminal: Callable[..., Terminal], run: Callable[..., Any]
) -> None:
    """The live view leaves with the exit code of the sweep, and the status stays on the terminal."""
    sweep = swept.put(registry, 9)
    screen = terminal(sweep.id)
    assert screen.end() == 0
    assert screen.is_given_back()
    assert "rung 3 (step 810): 1 done" in screen.after()
    assert run("watch", sweep.id, "--json")["state"] == "ended"


def test_user_leaves_a_running_sweep(registry: Registry, terminal: Callable[..., Terminal]) -> None:
    """Ctrl-C ends the view with 130, restores the terminal, and says how the sweep goes on."""
    sweep = running_sweep(registry)
    registry.database.execute("UPDATE sweeps SET lease_s = ?", (time.time() + 3600,))  # another process drives
    screen = terminal(sweep.id)
    screen.see("9 of 9 trials began")
    screen.press("\x03")
    assert screen.end() == 130
    assert screen.is_given_back()
    assert f"cloudtrain advance {sweep.id}" in screen.after()


def test_active_sweep_is_driven_or_waited_for(registry: Registry, run: Callable[..., Any]) -> None:
    """0 after a finished trial, 1 without; 9 if stopped before; 124 after the timeout; a watch finds the end."""
    sweep = swept.put(registry, 9, state="running")
    run("watch", "--once")
    assert sweeps.find(registry.database, sweep.id).state == "ended"

    def code(state: str) -> int:
        sweeps.set_state(registry.database, sweep.id, state)
        found: int = cli.cli.main(["wait", sweep.id, "--timeout", "1s"], standalone_mode=False)
        return found

    assert (code("ended"), code("stopped")) == (0, 0)
    registry.database.execute("DELETE FROM segments WHERE rung = 2")
    assert (code("ended"), code("stopped")) == (1, 9)
    registry.database.execute("UPDATE sweeps SET lease_s = ?", (time.time() + 3600,))
    assert code("running") == 124


# -- cost and compare -------------------------------------------------------------------------------------------------


def test_cost_of_a_sweep_adds_up(registry: Registry, run: Callable[..., Any]) -> None:
    """Trials, rungs and the sum agree; the starts and the untrained steps of paused trials follow from the rows."""
    sweep = swept.put(registry, 9)
    found = run("cost", sweep.id, "--json")
    assert [each["segments"] for each in found["rungs"]] == [9, 3, 1]
    for parts in (found["rungs"], found["trials"]):
        assert sum(each["usd"] for each in parts) == pytest.approx(found["spend_usd"])
    assert found["spend_usd"] == pytest.approx(1.205)
    reached = {each["trial"]: len(each["rungs"]) for each in found["trials"]}
    assert sorted(reached.values()) == [1, 1, 1, 1, 1, 1, 2, 2, 3]
    # 5 trials paused at step 90 and 2 at step 270 of 810; trial 1 has failed, and one has finished.
    assert found["saved_steps"] == 5 * 720 + 2 * 540
    trained = 13 * swept.START_S + 5  # the failed segment's steps before its first report count as its start
    assert found["starts_share"] == pytest.approx(trained / 1205, rel=1e-3)
    price = (1.205 - trained / 1000) / (9 * 90 - 10 + 3 * 180 + 540)
    assert found["saved_usd_estimate"] == pytest.approx(price * found["saved_steps"], rel=0.01)
    text = run("cost", sweep.id)
    assert "saved       about 2.3" in text
    assert text.splitlines()[2].split()[-1] == "finished"
    assert len(run("cost", sweep.id, "--csv").splitlines()) == 1 + 9 + 1


def test_cost_table_of_many_trials_is_short(registry: Registry, run: Callable[..., Any]) -> None:
    """The most expensive trials are shown with the sums of all; --csv has all trials."""
    sweep = swept.put(registry, 60)
    assert len(run("cost", sweep.id).splitlines()) == 1 + 1 + 20 + 1 + 3
    assert len(run("cost", sweep.id, "--csv").splitlines()) == 1 + 60 + 1


def test_cost_of_a_packed_sweep_is_divided_by_slot_seconds(registry: Registry, run: Callable[..., Any]) -> None:
    """All segments name one job, whose cost is divided by the seconds in slots; the rest is idle."""
    sweep = swept.put(registry, 9)
    registry.database.execute("DELETE FROM segments WHERE trial != 6")
    registry.database.execute("UPDATE segments SET job_id = ?, attempt = 1, seconds = 50 * (rung + 1)", (sweep.id,))
    registry.database.execute("PRAGMA foreign_keys = OFF")
    registry.database.execute("UPDATE jobs SET id = ? WHERE id = ?", (sweep.id, f"{sweep.id}-6"))
    registry.database.execute("UPDATE attempts SET job_id = ? WHERE job_id = ?", (sweep.id, f"{sweep.id}-6"))
    found = run("cost", sweep.id, "--json")
    assert found["is_shared"]
    assert found["spend_usd"] == pytest.approx(0.465)
    assert [each["usd"] for each in found["rungs"]] == pytest.approx([0.05, 0.1, 0.15], abs=2e-6)
    assert found["idle_usd"] == pytest.approx(0.165, abs=2e-6)
    with pytest.raises(UsageError, match="are one job together"):
        run("compare", sweep.id)


def test_removed_trials_are_left_out(registry: Registry, run: Callable[..., Any], tmp_path: Path) -> None:
    """The report's curves leave out a removed trial; a running sweep is refused, and of an ended sweep no row stays."""
    sweep = swept.put(registry, 9)
    best = run("status", sweep.id, "--json")["best"][0]["trial"]
    run("rm", "-y", f"{sweep.id}.{best}")
    run("report", sweep.id, "-o", str(tmp_path / "report.html"))
    assert f"{sweep.id}-{best}" not in (tmp_path / "report.html").read_text().split('id="trials"')[0]
    sweeps.set_state(registry.database, sweep.id, "running")
    with pytest.raises(UsageError, match="is running"):
        run("rm", "-y", sweep.id)
    sweeps.set_state(registry.database, sweep.id, "ended")
    run("rm", "-y", sweep.id)
    assert (registry.jobs(), sweeps.sweeps(registry.database)) == ([], [])


# -- alerts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit_micro", "state", "words"),
    [
        (3_000_000, "running", None),
        (2_000_000, "running", "60 % of"),
        (1_300_000, "running", "90 % of"),
        (1_205_000, "running", r"100 % of the budget is spent: 1.21 USD of 1.21 USD; no further trial can be sent"),
        (9_000_000, "ended", None),
    ],
)
def test_alert_is_due_at_the_percents_of_the_spent_money(
    limit_micro: int, state: str, words: str | None, registry: Registry
) -> None:
    """The highest reached percent counts, by the spent money; a search that is over has not ended at its budget."""
    sweep = swept.put(registry, 9, limit_micro=limit_micro, state=state)
    sweep.config["budget"]["alert_at"] = ["60%", "90%", "100%"]
    found = alerts.due(registry.database, sweep, 0.0)
    assert (found is None) == (words is None)
    assert found is None or re.search(words or "", found.title)


def test_end_for_want_of_money_counts_as_the_last_percent(registry: Registry) -> None:
    """Of 30 planned trials nine were sent: the rest of the money had no room for the tenth."""
    sweep = swept.put(registry, 9, limit_micro=1_300_000)
    sweep.config["sweep"]["trials"] = 30
    found = alerts.due(registry.database, sweep, 0.0)
    assert found.key == "budget:100@1300000"
    assert "ended at its budget, 1.21 USD of 1.30 USD spent: no further trial fits" in found.title


def test_alert_of_a_sweep_is_sent_once(registry: Registry, run: Callable[..., Any]) -> None:
    """Two drivers print and send the alert together once; a raised budget has new percents."""
    with receivers.hooks() as told:
        sweep = swept.put(registry, 9, limit_micro=1_500_000, state="stopped")
        sweep.config["notify"] = [{"webhook": told.url, "on": ["budget"]}]
        sweeps.change(registry.database, sweep)
        assert [each.key for each in alerts.look(registry, sweep)] == ["budget:80@1500000"]
        assert alerts.look(registry, sweep) == []
        run("status", sweep.id)
        (body,) = told.wait(1)
        assert (body["event"], body["job"], body["limit_usd"]) == ("budget", sweep.id, 1.5)
        assert len(told.got) == 1
        sweeps.change(registry.database, replace(sweep, limit_micro=2_000_000))
        assert [each.key for each in alerts.look(registry, sweep)] == ["budget:50@2000000"]
        assert len(told.wait(2)) == 2


# -- report -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_of_a_sweep_in_a_browser(
    scheme: str, registry: Registry, tmp_path: Path, run: Callable[..., Any], open_page: Callable[..., Page]
) -> None:
    """The page draws all trials and the best so far, without an error or a request; every text is legible."""
    sweep = swept.put(registry, 27)
    path = tmp_path / "sweep.html"
    assert run("report", sweep.id, "-o", str(path)).strip() == str(path)
    page = open_page(path.as_uri(), color_scheme=scheme)
    rows = page.locator("#rungs tbody tr").all_inner_texts()
    assert [row.split()[:5] for row in rows] == [
        ["1", "90", "26", "0", "1"],
        ["2", "270", "9", "0", "0"],
        ["3", "810", "3", "0", "0"],
    ]
    best = run("status", sweep.id, "--json")["best"][0]
    assert page.locator("#trials tbody tr").count() == 27
    assert page.locator("#trials tbody tr").first.inner_text().split()[:3] == [str(best["trial"]), "0.128819", "810"]
    assert page.locator("#parallel polyline").count() == 27
    assert page.locator("#parallel polyline.sw-best").text_content().startswith(f"trial {best['trial']}: loss")
    assert page.locator("#parallel polyline.sw-none").text_content().startswith("trial 1: failed")
    assert page.locator("#best circle").count() == 26 + 9 + 3
    assert page.locator("#charts svg").count() > 0
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


def test_report_data_and_comparison_follow_the_rank(registry: Registry, run: Callable[..., Any]) -> None:
    """Trials without a result are at the end; the best five stand side by side, and one result has no comparison."""
    sweep = swept.put(registry, 9)
    found = run("report", sweep.id, "--json")
    assert [each["trial"] for each in found["ends"][:5]] == [each["trial"] for each in found["best"]]
    assert [each["step"] for each in found["ends"]] == [810, 270, 270, 90, 90, 90, 90, 90, None]
    assert found["ends"][-1]["state"] == "failed"
    assert sum(each["usd"] for each in found["ends"]) == pytest.approx(found["cost"]["spend_usd"])
    best = [f"{sweep.id}-{each['trial']}" for each in run("status", sweep.id, "--json")["best"]]
    assert [each["job"]["job"] for each in run("compare", sweep.id, "--json")["jobs"]] == best
    registry.database.execute("DELETE FROM segments WHERE trial != 6")
    with pytest.raises(UsageError, match="has results of 1 trial"):
        run("compare", sweep.id)


def test_report_before_any_result(registry: Registry, run: Callable[..., Any], tmp_path: Path) -> None:
    """A sweep that has only begun has a report too."""
    sweep = swept.put(registry, 9, state="running")
    registry.database.execute("DELETE FROM segments")
    swept.begin(registry, sweep, 20)
    run("report", sweep.id, "-o", str(tmp_path / "r.html"))
    assert "running" in (tmp_path / "r.html").read_text()
    registry.database.execute("DELETE FROM segments")
    run("report", sweep.id, "-o", str(tmp_path / "r.html"))
