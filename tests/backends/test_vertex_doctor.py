"""`doctor vertex`: obstacles to a job are found before the job, and reported with a remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.launcher.metering.rate import Key, Quote, Rate
from cloudtrain.launcher.prices import own
from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT, REGION, SERVICE_ACCOUNT

CONFIG: dict[str, Any] = {
    "name": "j",
    "backend": "vertex",
    "script": "loop.py",
    "resources": {"instances": 2, "instance_type": "n1-standard-4"},
    "secrets": ["TOKEN"],
    "vertex": {"project": PROJECT, "location": REGION, "staging_bucket": BUCKET},
}
DISABLED = "Secret Manager API has not been used in project 1 before or it is disabled. secretmanager.googleapis.com"


@pytest.fixture
def doctor(vertex: Any, tmp_path: Path) -> Any:
    """Return the checks of a config whose block has these changes: by name, the verdict and all words."""

    def run(env: dict[str, str] | None = None, resources: Any = None, **block: Any) -> dict[str, tuple[str, str]]:
        told = {**CONFIG, "vertex": {**CONFIG["vertex"], **block}}
        told["resources"] = resources or CONFIG["resources"]
        told["vertex"] = {key: value for key, value in told["vertex"].items() if value is not None}
        (tmp_path / "loop.py").write_text("print('x')\n")
        (tmp_path / "cloudtrain.yaml").write_text(yaml.safe_dump(told))
        done = vertex("doctor", "vertex", "--json", cwd=tmp_path, env=env)
        assert ("Traceback" in done.stderr, "itself failed" in done.stderr) == (False, False), done.stderr
        return {one["name"]: (one["verdict"], f"{one['found']} {one['cure']}") for one in done.json["vertex"]}

    return run


def test_valid_setup_passes_all_checks(doctor: Any, google: Google) -> None:
    """Every requirement of a job is tried, prices are compared with Google's list, and no object remains."""
    before = google.objects(), google.secrets(), google.jobs()
    found = doctor()
    assert {name: verdict for name, (verdict, _) in found.items()} == dict.fromkeys(
        ("credentials", "Vertex AI", "Cloud Logging", "bucket", "secrets", "price"), "ok"
    ), found
    assert SERVICE_ACCOUNT in found["credentials"][1]
    assert (google.objects(), google.secrets(), google.jobs()) == before
    assert google.unserved() == []


def test_checks_without_a_config(vertex: Any, tmp_path: Path, google: Google) -> None:
    """Project and region come from the environment; checks that depend on a job are skipped."""
    env = {"GOOGLE_CLOUD_LOCATION": REGION}
    found = vertex("doctor", "vertex", "--json", cwd=tmp_path, env=env).json["vertex"]
    assert [one["name"] for one in found] == ["credentials", "Vertex AI", "Cloud Logging"]
    assert {one["verdict"] for one in found} == {"ok"}


@pytest.mark.parametrize("key", ["GOOGLE_CLOUD_PROJECT", "GOOGLE_CLOUD_LOCATION"])
def test_missing_place_is_reported_without_a_config(vertex: Any, tmp_path: Path, key: str) -> None:
    """The remedy says how to set project and region."""
    env = {"GOOGLE_CLOUD_PROJECT": PROJECT, "GOOGLE_CLOUD_LOCATION": REGION, key: ""}
    [found] = vertex("doctor", "vertex", "--json", cwd=tmp_path, env=env).json["vertex"]
    assert (found["verdict"], "doctor vertex -f FILE" in found["cure"]) == ("fail", True)


def test_login_of_a_person_is_recognised(doctor: Any, google: Google) -> None:
    """A personal login differs from a service account."""
    assert "your own login" in doctor(env={"GOOGLE_APPLICATION_CREDENTIALS": google.user_file})["credentials"][1]


def test_login_that_has_expired_is_found_at_once(doctor: Any, google: Google) -> None:
    """The check requests a token instead of a file; no further checks run."""
    google.settings(refresh_revoked=True)
    found = doctor(env={"GOOGLE_APPLICATION_CREDENTIALS": google.user_file})
    assert (list(found), found["credentials"][0]) == (["credentials", "not checked without credentials"], "fail")
    assert "gcloud auth application-default login" in found["credentials"][1]


def test_missing_credentials_are_reported(doctor: Any) -> None:
    """The report has the remedy, the missing machine type, and the names of the skipped checks."""
    found = doctor(env={"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere/key.json"}, resources={"instances": 1})
    assert list(found) == ["credentials", "config", "not checked without credentials"]
    assert "application-default login" in found["credentials"][1]
    assert "which machines" in found["config"][1]
    assert "Cloud Logging, bucket" in found["not checked without credentials"][1]


