"""The progress of a job, folded from its event lines."""

import json
from typing import Any

import pytest

from cloudtrain.entrypoints.events import format_line
from cloudtrain.launcher.store import loss_bins
from cloudtrain.launcher.store.progress import fold, shown, unkept


def event(name: str, **fields: Any) -> str:
    """Return an event line."""
    return format_line(name, f"{name} for people", fields)


def test_progress_has_the_values_of_the_last_step() -> None:
    """New values of step, loss and speed replace older values."""
    lines = [event("start", step=0, max_steps=20), event("step", step=1, loss=2.0), event("step", step=2, loss=1.5)]
    assert fold({}, lines) == {"step": 2, "max_steps": 20, "loss": 1.5}


def test_progress_continues_from_earlier_progress() -> None:
    """The fold of two pages equals the fold of both, and the first result is unchanged."""
    before = fold({}, [event("step", step=1, loss=2.0, max_steps=9)])
    after = fold(before, [event("step", step=2, loss=1.0)])
    assert (before["step"], after) == (1, {"step": 2, "loss": 1.0, "max_steps": 9})


def test_progress_goes_back_after_a_restart() -> None:
    """A job that restarts from a checkpoint has the step of the checkpoint."""
    assert fold({"step": 90}, [event("start", step=60, max_steps=100)])["step"] == 60


def test_progress_keeps_full_precision() -> None:
    """Two runs can be compared bit for bit."""
    assert fold({}, [event("step", step=1, loss=0.1 + 0.2)])["loss"] == 0.1 + 0.2


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_progress_stores_a_non_finite_loss_as_text(loss: float) -> None:
    """Progress is stored as JSON, and JSON has no NaN."""
    now = fold({}, [event("step", step=1, loss=loss)])
    assert json.dumps(now, allow_nan=False)
    assert now["loss"] == str(loss)


def test_progress_has_metrics_and_the_newest_checkpoint() -> None:
    """The values come from `eval` and `checkpoint` events."""
    lines = [event("eval", step=5, metrics={"accuracy": 0.97}), event("checkpoint", step=5, path="/c/step-5")]
    assert fold({}, lines) == {"metrics": {"accuracy": 0.97}, "checkpoint_step": 5, "checkpoint": "step-5"}


def test_progress_has_the_time_of_a_save_without_a_step() -> None:
    """The agent reports a script's saves; a known step stays if the agent reports the same save."""
    own = (event("checkpoint", step=5, path="/job/code/out/checkpoint-5"), 50.0)
    same = (event("checkpoint", path="out/checkpoint-5"), 51.0)
    found = fold({}, [own, same])
    assert (found["checkpoint_step"], found["saved_s"]) == (5, 51.0)
    found = fold(found, [(event("checkpoint", path="out/ckpt.pt"), 60.0)])
    assert (found["checkpoint_step"], found["saved_s"]) == (None, 60.0)
    found = fold(found, [event("step", step=9), event("checkpoint", path="out/new.pt"), event("step", step=10)])
    assert (found["step"], found["saved_after"]) == (10, 9)


def test_progress_has_the_step_before_the_last_save_of_an_overwritten_file() -> None:
    """A script saves to the same name each time; a restart from the file is no save."""
    saves = [each for step in (10, 140) for each in (event("step", step=step), event("checkpoint", path="ckpt.pt"))]
    found = fold({}, [*saves, event("step", step=150)])
    assert (found["step"], found["saved_after"], found["checkpoint_step"]) == (150, 140, None)
    assert fold(found, [event("restart", path="/c/ckpt.pt")])["saved_after"] == 140


def test_progress_has_the_files_that_nothing_keeps() -> None:
    """The last report counts; a damaged report is left out."""
    found = fold({}, [event("unkept", names=["a.pt"]), event("unkept", names=["a.pt", "runs/"])])
    assert unkept(fold(found, [event("unkept", names="a.pt")])) == (
        "not kept: a.pt, runs/; to keep: `keep: [a.pt, runs/]` in the config"
    )
    assert unkept({}) == unkept(fold({}, [event("unkept", names=[])])) == ""


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("out/checkpoint-250", 250),
        ("ckpt/step_50.pt", 50),
        ("global_step7", 7),
        ("epoch=3-step=500.ckpt", 500),
        ("checkpoint_3.pth", None),  # possibly an epoch
        ("epoch_3.pt", None),
        ("timestep2/ckpt.pt", None),
    ],
)
def test_progress_has_the_step_in_a_checkpoint_name(path: str, step: int | None) -> None:
    """A script's kept file is reported without a step, but libraries write the step into the name."""
    assert fold({}, [event("checkpoint", path=path)])["checkpoint_step"] == step


