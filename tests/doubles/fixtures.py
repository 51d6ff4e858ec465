"""The stand-ins as fixtures. Imported by every test run, so nothing heavy is imported before it is used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from doubles.aws import handle
from doubles.aws.handle import Aws

__all__ = ["aws", "aws_server"]


@pytest.fixture(scope="session")
def aws_server() -> Iterator[Aws]:
    """Return AWS's stand-in, one for the whole session: it takes seconds to start."""
    started = handle.start()
    yield started
    handle.stop(started)


@pytest.fixture
def aws(aws_server: Aws) -> Iterator[Aws]:
    """Return AWS's stand-in as a new account; whatever the test has left running is killed."""
    aws_server.reset()
    yield aws_server
    aws_server.reset()
