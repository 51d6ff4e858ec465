"""Submits to the user's machines that die or meet a dying host: one job or no job, and the next command finds out."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import processes
from doubles.sshhosts.cluster import Cluster
from doubles.waiting import until

pytestmark = pytest.mark.slow

# Answers the preflight, and sleeps in place of a rank: all programs that start jobs are real, but not torch.
IDLE = """\
#!/bin/sh
case "$*" in
*entrypoints.agent.boot*) exec sleep 600 ;;
"-I -S "*) exec {python} "$@" ;;
*) {python} "$@" | sed 's#{python}#/opt/bin/idle-python#' ;;  # who asks where it is
esac
"""
CONFIG = """\
name: crash
backend: ssh
script: train.py
resources: {{instances: 2}}
ssh: {{hosts: {hosts}, ssh_config: "{config}", python: idle-python}}
"""
SUBMIT = ("submit", "-d", "-y")


@pytest.fixture
def bed(ssh_pair: Cluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    """Return a project whose jobs do not train, on two hosts; masters end with the test."""
    ssh_pair.apply(monkeypatch)
    yield Bed(ssh_pair, tmp_path)
    for pid in processes.with_environment(CLOUDTRAIN_HOME=str(home)):
        if b"ControlMaster=yes" in Path(f"/proc/{pid}/cmdline").read_bytes():
            processes.kill(pid, signal.SIGKILL)


class Bed:
    """The hosts, and projects for them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.hosts, self.folder = cluster, cluster.hosts, folder
        for host in self.hosts:
            (host.bin / "idle-python").write_text(IDLE.format(python=sys.executable))
            (host.bin / "idle-python").chmod(0o755)

    def project(self, *hosts: str, name: str = "project") -> Path:
        """Return a project's folder for jobs on these hosts, in this order."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text("print('x')\n")
        text = CONFIG.format(hosts=json.dumps(hosts or ["h0", "h1"]), config=self.cluster.ssh_config)
        (folder / "cloudtrain.yaml").write_text(text)
        return folder

    def agents(self) -> list[int]:
        """Return the number of a job's processes on each host, without the process at the end of a channel."""
        return [
            0 if host.pid is None else sum("starting" in line or "sleep 600" in line for _, line in host.processes())
            for host in self.hosts
        ]

    def held(self) -> list[str]:
        """Return the hosts whose locks are held."""
        found = []
        for host in self.hosts:
            locks = list(host.path("/run/lock").rglob("*.lock"))
            assert locks, "no job has ever run there, or locks are elsewhere"
            for path in locks:
                with path.open() as lock:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        found.append(host.name)
        return found


def settle(cli: Any, bed: Bed) -> str:
    """Check the outcome of a submit that died, return the outcome, and stop the job."""
    listed = cli.ok("list", "--json")
    jobs = listed.json["jobs"]
    active = [job for job in jobs if job["state"] not in ("failed", "stopped")]
    assert len(active) <= 1, jobs
    if active:
        until(lambda: bed.agents() == [2, 2], 60, 0.1)  # the agent, and the process in place of its ranks
        assert bed.held() == ["h0", "h1"]
        assert cli("stop", active[0]["job"], "--now", "-y").code == 0
    for job in jobs:
        assert job["state"] != "failed" or "nothing runs" in job["detail"] or "not sent" in job["detail"], job
    until(lambda: bed.agents() == [0, 0], 15)
    assert bed.held() == []
    return "runs" if active else "never sent" if jobs and jobs[0]["state"] == "failed" else "nothing"


@pytest.mark.parametrize(
    ("signum", "count"),
    [
        (signal.SIGKILL, 6),
        pytest.param(signal.SIGKILL, 70, marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, 30, marks=pytest.mark.soak),
    ],
)
def test_submit_that_dies_at_any_time_leaves_one_job_or_none(cli: Any, bed: Bed, signum: int, count: int) -> None:
    """After `kill -9` or Ctrl-C the job is adopted and complete, or was never sent and holds no host."""
    seed, folder = random.Random(f"submit {signum}"), bed.project()
    begin_s = time.monotonic()
    assert cli(*SUBMIT, cwd=folder).code == 0
    whole_s = time.monotonic() - begin_s
    assert settle(cli, bed) == "runs"
    for _ in range(count):
        submit = cli.start(*SUBMIT, cwd=folder)
        time.sleep(seed.uniform(0.2, 1.0) * whole_s)
        submit.send_signal(signum)
        _, said = submit.communicate(timeout=90)
        assert submit.returncode in (-signum, 0, 130), said
        assert "Traceback" not in said
        settle(cli, bed)


@pytest.mark.soak
@pytest.mark.parametrize(("how", "count"), [("power_off", 1), ("power_off", 10), ("cut", 10)])
def test_host_that_vanishes_during_a_submit_leaves_nothing(cli: Any, bed: Bed, how: str, count: int) -> None:
    """Exit code 7, and no process remains on the second host; when the first is back, the next submit works."""
    seed, folder = random.Random(how), bed.project()
    for _ in range(count):
        submit = cli.start(*SUBMIT, cwd=folder)
        time.sleep(seed.uniform(0.5, 2.0))
        getattr(bed.hosts[1], how)()
        _, said = submit.communicate(timeout=120)
        assert "Traceback" not in said
        assert submit.returncode in (0, 7), said
        if submit.returncode == 7:
            until(lambda: bed.hosts[0].processes() == [], 15)
        bed.hosts[1].boot() if how == "power_off" else bed.hosts[1].join()
        for job in cli("list", "--json", "--active").json["jobs"]:
            cli("stop", job["job"], "--now", "-y")
        until(lambda: bed.agents() == [0, 0], 30)
        until(lambda: cli(*SUBMIT, cwd=folder).code == 0, 120)  # a host that has just booted may be slow to answer
        assert settle(cli, bed) == "runs"


