"""The unmodified client of Vertex AI's jobs works with Google's stand-in, by gRPC and REST."""

from typing import Any

import pytest

from doubles import sandbox
from doubles.google.client import LOCATION, job_body
from doubles.google.handle import Google
from doubles.google.names import REGION

pytestmark = pytest.mark.filterwarnings("ignore")  # the clients' own warnings
needs_namespaces = pytest.mark.skipif(sandbox.mode() == "none", reason="this machine lets us make no namespaces")

ENDPOINT = f"{REGION}-aiplatform.googleapis.com"


@pytest.fixture(params=["grpc", "rest"])
def client(request: pytest.FixtureRequest, google: Google, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a JobServiceClient of either transport."""
    from google.cloud.aiplatform_v1 import JobServiceClient

    google.apply(monkeypatch)
    return JobServiceClient(client_options={"api_endpoint": ENDPOINT}, transport=request.param)


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
    google.settings(quotas={"custom_model_training_cpus": 3})
    with pytest.raises(exceptions.TooManyRequests, match=r"aiplatform\.googleapis\.com/custom_model_training_cpus"):
        client.create_custom_job(parent=LOCATION, custom_job=custom_job())
