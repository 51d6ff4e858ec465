"""The refusals of Google's stand-in, and the filters of its list."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from doubles.google.client import job_body
from doubles.google.handle import Google
from doubles.google.names import PROJECT, REGION

Change = Callable[[dict[str, Any]], None]


def changed(path: str, value: Any) -> Change:
    """Return a change of one value, by its path in the job."""

    def change(body: dict[str, Any]) -> None:
        place: Any = body
        *parents, last = path.split(".")
        for name in parents:
            place = place[int(name)] if name.isdecimal() else place.setdefault(name, {})
        if value is None:
            del place[last]
        else:
            place[last] = value

    return change


POOL = "jobSpec.workerPoolSpecs.0"
FLEX = {"strategy": "FLEX_START"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (changed("displayName", None), "custom_job.display_name"),
        (changed("displayName", "x" * 129), "custom_job.display_name"),
        (changed("labels", {"Upper": "a"}), "custom_job.labels"),
        (changed("labels", {"a": "B"}), "custom_job.labels"),
        (changed("labels", {"a": "b" * 64}), "custom_job.labels"),
        (changed("jobSpec.workerPoolSpecs", []), "job_spec.worker_pool_specs"),
        (changed(f"{POOL}.replicaCount", "2"), "job_spec.worker_pool_specs[0].replica_count"),
        (changed("jobSpec.workerPoolSpecs.1.replicaCount", "0"), "job_spec.worker_pool_specs[1].replica_count"),
        (changed(f"{POOL}.containerSpec", None), "job_spec.worker_pool_specs[0]"),
        (changed(f"{POOL}.containerSpec.imageUri", ""), "job_spec.worker_pool_specs[0].container_spec.image_uri"),
        (changed(f"{POOL}.machineSpec", {}), "job_spec.worker_pool_specs[0].machine_spec.machine_type"),
        (
            changed(f"{POOL}.machineSpec.acceleratorType", "NVIDIA_L4"),
            "job_spec.worker_pool_specs[0].machine_spec.accelerator_count",
        ),
        (
            changed(f"{POOL}.diskSpec", {"bootDiskSizeGb": 50}),
            "job_spec.worker_pool_specs[0].disk_spec.boot_disk_size_gb",
        ),
        (
            changed(f"{POOL}.containerSpec.env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
            "job_spec.worker_pool_specs[0].container_spec.env",
        ),
        (changed("jobSpec.network", "default"), "job_spec.network"),
        (changed("jobSpec.tensorboard", "projects/1/locations/r/tensorboards/2"), "job_spec.service_account"),
        (
            changed("jobSpec.baseOutputDirectory", {"outputUriPrefix": "/out"}),
            "job_spec.base_output_directory.output_uri_prefix",
        ),
        (changed("jobSpec.persistentResourceId", "pool"), "job_spec.persistent_resource_id"),
        (changed("jobSpec.scheduling", {**FLEX, "timeout": "604801s"}), "job_spec.scheduling.timeout"),
        (
            changed("jobSpec.workerPoolSpecs.1.machineSpec", {"machineType": "n1-standard-8"}),
            "job_spec.worker_pool_specs",
        ),
    ],
)
def test_invalid_job_is_refused(google: Google, change: Change, field: str) -> None:
    """The error names the field, in a list of all errors."""
    body = job_body("job", "true", workers=1, scheduling=FLEX)
    change(body)
    answer = google.call("POST", "/customJobs", body)
    assert answer.status == 400, answer
    assert answer.json["error"]["message"].startswith(f"List of found errors:\t1.Field: {field}; Message: ")
    assert google.jobs() == []


def test_all_errors_are_reported_together(google: Google) -> None:
    """One answer lists all errors, as the service's answer does."""
    error = google.call("POST", "/customJobs", {"jobSpec": {"workerPoolSpecs": [{"replicaCount": "2"}]}}).json["error"]
    assert "\t5.Field: " not in error["message"]
    assert len(error["details"][0]["fieldViolations"]) == 4


