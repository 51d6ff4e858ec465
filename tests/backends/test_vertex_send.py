"""Sending to Vertex AI, through the command and Google's own clients: one job whatever happens on the way."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.oauth2.credentials import Credentials

from cloudtrain.backends.vertex import rest, sdk
from cloudtrain.backends.vertex.rest import VertexAccess
from cloudtrain.entrypoints import events
from doubles.google.handle import BUCKET, NUMBER, PROJECT, REGION, Google

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
    """Start nothing: a job stays as it is until the test moves it."""
    google_project.settings(execute=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a project's folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "loop.py").write_text("print('x')\n")
    (folder / "cloudtrain.yaml").write_text(CONFIG)
    return folder


def active(google: Google) -> list[str]:
    """Return the names of the jobs that are not over, nor about to be."""
    over = ("SUCCEEDED", "FAILED", "CANCELLED", "CANCELLING")
    return [job["display_name"] for job in google.jobs() if job["state"].removeprefix("JOB_STATE_") not in over]


def body_of(google: Google, job: str) -> dict[str, Any]:
    """Return the job as the service has it."""
    found: dict[str, Any] = google.job(job)["body"]
    return found


def order_of(google: Google, job: str, attempt: int = 1) -> dict[str, Any]:
    """Return what the job's replicas are to do."""
    found: dict[str, Any] = json.loads(google.object(f"cloudtrain/jobs/{job}/attempt-{attempt}/order.json") or "")
    return found


def fences(body: dict[str, Any]) -> set[str]:
    """Return the marks in the arguments of a job's pools."""
    return {pool["containerSpec"]["args"][2] for pool in body["jobSpec"]["workerPoolSpecs"]}


def end(google: Google, job: str) -> None:
    """End the job, after both its containers' last words."""
    for node in range(2):
        fields = {"node": node, "final": True, "life": f"life-{node}", "lines": 0}
        google.write_log(job, events.format_line("end", "it has ended", fields), task=f"workerpool{node}-0")
    google.end(job)


def test_what_is_sent_is_the_dry_run(vertex: Any, folder: Path, google: Google, tmp_path: Path) -> None:
    """But for the job's own name, the owner, the mark and the token; the code is uploaded once."""
    written = tmp_path / "written"
    dry = yaml.safe_load(vertex("submit", "--dry-run", "-o", written, cwd=folder).stdout)
    planned = json.loads((written / "order.json").read_text())
    assert [vertex(*SUBMIT, "--name", name, cwd=folder).code for name in ("one", "two")] == [0, 0]
    body, order = body_of(google, "one-1"), order_of(google, "one")
    assert fences(body) == {order["fence"]}
    own = {"cloudtrain_run": "one-1", "cloudtrain_job": "one", "cloudtrain_owner": body["labels"]["cloudtrain_owner"]}
    assert body["labels"] == {**dry["labels"], **own}
    assert {**order, "job": "", "fence": "", "token": ""}.keys() - {"token", "sent_s", "record"} == planned.keys()
    # Its own clock begins after the image was fetched, which the hour may count; what is not gone of it comes back.
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


def test_code_that_another_uploads_meanwhile_is_left(google_project: Google, tmp_path: Path) -> None:
    """Both have the same bytes, or one of them has no right to the name."""
    path = tmp_path / "code"
    path.write_bytes(b"mine")
    uri = google_project.put_object("code", b"theirs")
    sdk.put(ACCESS, path, uri)
    assert google_project.object("code") == b"theirs"


def test_nothing_of_the_sdk_is_on_the_screen(cli: Any, folder: Path, google_project: Google) -> None:
    """No warning, no log line, from a process that has just imported it all; and what to do next."""
    done = cli(*SUBMIT, "--name", "one", cwd=folder)
    assert (done.code, done.stdout) == (0, "")
    assert "sent: one\n  follow it   cloudtrain logs -f one\n  stop it     cloudtrain stop one\n" in done.stderr
    assert re.search(r"(?i)warning|grpc|I0000|E0000|absl|google|deprecat", done.stderr) is None


