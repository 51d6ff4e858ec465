"""Azure's stand-in injects faults on request."""

import pytest

from doubles.azure.client import job_body
from doubles.azure.handle import Azure
from doubles.azure.names import REGION, workspace_id

HISTORY = f"https://{REGION}.api.azureml.ms/history/v1.0{workspace_id()}/runs"


@pytest.mark.parametrize(("kind", "jobs", "status"), [("drop", [], 201), ("lost", ["job"], 200)])
def test_only_a_call_with_lost_answer_is_executed(azure: Azure, kind: str, jobs: list[str], status: int) -> None:
    """The client sees a broken connection, whether or not the job exists; a repeated PUT changes no existing job."""
    azure.settings(execute=False)
    azure.fault("jobs.put", kind, count=1)
    with pytest.raises(OSError, match=r"closed|reset|EOF"):
        azure.submit("job", "true")
    assert azure.jobs() == jobs
    assert azure.client.submit("job", job_body("true"), {"empty.txt": ""}).status == status
    other = azure.client.submit("job", job_body("false"), {"empty.txt": ""})
    assert (other.status, "already exists" in other.json["error"]["message"]) == (400, True)


def test_signatures_expire_on_demand(azure: Azure) -> None:
    """Signatures issued before the fault are refused, and run history issues new signatures."""
    azure.settings(execute=False)
    azure.submit("job", "true")
    azure.write_log("job", "user_logs/std_log.txt", "line\n")

    def url() -> str:
        return azure.call("GET", f"{HISTORY}/job/details").json["logFiles"]["user_logs/std_log.txt"]

    old = url()
    azure.fault("blob.get", "sas_expired")
    refused = azure.call("GET", old, audience=None)
    assert (refused.status, refused.headers["x-ms-error-code"]) == (403, "AuthenticationFailed")
    assert azure.call("GET", url(), audience=None).body == b"line\n"
