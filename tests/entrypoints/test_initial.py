"""Jobs that begin with another job's weights: real runs, on two ranks where the strategy needs two."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from trainerruns import Run, run, whole_run

from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.checkpoints import shards, weights
from cloudtrain.entrypoints.models import tensors
from cloudtrain.entrypoints.trainer import fitting

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a job of 10 steps with an average of its weights, whose best step is marked."""
    made = whole_run(tmp_path_factory.mktemp("parent"), job="parent", max_steps=10, eval_every=5, ema_decay=0.9)
    folders.mark_best(made.folder / "checkpoints", 5, "loss", 1.0)
    return made


def fit(child: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the comparison before the submit of this child, with the shapes alone."""
    monkeypatch.chdir(child.folder)
    return fitting.compare("spec.json", tensors.at(str(place)))


def begin(folder: Path, place: Path, ranks: int = 1, init: dict[str, Any] | None = None, **settings: Any) -> Run:
    """Train a child of the place in the folder."""
    text = settings.pop("text", None)
    spec = {"max_steps": 4, "eval_every": 2, **settings}
    return run(folder, ranks, env={"CLOUDTRAIN_INPUT_INIT_FROM": str(place)}, init_from=init or {}, text=text, **spec)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {}),
        (2, {"strategy": "ddp", "ema_decay": 0.99}),
        (2, {"strategy": "fsdp"}),
        (2, {"strategy": "local", "local": {"period": 5}, "max_steps": 5, "eval_every": 5}),
    ],
    ids=["alone", "ddp-ema", "fsdp", "local"],
)
def test_first_evaluation_is_the_parents(parent: Run, ranks: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """Before step 1 the evaluation equals the parent's, with the averaged weights, bit for bit."""
    child = begin(tmp_path, parent.folder / "checkpoints", ranks, {"checkpoint": "last"}, **settings)
    assert child.code == 0, child.errors
    assert child.values("eval", "loss")[0].hex() == parent.values("eval", "loss")[10].hex()
    path = parent.folder / "checkpoints/step-00000010"
    manifest = hashlib.sha256((path / folders.MANIFEST).read_bytes()).hexdigest()
    origin = {"job": "parent", "step": 10, "sha256": manifest, "path": str(path)}
    assert child.only("start")["parent"] == child.only("parent")["parent"] == origin
    newest = folders.list_steps(child.folder / "checkpoints")[0][1]
    assert folders.read_trainer(newest)["parent"] == origin


PIPED = """
import torch
from torch import nn
def model(params): return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
def dataset(params, split): return [torch.full((4,), 1.0 / (1 + index)) for index in range(16)]
def loss(model, batch): return (model(batch) - batch).pow(2).mean()
def evaluate(model, batch): return {"loss": loss(model, batch)}
def blocks(model): return list(model)
"""


PARTS = [{"pipeline": 2}, {"tensor": 2, "plan": {"0.0": "column", "1.0": "row"}}]


@pytest.mark.parametrize("parallel", PARTS, ids=["pipeline", "tensor"])
def test_ranks_of_one_model_take_their_own_parts(parallel: dict[str, Any], tmp_path: Path) -> None:
    """A parent on one rank gives each stage, or each rank of a layer, its part of the weights."""
    parent = run(tmp_path / "parent", 1, text=PIPED, max_steps=4, eval_every=4)
    child = begin(tmp_path / "child", parent.folder / "checkpoints", 2, text=PIPED, parallel=parallel)
    assert child.code == 0, child.errors
    assert child.values("eval", "loss")[0] == pytest.approx(parent.values("eval", "loss")[4], rel=1e-6)


def test_default_is_the_best_checkpoint(parent: Run, tmp_path: Path) -> None:
    """Among several checkpoints the best is taken; for a missing step the error lists the present steps."""
    best = begin(tmp_path / "best", parent.folder / "checkpoints")
    assert best.only("start")["parent"]["step"] == 5
    assert best.values("eval", "loss")[0].hex() == parent.values("eval", "loss")[5].hex()
    wrong = begin(tmp_path / "wrong", parent.folder / "checkpoints", init={"checkpoint": "step-7"})
    assert "has no checkpoint step-7; there: step-5, step-10" in wrong.errors


def test_resumed_child_is_exact(parent: Run, tmp_path: Path) -> None:
    """A killed child resumes from the child's own checkpoint after the parent's removal, with equal losses."""
    place = tmp_path / "parent"
    shutil.copytree(parent.folder / "checkpoints", place)
    whole = begin(tmp_path / "whole", place, max_steps=8)
    killed = begin(tmp_path / "killed", place, max_steps=8, do="kill:0:26")
    shutil.rmtree(place)
    again = begin(tmp_path / "killed", place, max_steps=8)
    assert (killed.code != 0, again.code, again.only("restart")["step"]) == (True, 0, 5)
    losses = killed.values("step", "loss") | again.values("step", "loss")
    assert {step: loss.hex() for step, loss in losses.items()} == {
        step: loss.hex() for step, loss in whole.values("step", "loss").items()
    }
    assert again.only("start")["parent"]["job"] == "parent"


def test_optimizer_state_comes_on_request(parent: Run, tmp_path: Path) -> None:
    """After 4 steps AdamW has counted 14 with the parent's state, else 4; a different optimizer is refused."""
    place = parent.folder / "checkpoints/step-00000010"
    for load, count in (("weights", 4.0), ("weights+optimizer", 14.0)):
        child = begin(tmp_path / load, place, init={"load": load})
        assert child.code == 0, child.errors
        (file,) = (tmp_path / load / "checkpoints/step-00000004").glob("shard-*")
        shard = shards.open_shard(file)
        counts = [float(shard.tensor(*each)) for each in shard.boxes if each[0].name.endswith(".step")]
        assert counts == [count] * len(counts) != []
    other = begin(tmp_path / "other", place, init={"load": "weights+optimizer"}, optimizer={"name": "sgd", "lr": 0.1})
    assert "the parent has the optimizer AdamW, this job SGD" in other.errors


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.safetensors.index.json"])
def test_plain_weights_of_other_programs(
    parent: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of plain weights gives the same first evaluation; a changed byte under SHA256SUMS is refused."""
    place = tmp_path / "export"
    place.mkdir()
    found = weights.from_checkpoint(parent.folder / "checkpoints/step-00000010")
    if name.endswith(".json"):
        names = sorted(found)
        files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in files.items():
            weights.write(place / file, {each: found[each] for each in part})
        index = {"weight_map": {each: file for file, part in files.items() for each in part}}
        (place / name).write_text(json.dumps(index))
    else:
        weights.write(place / name, found)
    child = begin(tmp_path / "child", place, 2 if name == "model.pt" else 1)
    assert child.code == 0, child.errors
    if name == "model.pt":  # a pickle has no header with shapes
        with pytest.raises(tensors.NoShapesError, match=r"model\.pt"):
            fit(child, place, monkeypatch)
    else:
        assert fit(child, place, monkeypatch) == {"fits": len(found)}
    assert child.values("eval", "loss")[0].hex() == parent.values("eval", "loss")[10].hex()
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(place.iterdir())]
    (place / "SHA256SUMS").write_text("".join(sums))
    changed = sorted(place.glob("*.safetensors") if name != "model.pt" else place.glob("*.pt"))[0]
    data = bytearray(changed.read_bytes())
    data[-3] ^= 1
    changed.write_bytes(data)
    refused = begin(tmp_path / "refused", place)
    assert (refused.code, "differs from SHA256SUMS" in refused.errors) == (1, True)


def test_damaged_checkpoint_and_other_shapes_are_refused(
    parent: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flipped byte of a shard, and a model of another width, end the job before step 1 with the reason.

    The comparison before the submit says the same of the width, for a checkpoint and for a folder of checkpoints.
    """
    place = tmp_path / "step-00000010"
    shutil.copytree(parent.folder / "checkpoints/step-00000010", place)
    (shard,) = place.glob("shard-00000*")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    damaged = begin(tmp_path / "damaged", place)
    assert "is damaged: the checksum of" in damaged.errors
    wide = begin(tmp_path / "wide", parent.folder / "checkpoints/step-00000010", params={"width": 8})
    assert (damaged.code, wide.code, wide.values("step", "loss")) == (1, 1, {})
    assert "the shape of first.weight differs: 16x6 in the parent, 8x6 here" in wide.errors
    for whole in (parent.folder / "checkpoints", parent.folder / "checkpoints/step-00000005"):
        assert fit(wide, whole, monkeypatch)["fault"] in wide.errors
    whole = weights.from_checkpoint(parent.folder / "checkpoints")
    assert fit(damaged, place, monkeypatch) == {"fits": len(whole)}  # the damage is in no header


TIED = """
import torch
from torch import nn
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.b.weight = self.c.weight = self.a.weight
    def forward(self, x):
        return self.c(self.b(self.a(x)))
def model(params): return Tied()
def dataset(params, split): return [torch.full((4,), float(index) / 9) for index in range(9)]
def loss(model, batch): return model(batch).pow(2).mean()
def evaluate(model, batch): return {"loss": loss(model, batch)}
"""


def test_average_of_a_tied_weight_is_its_own_under_all_names(tmp_path: Path) -> None:
    """The average has one name; a child, and a file of the weights, have it under the others too."""
    made = whole_run(tmp_path / "parent", job="parent", text=TIED, max_steps=10, eval_every=5, ema_decay=0.9)
    child = begin(tmp_path / "child", made.folder / "checkpoints", text=TIED)
    assert child.code == 0, child.errors
    assert child.values("eval", "loss")[0].hex() == made.values("eval", "loss")[10].hex()
    whole = weights.from_checkpoint(made.folder / "checkpoints")
    average = weights.read(made.folder / "checkpoints/step-00000010", "ema")["a.weight"]
    assert all(torch.equal(whole[f"{name}.weight"], average) for name in "abc")


def test_untied_values_are_not_tied_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Different saved values for the names of one tensor are refused; equal values load."""
    apart = ("apart", 2 * torch.eye(4), "ties a.weight, b.weight, c.weight")
    for name, other, fault in (("same", torch.eye(4), ""), apart):
        place = tmp_path / f"{name}.safetensors"
        weights.write(place, {"a.weight": torch.eye(4), "b.weight": torch.eye(4), "c.weight": other})
        child = begin(tmp_path / name, place, text=TIED)
        assert fault in child.errors
        assert child.code == int(bool(fault)), child.errors
        assert fit(child, place, monkeypatch) == {"fits": 3}
    weights.write(place, {"b.weight": torch.eye(4)})
    assert fit(child, place, monkeypatch) == {"fits": 1}
