"""`compare` shows jobs side by side: differing keys, results, and the cost of a common loss."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from browser import contrast
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import shown_config
from cloudtrain.launcher.report import comparing
from cloudtrain.launcher.store import series
from cloudtrain.launcher.store.registry import Registry
from doubles import reported
from doubles.plans import make_job

NOW_S = reported.BEGAN_S + 10_000


@pytest.fixture
def pair(registry: Registry) -> Registry:
    """Return a registry with two jobs; the second job has a different learning rate."""
    reported.put(registry, "one")
    reported.put(registry, "two", training={"optimizer": {"lr": 0.2}})
    return registry


def losses(values: list[float], usd_each: float = 1.0) -> dict[str, Any]:
    """Return a job's columns: a step, a second and some dollars for each loss."""
    count = len(values)
    steps = {"step": list(range(count)), "time_s": [100.0 + n for n in range(count)], "loss": values}
    return {
        "steps": steps | {"usd": [usd_each * n for n in range(count)]},
        "attempts": [{"began_s": 100.0, "ended_s": 100.0 + count}],
    }


def test_common_loss_is_the_worst_of_the_best_losses() -> None:
    """A job that never gets below 0.5 makes 0.5 the common loss; 1 low step among 200 does not count as reached."""
    fast, slow = losses([1.0, 0.6, 0.2, 0.1]), losses([1.0, 0.8, 0.7, 0.5], usd_each=3.0)
    assert comparing.common_loss([fast, slow]) == 0.5
    assert comparing.reached(fast, 0.5, NOW_S) == comparing.Reached(2, 2.0, 2.0)
    assert comparing.reached(slow, 0.5, NOW_S) == comparing.Reached(3, 3.0, 9.0)
    assert comparing.reached(slow, 0.4, NOW_S) is None
    noisy = losses([1.0] * 100 + [0.0] + [1.0] * 99)
    assert comparing.reached(noisy, 0.5, NOW_S) is None


def test_machine_without_a_price_is_not_the_cheapest(seed: Callable[..., Job], cli: Any) -> None:
    """The cost of an unpriced machine is unknown, not 0."""
    for name, price in (("priced", 3.0), ("own", 0.0)):
        seed(name, State("succeeded", started_s=1000.0, ended_s=4600.0))
        change = "UPDATE attempts SET plan = json_set(plan, '$.hourly_usd', ?) WHERE job_id = ?"
        Registry().database.execute(change, (price, name))
    told = cli("compare", "priced", "own")
    rows = {line.split("  ")[0]: line.split()[-1] for line in told.stdout.splitlines() if line}
    assert rows["cost, USD"] == "-", told.stdout


@pytest.mark.parametrize("told", [60_900, *(pytest.param(told, marks=pytest.mark.soak) for told in (60_000, 61_700))])
def test_thinning_does_not_change_the_cost_of_a_loss(told: int) -> None:
    """The result is within 1 % for each length, because a row counts with the number of steps behind the row."""
    draw, points = random.Random(5), []
    for begin in range(0, told, 100):
        new = ((n, 1 / (1 + n / 1e4) + draw.gauss(0, 0.01)) for n in range(begin, begin + 100))
        points += [series.Point(1, "step", float(n), n, {"loss": loss}, n) for n, loss in new]
        points = series.thinned(points, 1500) if len(points) > series.MOST else points
    data = losses([point.fields["loss"] for point in points])
    data["steps"] |= {"step": [point.step for point in points], "weight": [point.weight for point in points]}
    found = comparing.reached(data, 0.3, NOW_S)
    assert found.step == pytest.approx(23_333, rel=0.01)


def test_time_to_a_loss_leaves_out_the_pauses() -> None:
    """The time between two attempts does not count; differing keys are dotted names, None for a key that is not set."""
    data = {"attempts": [{"began_s": 0.0, "ended_s": 10.0}, {"began_s": 100.0, "ended_s": None}]}
    assert comparing.ran_s(data, 105.0, 200.0) == 15.0
    one = {"params": {"width": 32, "depth": 2}, "tags": ["a"]}
    other = {"params": {"width": 64, "depth": 2}, "seed": 1, "tags": ["a"]}
    assert shown_config.differing([one, other]) == {"params.width": [32, 64], "seed": [None, 1]}


