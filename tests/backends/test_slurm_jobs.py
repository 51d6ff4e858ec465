"""Jobs of the installed command on a real Slurm, with a script in place of torchrun."""

import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from cloudtrain.backends.slurm.jobs import SILENT_S
from cloudtrain.launcher.jobs import queue
from cloudtrain.launcher.store.registry import Registry
from doubles.slurm.handle import Slurm
from doubles.sshhosts import lightpython
from doubles.waiting import until

pytestmark = pytest.mark.slow

# Replaces torchrun: says its rank, and runs until a file `go` appears; saves on SIGTERM.
TRAIN = """\
import os, signal, sys, time
from pathlib import Path

def save(signum, frame):
    (Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]) / f"saved-{os.environ['RANK']}").touch()
    sys.exit(1)  # as torchrun after a signal

signal.signal(signal.SIGTERM, save)
out = Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"])
(out / f"began-{os.environ['RANK']}").write_text(os.uname().nodename + os.environ.get("LEAKED", ""))
while not (out / "go").exists():
    time.sleep(0.05)
"""
CONFIG = """\
backend: slurm
resources: {{instances: {instances}}}
limits: {{max_duration: 10m}}
slurm: {{{login}python: {python}, cpus_per_node: 1{more}}}
"""
LOGIN = 'login: alice@login, ssh_config: "${SSH_CONFIG}", '


@pytest.fixture
def site(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Return a Slurm that the command finds, with an interpreter that starts no torchrun."""
    slurm.apply(monkeypatch)
    for host in (slurm.login, *slurm.nodes):
        lightpython.install(host)
    return slurm


@pytest.fixture
def write(site: Slurm, project: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that writes a project for the cluster: `write("partition: spot")`."""

    def make(more: str = "", instances: int = 2, login: str = LOGIN) -> Path:
        settings = {"instances": instances, "login": login, "more": f", {more}" * bool(more)}
        return project(CONFIG.format(python=lightpython.PATH, **settings), script="train.py", text=TRAIN)

    return make


@pytest.fixture
def send(cli: Any, write: Callable[..., Path]) -> Callable[..., str]:
    """Return a function that submits a job and returns its id."""

    def submit(more: str = "", *, instances: int = 2, secret: str = "") -> str:
        asked = ("--set", "secrets=[API_TOKEN]") if secret else ()
        done = cli.ok("submit", "-d", "-y", "--json", *asked, cwd=write(more, instances), env={"API_TOKEN": secret})
        return str(done.json["job"])

    return submit


@pytest.mark.soak
def test_job_on_the_login_node_itself(site: Slurm, write: Callable[..., Path]) -> None:
    """Without `login`, the same commands work on the login node itself, from submit to artifacts.

    No variable of the submitting shell, or of a login shell, reaches the ranks.
    """
    for name in (".profile", ".bash_profile"):
        (site.home() / name).write_text("export LEAKED=by-a-login-shell\n")
    shutil.copytree(write(login=""), site.home() / "project")
    for name in ("launcher", "backends", "templates", "entrypoints"):  # the hosts have no cloudtrain
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, site.home() / "lib/cloudtrain" / name, ignore=ignored)
    program = "from cloudtrain.launcher.cli import main; main()"

    def run(*args: str) -> str:
        words = ["env", "LEAKED=by-the-submit", "PYTHONPATH=/home/alice/lib", sys.executable, "-c", program, *args]
        done = site.ssh(f"cd project && {shlex.join(words)}")
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    job = json.loads(run("submit", "-d", "-y", "--json"))["job"]
    output = site.home() / f".cloudtrain/jobs/{job}/output"
    until(lambda: len(list(output.glob("began-*"))) == 2)
    until(lambda: {path.read_text() for path in output.glob("began-*")} == {"node0", "node1"})
    assert json.loads(run("status", job, "--json"))["state"] == "running"
    assert run("exec", job, "--node", "1", "--", "hostname") == "node1\n"
    run("stop", job, "-y")
    status = json.loads(run("status", job, "--json"))
    assert (status["state"], status["reason"], status["resumable"]) == ("stopped", "user", True)
    (output / "go").touch()
    run("resume", job, "-y")
    assert json.loads(run("status", job, "--json"))["state"] == "succeeded"
    assert "node 1 of 2" in run("logs", job)
    files = json.loads(run("artifacts", job, "-o", "/home/alice/out", "--json"))["files"]
    assert {Path(name).name for name in files} >= {"began-0", "began-1", "go"}


