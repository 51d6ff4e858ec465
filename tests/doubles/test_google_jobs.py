"""Google's stand-in executes jobs: replicas, restarts, retries."""

import json
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from doubles import sandbox
from doubles.google.client import job_body
from doubles.google.handle import Google
from doubles.google.names import NUMBER, REGION
from doubles.waiting import until

# Without namespaces replicas have no names, and only paths in the request can be moved to private folders.
pytestmark = pytest.mark.skipif(sandbox.mode() == "none", reason="this machine lets us make no namespaces")

FOREVER = "while :; do sleep 0.05; done"


def sh(text: str) -> tuple[str, str, str]:
    """Return a shell command."""
    return "sh", "-c", text


def environments(google: Google, job: str) -> dict[str, dict[str, str]]:
    """Return the environment of each replica of a job that has printed it as JSON."""
    found: dict[str, dict[str, str]] = {}
    for entry in google.entries(job):
        task = entry["resource"]["labels"]["task_name"]
        if task != "service":
            found[task] = entry["jsonPayload"]
    return found


def alive(pids: Iterable[int]) -> list[int]:
    """Return the processes that still run."""
    found = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
        except OSError:
            continue
    return found


PRINT_ENV = ("python3", "-c", "import json, os; print(json.dumps({**os.environ, 'cwd': os.getcwd()}))")


def test_replica_has_the_platforms_variables(google: Google) -> None:
    """One replica has the documented variables, but not torch's and not the caller's."""
    where = {"outputUriPrefix": "gs://bucket/out"}
    job = google.submit("job", *PRINT_ENV, env={"MINE": "a $(OTHER)", "OTHER": "b"}, baseOutputDirectory=where)
    google.wait(job)
    env = environments(google, job)["workerpool0-0"]
    host = google.replica(job)["hostname"]
    assert (env["CLOUD_ML_JOB_ID"], env["HOSTNAME"], env["MINE"]) == (job, host, "a b")
    assert env["AIP_CHECKPOINT_DIR"] == "gs://bucket/out/checkpoints/"
    spec = json.loads(env["CLUSTER_SPEC"])
    assert spec["cluster"] == {"workerpool0": [f"{host}:2222"]}
    assert spec["task"] == {"type": "workerpool0", "index": 0, "trial": ""}
    assert not {"CLOUDTRAIN_HOME", "MASTER_ADDR", "RANK", "WORLD_SIZE", "GOOGLE_APPLICATION_CREDENTIALS"} & set(env)


def test_streams_have_severities(google: Google) -> None:
    """Lines from stderr are ERROR; the platform's own messages have the task "service"."""
    google.wait(google.submit("job", *sh("echo out; echo err >&2")))
    told = {
        (one["resource"]["labels"]["task_name"], one["severity"]): one.get("jsonPayload", {}).get("message")
        for one in google.entries("job")
    }
    assert (told["workerpool0-0", "INFO"], told["workerpool0-0", "ERROR"]) == ("out", "err")
    assert ("service", "INFO") in told


def test_job_ends_with_its_first_replica(google: Google) -> None:
    """The other replicas are ended; a worker that ends earlier does not matter."""
    script = """
import os, signal, socket, sys, time
rank = os.environ["RANK"]
if rank == "2":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("ended", flush=True)))
    while socket.socket().connect_ex((os.environ["MASTER_ADDR"], 2222)) != 0:
        time.sleep(0.05)
    signal.pause()
if rank == "0":
    with socket.create_server((os.environ["HOSTNAME"], 2222)) as server:
        connection, _ = server.accept()
"""
    told = google.wait(google.submit("job", "python3", "-c", script, workers=2))
    assert (told["state"], told["error"]) == ("JOB_STATE_SUCCEEDED", None)
    assert google.log("job", "workerpool1-1") == "ended\n"


