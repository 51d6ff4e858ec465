"""Which lines are shown, and how."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events, nodelogs
from cloudtrain.launcher import agentlogs
from cloudtrain.launcher.backend import LogLine, LogPage
from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.logs.view import View, parse_ranks

STEP = events.format_line("step", "step 3/9 loss 0.5", {"step": 3, "loss": 0.5})


def line(text: str, node: int = 0, rank: int | None = 0, time_s: float = 100.0) -> LogLine:
    """Return a line as a backend gives it."""
    return LogLine(text, node, rank, time_s)


@pytest.mark.parametrize(("text", "ranks"), [("0", {0}), ("0,3-5", {0, 3, 4, 5}), (" 2 , 2 ", {2}), ("7-7", {7})])
def test_ranks_are_numbers_and_ranges(text: str, ranks: set[int]) -> None:
    """`0,3-5` means four ranks."""
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "5-3", "1,,2", "-1", "1-", "0.5"])
def test_ranks_that_are_none_are_a_usage_error(text: str) -> None:
    """The hint shows how they are written."""
    with pytest.raises(UsageError, match="names no ranks") as caught:
        parse_ranks(text)
    assert "0,3-5" in caught.value.hint


def test_view_hides_the_machines_part() -> None:
    """People see the text; --raw shows the line as it was written."""
    assert View(prefix=False).show(line(STEP)) == "step 3/9 loss 0.5"
    assert View(prefix=False, raw=True).show(line(STEP)) == STEP


def test_view_puts_the_rank_before_the_line() -> None:
    """A rank's lines and a node's own are told apart; with one rank there is nothing to tell."""
    assert View().show(line("hi", rank=3)) == "[r3] hi"
    assert View().show(line("hi", node=1, rank=None)) == "[node1] hi"
    assert View(prefix=False).show(line("hi")) == "hi"


def test_view_chooses_by_node_time_and_pattern() -> None:
    """Every option alone leaves out what it does not ask for; ranks are the backend's to choose."""
    assert not View(node=1).wants(line("x", node=0))
    assert not View(since_s=101.0).wants(line("x"))
    assert not View(grep=re.compile("^y")).wants(line("x"))
    assert View(node=0, since_s=99.0, grep=re.compile("x")).wants(line("x"))


def test_view_shows_times_to_the_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local time, sortable."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert View(prefix=False, timestamps=True).show(line("x", time_s=1.25)) == "1970-01-01T00:00:01.250 x"


def test_view_as_json_has_stable_names() -> None:
    """One object a line: where it is from, the text for people, and the event in full."""
    shown = json.loads(View(as_json=True, attempt=2).show(line(STEP, node=1, rank=4)))
    assert shown == {
        "time_s": 100.0, "attempt": 2, "node": 1, "rank": 4,
        "text": "step 3/9 loss 0.5", "event": {"e": "step", "step": 3, "loss": 0.5},
    }  # fmt: skip


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_view_as_json_is_json_also_for_a_loss_that_is_no_number(loss: float) -> None:
    """NaN is not JSON: a strict reader must not stumble over the very line that matters."""
    text = View(as_json=True).show(line(events.format_line("step", "step 1", {"loss": loss})))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(text, parse_constant=refuse)


# -- the command -----------------------------------------------------------------------------------------------------


def test_logs_prints_both_nodes_lines(cli: Any, seed: Callable[..., Job]) -> None:
    """An ended job's lines are printed, each with its rank, and nothing else is on stdout."""
    seed("ended", State("succeeded"))
    result = cli("logs", "ended")
    assert sorted(result.stdout.splitlines()) == ["[r0] hello from node 0", "[r1] hello from node 1"]


@pytest.mark.parametrize(
    ("tail", "shown"), [("0", []), ("2", ["[r0] 8", "[r0] 9"]), ("99", [f"[r0] {i}" for i in range(10)])]
)
@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_logs_tail_counts_from_the_end(
    cli: Any, seed: Callable[..., Job], tail: str, shown: list[str], follow: list[str]
) -> None:
    """`--tail 0` is none, also with -f; more than there are is all."""
    seed("ended", State("succeeded"), {"0": "".join(f"{i}\n" for i in range(10)), "1": ""})
    assert cli("logs", "ended", "--tail", tail, *follow).stdout.splitlines() == shown


