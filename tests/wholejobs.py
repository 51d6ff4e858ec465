"""A small training job, its variant as a script, and the results that a test compares."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cloudtrain.entrypoints import processes
from doubles.azure.names import GROUP, SUBSCRIPTION, WORKSPACE
from doubles.google.names import BUCKET, PROJECT, REGION

ROOT = Path(__file__).resolve().parents[1]
# The config of each backend, without the script, for two instances; `processes` is the plug-in of examples/plugin.
SETTINGS = {
    "local": "backend: local\nresources: {instances: 2}\n",
    "ssh": """\
backend: ssh
resources: {instances: 2}
ssh: {hosts: [h0, h1], ssh_config: "${SSH_CONFIG}", python: "${SSH_PYTHON}"}
""",
    "slurm": """\
backend: slurm
resources: {instances: 2}
limits: {max_duration: 50m}
slurm: {login: alice@login, ssh_config: "${SSH_CONFIG}", python: "${SSH_PYTHON}", cpus_per_node: 1}
""",
    "sagemaker": """\
backend: sagemaker
resources: {instances: 2, instance_type: ml.m5.xlarge}
sagemaker: {role: "arn:aws:iam::123456789012:role/cloudtrain"}
""",
    "azureml": f"""\
backend: azureml
resources: {{instances: 2, instance_type: Standard_D4s_v5}}
azureml: {{subscription: {SUBSCRIPTION}, resource_group: {GROUP}, workspace: {WORKSPACE}, identity: managed}}
""",
    "vertex": f"""\
backend: vertex
resources: {{instances: 2, instance_type: n1-standard-4}}
vertex: {{project: {PROJECT}, location: {REGION}, staging_bucket: {BUCKET}}}
""",
    "processes": "backend: processes\nresources: {instances: 2}\nprocesses: {partition: small}\n",
}
STAND_INS = {
    "ssh": "ssh_pair",
    "slurm": "slurm",
    "sagemaker": "aws",
    "azureml": "azure",
    "vertex": "google",
    "processes": "plugin_package",
}  # fixtures whose `environ` leads the command to the stand-in
TASK = """
import time, torch
def model(params): torch.manual_seed(0); return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
class Data(torch.utils.data.Dataset):
    def __len__(self): return 256
    def __getitem__(self, i):
        time.sleep(0.01)
        g = torch.Generator().manual_seed(i)
        x = torch.randn(8, generator=g)
        return x, x.sum(0, keepdim=True)
def dataset(params, split): return Data() if split == "train" else None
def loss(model, batch): return ((model(batch[0]) - batch[1]) ** 2).mean()
"""  # noqa: E501
TRAINING = """\
training:
  strategy: ddp
  precision: fp32
  global_batch_size: 16
  max_steps: 100
  optimizer: {name: adamw, lr: 1e-2}
  log_every: 10
  seed: 3
checkpoint: {every_steps: 10, keep: 3}
"""
LIMITS = "limits: {max_duration: 1h}\n"
# A task with a test split, which is absent, another split, or raises an error, by the text.
TESTED = """
import torch
from torch import nn
from torch.nn import functional as F
NONE = %r
class Points:
    def __init__(self, first, count): self.first, self.count = first, count
    def __len__(self): return self.count
    def __getitem__(self, index):
        index += self.first
        return torch.arange(6.0).mul(index).sin(), index %% 3
def dataset(params, split):
    if split == "test" and NONE == "raises": raise KeyError("no such file")
    if split == "test" and NONE: return Points(0, 37) if NONE == "train" else None
    return {"train": Points(0, 37), "eval": Points(100, 11), "test": Points(200, 53)}.get(split)
