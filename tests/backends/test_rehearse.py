"""Rehearsals, end to end: the installed command, every backend's rendered command, torchrun.

No stand-in of a cloud runs, because a rehearsal needs no cloud.
"""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.backend import BUILT_IN
from doubles.waiting import until

pytestmark = pytest.mark.slow

# The settings of a backend, for an account that does not exist.
SETTINGS = {
    "local": "resources: {instances: 2}",
    "ssh": "resources: {instances: 2}\nssh: {hosts: [h0, h1]}",
    "slurm": "resources: {instances: 2}\nslurm: {cpus_per_node: 2}",
    "sagemaker": """\
resources: {instances: 2, instance_type: ml.m5.xlarge}
sagemaker: {region: eu-west-1, role: "arn:aws:iam::123456789012:role/cloudtrain", bucket: a-bucket}""",
    "azureml": """\
resources: {instances: 2, instance_type: Standard_D4s_v5}
azureml: {subscription: 00000000-0000-0000-0000-000000000000, resource_group: g, workspace: w, region: eastus}""",
    "vertex": """\
resources: {instances: 2, instance_type: n1-standard-4}
vertex: {project: my-project, location: europe-west4, staging_bucket: a-bucket}""",
}
CLOUDS = ("sagemaker", "azureml", "vertex")

# Two numbers and a momentum descend a slope; `mode` names the state that is not saved, or not loaded.
SCRIPT = """
import json, math, os, signal, sys, time
from pathlib import Path

import torch.distributed

mode, folder, stops = sys.argv[1], Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]), []
if mode != "lonely":
    torch.distributed.init_process_group("gloo")
if mode == "lacks":
    import neighbour
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
state, saved = {"step": 0, "weight": 1.0, "momentum": 0.0}, folder / "state.json"
if saved.exists() and mode != "anew":
    state.update(json.loads(saved.read_text()))
is_first = os.environ["RANK"] == "0"
while state["step"] < 10_000 and not stops:
    state["step"] += 1
    state["momentum"] = 0.9 * state["momentum"] + 2 * state["weight"] + math.sin(state["step"])
    state["weight"] -= 0.01 * state["momentum"]
    time.sleep(0.02)
    if is_first and mode != "silent":
        told = json.dumps({"e": "step", "step": state["step"], "loss": state["weight"] ** 2})
        print(f"step {state['step']}  ::ct {told}", flush=True)
if is_first and mode != "deaf":
    saved.write_text(json.dumps({key: state[key] for key in state if (mode, key) != ("forgets", "momentum")}))
sys.exit(75 if stops else 0)
"""
TASK = """
import torch
from neighbour import WIDTH

def model(params):
    return torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.Dropout(0.2), torch.nn.Linear(WIDTH, 1))

def dataset(params, split):
    values = torch.arange(256.0).reshape(64, 4) / 256
    return torch.utils.data.TensorDataset(values, values.sum(1, keepdim=True)) if split == "train" else None

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()
"""
TRAINING = "task: task.py\ntraining: {global_batch_size: 8, micro_batch_size: 4, max_steps: 200}\n"


def project(folder: Path, backend: str, *, mode: str | None = "saves", more: str = "") -> Path:
    """Write a project: a script, or without a mode a task of two files."""
    folder.mkdir()
    for name, text in (("train.py", SCRIPT), ("task.py", TASK), ("neighbour.py", "WIDTH = 8\n")):
        (folder / name).write_text(text)
    run = TRAINING if mode is None else f"script: train.py\nargs: [{mode}]\n"
    (folder / "cloudtrain.yaml").write_text(f"name: tried\nbackend: {backend}\n{run}{SETTINGS[backend]}\n{more}")
    return folder


@pytest.mark.parametrize(
    ("backend", "is_task"),
    [
        ("ssh", False),
        ("vertex", True),
        *(pytest.param(name, False, marks=pytest.mark.soak) for name in BUILT_IN if name != "ssh"),
        pytest.param("ssh", True, marks=pytest.mark.soak),
    ],
)
def test_rehearsal_proves_that_an_interrupted_job_resumes(
    cli: Any, tmp_path: Path, backend: str, is_task: bool
) -> None:
    """On every backend two nodes start, are interrupted and resume with equal losses; then spot is allowed."""
    folder = project(tmp_path / "project", backend, mode=None if is_task else "saves")
    named = ["--set", "checkpoint.resume=/mnt/other/step-00000040"] if is_task and backend == "ssh" else []
    done = cli.ok("rehearse", "--preempt-at", "4", "--steps", "2", "--json", *named, cwd=folder, timeout_s=280)
    told = done.json
    assert any("it began at step 0" in each for each in told["not_checked"]) is bool(named)
    assert told["proven"] is True
    assert "equal bit for bit" in told["verdict"]
    assert 0 < told["left_s"] < told["grace_s"]
    assert "2 nodes x 1 rank" in told["checked"][0]["found"]
    assert list((cli.home / "rehearsals").iterdir()) == []
    if is_task:  # ranks wait after step 4; the micro-batch of their agreement may add a step
        assert told["resumed_step"] == told["saved_step"] in (4, 5)
    else:  # a script saves its own way, but no step is lost or repeated
        assert told["next_step"] >= told["interrupted_step"] + 1 >= 5
    if backend in CLOUDS:
        (folder / "cloudtrain.yaml").write_text((folder / "cloudtrain.yaml").read_text() + "tags: {team: a}\n")
        assert "its resume was rehearsed on" in cli("submit", "--spot", "--dry-run", cwd=folder).stderr


