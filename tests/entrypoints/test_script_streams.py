"""The output of a script arrives byte for byte, with an event appended to a line with a step."""

import io
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.entrypoints.scripts import streams
from cloudtrain.entrypoints.scripts.steps import Steps
from cloudtrain.entrypoints.scripts.streams import OutputStream

PIECES = st.sampled_from(
    [
        *("step 3 loss 0.5", "\n", "\r", "ü", " 4%|# | 4/99 [00:01<00:02, 1it/s]", "{'loss': 1}", "\x1b[A"),
        "x" * 5000,
        "  ::ct ",
    ]
)


@pytest.fixture(scope="module", autouse=True)
def no_threads() -> Iterator[None]:
    """Start no thread that sends heartbeats for a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "_beat_on", lambda self: None)
        yield


def made(raw: io.RawIOBase | io.BytesIO) -> OutputStream:
    """Return a stream as Python makes one with -u."""
    plain = io.TextIOWrapper(raw, "utf-8", "strict", "\n", False, True)  # type: ignore[arg-type]
    return OutputStream(plain, Steps(0, {}))


@given(st.lists(PIECES, max_size=12))
def test_text_passes_unchanged(pieces: list[str]) -> None:
    """Text in any pieces is in the file when write returns; only events are added."""
    raw, written = io.BytesIO(), ""
    stream = made(raw)
    for piece in pieces:
        written += piece
        assert stream.write(piece) == len(piece)
        found = re.sub(r'  ::ct \{"e[^\n]*', "", raw.getvalue().decode())
        assert found == written


def test_tail_comes_with_the_newline() -> None:
    """`print` writes text and newline apart: the text passes at once, the event and the newline together."""
    raw = io.BytesIO()
    stream = made(raw)
    stream.write("step 3/9 loss 0.5")
    assert raw.getvalue() == b"step 3/9 loss 0.5"
    stream.write("\n")
    assert raw.getvalue() == b'step 3/9 loss 0.5  ::ct {"e":"step","loss":0.5,"step":3,"max_steps":9}\n'


def test_bar_gets_a_newline_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 1, 2, 4 seconds and so on, later once a minute, so the bar's state reaches every platform's log."""
    raw, now = io.BytesIO(), [0.0]
    stream = made(raw)
    monkeypatch.setattr(streams.time, "monotonic", lambda: now[0])
    for second in range(1, 1001):
        now[0] = float(second)
        stream.write(f"\rMap: {second // 10}%|# | {second}/1000 [00:01<00:02, 1 examples/s]")
    ends = [int(found) for found in re.findall(rb"(\d+)/1000 [^\r]*\n", raw.getvalue())]
    assert ends[:7] == [2, 4, 8, 16, 32, 64, 124]
    assert {later - sooner for sooner, later in itertools.pairwise(ends[6:])} == {60}
    assert b"::ct" not in raw.getvalue()


def test_stream_has_the_interface_that_scripts_expect(tmp_path: Path) -> None:
    """A TextIOWrapper with buffer, descriptor and encoding, which can be reconfigured."""
    with (tmp_path / "log").open("wb", buffering=0) as raw:
        stream = made(raw)
        assert isinstance(stream, io.TextIOWrapper)
        assert (stream.fileno(), stream.encoding, stream.write_through) == (raw.fileno(), "utf-8", True)
        stream.buffer.write(b"bytes\n")
        stream.reconfigure(line_buffering=True, errors="replace")
        print("a", "b", sep="-", file=stream)
        assert (tmp_path / "log").read_bytes() == b"bytes\na-b\n"
        stream.detach()


def test_forked_process_writes_no_event(tmp_path: Path) -> None:
    """A data loader's worker is not the rank."""
    with (tmp_path / "log").open("wb", buffering=0) as raw:
        stream = made(raw)
        if (pid := os.fork()) == 0:
            stream.write("step 3 loss 0.5\n")
            os._exit(0)
        os.waitpid(pid, 0)
        stream.detach()
    assert (tmp_path / "log").read_text() == "step 3 loss 0.5\n"


def test_own_lines_begin_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning of ours never starts in the middle of a line of the script."""
    raw, sent = io.BytesIO(), []
    stream = made(raw)
    monkeypatch.setattr(sys, "__stdout__", stream)
    monkeypatch.setattr(streams.os, "write", lambda fd, data: sent.append(data))
    stream.write("half a line")
    streams.say("cloudtrain: warning: x\n")
    assert (raw.getvalue(), sent) == (b"half a line\n", [b"cloudtrain: warning: x\n"])


FORMS = ["\rstep {}/60 loss 0.5", "step {}/60 loss 0.5\r", "\rtrain:  50%|###| {}/60 [00:01<00:02, 9it/s]"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("after", ["", "all done", "all done\n", "\n"])
def test_last_state_of_a_bar_is_reported(form: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that ends behind its bar, or prints behind it, has reached the last step."""
    raw, now = io.BytesIO(), [0.0]
    monkeypatch.setattr(streams.time, "monotonic", lambda: now[0])
    stream = made(raw)
    for step in range(1, 61):
        now[0] += 0.01
        stream.write(form.format(step))
    assert b"::ct" not in raw.getvalue()
    for piece in after.splitlines(keepends=True):
        stream.write(piece.rstrip("\n"))
        stream.write(piece[len(piece.rstrip("\n")) :])
    stream.end_bar()
    stream.end_bar()
    assert raw.getvalue().count(b'"step":60,"max_steps":60') == 1
    assert raw.getvalue().endswith(b"}\n")


def test_line_without_a_bar_stays_as_written_at_the_end() -> None:
    """Half a line of a script gets no newline from us."""
    raw = io.BytesIO()
    stream = made(raw)
    stream.write("half a line")
    stream.end_bar()
    assert raw.getvalue() == b"half a line"
