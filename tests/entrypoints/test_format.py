"""Sums and time spans for readers."""

import random

import pytest

from cloudtrain.entrypoints.format import address, amount, counted, dollars, down, span, up, usd


@pytest.mark.parametrize(
    ("micro", "text"),
    [
        *((0, "0.00"), (1, "0.000001"), (29, "0.000029"), (44.938, "0.000045"), (629, "0.00063"), (12_345, "0.012")),
        *((172_250, "0.17"), (900_000, "0.90"), (999_901, "1.00"), (1_234_567, "1.23")),
        *((-1_500_000, "-1.50"), (10**15, "1000000000.00")),
    ],
)
def test_sum_has_cents_and_two_significant_digits(micro: float, text: str) -> None:
    """No small sum is shown as zero."""
    assert (amount(micro), dollars(micro)) == (text, f"{text} USD")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at: https://wandb.ai/me/p/runs/x1", "https://wandb.ai/me/p/runs/x1"),
        ("https://me:p%40w@host:80/#/a?workspace=b", "https://host:80/#/a"),
        ("https://me:p@w@host/a@b.", "https://host/a@b"),
        ("https://[::1]:5000/a)", "https://[::1]:5000/a"),
        ("https://me:p?w@host/a", ""),
        ("https://host/a\x1b]0;x\x07", "https://host/a"),
        ("javascript:alert(1)//http", ""),
        (f"http://h/{'a' * 9000}", f"http://h/{'a' * 999}"),
        (None, ""),
        (7, ""),
    ],
)
def test_address_has_no_secrets(text: object, shown: str) -> None:
    """A job may write any text: user, password, query and terminal codes are left out."""
    assert address(text) == shown


def test_sum_in_a_sentence_is_short() -> None:
    """Whole dollars have no cents; an unknown sum is "unknown"."""
    assert [usd(micro) for micro in (100_000_000, 12_300_000, 0)] == ["100 USD", "12.30 USD", "0 USD"]
    assert dollars(None) == "unknown"


def test_sum_is_rounded_to_the_safe_side() -> None:
    """A worst case is never rounded down, a remaining sum never up, and by less than a shown digit."""
    draw = random.Random(8)
    for micro in [0, 1, 99, 99_999, 999_999, *(round(10 ** draw.uniform(0, 12)) for _ in range(1000))]:
        low, high = down(micro), up(micro)
        assert low <= micro <= high
        assert high - low <= max(1, min(10_000, micro / 10))
        assert float(amount(low)) * 1e6 <= micro + 0.5
        assert float(amount(high)) * 1e6 >= micro - 0.5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((-5, "0s"), (0, "0s"), (59.4, "59s"), (60, "1m"), (725, "12m 5s")),
        *((3600, "1h"), (3605, "1h"), (12_000, "3h 20m"), (187_200, "2d 4h")),
    ],
)
def test_span_has_two_units_at_most(seconds: float, text: str) -> None:
    """A span shows at most its two largest units."""
    assert span(seconds) == text


def test_counted_noun_has_a_plural() -> None:
    """A single thing has the noun alone; zero and more have an s."""
    assert [counted(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
