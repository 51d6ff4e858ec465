"""The estimate of a rank's memory against the bytes that the same training really holds, by `on_rank`."""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainerruns import on_ranks

from cloudtrain.entrypoints.trainer import data, optim
from cloudtrain.entrypoints.trainer.metrics import StorageCounter
from cloudtrain.entrypoints.trainer.optimizer_facts import OPTIMIZERS
from cloudtrain.entrypoints.trainer.settings import OptimizerSettings, ParallelSettings, TrainingSettings
from cloudtrain.entrypoints.trainer.strategies.cut import Output
from cloudtrain.entrypoints.trainer.strategies.links import Links
from cloudtrain.entrypoints.trainer.strategies.pipeline import Feed
from cloudtrain.entrypoints.trainer.strategies.wrap import wrap
from cloudtrain.entrypoints.trainer.task import load_task
from doubles import warmpython

CHARLM = Path(__file__).parents[2] / "examples" / "charlm" / "task.py"
SMALL = {"context": 64, "layers": 4, "heads": 4, "width": 128, "dropout": 0.1}
LONG = {"context": 256, "layers": 3, "heads": 6, "width": 192, "dropout": 0.0}
MICRO = 4
SHARED: dict[str, list[dict[str, Any]]] = {
    "hardest": [
        {"strategy": "fsdp", "activation_checkpointing": True, "precision": "bf16"},
        {"strategy": "ddp", "parallel": {"tensor": 2}},
        {"strategy": "ddp", "shard": "optimizer"},
        {
            "strategy": "ddp",
            "parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
            "params": LONG | {"layers": 4},
        },
    ],
    "others": [
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
        {"strategy": "ddp", "parallel": {"pipeline": 2}},
        {"strategy": "ddp", "parallel": {"pipeline": 2, "schedule": "gpipe"}, "activation_checkpointing": True},
    ],
}
COUNT = 4  # micro-batches of a step of a pipeline
TASK = """
import torch
from torch import nn
def model(params): return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))
def dataset(params, split): return [torch.zeros(8)] * 64
def loss(model, batch): return model(batch).mean()
"""