def test_crossing_gives_the_point_and_the_job_that_leads_from_then() -> None:
    """A steady loss is compared with a loss that falls late; losses equal up to rounding are no crossing."""
    steady, late = losses([10 - n for n in range(10)]), losses([10.0] * 4 + [9, 6, 3, 1, 0.5, 0.25])
    where, who = comparing.crossing(steady, late, "usd") or (0.0, 0)
    assert (4 < where < 7, who) == (True, 1)
    assert comparing.crossing(steady, losses([20.0] * 10), "usd") is None
    one = losses([3.0, 2.0, 1.0, 0.5, 0.5])
    assert comparing.crossing(one, losses([2.0, 2.0, 1.0, 0.5, 0.50001]), "step") is None
    assert comparing.crossing(losses([2.0, 2.5, 1.0, 0.5, 0.50001]), one, "step") is None


def test_repeated_steps_count_with_the_later_losses() -> None:
    """A job starts again after step 24, a further job goes on from step 20: both curves equal the undisturbed curve."""
    draw = random.Random(3)
    loss = {step: 3 * 0.97**step + draw.gauss(0, 0.05) for step in range(1, 101)}
    jobs = []
    for again in (1, 20, 25):
        steps = [*range(1, 25), *range(again, 101)]
        jobs.append(losses([loss[step] for step in steps]))
        jobs[-1]["steps"] |= {"step": steps}
    curves = [[(job["steps"]["step"][i], mean) for i, mean in comparing.smoothed(job)] for job in jobs]
    assert curves[0] == curves[1] == curves[2]
    assert [step for step, _ in curves[0]] == list(range(1, 101))
    assert comparing.crossing(jobs[0], jobs[1], "step") is None


def test_compare_of_a_task_and_a_script_leaves_out_defaults(cli: Any) -> None:
    """Only the keys of the trainer that the task's config sets are listed, since a script uses none of them."""
    for name, kind in (("task", {"task": "t.py", "training": {"precision": "bf16"}}), ("script", {"script": "t.py"})):
        config = JobConfig.model_validate({"name": name, "backend": "local", **kind}).model_dump(mode="json")
        Registry().add(name, lambda *_: make_job(name, config=config), exclusive=True, key=None)  # noqa: B023
    found = cli("compare", "task", "script", "--json").json["config"]
    assert {key for key in found if key.startswith(("training", "checkpoint"))} == {"training.precision"}


def test_compare_prints_results_and_differences(pair: Registry, cli: Any) -> None:
    """The single differing key and each job's figures are shown; the common loss is a mean; jobs keep their order."""
    told = cli.ok("compare", "one", "two")
    lines = [line.split() for line in told.stdout.splitlines()]
    assert (lines[0], [line[0] for line in lines[1:3]]) == (["JOB", "LOSS"], ["one", "two"])  # the curves come first
    assert ["training.optimizer.lr", "0.1", "0.2"] in lines
    assert ["samples/s", "1004", "1004"] in lines
    assert [line[0] for line in lines if line and line[0].startswith("training.")] == [
        "training.optimizer.lr", "training.monitor.metric", "training.monitor.mode",
    ]  # fmt: skip
    found = {line.split("  ")[0] for line in cli("compare", "one", "two", "--loss", "1").stdout.splitlines()}
    assert {"step at smoothed loss 1", "lowest loss"} <= found
    told = cli("compare", "two", "one", "--json", "--loss", "1.0").json
    assert [each["job"]["job"] for each in told["jobs"]] == ["two", "one"]
    assert told["target_loss"] == 1.0
    assert told["config"]["training.optimizer.lr"] == [0.2, 0.1]
    assert told["jobs"][0]["reached"]["step"] == told["jobs"][1]["reached"]["step"] > 200
    assert told["jobs"][0]["results"]["best.accuracy"] == pytest.approx(600 / 700, rel=1e-5)


@pytest.mark.parametrize("names", [["one"], ["one", "one"], ["one"] * 9, ["one", "two", "--open"]])
def test_compare_refuses_invalid_arguments(pair: Registry, cli: Any, names: list[str]) -> None:
    """The cases: a single job, a job twice, nine jobs, and `--open` without a page to write."""
    told = cli("compare", *names)
    assert (told.code, "hint:" in told.stderr) == (2, True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_compared_curves_share_a_chart(
    pair: Registry, cli: Any, tmp_path: Path, open_page: Callable[..., Page], scheme: str
) -> None:
    """Each job has a line with its own colour and dashes; every chart has both values."""
    assert cli("compare", "one", "two", "-o", "both.html").stdout == "both.html\n"
    opened = open_page((tmp_path / "both.html").as_uri(), color_scheme=scheme)
    lines = opened.locator("[data-chart=lr] path.ct-line:not(.ct-stale)")
    styles = lines.evaluate_all("all => [...new Set(all.map(each => each.getAttribute('style')))]")
    assert len(styles) == 2
    assert sum("dasharray" in style for style in styles) == 1
    assert opened.locator("[data-chart=loss] .ct-value").count() == 2
    assert contrast(opened)[0][0] >= 4.5
