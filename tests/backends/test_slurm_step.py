"""The nodes of a Slurm job: the step's tasks supervise torch on a real Slurm, from a hand-made attempt's folder."""

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import wholejobs

from cloudtrain.launcher.backend import Request
from doubles.slurm.attempts import SlurmAttempt
from doubles.slurm.handle import Slurm
from doubles.sshhosts.host import Host
from doubles.waiting import until

CONFIG = f"""\
name: digits
backend: slurm
task: task.py
env: {{OMP_NUM_THREADS: "1"}}
resources: {{instances: 2}}
distributed: {{nproc_per_node: 1}}
training:
  strategy: ddp
  precision: fp32
  global_batch_size: 16
  max_steps: 60
  optimizer: {{name: adamw, lr: 1e-2}}
  log_every: 1
  seed: 3
checkpoint: {{every_steps: 10, keep: 3}}
limits: {{max_duration: 10m}}
slurm: {{cpus_per_node: 2, partition: spot, python: {sys.executable}}}
"""
# Each rank tells its part of the environment.
TELLING = """
import os
seen = sorted(name for name in os.environ if name.startswith(("SLURM", "PMI")))
print("told", os.environ["CUDA_VISIBLE_DEVICES"], seen, os.environ["API_TOKEN"], os.environ["GLOO_SOCKET_IFNAME"])
"""
# Each rank tells its numbers by Slurm's names, and where it began.
NUMBERS = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
names = ("PROCID", "LOCALID", "NODEID", "NTASKS", "NNODES", "JOB_ID")
print("told", *(os.environ["SLURM_" + name] for name in names), os.path.basename(os.getcwd()), sys.argv[0])
"""
Make = Callable[..., SlurmAttempt]
AGENT, RANK = r"^\S+ -I -c import sys", r"^\S+ -u -m cloudtrain\.entrypoints\.agent\.worker"
SHARED = ("training.global_batch_size=24", "training.micro_batch_size=4")  # by 3 and by 2 nodes
_WHOLE: dict[int, float] = {}


@pytest.fixture
def make(slurm: Slurm, render: Callable[..., Request], tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes an attempt's folder, from settings of the config and fields of the order."""
    made: list[SlurmAttempt] = []

    def attempt(*settings: str, text: str = "", script: str = "", **changes: Any) -> SlurmAttempt:
        (tmp_path / "code/src").mkdir(exist_ok=True, parents=True)
        (tmp_path / "code/src/train.py").write_text(script)
        task = wholejobs.TASK.replace("0.01", "float(open('/home/alice/pause').read())")
        (tmp_path / "code/task.py").write_text(task + text)
        pace(slurm, 0.01)
        made.append(SlurmAttempt(slurm, render(CONFIG, *settings), tmp_path / "code", **changes))
        return made[-1]

    yield attempt
    for each in made:
        print(each.told())


@pytest.mark.soak
def test_killed_rank_starts_again_inside_the_job(make: Make, slurm: Slurm) -> None:
    """kill -9 of a rank restarts the ranks from the checkpoint: Slurm sees one run that succeeds."""
    attempt, number = _training(make, step=25)
    _kill(slurm.nodes[1], RANK)
    _assert_whole(attempt, number, make, restarts=1)
    assert slurm.record(number) == ["COMPLETED|0:0"]