def model(params): return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
def loss(model, batch): return F.cross_entropy(model(batch[0]), batch[1])
def evaluate(model, batch): return {"loss": loss(model, batch)}
def outputs(model, batch): return {"target": batch[1], "score": model(batch[0])}
"""


@dataclass(frozen=True)
class Results:
    """The result of a run."""

    losses: dict[int, float]
    weights: dict[str, torch.Tensor]


def config_of(backend: str, machine: str, where: str, more: str = "") -> str:
    """Return the config of the job on two spot machines; `where` is the backend's block."""
    resources = f"resources: {{instances: 2, instance_type: {machine}, spot: true}}\n"
    head = f'name: j\nbackend: {backend}\ntask: task.py\nenv: {{OMP_NUM_THREADS: "1"}}\n{resources}'
    return f"{head}{more}{TRAINING}{LIMITS}{backend}: {{{where}}}\n"


def write_task(folder: Path, config: str) -> Path:
    """Make the folder a project with the job; return the folder."""
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "cloudtrain.yaml").write_text(config)
    return folder


def as_script(folder: Path, text: str) -> None:
    """Make the project's job a script without a process group."""
    (folder / "train.py").write_text(text)
    config = (folder / "cloudtrain.yaml").read_text().replace(TRAINING, "")
    config = config.replace("distributed: {nproc_per_node: 1}\n", "")
    script = "script: train.py\ndistributed: {allow_alone: true}"
    (folder / "cloudtrain.yaml").write_text(config.replace("task: task.py", script, 1))


def events(lines: str, name: str) -> list[dict[str, Any]]:
    """Return the events of the given name among lines of `logs --json`."""
    told = (json.loads(line).get("event") for line in lines.splitlines())
    return [event for event in told if event and event["e"] == name]


def losses(cli: Any, job: str, *attempts: int) -> dict[int, float]:
    """Return the losses by step, from the log of the given attempts, by default of the first."""
    found: dict[int, float] = {}
    for attempt in attempts or (1,):
        lines = cli("logs", job, "--json", "--raw", "--attempt", attempt).stdout
        found |= {event["step"]: event["loss"] for event in events(lines, "step")}
    return found


def weights(cli: Any, job: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the job's exported weights, fetched as a user would."""
    fetched = cli.ok("artifacts", job, "-o", folder / f"{job}-output", "--json")
    [file] = [path for path in fetched.json["files"] if path.endswith("model.pt")]
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that the weights are the same, bit for bit."""
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def run_whole(cli: Any, folder: Path, shared: Path) -> Results:
    """Return the result of the job on this machine without disturbance; the job runs once for all with `shared`."""
    kept = shared / "whole.pt"
    with processes.locked(shared / "whole.lock"):
        if not kept.exists():
            local = ("--backend", "local", "--set", "resources.instance_type=null")
            cli.ok("submit", "--force", "-y", "--name", "whole", *local, cwd=folder)
            torch.save(asdict(Results(losses(cli, "whole"), weights(cli, "whole", folder))), kept)
    return Results(**torch.load(kept))


def train_digits(cli: Any, folder: Path, backend: str, machine: str, *settings: str) -> None:
    """Train the README's example on two machines: 97 % of unseen samples; fetch the weights, export a checkpoint."""
    shutil.copytree(ROOT / "examples/digits", folder / "digits")
    more = ("resources.accelerators=null", "resources.spot=false", "budget=null", "env={OMP_NUM_THREADS: '1'}")
    given = [part for setting in (*more, *settings) for part in ("--set", setting)]
    command = ("submit", "--force", "-y", "--name", "digits", "--backend", backend, "--instances", "2", *given)
    cli.ok(*command, "--instance-type", machine, cwd=folder / "digits", timeout_s=280)
    status = cli("status", "digits", "--json").json
    assert status["metrics"]["accuracy"] >= 0.97
    assert (status["step"], status["state"]) == (500, "succeeded")
    assert weights(cli, "digits", folder)
    exported = cli.ok("export", "digits", "--checkpoint", "step-400", "-o", folder / "model", timeout_s=100)
    assert "copying step-00000400" in exported.stderr
