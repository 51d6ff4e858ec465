"""An evaluation that fails costs no step, and a resume gives the numbers of an unbroken run."""

import json
from pathlib import Path
from typing import Any

import pytest
from trainerruns import TASK, Run, joined, parameters, run, whole_run

pytestmark = pytest.mark.slow

FAILING = TASK.replace(
    "def evaluate(model, batch):\n",
    """evaluations = 0
def evaluate(model, batch):
    global evaluations
    evaluations += model.training is False and len(batch[1]) == 1  # an odd sample ends each evaluation
    how, at = os.environ.get("FAIL", "no:0").split(":")
    if evaluations == int(at):
        if how == "raise":
            raise KeyError("oops")
        if how == "abort":
            os.abort()
""",
)
SAVES = {"every_steps": 5, "keep": 2, "keep_best": True, "blocking": False}
SETTINGS: dict[str, Any] = {
    "ranks": 1,
    "text": FAILING,
    "eval_every": 5,
    "max_steps": 15,
    "checkpoint": SAVES,
    "monitor": {"metric": "loss", "patience": 2},
    "optimizer": {"name": "sgd", "lr": 0.3},
}


def memory(done: Run) -> dict[str, Any]:
    """Return what the last checkpoint and the outcome know about the evaluations, and the kept steps."""
    folder = done.folder / "checkpoints"
    newest = max(folder.glob("step-????????"))
    told = json.loads((newest / "trainer.json").read_text())
    names = ("metrics", "best", "best_of", "best_step", "stale", "evaluated_step")
    kept = sorted(path.name for path in folder.glob("step-????????"))
    return {
        **{name: told[name] for name in names},
        "kept": kept,
        "best.json": json.loads((folder / "best.json").read_text()),
        "outcome": {name: done.outcome()[name] for name in ("step", "metrics", "reason")},
    }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose evaluations do not fail."""
    return whole_run(tmp_path_factory.mktemp("whole"), **SETTINGS)


@pytest.mark.parametrize("fails", ["raise:1", "abort:1", "abort:2", "abort:3"])
def test_failed_evaluation_costs_no_step(fails: str, unbroken: Run, tmp_path: Path) -> None:
    """The save of the step is durable; the resume evaluates the step once, with the numbers of an unbroken run."""
    broken = run(tmp_path, env={"FAIL": fails}, **SETTINGS)
    at = 5 * int(fails[-1])
    assert broken.code != 0
    assert at not in broken.values("eval", "loss")
    again = run(tmp_path, **SETTINGS)
    assert (again.code, again.only("restart")["step"]) == (0, at), again.errors
    assert joined(broken, again) == unbroken.values("step", "loss")
    assert joined(broken, again, event="eval") == unbroken.values("eval", "loss")
    assert min(again.values("eval", "loss")) == at
    assert parameters(again) == parameters(unbroken)
    assert memory(again) == memory(unbroken)


def test_save_before_the_evaluation_adds_no_save(unbroken: Run) -> None:
    """One checkpoint a due step, also with a new best at the step."""
    saved = [found["step"] for found in unbroken.events if found["e"] == "checkpoint" and "bytes" in found]
    assert saved == sorted({5, 10, unbroken.only("done")["step"]})


def test_pause_is_safe_before_its_evaluation_and_evaluated_once(tmp_path: Path) -> None:
    """An abort in the evaluation of a pause costs no step; a second start at the pause has the numbers of the first."""
    settings = {**SETTINGS, "pause_at": 7, "checkpoint": {**SAVES, "every_steps": None}}
    assert run(tmp_path, env={"FAIL": "abort:2"}, **settings).code != 0
    for evaluated in ([7], []):
        paused = run(tmp_path, **settings)
        assert (paused.code, paused.only("restart")["step"], paused.only("paused")["step"]) == (75, 7, 7)
        assert list(paused.values("eval", "loss")) == evaluated
        assert paused.outcome()["metrics"]