@pytest.mark.soak
def test_stop_word_saves(make: Make, slurm: Slurm) -> None:
    """The stop word in the nodes' folders ends the job within 10 s, saved, with the user as the reason."""
    attempt, number = _training(make)
    asked_s = time.monotonic()
    attempt.ask_to_stop()
    assert slurm.wait(number, "FAILED")["ExitCode"] == "75:0"
    assert time.monotonic() - asked_s < 10
    verdict = attempt.exit()
    assert (verdict["state"], verdict["reason"], verdict["resumable"]) == ("stopped", "user", True)
    assert attempt.processes() == []


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["REQUEUE", "CANCEL"])
def test_job_without_a_grace_saves_in_the_kill_wait(mode: str, make: Make, slurm: Slurm) -> None:
    """GraceTime is 0 by default: Slurm requeues or cancels the job at once, and kills the job after KillWait."""
    slurm.configure(spot_GraceTime="0", spot_PreemptMode=mode, KillWait="15")
    attempt, number = _training(make)
    pace(slurm, 0.1)
    slurm.wait(slurm.submit("true", "--nodes=3", "--exclusive"), "RUNNING", "COMPLETED")
    if mode == "CANCEL":
        assert slurm.state(number) == "PREEMPTED"
        assert "saved; the next start continues from this step" in attempt.lines()
        return
    until(lambda: slurm.state(number) == "PENDING")
    pace(slurm, 0.01)
    attempt.lift_delay(number)
    _assert_whole(attempt, number, make)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_job_survives_twenty_preemptions(make: Make, slurm: Slurm) -> None:
    """Of 20 jobs that pre-empt ours, each starts within 10 s; ours is kept 20 times, and ends with the same losses."""
    attempt, waits_s = make(), []
    pace(slurm, 0.1)
    number = attempt.submit()
    for _ in range(20):
        seen = len(attempt.steps_in_order())
        until(lambda seen=seen: len(attempt.steps_in_order()) > seen, 60)  # type: ignore[misc]
        asked_s = time.monotonic()
        urgent = slurm.submit("true", "--nodes=3", "--exclusive")
        slurm.wait(urgent, "RUNNING", "COMPLETED")
        waits_s.append(time.monotonic() - asked_s)
        until(lambda: slurm.state(number) == "PENDING")
        assert attempt.exit() is None
        attempt.lift_delay(number)
    pace(slurm, 0.01)
    print(f"the pre-empting jobs waited {', '.join(f'{wait_s:.1f}' for wait_s in waits_s)} s")
    assert max(waits_s) < 10
    _assert_whole(attempt, number, make)
    assert slurm.job(number)["Restarts"] == "20"


@pytest.mark.soak
def test_killed_agent_requeues_the_job(make: Make, slurm: Slurm) -> None:
    """After kill -9 of an agent nothing of the job is left, and the job waits to go on, within 45 s."""
    attempt, number = _training(make)
    _kill(slurm.nodes[1], AGENT)
    until(lambda: slurm.state(number) == "PENDING", 45)
    assert attempt.processes() == []
    attempt.lift_delay(number)
    _assert_whole(attempt, number, make)


@pytest.mark.soak
@pytest.mark.parametrize("node", [0, 1])
def test_node_whose_slurmd_is_killed_is_fenced(node: int, make: Make, slurm: Slurm) -> None:
    """Slurm gives up the node and requeues the job: the node's own processes end without Slurm's help."""
    attempt, number = _training(make)
    pace(slurm, 0.2)
    slurm.slurmd[node].kill()
    until(lambda: slurm.state(number) == "PENDING", 45)
    until(lambda: attempt.processes() == [], 15)
    pace(slurm, 0.01)
    attempt.lift_delay(number)
    _assert_whole(attempt, number, make)


@pytest.mark.soak
def test_killed_controller_does_no_harm(make: Make, slurm: Slurm) -> None:
    """The job trains on while the controller is dead, and its end is known after the controller's start."""
    attempt, number = _training(make)
    slurm.wait_until_saved(number)
    slurm.slurmctld.kill()
    attempt.wait_for_step(40)
    slurm.slurmctld.start()
    _assert_whole(attempt, number, make)


@pytest.mark.soak
def test_two_runs_of_a_job_are_never_at_work_at_once(make: Make, slurm: Slurm) -> None:
    """Slurm requeues a job of a lost node to another node, while the first run still trains: the first run ends."""
    attempt, number = _training(make, "resources.instances=1", *SHARED, options=("--nodelist=node0",))
    pace(slurm, 0.3)
    slurm.slurmd[0].kill()
    until(lambda: slurm.state(number) == "PENDING", 45)
    assert any(line.startswith("node0") for line in attempt.processes())
    slurm.admin("scontrol", "update", f"job={number}", "ReqNodeList=node1")
    attempt.lift_delay(number)
    until(lambda: any("slurm_step" in line for line in attempt.processes() if line.startswith("node1")), 60)
    until(lambda: not [line for line in attempt.processes() if line.startswith("node0")], 10)
    assert "a later run of the job has begun" in attempt.lines()
    pace(slurm, 0.01)
    assert slurm.wait(number, "COMPLETED", "FAILED", timeout_s=120)["ExitCode"] == "0:0"
    assert sorted(attempt.steps()) == list(range(1, 61))


