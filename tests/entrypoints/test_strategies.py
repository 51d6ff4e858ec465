"""Strategies: refusals, blocks, the summation tree; then real runs over gloo on 1, 2 and 4 ranks, of `on_rank`."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from trainerruns import called, counted, digest, on_ranks

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import data, optim, optimizer_facts
from cloudtrain.entrypoints.trainer.ema import Ema
from cloudtrain.entrypoints.trainer.settings import OptimizerSettings, TrainingSettings
from cloudtrain.entrypoints.trainer.strategies import blocks as blocks_of
from cloudtrain.entrypoints.trainer.strategies import summation
from cloudtrain.entrypoints.trainer.strategies.blocks import default_blocks, saved_on_host
from cloudtrain.entrypoints.trainer.strategies.strategy import Strategy, clip, clip_whole, finite_gradients
from cloudtrain.entrypoints.trainer.strategies.summation import PartialSums, TreeGradients
from cloudtrain.entrypoints.trainer.strategies.wrap import _of_sparse_gradients, wrap

CPU = torch.device("cpu")
MICRO, STEPS = 3, 3
LONG = 8  # steps after which a compression's errors have come back
STRICT = {"reproducible": "strict"}

# ---------------------------------------------------------------------------------------------------- without ranks


def transformer() -> nn.Module:
    """Return a ModuleList of two layers, each with its own Sequential, and an embedding next to the list."""
    model = nn.Module()
    model.embed = nn.Embedding(4, 4)
    model.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 4))}) for _ in range(2))
    return model


def refusal(
    module: nn.Module | None = None,
    virtual: int = 4,
    ranks: int = 2,
    blocks: Callable[[Any], Any] | None = None,
    device: torch.device = CPU,
    **settings: Any,
) -> str:
    """Return the message with which `wrap` refuses."""
    split = data.Split(virtual, 1, ranks, virtual // ranks)
    training = TrainingSettings(global_batch_size=virtual, max_steps=1, **settings)
    with pytest.raises(TaskError) as found:
        wrap(training, module or nn.Linear(1, 1), device, split, blocks=blocks)
    return str(found.value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"strategy": "hsdp", "shard_size": 3, "ranks": 4}, "does not divide the 4 ranks; set one of 2, 4"),
        ({"strategy": "hsdp", "shard_size": 1}, "shards nothing"),
        ({"module": nn.SyncBatchNorm(2)}, "use BatchNorm"),
        ({"module": nn.SyncBatchNorm(2), "reproducible": "strict", "device": torch.device("cuda")}, "depend on"),
        ({"module": nn.ReLU()}, "nothing to train"),
        ({"module": nn.Linear(2, 2).half(), "precision": "fp16"}, "needs weights in fp32"),
        ({"module": nn.Sequential(nn.Linear(2, 2), nn.PReLU(0)), "strategy": "fsdp"}, "parameter 1.weight has no elem"),
        ({"activation_checkpointing": True}, "write blocks"),
        ({"strategy": "fsdp", "blocks": lambda model: [nn.Linear(1, 1)]}, "submodules of the model"),
        ({"strategy": "fsdp", "module": transformer(), "blocks": lambda model: [model.layers]}, "no forward pass"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], why: str) -> None:
    """The message names the alternative; no process group is necessary for the check."""
    assert why in refusal(**settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"clip_norm": 1.0}, "clip_norm"),
        ({"on_nan": "skip"}, "on_nan: skip"),
        ({"strategy": "fsdp"}, "strategy: fsdp"),
        ({"strategy": "async"}, "strategy: async"),
        ({"shard": "optimizer"}, "shard"),
        ({"compression": "powersgd"}, "compression: powersgd"),
        ({"optimizer": OptimizerSettings(name="adamw")}, "optimizer.name: adamw"),
        ({"optimizer": OptimizerSettings(name="sgd", momentum=0.9)}, "optimizer.momentum"),
        ({"optimizer": OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.1)}, "optimizer.weight_decay"),
    ],
)
def test_sparse_gradients_are_refused_before_the_first_step(settings: dict[str, Any], named: str) -> None:
    """A layer with sparse=True is named with each setting that cannot take its gradient; strict makes it dense."""
    module = nn.Sequential(nn.EmbeddingBag(4, 4, sparse=True), nn.Linear(4, 4))
    plain = {"optimizer": OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.0)}
    told = refusal(module, **{**plain, **settings})
    assert f"0 makes sparse gradients (sparse=True), which do not go with {named}; create the layer with" in told
    strict = TrainingSettings(global_batch_size=4, max_steps=1, **{**plain, **settings, "reproducible": "strict"})
    others = {key for key in ("shard", "compression", "strategy") if key in settings}
    assert others or not [*_of_sparse_gradients(strict, module, 2, has_optimizer=False)]
    module[0].weight.requires_grad_(False)
    assert not [*_of_sparse_gradients(replace(strict, reproducible="standard"), module, 2, has_optimizer=False)]


@pytest.mark.parametrize(
    ("settings", "kind", "sent"),
    [
        ({}, torch.float32, 108.0),  # 18 parameters, 4 ranks
        ({"compression": "bf16"}, torch.float32, 54.0),
        ({"compression": "bf16"}, torch.bfloat16, 54.0),
        ({"shard": "optimizer"}, torch.float32, 162.0),  # and the rows of the update
    ],
)
def test_bytes_sent_are_those_of_a_ring(settings: dict[str, Any], kind: torch.dtype, sent: float) -> None:
    """The figure holds for weights of 16 bits, and with a shared optimizer; sparse gradients have no fixed size."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())  # sends nothing
    try:
        training = TrainingSettings(global_batch_size=4, max_steps=1, **settings)
        split = data.Split(4, 1, 4, 1)
        assert wrap(training, nn.Linear(8, 2).to(kind), CPU, split).figures() == {"bytes_sent": sent}
        if not settings:
            layer = nn.Embedding(8, 2, sparse=True)
            assert wrap(training, layer, CPU, split, has_optimizer=True).figures() == {}
    finally:
        dist.destroy_process_group()


