"""The network fails at each request of a submit, on all clouds: each row can be removed, no money stays reserved."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import urllib3.connectionpool
from conftest import Result
from urllib3.exceptions import NewConnectionError

from cloudtrain.backends.azureml import jobs as azure_jobs
from cloudtrain.backends.vertex import jobs as vertex_jobs
from cloudtrain.backends.vertex import logs
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import cli as command_line
from cloudtrain.launcher.backend import LogPage
from cloudtrain.launcher.jobs import refresh
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.database import Database
from doubles.aws.handle import REGION as AWS_REGION
from doubles.aws.handle import ROLE, Aws
from doubles.azure.handle import Azure
from doubles.azure.names import GROUP, REGION, SUBSCRIPTION, WORKSPACE
from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT
from doubles.google.names import REGION as GOOGLE_REGION

Kind = Literal["refused", "reset", "lost"]
DEFAULT_BUCKET = f"sagemaker-{AWS_REGION}-{ROLE.split(':')[4]}"
CLOUDS = ("sagemaker", "azureml", "vertex")


Run = Callable[..., Result]


class Network:
    """The network below all clients of this process: cut from the request number `cut` on, None for never."""

    def __init__(self) -> None:
        self.count = 0
        self.cut: int | None = None
        self.kind: Kind = "refused"
        self.urls: list[str] = []
        self._real = urllib3.connectionpool.HTTPConnectionPool._make_request

    def request(self, pool: Any, connection: Any, method: str, url: str, **details: Any) -> Any:
        """Pass the request on, or cut the network before the request or after the answer."""
        self.count += 1
        self.urls.append(f"{method} {pool.host}{url}"[:110])
        if self.cut is None or self.count < self.cut:
            return self._real(pool, connection, method, url, **details)
        if self.kind == "lost" and self.count == self.cut:
            self._real(pool, connection, method, url, **details).read()
        if self.kind == "refused":
            raise NewConnectionError(connection, "[Errno 111] Connection refused")
        raise ConnectionResetError(104, "Connection reset by peer")

    def heal(self) -> None:
        """Bring the network back, and count from 0."""
        self.cut, self.count, self.urls = None, 0, []


@dataclass(frozen=True)
class Cloud:
    """A cloud's stand-in: `jobs` returns the names of the running jobs, `empty` removes a bucket of a submit."""

    folder: Path
    jobs: Callable[[], list[str]]
    empty: Callable[[], None]

    def renew(self, number: int) -> None:
        """Make the next submit a first submit: without our bucket, and with code that is new to the cloud."""
        self.empty()
        (self.folder / "loop.py").write_text(f"print({number})\n")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """Return the network of this same process, in which clients retry almost without a pause."""
    made, real = Network(), time.sleep
    pool = urllib3.connectionpool.HTTPConnectionPool
    monkeypatch.setattr(pool, "_make_request", lambda self, *args, **more: made.request(self, *args, **more))
    monkeypatch.setattr(time, "sleep", lambda seconds: real(min(seconds, 0.001)))
    monkeypatch.setattr(azure_jobs, "SETTLE_S", 0.0)
    monkeypatch.setattr(vertex_jobs, "PAUSE_S", 0.0)
    monkeypatch.setattr(refresh, "MOST_LATE_S", 0.0)
    monkeypatch.setattr(logs.LogReader, "page", lambda *_, **__: LogPage([], {}))  # no job has run or printed
    return made


@pytest.fixture
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Cloud:
    """Return the named cloud and a project for the cloud; no job ever begins."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "loop.py").write_text("print('x')\n")
    jobs: Callable[[], list[str]]

    def empty() -> None:
        """Keep the bucket: on this cloud a submit makes no bucket."""

    if request.param == "sagemaker":
        aws: Aws = request.getfixturevalue("account")
        aws.settings(execute=False)
        block = f'resources: {{instance_type: ml.g5.xlarge}}\nsagemaker: {{role: "{ROLE}"}}\n'

        def jobs() -> list[str]:
            pages = aws.client("sagemaker").get_paginator("list_training_jobs").paginate()
            found = [job for page in pages for job in page["TrainingJobSummaries"]]
            return [job["TrainingJobName"] for job in found if job["TrainingJobStatus"] == "InProgress"]

        def empty() -> None:
            s3 = aws.client("s3")
            if DEFAULT_BUCKET in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
                for item in s3.list_objects_v2(Bucket=DEFAULT_BUCKET).get("Contents", ()):
                    s3.delete_object(Bucket=DEFAULT_BUCKET, Key=item["Key"])
                s3.delete_bucket(Bucket=DEFAULT_BUCKET)
    elif request.param == "azureml":
        azure: Azure = request.getfixturevalue("azure_account")
        azure.settings(execute=False)
        where = f"subscription: {SUBSCRIPTION}, resource_group: {GROUP}, workspace: {WORKSPACE}, region: {REGION}"
        block = f"resources: {{instance_type: Standard_NC4as_T4_v3}}\nazureml: {{{where}, identity: managed}}\n"
        jobs = azure.jobs
    else:
        google: Google = request.getfixturevalue("google_project")
        google.settings(execute=False)
        where = f"project: {PROJECT}, location: {GOOGLE_REGION}, staging_bucket: {BUCKET}"
        where += f", endpoints: {{aiplatform: {google.endpoints['aiplatform']}}}"
        block = f"resources: {{instance_type: n1-standard-4}}\nvertex: {{{where}}}\n"

        def jobs() -> list[str]:
            return [job["display_name"] for job in google.jobs() if "CANCEL" not in job["state"]]

    config = (
        f"name: j\nbackend: {request.param}\nscript: loop.py\nlimits: {{max_duration: 1h}}\nsecrets: [TOKEN]\n{block}"
    )
    (folder / "cloudtrain.yaml").write_text(config)
    return Cloud(folder, jobs, empty)


@pytest.fixture
def run(cloud: Cloud, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Return the command, run in this process without the clients and tokens of earlier calls."""
    monkeypatch.setenv("TOKEN", "sesame-open")
    monkeypatch.chdir(cloud.folder)

    def call(*args: str) -> Result:
        backends._made.cache_clear()
        capsys.readouterr()
        code = command_line._run(list(args), debug=False, as_json="--json" in args)
        return Result(code, *capsys.readouterr())

    yield call
    backends._made.cache_clear()


