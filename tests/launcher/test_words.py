"""Other people's words in our sentences."""

from __future__ import annotations

import pytest

from cloudtrain.launcher.text import remote


def test_text_is_short_plain_and_lets_nobody_in() -> None:
    """Line ends go, and so do keys and signatures in an address."""
    assert remote.one_line("a\n  b https://x/?sig=abc&token=d&x=1 password=e") == (
        "a b https://x/?sig=...&token=...&x=1 password=..."
    )
    assert remote.one_line("x" * 20, 10) == f"{'x' * 10}..."


def test_root_of_an_error_is_told() -> None:
    """Not the library's own wrapping; of one without words its kind."""

    def wrap(inner: Exception) -> None:
        try:
            raise inner
        except OSError as error:
            raise RuntimeError("Max retries exceeded") from error

    with pytest.raises(RuntimeError) as found:
        wrap(ConnectionResetError())
    assert remote.cause(found.value) == "ConnectionResetError"


def test_missing_network_is_said_in_plain_words() -> None:
    """Not by its number; another fault of a socket keeps its words."""
    assert remote.cause(OSError(-2, "Name or service not known")) == remote.NO_NAME
    assert remote.cause(ConnectionRefusedError(111, "Connection refused")) == "Connection refused"