def test_compile_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before an hour of training, and not from inside torch."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "C++ compiler" in refusal(compile=True)


def test_fsdp_refuses_parameters_that_it_cannot_shard() -> None:
    """The messages name weights tied across blocks, scalar parameters and blocks of two types."""
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert "0.weight and 1.weight are one parameter" in refusal(tied, strategy="fsdp")
    number = nn.Linear(1, 1)
    number.scale = nn.Parameter(torch.ones(()))
    assert "parameter scale is a single number" in refusal(number, strategy="fsdp")
    assert "parameter scale is a single number" in refusal(number, shard="optimizer")
    mixed = nn.Linear(2, 2)
    mixed.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    assert "of the root are torch.float32, torch.float64" in refusal(mixed, strategy="fsdp")


def test_default_blocks_are_the_outermost_layers() -> None:
    """Each child of the outermost list that can run forward is a block; modules inside a block are not.

    A ModuleDict in a ModuleList cannot be gathered as a block, so its parts are blocks.
    """
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(nn.Sequential(inner, nn.ReLU()), nn.ReLU(), nn.Linear(2, 2))
    assert default_blocks(model) == [model[0], model[2]]
    assert [type(block) for block in default_blocks(transformer())] == [nn.Linear, nn.Linear]


def test_sized_blocks_count_parameters_outside_inner_blocks() -> None:
    """Inner blocks come first; an outer block needs as many parameters outside them; attention stays whole."""
    model = nn.Module()
    model.attention = nn.MultiheadAttention(4, 2)
    model.big = nn.Sequential(nn.Linear(4, 4), nn.Linear(2, 2))
    model.small = nn.Linear(2, 2)
    assert blocks_of.sized_blocks(model, 20) == [model.attention, model.big[0]]
    assert blocks_of.sized_blocks(model, 26) == [model.attention, model.big]


def test_blocks_are_shardable_in_the_order_found() -> None:
    """A task may list an outer block before its inner block."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    settings = TrainingSettings(global_batch_size=1)
    found = blocks_of.find(settings, model, lambda model: [model, model[0], model[0][0]])
    assert found == [model[0][0], model[0]]


def test_clip_returns_the_norm_before() -> None:
    """The gradient is scaled to the norm, and the earlier norm is returned; both clip functions agree."""
    for function in (clip, clip_whole):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0])
        assert function([parameter], 1.0).item() == 5.0
        assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-5)


def test_finite_finds_one_bad_element() -> None:
    """A single nan in a gradient is enough; large values whose squares overflow are finite."""
    model = nn.Linear(2, 3)
    model.bias.grad = torch.tensor([1e30, 0.0, 0.0])
    assert finite_gradients(list(model.parameters()), agree=False)
    model.bias.grad[1] = float("nan")
    assert not finite_gradients(list(model.parameters()), agree=False)


class Sum:
    """A sum that remembers its tree, with siblings in any order."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def add(self, other: Sum) -> None:
        """Make the sum the parent of both."""
        self.made = frozenset([self.made, other.made])


def root(leaves: list[Sum]) -> Any:
    """Return the tree by which one rank sums its leaves."""
    counter: PartialSums[Sum] = PartialSums(Sum.add)
    for leaf in leaves:
        counter.push(leaf)
    return leaf.made


