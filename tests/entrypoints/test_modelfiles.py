"""Model files that people bring (modelfiles.py), each against a plain loop in one process, or refused by name.

Two files of each test are in `make test`, the rest in the soak. docs/training.md has the list.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from modelfiles import HEAD, TEXTS
from trainerruns import Run, run

from cloudtrain.entrypoints.trainer import data, optim
from cloudtrain.entrypoints.trainer.settings import OptimizerSettings
from cloudtrain.entrypoints.trainer.task import load_task

STEPS, GLOBAL, SEED = 12, 8, 1
PLAIN = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}
SETTINGS: dict[str, Any] = {
    "global_batch_size": GLOBAL,
    "micro_batch_size": 2,
    "max_steps": STEPS,
    "optimizer": PLAIN,
    "schedule": {"name": "constant"},
    "clip_norm": None,
    "seed": SEED,
    "eval_every": 6,
    "checkpoint": {"every_steps": 3},
}
# Rank 1 is killed once, in the first micro-batch of step 9; COUNT is the number of the micro-batch.
KILL = """
import os, signal, pathlib
_loss, _calls = loss, [0]
def loss(model, batch):
    _calls[0] += model.training
    if _calls[0] == COUNT and os.environ["RANK"] == "1" and not pathlib.Path("killed").exists():
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return _loss(model, batch)
"""


@dataclass(frozen=True)
class Row:
    """A model file: the bounds of its largest difference to the plain loop."""

    name: str
    one: float = 0.0
    ddp: float | None = 1e-6
    """None: refused."""
    fsdp: float | None = 1e-6
    """Whether the end after a kill and a resume has the bits of the run without a kill."""
    text: str = ""
    """The key of the text, if other than `name`."""
    params: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    micro: int | None = None
    """The micro-batch of the plain loop, if other than the run's on two ranks."""
    is_quick: bool = False
    """Whether the file is in `make test`."""

    def start(self, folder: Path, ranks: int, text: str = "", **settings: Any) -> Run:
        """Run the ranks' program."""
        source = HEAD + TEXTS[self.text or self.name] + text
        return run(folder, ranks, text=source, params=self.params, **{**SETTINGS, **self.settings, **settings})


NO_MOMENTUM = {"optimizer": {**PLAIN, "momentum": 0.0}}
SMALL: dict[str, Any] = {"text": "counters", "fsdp": None}
ROWS = (
    Row("resnet", is_quick=True),
    Row("gpt", is_quick=True),
    Row("vit"),
    Row("diffusion", settings={"ema_decay": 0.9}),
    Row("llama", settings={"clip_norm": 1.0}),
    Row("lora", text="llama", params={"lora": True}),
    # A rank has one micro-batch. With accumulation the negatives would be other ones.
    Row("contrastive", one=1e-6, settings={"micro_batch_size": 4, "clip_norm": 1.0}, micro=8),
    Row("counters"),
    Row("modes", one=1e-6, is_quick=True),
    Row("sparse", fsdp=None, settings=NO_MOMENTUM),
    Row("gru", text="recurrent"),
    # Runs, but the state is of other samples: those of virtual rank 0.
    Row("lstm", text="recurrent", params={"keep": True}),
    # The state of the optimizers inside another is not saved.
    Row("gan", settings={"eval_every": None}),
    Row("stream", settings={"eval_every": None}),
    # The norm for clipping is of all gradients, also of those that the optimizer does not clear.
    Row("subset", text="closure", params={"subset": True}, settings={"eval_every": None, "clip_norm": 0.1}),
    # Tensors below 1,000 elements stay dense under both kinds of sparse compression.
    Row("small-threshold", **SMALL, settings={"compression": "threshold", **NO_MOMENTUM}),
    Row("small-topk", **SMALL, settings={"compression": "topk", **NO_MOMENTUM}),
)
REFUSED = {
    "lbfgs": ("closure", {}, {}, "step(closure) needs an argument, and the trainer calls step() once"),
    "sam": ("closure", {"sam": True}, {}, "step(closure) needs an argument, and the trainer calls step() once"),
    "queue": (
        "queue",
        {},
        {},
        "forward changes rows from (0, 8) torch.float32 to (2, 8) torch.float32, which no resume",
    ),
    "sparse-clipped": ("sparse", {}, {"clip_norm": 1.0, **NO_MOMENTUM}, "do not go with clip_norm; create the layer"),
}

