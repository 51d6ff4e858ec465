"""The stand-ins as fixtures. Imported by every test run, so nothing heavy is imported before it is used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from doubles.aws import handle
from doubles.aws.handle import Aws
from doubles.azure import handle as azure_handle
from doubles.azure.handle import Azure

__all__ = ["aws", "aws_server", "azure", "azure_server"]


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


@pytest.fixture(scope="session")
def azure_server() -> Iterator[Azure]:
    """Return Azure ML's stand-in, one for the whole session."""
    started = azure_handle.start()
    yield started
    azure_handle.stop(started)


@pytest.fixture
def azure(azure_server: Azure) -> Iterator[Azure]:
    """Return Azure ML's stand-in as a new tenant; whatever the test has left running is killed."""
    azure_server.reset()
    yield azure_server
    azure_server.reset()
