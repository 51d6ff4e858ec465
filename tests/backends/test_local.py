"""The local backend: faults of its processes, and configs that this machine refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.local import backend, jobs
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.entrypoints import processes
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend import Request, Shipment
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.planning.prepare import prepare
from doubles.waiting import until

TWO = "resources: {instances: 2}\n"

# Counts steps in a collective; a restarted run resumes from rank 0's save. On any machine, a fault comes before the
# end: the first run waits at step 30.
TRAIN = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist

dist.init_process_group("gloo")
saved = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]) / "step"
step = int(saved.read_text()) if saved.exists() else 0
stands_at = 30 if os.environ["CLOUDTRAIN_RESTART"] == "0" else None
while step < 40:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
    if step == stands_at:
        continue
    step += 1
    if dist.get_rank() == 0:
        saved.write_text(str(step))
    print("step", step, "restart", os.environ["CLOUDTRAIN_RESTART"], "ranks", dist.get_world_size(), flush=True)
dist.barrier()
os._exit(0)
"""


# Rank 1 hangs in its first start, outside any collective.
HANG = """
import os, time
from cloudtrain.entrypoints.rank import heartbeat

def stand_still():
    time.sleep(600)

is_again = os.environ["CLOUDTRAIN_RESTART"] != "0"
for step in range(20 if is_again else 600):
    heartbeat.beat()
    if step == 15 and os.environ["RANK"] == "1" and not is_again:
        stand_still()
    time.sleep(0.1)
"""


# Fills the whole file system of the job.
FILL = """
import os
with open(os.environ["CLOUDTRAIN_OUTPUT_DIR"] + "/big", "wb", buffering=0) as big:
    while True:
        big.write(bytes(512))
"""


@pytest.fixture
def training(cli: Any, project: Callable[..., Path]) -> Path:
    """Start a two-node job that counts steps; return its folder when the job makes steps."""
    folder = project(TWO, script="train.py", text=TRAIN)
    assert cli("submit", "-d", cwd=folder).code == 0
    cli.watch("step 5 ", "logs", "-f", "last")
    return next(cli.home.glob("local/*/attempt-1"))


def pids(folder: Path, node: int, word: str) -> list[int]:
    """Return the node's processes whose command line contains the word."""
    found = processes.with_environment(CLOUDTRAIN_JOB=folder.parent.name, CLOUDTRAIN_NODE_RANK=str(node))
    return [pid for pid in found if word in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim",
    [
        "entrypoints.agent.boot",
        pytest.param("entrypoints.agent.worker\0script", marks=pytest.mark.soak),
        pytest.param("entrypoints.agent.elastic", marks=pytest.mark.soak),
    ],
)
def test_killed_process_restarts_the_job(cli: Any, training: Path, victim: str) -> None:
    """After kill -9 of a worker, of torchrun or of boot on one node, all nodes restart automatically."""
    worker = victim.startswith("entrypoints.agent.worker")
    found = pids(training, 1, victim)
    chosen = max(found) if worker else min(found)
    os.kill(chosen, signal.SIGKILL)
    assert cli("wait", "last").code == 0
    status = cli("status", "last", "--json").json
    logs = cli("logs", "last", "--rank", "0").stdout
    assert (status["state"], status["restarts"]) == ("succeeded", 1)
    assert "step 40 restart 1" in logs
    assert "step 1 restart 1" not in logs


@pytest.mark.slow
def test_killed_agent_ends_the_job_on_every_node(cli: Any, training: Path) -> None:
    """No node hangs: the remaining node learns of the loss, and the error names the lost node."""
    state = json.loads((training / "node-1" / "state.json").read_text())
    os.kill(state["pid"], signal.SIGKILL)
    assert cli("wait", "last").code == 1
    status = cli("status", "last", "--json").json
    assert (status["state"], status["reason"], status["resumable"]) == ("failed", "node_failure", True)
    assert "node 1 was lost" in status["error"]["message"]


