"""The stand-ins as fixtures. Every test run imports the module, therefore large modules are imported on first use."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles.aws.handle import Aws
from doubles.azure.handle import Azure
from doubles.google.handle import Google
from doubles.kit.handle import Handle
from doubles.slurm import handle as slurm_site
from doubles.sshhosts.cluster import Cluster, missing


def _server(cloud: type[Handle]) -> Any:
    """Return a fixture: the cloud's stand-in, one for the whole session, as a stand-in takes seconds to start."""

    @pytest.fixture(scope="session")
    def server() -> Iterator[Handle]:
        started = cloud.start()
        yield started
        started.stop()

    return server


def _account(server: str) -> Any:
    """Return a fixture: the stand-in as a new account; all jobs that the test leaves running are killed."""

    @pytest.fixture
    def account(request: pytest.FixtureRequest) -> Iterator[Handle]:
        double: Handle = request.getfixturevalue(server)
        double.reset()
        yield double
        double.reset()

    return account


aws_server, azure_server, google_server = _server(Aws), _server(Azure), _server(Google)
aws, azure, google = _account("aws_server"), _account("azure_server"), _account("google_server")


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


@pytest.fixture(scope="session")
def slurm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_site.Slurm]:
    """Return a Slurm with three nodes, the same for the whole session; skip the test if the machine cannot have it."""
    if reason := slurm_site.missing():
        pytest.skip(reason)
    started = slurm_site.Slurm.start(3, tmp_path_factory.mktemp("slurm") / "site")
    yield started
    started.stop()


@pytest.fixture
def slurm(slurm_server: slurm_site.Slurm) -> Iterator[slurm_site.Slurm]:
    """Return a Slurm with three idle nodes; the fixture cancels all jobs and removes all that the test leaves."""
    yield slurm_server
    slurm_server.reset()


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
