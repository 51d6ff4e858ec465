"""`cloudtrain evaluate`: the job that tests another job's weights, the count of looks, and the report's section."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from wholejobs import TESTED

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import ConfigError, UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import evaluations
from cloudtrain.launcher.planning import planner
from cloudtrain.launcher.report.page import report_html
from cloudtrain.launcher.store.progress import fold, shown
from cloudtrain.launcher.store.registry import Registry

CONFIG = """\
name: points
task: task.py
env: {OMP_NUM_THREADS: "1"}
training: {global_batch_size: 8, max_steps: 6, eval_every: 3, ema_decay: 0.9}
checkpoint: {every_steps: 3, keep_best: true}
evaluate: {split: test, batch_size: 8}
local: {price_per_hour: 1}
"""
FIGURES: dict[str, Any] = {
    "split": "test",
    "kind": "classification",
    "n": 10,
    "step": 6,
    "accuracy": 0.7,
    "accuracy_low": 0.3968,
    "accuracy_high": 0.8922,
    "loss": 0.5,
    "compared": [
        {"checkpoint": "best", "step": 4, "weights": "average", "accuracy": 0.7, "loss": 0.5},
        {"checkpoint": "last", "step": 6, "weights": "average", "accuracy": 0.6, "loss": 0.6},
    ],
    "confusion": [[4, 1], [2, 3]],
    "classes": [[0.67, 0.8, 0.73, 5], [0.75, 0.6, 0.67, 5]],
    "calibration": [[0, 0.0, 0.0]] * 5 + [[4, 0.5, 0.55], [6, 0.8333, 0.65]] + [[0, 0.0, 0.0]] * 3,
    "pairs": [[2, 1, 0], [1, 0, 1]],
    "worst": [{"loss": 2.1, "index": 7, "target": 1, "predicted": 0, "probability": 0.88}],
}


def line(figures: Any) -> str:
    """Return the trainer's line about a test."""
    return f"test  ::ct {json.dumps({'e': 'test', 'test': figures})}"


@pytest.mark.slow
def test_evaluation_is_a_job_below_its_parent(cli: Any, tmp_path: Path) -> None:
    """The command prints the figures of the parent's test, is in the ledger with a limit, and counts the looks."""
    (tmp_path / "task.py").write_text(TESTED % "")
    (tmp_path / "cloudtrain.yaml").write_text(CONFIG)
    sent = cli.ok("submit", "-y", "--name", "points", cwd=tmp_path)
    assert "test on test (53 samples" in sent.stdout
    first = cli("status", "points").stdout
    assert "test        test: accuracy" in first
    assert "times" not in first
    done = cli.ok("evaluate", "points", "-y", cwd=tmp_path)
    assert "points was evaluated on test 1 x before" in done.stderr
    assert "evaluated on test 2 times" in done.stderr
    assert "CLASS  PRECISION" in done.stdout
    names = [text.split()[0] for text in cli("list").stdout.splitlines()]
    assert (names[1], names[2][:16]) == ("points", "points-evaluate-")
    assert "  points-evaluate" in cli("list").stdout
    child = cli("status", names[2], "--json").json
    assert (child["state"], child["parent"]["job"], child["instances"]) == ("succeeded", "points", 1)
    assert 0 < child["spend_usd"] < 1
    figures = [
        json.loads((tmp_path / name / "metrics-test.json").read_text())
        for name in ("points", "child")
        if cli("artifacts", "points" if name == "points" else names[2], "-o", name, cwd=tmp_path).code == 0
    ]
    same = ("confusion", "accuracy", "loss", "calibration", "worst", "step", "weights")
    assert {name: figures[0][name] for name in same} == {name: figures[1][name] for name in same}
    missing = cli("evaluate", "points", "-y", "--split", "gold", cwd=tmp_path)
    assert (missing.code, "no split 'gold'" in missing.stderr) == (1, True)


