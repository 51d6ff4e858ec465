"""Exports: the folder gives the results of the checkpoint's model, and a model that does not is refused.

Trainings and the processes of an export start with torch imported (doubles/warmpython.py). test_export_command.py in
tests/launcher runs the command with the real interpreter.
"""

import hashlib
import json
import os
import resource
import runpy
import shutil
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainerruns import whole_run

from cloudtrain.entrypoints.checkpoints import weights
from cloudtrain.entrypoints.export import build, check, loading, reference
from cloudtrain.entrypoints.models import folder as folders
from cloudtrain.entrypoints.models import tensors
from cloudtrain.entrypoints.models.order import ExportOrder
from cloudtrain.entrypoints.serve.engine import open_engine
from doubles import warmpython

Trained = Callable[[str], ExportOrder]
EXPORT = (*warmpython.TRAINER, "cloudtrain.entrypoints.export.check", "torch.export")
# Tied weights, buffers, dropout, and inputs in a dict.
TASK = """
import torch
from torch import nn
from torch.nn import functional as F

class Words:
    classes = ["even", "odd"]
    def __len__(self): return 21
    def __getitem__(self, i): return {"words": torch.arange(5).add(i).remainder(12), "scale": torch.tensor(1.0 + i)}

def dataset(params, split):
    return Words()

class Net(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((1,), 0.5))
    def forward(self, words, scale=None):
        x = self.embed(words).mean(1)
        for layer in self.layers:
            x = x + layer(x)
        return {"score": self.head(self.norm(x)), "scaled": x * scale[:, None] + self.shift}

def model(params):
    return Net(params).to(getattr(torch, params.get("dtype", "float32")))

def loss(model, batch):
    dtype = next(model.parameters()).dtype
    out = model(batch["words"], scale=batch["scale"].to(dtype))
    return F.cross_entropy(out["score"].float(), batch["words"][:, 0]) + out["scaled"].float().square().mean()
"""
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ddp": (1, {"ema_decay": 0.9}, {}),
    "ddp of bf16 weights": (2, {"ema_decay": 0.9}, {"dtype": "bfloat16"}),
    "fsdp": (2, {"strategy": "fsdp", "precision": "bf16", "ema_decay": 0.9}, {}),
    "hsdp": (4, {"strategy": "hsdp", "shard_size": 2}, {}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function that trains a case once, and returns the order for its export."""
    made: dict[str, ExportOrder] = {}

    def get(case: str) -> ExportOrder:
        if case not in made:
            made[case] = train(tmp_path_factory.mktemp("trained"), *CASES[case])
        return made[case]

    return get


def train(folder: Path, ranks: int, settings: dict[str, Any], params: dict[str, Any], text: str = TASK) -> ExportOrder:
    """Train three steps; return the order for an export of the checkpoint."""
    whole_run(folder, ranks, text=text, params=params, max_steps=3, schedule=None, **settings)
    archive = folder / "code.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "task.py", "code/task.py")
    return ExportOrder(
        checkpoint=str(folder / "checkpoints" / "step-00000003"),
        place="",
        name="words",
        archive=str(archive),
        archive_sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
        params=params,
    )


def run_warm(module: str, arguments: list[Path], environment: Mapping[str, str]) -> None:
    """Run a process of an export, with torch imported."""
    args, work = ["-m", f"cloudtrain.entrypoints.export.{module}", *map(str, arguments)], arguments[-1]
    done = warmpython.run(args, work, {**os.environ, **environment}, 100, EXPORT)
    (work / f"{module}.log").write_text(done.stdout + done.stderr)


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the processes of an export with torch imported."""
    monkeypatch.setattr(build, "_run", run_warm)


def evaluated(order: ExportOrder) -> dict[str, torch.Tensor]:
    """Return the state dict with which evaluations ran, computed apart from the export: trained weights, then averages.

    An average replaces the weights under both names of a shared tensor, rounded to their type.
    """
    state = weights.read(Path(order.checkpoint), "model")
    for name, average in weights.read(Path(order.checkpoint), "ema").items():
        for tied in (name, "head.weight") if name == "embed.weight" else (name,):
            state[tied] = average.to(state[tied].dtype)
    return state


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.soak] * (case != "fsdp")) for case in CASES])
def test_export_has_the_bits_that_were_evaluated(trained: Trained, tmp_path: Path, case: str) -> None:
    """Any strategy, number of ranks and type: pt2 and safetensors give the same bits in a new process, averages too."""
    order = replace(trained(case), place=str(tmp_path / "model"))
    found = build.build(order)
    forms = found["check"]["forms"]
    assert {form: each["same_bits"] for form, each in forms.items()} == {"safetensors": True, "pt2": True}
    folder = folders.verify(tmp_path / "model", checked=True)
    state = {name: tensors.load(each) for name, each in tensors.find(tensors.files(folder.path)).items()}
    expected = evaluated(order)
    assert {n: (t.dtype, t.shape) for n, t in state.items()} == {n: (t.dtype, t.shape) for n, t in expected.items()}
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert folder.config["tied"] == {"head.weight": "embed.weight"}
    assert folder.config["classes"] == ["even", "odd"]
    shapes = [(each["name"], each["shape"]) for each in folder.config["inputs"]]
    assert shapes == [("words", [None, 5]), ("scale", [None])]
    assert [each["name"] for each in folder.config["outputs"]] == ["output.score", "output.scaled"]
    assert "the same bits" in (tmp_path / "model" / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture(scope="module")
def kept(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model folder and the reference of its check, as the check sees them."""
    folder, whole = tmp_path_factory.mktemp("kept"), build._checked

    def keep(order: ExportOrder, partial: Path, work: Path, reference: Any) -> dict[str, Any]:
        shutil.copytree(partial, folder / "model")
        shutil.copytree(work, folder / "work")
        return whole(order, partial, work, reference)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_run", run_warm)
        patch.setattr(build, "_checked", keep)
        build.build(replace(trained("ddp"), place=str(folder / "whole")))
    return folder


@pytest.fixture
def parts(kept: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return copies of a model folder and of the reference of its check."""
    shutil.copytree(kept, tmp_path / "kept")
    return tmp_path / "kept" / "model", tmp_path / "kept" / "work"


def change_weight(state: dict[str, torch.Tensor], model: Any) -> None:
    """Move one weight by 0.001."""
    state["layers.0.0.weight"][0, 0] += 1e-3


def leave_average_out(state: dict[str, torch.Tensor], model: Any) -> None:
    """Export the trained weights, not their average."""
    state.update(model)


def untie(state: dict[str, torch.Tensor], model: Any) -> None:
    """Give the second name of a shared tensor the trained weights."""
    state["head.weight"] = model["head.weight"]


def drop_name(state: dict[str, torch.Tensor], model: Any) -> None:
    """Leave out a buffer."""
    del state["shift"]


def widen(state: dict[str, torch.Tensor], model: Any) -> None:
    """Change the type of a buffer."""
    state["shift"] = state["shift"].double()


@pytest.mark.parametrize("damage", [change_weight, leave_average_out, untie, drop_name, widen])
def test_check_refuses_other_weights(
    trained: Trained, parts: tuple[Path, Path], damage: Callable[[Any, Any], None]
) -> None:
    """One weight moved by 0.001, the average left out, a shared name with other values: the check fails each time."""
    folder, work = parts
    state = {name: tensors.load(each) for name, each in tensors.find(tensors.files(folder)).items()}
    damage(state, weights.read(Path(trained("ddp").checkpoint), "model"))
    weights.write(folder / "model.safetensors", state)
    found = checked(folder, work)
    assert (found["pt2"]["passed"], found["safetensors"]["passed"]) == (True, False)
    assert found["safetensors"]["fault"]


def checked(folder: Path, work: Path) -> dict[str, Any]:
    """Return the result of the check of a changed folder."""
    args = ["-m", "cloudtrain.entrypoints.export.check", str(folder), str(work)]
    done = warmpython.run(args, work, dict(os.environ), 60, EXPORT)
    found: dict[str, Any] = json.loads((work / check.FOUND).read_text())
    assert done.returncode == int(not all(each["passed"] for each in found.values()))
    return found


@pytest.mark.parametrize("mode", ["train", "moved weight", "fixed batch"])
def test_check_refuses_another_traced_model(parts: tuple[Path, Path], mode: str) -> None:
    """A model traced in train mode, with a weight moved by 0.001, or for a single size of a batch fails the check."""
    folder, work = parts
    model = runpy.run_path(str(folder / "code" / "task.py"))["model"]({})
    model.load_state_dict({name: tensors.load(each) for name, each in tensors.find(tensors.files(folder)).items()})
    model.eval()
    arguments = torch.load(work / "calls.pt")["arguments"][8]
    args, kwargs = (arguments["words"],), {"scale": arguments["scale"]}
    varying = {"words": {0: torch.export.Dim.DYNAMIC}, "scale": {0: torch.export.Dim.DYNAMIC}}
    if mode == "train":
        model.train()
    if mode == "moved weight":
        with torch.no_grad():
            model.layers[0][0].weight[0, 0] += 1e-3
    shapes = None if mode == "fixed batch" else varying
    loading.save_pt2(torch.export.export(model, args, kwargs, dynamic_shapes=shapes), folder / "model.pt2")
    found = checked(folder, work)
    assert (found["pt2"]["passed"], found["safetensors"]["passed"]) == (False, True)
    assert ("Guard failed" if mode == "fixed batch" else "differs by") in found["pt2"]["fault"]


def test_tolerance_is_a_share_of_the_largest_value() -> None:
    """ONNX may differ by 1e-5 of the largest value in fp32 and 2e-2 in bf16; other types may not."""
    one = {"y": torch.tensor([[100.0, 1e-6], [3.0, 4.0]])}
    near = {"y": one["y"] + 9e-4}
    assert check.compare(one, near, is_loose=True)["passed"]
    assert not check.compare(one, near, is_loose=False)["passed"]
    assert not check.compare(one, {"y": one["y"] + 2e-3}, is_loose=True)["passed"]
    assert not check.compare(one, {"y": one["y"].double()}, is_loose=True)["passed"]
    assert not check.compare(one, {"z": one["y"]}, is_loose=True)["passed"]
    assert not check.compare(one, {"y": one["y"].where(one["y"] > 2, torch.nan)}, is_loose=True)["passed"]
    half = {"y": torch.ones(2, 2).bfloat16()}
    assert check.compare(half, {"y": half["y"] * 1.01}, is_loose=True)["passed"]
    assert check.compare({"y": torch.tensor([torch.nan])}, {"y": torch.tensor([torch.nan])}, is_loose=False)[
        "same_bits"
    ]


def test_argmax_must_stay_the_same() -> None:
    """A difference within the tolerance that changes the largest class is refused."""
    one, other = torch.tensor([[1.0, 1.000001]]), torch.tensor([[1.000001, 1.0]])
    assert "argmax equal in 0" in check.compare({"y": one}, {"y": other}, is_loose=True)["fault"]


def changed(order: ExportOrder, folder: Path, old: str, new: str) -> ExportOrder:
    """Return the order with another task file."""
    assert old in TASK
    (folder / "task.py").write_text(TASK.replace(old, new))
    with tarfile.open(folder / "changed.tar.gz", "w:gz") as tar:
        tar.add(folder / "task.py", "code/task.py")
    data = (folder / "changed.tar.gz").read_bytes()
    archive = str(folder / "changed.tar.gz")
    return replace(order, archive=archive, archive_sha256=hashlib.sha256(data).hexdigest(), place=str(folder / "model"))


LENGTH = "\x1b[96mConstraints violated (L['x'].size()[1])!\n  - but your code specialized it to be a constant (5)."


@pytest.mark.parametrize(
    ("text", "model", "why"),
    [
        (LENGTH, torch.nn.GRU(2, 2), "torch traces GRU for sequences of one length"),
        (LENGTH, torch.nn.LSTMCell(2, 2), "torch traces LSTMCell for sequences of one length"),
        ("zeros(): argument 'size' failed to unpack the object", torch.nn.LSTM(2, 2), "the LSTM of a packed sequence"),
        (
            "Could not guard on data-dependent expression Eq(u0, 1)",
            torch.nn.ReLU(),
            "by the values of a tensor (an `if`",
        ),
    ],
)
def test_reason_of_an_untraced_model_is_in_words(text: str, model: torch.nn.Module, why: str) -> None:
    """torch's own text names neither the layer nor a cure, and that of the exporter for ONNX has colours."""
    error = torch.onnx.OnnxExporterError("Failed to export the model with torch.export. This is step 1/3.")
    error.__cause__ = ValueError(text)
    assert why in reference._why_not(model, error)
    error.__cause__ = ValueError(LENGTH)
    assert reference._why_not(torch.nn.Linear(2, 2), error) == "ValueError: Constraints violated (L['x'].size()[1])!"


def test_untraceable_model_is_left_out_in_one_line(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch on a value cannot be traced: the reason is one line, and the checked weights stand and are served.

    If the form is needed, the export fails, and leaves no folder.
    """
    order = changed(
        trained("ddp"), tmp_path, "self.embed(words).mean(1)", "self.embed(words).mean(1) if words.sum() > 0 else 0"
    )
    with pytest.raises(build.ExportError, match="without pt2: "):
        build.build(replace(order, needed="pt2"))
    assert not (tmp_path / "model").exists()
    found = build.build(order)
    assert list(found["check"]["forms"]) == ["safetensors"]
    assert "\n" not in found["check"]["left_out"]["pt2"]
    assert len(found["check"]["left_out"]["pt2"]) > 20
    assert "model.pt2" not in found["files"]
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    engine = open_engine(tmp_path / "model", most_rows=8)
    recorded = engine.run({"words": torch.arange(5)[None], "scale": torch.ones(1)})
    assert (engine.form, recorded["output.score"].shape) == ("safetensors", (1, 12))
    folders.verify(tmp_path / "model")  # the server's imports have written no file


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("nn.Embedding(12, 8)", "nn.Embedding(13, 8)", "does not fit model(params): size mismatch for embed.weight"),
        ("return Words()", "return open('/missing')", "FileNotFoundError"),
        ("return Words()", "return None", "has neither samples"),
        ("import torch\n", "import missing_package\n", "No module named 'missing_package'"),
        ("model(batch[", "model.forward(batch[", "calls no `model(...)`"),
        ("words, scale=None", "words, scale=None, *, fault=1/0", "ZeroDivisionError"),
    ],
)
def test_unusable_task_is_named(trained: Trained, tmp_path: Path, old: str, new: str, reason: str) -> None:
    """A fault of the task ends the export with one line, and leaves no file."""
    order = changed(trained("hsdp"), tmp_path, old, new)
    with pytest.raises(build.ExportError) as raised:
        build.build(order)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed.tar.gz", "task.py"]


def test_unchecked_export_says_so(trained: Trained, tmp_path: Path) -> None:
    """Without a call of the model the weights are exported on demand, and check.json and the card record that."""
    order = changed(trained("hsdp"), tmp_path, "return Words()", "return None")
    found = build.build(replace(order, is_unchecked=True))
    assert found["check"]["passed"] is None
    assert "has neither samples" in found["check"]["why"]
    assert "has neither samples" in found["check"]["left_out"]["pt2"]
    folder = folders.verify(tmp_path / "model")
    assert not folder.is_checked
    assert "was not checked" in (folder.path / "README.md").read_text()


def test_checkpoint_without_code_gives_its_weights(trained: Trained, tmp_path: Path) -> None:
    """A checkpoint alone is exported unchecked; an average is refused, because it lacks the names of shared weights."""
    order = replace(trained("hsdp"), archive=None, place=str(tmp_path / "model"))
    with pytest.raises(build.ExportError, match="nothing can be checked"):
        build.build(order)
    build.build(replace(order, is_unchecked=True))
    assert not folders.verify(tmp_path / "model").is_checked
    order = replace(trained("ddp"), archive=None, place=str(tmp_path / "other"), is_unchecked=True)
    with pytest.raises(build.ExportError, match="names of shared weights"):
        build.build(order)


def test_damaged_checkpoint_is_refused(trained: Trained, tmp_path: Path) -> None:
    """A flipped bit in a shard, which only its checksum shows, ends the export; nothing is left at the place."""
    order = trained("hsdp")
    damaged = Path(shutil.copytree(order.checkpoint, tmp_path / "step-00000003"))
    shard = sorted(damaged.glob("shard-*"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    order = replace(order, checkpoint=str(damaged), place=str(tmp_path / "model"), archive=None, is_unchecked=True)
    with pytest.raises(build.ExportError, match=r"is damaged: the checksum of shard-00003"):
        build.build(order)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    """A save names the state of `get_extra_state`, for which safetensors has no room."""
    own = "    def get_extra_state(self): return {'seen': 1}\n    def set_extra_state(self, state): pass\n"
    text = TASK.replace("    def forward(self, words", f"{own}    def forward(self, words", 1)
    order = replace(train(tmp_path, 1, {}, {}, text), archive=None, place=str(tmp_path / "model"))
    with pytest.raises(build.ExportError, match="no tensor: _extra_state; safetensors"):
        build.build(replace(order, is_unchecked=True))


def test_full_disk_leaves_nothing(trained: Trained, tmp_path: Path) -> None:
    """A write that fails ends the export with a message; the error equals a full disk's except for its number."""
    order = replace(trained("hsdp"), archive=None, place=str(tmp_path / "model"), is_unchecked=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(build.ExportError, match="cannot be written: File too large"):
            build.build(order)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_task_sees_the_jobs_variables_and_inputs(trained: Trained, tmp_path: Path) -> None:
    """A task that reads an input's path and a variable of the job is built and called as in the job."""
    read = 'assert open(os.environ["CLOUDTRAIN_INPUT_WORDS"]).read() == os.environ["MARK"]'
    order = changed(trained("hsdp"), tmp_path, "    return Words()", f"    import os\n    {read}\n    return Words()")
    (tmp_path / "words").write_text("here")
    environment = {"CLOUDTRAIN_INPUT_WORDS": str(tmp_path / "words"), "MARK": "here"}
    assert build.build(replace(order, environment=environment))["check"]["passed"]
    with pytest.raises(build.ExportError, match="KeyError: 'CLOUDTRAIN_INPUT_WORDS'") as raised:
        build.build(replace(order, place=str(tmp_path / "other")))
    assert "--input NAME=PATH" in raised.value.hint


def test_linked_code_is_copied(trained: Trained, tmp_path: Path) -> None:
    """A link in the code folder becomes a file of the model folder; a name with a line break is refused."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "net.py").write_text(TASK)
    (code / "task.py").symlink_to("net.py")
    archive = tmp_path / "linked.tar.gz"
    place = tmp_path / "model"

    def order() -> ExportOrder:
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(code, "code")
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        return replace(trained("hsdp"), archive=str(archive), archive_sha256=digest, place=str(place))

    build.build(order())
    assert (place / "code" / "task.py").read_text() == TASK
    folders.verify(place, checked=True)
    (code / "new\nline.py").write_text("")
    place = tmp_path / "other"
    with pytest.raises(build.ExportError, match="cannot be listed"):
        build.build(order())
    assert not place.exists()


def test_existing_folder_is_kept(trained: Trained, tmp_path: Path) -> None:
    """An export replaces no folder."""
    (tmp_path / "model").mkdir()
    with pytest.raises(build.ExportError, match="exists"):
        build.build(replace(trained("hsdp"), place=str(tmp_path / "model")))


def test_onnx_gives_the_results_within_the_tolerance(trained: Trained, tmp_path: Path) -> None:
    """ONNX runs without torch's kernels: within 1e-5 of the largest value at each number of samples."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    order = replace(trained("hsdp"), place=str(tmp_path / "model"), forms=("safetensors", "onnx"))
    found = build.build(order)["check"]
    assert found["left_out"] == {}
    assert 0 <= found["forms"]["onnx"]["difference"] <= 1e-5


GPT = """
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

def model(params):
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 31, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))

def dataset(params, split):
    return [{"input_ids": torch.arange(6).add(i).remainder(31)} for i in range(12)]

def loss(model, batch):
    return F.cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
"""


@pytest.mark.soak
def test_transformers_opens_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_pretrained` gives the bits of the averaged weights, tied names included; other programs read our part."""
    order = train(tmp_path, 1, {"ema_decay": 0.9}, {}, GPT)
    order = replace(order, place=str(tmp_path / "model"), forms=("safetensors", "huggingface"))
    found = build.build(order)
    assert found["check"]["left_out"] == {}
    assert found["check"]["forms"]["huggingface"]["passed"] is True
    assert {"config.json", "generation_config.json", "model.safetensors"} <= set(found["files"])
    assert folders.verify(tmp_path / "model", checked=True).config["name"] == "words"
    assert "library_name: transformers" in (tmp_path / "model/README.md").read_text()
    unchecked = {**found["check"], "passed": None, "why": "asked for with --unchecked", "forms": {}}
    assert "library_name: transformers" in build.card(
        json.loads((tmp_path / "model/config.json").read_text()), unchecked
    )
    from transformers import AutoModelForCausalLM

    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    averages = weights.read(Path(order.checkpoint), "ema")
    assert {name for name, value in opened.named_parameters() if torch.equal(value, averages[name])} == set(averages)
    engine = open_engine(tmp_path / "model", most_rows=8)
    assert engine.run({"input_ids": torch.arange(6)[None]})["output.logits"].shape == (1, 6, 31)


def test_class_without_an_architecture_is_refused(trained: Trained, tmp_path: Path) -> None:
    """The layout needs a class of transformers; without a need the other forms stand."""
    order = replace(trained("ddp"), place=str(tmp_path / "model"), forms=("safetensors", "huggingface"))
    with pytest.raises(build.ExportError, match="Net is no architecture of transformers: safetensors and pt2"):
        build.build(replace(order, needed="huggingface"))
    assert list(build.build(order)["check"]["forms"]) == ["safetensors"]
    assert folders.read_config(tmp_path / "model")["name"] == "words"
