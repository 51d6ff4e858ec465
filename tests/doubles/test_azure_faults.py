"""Azure's stand-in injects faults on request, and records all calls."""

import time
from http.client import IncompleteRead
from pathlib import Path

import pytest

from doubles.azure.client import job_body
from doubles.azure.handle import Azure
from doubles.azure.names import ACCOUNT, CONTAINER, REGION, workspace_id
from doubles.waiting import new_mark, sleepers, until

HISTORY = f"https://{REGION}.api.azureml.ms/history/v1.0{workspace_id()}/runs"
BLOB = f"https://{ACCOUNT}.blob.core.windows.net/{CONTAINER}/a"
STORAGE = "https://storage.azure.com"


def test_throttling_ends_after_its_count(azure: Azure) -> None:
    """The error has Retry-After; after the requested number of errors, calls succeed again."""
    azure.fault("computes.list", "throttle", count=2, retry_after="3")
    answers = [azure.call("GET", "/computes") for _ in range(3)]
    assert [answer.status for answer in answers] == [429, 429, 200]
    assert answers[0].headers["retry-after"] == "3"
    assert answers[0].json["error"]["code"] == "TooManyRequests"


def test_storage_errors_have_the_format_of_storage(azure: Azure) -> None:
    """Storage answers 503 in its own format, until the fault is cleared."""
    azure.put_blob("a", "1")
    azure.fault("blob.get", "503")
    busy = azure.call("GET", BLOB, audience=STORAGE)
    assert (busy.status, busy.headers["x-ms-error-code"]) == (503, "ServerBusy")
    azure.clear_faults()
    assert azure.call("GET", BLOB, audience=STORAGE).status == 200


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


def test_cut_answer_ends_in_the_middle(azure: Azure) -> None:
    """The client receives half of the body."""
    azure.put_blob("a", "0123456789")
    azure.fault("blob.get", "cut", count=1)
    with pytest.raises(IncompleteRead):
        azure.call("GET", BLOB, audience=STORAGE)


def test_tokens_expire_on_demand(azure: Azure) -> None:
    """Tokens issued before the fault are refused, and a new token works."""
    old = {"Authorization": f"Bearer {azure.client.token('https://management.azure.com')}"}
    url = f"https://management.azure.com{workspace_id()}/computes"
    azure.fault("*", "expired")
    for _ in range(2):
        refused = azure.call("GET", url, audience=None, headers=old)
        assert (refused.status, refused.json["error"]["code"]) == (401, "ExpiredAuthenticationToken")
    assert azure.call("GET", url).status == 200


def test_tokens_expire_after_their_lifetime(azure: Azure) -> None:
    """Tokens expire after the time in the settings."""
    azure.settings(token_s=0.2)
    old = {"Authorization": f"Bearer {azure.client.token('https://management.azure.com')}"}
    time.sleep(0.3)
    url = f"https://management.azure.com{workspace_id()}/computes"
    assert azure.call("GET", url, audience=None, headers=old).status == 401


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


def test_injected_error_has_the_given_code_and_message(azure: Azure) -> None:
    """The requested error is answered in the service's own format."""
    message = "The vCPU quota of the family standardNCADSA100v4Family is exceeded."
    azure.fault("jobs.put", "error", status=400, code="QuotaExceeded", message=message)
    refused = azure.client.submit("job", job_body("true"), {"empty.txt": ""})
    assert refused.status == 400
    assert refused.json["error"] == {"code": "QuotaExceeded", "message": message}


def test_slow_answer_is_delayed(azure: Azure) -> None:
    """The answer arrives after the requested delay."""
    azure.fault("computes.list", "slow", delay_s=0.3, count=1)
    begun = time.monotonic()
    assert azure.call("GET", "/computes").status == 200
    assert time.monotonic() - begun >= 0.3


def test_faults_spare_containers_by_default(azure: Azure) -> None:
    """Calls from containers succeed, unless the fault includes containers."""
    azure.put_blob("a", "1")
    azure.fault("blob.get", "500")
    script = (
        "import os, requests\n"
        "told = {'api-version': '2017-09-01', 'resource': 'https://storage.azure.com'}\n"
        "header = {'secret': os.environ['MSI_SECRET']}\n"
        "token = requests.get(os.environ['MSI_ENDPOINT'], params=told, headers=header).json()['access_token']\n"
        f"print(requests.get('{BLOB}', headers={{'Authorization': 'Bearer ' + token}}).status_code)\n"
    )
    azure.submit("job", "python get.py", {"get.py": script}, identity={"identityType": "Managed"})
    azure.wait("job")
    assert azure.log("job") == "200\n"
    assert azure.call("GET", BLOB, audience=STORAGE).status == 500


def test_journal_records_request_and_answer(azure: Azure) -> None:
    """The journal has operation, range, bytes of the answer, and status."""
    azure.put_blob("a", "0123456789")
    azure.call("GET", BLOB, audience=STORAGE, headers={"x-ms-range": "bytes=4-"})
    call = azure.journal("blob.get")[0]
    told = {name: call[name] for name in ("host", "range", "status", "sent", "outcome", "is_from_container")}
    assert told == {
        "host": f"{ACCOUNT}.blob.core.windows.net",
        "range": "bytes=4-",
        "status": 206,
        "sent": 6,
        "outcome": "ok",
        "is_from_container": False,
    }


def test_reset_removes_all_state(azure: Azure) -> None:
    """Reset removes jobs, blobs and recorded calls, even while a job runs."""
    azure.submit("job", "sleep 100")
    azure.wait("job", "Running")
    azure.put_blob("a", "1")
    azure.reset()
    assert (azure.jobs(), azure.blobs(), azure.journal()) == ([], [], [])


def test_killed_stand_in_leaves_no_containers_or_folders(tmp_path: Path) -> None:
    """A killed stand-in leaves neither containers nor folders."""
    own, mark = Azure.start(tmp_path / "state"), new_mark()
    try:
        own.submit("job", f"sleep {mark}")
        until(lambda: sleepers(mark))
        own.process.kill()
        until(lambda: not sleepers(mark) and not (tmp_path / "state").exists())
    finally:
        own.stop()