def held(home: Path) -> list[str]:
    """Return the jobs for which money is reserved."""
    database = Database(home)
    try:
        return [each.job_id for each in ledger.held(database)]
    finally:
        database.close()


def shown(run: Run) -> list[str]:
    """Return the jobs that a list names."""
    found = run("list", "--json")
    assert found.code == 0, found.stderr
    return [job["job"] for job in found.json["jobs"]]


def see_it_settled(run: Run, cloud: Cloud, network: Network, home: Path, name: str, *, forgets: bool) -> str:
    """Check row and money of a submit that the network has cut off; return the outcome."""
    there = f"{name}-1"
    if held(home):  # the request that creates the job had begun
        stopped = run("stop", name)
        assert (stopped.code, "--forget" in stopped.stderr) == (7, True), stopped.stderr
        assert there in stopped.stderr
        if forgets:
            assert run("stop", "--forget", "-y", name).code == 0
            assert held(home) == []
    elif name in shown(run):
        assert run("status", name).stdout.startswith(f"{name}  not sent")
    network.heal()
    exists = there in cloud.jobs()
    if exists:
        stopped = run("stop", "-d", name)
        assert (stopped.code, f"stopping {name}" in stopped.stderr) == (0, True), stopped.stderr
        assert run("status", name, "--json").json["state"] in ("stopping", "stopped")
        return "forgotten, and stopped" if forgets else "stopped"
    if name in shown(run):
        assert run("status", name).stdout.startswith(f"{name}  not sent")
    assert held(home) == []
    again = run("submit", "-d", "-y", "--name", name)
    assert again.code == 0, again.stderr
    assert [job for job in cloud.jobs() if job.startswith(name)] != []
    return "not sent"


def cut_everywhere(
    run: Run, cloud: Cloud, network: Network, home: Path, kind: Kind, *, is_first: bool
) -> tuple[list[str], list[str]]:
    """Cut the network at each request of a submit in turn; return the outcomes, and the requests that were cut.

    `is_first`: each submit finds no bucket and no code of an earlier submit.
    """
    assert run("submit", "-d", "-y", "--name", "whole").code == 0
    network.heal()
    assert run("submit", "-d", "-y", "--name", "second").code == 0  # the code is uploaded already
    database = Database(home)
    found, cut = [], []
    for number in itertools.count(1):
        name = f"{kind}-{number}"
        database.execute("UPDATE reservations SET state = 'settled', spent_micro = 0 WHERE state = 'held'")
        database.execute("UPDATE attempts SET state = 'stopped', outcome = '{\"state\": \"stopped\"}'")
        if is_first:
            cloud.renew(number)
        network.heal()
        network.cut, network.kind = number, kind
        done = run("submit", "-d", "-y", "--name", name)
        if network.count < number:  # the submit has no further request
            break
        cut.append(network.urls[number - 1])
        if done.code == 0:
            assert kind == "lost", (name, network.urls)
        else:
            told = ("nothing was sent, and nothing is reserved", f"{name} may have been sent")
            is_login = done.code == 4 and "az login" in done.stderr  # Azure's library reports a failed sign-in
            assert is_login or (done.code == 7 and sum(words in done.stderr for words in told) == 1), (name, done)
            assert (told[1] not in done.stderr) == (held(home) == []), (name, done.stderr)
        found.append(see_it_settled(run, cloud, network, home, name, forgets=number % 2 == 0))
    database.close()
    return found, cut


def row(cloud: str, kind: Kind, is_first: bool) -> Any:
    """Return the parameters of a set of cuts; `make test` has lost answers, which may leave a job, on one cloud."""
    is_here = is_first and (cloud, kind) == ("vertex", "lost")
    name = f"{kind}-first" if is_first else kind
    return pytest.param(
        cloud, kind, is_first, id=f"{name}-{cloud}", marks=getattr(pytest.mark, "slow" if is_here else "soak")
    )


@pytest.mark.parametrize(
    ("cloud", "kind", "is_first"),
    [row(cloud, kind, first) for kind in get_args(Kind) for first in (True, False) for cloud in CLOUDS],
    indirect=["cloud"],
)
def test_cut_at_each_request_leaves_no_row_and_no_money(
    run: Run, cloud: Cloud, network: Network, home: Path, kind: Kind, is_first: bool
) -> None:
    """Either the job exists and `stop` ends the job, or the row says `not sent` and a retry of the name works."""
    found, cut = cut_everywhere(run, cloud, network, home, kind, is_first=is_first)
    print(kind, found, *cut, sep="\n")
    is_made = any(request.startswith("PUT") and request.endswith(f"/{DEFAULT_BUCKET}") for request in cut)
    assert is_made == (is_first and DEFAULT_BUCKET in "".join(cut))
    assert found.count("not sent") >= 3
    assert (kind == "lost") == any("stopped" in each for each in found)
