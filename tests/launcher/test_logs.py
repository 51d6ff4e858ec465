"""`logs` chooses and formats the lines of a job."""

from __future__ import annotations

import io
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.agent import node_logs
from cloudtrain.launcher.backend import LogLine, LogPage, agent_pages, load
from cloudtrain.launcher.errors import UnreachableError, UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import follow
from cloudtrain.launcher.logs import reader
from cloudtrain.launcher.logs.cache import is_of_blocks
from cloudtrain.launcher.logs.printer import Printer
from cloudtrain.launcher.logs.view import View, parse_ranks
from cloudtrain.launcher.notices.notifier import Notifier
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.text import terminal, visible
from doubles.signatures import MakeJob

STEP = events.format_line("step", "step 3/9 loss 0.5", {"step": 3, "loss": 0.5})


def line(text: str, node: int = 0, rank: int | None = 0, time_s: float = 100.0) -> LogLine:
    """Return a line as a backend returns lines."""
    return LogLine(text, node, rank, time_s)


@pytest.mark.parametrize(("text", "ranks"), [("0", {0}), ("0,3-5", {0, 3, 4, 5}), (" 2 , 2 ", {2}), ("7-7", {7})])
def test_ranks_are_numbers_and_ranges(text: str, ranks: set[int]) -> None:
    """`0,3-5` means four ranks."""
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "5-3", "1,,2", "-1", "1-", "0.5"])
def test_invalid_ranks_are_a_usage_error(text: str) -> None:
    """The hint shows the expected form."""
    with pytest.raises(UsageError, match="names no ranks") as caught:
        parse_ranks(text)
    assert "0,3-5" in caught.value.hint


def test_view_puts_rank_and_time_before_the_visible_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """People see the text without its event; ranks may have a prefix, and times are local to the millisecond."""
    assert View(prefix=False).shown([line(STEP)])[0] == "step 3/9 loss 0.5"
    assert View(prefix=False, raw=True).shown([line(STEP)])[0] == STEP
    assert View().shown([line("hi", rank=3)])[0] == "[r3] hi"
    assert View().shown([line("hi", node=1, rank=None)])[0] == "[node1] hi"
    assert View(prefix=False).shown([line("hi")])[0] == "hi"
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert View(prefix=False, timestamps=True).shown([line("x", time_s=1.25)])[0] == "1970-01-01T00:00:01.250 x"


def test_view_filters_and_names_the_lines() -> None:
    """Each option excludes lines alone; as JSON each line has its origin, the text for people, and the full event."""
    assert not View(node=1).wants(line("x", node=0))
    assert not View(since_s=101.0).wants(line("x"))
    assert not View(grep=re.compile("^y")).wants(line("x"))
    assert View(node=0, since_s=99.0, grep=re.compile("x")).wants(line("x"))
    noise = line("[W1130 10:52:05 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3")
    assert [View(raw=raw).wants(noise) for raw in (False, True)] == [False, True]
    shown = json.loads(replace(View(as_json=True), attempt=2).shown([line(STEP, node=1, rank=4)])[0])
    assert shown == {
        "time_s": 100.0, "attempt": 2, "node": 1, "rank": 4,
        "text": "step 3/9 loss 0.5", "event": {"e": "step", "step": 3, "loss": 0.5},
    }  # fmt: skip


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_view_as_json_is_valid_json_for_a_non_finite_loss(loss: float) -> None:
    """NaN is not JSON, and a strict reader must be able to read an important line."""
    text = View(as_json=True).shown([line(events.format_line("step", "step 1", {"loss": loss}))])[0]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(text, parse_constant=refuse)


# -- the command -----------------------------------------------------------------------------------------------------


def test_logs_prints_the_lines_of_both_nodes(cli: Any, seed: MakeJob) -> None:
    """Standard output has only the lines, each with its rank, also a killed rank's last words, or as lines of JSON."""
    seed("ended", State("succeeded"))
    assert sorted(cli("logs", "ended").stdout.splitlines()) == ["[r0] hello from node 0", "[r1] hello from node 1"]
    seed("killed", State("failed", "error"), {"0": "one\nlast words", "1": ""})
    assert cli("logs", "killed").stdout.splitlines() == ["[r0] one", "[r0] last words"]
    seed("told", State("succeeded"), {"0": STEP + "\n", "1": "x\n"})
    shown = [json.loads(text) for text in cli("logs", "told", "--json").stdout.splitlines()]
    assert {(one["rank"], one["text"]) for one in shown} == {(0, "step 3/9 loss 0.5"), (1, "x")}


