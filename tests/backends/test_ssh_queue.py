"""Jobs in line for hosts that are in use, on real hosts with sshd."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from doubles import waiting
from doubles.sshhosts import lightpython
from doubles.sshhosts.cluster import Cluster

pytestmark = pytest.mark.slow

EVERY_S = 1.0  # each question about a state is a command with its connections

# Replaces torchrun: notes start and end, and runs until a file `go` appears.
TRAIN = """\
import os, time
from pathlib import Path

out = Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"])
with (out / "starts").open("a") as file:
    file.write(f"{time.time()}\\n")
Path("saved").mkdir(exist_ok=True)
(Path("saved") / "step").write_text("1")
(out / "pid").write_text(str(os.getpid()))
while not (out / "go").exists():
    time.sleep(0.05)
(out / "end").write_text(str(time.time()))
"""


def config(more: str = "", hosts: str = "h0, h1", instances: int = 2) -> str:
    """Return the config of a job on the hosts."""
    return f"""\
backend: ssh
resources: {{instances: {instances}}}
keep: [saved/]
{more}
ssh: {{hosts: [{hosts}], ssh_config: "${{SSH_CONFIG}}", python: {lightpython.PATH}}}
"""


@pytest.fixture
def send(cli: Any, project: Callable[..., Path]) -> Iterator[Callable[..., str]]:
    """Return a function that submits a job and returns its id; all jobs are stopped in the end."""
    jobs: list[str] = []

    def submit(name: str, text: str, *options: str) -> str:
        where = project(text, script="train.py", text=TRAIN)
        done = cli.ok("submit", "-d", "-y", "--json", "--name", name, *options, cwd=where)
        jobs.append(done.json["job"])
        return jobs[-1]

    yield submit
    for job in jobs:
        cli("stop", "--now", "-y", job)


@pytest.fixture
def state_of(cli: Any) -> Callable[[str], dict[str, Any]]:
    """Return a function that returns a job's state as JSON."""
    return lambda job: dict(cli("status", job, "--json").json)