def test_second_gradient_after_the_first_was_sent_is_refused(alone: None) -> None:
    """Strict sends a gradient once it arrives; a reentrant checkpoint of a layer that is used twice gives two."""
    layer = nn.Linear(3, 3, bias=False)
    gradients = TreeGradients([layer.weight], silent=True)
    gradients._pairs = [None]
    gradients.begin(is_last=True)
    hidden = checkpoint(layer, torch.ones(2, 3, requires_grad=True), use_reentrant=True)
    with pytest.raises(TaskError, match="3x3 gets a second gradient in one backward pass"):
        layer(hidden).sum().backward()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tree_is_the_same_for_every_number_of_ranks(ranks: int) -> None:
    """Neighbours are summed on a rank, then over the ranks; strided leaves over the ranks, then on a rank."""
    per = 8 // ranks
    expected = root([Sum(v) for v in range(8)])
    assert root([Sum(root([Sum(r * per + a) for a in range(per)])) for r in range(ranks)]) == expected
    assert root([Sum(root([Sum(r + ranks * a) for r in range(ranks)])) for a in range(per)]) == expected


def test_recomputed_blocks_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass runs twice with the same dropout; gradients, buffers and names do not change."""
    calls = []
    monkeypatch.setattr(Memory, "forward", lambda self, x, old=Memory.forward: calls.append(1) or old(self, x))
    found = []
    for again in (False, True):
        torch.manual_seed(1)
        model = Net()
        settings = TrainingSettings(global_batch_size=1, activation_checkpointing=again)
        blocks_of.prepare(settings, model, default_blocks(model), whole=True)
        model(torch.randn(4, 6)).sum().backward()
        found.append({**model.state_dict(), **{f"grad {n}": p.grad for n, p in model.named_parameters()}})
    assert len(calls) == 2 + 4
    assert found[0].keys() == found[1].keys()
    assert digest(found[0]) == digest(found[1])


@pytest.mark.parametrize("moves", [False, True])
def test_saved_activations_leave_the_device(moves: bool) -> None:
    """With the offload nothing keeps an activation after the forward pass; the gradients are the same to the bit."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 1))
    seen: list[StorageWeakRef] = []
    model[0].register_forward_hook(lambda part, args, out: seen.append(StorageWeakRef(out.untyped_storage())))
    x = torch.randn(4, 6)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with saved_on_host(model) if moves else contextlib.nullcontext():
        loss = model(x).sum()
    assert seen[-1].expired() == moves
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_parameters_stay_on_the_device() -> None:
    """The backward pass reads the parameter itself, not a copy."""
    layer, x = nn.Linear(3, 1, bias=False), torch.ones(1, 3, requires_grad=True)
    with saved_on_host(layer):
        out = layer(x)
    layer.weight.data.fill_(5.0)
    out.backward()
    assert x.grad.tolist() == [[5.0, 5.0, 5.0]]


# ------------------------------------------------------------------------------------------------------- with ranks

BLOCKED = {"activation_checkpointing": True}
LOOK = {"look": True}
ZERO_1 = {"shard": "optimizer"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9},
    **{name: {"lr": 0.01} for name in ("adamw", "radam", "lamb")},
    "lars": {"lr": 1.0, "momentum": 0.9},
}
SHARDED: dict[str, dict[str, Any]] = {
    "zero 1": ZERO_1,
    "fsdp": {"strategy": "fsdp"},
    "hsdp": {"strategy": "hsdp", "shard_size": 2},
}
SCALED = {"scale": True, "spoil": 1}  # virtual rank 1, not on the first of several ranks