@pytest.mark.parametrize(
    ("tail", "shown"), [("0", []), ("2", ["[r0] 8", "[r0] 9"]), ("99", [f"[r0] {i}" for i in range(10)])]
)
@pytest.mark.parametrize("more", [[], ["-f"]])
def test_logs_tail_counts_from_the_end(cli: Any, seed: MakeJob, tail: str, shown: list[str], more: list[str]) -> None:
    """`--tail 0` shows no lines, also with -f; a number above the count shows all lines."""
    seed("ended", State("succeeded"), {"0": "".join(f"{i}\n" for i in range(10)), "1": ""})
    assert cli("logs", "ended", "--tail", tail, *more).stdout.splitlines() == shown


def test_followed_logs_tail_counts_from_the_end_of_a_long_log(cli: Any, seed: MakeJob) -> None:
    """The log has several pages, and the tail comes from the last page."""
    text = "".join(f"{i:07} {'x' * 100}\n" for i in range(3 * node_logs.PAGE_BYTES // 109))
    seed("ended", State("succeeded"), {"0": text, "1": ""})
    assert len(cli("logs", "-f", "ended", "--tail", "3").stdout.splitlines()) == 3


@pytest.fixture
def resumed(home: Path, registry: Registry, seed: MakeJob) -> Job:
    """Return a job with three attempts; the second attempt was never sent."""
    job = seed("more", State("failed", "error"), {"0": "a\nb\n", "1": ""})
    for number in (2, 3):
        fresh = replace(job.attempt, number=number, phase="intent", ref=None, state=State("pending"))
        registry.add_attempt(fresh, {}, {})
        if number == 2:
            registry.mark_never_sent(fresh, State("failed"))
    folder = home / "local/more/attempt-3"
    for node, text in enumerate(("c\nd\n", "")):
        (folder / f"node-{node}/log").mkdir(parents=True)
        (folder / f"node-{node}/log/rank-{node}.log").write_text(text)
        (folder / f"node-{node}/exit.json").write_text("{}")
    last = registry.find("more").attempt
    registry.mark_sent(last, {"folder": str(folder), "nodes": 2, "checkpoint_dir": str(folder)})
    registry.set_state(last, State("succeeded"), {})
    return registry.find("more")


def test_logs_of_a_resumed_job_name_their_attempts(cli: Any, resumed: Job) -> None:
    """The last attempt is shown, and a note gives the option for earlier attempts; as JSON each line has the number."""
    shown = cli("logs", "more")
    assert shown.stdout == "[r0] c\n[r0] d\n"
    assert shown.stderr == "attempts 1 to 3 of more; this is 3: --attempt N, or --attempt all\n"
    assert cli("logs", "more", "--attempt", "1").stdout == "[r0] a\n[r0] b\n"
    assert "neither a number from 1 up nor `all`" in cli("logs", "more", "--attempt", "0").stderr
    lines = cli("logs", "more", "--attempt", "all", "--json").stdout.splitlines()
    found = [(each["attempt"], each["text"]) for each in map(json.loads, lines)]
    assert found == [(1, "a"), (1, "b"), (3, "c"), (3, "d")]
    assert cli("logs", "more", "--attempt", "all", "--rank", "2").code == 2


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        *(([], "abcd"), (["-f"], "abcd"), (["--tail", "3"], "bcd"), (["--tail", "2", "-f"], "cd")),
        *((["--tail", "0"], ""), (["--grep", "[bc]"], "bc")),
        *((["--grep", "[ab]", "--tail", "1"], "b"), (["--rank", "1"], "")),
    ],
)
def test_logs_of_all_attempts_come_in_order(cli: Any, resumed: Job, options: list[str], shown: str) -> None:
    """The filters count over all attempts, and each attempt has a heading on standard error."""
    done = cli("logs", "more", "--attempt", "all", *options)
    assert done.stdout == "".join(f"[r0] {letter}\n" for letter in shown), done.stderr
    assert done.code == 0
    headings = [line for line in done.stderr.splitlines() if "of more:" in line]
    assert headings[-1] == "cloudtrain: attempt 3 of more: succeeded"
    assert (headings[0] == "cloudtrain: attempt 1 of more: failed (error)") == ("--tail" not in options or "b" in shown)