@pytest.mark.parametrize(("changed_s", "saved_s"), [(40.5, 40.5), (70.0, 50.0), ("nan", 50.0), (None, 50.0)])
def test_progress_has_the_time_of_a_kept_file(changed_s: Any, saved_s: float) -> None:
    """The agent may report the file later, at the stop: the file's own time counts, unless invalid or in the future."""
    line = (event("checkpoint", path="out/ckpt.pt", changed_s=changed_s), 50.0)
    assert fold({}, [line])["saved_s"] == saved_s


def test_progress_ignores_lines_without_events() -> None:
    """A script's own lines, broken event parts and unknown events change nothing."""
    lines = ["step 5 loss 3", "x  ::ct {broken", "x  ::ct [1]", 'x  ::ct {"step": 1}', event("boot", node=0)]
    assert fold({"step": 1}, lines) == {"step": 1}


ESCAPE = "\x1b]0;title\x07\x9b2J"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"step": True, "max_steps": [3], "loss": True, "mfu": {}}, {}),
        ({"step": f"1{ESCAPE}", "max_steps": f"9{ESCAPE}", "loss": ESCAPE}, {}),
        ({"step": 2.0, "loss": "nan"}, {"step": 2, "loss": "nan"}),
        ({"step": 10**400, "loss": -(10**400), "memory_bytes": 1}, {"memory_bytes": 1}),
        ({"step": 1, "eta_s": 1e17}, {"step": 1}),
        ({"step": 1, "eta_s": -5}, {"step": 1}),
        ({"step": 1, "eta_s": "soon"}, {"step": 1}),
        ({"step": -1, "samples": None}, {}),
    ],
)
def test_progress_drops_values_of_the_wrong_type(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A script may print any event line; an invalid value counts as not reported."""
    assert fold({}, [event("step", **fields)]) == wanted


def test_progress_drops_a_value_that_becomes_invalid() -> None:
    """The time left of an earlier step does not apply to a later step."""
    lines = [event("step", step=1, eta_s=100), event("step", step=2, eta_s=float("nan"))]
    assert fold({}, lines) == {"step": 2}


def test_progress_metrics_have_no_control_characters() -> None:
    """Names and texts are a single line, numbers stay numbers, and only the first 50 metrics are stored."""
    told = {f"a{ESCAPE}": 1, "b": f"c{ESCAPE}\nd", "huge": 10**400, "deep": {"x": [1]}, "flag": True, "sick": "-inf"}
    found = fold({}, [event("eval", metrics=told)])["metrics"]
    assert found == {"a": 1, "b": "c", "sick": "-inf"}
    assert len(fold({}, [event("eval", metrics={f"m{n}": n for n in range(99)})])["metrics"]) == 50


def test_curve_of_huge_losses_can_be_read_again() -> None:
    """The curve's text can be parsed for any steps."""
    lines = [(event("step", step=n, loss=loss), 50.0 + n) for n, loss in enumerate((1.0, 1e308, -1e308, 2.0))]
    found = fold({}, [*lines, (event("step", step=True, loss=3.0), 60.0)])
    assert [(each.step, each.loss) for each in loss_bins.load(found["curve"]).bins] == [(0, 1.0), (3, 2.0)]


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        ({}, ""),
        ({"step": 3}, "step 3"),
        ({"step": 3, "max_steps": 9, "loss": 0.123456}, "step 3/9 loss 0.1235"),
        ({"step": 3, "max_steps": 9, "loss": "nan"}, "step 3/9 loss nan"),
    ],
)
def test_progress_in_words(progress: dict[str, Any], text: str) -> None:
    """The text fits a table; a non-finite loss is shown, because the user must see it."""
    assert shown(progress) == text
