"""The real Slurm in namespaces: a job's life, the faults of the site, and nothing left after the site's end."""

import os
import signal
import time
from pathlib import Path

import pytest

from doubles.slurm import handle
from doubles.slurm.handle import Slurm, missing
from doubles.waiting import until

KILL_WAIT_S = 2.0
RUNNING_S = 2.0  # from the answer of sbatch to RUNNING on idle nodes
# A step that saves on SIGTERM and ends with 75, below a batch shell that waits for the step and asks for the requeue.
SAVES = """\
trap '' TERM
srun --kill-on-bad-exit=0 --wait=0 bash -c 'trap "touch saved-$SLURM_NODEID; exit 75" TERM
    echo began; sleep 100 & wait' &
wait $!; while kill -0 $! 2>/dev/null; do wait $!; done; wait $!; code=$?
scontrol requeue $SLURM_JOB_ID && sleep 60
exit $code
"""
# A step that notes each signal and ends after a CONT, or never; below a batch shell that notes the signal and ends.
NOTES = """\
trap 'echo batch TERM; exit' TERM
srun bash -c 'trap "echo step TERM" TERM; trap "echo step CONT; over={}" CONT; echo began
    while [ -z "$over" ]; do sleep 0.3; done' &
while :; do wait; done
"""


@pytest.mark.soak
def test_user_reaches_the_site_over_ssh(slurm: Slurm) -> None:
    """The login host answers with partitions, limits and GPUs, and the compute nodes refuse a user."""
    told = slurm.ssh("sinfo -h -o '%P %D %l %G'; sacctmgr -nP show assoc user=alice format=account").stdout.split("\n")
    assert told[:3] == [f"{name} {3} 1:00:00 gpu:a100:4" for name in ("main*", "spot")] + ["short 3 1:00 gpu:a100:4"]
    assert sorted(told[3:5]) == ["lab", "other"]
    assert slurm.cluster.ssh("alice@node0", "true").returncode == 255
    assert slurm.ssh("sbatch --account=nobody --wrap true").stderr.endswith(
        "Invalid account or account/partition combination specified\n"
    )


@pytest.mark.soak
def test_job_runs_on_two_nodes_with_its_gpus(slurm: Slurm) -> None:
    """A job starts in two seconds, and its tasks see GPUs of their own and the shared home folder."""
    task = "srun bash -c 'echo $CUDA_VISIBLE_DEVICES > \"$(hostname)\"'"
    number = slurm.submit(task, "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:a100:2")
    sent = time.monotonic()
    slurm.wait(number, "RUNNING", "COMPLETED")
    assert time.monotonic() - sent < RUNNING_S
    job = slurm.wait(number, "COMPLETED")
    assert (job["NodeList"], job["TRES"].rpartition(",")[2]) == ("node[0-1]", "gres/gpu=4")
    assert [(slurm.home() / node).read_text() for node in ("node0", "node1")] == ["0,1\n", "0,1\n"]
    assert until(lambda: [one for one in slurm.record(number) if one.startswith("COMPLETED")]) == ["COMPLETED|0:0"]
    assert slurm.requests() >= 1


@pytest.mark.soak
def test_held_job_is_released_and_requeued(slurm: Slurm) -> None:
    """A held job waits and is found by name; a requeue keeps the number, and the owner lifts its delay."""
    script = "echo run ${SLURM_RESTART_COUNT:-0}; sleep 100"
    number = slurm.submit(script, "--hold", "--job-name=ours", "--output=log", "--open-mode=append")
    assert (job := slurm.job(number))["JobState"] == "PENDING"
    assert job["Reason"] == "JobHeldUser"
    assert slurm.ssh("squeue -h --me --name=ours -o %i").stdout == f"{number}\n"
    slurm.ssh(f"scontrol release {number}")
    log = slurm.home() / "log"
    until(lambda: log.exists() and log.read_text() == "run 0\n")
    slurm.ssh(f"scontrol requeue {number}")
    until(lambda: slurm.job(number)["Reason"] == "BeginTime")
    until(lambda: slurm.job(number)["JobState"] == "PENDING")  # no longer COMPLETING
    # A start in the second of the requeue fails: slurmd takes the new run for the cancelled run.
    slurm.ssh(f"scontrol update job={number} StartTime=now+2")
    slurm.wait(number, "RUNNING")
    assert slurm.job(number)["Restarts"] == "1"
    until(lambda: log.read_text().endswith("run 1\n"))
    slurm.ssh(f"scancel {number}")
    until(lambda: any(line.startswith("CANCELLED") for line in slurm.record(number)))


