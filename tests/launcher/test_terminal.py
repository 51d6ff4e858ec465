"""Printed text from any source contains no terminal control, and JSON stays JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.text import terminal

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
