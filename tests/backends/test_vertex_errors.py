"""Obstacles to a Vertex AI job are reported in a sentence with a remedy, and no object of the job remains."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.backends.vertex import api as rest
from cloudtrain.backends.vertex import jobs
from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.text.extras import install
from doubles.google.handle import Google
from doubles.google.loopback import served
from doubles.google.names import BUCKET, PROJECT, REGION
from doubles.wire import Answer

CONFIG = f"""\
name: j
backend: vertex
script: loop.py
resources: {{accelerators: T4:1}}
limits: {{max_duration: 1h}}
secrets: [TOKEN]
vertex: {{project: {PROJECT}, location: {REGION}, staging_bucket: {BUCKET}}}
"""
SUBMIT = ("submit", "-d", "-y", "--name", "one")
QUOTA = "custom_model_training_nvidia_t4_gpus"
EXHAUSTED = f"The following quota metrics exceed quota limits: aiplatform.googleapis.com/{QUOTA}"
DISABLED = (
    "{} API has not been used in project 123456789012 before or it is disabled. Enable it by visiting "
    "https://console.developers.google.com/apis/api/{}/overview?project=123456789012 then retry."
)
BAD_IMAGE = "List of found errors: 1.Field: job_spec.worker_pool_specs[0].container_spec.image_uri; Message: no."


@pytest.fixture
def folder(folder: Path, google_project: Google, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project's folder; its jobs run no containers."""
    google_project.settings(execute=False)
    monkeypatch.setenv("TOKEN", "sesame")
    return folder


def configured(folder: Path, **vertex: Any) -> None:
    """Change the config's block."""
    told = yaml.safe_load(CONFIG)
    told["vertex"] |= vertex
    (folder / "cloudtrain.yaml").write_text(yaml.safe_dump(told))


def said(done: Any, code: int, *words: str) -> None:
    """Check that the command ended with the code, and with these words in one report."""
    assert done.code == code, done.stderr
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert ("itself failed" in done.stderr, "Traceback" in done.stderr) == (False, False), done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert max(map(len, done.stderr.splitlines())) < 600


DENIED = [
    ("jobs.create", ("aiplatform.customJobs.create", "hint: a role that allows it: Vertex AI User")),
    ("jobs.list", ("aiplatform.customJobs.list", "Vertex AI User")),
    ("storage.*", ("cannot write to the bucket", "storage.objects.", "Storage Object User")),
    ("secrets.*", ("cannot store the job's secrets", "Secret Manager Admin (roles/secretmanager.admin)")),
    ("secrets.add", ("cannot store the job's secrets", "Secret Manager Admin (roles/secretmanager.admin)")),
]


@pytest.mark.parametrize(("operation", "words"), DENIED, ids=[operation for operation, _ in DENIED])
def test_refusal_names_the_role(
    vertex: Any, folder: Path, google: Google, operation: str, words: tuple[str, ...]
) -> None:
    """Neither an object of the job remains, nor the job in the list."""
    google.settings(denied=[operation])
    said(vertex(*SUBMIT, cwd=folder), 4, "not allowed: ", *words)
    google.settings(denied=[])
    assert (google.secrets(), google.objects("cloudtrain/jobs/one/attempt-1"), google.jobs()) == ([], [], [])
    assert vertex("list", "--json").json["jobs"] == []


def test_bucket_without_metadata_access_works(vertex: Any, folder: Path, google: Google) -> None:
    """The role on the objects does not include the bucket itself."""
    google.settings(denied=["storage.bucket"])
    assert vertex(*SUBMIT, cwd=folder).code == 0


def test_unreadable_log_hides_no_state(vertex: Any, folder: Path, google: Google) -> None:
    """The known facts of the job are shown without the log; the command `logs` gives the reason."""
    assert vertex(*SUBMIT, cwd=folder).code == 0
    google.begin("one-1")
    google.settings(denied=["logging.*"])
    assert vertex("status", "one", "--json").json["state"] == "running"
    said(vertex("logs", "one"), 7, "Logs Viewer", "logging")


@pytest.mark.parametrize(
    ("kind", "message", "code", "words"),
    [
        ("RESOURCE_EXHAUSTED", EXHAUSTED, 5, (QUOTA, "where a quota is named, IAM & Admin > Quotas", "another region")),
        ("403", DISABLED.format("Vertex AI", "aiplatform.googleapis.com"), 3, ("services enable aiplatform.google",)),
        ("INVALID_ARGUMENT", BAD_IMAGE, 3, ("image_uri; Message: no.",)),
        ("UNAUTHENTICATED", "", 4, ("rejects these credentials", "application-default login")),
        ("FAILED_PRECONDITION", "of next year", 3, ("of next year",)),
    ],
    ids=["quota", "disabled", "invalid", "token", "other"],
)
def test_refusal_of_the_job_is_reported(
    vertex: Any, folder: Path, google: Google, kind: str, message: str, code: int, words: tuple[str, ...]
) -> None:
    """The report has Google's message and our hint; no object of the job remains."""
    google.fault("jobs.create", kind, message=message)
    said(vertex(*SUBMIT, cwd=folder), code, "cannot start the job: ", *words)
    assert len(google.journal("jobs.create")) == 1
    assert (google.secrets(), google.objects("cloudtrain/jobs/one/attempt-1"), google.jobs()) == ([], [], [])
    assert vertex("list", "--active", "--json").json["jobs"] == []