@pytest.mark.slow
def test_job_continues_without_a_lost_node_if_allowed(cli: Any, project: Callable[..., Path]) -> None:
    """kill -9 of an agent, with `min_instances`: the rest resumes from the save, and `status` reports the loss."""
    more = "resources: {instances: 3, min_instances: 2}\nlocal: {price_per_hour: 3600 USD}\n"
    folder = project(more, script="train.py", text=TRAIN)
    sent = cli("submit", "-d", "-y", cwd=folder)
    assert (sent.code, "min_instances" in sent.stderr) == (0, False)
    cli.watch("step 5 ", "logs", "-f", "last")
    attempt = next(cli.home.glob("local/*/attempt-1"))
    agent = json.loads((attempt / "node-2" / "state.json").read_text())["pid"]
    keeper = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (keeper, agent):  # the keeper would bring the node back, ten seconds later
        os.kill(pid, signal.SIGKILL)
    assert cli("wait", "last").code == 0
    status = cli("status", "last", "--json").json
    said = "node 2 was lost; going on with 2 of 3 nodes"
    assert (status["state"], status["detail"]) == ("succeeded", said)
    causes = [
        cause["message"] for cause in json.loads((attempt / "node-0" / "exit.json").read_text())["restarted_after"]
    ]
    assert causes == ["node 2 was lost: its agent is silent; going on with 2 of 3 nodes"]
    bill = cli("cost", "last", "--json").json  # a dollar a second and node, the lost node's until its loss
    both, lost = bill["legs"]
    assert (both["instances"], lost["instances"], lost["seconds"] < both["seconds"]) == (2, 1, True)
    assert bill["spend_usd"] == pytest.approx(2 * both["seconds"] + lost["seconds"], abs=0.01)
    logs = cli("logs", "last", "--rank", "1").stdout
    assert "step 40 restart 1 ranks 2" in logs
    assert "step 1 restart 1" not in logs


@pytest.mark.slow
def test_stuck_rank_is_found_and_the_job_restarts(home: Path, project: Callable[..., Path]) -> None:
    """A hung rank: its stack is in its log, all nodes restart, and the cause is recorded."""
    folder = project(TWO + "distributed: {allow_alone: true}\n", script="train.py", text=HANG)
    config = configs.load(folder / "cloudtrain.yaml")
    ready = prepare(config, folder / "cloudtrain.yaml", home / "bundles", dry=False)
    body = {**ready.request.body, "spec": {**ready.request.body["spec"], "hang_timeout_s": 3}}
    ref = LocalBackend().send(replace(ready.request, body=body), Shipment(ready.bundle, home, folder))
    until(lambda: LocalBackend().state(ref).state == "succeeded", 120, 0.2)
    (cause,) = json.loads((Path(ref["folder"]) / "node-0" / "exit.json").read_text())["restarted_after"]
    assert (cause["node"], cause["rank"], cause["kind"]) == (1, 1, "hang")
    assert "; its stack is in the log" in cause["message"]
    assert "in stand_still" in (Path(ref["folder"]) / "node-1" / "log" / "rank-1.log").read_text()
    # The cause may be on any node, so all ranks print theirs: the rank that is silent may only wait for another.
    assert "(most recent call first)" in (Path(ref["folder"]) / "node-0" / "log" / "rank-0.log").read_text()


@pytest.mark.slow
@pytest.mark.soak
def test_stop_after_the_death_of_all_agents_leaves_no_process(cli: Any, training: Path) -> None:
    """Without any agent the state comes from files of the agents; no process of the job survives."""
    for node in (0, 1):
        os.kill(json.loads((training / f"node-{node}" / "state.json").read_text())["pid"], signal.SIGKILL)
    cli("wait", "last")
    assert cli("status", "last", "--json").json["reason"] == "node_failure"
    cli("stop", "last", "-y")
    until(lambda: pids(training, 0, "") + pids(training, 1, "") == [], 10)