def test_unknown_field_is_refused(google: Google) -> None:
    """The error has Google's words, with the field's path."""
    body = job_body("job", "true")
    body["jobSpec"]["scheduling"] = {"timeOut": "3s"}
    error = google.call("POST", "/customJobs", body).json["error"]
    told = "Invalid JSON payload received. Unknown name \"timeOut\" at 'custom_job.job_spec.scheduling': "
    assert error["message"] == f"{told}Cannot find field."
    assert error["status"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "change",
    [
        changed(f"{POOL}.machineSpec.acceleratorType", "NVIDIA_A1000"),
        changed(f"{POOL}.replicaCount", "many"),
        changed("jobSpec.scheduling", {"timeout": "1 hour"}),
        changed(f"{POOL}.pythonPackageSpec", {"pythonModule": "both"}),
    ],
)
def test_invalid_value_is_refused(google: Google, change: Change) -> None:
    """Wrong types, unknown enumeration members, and two tasks in a pool are errors."""
    body = job_body("job", "true")
    change(body)
    assert google.call("POST", "/customJobs", body).json["error"]["status"] == "INVALID_ARGUMENT"


def test_placeholder_pool_is_allowed(google: Google) -> None:
    """Pools are identified by their number: reducers are the third pool."""
    google.settings(execute=False)
    body = job_body("job", "true")
    pools = body["jobSpec"]["workerPoolSpecs"]
    pools += [{}, {**pools[0], "replicaCount": "2"}]
    assert google.call("POST", "/customJobs", body).status == 200


def test_other_projects_and_regions_are_refused(google: Google) -> None:
    """A host serves its own location only."""
    host = f"https://{REGION}-aiplatform.googleapis.com/v1"
    other = google.call("GET", f"{host}/projects/other/locations/{REGION}/customJobs")
    assert other.json["error"]["status"] == "PERMISSION_DENIED"
    far = google.call("GET", f"{host}/projects/{PROJECT}/locations/europe-west4/customJobs")
    assert far.json["error"]["status"] == "INVALID_ARGUMENT"
    own = "https://europe-west4-aiplatform.googleapis.com/v1"
    assert google.call("GET", f"{own}/projects/{PROJECT}/locations/europe-west4/customJobs").json == {}


def found(google: Google, text: str) -> list[str]:
    """Return the display names that match a filter."""
    answer = google.call("GET", f"/customJobs?filter={quote(text)}")
    assert answer.status == 200, answer
    return [job["displayName"] for job in answer.json.get("customJobs", [])]


@pytest.mark.parametrize(
    ("text", "names"),
    [("", ["three", "two", "one"]), ('labels.cloudtrain_run="r1"', ["two", "one"]), ("labels.n:*", ["three", "two"])],
)
def test_list_matches_its_filter(google: Google, text: str, names: list[str]) -> None:
    """The list filters by a label, the newest first."""
    google.settings(execute=False)
    google.submit("one", "true", labels={"cloudtrain_run": "r1"})
    google.submit("two", "true", labels={"cloudtrain_run": "r1", "n": "2"})
    google.submit("three", "true", labels={"cloudtrain_run": "r3", "n": "3"})
    assert found(google, text) == names


@pytest.mark.parametrize("text", ["labels.a", 'name="x"', 'labels.a="a" OR labels.b="b"', 'labels.a="a" AND ', '"'])
def test_unreadable_filter_is_refused(google: Google, text: str) -> None:
    """An unreadable filter is an error, as with the service."""
    assert google.call("GET", f"/customJobs?filter={quote(text)}").status == 400


def test_list_has_pages(google: Google) -> None:
    """A new job does not shift the pages."""
    google.settings(execute=False)
    for name in ("one", "two", "three"):
        google.submit(name, "true")
    first = google.call("GET", "/customJobs?pageSize=2").json
    google.submit("four", "true")
    rest = google.call("GET", f"/customJobs?pageToken={first['nextPageToken']}").json
    assert [job["displayName"] for job in first["customJobs"]] == ["three", "two"]
    assert [job["displayName"] for job in rest["customJobs"]] == ["one"]
    assert "nextPageToken" not in rest
    assert google.call("GET", "/customJobs?pageToken=x").status == 400