def test_waiting_job_is_explained_and_cancelled(cli: Any, site: Slurm, send: Any) -> None:
    """The reason of the wait is told in words; followers ask Slurm once in 15 s; a stop cancels the job at once."""
    site.drain(site.nodes[0])
    job = send("nodelist: node0", instances=1, secret="s3cret")
    said = "waits for nodes that are down, drained or reserved"
    until(lambda: cli("status", job, "--json").json["detail"] is not None)
    before, begun = site.requests(), time.monotonic()
    for _ in range(4):
        status = cli("status", job, "--json").json
        assert (status["state"], status["detail"]) == ("pending", said)
    assert site.requests() - before <= (time.monotonic() - begun) // 15 + 1
    assert cli("stop", job, "-y").code == 0
    status = cli("status", job, "--json").json
    assert (status["state"], status["reason"], status["resumable"]) == ("stopped", "user", False)
    order = (site.home() / f".cloudtrain/jobs/{job}/attempt-1/order.json").read_text()
    assert '"secrets": {}' in order


@pytest.mark.parametrize("limits", ["", "budget: {limit: 1 USD}"], ids=["follower", "deadline"])
def test_wait_for_nodes_ends_at_max_wait(limits: str, cli: Any, site: Slurm, write: Any) -> None:
    """The job without a node ends as a lack of machines: by the process that follows, or by Slurm's own deadline."""
    site.drain(site.nodes[0])
    folder = write("nodelist: node0, price_per_hour: 1 USD", 1)
    config = folder / "cloudtrain.yaml"
    config.write_text(config.read_text().replace("max_duration: 10m", "max_duration: 10m, max_wait: 1s") + limits)
    done = cli.ok("submit", "-d", "-y", "--json", cwd=folder)
    assert ("limits.max_wait ends the wait only while" in done.stderr) is not bool(limits)
    job = done.json["job"]
    if limits:
        number = cli("status", job, "--json").json["platform_number"]
        site.wait(number, "DEADLINE", timeout_s=90)
    assert cli("wait", job).code == 5
    found = cli("status", job, "--json").json
    assert (found["state"], found["reason"], found["started_s"]) == ("failed", "no_machines", None)
    assert (found["error"]["message"], found["spend_usd"]) == ("no machines within limits.max_wait", 0)


@pytest.mark.soak
@pytest.mark.parametrize("is_by_root", [False, True])
def test_job_cancelled_by_slurms_own_command_has_saved(is_by_root: bool, cli: Any, site: Slurm, send: Any) -> None:
    """scancel is a stop by the user: the agents save, and the state does not say that the job was pre-empted."""
    job = send()
    output = site.home() / f".cloudtrain/jobs/{job}/output"
    until(lambda: len(list(output.glob("began-*"))) == 2)
    if is_by_root:
        site.admin("scancel", "--user=alice")
    else:
        site.ssh("scancel --me")
    assert cli("wait", job).code == 9
    status = cli("status", job, "--json").json
    assert (status["state"], status["reason"], status["resumable"]) == ("stopped", "user", True)
    assert status["detail"] == ("cancelled by the user root of the cluster" if is_by_root else None)