@pytest.mark.soak
def test_preempted_job_saves_in_the_grace_and_is_requeued(slurm: Slurm) -> None:
    """A job of a higher tier takes the nodes; the step is told first, and ends before the grace."""
    number = slurm.submit(SAVES, "--partition=spot", "--nodes=3", "--exclusive", "--output=log", "--open-mode=append")
    until(lambda: (slurm.home() / "log").exists() and (slurm.home() / "log").read_text().count("began") == 3)
    urgent = slurm.submit("true", "--nodes=3", "--exclusive")
    slurm.wait(urgent, "RUNNING", "COMPLETED", timeout_s=10)
    assert len(list(slurm.home().glob("saved-*"))) == 3
    assert slurm.job(number)["Restarts"] == "1"
    until(lambda: slurm.record(number)[0].startswith("REQUEUED"))


@pytest.mark.soak
def test_preemption_by_qos(slurm: Slurm) -> None:
    """With preempt/qos, a QOS takes the nodes from a job of a lower QOS in the same partition."""
    slurm.qos("low", PreemptMode="requeue", GraceTime="4")
    slurm.qos("high", Preempt="low")
    slurm.configure(PreemptType="preempt/qos")
    number = slurm.submit(SAVES, "--qos=low", "--nodes=3", "--exclusive", "--output=log", "--open-mode=append")
    until(lambda: (slurm.home() / "log").exists() and (slurm.home() / "log").read_text().count("began") == 3)
    urgent = slurm.submit("true", "--qos=high", "--nodes=3", "--exclusive")
    slurm.wait(urgent, "RUNNING", "COMPLETED", timeout_s=10)
    assert slurm.job(number)["Restarts"] == "1"


@pytest.mark.soak
def test_lost_node_and_lost_slurmd_requeue_their_jobs(slurm: Slurm) -> None:
    """Slurm requeues the jobs of a node without power and of a killed slurmd, whose job's processes live on."""
    slurm.configure(MessageTimeout="1", SlurmdTimeout="2")
    off, killed = (slurm.submit("sleep 100", f"--nodelist=node{number}") for number in (1, 2))
    for job in (off, killed):
        slurm.wait(job, "RUNNING")
    slurm.nodes[1].power_off()
    slurm.slurmd[2].kill()
    assert any("slurm_script" in line for _, line in slurm.nodes[2].processes())
    for job in (off, killed):
        assert slurm.wait(job, "PENDING", timeout_s=40)["Restarts"] == "1"
    until(lambda: slurm.record(off)[0] == "NODE_FAIL|0:0")


@pytest.mark.soak
def test_drained_node_takes_no_job(slurm: Slurm) -> None:
    """A drained node finishes its job, a job for the node waits, and a node that is set down ends its job."""
    running = slurm.submit("sleep 100", "--nodelist=node0", "--no-requeue")
    slurm.wait(running, "RUNNING")
    slurm.drain(slurm.nodes[0])
    waiting = slurm.submit("true", "--nodelist=node0")
    until(lambda: slurm.job(waiting)["Reason"].startswith("ReqNodeNotAvail"))
    assert slurm.state(running) == "RUNNING"
    slurm.drain(slurm.nodes[0], state="down")
    slurm.wait(running, "NODE_FAIL")
    slurm.undrain(slurm.nodes[0])
    slurm.wait(waiting, "COMPLETED")


@pytest.mark.soak
@pytest.mark.parametrize("over", ["yes", ""])
def test_scancel_tells_steps_and_batch_shell(slurm: Slurm, over: str) -> None:
    """A plain scancel sends CONT and TERM to all, and KILL after KillWait; with --signal, only steps are told."""
    log = slurm.home() / "log"
    number = slurm.submit(NOTES.format(over), "--output=log")
    until(lambda: log.exists() and "began" in log.read_text())
    slurm.ssh(f"scancel --signal=TERM {number}")
    until(lambda: "step TERM" in log.read_text())
    assert "step CONT" not in log.read_text()
    assert "batch TERM" not in log.read_text()
    slurm.ssh(f"scancel {number}")
    begun = time.monotonic()
    slurm.wait(number, "CANCELLED")
    until(lambda: not slurm.admin("squeue", "-h"))
    assert (time.monotonic() - begun > KILL_WAIT_S) == (over == "")
    assert log.read_text().count("step TERM") == 2
    assert "step CONT" in log.read_text()
    assert "batch TERM" in log.read_text()


