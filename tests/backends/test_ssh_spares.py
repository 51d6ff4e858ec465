"""Spare hosts that wait in a job and begin its next attempts, without a process on the user's machine. Real hosts."""

import json
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import wholejobs

from doubles.signatures import MakeProject
from doubles.sshhosts import lightpython
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.host import Host
from doubles.waiting import until

pytestmark = pytest.mark.slow

# In place of torchrun: the loss of a step follows from the loss before alone. Saves every fifth step.
TRAIN = """\
import json, os, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
log = (Path(os.environ["CLOUDTRAIN_LOG_DIR"]) / f"rank-{rank}.log").open("a")
saved = os.environ.get("CLOUDTRAIN_RESUME_PATH")
step, loss = json.loads(Path(saved).read_text()) if saved else (0, 1)
while not (Path.home() / "end").exists():
    step, loss = step + 1, loss * 48271 % 2147483647
    print(f"step {step} loss {loss} of {os.environ['WORLD_SIZE']}", file=log, flush=True)
    if rank == 0 and step % 5 == 0:
        (folder / "partial.tmp").write_text(json.dumps([step, loss]))
        (folder / "partial.tmp").rename(folder / f"step-{step:06d}.json")
    time.sleep(0.1)
"""
CONFIG = f"""\
name: j
backend: ssh
task: task.py
env: {{OMP_NUM_THREADS: "1"}}
resources: {{instances: 2}}
retry: {{max_attempts: 2}}
{wholejobs.TRAINING}{wholejobs.LIMITS}ssh: {{hosts: [h0, h1, h2], ssh_config: "${{SSH_CONFIG}}", \
python: "${{SSH_PYTHON}}"}}
"""
SETTINGS = f'ssh_config: "${{SSH_CONFIG}}", python: {lightpython.PATH}, price_per_hour: "3600 USD"'


def config(hosts: str, more: str = "", instances: int = 2, attempts: int = 3) -> str:
    """Return the config of a job on the hosts."""
    resources, retry = f"resources: {{instances: {instances}}}", f"retry: {{max_attempts: {attempts}}}"
    return f"backend: ssh\n{resources}\n{retry}\nssh: {{hosts: [{hosts}], {SETTINGS}}}\n{more}"


@pytest.fixture
def hosts(cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Host]]:
    """Return a function that returns so many hosts, which the command finds, without torchrun."""

    def made(count: int) -> list[Host]:
        found = cluster(count)
        found.apply(monkeypatch)
        for host in found.hosts:
            lightpython.install(host)
        return list(found.hosts)

    return made


@pytest.fixture
def submit(cli: Any, project: MakeProject) -> Iterator[Callable[..., str]]:
    """Return a function that submits a job; all jobs are stopped in the end."""
    jobs: list[str] = []

    def send(text: str) -> str:
        jobs.append(
            cli.ok("submit", "-d", "-y", "--json", cwd=project(text, script="train.py", text=TRAIN)).json["job"]
        )
        return jobs[-1]

    yield send
    for job in jobs:
        cli("stop", job, "--now", "-y")


def folder(host: Host, job: str) -> Path:
    """Return the folder of the job's agent on the host."""
    return next((host.home / ".cloudtrain/jobs" / job / "attempt-1").glob("node-*"))


def steps(host: Host, job: str, rank: int) -> list[tuple[int, int]]:
    """Return the steps of the rank on the host, with their losses."""
    path = folder(host, job) / "log" / f"rank-{rank}.log"
    text = path.read_text() if path.exists() else ""
    return [(int(step), int(loss)) for step, loss in re.findall(r"step (\d+) loss (\d+) of 2\n", text)]


def kill_agent(host: Host, job: str) -> None:
    """Kill the job's agent on the host."""
    host.kill(json.loads((folder(host, job) / "state.json").read_text())["pid"], signal.SIGKILL)


def loss_after(step: int) -> int:
    """Return the loss of the step, as without a fault."""
    return pow(48271, step, 2147483647)


