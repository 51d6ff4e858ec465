"""What a job tells of its end, held to what its fields promise: whatever the account holds, it can be shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs.describe import as_json
from cloudtrain.launcher.jobs.overview import as_lines
from cloudtrain.launcher.store.sanitize import state_of

ESCAPE = "\x1b]0;title\x07\x9b2J\ud800"
ERROR = {
    "rank": 1,
    "kind": "exception",
    "type": "ValueError",
    "message": "a\n  b",
    "traceback": "  f\nend",
    "lines": ["x"],
}


def test_sound_state_is_left_as_it_is() -> None:
    """Also where it has nothing to tell, or keys that only some accounts have."""
    told = State("failed", "preempted", True, {**ERROR, "signal": "SIGKILL", "time_s": 5.5}, 1.0, 2.5, 3, "why", 4.0)
    for each in (told, State("running"), replace(told, gone_s={"1": 5.0}, url="https://x/y?z=1", hourly_usd=0.5)):
        assert state_of(each) == each


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({"rank": float("nan")}, {"rank": None}),
        ({"rank": True}, {"rank": None}),
        ({"lines": [1, "b", None, ESCAPE]}, {"lines": ["b", "\ufffd"]}),
        ({"lines": "abc"}, {"lines": []}),
        ({"traceback": 5}, {"traceback": None}),
        ({"message": {"a": 1}}, {"message": "{'a': 1}"}),
        ({"message": None}, {"message": ""}),
        ({"type": ["x"], "kind": 3}, {"type": None, "kind": None}),
        ({"more": {"deep": float("inf")}}, {"more": {"deep": "inf"}}),
    ],
)
def test_account_is_what_its_names_promise(told: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A script may write an account of its own, and NaN is JSON to Python."""
    error = state_of(State("failed", error={**ERROR, **told})).error
    assert error == {**ERROR, **wanted}


@pytest.mark.parametrize(
    "error",
    [
        dict.fromkeys(ERROR, thing)
        for thing in (ESCAPE, 5, [ESCAPE], {ESCAPE: ESCAPE}, None, 10**400, float("nan"), "x" * 100_000, "\n" * 9999)
    ],
)
def test_whatever_an_account_holds_it_is_shown_and_drives_no_terminal(
    error: dict[str, Any], make_job: Callable[..., Job]
) -> None:
    """On the screen and as JSON, with the cause that is likely, and a module's name out of its text."""
    error["message"] = error["message"] or "x"
    for each in (error, {**error, "message": f"No module named 'x{ESCAPE}'"}):
        state = state_of(State("failed", f"er{ESCAPE}", True, each, 1e300, 2.0, detail=f"d{ESCAPE}", url=ESCAPE))
        job = make_job("digits-x")
        job = replace(job, attempt=replace(job.attempt, phase="sent", state=state))
        lines = as_lines(job, [job.attempt], (), (80, 24))
        text = "\n".join(lines) + json.dumps(as_json(job, [job.attempt]), ensure_ascii=False, allow_nan=False)
        assert "".join(lines).isprintable()
        assert not set(text) & set(ESCAPE[:1] + "\x07\x9b\ud800")
        assert len(text) < 100_000
        assert (state.reason, state.started_s) == ("er", None) or state.reason == "er\ufffd"


def test_state_survives_the_registry_as_it_was_taken() -> None:
    """What is stored is what is compared with the next look."""
    told = state_of(State("failed", "error", error={**ERROR, "lines": [ESCAPE]}))
    assert State(**json.loads(json.dumps(asdict(told)))) == told == state_of(told)