@pytest.mark.soak
def test_clock_goes_on_after_a_requeue(make: Make, slurm: Slurm) -> None:
    """The time of all runs counts against the limit, and the wait between the runs does not."""
    attempt, number = _training(make, max_duration_s=90.0, deadline_s=60.0)
    pace(slurm, 0.2)
    used_s = until(lambda: used if (used := time.time() - attempt.started_s()) > 40 else 0, 60, 0.2)
    slurm.wait(slurm.submit("true", "--nodes=3", "--exclusive"), "RUNNING", "COMPLETED")
    attempt.lift_delay(number)
    slurm.wait(number, "RUNNING")
    begun_s = time.monotonic()
    slurm.wait(number, "FAILED", timeout_s=90)
    assert time.monotonic() - begun_s < 70 - used_s + 15
    verdict = attempt.exit()
    assert (verdict["state"], verdict["reason"]) == ("stopped", "time_limit")
    assert 55 < verdict["held_s"] < 75


@pytest.mark.soak
def test_signal_of_a_user_ends_nothing(make: Make, slurm: Slurm) -> None:
    """`scancel --signal` reaches all processes of the nodes, or also the batch script, and the job goes on."""
    attempt, number = _training(make)
    for options in (["--signal=HUP"], ["--full", "--signal=USR2"], ["--batch", "--signal=USR1"]):
        slurm.admin("scancel", *options, str(number))
    _assert_whole(attempt, number, make)


@pytest.mark.soak
def test_ranks_see_their_gpus_and_no_secret_is_kept(make: Make, slurm: Slurm) -> None:
    """Slurm's choice of GPUs and the wanted network reach the ranks, Slurm's other variables do not; the site's
    database and the shared disk have no secret after the end."""
    more = ("resources.accelerators=A100:2", "slurm.interface=eth0", "training.max_steps=1")
    attempt = make(*more, text=TELLING, requeues=False)
    number = attempt.submit()
    assert slurm.wait(number, "COMPLETED", "FAILED", timeout_s=90)["ExitCode"] == "0:0", attempt.told()
    told = [line for node in (0, 1) for line in attempt.lines(node).splitlines() if line.startswith("told ")]
    assert told == ["told 0,1 [] s3cret-of-the-test eth0"] * 2
    kept = slurm.admin("sacct", "-j", str(number), "--env-vars") + slurm.admin("sacct", "-j", str(number), "-B")
    assert "CLOUDTRAIN" not in kept
    everywhere = (
        kept
        + str(slurm.job(number))
        + "".join(
            path.read_text(errors="replace")
            for path in attempt.folder.rglob("*")
            if path.is_file() and path.suffix != ".log"
        )
    )
    assert "s3cret" not in everywhere


@pytest.mark.soak
def test_script_sees_all_of_slurms_variables_if_asked(make: Make, slurm: Slurm) -> None:
    """With `slurm.variables`, two ranks on each of two nodes see their own numbers, from `distributed.workdir` too."""
    script = ("task=null", "training=null", "checkpoint=null", "script=src/train.py", "code.dir=code")
    more = ("distributed.nproc_per_node=2", "distributed.workdir=src")
    attempt = make(*script, *more, requeues=False, shows_variables=True, script=NUMBERS)
    number = attempt.submit()
    assert slurm.wait(number, "COMPLETED", "FAILED", timeout_s=90)["ExitCode"] == "0:0", attempt.told()
    told = sorted(re.findall(r"told (.*)", attempt.lines(0) + attempt.lines(1)))
    assert told == [f"{rank} {rank % 2} {rank // 2} 4 2 {number} src train.py" for rank in range(4)]