@pytest.mark.slow
def test_stop_sweeps_processes_of_killed_agents(cli: Any, project: Callable[..., Path]) -> None:
    """A script's child survives the kill of the agents; the next poll of the lost job kills the child."""
    text = "import subprocess; print('started', flush=True); subprocess.run(['sleep', '4242'])"
    cli("submit", "-d", cwd=project("", script="train.py", text=text))
    cli.watch("started", "logs", "-f", "last")
    folder = next(cli.home.glob("local/*/attempt-1"))
    os.kill(json.loads((folder / "node-0" / "state.json").read_text())["pid"], signal.SIGKILL)
    assert cli("wait", "last").code == 1
    until(lambda: pids(folder, 0, "sleep") == [])


@pytest.mark.slow
def test_frozen_agent_does_not_hold_the_job(cli: Any, training: Path) -> None:
    """A node with a stopped agent is lost; `stop --now` kills even that agent."""
    agent = json.loads((training / "node-1" / "state.json").read_text())["pid"]
    os.kill(agent, signal.SIGSTOP)
    assert cli("stop", "last", "--now", "-y", timeout_s=60).code == 0
    assert cli("status", "last", "--json").json["state"] == "stopped"
    assert processes.stamp(agent) is None


def test_late_start_after_a_final_answer_starts_no_agent(tmp_path: Path) -> None:
    """If `find` returns None, a starter that comes later answers that the start was given up."""
    folder = tmp_path / "local" / "one" / "attempt-1"
    folder.mkdir(parents=True)
    assert LocalBackend().find(Request("one-1", {}, ""), tmp_path) is None
    starter = [sys.executable, "-m", "cloudtrain.entrypoints.agent.starting"]
    order = json.dumps({"folder": str(folder), "nodes": []})
    answer = subprocess.run(starter, input=order, capture_output=True, text=True, check=True).stdout
    assert json.loads(answer) == {"started": False, "why": "given up before it started"}