def test_killed_worker_restarts_under_its_name(google: Google) -> None:
    """The replica restarts on an empty disk under its old name, while the remaining replicas run on."""
    job = google.submit("job", *sh(f"ls; touch seen; echo $HOSTNAME; {FOREVER}"), workers=1)
    google.wait(job, "RUNNING")
    google.wait_log(job, "workerpool1")
    google.kill(job, "workerpool1-0")
    host = google.replica(job, "workerpool1-0")["hostname"]
    google.wait_log(job, host, "workerpool1-0", count=2)
    assert google.log(job, "workerpool1-0") == f"{host}\n" * 2
    chief, worker = google.job(job)["replicas"]
    assert (chief["starts"], worker["starts"], worker["codes"]) == (1, 2, [137])
    assert google.states(job) == ["PENDING", "RUNNING"]


def test_worker_restart_restarts_the_job_if_configured(google: Google) -> None:
    """All replicas restart on empty disks under their old names; startTime stays."""
    job = google.submit(
        "job", *sh(f"ls; touch seen; echo begun; {FOREVER}"), workers=1, scheduling={"restartJobOnWorkerRestart": True}
    )
    google.wait_log(job, "begun", count=2)
    before = google.job(job)
    google.kill(job, "workerpool1-0")
    google.wait_log(job, "begun", count=4)
    after = google.job(job)
    assert google.log(job) == "begun\n" * 4
    assert [one["hostname"] for one in after["replicas"]] == [one["hostname"] for one in before["replicas"]]
    assert (after["started"], google.states(job)) == (before["started"], ["PENDING", "RUNNING"] * 2)
    assert [one["starts"] for one in after["replicas"]] == [2, 2]


def test_retries_can_be_disabled(google: Google) -> None:
    """Without retries a signal ends the job as an exit code does."""
    told = google.wait(google.submit("job", *sh("exit 137"), scheduling={"disableRetries": True}))
    assert (told["state"], told["replicas"][0]["codes"]) == ("JOB_STATE_FAILED", [137])
    assert "exited with a non-zero status of 9(SIGKILL)" in told["error"]["message"]


def test_retries_are_limited(google: Google) -> None:
    """Retries are limited per worker, then for the whole job."""
    told = google.wait(google.submit("job", *sh("exit 139")))
    assert told["state"] == "JOB_STATE_FAILED"
    assert "exited with a non-zero status of 11(SIGSEGV)" in told["error"]["message"]
    assert (told["attempts"], told["replicas"][0]["codes"]) == (4, [139] * 24)


def test_reset_kills_all_processes(google: Google) -> None:
    """Reset kills all processes, and forgets all jobs, logs and objects."""
    job = google.submit("job", *sh(f"echo begun; {FOREVER}"), workers=1)
    google.wait_log(job, "begun", count=2)
    pids = [pid for one in google.job(job)["replicas"] for pid in one["pids"]]
    google.put_object("a", "b")
    google.reset()
    assert len(pids) >= 2
    until(lambda: not alive(pids))
    assert (google.jobs(), google.objects()) == ([], [])


def test_resource_has_the_projects_number_and_times(google: Google) -> None:
    """The resource has startTime once it runs, and endTime once it has ended."""
    google.settings(execute=False)
    made = google.call("POST", "/customJobs", job_body("job", "true", labels={"a": "b"})).json
    job = made["name"].rpartition("/")[2]
    assert made["name"] == f"projects/{NUMBER}/locations/{REGION}/customJobs/{job}"
    assert (made["state"], made["labels"], job.isdecimal()) == ("JOB_STATE_PENDING", {"a": "b"}, True)
    assert not {"startTime", "endTime", "error"} & set(made)
    google.begin(job)
    assert {"startTime"} == {"startTime", "endTime"} & set(google.call("GET", f"/customJobs/{job}").json)
    google.end(job)
    told = google.call("GET", f"/customJobs/{job}").json
    assert told["createTime"] <= told["startTime"] <= told["endTime"]
    assert abs(time.time() - google.job(job)["ended"]) < 60