def estimates(
    folder: Path, task: str | Path, params: dict[str, Any], ranks: int = 1, usable_bytes: int = 0, **training: Any
) -> list[dict[str, Any]]:
    """Return the lines that the module prints for the task, a path or a text."""
    if isinstance(task, str):
        (folder / "task.py").write_text(task)
        task = folder / "task.py"
    spec = {
        "job": "test",
        "nproc_per_node": ranks,
        "run": {"kind": "task", "target": str(task)},
        "params": params,
        "training": {"global_batch_size": MICRO * ranks, "micro_batch_size": MICRO, "max_steps": 1, **training},
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    words = ["-m", "cloudtrain.entrypoints.trainer.memory", "spec.json", str(usable_bytes)]
    return [json.loads(line) for line in start(words, folder).splitlines()]


def start(words: list[str], folder: Path) -> str:
    """Return the output of Python with these arguments."""
    done = warmpython.run(words, folder, {**os.environ, "OMP_NUM_THREADS": "1"}, 200)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


class LinksOfGpus(Links):
    """Connections that send activations without a copy, as between GPUs."""

    def _inline_bytes(self, traced: Output) -> int:
        return 0


def train(params: dict[str, Any], counter: StorageCounter | None = None, **training: Any) -> None:
    """Take two steps of the example's GPT, spread over the ranks of the process group; `counter` counts the steps."""
    parallel = ParallelSettings(**training.pop("parallel", {}))
    task, ranks = load_task(CHARLM), dist.get_world_size() // parallel.ranks
    size = MICRO * ranks * (COUNT if parallel.pipeline > 1 else 1)
    settings = TrainingSettings(size, MICRO, parallel=parallel, max_steps=2, **training)
    batch = (torch.zeros(MICRO, params["context"], dtype=torch.int64),) * 2
    split = data.split_batch(size, MICRO, ranks)
    module = task.model(params)
    probe = lambda module, _: task.loss(module, batch)  # noqa: E731
    spread = wrap(settings, module, torch.device("cpu"), split, probe=probe, connect=LinksOfGpus)
    if counter is not None:  # a trace has activations of the whole model, without data
        gc.collect()
        counter.peak_bytes = counter.live_bytes
    with spread.optimized():
        optimizer = optim.build(OptimizerSettings(), spread.module.parameters())
    for _ in range(2):
        if spread.walk is not None:
            spread.walk(
                Feed(split.owned(0), lambda: batch, lambda *_: None, task.loss, torch.Tensor.backward, lambda: None, 2)
            )
        else:
            with spread.micro_batch(0, True):
                with spread.autocast():
                    loss = spread.model(lambda model: task.loss(model, batch))
                loss.backward()
        spread.finish()
        optimizer.step()
        spread.share_update()
        optimizer.zero_grad()


def allocated(work: Callable[[], None]) -> int:
    """Return the most bytes that torch's allocator had given out at a time, by its own profiler."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
        gc.collect()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert live == 0  # otherwise memory from before was freed, and the peak is wrong
    return peak


@pytest.mark.parametrize("params", [SMALL, pytest.param(LONG, marks=pytest.mark.soak)], ids=["small", "long"])
def test_estimate_equals_the_bytes_of_the_allocator(params: dict[str, Any], tmp_path: Path, alone: None) -> None:
    """On one rank, with AdamW in fp32, and with and without recomputation, the estimate is within 5 %."""
    found = estimates(tmp_path, CHARLM, params, usable_bytes=1 << 40, activation_checkpointing=True)
    assert [each["changes"] for each in found] == [{}, {"activation_checkpointing": False}]
    for each, again in zip(found, (True, False), strict=True):
        held = allocated(lambda again=again: train(params, activation_checkpointing=again))  # type: ignore[misc]
        assert each["bytes"] == pytest.approx(held, rel=0.05)
    assert found[0]["bytes"] < 0.8 * found[1]["bytes"]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("cases", ["hardest", "others"])
def test_estimate_equals_the_bytes_of_two_ranks(cases: str, tmp_path: Path) -> None:
    """Copies, shards, parts of layers, stages: within 5 % of the storages that rank 0 holds, without gloo's buffers."""
    held = on_ranks(__file__, 2, tmp_path, cases)[0]
    shared = [{"params": LONG, **_of_two(case)} for case in SHARED[cases]]
    found = [estimates(tmp_path, CHARLM, ranks=2, **case)[0]["bytes"] for case in shared]
    assert found == [pytest.approx(each, rel=0.05) for each in held]


def _of_two(case: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a case for two ranks; ranks that share a model have the same micro-batches."""
    parallel = case.get("parallel", {})
    return {**case, "global_batch_size": MICRO * (COUNT if "pipeline" in parallel else 1 if parallel else 2)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_estimate_holds_the_state_of_each_optimizer(name: str, tmp_path: Path) -> None:
    """Weights and gradients are 8 bytes a parameter, and each state 4: with momentum one, of the Adam kind two."""
    momentum = {"momentum": 0.9} if "momentum" in OPTIMIZERS[name].heeds else {}
    optimizer = {"name": name, **momentum}
    found = estimates(tmp_path, TASK, {}, optimizer=optimizer)[0]
    assert not found["is_assumed"]
    held = 8 + 4 * OPTIMIZERS[name].states
    assert found["static_bytes"] / found["parameters"] == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize(
    "change",
    [
        "torch.UntypedStorage.resize_ = None",
        "torch.UntypedStorage.nbytes = lambda storage: 8",
        "import torch.utils._pytree; del torch.utils._pytree.tree_leaves",
    ],
)
def test_estimate_of_another_torch_has_a_reason(change: str, tmp_path: Path) -> None:
    """Without a name inside torch that the estimate needs, the answer is a reason, and no error."""
    run = "runpy.run_module('cloudtrain.entrypoints.trainer.memory', run_name='__main__', alter_sys=True)"
    (tmp_path / "other.py").write_text(f"import runpy, torch\n{change}\n{run}\n")
    (line,) = start(["other.py", "spec.json", "0"], tmp_path).splitlines()
    assert f"torch {torch.__version__} differs inside: " in json.loads(line)["why"]


def test_estimate_counts_eight_bytes_for_an_optimizer_that_reads_values(tmp_path: Path) -> None:
    """Such an optimizer cannot step without data: the estimate says that it assumes a state like AdamW's."""
    own = """
class Own(torch.optim.SGD):
    def step(self):
        print(float(self.param_groups[0]["params"][0].grad.sum()))
def optimizer(model, params): return Own(model.parameters(), 0.1)
"""
    found = estimates(tmp_path, TASK + own, {})[0]
    assert found["is_assumed"]
    assert found["static_bytes"] / found["parameters"] == pytest.approx(16, rel=0.05)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("model(batch).mean()", "model(batch).mean() * model(batch).sum().item()", "reads values of tensors"),
        ("model(batch).mean()", "model(batch.nothing)", "AttributeError: 'FakeTensor' object has no attribute"),
    ],
)
def test_loss_that_fails_leaves_a_lower_bound(old: str, new: str, why: str, tmp_path: Path) -> None:
    """Parameters, gradients and the optimizer's state are known without a forward pass."""
    found = estimates(tmp_path, TASK.replace(old, new), {}, usable_bytes=1)
    assert len(found) == 1
    assert why in found[0]["why"]
    assert found[0]["bytes"] / found[0]["parameters"] == pytest.approx(16, rel=0.05)


