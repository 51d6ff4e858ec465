"""The container's exit report becomes a state; the tests write the report with the code that writes it in a job."""

from typing import Any

import pytest

from cloudtrain.entrypoints.container import container
from cloudtrain.entrypoints.contract import ExitReport, ExitState
from cloudtrain.launcher.backend import exit_report

BOOM = {"rank": 1, "kind": "error", "type": "ValueError", "message": "boom", "traceback": "train.py:3", "lines": ["a"]}


def words(state: ExitState, reason: str, error: dict[str, Any] | None = None, restarts: int = 0) -> str:
    """Return the exit report as the container prints it."""
    return container.account(ExitReport(state, reason, error, restarts, resumable=True))


@pytest.mark.parametrize("around", ["{}", "AlgorithmError: {}, exit code: 70", "it says: {} (see the log)"])
def test_exit_report_is_found_in_a_platform_message(around: str) -> None:
    """Text of the platform before and after the report does not matter."""
    told = exit_report.report_in(around.format(words("failed", "error", BOOM, restarts=2)))
    assert (told["rank"], told["message"], exit_report.restarts(told)) == (1, "boom", 2)


@pytest.mark.parametrize(
    "text", ["", "the machine burnt", words("failed", "error", BOOM)[:-40], '  ::ct {"e":"step","step":1}']
)
def test_text_without_a_complete_exit_report_gives_none(text: str) -> None:
    """A truncated report is ignored, and an event of the training loop is not a report."""
    assert exit_report.report_in(text) is None
    assert exit_report.restarts(None) == 0


def test_error_of_the_rank_is_the_cause_of_the_failure() -> None:
    """The report wins over the platform's message, even if the platform reports a node fault."""
    told = exit_report.report_in(words("failed", "error", BOOM))
    state = exit_report.failed(told, "node lost", is_fault=True, is_resumable=True, ended_s=5.0, restarts=1)
    assert (state.state, state.reason, state.resumable, state.error) == ("failed", "error", True, BOOM)
    assert (state.ended_s, state.restarts) == (5.0, 1)


def test_job_that_saved_and_stopped_has_no_error() -> None:
    """The platform calls the job failed because its exit code is not 0."""
    state = exit_report.failed(
        exit_report.report_in(words("stopped", "budget")), "exit 75", is_fault=False, is_resumable=True
    )
    assert (state.state, state.reason, state.error) == ("stopped", "budget", None)


@pytest.mark.parametrize(("is_fault", "reason"), [(True, "node_failure"), (False, "error")])
def test_platform_message_is_the_cause_without_an_exit_report(is_fault: bool, reason: str) -> None:
    """The error has the unchanged message and the kind that the backend derived from the message."""
    state = exit_report.failed(None, "no room", is_fault=is_fault, is_resumable=False, kind="CapacityError")
    assert (state.state, state.reason) == ("failed", reason)
    assert state.error == {"rank": None, "kind": "CapacityError", "message": "no room"}


@pytest.mark.parametrize(("is_fault", "end"), [(True, ("failed", "node_failure")), (False, ("stopped", "preempted"))])
def test_platform_decides_the_cause_of_a_preempted_container(is_fault: bool, end: tuple[str, str]) -> None:
    """The container only received a signal; the platform may know the reason for the signal."""
    told = exit_report.report_in(words("stopped", "preempted"))
    state = exit_report.failed(told, "NodeLost", is_fault=is_fault, is_resumable=True)
    assert (state.state, state.reason) == end
