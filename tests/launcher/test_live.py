"""Parts of the live view without jobs or a terminal: cleaned text, curves, keys, view states, pauses."""

import random
from collections.abc import Sequence

import pytest
from rich.cells import cell_len

from cloudtrain.launcher.backend import LogLine
from cloudtrain.launcher.jobs.poller import Pacing
from cloudtrain.launcher.live.model import BINS, curves_of
from cloudtrain.launcher.live.screen import decode
from cloudtrain.launcher.live.view_state import Action, ViewState, steer
from cloudtrain.launcher.store.series import Point, Series
from cloudtrain.launcher.text.charts import ASCII, UNICODE, bar, chart, signs_of, stacked
from cloudtrain.launcher.text.visible import LONGEST, cleaned

JOBS = ("a", "b", "c")
LINES = tuple(LogLine(str(n), 0, 0, 0.0) for n in range(100))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [red]text[/red]", "plain [red]text[/red]"),
        ("10%\r50%\r100%", "100%"),
        ("100%\r", "100%"),
        ("\x1b[1;31mred\x1b[0m \x1b[2Jon \x1b[?25lon", "red on on"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b", "ab"),
        *(("\x1b]never ended", ""), ("\x1bPq...\x1b\\x\x1bcy\x1b(0z", "xyz")),
        *(("\x9b31mred \x9dtitle\x9c on", "red  on"), ("a\tb\x00\x07\x7f\x85", "a       b")),
        *(("\u202eback\u2066\u200b", "back"), ("\ud800\ue000\u0378", "???"), ("two\u2028lines", "two lines")),
        ("日本 é", "日本 é"),
        ("👩\u200d👧\ufe0f", "👩👧"),
        ("e" + "\u0301" * 9, "e" + "\u0301" * 2),
    ],
)
def test_cleaned_text_is_printable(text: str, shown: str) -> None:
    """The result has no characters that move the cursor, colour, join or stack."""
    assert cleaned(text) == shown


def test_cleaned_text_never_has_a_control_character() -> None:
    """The rule holds for any text, and the length is bounded."""
    some = random.Random(9)
    for _ in range(300):
        text = "".join(
            chr(some.choice([27, 91, 155, 13, 9, some.randrange(0x500), some.randrange(0x110000)])) for _ in range(60)
        )
        found = cleaned(text)
        assert all(letter.isprintable() or letter == "\xa0" for letter in found), ascii(text)
        assert cleaned(found) == found
    assert len(cleaned("x" * 9 * LONGEST)) == LONGEST


def test_chart_spans_the_range_of_values() -> None:
    """Each character is a mean; the lowest value has a visible bar, and an unknown value is a blank."""
    assert chart(list(range(8)), 8, 1, UNICODE) == ["▁▂▃▄▅▆▇█"]
    assert chart([0.0, None, 7.0], 10, 1, UNICODE) == ["▁ █"]
    assert chart([1.0] * 100, 4, 1, ASCII) == ["===="]
    assert chart([], 4, 2, ASCII) == ["", ""]
    assert chart([0, 1, 2, 3], 2, 2, UNICODE) == [" █", "▁█"]


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0.0, "...."), (0.009, "...."), (0.01, "#..."), (0.5, "##.."), (0.999, "###."), (1.0, "####"), (7.0, "####")],
)
def test_bar_is_full_only_at_the_whole(share: float, drawn: str) -> None:
    """The bar has no sign at `<1 %`, and one sign or more from 1 % on."""
    assert bar(share, 4, ASCII) == drawn


def test_bars_have_the_requested_width() -> None:
    """The width holds for any rounding of the shares, and signs are one column wide."""
    assert "".join(stacked([0.78, 0.15, 0.05, 0.02], 20, ASCII)) == "################===:"
    assert stacked([0.0, 0.0], 9, ASCII) == ["", ""]
    assert [len("".join(stacked([1, 1, 1], width, ASCII))) for width in range(1, 9)] == list(range(1, 9))
    for signs in (UNICODE, ASCII):
        every = signs.levels + signs.full + signs.empty + signs.parts + signs.rule + signs.cut + signs.pointer
        assert {cell_len(sign) for sign in every} == {1}
        assert every.encode(signs.encoding)


@pytest.mark.parametrize(
    ("environ", "is_unicode"),
    [
        ({"LANG": "en_US.UTF-8"}, True),
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),  # as Python itself sets LC_CTYPE
        ({"LANG": "C.UTF-8", "LC_CTYPE": "C.UTF-8"}, True),
        ({"LC_CTYPE": "de_DE.utf8"}, True),
        ({}, False),
    ],
)
def test_signs_depend_on_the_locale(environ: dict[str, str], is_unicode: bool) -> None:
    """Without UTF-8 in the locale the signs are ASCII."""
    assert signs_of(environ) is (UNICODE if is_unicode else ASCII)