def test_sparse_gradients_are_counted_or_named(tmp_path: Path) -> None:
    """The rows of a sparse gradient are small; settings that cannot take it are named before the job."""
    model, rows = "nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))", "[torch.arange(3)] * 64"
    task = TASK.replace(model, "nn.EmbeddingBag(10000, 8, sparse=True)").replace("[torch.zeros(8)] * 64", rows)
    plain = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0}}
    (found,) = estimates(tmp_path, task, {}, **plain)
    assert found["why"] is None
    assert found["bytes"] / found["parameters"] == pytest.approx(4, rel=0.1)  # the weights alone
    assert "sparse=False" in estimates(tmp_path, task, {}, **plain, clip_norm=1.0)[0]["why"]


def test_task_that_fails_says_why_in_a_line(tmp_path: Path) -> None:
    """Data that are not on this machine are no error."""
    found = estimates(tmp_path, TASK.replace("return [torch", "return open('/nowhere') or [torch"), {})
    assert found == [{"why": "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'"}]


SAMPLER = """
import os
class Sampler:
    def __iter__(self): return (int(i) % 64 for i in os.urandom(64))
def sampler(params): return Sampler()
"""
STREAM = """
class Rows(torch.utils.data.IterableDataset):
    def __init__(self): self.rows = [torch.zeros(8) + i for i in range(12)]
    def __iter__(self): return iter(self.rows)
def dataset(params, split): return Rows() if split == "train" else None
"""
TEACHER = """
class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.teacher = nn.Linear(8, 1), nn.Linear(8, 1).requires_grad_(False)
    def forward(self, x):
        self.teacher.weight.data = 0.9 * self.teacher.weight.data + 0.1 * self.own.weight.data
        return self.own(x)
def model(params): return Student()
"""
QUEUE = """
class Queue(nn.Linear):
    def forward(self, x):
        self.rows = torch.cat([self.rows, x.detach()])
        return super().forward(x)
def model(params):
    module = Queue(8, 1)
    module.register_buffer("rows", torch.zeros(0, 8))
    return module
"""
ROWS = """
def model(params): return nn.Embedding(9, 8)
def loss(model, batch): return nn.functional.embedding(batch.long(), model.weight, sparse=True).mean()
"""
LATE = """
class Memory: shift = 1.0
class Late(torch.optim.SGD):
    def step(self, closure=None): self.memory = Memory()
def optimizer(model, params): return Late(model.parameters(), 0.1)
"""
SCHEDULE = "def schedule(step, max_steps, params): return 1.0"
SGD: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0}}
LOCAL: dict[str, Any] = {"strategy": "local", "local": {"period": 4}}


