"""Submits to a real Slurm that die, race, or lose an answer: exactly one job each; how often Slurm is asked."""

import json
import random
import signal
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.channel.calls import open_fleet
from cloudtrain.backends.channel.hosts import Host
from cloudtrain.backends.slurm import jobs_submission as submission
from cloudtrain.backends.slurm.channel import Login
from doubles.signatures import MakeProject
from doubles.slurm.handle import Slurm
from doubles.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.soak]

# Jobs that wait for an hour: their number alone counts.
CONFIG = """\
backend: slurm
resources: {instances: 1}
limits: {max_duration: 10m}
slurm: {login: alice@login, ssh_config: "${SSH_CONFIG}", cpus_per_node: 1, raw: [--begin=now+1hour]}
"""
SUBMIT = ("submit", "-d", "-y", "--json")
KILLS, LOST, RACERS = 70, 30, 50
RUNNING_S, ASK_S = 2.0, 15.0
REQUESTS = 2  # of a call of `scontrol show job`, by sdiag's count


@pytest.fixture
def folder(slurm: Slurm, project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project whose jobs wait in the queue of a Slurm that the command finds."""
    slurm.apply(monkeypatch)
    return project(CONFIG, script="train.py", text="print('x')\n")


def queue(slurm: Slurm) -> Counter[str]:
    """Return the names of the jobs in the queue."""
    return Counter(slurm.admin("squeue", "-h", "-o", "%j").split())


@pytest.mark.timeout(1200)
def test_killed_submits_make_one_job_each(cli: Any, slurm: Slurm, folder: Path) -> None:
    """kill -9 at a random step, then the same submit again, by its idempotency key: one job for each key."""
    seed, begun = random.Random("slurm"), time.monotonic()
    assert cli(*SUBMIT, "--idempotency-key", "first", cwd=folder).code == 0
    whole_s = time.monotonic() - begun
    for number in range(KILLS):
        keyed = (*SUBMIT, "--idempotency-key", f"key-{number}")
        submit = cli.start(*keyed, cwd=folder)
        time.sleep(seed.uniform(0.0, 1.0) * whole_s)
        submit.send_signal(signal.SIGKILL)
        submit.communicate(timeout=60)
        cli.ok(*keyed, cwd=folder)
    found = queue(slurm)
    assert (len(found), set(found.values())) == (KILLS + 1, {1})
    assert not [name for name in slurm.admin("squeue", "-h", "-o", "%r").split() if "Held" in name]
    sent = {job["job"] for job in cli("list", "--json").json["jobs"] if job["state"] == "pending"}
    assert {name.rpartition("-")[0] for name in found} == sent


def test_lost_answers_make_one_job_each(cli: Any, slurm: Slurm, folder: Path) -> None:
    """sbatch says that its request has timed out, and the controller has the job: the submit finds the job."""
    for _ in range(LOST):
        slurm.lose_answers(1)
        cli.ok(*SUBMIT, cwd=folder)
    found = queue(slurm)
    assert (len(found), set(found.values())) == (LOST, {1})


def test_racing_submits_make_one_job_each(cli: Any, slurm: Slurm, folder: Path) -> None:
    """Submits at the same moment, over one connection to the login node, do not disturb each other."""
    submits = [cli.start(*SUBMIT, cwd=folder) for _ in range(RACERS)]
    ended = [(each.communicate(timeout=300), each.returncode) for each in submits]
    assert {code for _, code in ended} == {0}, [said for (_, said), code in ended if code]
    found = queue(slurm)
    assert {f"{json.loads(out)['job']}-1" for (out, _), _ in ended} == set(found)
    assert (len(found), set(found.values())) == (RACERS, {1})


def test_job_runs_within_two_seconds_of_sbatch(slurm: Slurm, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Over a warm channel, on idle nodes: from the call of sbatch to the state RUNNING."""
    slurm.apply(monkeypatch)
    fleet = open_fleet()
    login = Login.at(fleet, Host("login", "alice", ssh_config=slurm.environ["SSH_CONFIG"]))
    (slurm.home() / "job.sh").write_text("#!/bin/bash\nsleep 30\n")
    seconds = []
    for number in range(10):
        begun = time.monotonic()
        job = submission.submit(
            login.run, "/home/alice", f"quick-{number}", ["--nodes=2", f"--job-name=quick-{number}"]
        )
        until(lambda job=job: "JobState=RUNNING" in login.run(["scontrol", "show", "job", str(job)]).stdout, 10, 0.02)
        seconds.append(time.monotonic() - begun)
        login.run(["scancel", str(job)])
        until(lambda: not slurm.admin("squeue", "-h"))
    fleet.close()
    print(f"sbatch to RUNNING: median {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s")
    assert statistics.median(seconds) <= RUNNING_S


def test_followers_rarely_ask_slurm(cli: Any, slurm: Slurm, folder: Path) -> None:
    """Two followers and repeated `status` of a waiting job ask Slurm once in 15 s, all together."""
    job = cli(*SUBMIT, cwd=folder).json["job"]
    followers = [cli.start("logs", "-f", job, cwd=folder), cli.start("wait", job, cwd=folder)]
    begun, before, seconds = time.monotonic(), slurm.requests(), []
    while time.monotonic() - begun < 4 * ASK_S:
        once = time.monotonic()
        assert cli("status", job, "--json").json["state"] == "pending"
        seconds.append(time.monotonic() - once)
    asked = slurm.requests() - before
    print(f"{asked} requests in {time.monotonic() - begun:.0f} s; status: median {statistics.median(seconds):.2f} s")
    assert asked <= REQUESTS * (4 + 1)
    assert cli("stop", job, "-y").code == 0
    assert [follower.wait(60) for follower in followers] == [9, 9]
    for follower in followers:
        follower.communicate()