FSDP, AFTER = {"strategy": "fsdp"}, "def after_step(model, step):\n    "
LATE, NEW = "def change(model, step):\n    if step == 4: ", "or a new nn.Parameter"
# A change of the text "form": the settings, the step after which the run ends, and a part of the refusal.
CHANGES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "data": (f"{AFTER}model.b.bias.data = model.b.bias.data.clone()", FSDP, 1, f"b.bias new data (`.data =`) {NEW}"),
    "late-data": (f"{AFTER}if step == 4: model.b.bias.data = model.b.bias.data.clone()", FSDP, 6, "b.bias new data"),
    "clamp": (
        "def change(model, step): model.b.bias.data.clamp_(-0.01, 0.01)",
        FSDP,
        0,
        "loss or forward writes to b.bi",
    ),
    "codebook": (
        "def change(model, step): model.b.bias = nn.Parameter(model.b.bias.detach())",
        FSDP,
        0,
        "writes to b.bi",
    ),
    "parameter": (f"{AFTER}model.b.bias = nn.Parameter(model.b.bias * 0.9)", {}, 1, NEW),
    "layer": (f"{AFTER}if step == 4: model.b = nn.Linear(16, 3)", {}, 6, NEW),
    "buffer": (f"{AFTER}model.register_buffer('n', model.b.bias * 1)", {}, 1, "n was absent, and is (3,)"),
    "unfreeze": (f"{AFTER}if step == 4: model.t.requires_grad_(True)", {}, 6, "requires_grad of t.bias, t.weight"),
    "freeze": (f"{LATE}model.a.requires_grad_(False)", {}, 6, "requires_grad of a.bias, a.weight"),
    "late": (f"{LATE}model.t.weight.mul_(0.9)", {}, 6, "begins to change t.weight"),
    "evaluate": (
        "def evaluate(model, batch): return model.module",
        {"eval_every": 3},
        3,
        "evaluate reads model.module",
    ),
    "after": (f"{AFTER}model.module", {}, 0, "after_step reads model.module"),
    "optimizer": ("def optimizer(model, params): return model.module", {}, 0, "optimizer reads model.module"),
    "parallel": ("def model(params): return nn.DataParallel(Net())", {}, 0, "returned a DataParallel"),
    "lazy": ("def model(params): return nn.LazyLinear(3)", {}, 0, "has no shape yet"),
    "hook": (
        "def model(params):\n    net = Net()\n    net.b.bias.register_hook(torch.neg)\n    return net",
        FSDP,
        0,
        "strategy: fsdp would lose the hook of parameter b.bias",
    ),
}


def quick(row: Row) -> Any:
    """Return the row as a parameter; all but the quick rows are left to the soak."""
    return pytest.param(row, marks=[] if row.is_quick else [pytest.mark.soak], id=row.name)