def test_state_of_an_agent_that_ends_during_the_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit written between the two reads counts: the job is done, not lost."""
    node = tmp_path / "node-0"
    node.mkdir()
    (node / "state.json").write_text(json.dumps({"pid": 1, "stamp": "x", "generation": 1, "started_s": 1.0}))

    def end(pid: int, stamp: str) -> bool:
        verdict = {"state": "succeeded", "reason": None, "resumable": False, "error": None, "restarts": 0}
        (node / "exit.json").write_text(json.dumps({**verdict, "ended_s": 2.0}))
        return False

    monkeypatch.setattr(processes, "alive", end)
    ref = {"folder": str(tmp_path), "nodes": 1, "checkpoint_dir": str(tmp_path)}
    assert LocalBackend().state(ref).state == "succeeded"


@pytest.mark.parametrize(
    ("chosen", "instances", "shares"),
    [
        *(("2,3", 2, ["2", "3"]), ("2,3", 1, ["2,3"]), ("0", 2, ["", ""]), ("", 1, [""])),
        *(("1,-1,2", 1, ["1"]), (None, 2, ["0,1", "2,3"])),
    ],
)
def test_gpus_are_the_users_own_and_never_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, instances: int, shares: list[str]
) -> None:
    """Each node gets its share of CUDA_VISIBLE_DEVICES, and no GPU if there are too few for all nodes."""
    for name in ("nvidia3", "nvidia5", "nvidia6", "nvidia7", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(processes, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    config = JobConfig.model_validate({"name": "x", "task": "task.py", "resources": {"instances": instances}})
    each = LocalBackend().capacity(config).gpus
    nodes = [{"gpus": list(range(node * each, (node + 1) * each))} for node in range(instances)]
    assert each == len(shares[0].split(",")) * bool(shares[0])
    assert [jobs.share_of_gpus(node) for node in nodes] == [{"CUDA_VISIBLE_DEVICES": share} for share in shares]


def test_variable_alone_makes_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA_VISIBLE_DEVICES of a profile does not count on a machine without a GPU."""
    monkeypatch.setattr(processes, "DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert processes.gpus() == []


SMALL_MIB = 4  # room for the code that a node gets, and little more


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """Mount a small file system outside pytest's own folder, which pytest could not remove; unmount it after."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    folder = Path(tempfile.mkdtemp(prefix="cloudtrain-test-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_MIB}m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
    folder.rmdir()


@pytest.mark.slow
def test_full_disk_under_the_job_is_reported(cli: Any, project: Callable[..., Path], small_disk: Path) -> None:
    """With no byte free, the job's end and the cause are still recorded."""
    cli = replace(cli, home=small_disk)
    assert cli("submit", cwd=project("", script="train.py", text=FILL)).code == 1
    status = cli("status", "last", "--json").json
    assert (status["state"], status["error"]["type"]) == ("failed", "OSError")
    assert "No space left on device" in status["error"]["message"]
    assert processes.with_environment(CLOUDTRAIN_HOME=str(small_disk)) == []


@pytest.mark.parametrize("left", [100_000, 16_384])
def test_full_disk_at_start_is_reported(home: Path, project: Callable[..., Path], small_disk: Path, left: int) -> None:
    """The error names the disk, and the hint works on this machine."""
    folder = project(TWO, script="train.py", text="")
    config = configs.load(folder / "cloudtrain.yaml")
    ready = prepare(config, folder / "cloudtrain.yaml", home / "bundles", dry=False)
    (small_disk / "filling").write_bytes(bytes(SMALL_MIB * 1024 * 1024 - left))
    with pytest.raises(ConfigError) as refused:
        LocalBackend().send(ready.request, Shipment(ready.bundle, small_disk, folder))
    assert "no space is left on the disk of" in refused.value.message
    assert "node-0" in refused.value.message
    assert "CLOUDTRAIN_HOME" in refused.value.hint
    assert "disk_gb" not in str(refused.value)
    assert processes.with_environment(CLOUDTRAIN_HOME=str(small_disk)) == []


def test_disk_without_inodes_is_reported(cli: Any, project: Callable[..., Path], small_disk: Path) -> None:
    """At whichever file of a submit the inodes end: a sentence, never an error of our own; then a submit works."""
    cli = replace(cli, home=small_disk / "home")
    folder = project("", script="train.py", text="")
    cli.ok("list")
    told = set()
    for left in range(1, 27, 3):
        used = subprocess.check_output(["df", "--output=iused", small_disk], text=True).split()[1]
        subprocess.run(["mount", "-o", f"remount,nr_inodes={int(used) + left}", small_disk], check=True)
        done = cli("submit", "-d", cwd=folder)
        told.add(done.code)
        assert "itself failed" not in done.stderr, (left, done.stderr)
        subprocess.run(["mount", "-o", "remount,size=64m,nr_inodes=9999", small_disk], check=True)
        if done.code == 0:
            cli("stop", "last", "--now", "-y")
    assert told - {0}
    assert cli("submit", cwd=folder).code == 0


@pytest.mark.slow
@pytest.mark.soak
def test_ports_in_use_are_skipped(cli: Any, project: Callable[..., Path]) -> None:
    """Two jobs at the same time on the same addresses do not collide."""
    folder = project(TWO, script="train.py", text=TRAIN.replace("30 if", "None if"))
    for _ in range(2):
        assert cli("submit", "-d", cwd=folder).code == 0
    ids = [job["job"] for job in cli("list", "--json").json["jobs"]]
    assert cli("wait", *ids).code == 0


@pytest.mark.slow
def test_files_written_next_to_the_script_stay(cli: Any, project: Callable[..., Path]) -> None:
    """A relative path is in the job's own copy of the code, which a successful job keeps."""
    folder = project("", script="train.py", text="open('best.txt', 'w').write('0.98')")
    assert cli("submit", cwd=folder).code == 0
    assert next(cli.home.glob("local/*/attempt-1/node-0/code/best.txt")).read_text() == "0.98"
    assert not (folder / "best.txt").exists()


@pytest.mark.slow
def test_module_with_its_own_output_folder(cli: Any, project: Callable[..., Path], tmp_path: Path) -> None:
    """`module:` runs as `python -m`, and `outputs:` go to the job's folders below the config's."""
    folder = project()
    (folder / "pkg").mkdir()
    text = "import os; open(os.environ['CLOUDTRAIN_OUTPUT_DIR'] + '/model/w', 'w').write(__name__)"
    (folder / "pkg" / "go.py").write_text(text)
    (folder / "cloudtrain.yaml").write_text(f"name: mod\nmodule: pkg.go\noutputs: {{model: {tmp_path}/kept}}\n")
    assert cli("submit", cwd=folder).code == 0
    assert [path.read_text() for path in tmp_path.glob("kept/mod-*/w")] == ["__main__"]


def test_plan_counts_the_threads_of_other_local_jobs(cli: Any, project: Callable[..., Path], tmp_path: Path) -> None:
    """Two jobs of one home folder share the cores; a node's processes count once, jobs of a second home do not."""
    (tmp_path / "spec.json").write_text('{"nproc_per_node": 2}')
    common = {**os.environ, "CLOUDTRAIN_SPEC": str(tmp_path / "spec.json"), "OMP_NUM_THREADS": "500"}
    others = []
    for job, home in (("a", cli.home), ("a", cli.home), ("b", cli.home), ("c", tmp_path / "elsewhere")):
        log = str(home / "local" / job / "attempt-1" / "node-0" / "log")
        env = {**common, "CLOUDTRAIN_LOG_DIR": log, "CLOUDTRAIN_JOB": job}
        others.append(subprocess.Popen(["sleep", "100"], env=env))
    try:
        until(lambda: all(b"sleep" in Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in others))
        told = cli("plan", cwd=project("env: {OMP_NUM_THREADS: '3'}\n"))
    finally:
        for each in others:
            each.kill()
            each.wait()
    words = f"warning: 2 other local jobs use 2000 threads, and this job 3, on {processes.cores()} cores: the jobs get "
    words += "slower; wait for the other jobs, or set a smaller env.OMP_NUM_THREADS"
    assert words in told.stdout + told.stderr
    alone = cli("plan", cwd=project("env: {OMP_NUM_THREADS: '3'}\n"))
    assert "other local job" not in alone.stdout + alone.stderr


def test_plan_names_accelerators_that_this_machine_lacks(
    cli: Any, project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local backend uses the machine's own hardware, and the plan reports the ignored key."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    told = cli.ok("plan", cwd=project("resources: {accelerators: 'A100:8'}\n"))
    words = "ignored on local: resources.accelerators (A100:8); this machine has no GPU for each instance"
    assert words in told.stdout + told.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("checkpoint: {uri: s3://bucket/x}\n", "the local backend cannot reach `s3://bucket/x`"),
        ("inputs: {train: gs://bucket/x}\n", "inputs.train"),
        ("resources: {instances: 65}\n", "65 instances on one machine are too many"),
        ("local: {python: /no/such/python}\n", "there is no interpreter `/no/such/python`"),
    ],
)
def test_this_machine_refuses_bad_configs(cli: Any, project: Callable[..., Path], more: str, message: str) -> None:
    """A config that cannot run here is reported with its key, before the start."""
    done = cli("submit", "-d", cwd=project(more))
    assert done.code == 3
    assert message in done.stderr
    assert not [job for job in cli("list", "--json").json["jobs"] if job["state"] != "failed"]


def test_files_that_vanish_during_a_copy_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job removes an old checkpoint while its files are fetched: the rest is fetched."""
    source, real = tmp_path / "checkpoints", shutil.copy2
    for name in ("step-1/rank-0", "step-2/rank-0"):
        (source / name).parent.mkdir(parents=True)
        (source / name).write_text(name)

    def copy(file: str, to: str) -> None:
        shutil.rmtree(source / "step-1", ignore_errors=True)
        real(file, to)

    monkeypatch.setattr(shutil, "copy2", copy)
    assert backend._copied(source, tmp_path / "out") == [tmp_path / "out/step-2/rank-0"]


def test_file_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    """A folder in the place of a file."""
    (tmp_path / "output").mkdir()
    (tmp_path / "output/a").write_text("a")
    (tmp_path / "out/a").mkdir(parents=True)
    (tmp_path / "out/a/a").mkdir()
    with pytest.raises(ConfigError, match=r"the output cannot be copied: .*directory"):
        backend._copied(tmp_path / "output", tmp_path / "out")