@pytest.mark.parametrize(
    ("mode", "name", "words"),
    [
        ("forgets", "losses", "the losses differ after the resume"),
        ("lonely", "met", "2 of 2 ranks have joined no process group of all ranks after"),
        pytest.param(*("deaf", "saved", "name the checkpoints in `keep`"), marks=pytest.mark.soak),
        pytest.param("anew", "resumed", "the script began again at step 1", marks=pytest.mark.soak),
    ],
)
def test_rehearsal_finds_a_script_that_does_not_resume(
    cli: Any, tmp_path: Path, mode: str, name: str, words: str
) -> None:
    """A script that loses its optimizer's state, saves nothing, restarts or is alone is not proven; exit code 1."""
    folder, nodes = project(tmp_path / "project", "local", mode=mode), "2" if mode == "lonely" else "1"
    done = cli("rehearse", "--preempt-at", "3", "--steps", "3", "--nodes", nodes, "--json", cwd=folder)
    assert done.code == 1
    assert done.json["proven"] is False
    assert words in done.json["verdict"]
    assert [each["name"] for each in done.json["checked"] if not each["ok"]] == [name]


def test_rehearsal_misses_a_file_that_is_not_shipped(cli: Any, tmp_path: Path) -> None:
    """A file in .cloudtrainignore is missing, although the file is in the folder; the exception is reported."""
    folder = project(tmp_path / "project", "sagemaker", mode="lacks")
    (folder / ".cloudtrainignore").write_text("neighbour.py\n")
    done = cli("rehearse", "--nodes", "1", cwd=folder)
    assert done.code == 1
    assert "ModuleNotFoundError: No module named 'neighbour'" in done.stdout
    assert "FAIL  steps" in done.stdout


def test_spot_is_refused_until_its_resume_is_proven(cli: Any, tmp_path: Path) -> None:
    """Without a proof, submit refuses with the helpful command; a plan reports the missing proof."""
    folder = project(tmp_path / "project", "sagemaker")
    refused = cli("submit", "-d", "-y", "--spot", cwd=folder)
    assert refused.code == 3
    assert "no rehearsal has proven that this job resumes" in refused.stderr
    assert (
        "cloudtrain rehearse --backend sagemaker --preempt-at STEP`, with a step after the script's first save"
        in refused.stderr
    )
    assert "no rehearsal has proven that this job resumes" in cli("plan", "--spot", cwd=folder).stdout


def test_rehearsal_that_is_killed_leaves_no_process(cli: Any, tmp_path: Path) -> None:
    """All processes of a killed rehearsal die too."""
    folder = project(tmp_path / "project", "sagemaker", mode="silent")
    process = cli.start("rehearse", "--preempt-at", "3", cwd=folder)
    until(lambda: any(cli.home.glob("rehearsals/*/first/*/ml/cloudtrain/log/rank-1.log")), timeout_s=60)
    running = _below(process.pid)
    assert len(running) > 4
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running), timeout_s=30)


def _below(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.split()
    parents = dict(zip(map(int, found[::2]), map(int, found[1::2]), strict=True))
    below = [pid]
    while more := [one for one, above in parents.items() if above in below and one not in below]:
        below += more
    return below[1:]


@pytest.mark.soak  # the sandbox alone: tests/launcher/test_rehearsal.py
def test_rehearsal_works_without_namespaces(cli: Any, tmp_path: Path) -> None:
    """If the kernel allows no namespaces, the platform's paths are rewritten, and the verdict reports the fact."""
    folder = project(tmp_path / "project", "vertex", more="env: {QUOTED: \"a 'b' $(c) /opt/ml\"}\n")
    environ = {"CLOUDTRAIN_SANDBOX": "none"}
    done = cli("rehearse", "--steps", "3", "--nodes", "1", "--json", cwd=folder, env=environ)
    assert done.code == 0, json.dumps(done.json)
    assert any("does not allow namespaces" in each for each in done.json["not_checked"])