def plain(row: Row, folder: Path, micro: int) -> dict[str, torch.Tensor]:
    """Return the model's state after a loop in this process, with the sample order and the seeds of the trainer."""
    folder.mkdir(exist_ok=True)
    (folder / "plain.py").write_text(HEAD + TEXTS[row.text or row.name])
    torch.set_num_threads(1)  # as a rank has, for the same bits
    task, settings = load_task(folder / "plain.py"), {**SETTINGS, **row.settings}
    dataset = task.make_dataset(row.params, "train", SEED)
    is_stream = isinstance(dataset, data.Stream)
    order = data.SampleOrder(SEED, 1 << 60, data.AS_IT_IS) if is_stream else data.SampleOrder(SEED, len(dataset))
    data.seed_all(data.mix(SEED, data.INIT, 1))
    model = task.model(row.params).train()
    chosen = OptimizerSettings(**settings["optimizer"])
    optimizer = optim.build(chosen, model.parameters()) if task.optimizer is None else task.optimizer(model, row.params)
    split = data.split_batch(GLOBAL, micro, 1)
    keys = data.train_keys(order, split, 0, 0, STEPS)
    batches = data.load(dataset, keys, seed=SEED, collate=task.collate)
    kept: list[torch.Tensor] = []
    for step in range(STEPS):
        model.zero_grad()
        begin = [buffer.clone() for buffer in model.buffers()]
        for virtual in range(split.virtual):
            batch = next(batches)
            data.seed_all(data.mix(SEED, data.FORWARD, step, virtual))
            (task.loss(model, batch) / split.virtual).backward()
            kept = [buffer.clone() for buffer in model.buffers()] if virtual == 0 else kept
            copy_all(model, kept if virtual == split.virtual - 1 else begin)  # buffers follow virtual rank 0
        if settings["clip_norm"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
        optimizer.step()
    batches.close()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def copy_all(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    """Set the model's buffers."""
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def difference(done: Run, wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between the last checkpoint's model and the plain loop's."""
    assert done.code == 0, done.errors[-3000:]
    saved = done.saved(STEPS)
    return max(
        float((saved[f"model.{name}"].double() - tensor.double()).abs().max()) for name, tensor in wanted.items()
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
@pytest.mark.parametrize("row", [quick(row) for row in ROWS if row.text != "counters"])
def test_one_rank_has_the_bits_of_a_plain_loop(row: Row, tmp_path: Path) -> None:
    """Four micro-batches a step, or the file's own number."""
    micro = row.micro or 2
    done = row.start(tmp_path / "run", 1, micro_batch_size=micro)
    assert difference(done, plain(row, tmp_path / "plain", micro)) <= row.one


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_two_ranks_are_a_plain_loop_to_rounding(row: Row, strategy: str, tmp_path: Path) -> None:
    """Each rank has half of the samples of a step, or the start is refused."""
    done = row.start(tmp_path / "run", 2, strategy=strategy)
    if (bound := getattr(row, strategy)) is None:
        assert (done.code, done.values("step", "loss")) == (1, {})
        return
    assert difference(done, plain(row, tmp_path / "plain", row.micro or 2)) <= bound


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("row", [row for row in ROWS if row.text != "counters"], ids=lambda row: row.name)
def test_killed_and_resumed_run_has_the_bits_of_a_whole_run(row: Row, tmp_path: Path) -> None:
    """Rank 1 is killed in step 9; the job resumes from step 6."""
    wanted = row.start(tmp_path / "whole", 2)
    micro = row.settings.get("micro_batch_size", SETTINGS["micro_batch_size"])
    kill = KILL.replace("COUNT", str(8 * GLOBAL // 2 // micro + 1))
    killed = row.start(tmp_path / "run", 2, kill)
    assert (killed.code != 0, (tmp_path / "run" / "killed").exists()) == (True, True)
    again = row.start(tmp_path / "run", 2, kill)
    assert again.only("restart")["step"] == 6, again.errors[-3000:]
    found = wanted.saved(STEPS), again.saved(STEPS)
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REFUSED])
def test_file_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    """No step is taken, and the error says why."""
    text, params, settings, why = REFUSED[name]
    done = Row(text, params=params, settings={**settings, "eval_every": None}).start(tmp_path, 1)
    assert (done.code, done.values("step", "loss")) == (1, {})
    assert why in done.errors


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CHANGES])
def test_model_that_changes_its_form_is_refused(name: str, tmp_path: Path) -> None:
    """At the first step, or at the first save after the change."""
    text, settings, last, why = CHANGES[name]
    done = Row("form").start(tmp_path, 1, text, **{"eval_every": None, **settings})
    assert (done.code, max(done.values("step", "loss"), default=0)) == (1, last)
    assert why in done.errors


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, FSDP], ids=str)
def test_model_that_keeps_its_form_is_trained(settings: dict[str, Any], tmp_path: Path) -> None:
    """A part that the loss freezes and unfreezes in each step, and writes in place; a hook of the state's copies."""
    hook = "_register_state_dict_hook(lambda _, state, *more: {name: each.clone() for name, each in state.items()})"
    text = f"class Hooked(Net):\n    def __init__(self): super().__init__(); self.{hook}\n"
    text += "def model(params): return Hooked()\n"
    text += f"{LATE.replace('if step == 4: ', '')}model.b.requires_grad_(False).requires_grad_(True)\n"
    text += f"{AFTER}model.b.bias.clamp_(-0.3, 0.3)\n    model.t.weight.lerp_(model.a.weight, 0.1 * (step > 4))"
    assert Row("form").start(tmp_path, 1, text, **settings).code == 0