STRICT_CASES: dict[str, Any] = {
    "strict ddp": {"strategy": "ddp", **STRICT, **LOOK},
    "strict fsdp": {"strategy": "fsdp", **STRICT, **LOOK},
    "strict hsdp": {"strategy": "hsdp", "shard_size": 2, **STRICT, **LOOK},
    "strict ddp 8": {"strategy": "ddp", "virtual": 8, **STRICT},
    "strict fsdp 8": {"strategy": "fsdp", "virtual": 8, **STRICT},
    "strict ddp unused": {"strategy": "ddp", "unused": "odd", **STRICT},
    "strict fsdp unused": {"strategy": "fsdp", "unused": "odd", **STRICT},
}
CASES: dict[int, dict[str, Any]] = {
    1: {
        **STRICT_CASES,
        "ddp": {"strategy": "ddp", **LOOK},
        "fsdp": {"strategy": "fsdp", **LOOK},
        "strict fsdp bf16": {"strategy": "fsdp", "precision": "bf16", **STRICT},
    },
    2: {
        **STRICT_CASES,
        "strict fsdp bf16": {"strategy": "fsdp", "precision": "bf16", **STRICT},
        "ddp": {"strategy": "ddp", **LOOK},
        "fsdp": {"strategy": "fsdp", **LOOK},
        "ddp apart": {"strategy": "ddp", "draw_apart": True},
        "fsdp apart": {"strategy": "fsdp", "draw_apart": True},
        "ddp blocked": {"strategy": "ddp", **BLOCKED, **LOOK},
        "fsdp blocked": {"strategy": "fsdp", **BLOCKED, **LOOK},
        "offload": {"strategy": "fsdp", "cpu_offload": True, "wrap_min_params": 100, **BLOCKED, **LOOK},
        "zero 1": {"strategy": "ddp", **ZERO_1, **LOOK},
        "zero 1 alone": {"strategy": "ddp", "virtual": 2, **ZERO_1},
        "ddp alone": {"strategy": "ddp", "virtual": 2},
        "zero 1 fp16": {"strategy": "ddp", "precision": "fp16", **ZERO_1, **SCALED},
        "zero 1 silent": {"strategy": "ddp", **ZERO_1, "silent": True},
        "zero 2": {"strategy": "fsdp", "shard": "gradients", **LOOK},
        **{f"{name} ddp": {"optimizer": {"name": name, **OPTIMIZERS[name]}} for name in OPTIMIZERS},
        **{
            f"{name} {kind}": {"optimizer": {"name": name, **OPTIMIZERS[name]}, **settings}
            for kind, settings in SHARDED.items()
            for name in OPTIMIZERS
        },
        "ddp bf16": {"strategy": "ddp", "precision": "bf16", **LOOK},
        "fsdp bf16": {"strategy": "fsdp", "precision": "bf16", **BLOCKED, **LOOK},
        "ddp fp16": {"strategy": "ddp", "precision": "fp16", **SCALED},
        "fsdp fp16": {"strategy": "fsdp", "precision": "fp16", **SCALED},
        "ddp to fp16": {"strategy": "ddp", "compression": "fp16"},
        "ddp to bf16": {"strategy": "ddp", "compression": "bf16"},
        "ddp to powersgd": {"kind": "resume", "strategy": "ddp", "compression": "powersgd"},
        "ddp long": {"strategy": "ddp", "steps": LONG},
        "ddp silent": {"strategy": "ddp", "silent": True},
        "fsdp silent": {"strategy": "fsdp", "silent": True},
        "ddp unused": {"strategy": "ddp", "unused": "odd"},
        "fsdp unused": {"strategy": "fsdp", "unused": "odd"},
    },
    4: {
        **STRICT_CASES,
        "ddp": {"strategy": "ddp"},
        "zero 1": {"strategy": "ddp", **ZERO_1},
        "hsdp": {"strategy": "hsdp", "shard_size": 2, **LOOK},
        "hsdp silent": {"strategy": "hsdp", "shard_size": 2, "silent": True},
        "strict ddp halved": {"kind": "halved", "strategy": "ddp", **STRICT},
    },
}
COMPILED = {
    "plain": {"strategy": "ddp", "dropout": 0.0},
    "ddp": {"strategy": "ddp", "dropout": 0.0, "compile": True, **LOOK},
    "fsdp blocked": {"strategy": "fsdp", "dropout": 0.0, "compile": True, **BLOCKED, **LOOK},
}


def start(cases: dict[str, Any], ranks: int, folder: Path, *, cold: bool = False) -> list[dict[str, Any]]:
    """Run the cases on the given number of ranks; return the results by rank, then by case.

    `cold`: by the interpreter itself, with all imports.
    """
    found: list[dict[str, Any]] = on_ranks(__file__, ranks, folder, json.dumps(cases), cold=cold)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """Return the results on the given number of ranks; each number is run once."""
    return functools.cache(lambda ranks: start(CASES[ranks], ranks, tmp_path_factory.mktemp("ranks"), cold=ranks == 1))


@pytest.mark.slow
@pytest.mark.parametrize("case", list(STRICT_CASES))
def test_strict_has_the_same_bits_on_any_number_of_ranks(results: Any, case: str) -> None:
    """Losses, clipped norms, parameters and buffers after all steps are equal; ddp, fsdp and hsdp agree too."""
    found = [{k: rank[case][k] for k in ("losses", "norms", "hash")} for n in (1, 2, 4) for rank in results(n)]
    assert all(one == found[0] for one in found)
    assert found[0]["hash"] == results(1)[0][case.replace("fsdp", "ddp").replace("hsdp", "ddp")]["hash"]


