"""Submits to Vertex AI with the command and Google's own clients: always a single job, despite any fault."""

import json
import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.oauth2.credentials import Credentials

from cloudtrain.backends.vertex import api, files, jobs
from cloudtrain.backends.vertex.api import VertexAccess
from cloudtrain.launcher.jobs import queue
from cloudtrain.launcher.store.registry import Registry
from doubles.google.handle import Google
from doubles.google.names import BUCKET, NUMBER, PROJECT, REGION
from doubles.waiting import until

ACCESS = VertexAccess(PROJECT, REGION)
CONFIG = f"""\
name: j
backend: vertex
script: loop.py
resources: {{instances: 2, instance_type: n1-standard-4}}
limits: {{max_duration: 1h}}
vertex: {{project: {PROJECT}, location: {REGION}, staging_bucket: {BUCKET}}}
"""
SUBMIT = ("submit", "-d", "-y")
SECRET, TOKEN = ("--set", "secrets=[TOKEN]"), {"TOKEN": "sesame-open"}


@pytest.fixture(autouse=True)
def jobs_never_end(google_project: Google) -> None:
    """Start no container: a job keeps its state until the test changes the state."""
    google_project.settings(execute=False)


def active(google: Google) -> list[str]:
    """Return the names of the jobs that have neither ended nor begun to end."""
    over = ("SUCCEEDED", "FAILED", "CANCELLED", "CANCELLING")
    return [job["display_name"] for job in google.jobs() if job["state"].removeprefix("JOB_STATE_") not in over]


def body_of(google: Google, job: str) -> dict[str, Any]:
    """Return the job in the service's form."""
    return google.job(job)["body"]


def order_of(google: Google, job: str, attempt: int = 1) -> dict[str, Any]:
    """Return the order for the job's replicas."""
    return json.loads(google.object(f"cloudtrain/jobs/{job}/attempt-{attempt}/order.json") or "")


def fences(body: dict[str, Any]) -> set[str]:
    """Return the marks in the arguments of a job's pools."""
    return {pool["containerSpec"]["args"][2] for pool in body["jobSpec"]["workerPoolSpecs"]}


def end(google: Google, job: str) -> None:
    """End the job, after the end events of both containers."""
    google.write_ends(job)
    google.end(job)


def test_request_equals_the_dry_run(vertex: Any, folder: Path, google: Google, tmp_path: Path) -> None:
    """Only name, owner, mark and token differ; the code is uploaded once."""
    written = tmp_path / "written"
    dry = yaml.safe_load(vertex("submit", "--dry-run", "-o", written, cwd=folder).stdout)
    planned = json.loads((written / "order.json").read_text())
    assert [vertex(*SUBMIT, "--name", name, cwd=folder).code for name in ("one", "two")] == [0, 0]
    body, order = body_of(google, "one-1"), order_of(google, "one")
    assert fences(body) == {order["fence"]}
    own = {"cloudtrain_run": "one-1", "cloudtrain_job": "one", "cloudtrain_owner": body["labels"]["cloudtrain_owner"]}
    assert body["labels"] == {**dry["labels"], **own}
    assert {**order, "job": "", "fence": "", "token": ""}.keys() - {
        "token",
        "sent_s",
        "record",
        "claim_uri",
    } == planned.keys()
    # The job's own clock begins after the fetch of the image, which the hour may include; the unused rest is returned.
    assert abs(time.time() - order["sent_s"]) < 60
    assert (order["job"], order["run"], order["max_duration_s"]) == ("one", planned["run"], 3600 - 300)
    commands = [pool["containerSpec"]["command"] for spec in (body, dry) for pool in spec["jobSpec"]["workerPoolSpecs"]]
    assert all(command == commands[0] for command in commands)
    assert body["jobSpec"]["scheduling"]["timeout"] == "3600s"
    other = order_of(google, "two")
    assert len({order["fence"], order["token"], other["fence"], other["token"]}) == 4
    uploads = [call for call in google.journal("storage.insert") if call["received"] > 100_000]
    assert [call["query"].get("ifGenerationMatch") for call in uploads] == ["0"]
    assert ([job["display_name"] for job in google.jobs()], google.unserved()) == (["one-1", "two-1"], [])
    assert len(google.journal("jobs.create")) == 2


