"""A container's lines, taken apart: written by the pump and the container's own code, as in a job."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.container import container
from cloudtrain.entrypoints.container.log_relay import LogRelay
from cloudtrain.entrypoints.contract import ExitReport
from cloudtrain.launcher.logs import container_lines
from cloudtrain.launcher.logs.container_lines import ContainerLine

END = events.format_line("end", "node 0 has ended", {"node": 0, "final": True})
ENDED = container.account(ExitReport("failed", "error"))


def pumped(folder: Path, *, stamped: bool, **texts: str) -> list[str]:
    """Return what the pump makes of log files with those texts."""
    for name, text in texts.items():
        (folder / f"{name.replace('_', '-')}.log").write_text(text)
    with (folder / "out").open("wb") as out:
        pump = LogRelay(folder, out.fileno(), form="stamped" if stamped else "plain")
        pump.start()
        pump.finish()
    return (folder / "out").read_text().splitlines()


@pytest.mark.parametrize("stamped", [True, False])
def test_what_the_pump_puts_in_front_is_taken_off(tmp_path: Path, stamped: bool) -> None:
    """Rank and time come back; a text that looks like a tag is a line's own where the line has one already."""
    begin_s = time.time()
    raw = pumped(tmp_path, stamped=stamped, boot="hello\n\n", rank_12=f"[3] x\n{END}\n")
    found = [container_lines.parse(line, stamped=stamped) for line in raw]
    assert [line[:2] for line in found] == [("hello", None), ("", None), ("[3] x", 12), (END, 12)]
    assert all(line.own is None for line in found), "what comes through the pump is nobody's last word"
    times = [line.time_s for line in found]
    assert times == [None] * 4 if not stamped else all(begin_s - 0.001 <= at <= time.time() for at in times if at)


def test_a_time_in_front_is_the_lines_own_without_stamps() -> None:
    """A logger of the user's may write just so."""
    line = "2026-11-21T23:59:59.123Z x"
    assert container_lines.parse(line, stamped=False) == ContainerLine(line)
    assert container_lines.parse(line, stamped=True) == ContainerLine("x", time_s=1_795_305_599.123)


@pytest.mark.parametrize(("line", "event"), [(END, "end"), (ENDED, "ended")])
@pytest.mark.parametrize("stamped", [True, False])
def test_containers_own_words_are_known(line: str, event: str, stamped: bool) -> None:
    """By nothing standing in front of them."""
    text, rank, time_s, own = container_lines.parse(line, stamped=stamped)
    assert (text, rank, time_s, own and own["e"]) == (line, None, None, event)


def test_other_events_are_lines() -> None:
    """Nor is a line an event that only mentions the mark."""
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
def test_last_word_is_followed_by_nothing(lines: list[str], found: bool) -> None:
    """But by other words of the container's own: else it is of a life before."""
    word = container_lines.last_word(lines, "ended", stamped=True)
    assert (word is not None and word["e"] == "ended") is found