ONCE = [
    ("lost", 1),
    ("lost", 5),
    ("drop", 2),
    ("UNAVAILABLE", 2),
    ("DEADLINE_EXCEEDED", 2),
    ("INTERNAL", 2),
    ("RESOURCE_EXHAUSTED", 2),
]


@pytest.mark.parametrize(("kind", "count"), ONCE, ids=str)
def test_answer_that_does_not_come(vertex: Any, folder: Path, google: Google, kind: str, count: int) -> None:
    """Whatever is lost on the way, the command goes on, and there is one job, found by its label."""
    google.fault("jobs.create", kind, count=count)
    done = vertex(*SUBMIT, "--name", "one", cwd=folder)
    assert (done.code, active(google)) == (0, ["one-1"]), done.stderr
    assert len(google.journal("jobs.create")) == (1 if kind == "lost" else 3)
    assert vertex("status", "one", "--json").json["state"] == "pending"


@pytest.mark.parametrize("kind", ["hang", "slow"])
def test_answer_that_takes_too_long(
    vertex: Any, folder: Path, google: Google, monkeypatch: pytest.MonkeyPatch, kind: str, wait_until: Any
) -> None:
    """Google's client waits for ever by itself. What is done after all does not run."""
    monkeypatch.setattr(sdk, "CREATE_S", 1.0)
    google.fault("jobs.create", kind, count=1, delay_s=3.0)
    done = vertex(*SUBMIT, "--name", "one", cwd=folder)
    assert done.code == 0, done.stderr
    if kind == "slow":
        wait_until(lambda: len(google.jobs()) == 2)
    assert vertex("status", "one", "--json").json["state"] == "pending"
    wait_until(lambda: active(google) == ["one-1"])
    [kept] = [job for job in google.jobs() if job["state"] == "JOB_STATE_PENDING"]
    assert fences(google.job(kept["id"])["body"]) == {order_of(google, "one")["fence"]}


@pytest.mark.parametrize("operation", ["storage.bucket", "storage.get", "storage.insert", "jobs.list", "secrets.*"])
@pytest.mark.parametrize("kind", ["lost", "drop", "503", "429"])
def test_way_that_stumbles(vertex: Any, folder: Path, google: Google, operation: str, kind: str) -> None:
    """Every call on the way may fail and be made again."""
    google.fault(operation, kind, every=2)
    done = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN)
    assert (done.code, active(google)) == (0, ["one-1"]), done.stderr


def test_job_that_arrives_after_another_was_sent_is_cancelled(
    vertex: Any, folder: Path, google: Google, wait_until: Any
) -> None:
    """Two were made, and the one whose mark the order has is the job: the next look cancels the other."""
    google.fault("jobs.create", "late", count=1, delay_s=2.0)
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 0
    [first] = google.jobs()
    wait_until(lambda: len(google.jobs()) == 2)
    assert vertex("status", "one", "--json").json["state"] == "pending"
    wait_until(lambda: active(google) == ["one-1"])
    assert google.job(first["id"])["state"] == "JOB_STATE_PENDING"
    assert fences(body_of(google, first["id"])) == {order_of(google, "one")["fence"]}


def test_refusal_of_a_look_is_no_refusal_of_the_job(vertex: Any, folder: Path, google: Google) -> None:
    """The answer was lost, and whether the job is there cannot be seen: it is not known, and found out later."""
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


def test_send_that_never_came_is_known_later(vertex: Any, folder: Path, google: Google) -> None:
    """Not known yet; then it is: nothing runs, nothing stays, and a request that comes after finds the door closed."""
    google.fault("jobs.create", "drop")
    done = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN)
    assert (done.code, len(google.secrets())) == (7, 1), done.stderr
    assert len(google.objects("cloudtrain/jobs/one/attempt-1/order.json")) == 1
    status = vertex("status", "one", "--json").json
    assert (status["state"], "nothing runs" in status["detail"]) == ("failed", True)
    assert (google.secrets(), google.objects("cloudtrain/jobs/one/attempt-1")) == ([], [])


