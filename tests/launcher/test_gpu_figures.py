"""The launcher folds GPU events into figures by rank, a mean, and a warning about idle GPUs."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.entrypoints.agent import gpumeter
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.jobs.overview import as_lines
from cloudtrain.launcher.jobs.view import view_of
from cloudtrain.launcher.store import gpu_figures, progress


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


def test_status_shows_gpus_and_the_warning(make_job: Callable[..., Job]) -> None:
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