@pytest.mark.parametrize(
    ("text", "settings", "why"),
    [
        (SAMPLER, {}, "sampler gives different indices on two ranks"),
        (SAMPLER.replace("os.urandom(64)", "torch.randperm(64)"), {}, ""),
        ("def sampler(params): return range(65)", {}, "sampler must give indices below 64"),
        ("def sampler(params): return range(64)", {"shuffle": False}, "leave `shuffle: false` out"),
        (STREAM, {}, ""),
        (STREAM, {"max_steps": None, "epochs": 2}, "set training.max_steps, not epochs"),
        (STREAM.replace("self.rows = [torch", "self.rows = iter([torch").replace("2)]", "2)])"), {}, "gave no item in"),
        (SCHEDULE, {"schedule": {"name": "linear"}}, "does not go with training.schedule"),
        (SCHEDULE, {"strategy": "async"}, "does not go with strategy: async"),
        (LATE, {}, "a checkpoint would lose state of the Late: step() makes the object memory"),
        ("def loss(model, batch): return model(batch).mean(), model(batch)", {}, "must be one number without a grad"),
        ("def loss(model, batch): return model(batch).sum(), (batch == 0).sum()", {}, ""),
        ("def loss(model, batch): return model(batch)", {}, "call .mean() on it"),
        (QUEUE, {}, "forward changes rows from (0, 8) torch.float32 to (4, 8)"),
        (TEACHER, {}, ""),
        (TEACHER, LOCAL, "forward changes teacher.weight, without gradient"),
        (TEACHER, {"strategy": "fsdp"}, "forward changes teacher.weight, without gradient"),
        (ROWS, {**SGD, "clip_norm": 1.0}, "which do not go with strategy: ddp on 2 ranks, clip_norm;"),
        (ROWS, {**SGD, "reproducible": "strict"}, ""),
    ],
)
def test_form_that_the_ranks_refuse_is_refused(text: str, settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    """By the functions of the ranks, with their words; a form without a fault has an estimate, and no notes."""
    own = "def dataset(params, split): return [torch.zeros(8) + i for i in range(64)] if split == 'train' else None\n"
    (found,) = estimates(tmp_path, f"{TASK}{own}{text}\n", {}, 2, **settings)
    assert why in (found["why"] or "")
    assert bool(why) == found.get("is_refused", False) == (found["why"] is not None), found


def test_offloaded_activations_do_not_count(tmp_path: Path) -> None:
    """With activation_offload, twice the layers need only the memory of their parameters, gradients and states."""

    def needed(layers: int, **training: Any) -> dict[str, Any]:
        text = TASK.replace("nn.Linear(8, 64), nn.Linear(64, 1)", f"*(nn.Linear(8, 8) for _ in range({layers}))")
        return estimates(tmp_path, text, {}, global_batch_size=512, micro_batch_size=512, **training)[0]

    short, long = (needed(layers, activation_offload=True) for layers in (20, 40))
    more = 16 * (long["parameters"] - short["parameters"])
    assert long["bytes"] - short["bytes"] == pytest.approx(more, rel=0.05)
    assert needed(40)["bytes"] > 2 * long["bytes"]


@pytest.mark.soak
def test_estimate_of_gpipe_grows_by_a_micro_batch(tmp_path: Path) -> None:
    """Eight micro-batches need as much more than six as six than four, which run; stages of 1f1b need no more."""

    def needed(count: int, schedule: str) -> int:
        parallel: dict[str, Any] = {"pipeline": 2, "schedule": schedule}
        found = estimates(tmp_path, CHARLM, SMALL, 2, global_batch_size=MICRO * count, parallel=parallel)
        return int(found[0]["bytes"])

    four, six, eight = (needed(count, "gpipe") for count in (4, 6, 8))
    assert eight - six == pytest.approx(six - four, rel=0.01)
    assert six > 1.2 * four
    assert needed(8, "1f1b") == needed(4, "1f1b")


def test_a_stage_in_the_middle_may_need_most(tmp_path: Path) -> None:
    """With an even cut too: blocks differ in size."""
    blocks = (
        "nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4096), nn.Linear(4096, 8), nn.Linear(8, 8), nn.Linear(8, 1)"
    )
    text = TASK.replace("nn.Linear(8, 64), nn.Linear(64, 1)", blocks)
    found = estimates(tmp_path, text, {}, 3, global_batch_size=3 * MICRO, parallel={"pipeline": 3})[0]
    assert found["stage"] == 2
    assert found["static_bytes"] == pytest.approx(16 * found["parameters"], rel=0.05)


@pytest.mark.parametrize(
    ("size", "changes"), [pytest.param(16, [{"parallel.pipeline": 2}], marks=pytest.mark.soak), (2, [])]
)
def test_stages_are_tried_last_and_only_with_enough_micro_batches(
    size: int, changes: list[dict[str, int]], tmp_path: Path
) -> None:
    """For a model that fsdp refuses and that has no plan for split layers; two micro-batches a stage are enough."""
    net = "(lambda net: setattr(net[0], 'weight', nn.Parameter(net[0].weight.t())) or net)(nn.Sequential(NET))"
    net = net.replace("NET", "*(nn.Linear(8, 8) for _ in range(40))")
    text = TASK.replace("nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))", net)
    training = {"global_batch_size": size, "micro_batch_size": 1, "activation_checkpointing": True}
    whole = estimates(tmp_path, text, {}, 2, **training)[0]["bytes"]
    own, *others = estimates(tmp_path, text, {}, 2, int(0.7 * whole), **training)
    assert own["bytes"] == whole
    assert [each["changes"] for each in others] == changes


def test_estimate_names_the_stage_and_what_a_pipeline_saves(tmp_path: Path) -> None:
    """The last stage needs most where the explicit cut gives it most blocks; without the pipeline more is needed."""
    text = TASK.replace("nn.Linear(8, 64), nn.Linear(64, 1)", "*(nn.Linear(64, 64) for _ in range(40))")
    text = text.replace("torch.zeros(8)", "torch.zeros(64)")
    parallel = {"pipeline": 2, "cut": [8]}
    own, other = estimates(tmp_path, text, {}, 2, 1 << 40, parallel=parallel)
    assert own["stage"] == 2
    assert (other["changes"], other["stage"]) == ({"parallel.pipeline": 1}, None)
    assert own["parameters"] == other["parameters"]
    assert own["static_bytes"] == pytest.approx(32 / 40 * other["static_bytes"], rel=0.05)


def test_model_that_reads_values_is_built_with_them(tmp_path: Path) -> None:
    """For example rates of stochastic depth, by layer: `torch.linspace(...).tolist()`."""
    text = TASK.replace(
        "def model(params): return", "def model(params):\n    torch.linspace(0, 1, 3).tolist()\n    return"
    )
    assert estimates(tmp_path, text, {})[0]["bytes"] == estimates(tmp_path, TASK, {})[0]["bytes"]


def test_estimate_of_local_counts_the_outer_copies(tmp_path: Path) -> None:
    """A rank that trains alone has ddp's memory; the outer optimizer keeps a copy of the weights, and its momentum."""
    one = {"strategy": "ddp"}
    local = {"strategy": "local", "local": {"period": 4}}
    outer = {"strategy": "local", "local": {"period": 4, "outer": {"lr": 0.7, "momentum": 0.6}}}
    alone = estimates(tmp_path, TASK, {}, 1, **one)[0]
    plain, moved = (estimates(tmp_path, TASK, {}, 2, **settings)[0] for settings in (local, outer))
    assert plain["why"] is None
    assert plain["static_bytes"] == alone["static_bytes"]
    assert moved["static_bytes"] == plain["static_bytes"] + 2 * 4 * plain["parameters"]


@pytest.mark.parametrize(
    ("ranks", "share", "training", "changes"),
    [
        (4, 0.5, {}, {"strategy": "fsdp"}),
        (1, 0.7, {"global_batch_size": 512, "micro_batch_size": 512}, {"micro_batch_size": 256}),
    ],
)
def test_first_layout_that_fits_is_named(
    ranks: int, share: float, training: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Shards before smaller micro-batches before recomputation; the layout's own figure fits."""
    text = TASK.replace("nn.Linear(8, 64), nn.Linear(64, 1)", "*(nn.Linear(8, 8) for _ in range(40))")
    whole = estimates(tmp_path, text, {}, ranks, **training)[0]["bytes"]
    own, other = estimates(tmp_path, text, {}, ranks, int(share * whole), **training)
    assert own["changes"] == {}
    assert own["bytes"] == whole
    assert other["changes"] == changes
    assert other["bytes"] <= share * whole


def on_rank(cases: str) -> list[int]:
    """Return the most bytes of the storages that this rank has held, by case."""
    peaks = []
    for case in SHARED[cases]:
        gc.collect()
        with StorageCounter() as counter:
            train(**{"params": LONG, "counter": counter, **case})
        peaks.append(counter.peak_bytes)
    return peaks
