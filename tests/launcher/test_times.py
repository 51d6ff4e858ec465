"""Times and durations in the formats of the platforms."""

import pytest

from cloudtrain.launcher.text import times


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
