"""Random gang jobs in line for the same hosts, against real sshd in namespaces, while agents are killed.

What tests/backends/test_ssh_queue.py holds for two hosts and a few jobs is held here for eight hosts and two hundred.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from report import Report
from sandbox import Sandbox, sandbox

from doubles.sshhosts import lightpython
from doubles.sshhosts.cluster import Cluster, missing

HOSTS, AT_ONCE = 8, 3
WAIT_S = 1800.0  # without a job that ends, the line is stuck
GAP_S = 5.0
CONFIG = """\
name: gang
script: train.py
backend: ssh
resources: {{instances: {count}}}
limits: {{max_duration: {cap_s}s}}
env: {{RUN_S: "{run_s}"}}
ssh: {{hosts: [{hosts}], ssh_config: "{ssh_config}", python: {python}}}
"""
# Notes start and end in the host's home, and whether a different job runs on the host at the same time.
TRAIN = """\
import fcntl, os, time
home = os.path.expanduser("~")
alone = open(f"{home}/alone", "w")
def note(what):
    with open(f"{home}/events", "a") as file:
        file.write(f"{what} {os.environ['CLOUDTRAIN_JOB']} {time.time()}\\n")
try:
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    note("twice")
note("start")
time.sleep(float(os.environ["RUN_S"]))
note("end")
"""


def run(count: int = 200, kills: int = 20) -> Report:
    """Submit `count` random gangs, kill `kills` agents that wait or run, and wait for the end of all jobs."""
    report = Report(f"ssh: {count} random gangs in line for {HOSTS} hosts, {kills} agents killed")
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="cloudtrain-bench-") as folder:
        cluster = Cluster.start(HOSTS, Path(folder) / "hosts")
        try:
            for host in cluster.hosts:
                lightpython.install(host)
            with sandbox(cluster.environ) as box:
                sizes, killed = _submitted(box, cluster, count, kills)
                states = _ended(box)
                _judge(report, cluster, sizes, killed, states)
        finally:
            cluster.stop()
    return report


def _submitted(box: Sandbox, cluster: Cluster, count: int, kills: int) -> tuple[dict[str, int], int]:
    """Submit the jobs, AT_ONCE at a time, and kill agents between; return the sizes by job, and the kills."""
    draw, sizes, killed, running = random.Random(1), dict[str, int](), 0, list[subprocess.Popen[str]]()
    for number in range(count):
        size, name = draw.randint(1, HOSTS), f"g{number}"
        hosts = draw.sample([host.name for host in cluster.hosts], size)
        run_s = draw.uniform(0.5, 3.0)
        config = CONFIG.format(
            count=size,
            cap_s=int(run_s * draw.choice([1, 2, 6])) + 60,
            run_s=f"{run_s:.2f}",
            hosts=", ".join(hosts),
            ssh_config=cluster.environ["SSH_CONFIG"],
            python=lightpython.PATH,
        )
        (box.folder / "train.py").write_text(TRAIN)
        (box.folder / f"{name}.yaml").write_text(config)
        sizes[name] = size
        running.append(box.start("submit", "-d", "-y", "--queue", "--name", name, "-f", f"{name}.yaml"))
        while len([each for each in running if each.poll() is None]) >= AT_ONCE:
            time.sleep(0.05)
        if number % max(1, count // max(1, kills)) == 0 and killed < kills:
            killed += _kill_one(cluster, draw)
    for each in running:
        if each.wait(timeout=300):
            raise RuntimeError(each.communicate()[1])
    return sizes, killed


def _kill_one(cluster: Cluster, draw: random.Random) -> int:
    """Kill the agent of a node that waits or runs; return the number of kills."""
    living = []
    for host in cluster.hosts:
        for path in host.folder.glob("home/*/.cloudtrain/jobs/*/attempt-1/node-*/state.json"):
            if not (path.parent / "exit.json").exists():
                living.append((host, json.loads(path.read_text())["pid"]))
    if not living:
        return 0
    host, pid = draw.choice(living)
    with contextlib.suppress(subprocess.CalledProcessError):  # ended meanwhile
        host.run(["kill", "-9", str(pid)])
        return 1
    return 0


def _ended(box: Sandbox) -> Counter[str]:
    """Wait until all jobs have ended; return the number of jobs by state and reason."""
    since_s, before = time.monotonic(), -1
    while active := len(box.jobs(active=True)):
        if active != before:
            since_s, before = time.monotonic(), active
        assert time.monotonic() - since_s < WAIT_S, f"{active} jobs wait for ever"
        time.sleep(3.0)
    return Counter(f"{job['state']} {job['reason'] or ''}".strip() for job in box.jobs())


def _taken(cluster: Cluster) -> dict[str, list[float]]:
    """Return when the agents of each job had their locks, in unix seconds."""
    found = defaultdict[str, list[float]](list)
    for host in cluster.hosts:
        for path in host.folder.glob("home/*/.cloudtrain/jobs/*/attempt-1/node-*/state.json"):
            found[path.parts[-4]].append(json.loads(path.read_text())["started_s"])
    return found


def _since(times_s: list[float], at_s: float) -> float:
    """Return the seconds since the last of the times before `at_s`; 0 without such a time."""
    return at_s - max((time_s for time_s in times_s if time_s < at_s), default=at_s)


def _judge(report: Report, cluster: Cluster, sizes: dict[str, int], killed: int, states: Counter[str]) -> None:
    events, twice = defaultdict[str, list[tuple[float, str, int]]](list), 0
    for number, host in enumerate(cluster.hosts):
        for path in host.folder.glob("home/*/events"):
            for line in path.read_text().splitlines():
                what, job, time_s = line.split()
                if what == "twice":
                    twice += 1
                    before = path.read_text().partition(line)[0].splitlines()[-4:]
                    report.notes.append(f"{host.name}: {line}, after {before}")
                events[what].append((float(time_s), job, number))
    starts: dict[str, list[float]] = defaultdict(list)
    for time_s, job, _ in events["start"]:
        starts[job].append(time_s)
    whole = [job for job, times in starts.items() if len(times) == sizes[job]]
    taken = _taken(cluster)
    ends = [time_s for time_s, _, _ in events["end"]]
    gangs = [job for job in whole if sizes[job] == HOSTS]
    waits = [_since(ends, max(taken[job])) for job in gangs]
    gaps = [_since(ends, min(starts[job])) for job in gangs]
    report.count("hosts used by two jobs at once", twice, 0)
    report.count("jobs that started on a part of their hosts", len(starts) - len(whole), 0)
    report.count("succeeded", states["succeeded"], len(sizes) - states["failed node_failure"])
    report.count("more lost jobs than kills", max(0, states["failed node_failure"] - killed), 0)
    # A killed agent's gang keeps its place until the silence of 6 s proves the loss.
    worst_s = max(waits, default=0.0)
    is_met = None if killed else worst_s <= GAP_S
    bar = "" if killed else f"{GAP_S:.0f} s"
    report.timing("longest time from the last end to all locks of the next gang", f"{worst_s:.1f} s", bar, ok=is_met)
    # The agents of all hosts then import torchrun on the processors of this one machine.
    report.timing("the same to the gang's first line", f"{max(gaps, default=0.0):.1f} s", "")
    report.notes.append(f"{killed} agents killed; {', '.join(f'{name}: {number}' for name, number in states.items())}")


if __name__ == "__main__":
    sizes = [int(each) for each in sys.argv[1:]]
    run(*sizes).show()
