"""Printed text contains no terminal control, JSON stays JSON, and tables fit any terminal."""

import fcntl
import json
import os
import pty
import struct
import termios
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.text import terminal
from cloudtrain.launcher.text.tables import hidden, table, width, wrapped

HOSTILE = "a\x1b]0;title\x07b\x9b2Jc\x1b[2Kd\ud800\te\n  \x1b[31mred"


def test_lines_and_text_have_no_terminal_controls(capsys: pytest.CaptureFixture[str]) -> None:
    """Data keeps lines and colours, and loses all remaining controls."""
    terminal.print_lines(["plain", HOSTILE])
    terminal.print_text([HOSTILE])
    told = capsys.readouterr()
    assert not set(told.out) & set("\x07\x9b\ud800")
    assert "title" not in told.out
    assert "2J" not in told.out
    assert told.out.count("red") == 2
    assert told.out.startswith("plain\nabcd\ufffd\te\n  \x1b[31mred")


def test_question_is_wrapped_like_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of a question is longer than the terminal, including the choice after the last line."""
    asked: list[str] = []
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    monkeypatch.setattr(terminal.tables, "width", lambda stream: 80)
    monkeypatch.setattr(terminal.click, "confirm", lambda text, *, err: asked.append(text) or err)
    assert terminal.confirm(f"Stop {'word ' * 20}after saving?", yes=False)
    lines = f"{asked[0]} [y/N]: ".splitlines()
    assert (len(lines), max(map(len, lines)) <= 80) == (2, True)


@pytest.mark.parametrize(("is_terminal", "no_colour"), [(True, ""), (True, "1"), (False, "")])
def test_warning_is_yellow_on_a_terminal(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, no_colour: str) -> None:
    """Only the word `warning:` has the colour; with NO_COLOR and in a pipe no text has a colour."""
    said: list[str] = []
    monkeypatch.setattr(terminal.click, "echo", lambda text, *, err: said.append(text))
    monkeypatch.setattr(terminal.sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", no_colour)
    terminal.say("warning: old")
    is_yellow = is_terminal and not no_colour
    assert said == ["\x1b[33mwarning:\x1b[0m old" if is_yellow else "warning: old"]


def test_messages_show_controls_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    """A message shows all characters of a name or path, and no character moves the cursor or ends a line."""
    hostile = f"{HOSTILE}\r\u2028\u2029\x85\u202e é 漢"
    terminal.say(hostile)
    terminal.aside(hostile)
    told = capsys.readouterr().err
    assert set(told) - set(hostile) >= {"\\"}
    assert not {letter for letter in told if not letter.isprintable()} - {"\n", "\t"}
    escapes = r"a\x1b]0;title\x07b\x9b2Jc\x1b[2Kd\ud800", r"\x1b[31mred\r\u2028\u2029\x85\u202e é 漢"
    assert all(told.count(each) == 2 for each in escapes)
    terminal.print_lines(["path\r\u2028x"])
    assert capsys.readouterr().out == "path\\r\\u2028x\n"


def test_errors_show_controls_as_escapes(cli: Any, tmp_path: Path) -> None:
    """The cases are a job's name, an option, a command, a missing file and a key of the config."""
    hostile = "x\r\x07\u2028y"
    (tmp_path / "cloudtrain.yaml").write_text('name: one\nscript: a.py\n"x\\r\\a\\u2028y": 1\n')
    for command in (("status", hostile), ("status", f"--{hostile}"), (hostile,), ("validate", hostile), ("validate",)):
        told = cli(*command).stderr
        assert r"x\r\x07\u2028y" in told, told
        assert not {letter for letter in told if not letter.isprintable()} - {"\n"}, command


@pytest.mark.parametrize("text", [HOSTILE, "é 漢 \u2028\u202e", "\x7f\x80\x9f", "plain", "\ud800"])
def test_json_line_round_trips_without_terminal_controls(text: str) -> None:
    """The JSON is a single line that can be encoded as UTF-8."""
    line = terminal.json_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert not set(line) & set("\n\x07\x1b\x7f\x80\x9b\x9f\u2028\u202e\ud800")
    line.encode()


HEAD = ["JOB", "BACKEND", "STATE", "WHY"]
ROWS = [["charlm-24mgn", "local", "stopped (budget), resumable", "the money that was left bought no further run"]]


def test_columns_are_dropped_in_order_and_named() -> None:
    """The cells in `shorten` are cut first, and a note below a narrow table names the missing; a pipe gets all."""
    lines = table(HEAD, ROWS, drop=HEAD[1:], shorten={"STATE": 8}, below="WHY", columns=None)
    assert lines[1].endswith("the money that was left bought no further run")
    assert lines[0].split() == HEAD
    shown = table(HEAD[:3], [ROWS[0][:3]], drop=["BACKEND"], shorten={"STATE": 8}, columns=40)
    assert shown == ["JOB           BACKEND  STATE", "charlm-24mgn  local    stopped (budget)…"]
    shown = table(HEAD[:3], [ROWS[0][:3]], drop=["BACKEND"], shorten={"STATE": 8}, columns=28)
    assert shown == ["JOB           STATE", "charlm-24mgn  stopped (budg…"]
    lines = table(HEAD[:3], [ROWS[0][:3]], drop=["BACKEND"], shorten={"STATE": 8}, columns=28)
    assert hidden(HEAD[:3], lines) == ["not shown for lack of room: BACKEND; --json shows all"]
    assert hidden(HEAD, table(HEAD, ROWS)) == []


@pytest.mark.parametrize("columns", [90, 60, 50, 40, 30])
def test_table_fits_the_width(columns: int) -> None:
    """A column moves below its row, some columns are dropped, the rest is cut; the first column stays complete."""
    lines = table(HEAD, ROWS, drop=["BACKEND"], shorten={"STATE": 8}, below="WHY", columns=columns)
    assert max(map(len, lines)) <= columns
    assert lines[1].startswith("charlm-24mgn")
    assert " ".join(" ".join(lines[2:]).split()) == ROWS[0][3]


def test_long_lines_continue_below_their_text() -> None:
    """Lines break at words below a label's text, colours count as no columns, and no command is broken."""
    line = "  outlook     the budget's cap comes before the finish"
    assert wrapped([line], 40) == ["  outlook     the budget's cap comes", "              before the finish"]
    assert wrapped([line], None) == [line]
    assert max(map(len, wrapped(["one two three four five"], 12))) <= 12
    line = "\x1b[32m####\x1b[0m is spent"
    assert wrapped([line], 14) == [line]
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


@pytest.mark.parametrize(("term", "is_drawn"), [("xterm", True), ("dumb", False)])
def test_progress_bar_is_drawn_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, term: str, is_drawn: bool) -> None:
    """The bar has the share, the bytes and the rate, and its line is empty at the end."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(terminal, "METER_S", -1.0)
    mine, its = pty.openpty()
    try:
        with os.fdopen(os.dup(its), "w") as stream:
            monkeypatch.setattr("sys.stderr", stream)
            with terminal.meter("inputs.train", 4_000_000) as sent:
                sent(1_000_000)
            stream.write("end")
        shown = ""
        while not shown.endswith("end"):  # a read may return a part
            shown += os.read(mine, 4096).decode()
    finally:
        os.close(mine)
        os.close(its)
    assert ("inputs.train [#####...............] 1.0 of 4.0 MB" in shown) == is_drawn
    assert shown.endswith("\r\x1b[Kend" if is_drawn else "end")