@pytest.mark.parametrize(
    ("data", "keys", "rest"),
    [
        (b"qj\r\x7f", ["q", "j", "enter", "back"], b""),
        (b"\x1b[A\x1bOB\x1b[5~\x1b[1;5C", ["up", "down", "page up"], b""),
        (b"\x1b[", [], b"\x1b["),
        (b"\x1b", [], b"\x1b"),
        (b"\x1b\x1b[A", ["escape", "up"], b""),
        (b"\x1b[<0;10;10Mq", ["q"], b""),
        ("é".encode(), [], b""),
        (b"\x1b[" + b"1" * 40, ["escape"], b""),
    ],
)
def test_keys_are_decoded_completely(data: bytes, keys: list[str], rest: bytes) -> None:
    """Unknown keys are skipped, and an incomplete sequence waits for its rest."""
    assert decode(data) == (keys, rest)


def pressed(choice: ViewState, *keys: str, lines: Sequence[LogLine] = LINES) -> tuple[ViewState, Action | None]:
    """Return the view state after the keys, and the action of the last key."""
    action = None
    for key in keys:
        choice, action = steer(choice, key, JOBS, lines, 10)
    return choice, action


def test_keys_choose_and_open_a_job_and_return() -> None:
    """The table accepts arrows and letters."""
    choice, action = pressed(ViewState(chosen="a"), "down", "j", "down", "k", "enter")
    assert (choice.opened, action) == ("b", Action("open", "b"))
    choice, action = pressed(choice, "escape")
    assert (choice.opened, choice.chosen, action) == (None, "b", Action("open", ""))
    assert pressed(choice, "q")[1] == Action("quit")


def test_single_job_is_left_only_with_q() -> None:
    """A single job has no table to return to, so a partial key sequence must not end the watch."""
    choice = ViewState(opened="a", is_single=True)
    assert pressed(choice, "escape") == (choice, None)
    assert pressed(choice, "q")[1] == Action("quit")
    assert decode(b"\x1b", is_all=True) == (["escape"], b"")


@pytest.mark.parametrize(("key", "is_asked"), [("y", True), ("Y", True), ("n", False), ("enter", False), ("q", False)])
def test_stop_needs_a_yes(key: str, is_asked: bool) -> None:
    """Any key but y is a no, and has no second effect."""
    choice, action = pressed(ViewState(opened="b", is_single=True), "s", key)
    assert action == (Action("stop", "b") if is_asked else None)
    assert choice.asks is None


def test_stop_applies_to_the_job_of_the_question() -> None:
    """The table may change while the question waits."""
    choice, _ = steer(ViewState(chosen="b"), "s", JOBS)
    assert steer(choice, "y", ("new", *JOBS))[1] == Action("stop", "b")


def test_ranks_are_typed_and_confirmed_with_enter() -> None:
    """Invalid ranks, also outside the job, have a message and can be corrected; Escape restores the earlier ranks."""
    choice, action = pressed(ViewState(opened="a"), "r", "0", ",", "3", "-", "5", "enter")
    assert (choice.ranks, choice.typing, action) == ("0,3-5", None, Action("open", "a"))
    choice, action = pressed(choice, "r", "back", "back", "-", "enter")
    assert (action, "names no ranks" in choice.word) == (None, True)
    assert pressed(choice, "escape")[0].ranks == "0,3-5"
    assert pressed(ViewState(opened="a", ranks="0"), "r", "back", "enter")[0].ranks == ""
    choice, _ = steer(ViewState(opened="a", typing="0-9"), "enter", JOBS, ranks=9)
    assert (choice.word, choice.typing) == ("no such rank; its ranks are 0 to 8", "0-9")
    choice, action = steer(choice, "enter", JOBS, ranks=10)
    assert (choice.typing, action) == (None, Action("open", "a"))


def test_scrolling_back_or_a_pause_holds_the_log() -> None:
    """Scrolling stops at the first line, until `end`; both p and the space bar pause until the next such key."""
    choice, _ = pressed(ViewState(opened="a"), "up", "page up")
    assert (choice.back, choice.held) == (11, LINES)
    assert pressed(choice, *["page up"] * 20)[0].back == 90
    assert pressed(choice, "home")[0].back == 90
    assert pressed(choice, "end")[0].held is None
    assert pressed(ViewState(opened="a"), "down")[0].held is None
    choice, _ = pressed(ViewState(opened="a"), "p")
    assert choice.held == LINES
    assert pressed(choice, " ")[0].held is None