def test_config_of_an_evaluation_is_small_and_limited(seed: Callable[..., Job], registry: Registry) -> None:
    """One machine, at most an hour, no outputs of the parent's, no spot; a sharded model keeps its machines."""
    whole = {
        "name": "digits",
        "task": "task.py",
        "resources": {"instances": 4, "spot": True, "min_instances": 2},
        "limits": {"max_duration": "8h"},
        "inputs": {"data": "/d${X}", "init_from": "/older"},
        "outputs": {"model": "/m"},
        "checkpoint": {"uri": "/c", "every_steps": 5},
    }
    job = seed("digits", State("succeeded"))
    config = evaluations.config_of(_with(job, whole), "test", "step-40", [])
    assert (config.resources.instances, config.resources.spot, config.limits.max_duration) == (1, False, 3600)
    assert (config.inputs, config.outputs, config.checkpoint.uri) == ({"data": "/d${X}"}, {}, None)
    assert (config.name, config.init_from.job, config.init_from.checkpoint) == ("digits-evaluate", "digits", "step-40")
    assert config.evaluate.only
    three = evaluations.config_of(_with(job, whole), "test", None, ["resources.instances=3", "local.price_per_hour=1"])
    batch = planner.make(three, backends.load("local").capacity(three)).batch
    assert (batch.global_size, batch.micro_size) == (30, 10)  # 32 samples a step would not divide among 3 ranks
    sharded = {**whole, "training": {"strategy": "fsdp"}}
    assert evaluations.config_of(_with(job, sharded), "test", None, []).resources.instances == 4
    elsewhere = {**whole, "checkpoint": {"resume": "/older/step-00000005", "every_steps": 5}}
    assert evaluations.config_of(_with(job, elsewhere), "test", None, []).checkpoint.resume == "auto"
    with pytest.raises(UsageError, match="runs a script"):
        evaluations.config_of(_with(job, {"name": "x", "script": "a.py"}), "test", None, [])
    with pytest.raises(ConfigError, match="best, last, or a step"):
        evaluations.config_of(_with(job, whole), "test", "newest", [])