def test_code_uploaded_by_a_second_submit_is_kept(google_project: Google, tmp_path: Path) -> None:
    """Both submits have the same bytes, or one of them has no right to the name."""
    path = tmp_path / "code"
    path.write_bytes(b"mine")
    uri = google_project.put_object("code", b"theirs")
    files.upload(ACCESS, path, uri)
    assert google_project.object("code") == b"theirs"


def test_removed_job_leaves_nothing_of_its_own_in_the_bucket(vertex: Any, folder: Path, google: Google) -> None:
    """`rm` names the job's folders in the bucket; --everywhere empties these folders alone."""
    for name in ("one", "one-b"):
        assert vertex(*SUBMIT, "--name", name, cwd=folder).code == 0
        for place in ("checkpoints/{}/step-2/manifest.json", "jobs/{}/output/metrics.json"):
            google.put_object(f"cloudtrain/{place.format(name)}", "{}")
    assert vertex("stop", "one", "--now", "-y").code == 0
    until(lambda: vertex("status", "one", "--json").json["state"] not in ("running", "pending", "stopping"))
    before, asked = google.objects(), vertex("rm", "one").stderr
    for place in ("checkpoints", "jobs"):
        assert re.search(rf"gs://{BUCKET}/cloudtrain/{place}/one  \d\S* \S+  stays: --everywhere", asked), asked
    assert vertex("rm", "-y", "--everywhere", "one").code == 0
    assert google.objects() == [name for name in before if "/one/" not in name]
    assert len(before) == len(google.objects()) + 4


def test_sdk_prints_nothing(cli: Any, folder: Path, google_project: Google) -> None:
    """A process with a fresh import prints no warning and no log line, but the next commands."""
    done = cli(*SUBMIT, "--name", "one", cwd=folder)
    assert (done.code, done.stdout) == (0, "")
    assert "sent: one\n  follow it   cloudtrain logs -f one\n  stop it     cloudtrain stop one\n" in done.stderr
    assert re.search(r"(?i)warning|grpc|I0000|E0000|absl|google|deprecat", done.stderr) is None


ONCE = [
    *(("lost", 1), ("lost", 5), ("drop", 2), ("UNAVAILABLE", 2)),
    *(("DEADLINE_EXCEEDED", 2), ("INTERNAL", 2), ("RESOURCE_EXHAUSTED", 2)),
]


@pytest.mark.parametrize(("kind", "count"), ONCE, ids=str)
def test_lost_answer_leaves_one_job(vertex: Any, folder: Path, google: Google, kind: str, count: int) -> None:
    """Despite lost answers the command succeeds with a single job, found by its label."""
    google.fault("jobs.create", kind, count=count)
    done = vertex(*SUBMIT, "--name", "one", cwd=folder)
    assert (done.code, active(google)) == (0, ["one-1"]), done.stderr
    assert len(google.journal("jobs.create")) == (1 if kind == "lost" else 3)
    assert vertex("status", "one", "--json").json["state"] == "pending"


@pytest.mark.parametrize("kind", ["hang", "slow"])
def test_slow_answer_is_not_awaited_endlessly(
    vertex: Any, folder: Path, google: Google, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Google's client has no time limit of its own. A late job does not run."""
    monkeypatch.setattr(jobs, "CREATE_S", 1.0)
    google.fault("jobs.create", kind, count=1, delay_s=3.0)
    done = vertex(*SUBMIT, "--name", "one", cwd=folder)
    assert done.code == 0, done.stderr
    if kind == "slow":
        until(lambda: len(google.jobs()) == 2)
    assert vertex("status", "one", "--json").json["state"] == "pending"
    until(lambda: active(google) == ["one-1"])
    [kept] = [job for job in google.jobs() if job["state"] == "JOB_STATE_PENDING"]
    assert fences(google.job(kept["id"])["body"]) == {order_of(google, "one")["fence"]}


@pytest.mark.parametrize("operation", ["storage.bucket", "storage.get", "storage.insert", "jobs.list", "secrets.*"])
@pytest.mark.parametrize("kind", ["lost", "drop", "503", "429"])
def test_failing_calls_are_retried(vertex: Any, folder: Path, google: Google, operation: str, kind: str) -> None:
    """Every call before the submit may fail and is made again."""
    google.fault(operation, kind, every=2)
    done = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN)
    assert (done.code, active(google)) == (0, ["one-1"]), done.stderr


