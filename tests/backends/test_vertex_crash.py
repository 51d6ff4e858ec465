"""Submits to Vertex AI that die, are lost, or arrive late: one job runs or no job, and the next command finds out."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT, REGION
from doubles.killed import KILLED
from doubles.waiting import until

CONFIG = f"""\
name: j
backend: vertex
script: loop.py
resources: {{instances: 1, instance_type: n1-standard-4}}
limits: {{max_duration: 1h}}
secrets: [TOKEN]
vertex: {{project: {PROJECT}, location: {REGION}, staging_bucket: {BUCKET}}}
"""
SUBMIT = ("submit", "-d", "-y")
TOKEN = {"TOKEN": "sesame-open"}
SCRIPT = """\
import hashlib, os
print("ran", hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest(), flush=True)
"""

VERTEX = "cloudtrain.backends.vertex"
FOLDER = "cloudtrain.backends.job_folder:JobFolder"
STEPS = {
    "s1": (f"{FOLDER}.claim", "before", "never sent"),
    "s2": (f"{FOLDER}.claim", "after", "never sent"),
    "s3": (f"{VERTEX}.jobs:put_secrets", "after", "never sent"),
    "s4": (f"{FOLDER}.put_order", "after", "never sent"),
    "s5": (f"{VERTEX}.jobs:create_once", "after", "runs"),
    "s6": (f"{VERTEX}.jobs:send", "after", "runs"),
    "s7": ("cloudtrain.launcher.store.registry:Registry.mark_sent", "before", "runs"),
}


@pytest.fixture
def folder(folder: Path, google_project: Google) -> Path:
    """Return a project's folder; its jobs run no containers."""
    google_project.settings(execute=False)
    (folder / "loop.py").write_text(SCRIPT)
    return folder


@pytest.mark.slow
@pytest.mark.soak
def test_submit_killed_at_any_step_leaves_one_job_or_none(cli: Any, folder: Path, google: Google) -> None:
    """After `kill -9` the next command finds one job or no job, and cleans up after an unsent job."""
    dying = {
        name: subprocess.Popen(
            [sys.executable, "-c", KILLED, target, when, *SUBMIT, "--name", name],
            cwd=folder,
            env=cli.environment(TOKEN),
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (target, when, _) in STEPS.items()
    }
    said = {name: process.communicate(timeout=200)[1] for name, process in dying.items()}
    assert {process.returncode for process in dying.values()} == {-signal.SIGKILL}, said
    assert len(google.secrets()) == 5  # of the submits that were killed later
    listed = {job["job"]: job for job in cli("list", "--json").json["jobs"]}
    found = {name: "runs" if job["state"] == "pending" else "never sent" for name, job in listed.items()}
    assert found == {name: expected for name, (_, _, expected) in STEPS.items()}
    assert all("nothing runs" in job["detail"] for job in listed.values() if job["state"] == "failed")
    assert sorted(job["display_name"] for job in google.jobs()) == ["s5-1", "s6-1", "s7-1"]
    assert [name.partition("-1-")[0] for name in google.secrets()] == ["s5", "s6", "s7"]
    orders = [name.split("/")[2] for name in google.objects("cloudtrain/jobs") if name.endswith("order.json")]
    assert orders == ["s5", "s6", "s7"]
    again = cli(*SUBMIT, "--name", "s4", cwd=folder, env=TOKEN)
    assert (again.code, google.jobs()[-1]["display_name"]) == (0, "s4-2"), again.stderr


@pytest.mark.slow
def test_submits_killed_at_random_leave_one_job_or_none(cli: Any, folder: Path, google: Google) -> None:
    """Ten parallel submits with every second answer lost: the listed jobs are the running jobs, each once."""
    seed = random.Random(6)
    google.fault("jobs.create", "lost", every=2)
    for call in ("objects.insert", "secrets.*", "jobs.list"):  # else a submit ends before the test sees its progress
        google.fault(call, "slow", delay_s=0.3)
    names = [f"r{number}" for number in range(10)]
    submits = {name: cli.start(*SUBMIT, "--name", name, cwd=folder, env=TOKEN) for name in names}
    dies_at = {name: seed.randint(2, 8) for name in names[1:]}
    end = time.monotonic() + 200
    while any(process.poll() is None for process in submits.values()):
        assert time.monotonic() < end
        told = json.dumps(google.objects("cloudtrain/jobs") + google.secrets() + google.jobs())
        for name, most in dies_at.items():  # more mentions of the name mean more progress
            if told.count(f"{name}/") + told.count(f"{name}-1") >= min(most, 4) and submits[name].poll() is None:
                time.sleep(seed.random() * 0.02)
                submits[name].kill()
        time.sleep(0.02)
    for process in submits.values():
        process.communicate()
    google.clear_faults()
    listed = cli("list", "--json").json["jobs"]
    runs = sorted(f"{job['job']}-1" for job in listed if job["state"] == "pending")
    assert sorted(job["display_name"] for job in google.jobs()) == runs
    assert ("r0-1" in runs, {job["state"] for job in listed} <= {"pending", "failed"}) == (True, True)
    assert sum(process.returncode == -signal.SIGKILL for process in submits.values()) > 3
    assert sorted(name.partition("-1-")[0] for name in google.secrets()) == [name[:-2] for name in runs]


def digest() -> str:
    """Return the digest that the script prints of its secret."""
    return hashlib.sha256(TOKEN["TOKEN"].encode()).hexdigest()


@pytest.mark.slow
def test_late_job_finds_its_place_taken(vertex: Any, folder: Path, google: Google) -> None:
    """The replicas of the late job see that the order is not theirs, and end; the job runs once, with its secret."""
    google.settings(execute=True)
    google.fault("jobs.create", "late", count=1, delay_s=2.0)
    done = vertex(*SUBMIT, "--name", "one", cwd=folder, env=TOKEN)
    assert done.code == 0, done.stderr
    until(lambda: len(google.jobs()) == 2)
    first, late = (job["id"] for job in google.jobs())
    google.wait(late, "FAILED")
    assert "a later submit of this job replaced this one, which must not run" in google.log(late)
    assert google.job(late)["replicas"][0]["codes"] == [1]
    google.wait(first, "SUCCEEDED")
    assert (f"ran {digest()}" in google.log(first), "ran" in google.log(late).split()) == (True, False)
    assert (vertex("wait", "one").code, google.secrets()) == (0, [])
    assert "sesame" not in google.log(first) + google.log(late)


@pytest.mark.soak  # test_late_job_finds_its_place_taken
@pytest.mark.slow
def test_job_that_arrives_after_the_give_up_runs_nothing(vertex: Any, folder: Path, google: Google) -> None:
    """All tries arrive after the report that nothing runs, and the report stays true."""
    google.settings(execute=True)
    google.fault("jobs.create", "late", delay_s=8.0)
    assert vertex(*SUBMIT, "--name", "one", cwd=folder, env=TOKEN).code == 7
    assert "nothing runs" in vertex("status", "one", "--json").json["detail"]
    assert google.jobs() == []
    google.clear_faults()
    until(lambda: len(google.jobs()) == 3)
    for job in google.jobs():
        google.wait(job["id"], "FAILED")
        assert "the container order was withdrawn: this job must not run" in google.log(job["id"])
        assert google.job(job["id"])["replicas"][0]["codes"] == [1]
    assert google.secrets() == []