def test_quota_error_is_the_same_at_the_submit_and_at_a_later_status_call(
    vertex: Any, folder: Path, google: Google
) -> None:
    """Google refuses the request with 429, or hours later as the error of a job that never began."""
    google.fault("jobs.create", "RESOURCE_EXHAUSTED", message=EXHAUSTED)
    early = vertex(*SUBMIT, cwd=folder)
    said(early, 5, QUOTA)
    google.clear_faults()
    assert vertex("submit", "-d", "-y", "--name", "two", cwd=folder).code == 0
    google.end("two-1", "JOB_STATE_FAILED", (8, EXHAUSTED))
    late = vertex("status", "two").stdout
    assert [words in early.stderr and words in late for words in (EXHAUSTED, rest.NO_MACHINES)] == [True, True], late
    assert vertex("status", "two", "--json").json["error"]["kind"] == "capacity"


def test_secret_that_may_not_be_removed_does_not_hide_the_outcome_of_a_send(
    vertex: Any, folder: Path, google: Google
) -> None:
    """The message has the command that removes the secret, and the attempt is settled."""
    google.fault("jobs.create", "drop")
    assert vertex(*SUBMIT, cwd=folder).code == 7
    google.settings(denied=["secrets.delete"])
    done = vertex("status", "one", "--json")
    assert (done.json["state"], "gcloud secrets delete one-1-" in done.stderr) == ("failed", True)


@pytest.mark.parametrize("api", ["secretmanager.googleapis.com", "storage.googleapis.com"])
def test_disabled_api_is_named(vertex: Any, folder: Path, google: Google, api: str) -> None:
    """Each API has its own command that enables the API."""
    operation = {"secretmanager.googleapis.com": "secrets.create", "storage.googleapis.com": "storage.insert"}[api]
    google.fault(operation, "403", message=DISABLED.format("This", api))
    said(vertex(*SUBMIT, cwd=folder), 3, f"hint: gcloud services enable {api}")