def test_logs_tail_counts_from_the_end_of_a_long_log_when_following(cli: Any, seed: Callable[..., Job]) -> None:
    """A log of several pages is not begun in its middle."""
    text = "".join(f"{i:07} {'x' * 100}\n" for i in range(3 * nodelogs.PAGE_BYTES // 109))
    seed("ended", State("succeeded"), {"0": text, "1": ""})
    assert len(cli("logs", "-f", "ended", "--tail", "3").stdout.splitlines()) == 3


def test_logs_keeps_a_last_line_without_newline(cli: Any, seed: Callable[..., Job]) -> None:
    """What a killed rank wrote last is the line that matters."""
    seed("ended", State("failed", "error"), {"0": "one\nlast words", "1": ""})
    assert cli("logs", "ended").stdout.splitlines() == ["[r0] one", "[r0] last words"]


def test_logs_as_json_lines(cli: Any, seed: Callable[..., Job]) -> None:
    """Each line of the output is an object by itself."""
    seed("ended", State("succeeded"), {"0": STEP + "\n", "1": "x\n"})
    shown = [json.loads(text) for text in cli("logs", "ended", "--json").stdout.splitlines()]
    assert {(one["rank"], one["text"]) for one in shown} == {(0, "step 3/9 loss 0.5"), (1, "x")}


@pytest.mark.parametrize("option", [["--rank", "1"], ["--node", "1"], ["--grep", "node 1$"]])
def test_logs_narrows_down(cli: Any, seed: Callable[..., Job], option: list[str]) -> None:
    """By rank, by node, by pattern."""
    seed("ended", State("succeeded"))
    assert cli("logs", "ended", *option).stdout == "[r1] hello from node 1\n"


@pytest.mark.parametrize("option", [["--grep", "("], ["--since", "soon"], ["--rank", "x"], ["--tail", "-1"]])
def test_logs_refuses_options_that_make_no_sense(cli: Any, seed: Callable[..., Job], option: list[str]) -> None:
    """A usage error, in one line, and no traceback."""
    seed("ended", State("succeeded"))
    result = cli("logs", "ended", *option)
    assert (result.code, "Traceback" in result.stderr) == (2, False)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (State("succeeded"), 0),
        (State("failed", "error"), 1),
        (State("stopped", "user"), 9),
        (State("stopped", "budget"), 6),
    ],
)
def test_logs_followed_to_the_end_has_the_jobs_exit_code(
    cli: Any, seed: Callable[..., Job], state: State, code: int
) -> None:
    """So has wait; the state is said on stderr."""
    seed("ended", state)
    followed = cli("logs", "-f", "ended")
    assert (followed.code, cli("wait", "ended").code) == (code, code)
    assert state.state in followed.stderr
    assert state.state not in followed.stdout


# -- the files of a local job ----------------------------------------------------------------------------------------


def page_of(folder: Path, cursor: dict[str, int] | None = None) -> LogPage:
    """Return the page after the cursor of a job of one node."""
    return agentlogs.page(cursor, {0: nodelogs.read(folder / "node-0", agentlogs.offsets(cursor, 0))})


def test_log_pages_can_be_taken_up_again(tmp_path: Path) -> None:
    """A cursor carried through JSON repeats nothing and loses nothing, a line that was half there among it."""
    folder = tmp_path / "node-0" / "log"
    folder.mkdir(parents=True)
    log = folder / "rank-0.log"
    log.write_text("one\ntwo\nthr")
    first = page_of(tmp_path)
    with log.open("a") as file:
        file.write("ee\nfour\n")
    second = page_of(tmp_path, json.loads(json.dumps(first.cursor)))
    assert [one.text for one in first.lines + second.lines] == ["one", "two", "three", "four"]


def test_log_pages_merge_by_time_and_keep_each_files_order(tmp_path: Path) -> None:
    """Two ranks' lines come in the order in which they were written."""
    texts = {0: ("a\nc\n", "2 1.0\n4 3.0\n"), 1: ("b\nd\n", "2 2.0\n4 4.0\n")}
    folder = tmp_path / "node-0" / "log"
    folder.mkdir(parents=True)
    for rank, (text, times) in texts.items():
        (folder / f"rank-{rank}.log").write_text(text)
        (folder / f"rank-{rank}.times").write_text(times)
    page = page_of(tmp_path)
    assert [(one.text, one.rank, one.time_s) for one in page.lines] == [
        ("a", 0, 1.0), ("b", 1, 2.0), ("c", 0, 3.0), ("d", 1, 4.0)
    ]  # fmt: skip


def test_log_pages_show_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A broken character is shown as such; offsets count bytes."""
    folder = tmp_path / "node-0" / "log"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_bytes(b"\xff\xfe\nnext\n")
    assert [one.text for one in page_of(tmp_path).lines] == ["\ufffd\ufffd", "next"]


def test_view_is_of_one_attempt() -> None:
    """Following shows the attempt that it follows."""
    assert replace(View(as_json=True), attempt=3).show(line("x")).count('"attempt": 3') == 1