@pytest.mark.parametrize("option", [["--rank", "1"], ["--node", "1"], ["--grep", "node 1$"]])
def test_logs_filters_by_rank_node_and_pattern(cli: Any, seed: MakeJob, option: list[str]) -> None:
    """Each option alone selects the line of node 1."""
    seed("ended", State("succeeded"))
    assert cli("logs", "ended", *option).stdout == "[r1] hello from node 1\n"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        *(("--grep (", ""), ("--since soon", ""), ("--rank x", ""), ("--tail -1", "")),
        ("--hold-back soon", "'--hold-back': `soon`: expected a duration"),
    ],
)
def test_logs_refuses_invalid_options(cli: Any, seed: MakeJob, option: str, words: str) -> None:
    """An invalid option is a usage error without a traceback; `--hold-back` is a duration."""
    seed("ended", State("succeeded"))
    result = cli("logs", "ended", *option.split())
    assert (result.code, words in result.stderr, "Traceback" in result.stderr) == (2, True, False)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        *((State("succeeded"), 0), (State("failed", "error"), 1)),
        *((State("stopped", "user"), 9), (State("stopped", "budget"), 6)),
    ],
)
def test_followed_logs_exit_with_the_code_of_the_job(cli: Any, seed: MakeJob, state: State, code: int) -> None:
    """`wait` has the same exit code; the state is on standard error."""
    seed("ended", state)
    followed = cli("logs", "-f", "ended")
    assert (followed.code, cli("wait", "ended").code) == (code, code)
    assert state.state in followed.stderr
    assert state.state not in followed.stdout


# -- the files of a local job ----------------------------------------------------------------------------------------


def rank_log(folder: Path, text: bytes, rank: int = 0) -> Path:
    """Write the log of a rank of node 0, and return its path."""
    log = folder / "node-0" / "log" / f"rank-{rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(text)
    return log


def page_of(folder: Path, cursor: dict[str, int] | None = None) -> LogPage:
    """Return the page after the cursor for a job with a single node."""
    return agent_pages.page(cursor, {0: node_logs.read(folder / "node-0", agent_pages.offsets(cursor, 0))})


def test_log_pages_continue_from_a_stored_cursor(tmp_path: Path) -> None:
    """A cursor stored as JSON repeats and loses no line, even with a partial line; invalid bytes count as bytes."""
    log = rank_log(tmp_path, b"one\ntwo\nthr")
    first = page_of(tmp_path)
    with log.open("a") as file:
        file.write("ee\nfour\n")
    second = page_of(tmp_path, json.loads(json.dumps(first.cursor)))
    assert [one.text for one in first.lines + second.lines] == ["one", "two", "three", "four"]
    rank_log(tmp_path, b"\xff\xfe\nnext\n")
    assert [one.text for one in page_of(tmp_path).lines] == ["\ufffd\ufffd", "next"]


def test_log_pages_merge_by_time_and_keep_the_order_of_each_file(tmp_path: Path) -> None:
    """The lines of two ranks come in the order of their times."""
    for rank, text, times in ((0, b"a\nc\n", "2 1.0\n4 3.0\n"), (1, b"b\nd\n", "2 2.0\n4 4.0\n")):
        rank_log(tmp_path, text, rank).with_suffix(".times").write_text(times)
    page = page_of(tmp_path)
    assert [(one.text, one.rank, one.time_s) for one in page.lines] == [
        ("a", 0, 1.0), ("b", 1, 2.0), ("c", 0, 3.0), ("d", 1, 4.0)
    ]  # fmt: skip


# -- protection of the terminal from hostile or verbose jobs ---------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(("plain", "plain"), ("a\tb", "a\tb"), ("\x1b[31mred\x1b[0m", "red"), ("\x1b]0;title\x07x", "x")),
        *(("\x1b]52;c;Y2F0\x1b\\x", "x"), ("\x1b[2J\x1b[Hx\x1b[1A", "x"), ("\x9b2Jx\x9d0;t\x9cy", "xy")),
        *(("\x1bPq#0\x1b\\x", "x"), ("\x1b]0;never ended", "")),
        ("bell\x07 back\x08 nul\x00 del\x7f", "bell back nul del"),
        ("half \ud800", "half \ufffd"),
        ("\x1b", ""),
    ],
)
def test_line_is_shown_without_control_sequences(text: str, shown: str) -> None:
    """A job can neither rename the window, nor fill the clipboard, nor delete lines."""
    assert visible.shown(text, colour=False) == shown