@pytest.mark.soak
def test_limit_of_a_qos_holds_the_job_back(slurm: Slurm) -> None:
    """A job that needs more than the QOS has left waits with the reason."""
    slurm.qos("small", GrpTRESMins="cpu=1")
    number = slurm.submit("true", "--qos=small", "--time=5")
    until(lambda: slurm.job(number)["Reason"] == "QOSGrpCPUMinutesLimit")
    assert slurm.job(number)["JobState"] == "PENDING"


@pytest.mark.soak
def test_lost_answer_of_sbatch_leaves_one_job(slurm: Slurm) -> None:
    """A lost answer leaves a job that only its name can find, and a refused request leaves no job."""
    slurm.lose_answers(1)
    slurm.lose_answers(1, "refused")
    ask = "sbatch --hold --parsable --job-name={} --wrap true; squeue -h --me -o %j"
    lost, refused, good = (slurm.ssh(ask.format(name)) for name in ("a", "b", "c"))
    assert "Socket timed out" in lost.stderr
    assert "Socket timed out" in refused.stderr
    assert sorted(said.stdout.split()[-2:] for said in (lost, refused)) == [["a"], ["a"]]
    assert sorted(good.stdout.split()[1:]) == ["a", "c"]


@pytest.mark.soak
def test_jobs_survive_the_database(slurm: Slurm) -> None:
    """Without slurmdbd, jobs run and end, and their records come later."""
    slurm.slurmdbd.kill()
    assert slurm.ssh("timeout 0.5 sacct -X").returncode != 0
    number = slurm.submit("true")
    slurm.wait(number, "COMPLETED")
    slurm.slurmdbd.start()
    until(lambda: slurm.record(number) == ["COMPLETED|0:0"])


@pytest.mark.soak
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_jobs_survive_the_controller(slurm: Slurm, signum: int) -> None:
    """Jobs run on without slurmctld, and are known after its start; a paused slurmctld answers late."""
    number = slurm.submit("sleep 100")
    slurm.wait(number, "RUNNING")
    if signum == signal.SIGKILL:
        slurm.wait_until_saved(number)
    slurm.slurmctld.kill(signum)
    assert slurm.ssh("timeout 0.5 squeue").returncode == 124
    slurm.slurmctld.start()
    assert slurm.ssh("squeue -h -o '%i %T'").stdout == f"{number} RUNNING\n"
    slurm.slurmctld.pause()
    assert slurm.ssh("timeout 0.5 squeue").returncode == 124
    slurm.slurmctld.resume()
    assert slurm.ssh("squeue -h -o '%i %T'").stdout == f"{number} RUNNING\n"


@pytest.mark.soak
def test_site_leaves_nothing(tmp_path: Path) -> None:
    """After the stop, no process of the site, no link and no file is left; no port was ever open outside."""
    if reason := missing():
        pytest.skip(reason)
    links = os.listdir("/sys/class/net")
    site = Slurm.start(1, tmp_path / "site")
    space = Path(f"/proc/{site.controller.pid}/ns/pid")
    with space.open("rb"):  # the open file keeps the namespace's number from being given to others
        pids = str(space.readlink())
        assert {name for name in _commands(pids) if "/sbin/slurm" in name or "mariadb" in name}
        site.stop()
        assert _commands(pids) == []
    assert os.listdir("/sys/class/net") == links
    assert os.listdir(tmp_path) == []


def test_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is given to tests that must be skipped."""
    monkeypatch.setattr(handle, "hosts_missing", lambda: None)
    monkeypatch.setattr(handle, "SYSTEM_PATH", "/nowhere")
    assert missing() == "Slurm needs the packages slurmctld slurmd slurmdbd slurm-client munge mariadb-server-core"


def _commands(space: str) -> list[str]:
    """Return the command lines of the processes in a namespace of process numbers."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if str((proc / "ns/pid").readlink()) == space:
                found.append((proc / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