@pytest.mark.parametrize(
    ("training", "micro_batches"),
    [
        ({"strategy": "async", "server": {"shards": 4}}, 1),
        ({"strategy": "async", "server": {"softsync": 3}}, 1),
        ({"parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 2}, "micro_batch_size": 4}, 2),
    ],
    ids=["shards", "softsync", "interleaved"],
)
def test_parent_settings_that_need_its_ranks_do_not_refuse_a_test(
    seed: Callable[..., Job], training: dict[str, Any], micro_batches: int
) -> None:
    """A test has fewer ranks, no servers and no step; each stage of a pipeline gets a micro-batch."""
    job = seed("digits", State("succeeded"))
    whole = {"name": "digits", "task": "task.py", "resources": {"instances": 4}, "training": training}
    config = evaluations.config_of(_with(job, whole), "test", None, [])
    batch = planner.make(config, backends.load("local").capacity(config)).batch
    assert batch is not None
    assert batch.accumulation == micro_batches


def test_test_of_a_test_and_other_names_are_refused(seed: Callable[..., Job]) -> None:
    """A test has no weights of its own; tests are counted by name and parent, and a split names a file."""
    job = _with(seed("digits", State("succeeded")), {"name": "digits", "task": "task.py"})
    child = evaluations.config_of(job, "test", None, [])
    with pytest.raises(UsageError, match="is a test of digits"):
        evaluations.config_of(_with(job, child.model_dump(mode="json")), "test", None, [])
    for setting in ("name=foo", "evaluate.only=false", "init_from=other"):
        with pytest.raises(UsageError, match="by these the test is counted"):
            evaluations.config_of(job, "test", None, [setting])
    for split in ("any/thing", "a\nb", "x" * 41, "..", ""):
        with pytest.raises(ConfigError) as refusal:
            evaluations.config_of(job, split, None, [])
        assert "a split's name: letters, digits" in refusal.value.faults[0].message + refusal.value.faults[0].hint


def _with(job: Job, config: dict[str, Any]) -> Job:
    return replace(job, config=config)


def test_failed_test_is_told_until_the_next(cli: Any, seed: Callable[..., Job], registry: Registry) -> None:
    """The status of a finished training names the fault of its test; a later test's figures replace the fault."""
    job = seed("points", State("succeeded"))
    failed = f"test  ::ct {json.dumps({'e': 'test', 'failed': 'the score of sample 8 is not finite'})}"
    progress = fold({}, [failed])
    registry.set_state(job.attempt, State("succeeded"), progress)
    assert "test        failed: the score of sample 8 is not finite" in cli("status", "points").stdout
    assert "test_error" not in fold(progress, [line(FIGURES)])


def test_tests_are_counted_and_told_in_words() -> None:
    """Each event of a test counts, and the last one's figures stay; a regression has mean errors and quantiles."""
    progress = fold({}, [line(FIGURES), line({**FIGURES, "accuracy": 0.8})])
    assert (progress["tests"], progress["test"]["accuracy"]) == (2, 0.8)
    assert shown(progress) == "test accuracy 0.8 loss 0.5"
    again = evaluations.Tested("b", FIGURES, 1)
    words = list(evaluations.headline([evaluations.Tested("a", progress["test"], 2), again]))
    assert words == ["test: accuracy 0.7 (0.3968 to 0.8922, 95 %), 10 samples, step 6 (b); evaluated on test 3 times"]
    figures = {"split": "test", "kind": "regression", "n": 9, "mae": 0.5, "rmse": 0.7, "r2": 0.25, "step": 4}
    figures |= {"quantiles": [{"share": 0.05, "residual": -1.5}, {"share": 0.95, "residual": 1.25}]}
    told = evaluations.lines(evaluations.Tested("a", figures, 1))
    assert told == ["mae 0.5, rmse 0.7, r2 0.25, 9 samples", "", "residuals: 5 % -1.5, 95 % 1.25"]


def test_report_shows_the_test(
    seed: Callable[..., Job], tmp_path: Path, open_page: Callable[..., Page], registry: Registry
) -> None:
    """The page has the matrix, the calibration and the tables, in light and dark, without an error."""
    seed("points", State("succeeded"))
    job = registry.find("points")
    odd = {**FIGURES, "confusion": [[1, "x"]], "calibration": "no", "worst": [3], "split": "odd", "same_as_eval": True}
    registry.set_state(job.attempt, State("succeeded"), fold({}, [line(FIGURES)]))
    path = tmp_path / "r.html"
    path.write_text(report_html(registry, registry.find("points"), job.created_s + 60))
    page = open_page(path.as_uri())
    section = page.locator("section.test")
    assert section.locator("p").first.inner_text().startswith("test: accuracy 0.7 (0.3968 to 0.8922, 95 %)")
    assert section.locator(".mx-text").all_text_contents() == ["4", "1", "2", "3"]
    assert section.locator("title").first.text_content() == "target 0, predicted 0: 4 of 5"
    assert section.locator(".mx-bar").count() == section.locator(".mx-dot").count() == 2
    assert section.locator("table").first.locator("tbody tr").count() == 2
    boxes = [section.locator("svg.matrix").nth(place).bounding_box() for place in range(2)]
    assert all(box is not None and box["width"] > 80 and box["height"] > 80 for box in boxes)
    page.locator("#theme").click()
    registry.set_state(job.attempt, State("succeeded"), fold({}, [line(odd)]))
    path.write_text(report_html(registry, registry.find("points"), job.created_s + 60))
    page = open_page(path.as_uri())
    assert page.locator("section.test .warn").inner_text().startswith("This split is the eval split")
    assert page.locator("section.test svg").count() == 0