NO_ANSWER, NO_LOGIN = ("gave an unexpected answer",), ("no valid Google credentials", "auth application-default login")
NO_BUCKET = f"hint: gcloud storage buckets create gs://nowhere-bucket --location {REGION}"
OBSTACLES: dict[str, tuple[dict[str, Any], dict[str, str], int, tuple[str, ...]]] = {
    "no bucket": (
        {"staging_bucket": "nowhere-bucket"},
        {},
        3,
        ("there is no bucket nowhere-bucket", "vertex.staging_bucket", NO_BUCKET),
    ),
    "bucket of another project": ({"staging_bucket": "their-bucket"}, {}, 4, ("not allowed", "Storage Object User")),
    "another project, or none": ({"project": "another-project"}, {}, 4, ("projects/another-project",)),
    "no server at the endpoint": ({"endpoints": {"storage": "http://127.0.0.1:9"}}, {}, 7, NO_ANSWER),
    "no network": ({}, dict.fromkeys(("HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9"), 7, NO_ANSWER),
    "no address of a proxy": ({}, dict.fromkeys(("HTTPS_PROXY", "https_proxy"), "http://[bad"), 7, NO_ANSWER),
    "no certificates": ({}, {"REQUESTS_CA_BUNDLE": "/nowhere/ca.pem"}, 3, ("/nowhere/ca.pem", "fix REQUESTS_CA_BUN")),
    "no credentials": ({}, {"GOOGLE_APPLICATION_CREDENTIALS": ""}, 4, NO_LOGIN),
    "no file of credentials": ({}, {"GOOGLE_APPLICATION_CREDENTIALS": "none.json"}, 4, (*NO_LOGIN, "none.json")),
    "credentials of no JSON": ({}, {"GOOGLE_APPLICATION_CREDENTIALS": "loop.py"}, 4, (*NO_LOGIN, "loop.py")),
}


@pytest.mark.parametrize(("block", "env", "code", "words"), OBSTACLES.values(), ids=OBSTACLES)
def test_obstacle_has_a_remedy(
    vertex: Any, folder: Path, google: Google, block: Any, env: dict[str, str], code: int, words: tuple[str, ...]
) -> None:
    """A wrong place, a missing network or a missing login is told with its remedy; no job exists."""
    google.bucket("their-bucket", project="another-project")
    configured(folder, **block)
    said(vertex(*SUBMIT, cwd=folder, env=env), code, *words)
    assert google.jobs() == []


def key_file(google: Google, folder: Path, **changes: Any) -> str:
    """Return the path of a copy of the account's credentials with these changes."""
    path = folder / "key.json"
    path.write_text(json.dumps({**json.loads(Path(google.key_file).read_text()), **changes}))
    return str(path)


def test_expired_login_is_reported(vertex: Any, folder: Path, google: Google) -> None:
    """A personal login lasts hours to weeks; an existing job survives, and the next login works again."""
    mine = {"GOOGLE_APPLICATION_CREDENTIALS": google.user_file}
    assert vertex(*SUBMIT, cwd=folder, env=mine).code == 0
    google.settings(refresh_revoked=True)
    said(vertex("submit", "-d", "-y", cwd=folder, env=mine), 4, "no valid Google credentials", "default login")
    status = vertex("status", "one", "--json", env=mine)
    assert (status.json["state"], status.json["unreachable_since_s"] is not None) == ("pending", True)
    google.settings(refresh_revoked=False)
    assert vertex("status", "one", "--json", env=mine).json["unreachable_since_s"] is None


def test_unknown_key_of_an_account_is_reported(vertex: Any, folder: Path, google: Google) -> None:
    """After a rotation Google does not know the old key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = rsa.generate_private_key(public_exponent=65537, key_size=1024).private_bytes(
        serialization.Encoding.PEM, *form
    )
    env = {"GOOGLE_APPLICATION_CREDENTIALS": key_file(google, folder.parent, private_key=pem.decode())}
    said(vertex(*SUBMIT, cwd=folder, env=env), 4, "no valid Google credentials")


def test_token_refused_in_between_is_replaced(vertex: Any, folder: Path, google: Google) -> None:
    """REST calls get a new token automatically."""
    assert vertex(*SUBMIT, cwd=folder).code == 0
    google.expire_tokens()
    assert vertex("status", "one", "--json").json["unreachable_since_s"] is None


def test_unreachable_login_server_is_no_expired_login(vertex: Any, folder: Path, google: Google) -> None:
    """A command for a new login would not help."""
    google.fault("token", "503")
    said(vertex(*SUBMIT, cwd=folder), 7, "gave an unexpected answer")


def test_netrc_does_not_replace_the_token(vertex: Any, folder: Path, tmp_path: Path) -> None:
    """requests reads ~/.netrc by default."""
    path = tmp_path / "netrc"
    path.write_text("default login somebody password else\n")
    assert vertex(*SUBMIT, cwd=folder, env={"NETRC": str(path)}).code == 0


@pytest.mark.parametrize("name", ["google.auth", "google.cloud.aiplatform_v1.services.job_service", "google.protobuf"])
def test_missing_libraries_are_reported(
    vertex: Any, folder: Path, google: Google, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line gives the extra to install; no object of the job remains."""
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(folder)  # the hint's command depends on the working folder
    said(vertex(*SUBMIT, cwd=folder), 3, name, f"hint: {install('vertex')}")
    assert (google.secrets(), google.objects("cloudtrain/jobs/one/attempt-1")) == ([], [])


PAGE = b"<!DOCTYPE html><html><title>Sign in to the guest network</title></html>"


@pytest.mark.parametrize("status", [200, 302, 403, 404, 407])
@pytest.mark.parametrize("service", ["aiplatform", "storage", "secretmanager"])
def test_foreign_page_is_no_answer(vertex: Any, folder: Path, google: Google, service: str, status: int) -> None:
    """A page of a proxy or a guest network is no answer of Google's, with any status."""
    with served(lambda request: Answer(status, {"Content-Type": "text/html", "Location": "http://x/"}, PAGE)) as url:
        configured(folder, endpoints={**google.endpoints, service: url})
        done = vertex(*SUBMIT, cwd=folder)
    said(done, 7, "127.0.0.1")
    assert {job["phase"] for job in vertex("list", "--json").json["jobs"]} <= {"intent"}  # nothing, or not known yet


def test_foreign_page_at_the_send_leaves_the_state_unknown(google_project: Google, folder: Path) -> None:
    """Google's client would raise its own kind of error, although the job may exist."""
    with served(lambda request: Answer(200, {"Content-Type": "text/html"}, PAGE)) as url:
        access = rest.VertexAccess(PROJECT, REGION, (("aiplatform", url),))
        with pytest.raises(CloudtrainError) as raised, rest.answers("start the job"):
            jobs.create_once(access, {"displayName": "x"}, lambda: None)
    assert raised.value.exit_code == 7
