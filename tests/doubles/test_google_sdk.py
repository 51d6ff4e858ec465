"""Unmodified clients work with Google's stand-in: Vertex AI by gRPC and REST, storage, the SDK."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from doubles import sandbox
from doubles.google.client import LOCATION, job_body
from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT, REGION

pytestmark = pytest.mark.filterwarnings("ignore")  # the clients' own warnings
needs_namespaces = pytest.mark.skipif(sandbox.mode() == "none", reason="this machine lets us make no namespaces")

ENDPOINT = f"{REGION}-aiplatform.googleapis.com"


@pytest.fixture
def connect(google: Google, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that returns a JobServiceClient, by gRPC or transport="rest"."""
    from google.cloud.aiplatform_v1 import JobServiceClient

    google.apply(monkeypatch)

    def make(**details: Any) -> Any:
        return JobServiceClient(**{"client_options": {"api_endpoint": ENDPOINT}, **details})

    return make


@pytest.fixture(params=["grpc", "rest"])
def client(request: pytest.FixtureRequest, connect: Callable[..., Any]) -> Any:
    """Return a JobServiceClient of either transport."""
    return connect(transport=request.param)


def custom_job(*command: str, **details: Any) -> Any:
    """Return a CustomJob as the client's type."""
    from google.cloud.aiplatform_v1 import CustomJob
    from google.protobuf import json_format

    body = json_format.ParseDict(job_body("job", *(command or ("true",)), **details), CustomJob.pb()())
    return CustomJob.wrap(body)


@needs_namespaces
def test_client_creates_follows_and_deletes_a_job(google: Google, client: Any) -> None:
    """Both transports work; the returned job equals the sent job."""
    from google.cloud.aiplatform_v1 import JobState

    made = client.create_custom_job(parent=LOCATION, custom_job=custom_job(labels={"a": "b"}), timeout=20)
    assert made.state in (JobState.JOB_STATE_PENDING, JobState.JOB_STATE_RUNNING)
    google.wait(made.name)
    told = client.get_custom_job(name=made.name, timeout=20)
    assert (told.state, told.job_spec) == (JobState.JOB_STATE_SUCCEEDED, made.job_spec)
    assert told.create_time <= told.start_time <= told.end_time
    found = client.list_custom_jobs(request={"parent": LOCATION, "filter": 'labels.a="b"', "page_size": 1})
    assert [job.name for job in found] == [made.name]
    client.delete_custom_job(name=made.name).result(timeout=20)
    assert google.jobs() == []
    assert google.unserved() == []


def test_client_raises_googles_errors(google: Google, client: Any) -> None:
    """Errors are exceptions of api_core, with details."""
    from google.api_core import exceptions

    google.settings(execute=False)
    made = client.create_custom_job(parent=LOCATION, custom_job=custom_job())
    client.cancel_custom_job(name=made.name)
    google.wait(made.name)
    with pytest.raises(exceptions.BadRequest, match="cannot be cancelled"):
        client.cancel_custom_job(name=made.name)
    with pytest.raises(exceptions.NotFound):
        client.get_custom_job(name=f"{made.name}1")
    with pytest.raises(exceptions.BadRequest, match="List of found errors:") as caught:
        client.create_custom_job(parent=LOCATION, custom_job=custom_job(workers=1, scheduling={"strategy": 99}))
    assert "job_spec.scheduling.strategy" in str(caught.value.details)


def test_client_raises_quota_errors(google: Google, client: Any) -> None:
    """Both transports answer 429 with the metric's name."""
    from google.api_core.exceptions import TooManyRequests

    google.settings(quotas={"custom_model_training_cpus": 3})
    with pytest.raises(TooManyRequests, match=r"aiplatform\.googleapis\.com/custom_model_training_cpus"):
        client.create_custom_job(parent=LOCATION, custom_job=custom_job())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("UNAVAILABLE", "ServiceUnavailable"),
        ("RESOURCE_EXHAUSTED", "TooManyRequests"),
        ("DEADLINE_EXCEEDED", "GatewayTimeout"),
        ("INTERNAL", "InternalServerError"),
        ("401", "Unauthorized"),
    ],
)
def test_client_raises_injected_faults(google: Google, client: Any, kind: str, name: str) -> None:
    """A fault reaches the caller once; only REST's sign-in after a 401 is retried."""
    from google.api_core import exceptions

    google.fault("jobs.get", kind, count=3 if kind == "401" else 1)
    with pytest.raises(getattr(exceptions, name)):
        client.get_custom_job(name=f"{LOCATION}/customJobs/1")
    assert {call["outcome"] for call in google.journal("jobs.get")} == {kind}


@pytest.mark.parametrize(("kind", "count"), [("drop", 0), ("lost", 1), ("late", 0)])
def test_grpc_client_reconnects_after_break(google: Google, connect: Callable[..., Any], kind: str, count: int) -> None:
    """The client sees UNAVAILABLE whether or not the job was made, and reconnects for the next call."""
    from google.api_core.exceptions import ServiceUnavailable

    google.settings(execute=False)
    google.fault("jobs.create", kind, count=1, delay_s=30 if kind == "late" else 0)
    client = connect()
    with pytest.raises(ServiceUnavailable):
        client.create_custom_job(parent=LOCATION, custom_job=custom_job(), timeout=20)
    assert len(google.jobs()) == count
    assert len(list(client.list_custom_jobs(parent=LOCATION, timeout=20))) == count


