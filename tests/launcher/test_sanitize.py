"""A state with untrusted input has the types that its fields promise, and is safe to print."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from cloudtrain.launcher.job import State
from cloudtrain.launcher.jobs.overview import as_lines
from cloudtrain.launcher.jobs.view import view_of
from cloudtrain.launcher.text.sanitize import state_of
from doubles.plans import make_job

ESCAPE = "\x1b]0;title\x07\x9b2J\ud800"
ERROR = {"rank": 1, "kind": "exception", "type": "ValueError", "message": "a\n  b"}
ERROR |= {"traceback": "  f\nend", "lines": ["x"]}


def test_valid_state_is_unchanged() -> None:
    """An empty state, and a state with the optional keys of some exit reports, stay equal too."""
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
def test_error_fields_have_the_promised_types(told: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A script may write its own exit report, and Python reads NaN as JSON."""
    error = state_of(State("failed", error={**ERROR, **told})).error
    assert error == {**ERROR, **wanted}


@pytest.mark.parametrize(
    "error",
    [
        dict.fromkeys(ERROR, thing)
        for thing in (ESCAPE, 5, [ESCAPE], {ESCAPE: ESCAPE}, None, 10**400, float("nan"), "x" * 100_000, "\n" * 9999)
    ],
)
def test_untrusted_error_prints_without_control_characters(error: dict[str, Any]) -> None:
    """The screen, the JSON, the likely cause and a module's name from the error text are all printable."""
    error["message"] = error["message"] or "x"
    for each in (error, {**error, "message": f"No module named 'x{ESCAPE}'"}):
        state = state_of(State("failed", f"er{ESCAPE}", True, each, 1e300, 2.0, detail=f"d{ESCAPE}", url=ESCAPE))
        job = make_job("digits-x", phase="sent", state=state)
        lines = as_lines(view_of(job, [job.attempt]), (), (80, 24))
        text = "\n".join(lines) + json.dumps(view_of(job, [job.attempt]).as_json(), ensure_ascii=False, allow_nan=False)
        assert "".join(lines).isprintable()
        assert not set(text) & set(ESCAPE[:1] + "\x07\x9b\ud800")
        assert len(text) < 100_000
        assert (state.reason, state.started_s) == ("er", None) or state.reason == "er\ufffd"


def test_state_survives_the_registry_unchanged() -> None:
    """The stored state equals the sanitized state, so that the next poll finds no false change."""
    told = state_of(State("failed", "error", error={**ERROR, "lines": [ESCAPE]}))
    assert State(**json.loads(json.dumps(asdict(told)))) == told == state_of(told)
