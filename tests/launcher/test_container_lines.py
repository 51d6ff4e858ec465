"""Parsing of a container's lines; the log relay and the container's own code write the lines, as in a job."""

import time
from pathlib import Path

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.container import container
from cloudtrain.entrypoints.container.log_relay import LogRelay
from cloudtrain.entrypoints.contract import ExitReport
from cloudtrain.launcher.backend import container_lines
from cloudtrain.launcher.backend.container_lines import ContainerLine

END = events.format_line("end", "node 0 has ended", {"node": 0, "final": True})
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
    found = [container_lines.parse(line, stamped=stamped) for line in raw]
    assert [line[:2] for line in found] == [("hello", None), ("", None), ("[3] x", 12), (END, 12)]
    assert all(line.own is None for line in found), "what comes through the pump is nobody's last word"
    times = [line.time_s for line in found]
    assert times == [None] * 4 if not stamped else all(begin_s - 0.001 <= at <= time.time() for at in times if at)


def test_leading_time_belongs_to_a_line_without_stamps() -> None:
    """A user's logger may write the same form."""
    line = "2026-11-21T23:59:59.123Z x"
    assert container_lines.parse(line, stamped=False) == ContainerLine(line)
    assert container_lines.parse(line, stamped=True) == ContainerLine("x", time_s=1_795_305_599.123)


@pytest.mark.parametrize(("line", "event"), [(END, "end"), (ENDED, "ended")])
@pytest.mark.parametrize("stamped", [True, False])
def test_events_of_the_container_are_recognised(line: str, event: str, stamped: bool) -> None:
    """Such an event has no prefix."""
    text, rank, time_s, own = container_lines.parse(line, stamped=stamped)
    assert (text, rank, time_s, own and own["e"]) == (line, None, None, event)


def test_job_events_are_plain_lines() -> None:
    """A line that only contains the event mark is not an event."""
    step = events.format_line("step", "step 1", {"step": 1})
    assert [container_lines.parse(line, stamped=False).own for line in (step, "x  ::ct {", f"{END} x")] == [None] * 3


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["a", ENDED, END], True),
        (["a", ENDED, END, "", " "], True),
        (["a", ENDED], True),
        ([ENDED, END, "[0] begun anew"], False),
        (["a", END], False),
        ([f"[0] {ENDED}"], False),
        ([], False),
    ],
)
def test_end_of_log_is_the_last_event_of_the_container(lines: list[str], found: bool) -> None:
    """Only further container events may follow, else the event is from an earlier container."""
    word = container_lines.last_word(lines, "ended", stamped=True)
    assert (word is not None and word["e"] == "ended") is found