def test_late_duplicate_of_a_job_with_an_order_is_cancelled(vertex: Any, folder: Path, google: Google) -> None:
    """Of two jobs the one with the order's mark counts: the next poll cancels the other."""
    google.fault("jobs.create", "late", count=1, delay_s=8.0)  # after the retry, on a busy machine too
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 0
    [first] = google.jobs()
    until(lambda: len(google.jobs()) == 2)
    assert vertex("status", "one", "--json").json["state"] == "pending"
    until(lambda: active(google) == ["one-1"])
    assert google.job(first["id"])["state"] == "JOB_STATE_PENDING"
    assert fences(body_of(google, first["id"])) == {order_of(google, "one")["fence"]}


def test_refused_poll_is_no_refusal_of_the_job(vertex: Any, folder: Path, google: Google) -> None:
    """After a lost answer and a refused poll the state is unknown, and found out later."""
    google.fault("jobs.create", "lost")
    google.fault("jobs.list", "403", after=1)
    done = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN)
    assert (done.code, "look whether one-1 has started after" in done.stderr) == (7, True), done.stderr
    assert vertex("status", "one", "--json").json["unreachable_since_s"] is not None
    google.clear_faults()
    status = vertex("status", "one", "--json").json
    assert (status["state"], status["unreachable_since_s"]) == ("pending", None)
    assert (active(google), len(google.secrets())) == (["one-1"], 1)
    end(google, "one-1")
    assert (vertex("wait", "one").code, google.secrets()) == (0, [])


def test_send_that_never_arrived_is_known_later(vertex: Any, folder: Path, google: Google) -> None:
    """At first unknown, later certain: no job runs, no object remains, and a late request finds no order."""
    google.fault("jobs.create", "drop")
    done = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN)
    assert (done.code, len(google.secrets())) == (7, 1), done.stderr
    assert len(google.objects("cloudtrain/jobs/one/attempt-1/order.json")) == 1
    status = vertex("status", "one", "--json").json
    assert (status["state"], "nothing runs" in status["detail"]) == ("failed", True)
    assert (google.secrets(), google.objects("cloudtrain/jobs/one/attempt-1")) == ([], [])


def test_name_taken_by_a_second_home_is_refused(vertex: Any, folder: Path, google: Google, tmp_path: Path) -> None:
    """With two machines on one bucket the second submit is refused, and the first job is untouched."""
    assert vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN).code == 0
    before = order_of(google, "one"), google.secrets()
    elsewhere = {"CLOUDTRAIN_HOME": str(tmp_path / "elsewhere"), **TOKEN}
    refused = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=elsewhere)
    assert (refused.code, "choose another --name" in refused.stderr) == (2, True), refused.stderr
    assert ((order_of(google, "one"), google.secrets()), active(google)) == (before, ["one-1"])
    assert vertex("list", "--json", env=elsewhere).json["jobs"] == []


def test_job_of_that_name_with_a_different_bucket_is_foreign(
    vertex: Any, folder: Path, google: Google, tmp_path: Path
) -> None:
    """The label names the other home: the job is neither adopted nor cancelled as a duplicate."""
    google.bucket("another-bucket")
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 0
    elsewhere = {"CLOUDTRAIN_HOME": str(tmp_path / "elsewhere")}
    google.fault("jobs.create", "drop", count=1)
    given = ("--set", "vertex.staging_bucket=another-bucket", "--name", "one")
    assert vertex(*SUBMIT, *given, cwd=folder, env=elsewhere).code == 0
    assert active(google) == ["one-1", "one-1"]
    urls = [re.findall(r"training/(\d+)", vertex("status", "one", env=env).stdout) for env in ({}, elsewhere)]
    assert [url[0] for url in urls] == [job["id"] for job in google.jobs()]
    assert active(google) == ["one-1", "one-1"]


def test_name_is_not_used_twice(vertex: Any, folder: Path, google: Google, home: Path) -> None:
    """A name is refused while its job runs, afterwards, and even if a lost registry has no row of the name."""
    assert vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN).code == 0
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 2
    before = order_of(google, "one"), google.secrets()
    for path in home.glob("registry.sqlite*"):
        path.unlink()
    done = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env={"TOKEN": "other"})
    assert (done.code, "has a job one-1 of yours already" in done.stderr) == (2, True), done.stderr
    assert ((order_of(google, "one"), google.secrets()), active(google)) == (before, ["one-1"])
    assert json.loads(google.secret(google.secrets()[0]) or "") == TOKEN