@pytest.fixture
def until(state_of: Callable[[str], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function that waits for a job's state, and returns the job."""

    def wait(job: str, *states: str) -> dict[str, Any]:
        waiting.until(lambda: state_of(job)["state"] in states, 60, EVERY_S)
        return state_of(job)

    return wait


@pytest.fixture
def in_line(state_of: Callable[[str], dict[str, Any]]) -> Callable[[str], Any]:
    """Return a function that waits until a job has its place in line, and returns the place with the reason."""

    def wait(job: str) -> Any:
        waiting.until(lambda: (state_of(job)["queue"] or {}).get("start_s"), 60, EVERY_S)
        return state_of(job)["queue"]

    return wait


def output(cluster: Cluster, job: str, node: int = 0) -> Path:
    """Return the output folder of a job's node."""
    return next(path for path in _jobs(cluster, node) if path.name == job) / "output"


def _jobs(cluster: Cluster, node: int) -> list[Path]:
    return list(cluster.hosts[node].folder.glob("home/*/.cloudtrain/jobs/*"))


def finish(cluster: Cluster, job: str) -> None:
    """Let the ranks of a running job end."""
    for number in range(len(cluster.hosts)):
        for path in _jobs(cluster, number):
            if path.name == job:
                (path / "output/go").touch()


def test_gang_starts_at_the_end_of_the_job_before(
    pair: Cluster, send: Any, until: Any, state_of: Any, in_line: Any, cli: Any
) -> None:
    """A queued job of two hosts waits, says why, and starts when the first job ends."""
    first = send("first", config("limits: {max_duration: 1h}"))
    until(first, "running")
    second = send("second", config(), "--queue")
    found = in_line(second)
    assert (found["place"], found["of"]) == (1, 1)
    assert "job first holds h0, h1" in found["reason"]
    assert 3000 < found["start_s"] - time.time() < 3700
    assert (state_of(second)["state"], state_of(second)["started_s"]) == ("pending", None)
    assert "place 1 of 1 in line" in cli("status", second).stdout
    finish(pair, first)
    until(second, "running")
    until(first, "succeeded")
    waiting.until((output(pair, second) / "starts").exists)
    ended_s = float((output(pair, first) / "end").read_text())
    assert float((output(pair, second) / "starts").read_text().split()[0]) - ended_s < 15
    assert state_of(second)["queue"] is None
    finish(pair, second)
    assert until(second, "succeeded")["exit_code"] == 0


def test_commands_show_the_line(pair: Cluster, send: Any, until: Any, in_line: Any, cli: Any, project: Any) -> None:
    """`hosts` and `list` show the jobs in line, in order; a small job fills a gap only if it ends in time."""
    first = send("first", config("limits: {max_duration: 10m}", hosts="h0", instances=1))
    until(first, "running")
    head = send("head", config(), "--queue")
    in_line(head)
    late = send("late", config("limits: {max_duration: 1h}", hosts="h1", instances=1), "--queue")
    assert in_line(late)["place"] == 2
    small = send("small", config("limits: {max_duration: 5m}", hosts="h1", instances=1), "--queue")
    until(small, "running")  # within the 10 minutes until the head's start
    where = project(config(), script="train.py", text=TRAIN)
    uses = [(each["host"], each["use"], each["job"]) for each in cli("hosts", "--json", cwd=where).json["hosts"]]
    assert uses == [
        *(("h0", "held", "first"), ("h0", "waits", "head"), ("h1", "held", "small"), ("h1", "waits", "head")),
        ("h1", "waits", "late"),
    ]
    assert "starts by" in cli("hosts", cwd=where).stdout
    assert "2 of 2 in line" in cli("list").stdout


@pytest.mark.soak  # test_commands_show_the_line lists the jobs of a host, too
def test_list_tells_all_jobs_of_the_same_hosts(pair: Cluster, send: Any, until: Any, cli: Any) -> None:
    """Jobs that share hosts, asked at once by several commands: no job gets the answer or the silence of another."""
    until(send("first", config()), "running")
    for name in ("second", "third", "fourth"):
        send(name, config(), "--queue")
    with ThreadPoolExecutor(2) as threads:
        lists = list(threads.map(lambda _: cli("list", "--json"), range(6)))
    for each in lists:
        assert (each.code, each.stderr, each.json["not_answered"]) == (0, "", {})
        states = {job["job"]: job["state"] for job in each.json["jobs"]}
        assert states == {**dict.fromkeys(("second", "third", "fourth"), "pending"), "first": "running"}


@pytest.mark.soak
def test_list_of_many_jobs_beside_a_slow_and_a_dead_host(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, send: Any, until: Any, cli: Any
) -> None:
    """20 jobs on 4 hosts, 100 lists by 4 processes: each is right, and no list waits for longer than its patience."""
    four = cluster(4)
    four.apply(monkeypatch)
    for host in four.hosts:
        lightpython.install(host)
    # No job of two hosts is on the dead host: the other host's agent would end the job, and rightly so.
    places = ["h0", "h1", "h2", "h3", *["h0, h1", "h1, h2", "h0, h2", "h3"] * 3, *["h0, h1", "h1", "h0", "h3"]]
    for number, hosts in enumerate(places):
        job = send(f"job-{number}", config(hosts=hosts, instances=len(hosts.split())), "--queue")
        until(job, "running" if number < 4 else "pending")
    four.hosts[2].slow(delay_ms=150)
    four.hosts[3].blackhole()
    wanted = {f"job-{number}": "running" if number < 4 else "pending" for number in range(20)}
    silent = {f"job-{number}" for number, hosts in enumerate(places) if hosts == "h3"}
    took_s: list[float] = []

    def wrong(_: int) -> list[str]:
        begin_s = time.monotonic()
        done = cli("list", "--json")
        took_s.append(time.monotonic() - begin_s)
        found = {job["job"]: job for job in done.json["jobs"]}
        unseen = {*done.json["not_answered"], *(name for name in found if found[name]["unreachable_since_s"])}
        differs = [name for name, state in wanted.items() if found[name]["state"] != state]
        return [*differs, *sorted(unseen - silent)]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(wrong, range(100)))
    for host in four.hosts[2:]:
        host.join()
    took_s.sort()
    print(f"{found.count([])} of 100 right; {took_s[0]:.1f}, {took_s[50]:.1f}, {took_s[-1]:.1f} s: least, median, most")
    assert found == [[]] * 100
    assert took_s[-1] < 20


def test_job_without_queue_does_not_pass_the_line(pair: Cluster, send: Any, until: Any, cli: Any, project: Any) -> None:
    """A plain submit is refused while a host is in use, and while a free host is reserved for a job in line."""
    first = send("first", config(hosts="h0", instances=1))
    until(first, "running")
    send("head", config(), "--queue")
    where = project(config("limits: {max_duration: 2d}", hosts="h1", instances=1), script="train.py", text=TRAIN)
    done = cli("submit", "-d", "-y", cwd=where)
    assert done.code == 5
    assert "job head waits in line for it" in done.stderr
    assert "hint: wait in line: --queue; " in done.stderr
    done = cli("submit", "-d", "-y", cwd=project(config(hosts="h0", instances=1), script="train.py", text=TRAIN))
    assert (done.code, "hint: wait in line: --queue; cloudtrain stop first" in done.stderr) == (5, True), done.stderr
    assert {job["job"] for job in cli("list", "--json").json["jobs"]} == {"first", "head"}


@pytest.mark.soak
def test_wait_ends_at_max_wait(pair: Cluster, send: Any, until: Any, state_of: Any) -> None:
    """`limits.max_wait` ends the wait with its reason; no rank has started, and no cost arises."""
    first = send("first", config())
    until(first, "running")
    second = send("second", config("limits: {max_wait: 2s}"), "--queue")
    found = until(second, "failed")
    assert (found["reason"], found["started_s"], found["exit_code"]) == ("no_machines", None, 5)
    assert "no machines within limits.max_wait" in found["detail"]
    assert not (output(pair, second) / "starts").exists()


def test_stop_leaves_the_line(pair: Cluster, send: Any, until: Any, cli: Any, project: Any) -> None:
    """A waiting job obeys `stop`, and its tickets are gone."""
    where = project(config(), script="train.py", text=TRAIN)
    first = send("first", config())
    until(first, "running")
    second = send("second", config(), "--queue")
    assert cli("stop", "-y", second).code == 0
    assert until(second, "stopped")["reason"] == "user"
    assert [each["use"] for each in cli("hosts", "--json", cwd=where).json["hosts"]] == ["held", "held"]


@pytest.mark.soak
@pytest.mark.parametrize("node", [0, 1])
def test_killed_waiting_agent_ends_its_gang_alone(pair: Cluster, send: Any, until: Any, cli: Any, node: int) -> None:
    """A gang that loses a waiting agent fails with the reason, and the next job in line starts."""
    first = send("first", config())
    until(first, "running")
    second, third = send("second", config(), "--queue"), send("third", config(), "--queue")
    state = next(output(pair, second, node).parent.glob(f"attempt-1/node-{node}/state.json"))
    pair.hosts[node].run(["kill", "-9", str(json.loads(state.read_text())["pid"])])
    found = until(second, "failed")
    assert found["reason"] == "node_failure"
    assert f"waiting agent of node {node} was lost" in found["error"]["message"]
    finish(pair, first)
    until(third, "running")


@pytest.mark.soak
def test_killed_running_agent_leaves_no_rank_beside_the_next_job(
    pair: Cluster, send: Any, until: Any, in_line: Any
) -> None:
    """The lock of a killed agent is free at once, so its rank must end with the agent; the next job then starts."""
    first = send("first", config(hosts="h0", instances=1), "--queue")
    until(first, "running")
    waiting.until((output(pair, first) / "pid").exists)
    second = send("second", config(hosts="h0", instances=1), "--queue")
    in_line(second)
    state = json.loads((output(pair, first).parent / "attempt-1/node-0/state.json").read_text())
    rank = (output(pair, first) / "pid").read_text()
    pair.hosts[0].run(["kill", "-9", str(state["pid"])])
    waiting.until((output(pair, second) / "starts").exists, 60)
    pair.hosts[0].run(["sh", "-c", f"! kill -0 {rank}"])
    assert until(first, "failed")["reason"] == "node_failure"


def test_job_that_never_starts_is_refused(pair: Cluster, cli: Any, project: Any) -> None:
    """More GPUs than a host has are refused at the submit, also with --queue."""
    text = config().replace("instances: 2", 'instances: 2, accelerators: "A100:12"')
    done = cli("submit", "-d", "-y", "--queue", cwd=project(text, script="train.py", text=TRAIN))
    assert done.code == 3
    assert "12 are planned, usable are 0" in done.stderr


@pytest.mark.soak
def test_high_priority_preempts_an_own_job_that_then_waits(
    pair: Cluster, send: Any, until: Any, in_line: Any, state_of: Any, cli: Any
) -> None:
    """The lower job saves and leaves, waits with its old place, and continues after the higher job.

    The wait is no time of the job: no countdown runs, and the limit comes later by the wait.
    """
    low = send("low", config("queue: {priority: low}\nlimits: {max_duration: 1h}"), "--queue")
    until(low, "running")
    high = send("high", config("queue: {priority: high, preempt: true}"), "--queue")
    until(high, "running")
    assert "job high holds" in in_line(low)["reason"]
    waits = state_of(low)
    assert (waits["cap_at_s"], waits["deadline_at_s"], waits["projected_finish_s"]) == (None, None, None)
    assert "last run ended" in cli("status", low).stdout
    again = send("again", config("queue: {priority: high, preempt: true}"), "--queue")
    in_line(again)  # else the lower job, which waits already, takes the hosts first
    finish(pair, high)
    until(again, "running")
    finish(pair, again)
    runs = until(low, "running")
    waited_s = time.time() - waits["ended_s"]
    assert runs["cap_at_s"] - runs["started_s"] == pytest.approx(3600 + waited_s, abs=EVERY_S + 5)
    waiting.until(
        lambda: len((output(pair, low) / "starts").read_text().split()) == 2
    )  # the rank starts after its agent
    finish(pair, low)
    assert until(low, "succeeded")["attempt"] == 1