def test_name_that_another_home_has_taken(vertex: Any, folder: Path, google: Google, tmp_path: Path) -> None:
    """Two machines, one bucket, one name: the second is refused, and the first one's job is untouched."""
    assert vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN).code == 0
    before = order_of(google, "one"), google.secrets()
    elsewhere = {"CLOUDTRAIN_HOME": str(tmp_path / "elsewhere"), **TOKEN}
    refused = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=elsewhere)
    assert (refused.code, "choose another --name" in refused.stderr) == (2, True), refused.stderr
    assert ((order_of(google, "one"), google.secrets()), active(google)) == (before, ["one-1"])
    assert vertex("status", "one", "--json", env=elsewhere).json["state"] == "failed"


def test_job_of_that_name_with_another_bucket_is_not_ours(
    vertex: Any, folder: Path, google: Google, tmp_path: Path
) -> None:
    """Another home's, which its label tells: neither taken for this one nor cancelled as its double."""
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
    """Not while its job runs, nor after; and not where a lost registry no longer knows of it."""
    assert vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN).code == 0
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 2
    before = order_of(google, "one"), google.secrets()
    for path in home.glob("registry.sqlite*"):
        path.unlink()
    done = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env={"TOKEN": "other"})
    assert (done.code, "has a job one-1 of yours already" in done.stderr) == (2, True), done.stderr
    assert ((order_of(google, "one"), google.secrets()), active(google)) == (before, ["one-1"])
    assert json.loads(google.secret(google.secrets()[0]) or "") == TOKEN


def test_secrets_are_in_secret_manager_alone(vertex: Any, folder: Path, google: Google, home: Path) -> None:
    """One entry, whose name the order has; it ends by itself should nobody see the job's end; gone when that is."""
    done = vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN)
    [name] = google.secrets()
    assert json.loads(google.secret(name) or "") == TOKEN
    assert order_of(google, "one")["secrets"] == {
        "names": ["TOKEN"],
        "secret": f"projects/{PROJECT}/secrets/{name}/versions/latest",
        "endpoint": None,
    }
    shown = done.stdout + done.stderr + vertex("status", "one", "--json").stdout + json.dumps(google.jobs())
    shown += json.dumps([call["body"] for call in google.journal()])
    stored = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    stored += b"".join(google.object(one) or b"" for one in google.objects() if not one.endswith(".gz"))
    assert ("sesame" in shown, b"sesame" in stored) == (False, False)
    google.begin("one-1")
    assert (vertex("status", "one").code, google.secrets()) == (0, [name])
    end(google, "one-1")
    assert (vertex("wait", "one").code, google.secrets()) == (0, [])


def test_secret_that_cannot_be_removed_is_said(vertex: Any, folder: Path, google: Google) -> None:
    """And the job's end is told all the same."""
    assert vertex(*SUBMIT, *SECRET, "--name", "one", cwd=folder, env=TOKEN).code == 0
    end(google, "one-1")
    google.settings(denied=["secrets.delete"])
    done = vertex("status", "one", "--json")
    assert (done.json["state"], "gcloud secrets delete one-1-" in done.stderr) == ("succeeded", True)