def test_two_losses_in_a_row_are_mended_by_the_agents(cli: Any, hosts: Any, submit: Any, project: MakeProject) -> None:
    """A killed agent, then a cut host that leads. No command runs meanwhile; losses and bill are as without a fault."""
    h0, h1, h2, h3 = every = hosts(4)
    where = project(config("h0, h1, h2, h3"), script="train.py", text=TRAIN)
    job = submit(config("h0, h1, h2, h3"))
    until(lambda: len(steps(h0, job, 0)) > 12, 90)
    uses = {(each["host"], each["use"], each["unit"]) for each in cli("hosts", "--json", cwd=where).json["hosts"]}
    assert uses >= {("h1", "held", "-"), ("h2", "free", "-"), ("h2", "waits", "spare"), ("h3", "waits", "spare")}
    assert cli("status", job, "--json").json["detail"] == "spare 2, 3 waits"
    pid = json.loads((folder(h3, job) / "state.json").read_text())["pid"]
    assert int(re.findall(r"VmRSS:\s+(\d+)", h3.path(f"/proc/{pid}/status").read_text())[0]) < 64 << 10
    kill_agent(h1, job)
    until(lambda: len(steps(h2, job, 1)) > 12, 90)
    h0.cut()
    until(lambda: len(steps(h2, job, 0)) > 12 and len(steps(h3, job, 1)) > 12, 120)
    for host in (h2, h3):
        (host.home / "end").touch()
    until(lambda: (folder(h3, job) / "exit.json").exists(), 60)
    h0.join()
    found = cli("status", job, "--json").json
    assert (found["state"], found["attempt"], found["restarts"]) == ("succeeded", 1, 2)
    for host, rank in ((h0, 0), (h1, 1), (h2, 1), (h2, 0), (h3, 1)):
        assert all(loss == loss_after(step) for step, loss in steps(host, job, rank))
    assert steps(h2, job, 0)[0][0] > 5, "the job went on from a save"
    ended = json.loads((folder(h2, job) / "exit.json").read_text())
    assert (set(ended["gone_s"]), set(ended["joined_s"])) == ({"0", "1"}, {"2", "3"})
    whole_s = ended["ended_s"] - ended["started_s"]
    assert ended["held_s"] == pytest.approx(whole_s, abs=3), "two hosts at any time"
    assert found["spend_usd"] == pytest.approx(2 * ended["held_s"], abs=0.1)
    uses = {(each["host"], each["use"]) for each in cli("hosts", "--json", cwd=where).json["hosts"]}
    assert uses == {(host.name, "free") for host in every}
    assert {path.name for path in h3.path("/run/lock/cloudtrain").glob("spare-*.lock")} == {"spare-0.lock"}


def test_host_that_is_back_is_free_while_a_spare_runs(cli: Any, hosts: Any, submit: Any, project: MakeProject) -> None:
    """The host takes its locks at the spare's loss, and its place without an attempt of the spares."""
    h0, h1, h2 = every = hosts(3)
    text = config("h0, h1, h2", attempts=2).replace("instances: 2", "instances: 2, min_instances: 1")
    where, job = project(text, script="train.py", text=TRAIN), submit(text)
    until(lambda: len(steps(h0, job, 0)) > 12, 90)
    first = json.loads((folder(h1, job) / "state.json").read_text())["pid"]
    kill_agent(h1, job)
    until(lambda: steps(h2, job, 1) and json.loads((folder(h1, job) / "state.json").read_text())["pid"] != first, 90)
    uses = {(each["host"], each["use"]) for each in cli("hosts", "--json", cwd=where).json["hosts"]}
    assert uses == {("h0", "held"), ("h1", "free"), ("h2", "held")}
    seen = len(steps(h1, job, 1))
    kill_agent(h2, job)
    until(lambda: len(steps(h1, job, 1)) > seen + 2, 90)
    for host in every:
        (host.home / "end").touch()
    assert cli("wait", job).code == 0
    found = cli("status", job, "--json").json
    assert (found["state"], found["attempt"], found["restarts"]) == ("succeeded", 1, 2)
    for host, rank in ((h0, 0), (h1, 1), (h2, 1)):
        assert all(loss == loss_after(step) for step, loss in steps(host, job, rank))
    ended = json.loads((folder(h0, job) / "exit.json").read_text())
    assert ended["held_s"] == pytest.approx(ended["ended_s"] - ended["started_s"], abs=3), "two hosts at any time"
    assert found["spend_usd"] == pytest.approx(2 * ended["held_s"], abs=0.1)
    cli.ok("rm", job, "-y", "--everywhere")
    left = h2.run(["sh", "-c", "ls ~/.cloudtrain/jobs /run/lock/cloudtrain"]).split()
    assert [name for name in left if job in name] == []


