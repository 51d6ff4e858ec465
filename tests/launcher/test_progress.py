"""The progress of a job, folded from its event lines, with the figures of its GPUs."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.entrypoints.agent import gpumeter
from cloudtrain.entrypoints.events import format_line
from cloudtrain.launcher.job import Attempt, State
from cloudtrain.launcher.jobs.overview import as_lines
from cloudtrain.launcher.jobs.view import view_of
from cloudtrain.launcher.store import gpu_figures, loss_bins, progress
from cloudtrain.launcher.store.progress import fold, shown, unkept
from doubles.plans import make_job


def event(name: str, **fields: Any) -> str:
    """Return an event line."""
    return format_line(name, f"{name} for people", fields)


@pytest.mark.parametrize(
    ("before", "lines", "progress"),
    [
        (
            {},
            [event("start", step=0, max_steps=20), event("step", step=1, loss=2.0), event("step", step=2, loss=1.5)],
            {"step": 2, "max_steps": 20, "loss": 1.5},
        ),
        ({"step": 90}, [event("start", step=60)], {"step": 60}),  # a restart from a checkpoint
        ({}, [event("step", step=1, loss=0.1 + 0.2)], {"step": 1, "loss": 0.1 + 0.2}),  # runs are compared bit for bit
        (
            {},
            [event("eval", step=5, metrics={"accuracy": 0.97}), event("checkpoint", step=5, path="/c/step-5")],
            {"metrics": {"accuracy": 0.97}, "checkpoint_step": 5, "checkpoint": "step-5"},
        ),
        (
            {"step": 1},
            ["step 5 loss 3", "x  ::ct {broken", "x  ::ct [1]", 'x  ::ct {"step": 1}', event("boot", node=0)],
            {"step": 1},
        ),
        ({}, [event("step", step=1, eta_s=100), event("step", step=2, eta_s=float("nan"))], {"step": 2}),
    ],
)
def test_progress_has_the_values_of_the_last_events(
    before: dict[str, Any], lines: list[str], progress: dict[str, Any]
) -> None:
    """New values replace older values, an invalid one too; own lines, broken parts, unknown events change nothing."""
    assert fold(before, lines) == progress


def test_progress_continues_from_earlier_progress() -> None:
    """The fold of two pages equals the fold of both, and the first result is unchanged."""
    before = fold({}, [event("step", step=1, loss=2.0, max_steps=9)])
    after = fold(before, [event("step", step=2, loss=1.0)])
    assert (before["step"], after) == (1, {"step": 2, "loss": 1.0, "max_steps": 9})


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_progress_stores_a_non_finite_loss_as_text(loss: float) -> None:
    """Progress is stored as JSON, and JSON has no NaN."""
    now = fold({}, [event("step", step=1, loss=loss)])
    assert json.dumps(now, allow_nan=False)
    assert now["loss"] == str(loss)


def test_progress_has_the_step_of_the_last_save() -> None:
    """The agent reports saves, and a script saves to the same name; a known step stays; a restart is no save."""
    own = (event("checkpoint", step=5, path="/job/code/out/checkpoint-5"), 50.0)
    same = (event("checkpoint", path="out/checkpoint-5"), 51.0)
    found = fold({}, [own, same])
    assert (found["checkpoint_step"], found["saved_s"]) == (5, 51.0)
    found = fold(found, [(event("checkpoint", path="out/ckpt.pt"), 60.0)])
    assert (found["checkpoint_step"], found["saved_s"]) == (None, 60.0)
    found = fold(found, [event("step", step=9), event("checkpoint", path="out/new.pt"), event("step", step=10)])
    assert (found["step"], found["saved_after"]) == (10, 9)
    saves = [each for step in (10, 140) for each in (event("step", step=step), event("checkpoint", path="ckpt.pt"))]
    found = fold({}, [*saves, event("step", step=150)])
    assert (found["step"], found["saved_after"], found["checkpoint_step"]) == (150, 140, None)
    assert fold(found, [event("restart", path="/c/ckpt.pt")])["saved_after"] == 140


@pytest.mark.parametrize(
    ("epoch", "step", "saved"), [(2, 93, None), (1.0, 93, None), (0.5, 60, 2), (2, 8, 2), (None, 93, 2)]
)
def test_number_of_an_epoch_is_no_step(epoch: float | None, step: int, saved: int | None) -> None:
    """A script names checkpoint-2 by its epoch: no 91 steps are unsaved, and the bar's 31 steps are not the job's."""
    lines = [event("step", step=31, max_steps=31), event("step", step=step, epoch=epoch)]
    found = fold({}, [*lines, event("checkpoint", path="out/checkpoint-2.pt")])
    assert (found["checkpoint_step"], found.get("max_steps")) == (saved, None if step > 31 else 31)


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


def folded(*uses: dict[int, float | None]) -> dict[str, Any]:
    """Return the progress after an event per minute, with each rank's use in percent."""
    now: dict[str, Any] = {}
    for minute, each in enumerate(uses):
        told = [(rank, (use, 1024.0, 81920.0, 100.0)) for rank, use in each.items()]
        now = progress.fold(now, [(line, 60.0 * minute) for line in gpumeter.lines(told)])
    return json.loads(json.dumps(now))  # as the registry stores the progress