def told(*losses: float | str, attempt: int = 1, first: int = 1) -> list[Point]:
    """Return steps with the losses."""
    return [Point(attempt, "step", 100.0 + n, first + n, {"loss": loss}) for n, loss in enumerate(losses)]


def test_track_has_newest_least_and_largest() -> None:
    """A non-finite value counts only as the newest value; of a repeated step the value of the last attempt counts."""
    track = curves_of(Series(tuple(told(3.0, 1.0, 2.0, "nan")))).loss
    assert (track.values, track.newest, track.least, track.largest) == ((3.0, 1.0, 2.0), "nan", 1.0, 3.0)
    track = curves_of(Series((*told(5.0, 4.0, 9.0), *told(3.0, 2.0, attempt=2, first=3)))).loss
    assert track.values == (5.0, 4.0, 3.0, 2.0)


def test_long_track_is_cut_into_equal_ranges_of_steps() -> None:
    """The ranges have equal steps, not equal numbers of events, so that uneven thinning moves no value."""
    dense = [Point(1, "step", float(n), n, {"loss": 1.0}) for n in range(1000)]
    sparse = [Point(1, "step", float(n), n, {"loss": 2.0}) for n in range(1000, 2000, 100)]
    track = curves_of(Series((*dense, *sparse))).loss
    assert len(track.values) == BINS
    rise = next(place for place, value in enumerate(track.values) if value is not None and value > 1.0)
    assert abs(rise - BINS * 1000 / 1900) < 2


def test_mean_counts_points_by_weight() -> None:
    """A point of weight 0 is an extreme outside the mean, even as the largest value."""
    points = [Point(1, "step", 1.0, 1, {"loss": 1.0}, weight=3), Point(1, "step", 5.0, BINS * 2, {"loss": 1.0})]
    points += [Point(1, "step", 2.0, 2, {"loss": 5.0}), Point(1, "step", 3.0, 3, {"loss": 99.0}, weight=0)]
    points += [Point(1, "step", 9.0 + n, BINS * 2 + n, {"loss": 1.0}) for n in range(1, BINS)]
    curves = curves_of(Series(tuple(points)))
    assert (curves.loss.values[0], curves.loss.least, curves.loss.largest) == (2.0, 1.0, 99.0)


def test_figures_beside_the_loss_come_from_the_steps() -> None:
    """A rate is computed if not reported; few steps have a save; the newest step has the peak of the GPU's memory."""
    track = curves_of(Series(tuple(Point(1, "step", 10.0 + 2 * n, 5 * n, {}) for n in range(4)))).rate
    assert (track.name, track.newest) == ("steps/s", 2.5)
    step = {"compute_s": 0.8, "data_s": 0.2}
    parts = [step, {**step, "checkpoint_s": 1.0}, {"data_s": "nan"}]
    curves = curves_of(Series(tuple(Point(1, "step", float(n), n, fields) for n, fields in enumerate(parts))))
    assert dict(curves.split) == {"compute": 0.4, "data": 0.1, "save": 0.5}
    points = (
        Point(1, "start", 0.0, 0, {"device": "cuda:0", "memory_total_bytes": 100}),
        Point(1, "step", 1.0, 1, {"memory_bytes": 40}),
    )
    curves = curves_of(Series(points))
    assert (curves.memory_bytes, curves.memory_total_bytes, curves.is_gpu) == (40, 100, True)


@pytest.mark.parametrize(
    ("pace", "jobs", "silences", "every", "expected"),
    [
        (0.2, 1, 0, 0.0, 1.0),  # figures do not change faster
        (4.0, 1, 0, 0.0, 4.0),
        (4.0, 20, 0, 0.0, 16.0),  # many jobs share the quota of a cloud
        (4.0, 1, 0, 60.0, 60.0),  # the requested pause
        (0.2, 900, 0, 60.0, 60.0),  # also with many jobs
        (4.0, 1, 0, 1.0, 4.0),
        (0.2, 1, 1, 0.0, 5.0),
        (0.2, 1, 3, 0.0, 20.0),
        (0.2, 1, 500, 0.0, 60.0),
    ],
)
def test_pause_limits_load_on_backends(pace: float, jobs: int, silences: int, every: float, expected: float) -> None:
    """Many jobs share the pace, and a silent backend is polled more and more seldom."""
    assert Pacing(every_s=lambda: every).pause_s(pace, jobs, silences) == expected