@pytest.mark.slow
def test_strict_holds_in_bf16_and_by_halving(results: Any) -> None:
    """In bf16 values are rounded before they are summed; many ranks use the same tree with less traffic."""
    assert results(1)[0]["strict fsdp bf16"]["hash"] == results(2)[1]["strict fsdp bf16"]["hash"]
    assert results(4)[3]["strict ddp halved"]["hash"] == results(4)[0]["strict ddp"]["hash"]


@pytest.mark.slow
def test_standard_differs_only_by_rounding(results: Any) -> None:
    """The mean over the global batch is the same under every strategy, on any number of ranks; all ranks agree."""
    expected = results(1)[0]["strict ddp"]["last"]
    for ranks, case in [(1, "ddp"), (1, "fsdp"), (2, "ddp"), (2, "fsdp"), (4, "hsdp")]:
        everywhere = [rank[case] for rank in results(ranks)]
        assert everywhere[0]["last"] == pytest.approx(expected, rel=1e-4)
        assert len({one["hash"] for one in everywhere}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES[2] if CASES[2][case].get("look")])
def test_evaluation_and_state_dict(results: Any, case: str) -> None:
    """Evaluation agrees on all ranks and keeps shards; the state dict has plain names and the weights' memory."""
    for rank in results(2):
        assert rank[case]["evaluated"] == results(2)[0][case]["evaluated"]
        assert rank[case]["names"] == sorted(Net().state_dict())
        assert rank[case]["named_parameters"] == sorted(name for name, _ in Net().named_parameters())
        assert rank[case]["is_sharded"] == (CASES[2][case]["strategy"] != "ddp")
        assert rank[case]["is_aliased"] or case == "zero 1"  # there, of some rows
        assert rank[case]["is_undone"]
        assert rank[case]["is_zeroed"]


@pytest.mark.slow
def test_memory_savers_change_no_bit(results: Any) -> None:
    """Recomputed, offloaded or differently cut blocks give the same model, dropout and statistics included.

    Ranks with different initial weights train the same model: rank 0's values count.
    """
    for case, same in [("ddp", "ddp blocked"), ("fsdp", "fsdp blocked"), ("fsdp", "offload")]:
        assert results(2)[0][case]["losses"] == results(2)[0][same]["losses"]
        assert results(2)[0][case]["hash"] == results(2)[0][same]["hash"]
    for case in ("ddp", "fsdp"):
        assert results(2)[1][case]["hash"] == results(2)[1][f"{case} apart"]["hash"]


@pytest.mark.slow
def test_sharded_optimizer_is_ddp(results: Any) -> None:
    """ZeRO-1 gives ddp's losses, norms and weights bit for bit; a rank has its share of AdamW's two moments."""
    for ranks, case, same in [(2, "zero 1", "ddp"), (4, "zero 1", "ddp"), (2, "zero 1 alone", "ddp alone")]:
        for rank in results(ranks):
            assert all(rank[case][k] == results(ranks)[0][same][k] for k in ("losses", "norms", "hash"))
    whole = results(2)[0]["ddp"]["state_bytes"]
    for ranks in (2, 4):
        owned = [rank["zero 1"]["state_bytes"] for rank in results(ranks)]
        assert sum(owned) == whole
        assert max(owned) <= 1.25 * whole / ranks  # the rows of small tensors do not divide evenly


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_optimizer_of_each_kind(results: Any, name: str, kind: str) -> None:
    """Each built-in optimizer trains like ddp: to the bit, or to the rounding of norms that are summed over shards.

    Layer-wise optimizers over shards add one all-reduce a step, for all layers.
    """
    everywhere = [rank[f"{name} {kind}"] for rank in results(2)]
    assert len({one["hash"] for one in everywhere}) == 1
    assert everywhere[0]["last"] == pytest.approx(results(2)[0][f"{name} ddp"]["last"], rel=1e-5)
    if kind == "zero 1" and not optimizer_facts.OPTIMIZERS[name].is_by_layer:
        assert everywhere[0]["hash"] == results(2)[0][f"{name} ddp"]["hash"]
    if kind != "zero 1":
        assert everywhere[0]["calls"] == STEPS * optimizer_facts.OPTIMIZERS[name].is_by_layer


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES[2] if CASES[2][case].get("look") and "bf16" not in case])
def test_average_over_shards_is_ddps(results: Any, case: str) -> None:
    """The averaged weights compute what ddp's compute, also between forward passes that leave the root gathered.

    The swap ends bit for bit. Without `strict` ddp and fsdp update buffers in different orders.
    """
    same = "strict ddp" if "strict" in case else CASES[2][case]["strategy"]
    for rank in results(2):
        before, averaged, after = rank[case]["outputs"]
        assert averaged == pytest.approx(results(2)[0][same]["outputs"][1], rel=1e-5, abs=1e-6)
        assert averaged != pytest.approx(before, rel=1e-2)
        assert after == before


