"""Optimizers of a task's own: all forms resume bit for bit, and what the trainer cannot do is refused at the start."""

import io
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from trainerruns import TASK, joined, parameters, run, whole_run

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import data, own_optimizer, resume, saving
from cloudtrain.entrypoints.trainer.own_optimizer import OwnOptimizer

FORMS = '''
import collections, random
import numpy, torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

class Composite(Optimizer):
    """Optimizers inside, in a list or a dict, and no parameter of its own."""
    def __init__(self, model, kind):
        half = list(model.parameters())
        super().__init__(half, {})
        a, b = Adam(half[:2], lr=0.01), AdamW(half[2:], lr=0.003)
        self.parts = {"list": [a, b], "dict": {"a": a, "b": b}}[kind]
    def step(self):
        for part in self.parts if isinstance(self.parts, list) else self.parts.values():
            part.step()

class WithDict(Composite):
    """The form of a careful author; forgets nothing, but has no param_groups."""
    def state_dict(self):
        return {name: part.state_dict() for name, part in self.parts.items()}
    def load_state_dict(self, state):
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

class Forgetful(Composite):
    def state_dict(self):
        return {"version": 1}
    def load_state_dict(self, state):
        assert state == {"version": 1}

class Box:
    __slots__ = ("last",)

CHANCE = random.Random()

class Plain:
    """No torch optimizer: a wrapper with slow weights, made in the first step, and counters; generators everywhere."""
    def __init__(self, base):
        self.base, self.slow, self.steps, self.seen = base, None, 0, collections.deque(maxlen=2)
        self.noise, self.sums = torch.Generator().manual_seed(3), numpy.zeros(2)
        self.chance, self.draws, self.box = random.Random(5), numpy.random.default_rng(6), Box()
        self.later = torch.optim.lr_scheduler.StepLR(base, 2, 0.5)
    param_groups = property(lambda self: self.base.param_groups)
    def zero_grad(self):
        self.base.zero_grad()
    @torch.no_grad()
    def step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.slow = self.slow or {p: p.clone() for p in parameters}
        self.base.step()
        self.later.step()
        self.steps += 1
        self.sums += self.steps + self.chance.random() + self.draws.random() + CHANCE.random()
        self.box.last = [p.clone() for p in parameters]
        self.seen.append(self.steps)
        for p in parameters:
            self.slow[p].lerp_(p, 0.1 + 0.01 * self.seen[0] + float(self.sums[0]) / 100)
            p.copy_(self.slow[p]).add_(torch.rand((), generator=self.noise), alpha=0.01)

class Sam(Optimizer):
    """Shares its groups with the optimizer inside; keeps lists and a count in `state`."""
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05, "momentum": 0.9})
        self.base_optimizer = SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups
        self.state["count"] = 0
    @torch.no_grad()
    def step(self, closure=None):
        self.state["count"] += 1
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["old"] = [*state.get("old", []), p.grad.clone()][-2:]
            p.grad.add_(state["old"][0], alpha=0.1 * self.state["count"])
        self.base_optimizer.step()
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.base_optimizer.param_groups = self.param_groups

MOMENTA = {}
class Elsewhere(Optimizer):
    """State where no attribute leads, so only its own methods reach it."""
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})
    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.param_groups[0]["params"]):
            p.sub_(0.05 * MOMENTA.setdefault(id(self), {}).setdefault(i, torch.zeros_like(p)).mul_(0.9).add_(p.grad))
    def state_dict(self):
        return {"momenta": MOMENTA.get(id(self), {}), "form": (1, ["x"])}
    def load_state_dict(self, state):
        assert state["form"] == (1, ["x"])
        MOMENTA[id(self)] = state["momenta"]

class Hidden(Elsewhere):
    """A careless author: no methods for the state in a global."""
    state_dict, load_state_dict = Optimizer.state_dict, Optimizer.load_state_dict

class Closure(SGD):
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        closure()

class LateNoise(SGD):
    def step(self):
        self.noise = getattr(self, "noise", None) or torch.Generator()
        super().step()

class Doubled(Plain):
    """Its groups are those of both optimizers inside, or of the first."""
    def __init__(self, model, first=False):
        self.parts = [SGD(model[:1 if first else 3].parameters(), 0.1), SGD(model[2].parameters(), 0.1)]
        self.first = first
    param_groups = property(lambda self: [g for part in self.parts[:1 if self.first else 2] for g in part.param_groups])

class Late(SGD):
    def step(self):
        self.inner = getattr(self, "inner", None) or Adam(self.param_groups[0]["params"])
        self.inner.step()

class Keyed(Optimizer):
    """State by keys that are no names, by id and by position; matrices whose layout is not row-major; a late deque."""
    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.05})
        self.by_id, self.of = {}, {module: {"sum": 0.0} for module in model}
    @torch.no_grad()
    def step(self):
        self.late = getattr(self, "late", None) or collections.deque(maxlen=2)
        self.late.append(len(self.late) + 1)
        for p in self.param_groups[0]["params"]:
            state, square = self.state[p], torch.zeros(len(p), len(p))
            number = state.setdefault(0, torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            number.add_(state.setdefault("of.old", torch.zeros_like(p)).add_(p.grad), alpha=0.1)
            number.add_(self.by_id.setdefault((id(p), 1), torch.zeros_like(p)).add_(p.grad), alpha=sum(self.late) / 9)
            state["q"] = torch.linalg.qr(state.get("q", torch.eye(len(p))) + square.fill_diagonal_(float(p.sum())))[0]
            p.sub_(0.05 * (state["q"] @ number))
        for module, sums in self.of.items():
            for p in module.parameters():
                sums["sum"] += float(p.sum())
                p.mul_(1 - 0.001 * sums["sum"])

class Master(Optimizer):
    """Copies of the weights, which an optimizer inside moves."""
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})
        self.inner_first = Adam([nn.Parameter(p.detach().double()) for p in self.param_groups[0]["params"]], lr=0.01)
        self.copies = self.inner_first.param_groups[0]["params"]
    def step(self):
        for copy, p in zip(self.copies, self.param_groups[0]["params"]):
            copy.grad = p.grad.double()
        self.inner_first.step()
        with torch.no_grad():
            for copy, p in zip(self.copies, self.param_groups[0]["params"]):
                p.copy_(copy)

class Grows(SGD):
    def step(self):
        self.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

class KeyedLate(SGD):
    def step(self):
        self.__dict__.setdefault("sums", {})[nn.Linear(1, 1)] = 1.0

class Falling(SGD):
    later = True
    def step(self):
        super().step()
        self.param_groups[0]["lr"] *= 0.8

class Overruled(Falling):
    later = property()

def hooked(model):
    """A scheduler that only a hook refers to, and a rate in a tensor."""
    made = Adam(model.parameters(), lr=torch.tensor(0.01))
    later = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
    made.register_step_post_hook(lambda *_: later.step())
    made.later = True
    return made

def closed(model):
    """A step that has the parameters by a closure."""
    made, parameters = SGD(model.parameters(), 0.1, momentum=0.9), list(model.parameters())
    inner = made.step
    def step():
        torch.nn.utils.clip_grad_value_(parameters, 0.5)
        inner()
    made.step = step
    return made

OWN = {
    "closed": closed,
    "list": lambda model: Composite(model, "list"),
    "dict": lambda model: WithDict(model, "dict"),
    "forgetful": lambda model: Forgetful(model, "list"),
    "plain": lambda model: Plain(AdamW(model.parameters(), lr=0.01)),
    "shared": lambda model: Sam(model.parameters()),
    "elsewhere": lambda model: Elsewhere(model.parameters()),
    "keyed": Keyed,
    "master": lambda model: Master(model.parameters()),
    "falling": lambda model: Falling(model.parameters(), 0.05),
    "hooked": hooked,
    "tensor": lambda model: Adam(model.parameters(), lr=torch.tensor(0.01)),
    "torch": lambda model: AdamW([{"params": [p], "lr": 0.01} for p in model.parameters()], betas=(0.8, 0.9)),
}
'''
scope: dict[str, Any] = {"__name__": "forms"}
exec(FORMS, scope)