def test_secrets_are_only_in_secret_manager(vertex: Any, folder: Path, google: Google, home: Path) -> None:
    """The order names the single entry, which expires by itself, and is removed when the job's end is seen."""
    done = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN)
    [name] = google.secrets()
    assert json.loads(google.secret(name) or "") == TOKEN
    version = f"projects/{PROJECT}/secrets/{name}/versions/latest"
    assert order_of(google, "one")["secrets"] == {"names": ["TOKEN"], "secret": version, "endpoint": None}
    shown = done.stdout + done.stderr + vertex("status", "one", "--json").stdout + json.dumps(google.jobs())
    shown += json.dumps([call["body"] for call in google.journal()])
    stored = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    stored += b"".join(google.object(one) or b"" for one in google.objects() if not one.endswith(".gz"))
    assert ("sesame" in shown, b"sesame" in stored) == (False, False)
    google.begin("one-1")
    assert (vertex("status", "one").code, google.secrets()) == (0, [name])
    end(google, "one-1")
    assert (vertex("wait", "one").code, google.secrets()) == (0, [])


def test_secret_that_cannot_be_removed_is_reported(vertex: Any, folder: Path, google: Google) -> None:
    """The job's end is still reported."""
    assert vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN).code == 0
    end(google, "one-1")
    google.settings(denied=["secrets.delete"])
    done = vertex("status", "one", "--json")
    assert (done.json["state"], "gcloud secrets delete one-1-" in done.stderr) == ("succeeded", True)


