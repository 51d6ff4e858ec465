"""Tables and long lines on terminals of any width."""

import fcntl
import os
import pty
import struct
import termios
from pathlib import Path

import pytest

from cloudtrain.launcher.text.tables import hidden, table, width, wrapped

HEAD = ["JOB", "BACKEND", "STATE", "WHY"]
ROWS = [["charlm-24mgn", "local", "stopped (budget), resumable", "the money that was left bought no further run"]]


def test_table_without_a_terminal_is_complete() -> None:
    """A file or a pipe gets all columns."""
    lines = table(HEAD, ROWS, drop=HEAD[1:], shorten={"STATE": 8}, below="WHY", columns=None)
    assert lines[1].endswith("the money that was left bought no further run")
    assert lines[0].split() == HEAD


@pytest.mark.parametrize("columns", [90, 60, 50, 40, 30])
def test_table_fits_the_width(columns: int) -> None:
    """A column moves below its row, some columns are dropped, the rest is cut; the first column stays complete."""
    lines = table(HEAD, ROWS, drop=["BACKEND"], shorten={"STATE": 8}, below="WHY", columns=columns)
    assert max(map(len, lines)) <= columns
    assert lines[1].startswith("charlm-24mgn")
    assert " ".join(" ".join(lines[2:]).split()) == ROWS[0][3]


def test_columns_are_dropped_in_order_and_only_if_necessary() -> None:
    """The cells in `shorten` are cut first."""
    assert table(HEAD[:3], [ROWS[0][:3]], drop=["BACKEND"], shorten={"STATE": 8}, columns=40) == [
        "JOB           BACKEND  STATE",
        "charlm-24mgn  local    stopped (budget)…",
    ]
    assert table(HEAD[:3], [ROWS[0][:3]], drop=["BACKEND"], shorten={"STATE": 8}, columns=28) == [
        "JOB           STATE",
        "charlm-24mgn  stopped (budg…",
    ]


def test_hidden_columns_are_named() -> None:
    """A note below a narrow table names the missing columns."""
    lines = table(HEAD[:3], [ROWS[0][:3]], drop=["BACKEND"], shorten={"STATE": 8}, columns=28)
    assert hidden(HEAD[:3], lines) == ["not shown for lack of room: BACKEND; --json shows all"]
    assert hidden(HEAD, table(HEAD, ROWS)) == []


def test_long_line_continues_below_its_text() -> None:
    """Lines break at words, and the text of a label stays aligned."""
    line = "  outlook     the budget's cap comes before the finish"
    assert wrapped([line], 40) == ["  outlook     the budget's cap comes", "              before the finish"]
    assert wrapped([line], None) == [line]
    assert max(map(len, wrapped(["one two three four five"], 12))) <= 12


def test_colours_take_no_width() -> None:
    """Colour sequences do not count as columns."""
    line = "\x1b[32m####\x1b[0m is spent"
    assert wrapped([line], 14) == [line]


def test_command_is_not_broken() -> None:
    """A part of a command, pasted, would be a different command."""
    line = "[x] go on  cloudtrain resume charlm-24mgn --budget +38USD --set a=b (32 to finish, 6 in reserve)"
    assert "cloudtrain resume charlm-24mgn --budget +38USD --set a=b" in "\n".join(wrapped([line], 40)).replace(
        "\n", "|"
    )
    text = "price 690 days old: cloudtrain prices refresh, or set the price by hand in the file"
    assert max(map(len, wrapped([text], 50))) <= 50


@pytest.mark.parametrize(("told", "columns"), [("", 50), ("72", 72), ("nonsense", 50), ("0", 50)])
def test_width_comes_from_columns_or_the_terminal(monkeypatch: pytest.MonkeyPatch, told: str, columns: int) -> None:
    """A stream without a terminal has no width."""
    monkeypatch.setenv("COLUMNS", told)
    mine, its = pty.openpty()
    try:
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
        with os.fdopen(os.dup(its), "w") as terminal:
            assert width(terminal) == columns
    finally:
        os.close(mine)
        os.close(its)
    with Path(os.devnull).open("w") as nowhere:
        assert width(nowhere) is None