def made(form: Callable[[nn.Module], Any], unable: str | None = None) -> Any:
    """Return the part of a job that saves and loads: a small model, and its optimizer."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    strategy = SimpleNamespace(module=module, saved_elsewhere=(), shared_state=dict)
    strategy.parameter_names = lambda: {p: name for name, p in module.named_parameters()}
    optimizer = form(module)
    own = OwnOptimizer(optimizer, strategy.parameter_names(), unable, list(module.parameters()))
    more = {"ema": None, "scaler": torch.amp.GradScaler("cpu", enabled=False), "place": SimpleNamespace(pipeline=1)}
    groups = own.rated
    lrs = [float(group["lr"]) for group in groups]
    return SimpleNamespace(strategy=strategy, optimizer=optimizer, own=own, groups=groups, base_lrs=lrs, **more)


def train(job: Any, steps: range) -> None:
    """Take the steps, with a schedule and other data in each."""
    for step in steps:
        if not hasattr(job.optimizer, "later"):  # a schedule of its own
            job.own.set_lr(job.groups, job.base_lrs, 1.0 / (1 + step))
        data.seed_all(step, job.own.generators)
        job.strategy.module(torch.randn(5, 3)).square().sum().backward()
        with own_optimizer.explained(job.optimizer):
            job.optimizer.step()
        job.optimizer.zero_grad()
        if step == steps[0]:
            job.own.check(job.strategy.parameter_names())


@pytest.mark.parametrize("form", scope["OWN"])
def test_each_form_resumes_bit_for_bit(form: str, alone: None) -> None:
    """Three steps, a save, and three steps more; a new optimizer with the saved state takes the same three."""
    whole, again = made(scope["OWN"][form]), made(scope["OWN"][form])
    train(whole, range(3))
    attributes, trees = whole.own.saved(whole.strategy.parameter_names())
    tensors = {name: value.detach().clone() for name, value in (saving._saved_here(whole) | attributes).items()}
    written = io.BytesIO()
    torch.save({**saving._plain(whole), "own": trees}, written)
    train(whole, range(3, 6))

    def fill_all(rooms: dict[str, torch.Tensor]) -> None:
        for name, place in rooms.items():
            place.copy_(tensors[name])

    plain = torch.load(io.BytesIO(written.getvalue()), weights_only=True)
    shapes, dtypes = ({name: getattr(value, of) for name, value in tensors.items()} for of in ("shape", "dtype"))
    again.strategy.module.load_state_dict({n[6:]: t for n, t in tensors.items() if n.startswith("model.")})
    reader = SimpleNamespace(plain=plain, shapes=shapes, dtypes=dtypes, fill_all=fill_all)
    resume.load_optimizer(again, reader)  # type: ignore[arg-type]
    train(again, range(3, 6))
    expected = whole.strategy.module.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.strategy.module.state_dict().items())
    assert [group["lr"] for group in again.groups] == [group["lr"] for group in whole.groups]


@pytest.mark.parametrize(
    ("form", "left"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), 0.1), 0),
        (lambda m: torch.optim.SGD(m[2].parameters(), 0.1), 2),
        (lambda m: scope["Doubled"](m), 0),
        (lambda m: scope["Doubled"](m, first=True), 0),
    ],
)
def test_loss_scaler_gets_each_parameter_once(form: Any, left: int, alone: None) -> None:
    """Also if param_groups leaves parameters out, or lists them twice."""
    job = made(form)
    of_scaler = [id(p) for group in job.own.scaled.param_groups for p in group["params"]]
    assert sorted(of_scaler) == sorted(map(id, job.strategy.module.parameters()))
    assert len(job.own.left) == left


@pytest.mark.parametrize(
    ("form", "unable", "why"),
    [
        (lambda m: [torch.optim.SGD(m.parameters(), 0.1)], None, "a list without step, zero_grad, param_groups"),
        (lambda m: torch.optim.LBFGS(m.parameters()), None, r"LBFGS\.step\(closure\) needs an argument, .* a script"),
        (lambda m: torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), None, "make it an nn.Parameter of the model"),
        (lambda m: scope["Hidden"](m.parameters()), None, r"step\(\) keeps tensors in MOMENTA, outside the optimizer"),
        (lambda m: scope["Late"](m.parameters(), 0.1), None, r"step\(\) makes the object inner: make it in __init__"),
        (lambda m: scope["LateNoise"](m.parameters(), 0.1), None, r"step\(\) makes the object noise: make it in"),
        (
            scope["OWN"]["list"],
            "strategy: local",
            r"strategy: local saves only state\[p\], of one torch optimizer",
        ),
        (
            scope["OWN"]["elsewhere"],
            "parallel.pipeline",
            r"parallel.pipeline saves only .* move dict.momenta.0",
        ),
        (
            lambda m: scope["Overruled"](m.parameters(), 0.1),
            None,
            r"Overruled.step\(\), .* changes lr, and .* leave one",
        ),
        (
            lambda m: scope["Grows"](m.parameters(), 0.1),
            None,
            "groups have changed: make all groups in optimizer",
        ),
        (lambda m: scope["KeyedLate"](m.parameters(), 0.1), None, "objects the keys of sums: use parameters or names"),
        (lambda m: scope["Closure"](m.parameters(), 0.1), None, r"Closure.step\(\) failed without a closure \('None"),
    ],
)
def test_what_a_save_would_lose_is_refused(form: Any, unable: str | None, why: str, alone: None) -> None:
    """At the start, or at the latest after the first step, with a cure."""

    def begin() -> None:
        train(made(form, unable), range(2))

    with pytest.raises(TaskError, match=why):
        begin()


def test_schedule_free_optimizer_evaluates_its_average(alone: None) -> None:
    """The training weights come back to the bit: eval() and train() round."""

    class Free(torch.optim.SGD):
        def eval(self) -> None:
            torch._foreach_mul_([p.detach() for p in self.param_groups[0]["params"]], 1 / 3)

        def train(self) -> None:
            torch._foreach_mul_([p.detach() for p in self.param_groups[0]["params"]], 3.0)

    job = made(lambda model: Free(model.parameters(), 0.1))
    before = [p.detach().clone() for p in job.strategy.module.parameters()]
    with job.own.averaged(job.strategy.module):
        assert all(torch.equal(p, b * (1 / 3)) for p, b in zip(job.strategy.module.parameters(), before, strict=True))
    assert all(torch.equal(p, b) for p, b in zip(job.strategy.module.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Adafactor", r"cannot work on shards of the parameters; set strategy: ddp without `shard`"),
        ("Rprop", r"cannot work on shards of the parameters; set strategy: ddp without `shard`"),
        ("SparseAdam", r"got a dense gradient .* leave out reproducible: strict"),
        ("SGD", ""),
    ],
)
def test_gradients_that_step_cannot_take_are_explained(kind: str, why: str, alone: None) -> None:
    """In place of torch's text about placements."""
    whole, mesh = torch.ones(4, 2), init_device_mesh("cpu", (1,))
    parameter = nn.Parameter(whole if kind == "SparseAdam" else distribute_tensor(whole, mesh, [Shard(0)]))
    parameter.grad = parameter.detach().clone()
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.1)
    with pytest.raises(TaskError, match=why) if why else nullcontext(), own_optimizer.explained(optimizer):
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "more"),
    [("dict", {}), ("plain", {"strategy": "fsdp", "schedule": {}}), ("shared", {"shard": "optimizer"})],
)
def test_killed_run_with_an_own_optimizer_is_equal(form: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks, a kill in step 13, a resume from step 10: all losses and tensors are those of the whole run."""
    text = f"{TASK}{FORMS}\ndef optimizer(model, params): return OWN[{form!r}](model)\n"
    settings = {**more, "text": text, "eval_every": None, "clip_norm": None}
    whole = whole_run(tmp_path / "whole", **settings)
    parts = [run(tmp_path / "parts", do=do, **settings) for do in ("kill:1:26", "")]
    assert parts[1].code == 0, parts[1].errors
    assert joined(*parts) == whole.values("step", "loss")
    assert parameters(parts[1]) == parameters(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "text", "rates"),
    [
        ({"name": "plateau", "patience": 1, "gamma": 0.5}, "", {1: 0.01, 5: 0.005, 9: 0.00125, 13: 0.0003125}),
        ({"name": "plateau", "patience": 2, "gamma": 0.5}, "", {1: 0.01, 6: 0.01, 7: 0.005, 10: 0.005, 11: 0.0025}),
        ({}, "\ndef schedule(step, max_steps, params): return 1 - step / max_steps\n", {1: 0.01, 9: 0.005, 13: 0.0025}),
    ],
    ids=["plateau", "patience", "own"],
)
def test_rate_resumes_exactly(schedule: dict[str, Any], text: str, rates: dict[int, float], tmp_path: Path) -> None:
    """The falls of plateau are in the checkpoint, also after a kill between two evaluations."""
    text = TASK.replace('{"loss": F.cross_entropy(model(batch[0]), batch[1])}', '{"loss": 1.0}') + text
    settings = {"text": text, "schedule": schedule, "eval_every": 2 if schedule else None, "ranks": 1}
    settings |= {"optimizer": {"name": "sgd", "lr": 0.01}, "checkpoint": {"every_steps": 3}}
    whole = whole_run(tmp_path / "whole", **settings)
    parts = [run(tmp_path / "parts", do=do, **settings) for do in ("kill:0:34", "")]
    assert parts[1].code == 0, parts[1].errors
    found = whole.values("step", "lr")
    assert {step: found[step] for step in rates} == pytest.approx(rates)
    assert joined(*parts) == whole.values("step", "loss")
    assert parts[0].values("step", "lr") | parts[1].values("step", "lr") == found


@pytest.mark.slow
def test_optimizer_with_a_closure_ends_the_start(tmp_path: Path) -> None:
    """Before the first step, in words."""
    failed = run(
        tmp_path, 1, text=f"{TASK}\ndef optimizer(model, params): return torch.optim.LBFGS(model.parameters())\n"
    )
    assert failed.code == 1
    assert re.search(r"^\S*Error: LBFGS\.step\(closure\) needs an argument", failed.errors.strip()), failed.errors
    assert not failed.values("step", "loss")