@pytest.mark.soak
@pytest.mark.parametrize(("node", "state"), [(2, "COMPLETED"), (0, "CANCELLED")])
def test_lost_node_is_given_up(node: int, state: str, make: Make, slurm: Slurm) -> None:
    """With min_instances the job goes on with the remaining nodes within 30 s, and keeps its number.

    Without the first node there is no batch script: the new leader ends the job.
    """
    attempt, number = _training(make, "resources.instances=3", "resources.min_instances=2", *SHARED)
    slurm.nodes[node].power_off()
    lost_s, seen = time.monotonic(), len(attempt.steps_in_order())
    until(lambda: len(attempt.steps_in_order()) > seen, 60)
    assert time.monotonic() - lost_s < 30
    assert slurm.wait(number, "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", timeout_s=120)["JobState"] == state
    assert [(attempt.exit(each) or {})["state"] for each in range(3) if each != node] == ["succeeded"] * 2
    assert len(attempt.steps()) == 60


@pytest.mark.soak
def test_killed_agent_returns_at_a_save(make: Make, slurm: Slurm) -> None:
    """kill -9 of an agent, with min_instances: the job goes on with one node, and with two again from a save on."""
    sizes = ("training.micro_batch_size=8", "training.max_steps=150")
    attempt = make("resources.min_instances=1", *sizes, grow_s=1.0)
    pace(slurm, 0.02)
    number = attempt.submit()
    attempt.wait_for_step(15)
    slurm.nodes[1].kill(attempt.agent(1))
    until(lambda: attempt.ranks() == [2, 1, 2], 120)
    pace(slurm, 0)
    assert slurm.wait(number, "COMPLETED", "FAILED", "NODE_FAIL", timeout_s=120)["JobState"] == "COMPLETED"
    until(lambda: attempt.processes() == [], 15)
    whole = make(*sizes, name="whole")
    slurm.wait(whole.submit(), "COMPLETED", timeout_s=120)
    assert len(attempt.steps()) == 150
    assert attempt.steps() == pytest.approx(whole.steps(), rel=1e-4)


def pace(slurm: Slurm, pause_s: float) -> None:
    """Change the seconds that a sample takes, of a training that runs too."""
    (slurm.home() / "pause.tmp").write_text(str(pause_s))
    (slurm.home() / "pause.tmp").chmod(0o644)
    (slurm.home() / "pause.tmp").replace(slurm.home() / "pause")


def _training(
    make: Make, *settings: str, options: Sequence[str] = (), step: int = 15, **changes: Any
) -> tuple[SlurmAttempt, int]:
    """Return a job that has trained to the step, and the job's number; `options` are of sbatch."""
    attempt = make(*settings, **changes)
    number = attempt.submit(*options)
    attempt.wait_for_step(step)
    return attempt, number


def _kill(host: Host, pattern: str) -> None:
    """Kill -9 the process whose command line matches."""
    (pid,) = [pid for pid, line in host.processes() if re.search(pattern, line)]
    host.kill(pid)


def _assert_whole(attempt: SlurmAttempt, number: int, make: Make, *, restarts: int = 0) -> None:
    """Assert that the job succeeds, leaves no process, and has the losses of an undisturbed run."""
    slurm = attempt.slurm
    job = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", timeout_s=120)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0")
    verdict = attempt.exit()
    assert (verdict["state"], verdict["restarts"]) == ("succeeded", restarts)
    assert attempt.processes() == []
    assert attempt.steps() == _undisturbed(make)


def _undisturbed(make: Make) -> dict[int, float]:
    """Return the losses of a run without faults, on the same cluster; made once."""
    if not _WHOLE:
        attempt = make(name="whole")
        attempt.slurm.wait(attempt.submit(), "COMPLETED", timeout_s=90)
        _WHOLE.update(attempt.steps())
        assert len(_WHOLE) == 60
    return _WHOLE


def _left_by_agents(make: Make, slurm: Slurm) -> tuple[SlurmAttempt, int]:
    """Return a job whose agents have left for a requeue, with a dead controller, and the job's number."""
    attempt, number = _training(make)
    slurm.wait_until_saved(number)
    pace(slurm, 0.1)
    slurm.slurmctld.kill()
    _kill(slurm.nodes[1], AGENT)
    until(lambda: "is requeued" in attempt.lines(0), 45)
    return attempt, number