@pytest.mark.slow
def test_gathered_parameters_change_no_bit(results: Any) -> None:
    """ZeRO-2 is fsdp that keeps the parameters gathered between a forward and a backward pass."""
    assert results(2)[0]["zero 2"]["hash"] == results(2)[0]["fsdp"]["hash"]
    assert results(2)[0]["zero 2"]["is_gathered"]
    assert not results(2)[0]["fsdp"]["is_gathered"]


@pytest.mark.slow
def test_bf16_is_near_fp32(results: Any) -> None:
    """Losses equal the losses of fp32 to about bf16's two digits, and fsdp's weights are fp32."""
    for case in ("ddp bf16", "fsdp bf16"):
        assert results(2)[0][case]["losses"][0] != results(2)[0]["ddp"]["losses"][0]
        assert sum(results(2)[0][case]["last"]) == pytest.approx(sum(results(2)[0]["ddp"]["last"]), rel=0.05)
    assert results(2)[0]["fsdp bf16"]["dtype"] == "torch.float32"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ddp fp16", "fsdp fp16", "zero 1 fp16"])
def test_overflow_on_one_rank_skips_the_step_on_all(results: Any, case: str) -> None:
    """A plain GradScaler is enough: the third step is skipped and the scale halved on all ranks."""
    assert results(2)[0][case]["last"] == pytest.approx(results(2)[0]["ddp fp16"]["last"], rel=0.01)
    for rank in results(2):
        assert rank[case]["finite"] == [step != 2 for step in range(STEPS)]
        assert rank[case]["scale"] == 512
        assert rank[case]["hash"] == results(2)[0][case]["hash"]


@pytest.mark.slow
def test_compressed_gradients_train(results: Any) -> None:
    """Gradients in 16 bits change the loss a little; matrices of rank 2 change the loss somewhat more."""
    expected = results(2)[0]["ddp"]["last"]
    for case, tolerance in [("ddp to fp16", 0.01), ("ddp to bf16", 0.03)]:
        assert results(2)[0][case]["last"] == pytest.approx(expected, rel=tolerance)
        assert results(2)[0][case]["losses"] != results(2)[0]["ddp"]["losses"]
    expected = results(2)[0]["ddp long"]["last"]
    assert results(2)[0]["ddp to powersgd"]["whole"]["last"] == pytest.approx(expected, rel=0.2)


@pytest.mark.slow
def test_powersgd_resumes_exactly_from_saved_state(results: Any) -> None:
    """With each rank's own state the resumed half is equal bit for bit; without the state, the errors start at zero."""
    for rank in results(2):
        found = rank["ddp to powersgd"]
        assert found["resumed"]["hash"] == found["whole"]["hash"]
        assert found["reset"]["hash"] != found["whole"]["hash"]
        assert "powersgd.error.first.weight" in found["own"]
    assert results(2)[0]["ddp to powersgd"]["own"] != results(2)[1]["ddp to powersgd"]["own"]


@pytest.mark.slow
def test_silent_ranks_diverge(results: Any) -> None:
    """Without transfers ddp's ranks train different models; fsdp's run to the end on wrong numbers."""
    for case in ("ddp silent", "zero 1 silent"):
        assert results(2)[0][case]["hash"] != results(2)[1][case]["hash"]
    assert results(2)[0]["fsdp silent"]["losses"] != results(2)[0]["fsdp"]["losses"]
    assert results(4)[0]["hsdp silent"]["losses"] != results(4)[0]["hsdp"]["losses"]


