"""The stand-ins as fixtures. Every test run imports the module, therefore large modules are imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles.aws.handle import Aws
from doubles.azure.handle import Azure
from doubles.google.handle import Google
from doubles.sshhosts.cluster import Cluster, missing

__all__ = ["aws", "aws_server", "azure", "azure_server", "cluster", "google", "google_server", "ssh_pair", "ssh_server"]


@pytest.fixture(scope="session")
def aws_server() -> Iterator[Aws]:
    """Return AWS's stand-in, one for the whole session: it takes seconds to start."""
    started = Aws.start()
    yield started
    started.stop()


@pytest.fixture
def aws(aws_server: Aws) -> Iterator[Aws]:
    """Return AWS's stand-in as a new account; all jobs that the test leaves running are killed."""
    aws_server.reset()
    yield aws_server
    aws_server.reset()


@pytest.fixture(scope="session")
def azure_server() -> Iterator[Azure]:
    """Return Azure ML's stand-in, one for the whole session."""
    started = Azure.start()
    yield started
    started.stop()


@pytest.fixture
def azure(azure_server: Azure) -> Iterator[Azure]:
    """Return Azure ML's stand-in as a new tenant; all jobs that the test leaves running are killed."""
    azure_server.reset()
    yield azure_server
    azure_server.reset()


@pytest.fixture(scope="session")
def google_server() -> Iterator[Google]:
    """Return Google's stand-in, one for the whole session."""
    started = Google.start()
    yield started
    started.stop()


@pytest.fixture
def google(google_server: Google) -> Iterator[Google]:
    """Return Google's stand-in as a new project; all jobs that the test leaves running are killed."""
    google_server.reset()
    yield google_server
    google_server.reset()


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return two hosts with sshd, the same for the whole session; skip the test if the machine cannot have hosts."""
    _skip_without_hosts()
    started = Cluster.start(2, tmp_path_factory.mktemp("hosts") / "pair")
    yield started
    started.stop()


@pytest.fixture
def ssh_pair(ssh_server: Cluster) -> Iterator[Cluster]:
    """Return two hosts with sshd, h0 and h1, in a new state; the fixture removes all that the test leaves behind."""
    yield ssh_server
    ssh_server.reset()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Return a function that starts a number of hosts with sshd: `cluster(16)`, with the options of Cluster.start."""
    _skip_without_hosts()
    started: list[Cluster] = []

    def start(count: int, **options: Any) -> Cluster:
        started.append(Cluster.start(count, tmp_path / f"hosts-{len(started)}", **options))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def _skip_without_hosts() -> None:
    if reason := missing():
        pytest.skip(reason)
