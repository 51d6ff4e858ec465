"""How far a job is, folded from its event lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cloudtrain.entrypoints.events import format_line
from cloudtrain.launcher.progress import fold, shown


def event(name: str, **fields: Any) -> str:
    """Return an event line."""
    return format_line(name, f"{name} for people", fields)


def test_progress_is_what_the_last_step_said() -> None:
    """Step, loss, pace; older values are replaced."""
    lines = [event("start", step=0, max_steps=20), event("step", step=1, loss=2.0), event("step", step=2, loss=1.5)]
    assert fold({}, lines) == {"step": 2, "max_steps": 20, "loss": 1.5}


def test_progress_goes_on_from_what_it_was() -> None:
    """The fold of two pages is the fold of both, and the first is not changed."""
    before = fold({}, [event("step", step=1, loss=2.0, max_steps=9)])
    after = fold(before, [event("step", step=2, loss=1.0)])
    assert (before["step"], after) == (1, {"step": 2, "loss": 1.0, "max_steps": 9})


def test_progress_goes_back_after_a_restart() -> None:
    """A job that starts again from a checkpoint is where it says it is."""
    assert fold({"step": 90}, [event("start", step=60, max_steps=100)])["step"] == 60


def test_progress_keeps_full_precision() -> None:
    """Two runs can be compared bit for bit from it."""
    assert fold({}, [event("step", step=1, loss=0.1 + 0.2)])["loss"] == 0.1 + 0.2


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_progress_writes_a_loss_that_is_no_number_as_text(loss: float) -> None:
    """It goes into JSON, which has no NaN."""
    now = fold({}, [event("step", step=1, loss=loss)])
    assert json.dumps(now, allow_nan=False)
    assert now["loss"] == str(loss)


def test_progress_holds_metrics_and_the_newest_checkpoint() -> None:
    """From eval, done and checkpoint events."""
    lines = [event("eval", step=5, metrics={"accuracy": 0.97}), event("checkpoint", step=5, path="/c/step-5")]
    assert fold({}, lines) == {"metrics": {"accuracy": 0.97}, "checkpoint_step": 5}


def test_progress_ignores_what_is_no_event() -> None:
    """A script's own lines, broken tails and unknown events change nothing."""
    lines = ["step 5 loss 3", "x  ::ct {broken", "x  ::ct [1]", 'x  ::ct {"step": 1}', event("boot", node=0)]
    assert fold({"step": 1}, lines) == {"step": 1}


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
    """A few words for a table; a loss that is no number is shown, for it is the news."""
    assert shown(progress) == text