@pytest.mark.slow
def test_parameters_that_one_rank_uses_train_alike(results: Any) -> None:
    """ddp and fsdp use zeros on the other rank, as strict does."""
    for case in ("ddp unused", "fsdp unused"):
        assert results(2)[0][case]["last"] == pytest.approx(results(2)[0]["strict ddp unused"]["last"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.soak  # test_flops.py trains a compiled module
@pytest.mark.parametrize("case", ["ddp", "fsdp blocked"])
def test_compiled_models_train_and_evaluate(tmp_path: Path, case: str) -> None:
    """The compiler's own arithmetic differs by rounding; the names do not change."""
    (found,) = start({name: COMPILED[name] for name in ("plain", case)}, 1, tmp_path)
    assert found[case]["last"] == pytest.approx(found["plain"]["last"], rel=1e-3)
    assert found[case]["names"] == found["plain"]["names"]
    assert found[case]["is_zeroed"]


# -------------------------------------------------------------------------------------------------------- the ranks


class Memory(nn.Module):
    """A module whose output depends on a buffer that every pass replaces, like a codebook."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(width))
        self.register_buffer("mask", torch.ones(width, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x moved by the mean of earlier inputs."""
        moved = x + (0.1 * self.seen * self.mask).to(x.dtype)
        if self.training:
            self.seen = 0.5 * self.seen + 0.5 * x.detach().float().mean(0)
        return moved


class Net(nn.Module):
    """Two blocks with dropout and buffers. No size is a multiple of the ranks."""

    def __init__(self, extra: bool = False, dropout: float = 0.3) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 13, bias=False), nn.BatchNorm1d(13)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(13, 13), nn.BatchNorm1d(13), nn.ReLU(), Memory(13), nn.Dropout(dropout))
            for _ in range(2)
        )
        self.last = nn.Linear(13, 3)
        self.extra = nn.Linear(6, 3) if extra else None

    def forward(self, x: torch.Tensor, use_extra: bool = False) -> torch.Tensor:
        """Return the logits."""
        y = self.norm(self.first(x))
        for layer in self.layers:
            y = y + layer(y)
        return self.last(y) + self.extra(x) if use_extra and self.extra else self.last(y)


def owned_by(spread: Strategy, split: data.Split) -> range:
    """Return this rank's virtual ranks."""
    rank, per = dist.get_rank(), split.accumulation
    return range(rank, split.virtual, split.ranks) if spread.strided else range(rank * per, (rank + 1) * per)


def forward_and_backward(
    spread: Strategy, split: data.Split, step: int, scaler: Any, spoil: int | None, unused: str
) -> dict[int, float]:
    """Do a step's micro-batches as train.py does; return the losses by virtual rank."""
    losses, owned = {}, owned_by(spread, split)
    for virtual in owned:
        generator = torch.Generator().manual_seed(data.mix(5, step, virtual))
        x, y = torch.randn(MICRO, 6, generator=generator), torch.randint(0, 3, (MICRO,), generator=generator)
        data.seed_all(data.mix(1, data.FORWARD, step, virtual))
        with spread.micro_batch(virtual, virtual == owned[-1]):
            with spread.autocast():
                loss = F.cross_entropy(called(spread, x, unused == "odd" and virtual % 2 == 1), y)
            losses[virtual] = loss.item()
            loss = loss / spread.divisor * (float("inf") if virtual == spoil else 1.0)
            (scaler.scale(loss) if scaler else loss).backward()
    spread.finish()
    return losses


