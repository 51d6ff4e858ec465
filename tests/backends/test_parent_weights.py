"""`init_from` with a parent in a bucket: names and shapes are compared before the send, by the files' headers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.advice import parents
from cloudtrain.launcher.advice.preparing import prepare
from cloudtrain.launcher.jobs.approval import require_allowed
from cloudtrain.launcher.store.registry import Registry
from doubles.aws.handle import ROLE, Aws

CONFIG = f"""\
name: child
backend: sagemaker
task: task.py
init_from: s3://cloudtrain-tests/export/
training: {{max_steps: 1, global_batch_size: 1}}
resources: {{instance_type: ml.g4dn.xlarge}}
limits: {{max_duration: 1h}}
sagemaker: {{region: us-east-1, role: "{ROLE}", bucket: cloudtrain-tests}}
"""
TASK = """
from torch import nn
def model(params): return nn.Sequential(nn.Linear(4, 600), nn.Linear(600, params.get("classes", 3)))
def dataset(params, split): ...
def loss(model, batch): ...
"""
WEIGHTS = {"0.weight": (600, 4), "0.bias": (600,), "1.weight": (3, 600), "1.bias": (3,)}


@pytest.fixture
def project(folder: Path, account: Aws) -> Path:
    """Return the project's folder; the bucket has the parent's weights in two files with an index."""
    (folder / "task.py").write_text(TASK)
    client, names = account.client("s3"), list(WEIGHTS)
    placed = dict(zip(names, ["a.safetensors", "a.safetensors", "b.safetensors", "b.safetensors"], strict=True))
    for file in ("a.safetensors", "b.safetensors"):
        own = {name: torch.zeros(WEIGHTS[name]) for name in names if placed[name] == file}
        # A header above 64 KiB needs a second read.
        data = save(own, metadata={"notes": "x" * 100_000})
        client.put_object(Bucket="cloudtrain-tests", Key=f"export/{file}", Body=data)
    index = json.dumps({"weight_map": placed})
    client.put_object(Bucket="cloudtrain-tests", Key="export/model.safetensors.index.json", Body=index)
    client.put_object(Bucket="cloudtrain-tests", Key="damaged/model.safetensors.index.json", Body=b"[]")
    manifest = b'{"format":1}\naf1ec339\n'
    client.put_object(Bucket="cloudtrain-tests", Key="older/manifest.json", Body=manifest)
    return folder


def test_difference_is_found_before_the_send(cli: Any, project: Path) -> None:
    """A submit with other shapes ends as a fault of the config; no job exists, and no money is held."""
    told = cli("submit", "-y", "-d", "--set", "params.classes=5", cwd=project)
    assert told.code == 3, told.stdout + told.stderr
    assert "the shape of 1.bias differs: 3 in the parent, 5 here" in " ".join(told.stderr.split())
    assert cli("list", "--all", "--json").json["jobs"] == []
    assert cli("budget", "show", "--json").json["reservations"] == []
    file = project / "cloudtrain.yaml"
    prepared = prepare(configs.load(file, overrides=["params.classes=5"]), file, Path(), dry=True)
    assert require_allowed(Registry(), prepared, force=True) == []  # other packages there may make another model


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("s3://cloudtrain-tests/export/", "names and shapes of 4 weights fit the model"),
        ("s3://cloudtrain-tests/export/a.safetensors", "the parent has no 1.weight 3x600, 1.bias 3"),
        ("s3://cloudtrain-tests/export/model.pt", "on the node, before step 1: model.pt has no header with shapes"),
        ("s3://cloudtrain-tests/nothing/", "on the node, before step 1: there is neither a checkpoint nor"),
        ("s3://cloudtrain-tests/damaged/", "on the node, before step 1: model.safetensors.index.json is damaged"),
        ("s3://cloudtrain-tests/older/", "on the node, before step 1: the checkpoint has format 1"),
        ("s3://not-ours/export/", "on the node, before step 1: "),
    ],
)
def test_unreadable_parent_is_left_to_the_node(place: str, words: str, project: Path) -> None:
    """The check reads headers alone, and never refuses a job for a place that only the job can read."""
    file = project / "cloudtrain.yaml"
    prepared = prepare(configs.load(file, overrides=[f"init_from={place}"]), file, Path(), dry=True)
    try:
        told = parents.compared(prepared, asks_stores=True)
    except configs.ConfigError as error:
        told = [error.faults[0].message]
    assert words in told[0]
