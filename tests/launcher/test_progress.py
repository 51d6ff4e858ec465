"""How far a job is, folded from its event lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cloudtrain.entrypoints.events import format_line
from cloudtrain.launcher.store import curve
from cloudtrain.launcher.store.progress import fold, shown


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
    assert fold({}, lines) == {"metrics": {"accuracy": 0.97}, "checkpoint_step": 5, "checkpoint": "step-5"}


def test_progress_holds_the_time_of_a_save_without_a_step() -> None:
    """As the agent reports a script's saves; a known step stays if the agent reports the same save."""
    own = (event("checkpoint", step=5, path="/job/code/out/checkpoint-5"), 50.0)
    same = (event("checkpoint", path="out/checkpoint-5"), 51.0)
    found = fold({}, [own, same])
    assert (found["checkpoint_step"], found["saved_s"]) == (5, 51.0)
    found = fold(found, [(event("checkpoint", path="out/ckpt.pt"), 60.0)])
    assert (found["checkpoint_step"], found["saved_s"]) == (None, 60.0)


@pytest.mark.parametrize(("changed_s", "saved_s"), [(40.5, 40.5), (70.0, 50.0), ("nan", 50.0), (None, 50.0)])
def test_progress_has_the_time_of_a_kept_file(changed_s: Any, saved_s: float) -> None:
    """The agent may report the file later, at the stop: the file's own time counts, unless invalid or in the future."""
    line = (event("checkpoint", path="out/ckpt.pt", changed_s=changed_s), 50.0)
    assert fold({}, [line])["saved_s"] == saved_s


def test_progress_ignores_what_is_no_event() -> None:
    """A script's own lines, broken tails and unknown events change nothing."""
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
def test_progress_keeps_nothing_that_is_not_what_its_name_says(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A script may print any event line; what makes no sense is as if it had not been told."""
    assert fold({}, [event("step", **fields)]) == wanted


def test_progress_forgets_what_has_become_senseless() -> None:
    """The time left of an earlier step is not that of this one."""
    lines = [event("step", step=1, eta_s=100), event("step", step=2, eta_s=float("nan"))]
    assert fold({}, lines) == {"step": 2}


def test_progress_keeps_metrics_that_no_terminal_obeys() -> None:
    """Names and words are text on one line, numbers are numbers, and of too many the first are kept."""
    told = {f"a{ESCAPE}": 1, "b": f"c{ESCAPE}\nd", "huge": 10**400, "deep": {"x": [1]}, "flag": True, "sick": "-inf"}
    found = fold({}, [event("eval", metrics=told)])["metrics"]
    assert found == {"a": 1, "b": "c", "sick": "-inf"}
    assert len(fold({}, [event("eval", metrics={f"m{n}": n for n in range(99)})])["metrics"]) == 50


def test_progress_of_a_loss_beyond_all_sums_can_be_drawn() -> None:
    """The curve's text can be read again, whatever the steps were."""
    lines = [(event("step", step=n, loss=loss), 50.0 + n) for n, loss in enumerate((1.0, 1e308, -1e308, 2.0))]
    found = fold({}, [*lines, (event("step", step=True, loss=3.0), 60.0)])
    assert [(each.step, each.loss) for each in curve.load(found["curve"]).bins] == [(0, 1.0), (3, 2.0)]


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