@pytest.mark.soak  # calls by REST: test_failing_calls_are_retried
def test_whole_submit_works_with_custom_endpoints(
    vertex: Any, folder: Path, google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With addresses in the config all calls use REST, and Google's own hosts are not needed."""
    told = yaml.safe_load(CONFIG)
    told["vertex"]["endpoints"] = google.endpoints
    (folder / "cloudtrain.yaml").write_text(yaml.safe_dump(told))
    token = Credentials(google.client.token())  # else Google's own host would be called
    monkeypatch.setattr(api.GoogleLogin, "credentials", lambda self: token)
    for name in ("HTTPS_PROXY", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    done = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN)
    assert done.code == 0, done.stderr
    google.begin("one-1")
    google.write_log("one-1", "[0] hello")
    assert vertex("status", "one", "--json").json["state"] == "running"
    assert vertex("stop", "one").code == 0
    google.wait("one-1", "CANCELLED")
    assert vertex("status", "one", "--json").json["reason"] == "user"
    assert {call["protocol"] for call in google.journal("jobs.create")} == {"rest"}
    assert order_of(google, "one")["secrets"]["endpoint"] == google.endpoints["secretmanager"]


def test_url_leads_to_the_console(vertex: Any, folder: Path, google: Google) -> None:
    """The link contains the number that Google has given the job."""
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 0
    [job] = google.jobs()
    assert job["name"] == f"projects/{NUMBER}/locations/{REGION}/customJobs/{job['id']}"
    assert f"/training/{job['id']}?project={PROJECT}" in vertex("status", "one").stdout


@pytest.mark.parametrize(("order", "kept"), [("whole", 1), ("taken back", 0), ("garbage", 0)])
def test_find_settles_duplicate_jobs(vertex: Any, folder: Path, google: Google, order: str, kept: int) -> None:
    """Of two jobs the one with the order's mark stays and the other is cancelled; without an order, the first stays."""
    google.fault("jobs.create", "lost", count=1)
    google.fault("jobs.list", "403", after=1)
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 7
    google.clear_faults()
    asked = body_of(google, "one-1")
    for pool in asked["jobSpec"]["workerPoolSpecs"]:
        pool["containerSpec"]["args"][2] = "another"
    at = "cloudtrain/jobs/one/attempt-1/order.json"
    google.call("POST", "/customJobs", {key: asked[key] for key in ("displayName", "labels", "jobSpec")})
    if order == "whole":
        google.put_object(at, json.dumps({**order_of(google, "one"), "fence": "another"}))
    else:
        google.remove_object(at) if order == "taken back" else google.put_object(at, "no JSON")
    ids = [job["id"] for job in google.jobs()]
    status = vertex("status", "one").stdout
    assert f"/training/{ids[kept]}?" in status
    google.wait(ids[1 - kept], "CANCELLED", "CANCELLING")
    assert google.job(ids[kept])["state"] == "JOB_STATE_PENDING"


def test_job_after_an_empty_first_page_is_found(vertex: Any, folder: Path, google: Google, monkeypatch: Any) -> None:
    """A filtered list may give an empty page and a token: the job is on the next page, and is not sent again."""
    real = api.get_json

    def get(access: VertexAccess, service: str, path: str, params: Any = None) -> dict[str, Any]:
        if path.endswith("/customJobs") and "pageToken" not in (params or {}):
            return {"nextPageToken": "x"}
        return real(access, service, path, {key: value for key, value in (params or {}).items() if key != "pageToken"})

    monkeypatch.setattr(api, "get_json", get)
    google.fault("jobs.create", "lost", count=1)
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 0
    assert active(google) == ["one-1"]


def test_order_is_changed_to_the_job_that_arrived(
    vertex: Any, folder: Path, google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try arrives, the second is lost: the order gets the first mark, which its replicas wait for."""
    real, bodies = jobs.create_once, []

    def create(access: VertexAccess, body: dict[str, Any], begins: Callable[[], None]) -> dict[str, Any]:
        begins()
        bodies.append(body)
        if len(bodies) == 2:
            real(access, bodies[0], lambda: None)
        raise api.GoogleError(503, "UNAVAILABLE", "gone")

    monkeypatch.setattr(jobs, "create_once", create)
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 0
    [job] = google.jobs()
    pools = body_of(google, job["id"])["jobSpec"]["workerPoolSpecs"]
    assert {pool["containerSpec"]["args"][2] for pool in pools} == {order_of(google, "one")["fence"]}


def test_refusal_after_a_lost_try_leaves_the_state_unknown(
    vertex: Any, folder: Path, google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost job itself may use up the quota, so "not sent" would be wrong; it is found later."""
    real, bodies = jobs.create_once, []

    def create(access: VertexAccess, body: dict[str, Any], begins: Callable[[], None]) -> dict[str, Any]:
        begins()
        bodies.append(body)
        if len(bodies) == 1:
            raise api.GoogleError(503, "UNAVAILABLE", "gone")
        raise api.GoogleError(429, "RESOURCE_EXHAUSTED", "Quota exceeded for custom_model_training_nvidia_l4_gpus")

    monkeypatch.setattr(jobs, "create_once", create)
    monkeypatch.setattr("cloudtrain.backends.vertex.jobs.SETTLE_TRIES", 1)
    done = vertex(*SUBMIT, "--name", "one", cwd=folder)
    assert (done.code, "whether an earlier try arrives is not known yet" in done.stderr) == (7, True), done.stderr
    real(ACCESS, bodies[0], lambda: None)
    assert vertex("status", "one", "--json", cwd=folder).json["state"] == "pending"
    assert active(google) == ["one-1"]


def test_deleted_job_counts_as_stopped(vertex: Any, folder: Path, google: Google, monkeypatch: Any) -> None:
    """The spend so far stays; right after a send the job may only be invisible."""
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 0
    google.begin("one-1")
    assert vertex("status", "one", "--json").json["state"] == "running"
    google.end("one-1")
    google.call("DELETE", f"/customJobs/{google.jobs()[0]['id']}")
    assert vertex("status", "one", "--json").json["state"] == "running"
    monkeypatch.setattr("cloudtrain.backends.vertex.jobs.NEW_S", 0.0)
    status = vertex("status", "one", "--json").json
    assert (status["state"], status["reason"], status["started_s"] is not None) == ("stopped", "user", True)


def test_job_in_line_is_sent_under_its_name(
    vertex: Any, folder: Path, google: Google, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """After a refusal for quota with --queue, a later try sends the same request, and its order counts."""
    with monkeypatch.context() as patch:

        def refuse(access: VertexAccess, body: dict[str, Any], begins: Callable[[], None]) -> dict[str, Any]:
            begins()
            raise api.GoogleError(429, "RESOURCE_EXHAUSTED", "Quota exceeded for custom_model_training_nvidia_l4_gpus")

        patch.setattr(jobs, "create_once", refuse)
        done = vertex(*SUBMIT, "--queue", "--name", "one", cwd=folder)
    assert (done.code, "in line, nothing is sent yet" in done.stderr) == (0, True), done.stderr
    monkeypatch.setattr(queue, "TRY_S", 0.0)
    with closing(Registry(home)) as registry:
        assert queue.advance_queue(registry) == ["sent: one"]
    assert active(google) == ["one-1"]
    assert order_of(google, "one")["fence"] in fences(body_of(google, "one-1"))
