"""Google's stand-in injects faults on request, and records all calls."""

import http.client
import time
import urllib.parse

import pytest

from doubles import sandbox
from doubles.google.client import job_body
from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT, REGION

OBJECT = f"https://storage.googleapis.com/storage/v1/b/{BUCKET}/o/a"
needs_namespaces = pytest.mark.skipif(sandbox.mode() == "none", reason="this machine lets us make no namespaces")


def create(google: Google, name: str = "job") -> int:
    """Create a job that is not executed; return the answer's status."""
    google.settings(execute=False)
    return google.call("POST", "/customJobs", job_body(name, "true")).status


def test_reset_cancels_late_calls(google: Google) -> None:
    """A late call of one test has no effect in the next test."""
    google.fault("jobs.create", "late", delay_s=0.3)
    with pytest.raises(OSError, match=r"closed|reset|EOF"):
        create(google)
    google.reset()
    time.sleep(0.4)
    assert google.jobs() == []


def test_calls_need_a_token(google: Google) -> None:
    """Only a token of the stand-in that has not expired is accepted."""
    url = "/customJobs"
    missing = google.call("GET", url, is_signed_in=False)
    assert (missing.status, missing.json["error"]["status"]) == (401, "UNAUTHENTICATED")
    made_up = {"Authorization": "Bearer ya29.e30.c2ln"}
    assert google.call("GET", url, is_signed_in=False, headers=made_up).status == 401
    google.settings(token_s=0.2)
    short = {"Authorization": f"Bearer {google.client.token()}"}
    assert google.call("GET", url, is_signed_in=False, headers=short).status == 200
    time.sleep(0.3)
    assert google.call("GET", url, is_signed_in=False, headers=short).status == 401


def replica_get(google: Google) -> str:
    """Run a job that requests an object with its own account; return the answer's status."""
    script = """
import os, requests
url = f"http://{os.environ['GCE_METADATA_HOST']}/computeMetadata/v1/instance/service-accounts/default/token"
token = requests.get(url, headers={"Metadata-Flavor": "Google"}).json()["access_token"]
print(requests.get("%s", headers={"Authorization": f"Bearer {token}"}).status_code)
"""
    job = google.submit("job", "python3", "-c", script % OBJECT)
    google.wait(job)
    return google.log(job).strip()


@needs_namespaces
def test_faults_spare_replicas_by_default(google: Google) -> None:
    """Calls from replicas succeed, unless the fault includes containers."""
    google.put_object("a", "1")
    google.fault("storage.get", "500")
    assert replica_get(google) == "200"
    google.fault("storage.get", "403", containers=True)
    assert replica_get(google) == "403"
    assert google.call("GET", OBJECT).status == 500


def test_metadata_server_answers_only_replicas(google: Google) -> None:
    """The user's machine has no metadata server."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(google.url).netloc)
    path = "/computeMetadata/v1/instance/service-accounts/default/token"
    connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
    assert connection.getresponse().status == 502
    connection.close()


def test_unserved_calls_are_recorded(google: Google) -> None:
    """Calls to unknown hosts and paths are recorded."""
    vertex = f"https://{REGION}-aiplatform.googleapis.com/v1/projects/{PROJECT}/locations/{REGION}"
    assert google.call("GET", f"{vertex}/endpoints").status == 404
    with pytest.raises(OSError, match="502"):
        google.call("GET", "https://compute.googleapis.com/compute/v1")
    assert google.unserved() == [
        f"{REGION}-aiplatform.googleapis.com/v1/projects/{PROJECT}/locations/{REGION}/endpoints",
        "compute.googleapis.com",
    ]