@pytest.mark.parametrize(
    ("operation", "name", "words"),
    [
        ("jobs.list", "Vertex AI", "Vertex AI User (roles/aiplatform.user)"),
        ("logging.list", "Cloud Logging", "Logs Viewer (roles/logging.viewer)"),
        ("storage.insert", "bucket", "Storage Object User"),
        ("storage.delete", "bucket", "Storage Object User"),
        ("secrets.create", "secrets", "Secret Manager Admin"),
        ("secrets.delete", "secrets", "Secret Manager Admin"),
    ],
)
def test_missing_right_is_reported(doctor: Any, google: Google, operation: str, name: str, words: str) -> None:
    """The checks do the actions of a job; the report names the role."""
    google.settings(denied=[operation])
    found = doctor()
    assert (found[name][0], words in found[name][1]) == ("fail", True), found
    assert [one for one, (verdict, _) in found.items() if verdict != "ok"] == [name]


@pytest.mark.parametrize(
    ("block", "name", "verdict", "words"),
    [
        ({"staging_bucket": "nowhere-bucket"}, "bucket", "fail", "buckets create gs://nowhere-bucket --location"),
        ({"staging_bucket": "far-away"}, "bucket", "warn", "far-away is in europe-west4, the job in us-central1"),
        ({"staging_bucket": None}, "config", "fail", "no bucket for its files write `staging_bucket: "),
        ({"persistent_resource": "none"}, "persistent resource", "fail", "there is no `none`"),
        ({"persistent_resource": "big"}, "persistent resource", "fail", "must be the same, not n1-standard-4"),
        ({"persistent_resource": "slow"}, "persistent resource", "warn", "slow is PROVISIONING"),
        ({"persistent_resource": "fit"}, "persistent resource", "ok", "fit: n1-standard-4"),
        ({"location": "europe-west4"}, "bucket", "warn", "take one in europe-west4"),
        ({"project": "another-project"}, "Vertex AI", "fail", "projects/another-project"),
    ],
    ids=str,
)
def test_faults_are_named(
    doctor: Any, google: Google, block: dict[str, Any], name: str, verdict: str, words: str
) -> None:
    """Each fault has a remedy."""
    google.bucket("far-away", location="europe-west4")
    for resource, machine, state in (("big", "n1-standard-96", "RUNNING"), ("slow", "n1-standard-4", "PROVISIONING")):
        google.persistent(resource, state=state, resourcePools=[{"machineSpec": {"machineType": machine}}])
    google.persistent("fit", state="RUNNING", resourcePools=[{"machineSpec": {"machineType": "n1-standard-4"}}])
    found = doctor(**block)
    assert (found[name][0], words in found[name][1]) == (verdict, True), found


def test_disabled_api_is_reported(doctor: Any, google: Google) -> None:
    """The report contains the API's name."""
    google.fault("secrets.create", "403", message=DISABLED)
    verdict, words = doctor()["secrets"]
    assert (verdict, "gcloud services enable secretmanager.googleapis.com" in words) == ("fail", True)


@pytest.mark.parametrize("kind", ["503", "drop"])
def test_unavailable_service_is_no_fault_of_the_users(doctor: Any, google: Google, kind: str) -> None:
    """The check gives a warning; further checks still run."""
    google.fault("logging.list", kind)
    found = doctor()
    assert (found["Cloud Logging"][0], found["bucket"][0]) == ("warn", "ok")


def test_changed_price_is_reported(doctor: Any, google: Google, home: Path) -> None:
    """The plan uses our table or earlier readings: the difference is reported, and the plan uses the price read now."""
    verdict, words = doctor(resources={"accelerators": "T4:1"})["price"]
    assert (verdict, words.rstrip().endswith("kept for plans")) == ("ok", True), words
    kept = own.rates("vertex", "n1-standard-4 + 1 x NVIDIA_TESLA_T4", REGION)
    assert {"on_demand", "spot"} <= set(kept)
    key, rate = Key("vertex", "n1-standard-4", REGION, "on_demand"), Rate(0.1, "2026-11-20", "another list")
    own.add([Quote(key, rate)])
    verdict, words = doctor()["price"]
    assert (verdict, "before, 0.100 was known, as of 2026-11-20; kept for plans" in words) == ("ok", True), words
    assert own.rates(*key[:3])["on_demand"].usd > rate.usd


def test_text_report_has_remedies_and_a_code(vertex: Any, tmp_path: Path, google: Google) -> None:
    """Each line has its remedy, and a failure gives the command a non-zero code."""
    (tmp_path / "loop.py").write_text("")
    (tmp_path / "cloudtrain.yaml").write_text(json.dumps(CONFIG))
    google.settings(denied=["logging.*"])
    done = vertex("doctor", "vertex", cwd=tmp_path)
    assert (done.code != 0, "Logs Viewer" in done.stdout + done.stderr) == (True, True)