def test_job_whose_spare_is_taken_fails_as_without_a_spare(cli: Any, hosts: Any, submit: Any) -> None:
    """Another job may take the host of a spare; then the loss ends the job, and a follower sends the retry."""
    h0, h1, h2 = hosts(3)
    job = submit(config("h0, h1, h2", attempts=2))
    other = submit(config("h2", instances=1))
    until(lambda: len(steps(h0, job, 0)) > 2 and (folder(h2, other) / "state.json").exists(), 90)
    kill_agent(h1, job)
    with ThreadPoolExecutor(1) as follower:
        waits = follower.submit(cli, "wait", job)
        until(lambda: (folder(h0, job).parents[1] / "attempt-2").exists(), 90)
        error = json.loads((folder(h0, job) / "exit.json").read_text())["error"]
        assert "no spare is free" in error["message"]
        for host in (h0, h1):
            (host.home / "end").touch()
        assert waits.result().code == 0
    assert cli("status", job, "--json").json["attempt"] == 2


def test_unusable_spare_does_not_refuse_the_job(cli: Any, hosts: Any, project: MakeProject) -> None:
    """A spare that its peers cannot reach, or that cannot be prepared, is left out with its fault."""
    h0, _, h2 = hosts(3)
    where = project(config("h0, h1, h2"), script="train.py", text=TRAIN)
    for fault in ("peers", "jobs"):
        if fault == "peers":
            h0.isolate()
            h2.isolate()
        else:
            h0.join()
            h2.join()
            (h2.home / ".cloudtrain/jobs").write_text("a file in place of the folder")
        sent = cli.ok("submit", "-d", "-y", "--json", cwd=where)
        assert "no spare host waits in the job: " in sent.stderr, fault
        uses = {(each["host"], each["use"]) for each in cli("hosts", "--json", cwd=where).json["hosts"]}
        assert uses == {("h0", "held"), ("h1", "held"), ("h2", "free")}
        assert cli("stop", sent.json["job"], "--now", "-y").code in (0, 9)


def test_attempts_of_spares_count(cli: Any, hosts: Any, submit: Any, project: MakeProject) -> None:
    """With two attempts in all, a second loss after a spare's attempt ends the job, and no retry is sent.

    A resume as the last of three attempts has no waiting spare.
    """
    h0, h1, h2, h3 = hosts(4)
    where = project(config("h0, h1, h2, h3", attempts=2), script="train.py", text=TRAIN)
    job = submit(config("h0, h1, h2, h3", attempts=2))
    until(lambda: len(steps(h0, job, 0)) > 12, 90)
    kill_agent(h1, job)
    until(lambda: len(steps(h2, job, 1)) > 2, 90)
    kill_agent(h2, job)
    assert cli("wait", job).code != 0
    found = cli("status", job, "--json").json
    assert (found["state"], found["reason"], found["attempt"]) == ("failed", "node_failure", 1)
    assert not steps(h3, job, 1)
    cli.ok("resume", job, "-y", "-d", "--from-older", "--set", "retry.max_attempts=3")
    uses = [each["use"] for each in cli("hosts", "--json", "-f", where / "cloudtrain.yaml").json["hosts"]]
    assert sorted(uses) == ["free", "free", "held", "held"]


@pytest.fixture
def three(cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return three hosts that the command finds, with torch."""
    found = cluster(3)
    found.apply(monkeypatch)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("lost", [1, 0])
def test_task_trains_as_without_a_fault(
    cli: Any, three: Cluster, folder: Path, whole: wholejobs.Results, lost: int
) -> None:
    """Losses and weights of two real ranks are the same, bit for bit, if a host is cut off and a spare joins."""
    cli.ok("submit", "-d", "-y", "--force", "--name", f"j-{lost}", cwd=folder)
    jobs = [host.home / ".cloudtrain/jobs" / f"j-{lost}" for host in three.hosts]
    until(lambda: (jobs[1 - lost] / "checkpoints/step-00000030").exists(), 120)
    three.hosts[lost].cut()
    assert cli("wait", f"j-{lost}", timeout_s=200).code == 0
    assert (jobs[2] / "attempt-1/node-2/log/rank-1.log").exists()
    three.hosts[lost].join()
    assert wholejobs.losses(cli, f"j-{lost}") == whole.losses
    wholejobs.assert_equal(wholejobs.weights(cli, f"j-{lost}", folder), whole.weights)
