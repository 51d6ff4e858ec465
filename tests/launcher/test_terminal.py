"""What is printed, whoever wrote it: no word drives the terminal, and JSON stays JSON."""

from __future__ import annotations

import json

import pytest

from cloudtrain.launcher import terminal

HOSTILE = "a\x1b]0;title\x07b\x9b2Jc\x1b[2Kd\ud800\te\n  \x1b[31mred"


def test_lines_and_notes_drive_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """The last net, where one was missing further in; lines stay lines, and a colour a colour."""
    terminal.print_lines(["plain", HOSTILE])
    terminal.print_text([HOSTILE])
    terminal.say(HOSTILE)
    terminal.aside(HOSTILE)
    told = capsys.readouterr()
    for text in (told.out, told.err):
        assert not set(text) & set("\x07\x9b\ud800")
        assert "title" not in text
        assert "2J" not in text
    assert told.out.count("red") == 2
    assert told.out.startswith("plain\nabcd\ufffd\te\n  \x1b[31mred")


@pytest.mark.parametrize("text", [HOSTILE, "é 漢 \u2028\u202e", "\x7f\x80\x9f", "plain", "\ud800"])
def test_json_is_read_back_as_it_was_and_drives_no_terminal(text: str) -> None:
    """On one line, and in a form that every file takes."""
    line = terminal.json_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert not set(line) & set("\n\x07\x1b\x7f\x80\x9b\x9f\u2028\u202e\ud800")
    line.encode()
