"""Errors of remote services in our messages."""

import pytest

from cloudtrain.backends import edge
from cloudtrain.entrypoints.format import one_line
from cloudtrain.entrypoints.stores.store import in_bucket
from cloudtrain.launcher.errors import CloudtrainError


def test_remote_text_is_short_and_without_secrets() -> None:
    """Newlines are removed, and so are keys and signatures in an address."""
    assert one_line("a\n  b https://x/?sig=abc&token=d&x=1 password=e") == (
        "a b https://x/?sig=...&token=...&x=1 password=..."
    )
    assert one_line("x" * 20, 10) == f"{'x' * 10}..."


def test_root_cause_of_an_error_is_reported() -> None:
    """The library's wrapper is skipped; an error without a message is reported by its type."""

    def wrap(inner: Exception) -> None:
        try:
            raise inner
        except OSError as error:
            raise RuntimeError("Max retries exceeded") from error

    with pytest.raises(RuntimeError) as found:
        wrap(ConnectionResetError())
    assert edge.cause(found.value) == "ConnectionResetError"


def test_missing_network_has_a_plain_message() -> None:
    """The message has no error number; further socket errors keep their message."""
    assert edge.cause(OSError(-2, "Name or service not known")) == edge.NO_NAME
    assert edge.cause(ConnectionRefusedError(111, "Connection refused")) == "Connection refused"


def test_cause_of_a_circle_of_errors_is_the_last_new_error() -> None:
    """A store raises the error that its wrapper contains: the search ends."""
    inner, outer = OSError("reset"), RuntimeError("lost")
    inner.__cause__, outer.__cause__ = outer, inner
    assert edge.cause(outer) == "reset"


@pytest.mark.parametrize("uri", ["gs://A/x", "s3://", "ftp://bucket/x"])
def test_stored_address_that_no_store_can_have_is_one_of_our_errors(uri: str) -> None:
    """A damaged registry may hold it: the command says so in a sentence."""
    with (
        pytest.raises(CloudtrainError, match=r"cannot list the files: .* names no bucket; write it as in"),
        edge.answers("list the files", lambda error: None),
    ):
        in_bucket(uri)