def test_job_beyond_the_users_number_of_jobs_finds_no_capacity(
    cli: Any, site: Slurm, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site's limit is a quota that another job's end frees: exit code 5, and with --queue a place in line."""
    monkeypatch.setattr(queue, "TRY_S", 0.0)
    site.admin("sacctmgr", "-i", "modify", "user", "alice", "set", "MaxSubmitJobs=0")
    try:
        done = cli("submit", "-d", "-y", "--name", "one", cwd=write())
        assert cli("list", "--json").json["jobs"] == []
        waiting = cli.ok("submit", "-d", "-y", "--queue", "--name", "two", "--json", cwd=write()).json["job"]
        status = cli("status", waiting, "--json").json
    finally:
        site.admin("sacctmgr", "-i", "modify", "user", "alice", "set", "MaxSubmitJobs=-1")
    assert (done.code, "AssocMaxSubmitJobLimit" in done.stderr) == (5, True), done.stderr
    assert "hint: wait in line: --queue; end a job of yours" in done.stderr
    assert (status["phase"], "AssocMaxSubmitJobLimit" in status["detail"]) == ("queued", True)
    with closing(Registry(cli.home)) as registry:
        assert queue.advance_queue(registry) == [f"sent: {waiting}"]
    site.wait(cli("status", waiting, "--json").json["platform_number"], "RUNNING")


@pytest.mark.soak
def test_refusals_come_before_the_job(cli: Any, site: Slurm, write: Any, send: Any) -> None:
    """A request that Slurm would refuse, or accept and never run, is refused with the key, and no job is stored."""
    for more, option, words in (
        ("partition: nowhere", "limits.max_duration=10m", "invalid partition specified: nowhere"),
        ("mem: 1G", "resources.instances=4", "the partition main gives 3 at most"),
        ("partition: short", "resources.instances=1", "the partition short gives 1m at most"),
        ("mem: 64G", "resources.instances=1", "no node has all of --mem=64G"),
        ("mem: 1G", "resources.accelerators=A100:8", "no node has all of --gres=gpu:a100:8"),
        ("account: rich", "resources.instances=1", "at slurm.account"),
    ):
        done = cli("submit", "-d", "-y", "--set", option, cwd=write(more))
        assert (done.code, words in done.stderr) == (3, True), done.stderr
    assert cli("list", "--json").json["jobs"] == []
    assert site.admin("squeue", "-h") == ""
    done = cli("submit", "-d", "-y", "--set", "checkpoint.uri=/root/x", cwd=write("mem: 1G"))
    assert (done.code, "login: /root/x cannot be made: Permission denied" in done.stderr) == (3, True), done.stderr
    assert not list((site.home() / ".cloudtrain/jobs").glob("*"))
    (site.home() / "own/one").mkdir(parents=True)
    (site.home() / "own/one/last.pt").touch()
    done = cli("submit", "-d", "-y", "--name", "one", "--set", "checkpoint.uri=~/own", cwd=write("mem: 1G"))
    assert (done.code, "own/one holds files of another job" in done.stderr) == (3, True), done.stderr
    site.drain(site.nodes[0])
    job = send("nodelist: node0", instances=1)  # the node may come back
    assert cli("stop", job, "-y").code == 0


@pytest.mark.soak
def test_killed_agent_is_seen(cli: Any, site: Slurm, send: Any) -> None:
    """An agent that is killed leaves no report: Slurm's word ends the job within 45 s, and no process is left."""
    job = send(instances=1)
    output = site.home() / f".cloudtrain/jobs/{job}/output"
    until(lambda: (output / "began-0").exists())
    assert cli("status", job, "--json").json["state"] == "running"
    node = site.nodes[0]
    (agent,) = [pid for pid, line in node.processes() if "slurm_step" in line and "srun" not in line]
    begun = time.monotonic()
    node.kill(agent, signal.SIGKILL)
    assert cli("wait", job).code == 1
    assert time.monotonic() - begun < 45
    status = cli("status", job, "--json").json
    assert (status["state"], status["error"]["message"]) == (
        "failed",
        "Slurm says FAILED 137:0: ended by SIGKILL (Killed)",
    )
    assert not [line for _, line in node.processes() if "alice" in line or "light" in line]


@pytest.mark.soak
def test_running_job_needs_no_question_to_slurm(cli: Any, site: Slurm, send: Any) -> None:
    """The agents' files show that a job runs, also without any line for a long time."""
    job = send()
    output = site.home() / f".cloudtrain/jobs/{job}/output"
    until(lambda: len(list(output.glob("began-*"))) == 2)
    before, begun = site.requests(), time.monotonic()
    while time.monotonic() - begun < 1.5 * SILENT_S:
        assert cli("status", job, "--json").json["state"] == "running"
    assert site.requests() == before
    (output / "go").touch()
    assert cli("wait", job).code == 0


@pytest.mark.soak
@pytest.mark.parametrize("keeps_notes", [True, False])
def test_job_is_adopted(cli: Any, site: Slurm, send: Any, write: Any, keeps_notes: bool) -> None:
    """The job's folder holds the record: with a note of the login node `adopt` needs no config, else a config."""
    job = send()
    for path in cli.home.glob("registry*"):
        path.unlink()
    if not keeps_notes:
        shutil.rmtree(cli.home / "slurm")
    done = cli("adopt", "-y", "--json", "--backend", "slurm", cwd=cli.cwd if keeps_notes else write())
    assert (done.code, done.json["adopted"]) == (0, [job]), done.stderr
    assert cli("status", job, "--json").json["state"] in ("pending", "running")
    assert cli("stop", job, "--now", "-y").code == 0
    assert cli("wait", job).code == 9


@pytest.mark.soak
def test_running_job_is_shown_and_stopped_without_the_controller(cli: Any, site: Slurm, send: Any) -> None:
    """The agents' files are enough for a running job; a waiting job is unreachable until the controller answers."""
    job = send()
    output = site.home() / f".cloudtrain/jobs/{job}/output"
    until(lambda: len(list(output.glob("began-*"))) == 2)
    waiting = send("nodelist: node2, raw: [--begin=now+1hour]", instances=1)
    site.slurmctld.kill(signal.SIGTERM)
    assert cli("status", job, "--json").json["state"] == "running"
    until(lambda: cli("status", waiting, "--json").json["unreachable_since_s"] is not None, 60, 1.0)
    assert cli("stop", job, "-y").code == 0
    assert cli("status", job, "--json").json["resumable"] is True
    site.slurmctld.start()
    until(lambda: cli("status", waiting, "--json").json["unreachable_since_s"] is None, 60, 1.0)
    assert cli("stop", waiting, "-y").code == 0


@pytest.mark.soak
def test_stop_of_a_requeued_job_keeps_the_cost(cli: Any, site: Slurm, send: Any) -> None:
    """A pre-empted job waits without a rate and without a limit; a stop of the waiting job keeps the paid time."""
    site.drain(site.nodes[2])
    job = send("partition: spot, price_per_hour: 3600 USD")
    output = site.home() / f".cloudtrain/jobs/{job}/output"
    until(lambda: len(list(output.glob("began-*"))) == 2)
    assert cli("status", job, "--json").json["burn_usd_per_hour"] == 7200
    site.wait(site.submit("sleep 600", "--nodes=2", "--exclusive"), "RUNNING")
    until(lambda: cli("status", job, "--json").json["state"] == "pending", 45, 0.5)
    waiting = cli("status", job, "--json").json
    assert (waiting["burn_usd_per_hour"], waiting["cap_at_s"]) == (0, None)
    assert waiting["spend_usd"] > 0
    assert str(waiting["platform_number"]) in cli("status", job).stdout
    assert cli("stop", job, "-y").code == 0
    assert cli("wait", job).code == 9
    ended = cli("status", job, "--json").json
    assert (ended["state"], ended["reason"]) == ("stopped", "user")
    assert ended["spend_usd"] == pytest.approx(waiting["spend_usd"], rel=0.01)


@pytest.mark.soak
def test_requeued_run_of_an_earlier_attempt_does_nothing(cli: Any, site: Slurm, send: Any) -> None:
    """An administrator's requeue of attempt 1 beside attempt 2 runs no agent; attempt 2 goes on."""
    job = send(instances=1)
    output = site.home() / f".cloudtrain/jobs/{job}/output"
    until(lambda: (output / "began-0").exists())
    number = cli("status", job, "--json").json["platform_number"]
    site.admin("scancel", "--full", "--signal=KILL", str(number))
    until(lambda: cli("status", job, "--json").json["state"] == "stopped", 60, 0.5)
    for name in ("ended", "node-0/stop.json", "node-0/exit.json"):  # as after a node without power
        (output.parent / "attempt-1" / name).unlink(missing_ok=True)
    (output / "began-0").unlink()
    cli.ok("resume", "-d", "-y", job)
    until(lambda: (output / "began-0").exists())
    site.admin("scontrol", "requeue", str(number))
    site.admin("scontrol", "update", f"JobId={number}", "StartTime=now+2")
    site.wait(number, "COMPLETED", timeout_s=90)
    status = cli("status", job, "--json").json
    assert (status["state"], status["attempt"]) == ("running", 2)
    assert cli("stop", job, "-y").code == 0