def test_whole_submit_by_endpoints_of_ones_own(
    vertex: Any, folder: Path, google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses in the config: over REST, with what comes after; Google's own hosts need not be reached."""
    told = yaml.safe_load(CONFIG)
    told["vertex"]["endpoints"] = google.endpoints
    (folder / "cloudtrain.yaml").write_text(yaml.safe_dump(told))
    token = Credentials(google.client.token())  # else one would be had from Google's own host
    monkeypatch.setattr(rest, "credentials", lambda project: token)
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
    """By the number that Google has given the job."""
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 0
    [job] = google.jobs()
    assert job["name"] == f"projects/{NUMBER}/locations/{REGION}/customJobs/{job['id']}"
    assert f"/training/{job['id']}?project={PROJECT}" in vertex("status", "one").stdout


@pytest.mark.parametrize(("order", "kept"), [("whole", 1), ("taken back", 0), ("garbage", 0)])
def test_find_settles_what_is_there(vertex: Any, folder: Path, google: Google, order: str, kept: int) -> None:
    """Of two jobs the one that the order is for, and the other is cancelled; where no order tells, the first."""
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


def test_list_whose_first_page_is_empty(vertex: Any, folder: Path, google: Google, monkeypatch: Any) -> None:
    """A filtered list may give an empty page and a token: the job is on the next one, and is not sent again."""
    real = rest.get_json

    def get(access: VertexAccess, service: str, path: str, params: Any = None) -> dict[str, Any]:
        if path.endswith("/customJobs") and "pageToken" not in (params or {}):
            return {"nextPageToken": "x"}
        return real(access, service, path, {key: value for key, value in (params or {}).items() if key != "pageToken"})

    monkeypatch.setattr(rest, "get_json", get)
    google.fault("jobs.create", "lost", count=1)
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 0
    assert active(google) == ["one-1"]


def test_job_that_the_order_is_not_for_is_given_it(
    vertex: Any, folder: Path, google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try arrives while the second is lost: the order is made the first one's, whose replicas wait for it."""
    real, bodies = sdk.create, []

    def create(access: VertexAccess, body: dict[str, Any], begins: Callable[[], None]) -> dict[str, Any]:
        begins()
        bodies.append(body)
        if len(bodies) == 2:
            real(access, bodies[0])
        raise rest.GoogleError(503, "UNAVAILABLE", "gone")

    monkeypatch.setattr(sdk, "create", create)
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 0
    [job] = google.jobs()
    pools = body_of(google, job["id"])["jobSpec"]["workerPoolSpecs"]
    assert {pool["containerSpec"]["args"][2] for pool in pools} == {order_of(google, "one")["fence"]}


def test_refusal_after_a_lost_try_is_no_word_on_that(
    vertex: Any, folder: Path, google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quota may be used up by the very job whose answer was lost: it is not called never sent, and found later."""
    real, bodies = sdk.create, []

    def create(access: VertexAccess, body: dict[str, Any], begins: Callable[[], None]) -> dict[str, Any]:
        begins()
        bodies.append(body)
        if len(bodies) == 1:
            raise rest.GoogleError(503, "UNAVAILABLE", "gone")
        raise rest.GoogleError(429, "RESOURCE_EXHAUSTED", "Quota exceeded for custom_model_training_nvidia_l4_gpus")

    monkeypatch.setattr(sdk, "create", create)
    monkeypatch.setattr("cloudtrain.backends.vertex.jobs.SETTLE_TRIES", 1)
    done = vertex(*SUBMIT, "--name", "one", cwd=folder)
    assert (done.code, "whether an earlier try arrives is not known yet" in done.stderr) == (7, True), done.stderr
    real(ACCESS, bodies[0])
    assert vertex("status", "one", "--json", cwd=folder).json["state"] == "pending"
    assert active(google) == ["one-1"]


def test_job_that_was_deleted_there_is_over(vertex: Any, folder: Path, google: Google, monkeypatch: Any) -> None:
    """What it has cost so far stays; right after a send it may merely not be there yet."""
    assert vertex(*SUBMIT, "--name", "one", cwd=folder).code == 0
    google.begin("one-1")
    assert vertex("status", "one", "--json").json["state"] == "running"
    google.end("one-1")
    google.call("DELETE", f"/customJobs/{google.jobs()[0]['id']}")
    assert vertex("status", "one", "--json").json["state"] == "running"
    monkeypatch.setattr("cloudtrain.backends.vertex.jobs.NEW_S", 0.0)
    status = vertex("status", "one", "--json").json
    assert (status["state"], status["reason"], status["started_s"] is not None) == ("stopped", "user", True)
