"""A container's lines, and the state by its exit report; the log relay and the container's own code write both."""

import time
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.container import container
from cloudtrain.entrypoints.container.log_relay import LogRelay
from cloudtrain.entrypoints.contract import ExitReport, ExitState
from cloudtrain.launcher.backend import container_output
from cloudtrain.launcher.backend.container_output import ContainerLine

END = events.format_line("end", "node 0 has ended", {"node": 0, "final": True})
BOOM = {"rank": 1, "kind": "error", "type": "ValueError", "message": "boom", "traceback": "train.py:3", "lines": ["a"]}
ENDED = container.account(ExitReport("failed", "error"))


def pumped(folder: Path, *, stamped: bool, **texts: str) -> list[str]:
    """Return the output of the log relay for log files with the given texts."""
    for name, text in texts.items():
        (folder / f"{name.replace('_', '-')}.log").write_text(text)
    with (folder / "out").open("wb") as out:
        pump = LogRelay(folder, out.fileno(), form="stamped" if stamped else "plain")
        pump.start()
        pump.finish()
    return (folder / "out").read_text().splitlines()


@pytest.mark.parametrize("stamped", [True, False])
def test_prefix_of_the_log_relay_is_removed(tmp_path: Path, stamped: bool) -> None:
    """Rank and time are restored; a second text like a prefix belongs to the line."""
    begin_s = time.time()
    raw = pumped(tmp_path, stamped=stamped, boot="hello\n\n", rank_12=f"[3] x\n{END}\n")
    found = [container_output.parse(line, stamped=stamped) for line in raw]
    assert [line[:2] for line in found] == [("hello", None), ("", None), ("[3] x", 12), (END, 12)]
    assert all(line.own is None for line in found), "what comes through the pump is nobody's last word"
    times = [line.time_s for line in found]
    assert times == [None] * 4 if not stamped else all(begin_s - 0.001 <= at <= time.time() for at in times if at)


def test_leading_time_belongs_to_a_line_without_stamps() -> None:
    """A user's logger may write the same form."""
    line = "2026-11-21T23:59:59.123Z x"
    assert container_output.parse(line, stamped=False) == ContainerLine(line)
    assert container_output.parse(line, stamped=True) == ContainerLine("x", time_s=1_795_305_599.123)


@pytest.mark.parametrize(("line", "event"), [(END, "end"), (ENDED, "ended")])
@pytest.mark.parametrize("stamped", [True, False])
def test_events_of_the_container_are_recognised(line: str, event: str, stamped: bool) -> None:
    """Such an event has no prefix."""
    text, rank, time_s, own = container_output.parse(line, stamped=stamped)
    assert (text, rank, time_s, own and own["e"]) == (line, None, None, event)


def test_job_events_are_plain_lines() -> None:
    """A line that only contains the event mark is not an event."""
    step = events.format_line("step", "step 1", {"step": 1})
    assert [container_output.parse(line, stamped=False).own for line in (step, "x  ::ct {", f"{END} x")] == [None] * 3


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        *((["a", ENDED, END], True), (["a", ENDED, END, "", " "], True), (["a", ENDED], True)),
        *(([ENDED, END, "[0] begun anew"], False), (["a", END], False), ([f"[0] {ENDED}"], False), ([], False)),
    ],
)
def test_end_of_log_is_the_last_event_of_the_container(lines: list[str], found: bool) -> None:
    """Only further container events may follow, else the event is from an earlier container."""
    word = container_output.last_word(lines, "ended", stamped=True)
    assert (word is not None and word["e"] == "ended") is found


def words(state: ExitState, reason: str, error: dict[str, Any] | None = None, restarts: int = 0) -> str:
    """Return the exit report as the container prints it."""
    return container.account(ExitReport(state, reason, error, restarts, resumable=True))


@pytest.mark.parametrize("around", ["{}", "AlgorithmError: {}, exit code: 70", "it says: {} (see the log)"])
def test_exit_report_is_found_in_a_platform_message(around: str) -> None:
    """Text of the platform before and after the report does not matter."""
    told = container_output.report_in(around.format(words("failed", "error", BOOM, restarts=2)))
    assert (told["rank"], told["message"], container_output.restarts(told)) == (1, "boom", 2)


@pytest.mark.parametrize(
    "text", ["", "the machine burnt", words("failed", "error", BOOM)[:-40], '  ::ct {"e":"step","step":1}']
)
def test_text_without_a_complete_exit_report_gives_none(text: str) -> None:
    """A truncated report is ignored, and an event of the training loop is not a report."""
    assert container_output.report_in(text) is None
    assert container_output.restarts(None) == 0


def test_error_of_the_rank_is_the_cause_of_the_failure() -> None:
    """The report wins over the platform's message, even if the platform reports a node fault."""
    told = container_output.report_in(words("failed", "error", BOOM))
    state = container_output.failed(told, "node lost", is_fault=True, is_resumable=True, ended_s=5.0, restarts=1)
    assert (state.state, state.reason, state.resumable, state.error) == ("failed", "error", True, BOOM)
    assert (state.ended_s, state.restarts) == (5.0, 1)


def test_job_that_saved_and_stopped_has_no_error() -> None:
    """The platform calls the job failed because its exit code is not 0."""
    state = container_output.failed(
        container_output.report_in(words("stopped", "budget")), "exit 75", is_fault=False, is_resumable=True
    )
    assert (state.state, state.reason, state.error) == ("stopped", "budget", None)


@pytest.mark.parametrize(("is_fault", "reason"), [(True, "node_failure"), (False, "error")])
def test_platform_message_is_the_cause_without_an_exit_report(is_fault: bool, reason: str) -> None:
    """The error has the unchanged message and the kind that the backend derived from the message."""
    state = container_output.failed(None, "no room", is_fault=is_fault, is_resumable=False, kind="CapacityError")
    assert (state.state, state.reason) == ("failed", reason)
    assert state.error == {"rank": None, "kind": "CapacityError", "message": "no room"}


@pytest.mark.parametrize(("is_fault", "end"), [(True, ("failed", "node_failure")), (False, ("stopped", "preempted"))])
def test_platform_decides_the_cause_of_a_preempted_container(is_fault: bool, end: tuple[str, str]) -> None:
    """The container only received a signal; the platform may know the reason for the signal."""
    told = container_output.report_in(words("stopped", "preempted"))
    state = container_output.failed(told, "NodeLost", is_fault=is_fault, is_resumable=True)
    assert (state.state, state.reason) == end
