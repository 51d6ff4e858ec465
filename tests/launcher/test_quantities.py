"""The figures of a job in short form."""

from __future__ import annotations

import pytest

from cloudtrain.launcher.text.units import percent, quantity, size, step_time


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ([percent(share) for share in (0.0, 0.004, 0.126, 0.999, 1.0)], ["0 %", "<1 %", "13 %", "99 %", "100 %"]),
        (
            [quantity(value) for value in (0.0, 2.31e-4, 0.12345, 20480.0, -3e6)],
            ["0", "2.31e-04", "0.1235", "20.5k", "-3M"],
        ),
        ([step_time(seconds) for seconds in (0.05, 1.254)], ["50 ms", "1.25 s"]),
        ([size(count) for count in (4.24e8, 13.2e9)], ["404 MiB", "12.3 GiB"]),
    ],
)
def test_figures_are_short_and_never_overstate(text: list[str], wanted: list[str]) -> None:
    """A share below 1 is never 100 %, and a share above 0 is never 0 %."""
    assert text == wanted