def race(cli: Any, bed: Bed) -> list[tuple[int, str]]:
    """Submit twice at the same time, in opposite orders of the hosts; return both ends. Stop the job."""
    folders = [bed.project("h0", "h1", name="one"), bed.project("h1", "h0", name="two")]
    both = [cli.start(*SUBMIT, cwd=folder) for folder in folders]
    ended = [(each.communicate(timeout=120)[1], each.returncode) for each in both]
    for job in cli("list", "--json", "--active").json["jobs"]:
        cli("stop", job["job"], "--now", "-y")
    return [(code, said) for said, code in ended]


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_simultaneous_submits_for_the_same_hosts_have_one_winner(cli: Any, bed: Bed, count: int) -> None:
    """One submit gets all hosts, the second learns the holder with exit code 5; never both, and never neither."""
    for _ in range(count):
        ended = race(cli, bed)
        assert sorted(code for code, _ in ended) == [0, 5], ended
        said = next(said for code, said in ended if code == 5)
        assert "crash-" in said, said
        until(lambda: bed.agents() == [0, 0], 15)


# Writes lines of all kinds, as a rank would: long lines, lines with invalid text, and lines in pieces.
WRITER = r"""
import json, os, sys, time
root = sys.argv[1]
os.makedirs(f"{root}/log")
with open(f"{root}/log/rank-0.log", "ab", buffering=0) as log:
    for number in range(1500):
        kind = number % 50
        body = {7: b"\xff\xfe\xc3", 11: b"long " * 40000, 13: "é 日本".encode()}.get(kind, b"")
        line = b"line %d %s\n" % (number, body)
        cut = len(line) // 2 if kind in (11, 17) else 0
        for part in (line[:cut], line[cut:]):
            log.write(part)
        time.sleep(0.01)
with open(f"{root}/exit.json", "w") as file:
    json.dump({"ended_s": time.time()}, file)
"""
# Reads from the noted cursor on, and notes each page's lines with its cursor in one step.
READER = """
import json, os, sys
from cloudtrain.launcher.backend import load
from cloudtrain.launcher.errors import UnreachableError
state, ref = sys.argv[1], json.loads(sys.argv[2])
told = json.load(open(state)) if os.path.exists(state) else {"cursor": None, "pages": 0, "done": False}
while not told["done"]:
    try:
        page = load("ssh").logs(ref, told["cursor"])
    except UnreachableError:
        continue
    lines = [line.text for line in page.lines]
    number = told["pages"]
    with open(f"{state}.page-{number}", "w") as file:
        json.dump(lines, file)
    told = {"cursor": page.cursor, "pages": number + 1, "done": any("line 1499" in text for text in lines)}
    with open(f"{state}.part", "w") as file:
        json.dump(told, file)
    os.replace(f"{state}.part", state)
"""


@pytest.mark.soak
def test_killed_and_disconnected_reader_loses_and_repeats_nothing(cli: Any, bed: Bed, tmp_path: Path) -> None:
    """Reader, master and connection die at any moment, yet long, unfinished and invalid lines arrive byte for byte."""
    seed, state, host = random.Random(7), tmp_path / "state", bed.hosts[0]
    target = {"name": "h0", "ssh_config": str(bed.cluster.ssh_config), "python": sys.executable}
    node = {"host": target, "root": "/home/root/job", "checkpoints": "/home/root/saved", "output": "/home/root/output"}
    ref = {"nodes": [node], "nproc_per_node": 1, "can_shrink": False}
    writer = threading.Thread(target=host.run, args=([sys.executable, "-c", WRITER, "/home/root/job"],))
    writer.start()
    until((host.home / "job/log/rank-0.log").exists)
    end_s, environ = time.monotonic() + 150, cli.environment()
    for number in itertools.count():
        reader = subprocess.Popen([sys.executable, "-c", READER, state, json.dumps(ref)], env=environ)
        with contextlib.suppress(subprocess.TimeoutExpired):
            reader.wait(seed.uniform(0.8, 3.0) if number < 8 else end_s - time.monotonic())
        if number % 4 == 1:
            host.cut()
            time.sleep(seed.uniform(0.1, 1.0))
            host.join()
        elif number % 4 == 2:
            for pid in processes.with_environment(CLOUDTRAIN_HOME=str(cli.home)):
                if pid != reader.pid:
                    processes.kill(pid, signal.SIGKILL)
            time.sleep(seed.uniform(0.1, 1.0))
        reader.kill()
        if reader.wait() == 0:
            break
        assert time.monotonic() < end_s
    writer.join()
    pages = json.loads(state.read_text())["pages"]
    lines = [line for page in range(pages) for line in json.loads(Path(f"{state}.page-{page}").read_text())]
    written = (host.home / "job/log/rank-0.log").read_bytes()
    assert number > 3
    assert lines == written.decode(errors="replace").removesuffix("\n").split("\n")
