"""Parsing and formatting of durations, money, percentages and sizes, and the times of the platforms."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.launcher.text import times, units
from cloudtrain.launcher.text.units import parse_duration, parse_money, parse_percent, parse_size_gb


@pytest.mark.parametrize(
    ("parse", "values"),
    [
        (
            parse_duration,
            {"90s": 90, "10m": 600, "12h": 43_200, "2d": 172_800, "1h30m": 5_400, "1.5h": 5_400, "1h 30m": 5_400}
            | {0: 0, "0": 0, " 10m ": 600},
        ),
        (
            parse_money,
            {"150 USD": 150_000_000, "$1.5": 1_500_000, "0.25usd": 250_000, 2.5: 2_500_000, 0: 0, "0.000001": 1},
        ),
        (parse_size_gb, {200: 200, "200": 200, "200 GB": 200, "2TB": 2000}),
    ],
)
def test_valid_values_are_read(parse: Callable[[Any], int], values: dict[Any, int]) -> None:
    """A duration is numbers with units, from large to small; a sum is in dollars; a size is in GB, or has the unit."""
    assert {text: parse(text) for text in values} == values


@pytest.mark.parametrize(
    ("parse", "words", "text"),
    [
        *(
            (parse_duration, "duration", text)
            for text in (30, "30", 0.25, "", "h", "12 hours", "-1h", "30m1h", "1h1h", "0.5s", "4000d", True, None, -1)
        ),
        *((parse_duration, "duration", text) for text in (0.5, float("nan"), [], "1e3")),
        *(
            (parse_money, "US dollars", text)
            for text in ("", "150 EUR", "€150", "-1 USD", "1e3", "1.0000001", "1,5", True, None, float("inf"))
        ),
        *((parse_percent, "percentage", text) for text in (50, 0.5, "50", "0%", "1001%", "50 percent", True, None)),
        *((parse_size_gb, "gigabytes", text) for text in (0, -1, 1.5, True, "200 MB", "", None)),
    ],
)
def test_invalid_values_are_refused(parse: Callable[[Any], int], words: str, text: Any) -> None:
    """The error has the expected form. Foreign currencies, fractions of a micro-dollar, and a share without % fail."""
    with pytest.raises(ValueError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5 EUR", "convert it first"),
        ("€150", "convert it first"),
        *(("5k", "with all its digits"), ("2M USD", "with all its digits"), ("1,000 USD", "without commas")),
        *(("1,5", "cents after a point"), ("1e9 USD", "without an exponent"), ("-5 USD", "not below 0")),
        *(("5 dollars", "the unit is `USD`"), ("0.0000001", "six decimals")),
    ],
)
def test_money_error_names_the_kind_of_fault(text: str, said: str) -> None:
    """The message names the kind of the amount, not the text, which may be a secret."""
    with pytest.raises(ValueError, match=said) as caught:
        units.parse_money(text)
    assert text not in str(caught.value)


@given(st.integers(0, 3_650 * 86_400), st.integers(0, 10**15), st.integers(1, 1000))
def test_values_round_trip(seconds: int, micro_usd: int, number: int) -> None:
    """A formatted duration, amount, percentage and size parse to the same number."""
    assert units.parse_duration(units.format_duration(seconds)) == seconds
    assert units.parse_money(units.format_money(micro_usd)) == micro_usd
    assert units.parse_percent(units.format_percent(number)) == number
    assert units.parse_size_gb(f"{number} GB") == number


@given(st.text() | st.integers() | st.floats() | st.none() | st.booleans())
def test_any_value_reads_or_raises_value_error(value: Any) -> None:
    """A parser raises no error but ValueError."""
    for parse in (units.parse_duration, units.parse_money, units.parse_percent, units.parse_size_gb):
        try:
            said = str(parse(value))
        except ValueError as exc:
            said = str(exc)
        assert said


@pytest.mark.parametrize(
    ("seconds", "text"), [(86_400, "24h"), (172_800, "2d"), (5_400, "90m"), (61, "61s"), (0, "0s")]
)
def test_duration_is_written_in_its_largest_unit(seconds: int, text: str) -> None:
    """A day is 24h, as people say; two days are 2d."""
    assert units.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ([units.percent(share) for share in (0.0, 0.004, 0.126, 0.999, 1.0)], ["0 %", "<1 %", "13 %", "99 %", "100 %"]),
        (
            [units.quantity(value) for value in (0.0, 2.31e-4, 0.12345, 20480.0, -3e6)],
            ["0", "2.31e-04", "0.1235", "20.5k", "-3M"],
        ),
        ([units.step_time(seconds) for seconds in (0.05, 1.254)], ["50 ms", "1.25 s"]),
        ([units.size(count) for count in (4.24e8, 13.2e9)], ["404 MiB", "12.3 GiB"]),
    ],
)
def test_figures_are_short_and_never_overstate(text: list[str], wanted: list[str]) -> None:
    """A share below 1 is never 100 %, and a share above 0 is never 0 %."""
    assert text == wanted


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-11-21T00:00:00Z", 0),
        ("2026-11-21T00:00:00", 0),
        ("2026-11-21T01:00:00+01:00", 0),
        ("2026-11-21T00:00:00.1234567+00:00", 0.123456),
        ("2026-11-21T00:00:00.123456789Z", 0.123456),
        ("2026-11-21T00:00:01.5Z", 1.5),
    ],
)
def test_times_of_any_precision(text: str, seconds: float) -> None:
    """.NET writes seven digits of a second, Google nine; Python 3.10 reads six. Without a zone the time is UTC."""
    assert times.seconds(text) == pytest.approx(1_795_219_200 + seconds, abs=1e-6)


@pytest.mark.parametrize("text", [None, "", "soon", 5, "2026-13-01T00:00:00Z", "2026-11-21T00:00:00.Z"])
def test_invalid_time_is_none(text: object) -> None:
    """A platform without a value writes null, or an empty text."""
    assert times.seconds(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("PT120S", 120), ("PT2M", 120), ("P1DT1H", 90_000), ("3600s", 3600), ("1.5s", 1.5), ("2m", None), (None, None)],
)
def test_durations(text: object, seconds: float | None) -> None:
    """The formats are those of Azure's scale settings and Google's JSON."""
    assert times.duration_s(text) == seconds