def test_hanging_call_ends_at_the_clients_timeout(google: Google, connect: Callable[..., Any]) -> None:
    """Only the client's timeout ends the call."""
    from google.api_core.exceptions import DeadlineExceeded

    google.fault("jobs.get", "hang")
    with pytest.raises(DeadlineExceeded):
        connect().get_custom_job(name=f"{LOCATION}/customJobs/1", timeout=0.5)


def test_only_rest_renews_expired_tokens(google: Google, connect: Callable[..., Any]) -> None:
    """REST signs in again by itself; gRPC raises, and a new client is needed."""
    from google.api_core.exceptions import Unauthenticated

    rest, grpc = connect(transport="rest"), connect()
    for client in (rest, grpc):
        client.list_custom_jobs(parent=LOCATION)
    google.expire_tokens()
    rest.list_custom_jobs(parent=LOCATION)
    with pytest.raises(Unauthenticated):
        grpc.list_custom_jobs(parent=LOCATION)
    connect().list_custom_jobs(parent=LOCATION)


def test_user_login_works_until_revoked(
    google: Google, connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the revocation of a `gcloud auth application-default login`, google-auth raises RefreshError."""
    from google.auth.exceptions import RefreshError

    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", google.user_file)
    connect(transport="rest").list_custom_jobs(parent=LOCATION)
    google.settings(refresh_revoked=True)
    with pytest.raises(RefreshError, match="invalid_grant"):
        connect(transport="rest").list_custom_jobs(parent=LOCATION)


def test_direct_ports_serve_both_transports(google: Google, connect: Callable[..., Any]) -> None:
    """The ports work without TLS and proxy, as for `endpoints` of a config; tokens are needed too."""
    import grpc
    from google.cloud.aiplatform_v1.services.job_service.transports import JobServiceGrpcTransport

    url = google.endpoints["aiplatform"]
    rest = connect(transport="rest", client_options={"api_endpoint": url})
    assert list(rest.list_custom_jobs(parent=LOCATION)) == []
    token = [("authorization", f"Bearer {google.client.token()}")]
    with grpc.insecure_channel(url.removeprefix("http://")) as channel:
        insecure = connect(transport=JobServiceGrpcTransport(channel=channel))
        assert list(insecure.list_custom_jobs(parent=LOCATION, metadata=token)) == []


@needs_namespaces
@pytest.mark.slow
def test_replica_uses_the_clients_with_its_own_account(google: Google, home: Any) -> None:
    """A replica reaches Storage and Vertex AI under their real names, with the metadata server's token."""
    script = f"""
from google.cloud import aiplatform_v1, storage
storage.Client().bucket("{BUCKET}").blob("out/a").upload_from_string("from inside")
client = aiplatform_v1.JobServiceClient(client_options={{"api_endpoint": "{ENDPOINT}"}})
print([job.display_name for job in client.list_custom_jobs(parent="{LOCATION}")])
"""
    google.submit("job", "python3", "-c", script)
    assert google.wait("job")["state"] == "JOB_STATE_SUCCEEDED", google.log("job")
    assert (google.log("job"), google.object("out/a")) == ("['job']\n", b"from inside")
    assert {call["is_from_container"] for call in google.journal("storage.insert")} == {True}
    assert google.unserved() == []


@needs_namespaces
@pytest.mark.slow
def test_replicas_train_under_torchrun(google: Google, home: Any) -> None:
    """Two machines meet at the platform's MASTER_ADDR, and both have the sum."""
    script = "import torch.distributed as dist, torch\ndist.init_process_group('gloo')\nx = torch.ones(1)\n"
    script += "dist.all_reduce(x)\nprint('sum', int(x), dist.get_rank(), flush=True)\ndist.destroy_process_group()\n"
    command = (
        'printf %s "$SCRIPT" > train.py; exec python3 -m torch.distributed.run --nnodes=2 --node-rank=$RANK '
        "--nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=x --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT "
        "--rdzv-conf=is_host=$((1 - RANK)) --local-addr=$HOSTNAME train.py"
    )
    google.submit("job", "sh", "-c", command, workers=1, env={"SCRIPT": script, "OMP_NUM_THREADS": "1"})
    assert google.wait("job", timeout_s=120)["state"] == "JOB_STATE_SUCCEEDED", google.log("job")
    assert sorted(line for line in google.log("job").splitlines() if line.startswith("sum")) == ["sum 2 0", "sum 2 1"]


@needs_namespaces
@pytest.mark.slow
def test_high_level_sdk_runs_a_job(google: Google, home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """aiplatform.CustomJob runs without uploads, and waits for the end."""
    from google.cloud import aiplatform

    google.apply(monkeypatch)
    aiplatform.init(project=PROJECT, location=REGION, staging_bucket=f"gs://{BUCKET}")
    pool = {"machine_spec": {"machine_type": "n1-standard-4"}, "replica_count": 1}
    pool["container_spec"] = {"image_uri": "x:1", "command": ["sh", "-c", "echo trained"]}
    job = aiplatform.CustomJob(display_name="job", worker_pool_specs=[pool])
    begun = time.monotonic()
    job.run(sync=True, timeout=60)
    assert (job.state.name, google.log("job")) == ("JOB_STATE_SUCCEEDED", "trained\n")
    assert time.monotonic() - begun < 60
    assert google.unserved() == []