def test_line_keeps_its_colours_on_a_terminal_and_ends_them() -> None:
    """Only SGR sequences pass; an unended colour would affect the lines below."""
    assert visible.shown("\x1b[1;31mred") == "\x1b[1;31mred\x1b[0m"
    assert visible.shown("\x1b[31mred\x1b[0m") == "\x1b[31mred\x1b[0m"
    assert visible.shown("\x1b[38:5:1mx\x1b[K\x1b[m") == "\x1b[38:5:1mx\x1b[m"
    assert visible.shown("\x1b[38;5;8mx\x1b[m") == "\x1b[38;5;8mx\x1b[m"


@pytest.mark.parametrize(
    "text", ["\x1b[8mhidden", "\x1b[31;8mhidden", "\x1b[5mhid\x1b[28;08mden", "hid\u202eden\u2066"]
)
def test_line_hides_no_text_by_colour_or_direction(text: str) -> None:
    """Concealed, blinking and reversed text is shown plainly, so that a copy equals the visible text."""
    assert visible.shown(text) == "hidden"
    assert "\u202e" not in visible.tame(text)


def test_long_line_is_cut_with_a_note() -> None:
    """`--raw` shows the complete line; the reset of a colour may be cut off, or a sequence may be cut in two."""
    shown = visible.shown("x" * (visible.MOST_SHOWN + 5))
    assert shown == "x" * visible.MOST_SHOWN + "… [5 more characters: --raw shows them]"
    assert View(prefix=False, raw=True).shown([line("x" * 20_000)])[0] == "x" * 20_000
    long = "\x1b[31m" + "x" * visible.MOST_SHOWN + "\x1b[0m"
    assert visible.shown(long).endswith("x\x1b[0m… [9 more characters: --raw shows them]")
    halved = visible.shown("x" * (visible.MOST_SHOWN - 2) + "\x1b[31mred")
    assert "\x1b" not in halved


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(("\r 10%\r 50%\r100%", "100%"), ("\r 10%\r 50%\r", " 50%"), ("\r100%\r      \r", "")),
        *(("\r100%\r\x1b[K\r", ""), ("no bar", "no bar"), ("\r", "")),
    ],
)
def test_progress_bar_is_reduced_to_its_last_state(text: str, shown: str) -> None:
    """The result equals the final view of a terminal; a deleted bar is empty."""
    assert visible.folded(text) == shown


def test_json_has_no_control_characters() -> None:
    """People view JSON lines on a terminal too."""
    shown = View(as_json=True).shown([line("\x1b[2J\x9b2J\u2028\u202e\u2066")])[0]
    assert shown.isprintable()
    assert json.loads(shown)["text"] == "\x1b[2J\x9b2J\u2028\u202e\u2066"


BARS = "begin\n\r 10%\r 50%\r100%\n\rlost\r    \rend\n"


def test_logs_show_and_search_only_the_visible_text(cli: Any, seed: MakeJob) -> None:
    """Of a bar the last state counts, no event part and no colour, except with `--raw`, also kept."""
    seed("ended", State("succeeded"), {"0": BARS, "1": ""})
    for command in (["logs", "ended"], ["logs", "ended"], ["logs", "-f", "ended"]):
        assert cli(*command).stdout.splitlines() == ["[r0] begin", "[r0] 100%", "[r0] end"]
    raw = cli("logs", "ended", "--raw").stdout
    assert raw == BARS.replace("\r", "\n")  # in text mode, Python reads each \r as a line end
    seed("more", State("succeeded"), {"0": BARS + STEP + "\n\x1b[31mERR\x1b[0mOR 7\n", "1": ""})
    for _ in ("from the backend", "from what is kept"):
        assert cli("logs", "more", "--grep", "^100%$").stdout == "[r0] 100%\n"
        assert cli("logs", "more", "--grep", "50%|::ct").stdout == ""
        assert cli("logs", "more", "--grep", "ERROR").stdout == "[r0] ERROR 7\n"
        assert "::ct" in cli("logs", "more", "--grep", "::ct", "--raw").stdout