def by_virtual_rank(losses: dict[int, float]) -> list[float]:
    """Return the losses of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, losses)
    return [loss for _, loss in sorted((virtual, loss) for part in found for virtual, loss in part.items())]


def train(
    virtual: int = 4,
    unused: str = "",
    dropout: float = 0.3,
    draw_apart: bool = False,
    silent: bool = False,
    scale: bool = False,
    spoil: int | None = None,
    look: bool = False,
    optimizer: dict[str, Any] | None = None,
    first: int = 0,
    steps: int = STEPS,
    meet: Callable[[Strategy, torch.optim.Optimizer], None] = lambda spread, optimizer: None,
    **settings: Any,
) -> dict[str, Any]:
    """Train from the step `first` until `steps`; return this rank's results. `meet` is called before the first step."""
    ranks = dist.get_world_size()
    split = data.Split(MICRO * virtual, MICRO, ranks, virtual // ranks)
    torch.manual_seed(7 + (dist.get_rank() if draw_apart else 0))
    module = Net(bool(unused), dropout)
    training = TrainingSettings(global_batch_size=split.global_batch, max_steps=1, **settings)
    spread = wrap(training, module, CPU, split, silent=silent)
    # Not fused: on CPUs a fused kernel rounds a tensor's last elements differently, and shards end elsewhere.
    built_in = OptimizerSettings(**{"lr": 1e-2, "weight_decay": 0.01, **(optimizer or {})})
    with spread.optimized():
        moving = optim.build(built_in, module.parameters(), fused=False)
    meet(spread, moving)
    average = Ema(spread.module, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scale else None
    found: dict[str, Any] = {"losses": [], "norms": [], "finite": [], "calls": 0}
    for step in range(first, steps):
        losses = forward_and_backward(spread, split, step, scaler, spoil if step == 2 else None, unused)
        found["losses"].append([loss.hex() for loss in by_virtual_rank(losses)])
        found["finite"].append(spread.finite_gradients())
        if scaler:
            scaler.unscale_(moving)
        found["norms"].append(spread.clip(0.5).item().hex())
        if scaler:
            scaler.step(moving)
            scaler.update()
        else:
            with counted() as sizes:
                moving.step()
            found["calls"] += len(sizes)
        spread.share_update()
        moving.zero_grad()
        average.update(step + 1)
    spread.sync_buffers()
    found |= {"last": [float.fromhex(loss) for loss in found["losses"][-1]], "scale": scaler and scaler.get_scale()}
    found |= {"hash": digest(module.state_dict()), "names": sorted(module.state_dict())}
    if look and split.accumulation > 1:
        found["is_undone"] = is_undone(spread, split)
    if look and "compile" not in settings:
        found["outputs"] = with_averages(spread, average)
    state = [value for values in moving.state.values() for value in values.values() if value.dim()]
    found["state_bytes"] = sum(local(value).nbytes for value in state)
    return found | (look_at(spread, moving) if look else {})


def is_undone(spread: Strategy, split: data.Split) -> bool:
    """Return whether a step left after its first micro-batch does not change the buffers."""
    before = digest(dict(spread.module.named_buffers()))
    virtual = owned_by(spread, split)[0]
    with spread.micro_batch(virtual, False), spread.autocast():
        called(spread, torch.ones(MICRO, 6)).sum().backward()
    assert digest(dict(spread.module.named_buffers())) != before
    spread.undo_buffers()
    return digest(dict(spread.module.named_buffers())) == before


@torch.no_grad()
def with_averages(spread: Strategy, average: Ema) -> list[list[float]]:
    """Return the outputs with the trained weights, with the average, and with the trained weights again."""
    outputs = []
    spread.module.eval()
    for context in (contextlib.nullcontext(), average.swapped(), contextlib.nullcontext()):
        with context:
            outputs.append(called(spread, torch.linspace(-1, 1, 6 * MICRO).view(MICRO, 6)).flatten().tolist())
    return outputs


@torch.no_grad()
def look_at(spread: Strategy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Evaluate; write zeros into the state dict like a checkpoint load, and evaluate again."""
    module = spread.module.eval()
    with torch.enable_grad(), spread.autocast():
        called(spread, torch.ones(MICRO, 6))  # another size would be compiled again
    is_gathered = not any(hasattr(p, "to_local") for p in module.layers.parameters())
    with spread.autocast():
        before = called(spread, torch.linspace(-1, 1, 6 * MICRO).view(MICRO, 6))
    names = sorted(name for name, _ in module.named_parameters())
    parameters = dict(module.named_parameters())
    state = module.state_dict()
    held = {p.data_ptr() for group in optimizer.param_groups for p in map(local, group["params"])}
    found = {
        "evaluated": digest({"": before}),
        "is_gathered": is_gathered,
        "dtype": str(before.dtype),
        "named_parameters": names,
        "is_sharded": all(hasattr(p, "to_local") for p in parameters.values()),
        "is_aliased": all(local(state[name]).data_ptr() in held for name in parameters),
    }
    for value in state.values():
        local(value).zero_()
    return {**found, "is_zeroed": not called(spread, torch.ones(MICRO, 6)).any()}


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def resume(**settings: Any) -> dict[str, Any]:
    """Train in one run; then in two halves, the second half with the rank's own state and without the state."""
    kept: list[Any] = []
    whole = train(steps=LONG, **settings)
    train(steps=LONG // 2, meet=lambda spread, optimizer: kept.extend((spread, optimizer)), **settings)
    spread, optimizer = kept
    own = copy.deepcopy(spread.rank_state())
    model, moments = copy.deepcopy(spread.module.state_dict()), copy.deepcopy(optimizer.state_dict())

    def second_half(state: dict[str, torch.Tensor]) -> dict[str, Any]:
        def meet(spread: Strategy, optimizer: torch.optim.Optimizer) -> None:
            spread.module.load_state_dict(model)
            optimizer.load_state_dict(copy.deepcopy(moments))
            spread.load_rank_state(state)

        return train(first=LONG // 2, steps=LONG, meet=meet, **settings)

    hashes = {name: digest({"": value}) for name, value in own.items()}
    return {"whole": whole, "resumed": second_half(own), "reset": second_half({}), "own": hashes}


def halved(**settings: Any) -> dict[str, Any]:
    """Train with the transfers that more ranks would use."""
    few = summation._DOUBLING_RANKS
    summation._DOUBLING_RANKS = 0
    found = train(**settings)
    summation._DOUBLING_RANKS = few
    return found


def on_rank(cases: str) -> dict[str, Any]:
    """Return this rank's results of the cases."""
    kinds = {"train": train, "resume": resume, "halved": halved}
    return {name: kinds[case.pop("kind", "train")](**case) for name, case in json.loads(cases).items()}