@pytest.mark.soak
def test_agent_killed_while_the_controller_is_down(make: Make, slurm: Slurm) -> None:
    """The batch script waits for the controller, and then requeues the job."""
    attempt, number = _left_by_agents(make, slurm)
    slurm.slurmctld.start()
    until(lambda: slurm.job(number)["Restarts"] == "1", 45)
    until(lambda: attempt.processes() == [], 15)
    pace(slurm, 0.01)
    # Slurm asks a node a second time only after a minute whether the job has left.
    until(lambda: slurm.state(number) == "PENDING", 120)
    attempt.lift_delay(number)
    _assert_whole(attempt, number, make)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["slurm.python=/opt/none/python3"], "/opt/none/python3: No such file or directory"),
        (["slurm.modules=[cuda/12.8]"], "module load cuda/12.8 failed on node0: see slurm.modules"),
        (
            ["slurm.container=apptainer", "image=docker://registry.example/train"],
            "apptainer is not in the PATH of node0",
        ),
    ],
)
def test_job_without_agents_says_why(settings: list[str], words: str, make: Make, slurm: Slurm) -> None:
    """If no agent can start, the batch script itself leaves the exit report, with the cause."""
    attempt = make(*settings)
    slurm.wait(attempt.submit(), "FAILED")
    verdict = attempt.exit()
    assert (verdict["state"], verdict["error"]["kind"]) == ("failed", "config")
    assert words in verdict["error"]["message"]


@pytest.mark.soak
def test_killed_interpreter_ends_the_job(make: Make, slurm: Slurm) -> None:
    """Signal 9 before the agents' start, as for too little memory, fails the job instead of a requeue for ever."""
    program = slurm.home() / "killed"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    attempt = make("slurm.python=/home/alice/killed")
    assert slurm.wait(attempt.submit(), "FAILED")["Restarts"] == "0"
    verdict = attempt.exit()
    assert "Killed" in verdict["error"]["message"]


@pytest.mark.soak
@pytest.mark.parametrize("node", [0, 1])
def test_node_that_cannot_start_ends_all_nodes(node: int, make: Make, slurm: Slurm) -> None:
    """Only one node has no address on the wanted interface: all nodes end within 10 s, with this cause."""
    rest = [each for each in slurm.nodes if each is not slurm.nodes[node]]
    for each in rest:
        each.run(["ip", "address", "add", f"10.77.0.{each.number}/32", "dev", "eth0", "label", "eth0:fabric"])
    attempt = make("slurm.interface=eth0:fabric")
    number = attempt.submit("--nodelist=node0,node1")
    slurm.wait(number, "RUNNING", "FAILED")
    begun_s = time.monotonic()
    assert slurm.wait(number, "FAILED")["ExitCode"] == "64:0"
    assert time.monotonic() - begun_s < 10
    for each in (0, 1):
        verdict = attempt.exit(each)
        assert f"node{node} has no address on slurm.interface eth0:fabric" in verdict["error"]["message"]
    for each in rest:
        each.run(["ip", "address", "delete", f"10.77.0.{each.number}/32", "dev", "eth0"])


@pytest.mark.soak
def test_stop_before_the_requeue_prevents_the_requeue(make: Make, slurm: Slurm) -> None:
    """The user stops the job after the agents have left: the batch script ends the job."""
    attempt, number = _left_by_agents(make, slurm)
    attempt.ask_to_stop()
    slurm.slurmctld.start()
    job = slurm.wait(number, "FAILED", timeout_s=120)
    assert (job["ExitCode"], job["Restarts"]) == ("75:0", "0")


@pytest.mark.soak
def test_job_preempted_before_its_agents_start_is_kept(make: Make, slurm: Slurm) -> None:
    """A pre-emption in the first second requeues the job as later ones do."""
    attempt = make()
    number = attempt.submit()
    slurm.wait(number, "RUNNING")
    slurm.wait(slurm.submit("true", "--nodes=3", "--exclusive"), "RUNNING", "COMPLETED")
    until(lambda: slurm.state(number) == "PENDING")
    attempt.lift_delay(number)
    _assert_whole(attempt, number, make)
