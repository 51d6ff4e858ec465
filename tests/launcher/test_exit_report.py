"""The containers' account of the end, as it becomes a state: written by the very code that writes it in a job."""

from __future__ import annotations

from typing import Any

import pytest

from cloudtrain.entrypoints.container import container
from cloudtrain.entrypoints.contract import ExitReport, ExitState
from cloudtrain.launcher.jobs import exit_report

BOOM = {"rank": 1, "kind": "error", "type": "ValueError", "message": "boom", "traceback": "train.py:3", "lines": ["a"]}


def words(state: ExitState, reason: str, error: dict[str, Any] | None = None, restarts: int = 0) -> str:
    """Return what the container leaves."""
    return container.account(ExitReport(state, reason, error, restarts, resumable=True))


@pytest.mark.parametrize("around", ["{}", "AlgorithmError: {}, exit code: 70", "it says: {} (see the log)"])
def test_account_is_found_among_a_platforms_words(around: str) -> None:
    """Whatever it puts around them."""
    told = exit_report.told_in(around.format(words("failed", "error", BOOM, restarts=2)))
    assert told is not None
    assert (told["rank"], told["message"], exit_report.restarts(told)) == (1, "boom", 2)


@pytest.mark.parametrize(
    "text", ["", "the machine burnt", words("failed", "error", BOOM)[:-40], '  ::ct {"e":"step","step":1}']
)
def test_words_without_a_whole_account_hold_none(text: str) -> None:
    """Half of one says nothing that can be relied upon, and another event is none."""
    assert exit_report.told_in(text) is None
    assert exit_report.restarts(None) == 0


def test_failure_is_the_ranks_own() -> None:
    """Not what the platform says of it, be it the node's fault by those words."""
    told = exit_report.told_in(words("failed", "error", BOOM))
    state = exit_report.failed(told, "node lost", is_fault=True, is_resumable=True, ended_s=5.0, restarts=1)
    assert (state.state, state.reason, state.resumable, state.error) == ("failed", "error", True, BOOM)
    assert (state.ended_s, state.restarts) == (5.0, 1)


def test_job_that_saved_and_stopped_has_no_error() -> None:
    """The platform calls it failed, since its exit code is not 0."""
    state = exit_report.failed(
        exit_report.told_in(words("stopped", "budget")), "exit 75", is_fault=False, is_resumable=True
    )
    assert (state.state, state.reason, state.error) == ("stopped", "budget", None)


@pytest.mark.parametrize(("is_fault", "reason"), [(True, "node_failure"), (False, "error")])
def test_without_an_account_the_platforms_words_are_the_cause(is_fault: bool, reason: str) -> None:
    """As they are, with the kind that the backend has read from them."""
    state = exit_report.failed(None, "no room", is_fault=is_fault, is_resumable=False, kind="CapacityError")
    assert (state.state, state.reason) == ("failed", reason)
    assert state.error == {"rank": None, "kind": "CapacityError", "message": "no room"}


@pytest.mark.parametrize(("is_fault", "end"), [(True, ("failed", "node_failure")), (False, ("stopped", "preempted"))])
def test_container_that_was_told_to_leave_knows_no_cause(is_fault: bool, end: tuple[str, str]) -> None:
    """It had a signal, of which the platform may say what was behind it."""
    told = exit_report.told_in(words("stopped", "preempted"))
    state = exit_report.failed(told, "NodeLost", is_fault=is_fault, is_resumable=True)
    assert (state.state, state.reason) == end