@pytest.mark.parametrize("options", [[], ["-f"]])
def test_logs_options_work_together(cli: Any, home: Path, seed: MakeJob, options: list[str]) -> None:
    """Each option reduces the lines, from the backend and from the log cache alike, which needs no machine."""
    texts = {"0": "".join(f"line {number}\n" for number in range(100)), "1": "line 7 of the other\n"}
    seed("ended", State("succeeded"), texts)
    for _ in ("from the backend", "from what is kept"):
        done = cli("logs", "ended", "--rank", "0", "--grep", "7$", "-n", "2", "--since", "1h", "--timestamps", *options)
        assert [text.partition(" ")[2] for text in done.stdout.splitlines()] == ["[r0] line 87", "[r0] line 97"]
        shown = cli("logs", "ended", "--node", "1", "--json", "--hold-back", "0", *options).stdout.splitlines()
        assert [json.loads(text)["text"] for text in shown] == ["line 7 of the other"]
        shutil.rmtree(home / "local", ignore_errors=True)


@pytest.mark.parametrize(
    ("pattern", "is_local"),
    [
        *(("loss 0.5", True), ("Error|Traceback", True), (r"rank \d", True)),
        *(("^step", False), ("(?!x)y", False), ("a$", False)),
    ],
)
def test_pattern_for_a_whole_block_is_recognised(pattern: str, is_local: bool) -> None:
    """A pattern with anchors or lookarounds cannot be searched in a whole block."""
    assert is_of_blocks(re.compile(pattern)) is is_local


def test_running_progress_bar_is_drawn_in_place_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar is the lowest line and is deleted before the next line; its final state is a normal line."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout", out := io.StringIO())
    monkeypatch.setattr(out, "isatty", lambda: True)
    printer = Printer(View(), is_live=True)
    printer.print([line("one"), line("\r 10%\r")])
    printer.print([line("two", rank=1)])
    printer.print([line(" 20%\r100%")])
    printer.finish()
    assert out.getvalue() == "[r0] one\n\r\x1b[K[r0]  10%\r\x1b[K[r1] two\n\r\x1b[K[r0]  10%\r\x1b[K[r0] 100%\n"


def test_unfinished_progress_bar_is_shown_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The job was killed while the bar was running."""
    printer = Printer(View(), is_live=False)
    printer.print([line("\r 10%\r 20%\r")])
    printer.finish()
    assert capsys.readouterr().out == "[r0]  20%\n"


def test_own_messages_are_marked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages go to standard error with a prefix; a text may have a lone surrogate, and a terminal few characters."""
    terminal.aside("running")
    assert capsys.readouterr() == ("", "cloudtrain: running\n")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii"))
    terminal.print_lines(["\ud800 é"])
    assert raw.getvalue() == b"\\ufffd \\xe9\n"


def test_logs_prints_alerts_below_earlier_lines(
    registry: Registry, seed: MakeJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new alert does not appear above old lines."""
    job = seed("ended", State("failed", "error"), {"0": "one\ntwo\n", "1": ""})
    told: list[str] = []
    monkeypatch.setattr(Notifier, "look", lambda self, job: told.append(capsys.readouterr().out))
    assert follow.follow(registry, job, View(prefix=False)) == 1
    assert told == ["one\ntwo\n"]


def test_followed_logs_report_an_outage_once(
    registry: Registry, seed: MakeJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backend fails twice: the fault is reported once, and following continues."""
    job = seed("ended", State("succeeded"), {"0": "one\n", "1": ""})
    real, outages = load("local").logs, iter([True, True, False, False, False])

    def shaky(*args: Any, **named: Any) -> Any:
        if next(outages, False):
            raise UnreachableError("the token has expired", hint="log in")
        return real(*args, **named)

    monkeypatch.setattr(load("local"), "logs", shaky)
    monkeypatch.setattr(reader, "BACK_OFF_S", 0.01)
    assert follow.follow(registry, job, View(prefix=False)) == 0
    out, said = capsys.readouterr()
    assert out == "one\n"
    assert said.count("the token has expired") == 1
    assert said.count("cloudtrain: the log can be read again") == 1