def test_figures_are_stored_by_rank() -> None:
    """Each rank has its newest figures, and the attempt has a mean; a rank without recent figures is dropped."""
    found = folded({0: 50, 1: 90}, {0: 100, 1: 90})
    assert gpu_figures.as_list(found) == [
        {"rank": rank, "use": use, "memory_mib": 1024, "total_mib": 81920, "watts": 100, "idle_s": 0.0}
        for rank, use in ((0, 100), (1, 90))
    ]
    assert gpu_figures.words(found) == "95 % busy (lowest 90 %, rank 1), 2.0 of 160 GiB, 200 W"
    assert gpu_figures.mean(found) == 82.5
    assert set(folded({0: 50, 1: 90}, *[{0: 50}] * 12)["gpus"]) == {"0"}
    assert (gpu_figures.words({}), gpu_figures.mean({}), gpu_figures.warning({})) == ("", None, "")


def test_gpu_that_idles_for_minutes_is_named() -> None:
    """The warning needs a use below 10 % for five minutes without a break; an unknown use does not count."""
    assert gpu_figures.warning(folded(*[{0: 5, 1: 80}] * 5)) == ""
    assert gpu_figures.warning(folded(*[{0: 5, 1: 80}] * 6)).startswith("the GPU of rank 0 is below 10 % for 5m")
    assert gpu_figures.warning(folded(*[{0: 5, 1: 9.9}] * 6)).startswith("the GPUs of ranks 0, 1 are below 10 %")
    assert gpu_figures.warning(folded(*[{0: 5}] * 5, {0: 60}, *[{0: 5}] * 3)) == ""
    assert gpu_figures.warning(folded(*[{0: None}] * 9)) == ""


@pytest.mark.parametrize(
    "told",
    [None, "x", 5, {}, [5], [[]], [["0", 1, 2, 3, 4]], [[-1, 1, 2, 3, 4]], [[0, 1]], [[True, 1, 2, 3, 4]], [[[0]] * 5]],
)
def test_invalid_event_changes_nothing(told: Any) -> None:
    """A script may print any line."""
    assert gpu_figures.fold({}, told, 1.0) == {}


def test_figures_have_bounds() -> None:
    """Figures are finite and within their range, and the number of ranks is bounded."""
    wild = [[0, 1e9, -1, "nan", float("inf")], *([rank, 1, 1, 1, 1] for rank in range(5000))]
    found = gpu_figures.fold({}, wild[:1], 1.0)
    assert {found["0"][name] for name in ("use", "memory_mib", "total_mib", "watts")} == {None}
    assert len(gpu_figures.fold({}, wild, 1.0)) == gpu_figures.MOST_RANKS


def test_status_shows_gpus_and_the_warning() -> None:
    """The output for people has the warning, except of an ended job; the JSON has the figures."""

    def after(state: State) -> tuple[str, dict[str, Any]]:
        job = make_job("one")
        attempt: Attempt = replace(job.attempt, phase="sent", state=state, progress=folded(*[{0: 2}] * 7))
        job = replace(job, attempt=attempt)
        return "\n".join(as_lines(view_of(job, [attempt]))), view_of(job, [attempt]).as_json()

    text, told = after(State("running", started_s=1.0))
    assert "  GPUs        2 % busy, 1.0 of 80 GiB, 100 W" in text
    assert "warning: the GPU of rank 0 is below 10 % for 6m" in text
    assert (told["gpus"][0]["use"], told["gpus"][0]["idle_s"] >= 300) == (2, True)
    text, _ = after(State("succeeded", started_s=1.0, ended_s=500.0))
    assert "warning" not in text
