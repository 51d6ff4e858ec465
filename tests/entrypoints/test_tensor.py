"""Tensor and sequence parallelism: plans, refusals, and the same training as one process, by `on_rank`."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from trainerruns import called, on_ranks

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import data, modelform, optim
from cloudtrain.entrypoints.trainer.settings import OptimizerSettings, ParallelSettings, TrainingSettings
from cloudtrain.entrypoints.trainer.strategies import tensor
from cloudtrain.entrypoints.trainer.strategies.blocks import default_blocks
from cloudtrain.entrypoints.trainer.strategies.wrap import wrap

CPU = torch.device("cpu")
MICRO, STEPS, TIME, WORDS = 2, 2, 8, 32


class Layer(nn.Module):
    """Attention with separate matrices, then a network; sizes of views come from the tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size, self.dropout = width // heads, 0.1
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # A bias of the keys has no gradient but rounding errors, which AdamW would blow up.
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with the attention's and the network's outputs added."""
        y = self.norm_1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.o(y.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """A small GPT with a scale of its own, without a head if `tied`."""

    def __init__(self, tied: bool = False, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(TIME, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, WORDS, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return scores, (batch, TIME, WORDS)."""
        x = self.words(text) + self.places(torch.arange(text.shape[1]))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.scale * (F.linear(x, self.words.weight) if self.head is None else self.head(x))


# ---------------------------------------------------------------------------------------------------- without ranks


def planned(module: nn.Module, own: Any = None, **parallel: Any) -> dict[str, str]:
    """Return the plan for two ranks."""
    settings = ParallelSettings(**{"tensor": 2, **parallel})
    return tensor.find_plan(settings, module, default_blocks(module), own)


LAYER = {"q": "column", "k": "column", "v": "column", "o": "row", "mlp.0": "column", "mlp.2": "row"}
BY_NAMES = {f"layers.{n}.{name}": kind for n in range(2) for name, kind in LAYER.items()}


def test_plan_by_names() -> None:
    """Attention and networks are split; with the sequence, the embeddings, norms and the head have kinds too."""
    assert planned(Model()) == BY_NAMES
    rest = {"words": "embedding", "places": "embedding", "norm": "sequence", "head": "head"}
    norms = {f"layers.{n}.norm_{m}": "sequence" for n in range(2) for m in (1, 2)}
    assert planned(Model(), sequence=True) == {**BY_NAMES, **rest, **norms}


def test_plan_of_the_task_and_of_the_config() -> None:
    """The config's plan replaces the task's; patterns match all layers; `whole` excepts a module."""
    task = lambda model: {"layers.*.mlp.0": "column", "layers.*.mlp.2": "row"}  # noqa: E731
    assert planned(Model(), task) == {name: kind for name, kind in BY_NAMES.items() if "mlp" in name}
    plan = {"layers.*.mlp.0": "column", "layers.*.mlp.2": "row", "layers.1.*": "whole"}
    assert planned(Model(), task, plan=plan) == {"layers.0.mlp.0": "column", "layers.0.mlp.2": "row"}


def test_plan_of_a_transformers_model() -> None:
    """The model's own plan is used; a head that is tied to the embedding stays whole, as does the embedding."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    for tied in (False, True):
        config = transformers.LlamaConfig(**sizes, vocab_size=32, tie_word_embeddings=tied)
        plan = planned(transformers.LlamaForCausalLM(config))
        assert plan["model.layers.0.self_attn.q_proj"] == "column"
        assert plan["model.layers.0.mlp.down_proj"] == "row"
        assert ("lm_head" in plan, "model.embed_tokens" in plan) == (not tied, not tied)


def tied_model() -> nn.Module:
    """Return a model whose head and embedding are one parameter."""
    model = Model()
    model.head.weight = model.words.weight
    return model


def attention() -> nn.Module:
    """Return a model with torch's own attention."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.MultiheadAttention(4, 2)])
    return model


@pytest.mark.parametrize(
    ("module", "parallel", "why"),
    [
        (Model(), {"plan": {"layers.*.w": "column"}}, "no module of the model is named layers.*.w"),
        (Model(), {"plan": {"head": "colum"}}, "did you mean `column`"),
        (Model(), {"plan": {"words": "column"}}, "words is a Embedding, and the kind column is for nn.Linear"),
        (Model(), {"plan": {"head": "embedding"}}, "is for nn.Embedding"),
        (tied_model(), {"plan": {"head": "head"}}, "the weight of head is also the weight of another module"),
        (attention(), {"plan": {"layers.0.out_proj": "row"}}, "reads the weights of its parts without calling them"),
        (nn.Sequential(nn.Linear(4, 12)), {"plan": {"0": "column"}}, "looks like several matrices in one"),
        (nn.ModuleDict({"qkv": nn.Linear(4, 4)}), {"plan": {"qkv": "column"}}, "looks like several matrices in one"),
        (
            Model(width=18, heads=3),
            {"tensor": 4},
            "does not divide the 18 outputs of layers.0.q; set one of 2, 3, 6, 9",
        ),
        (nn.Sequential(nn.Linear(4, 4)), {}, "the Linears are 0: write tensor_plan(model)"),
    ],
)
def test_wrong_plan_is_refused(module: nn.Module, parallel: dict[str, Any], why: str) -> None:
    """A plan that cannot work, or that would train wrongly without an error, is refused in one sentence."""
    with pytest.raises(TaskError) as found:
        planned(module, **parallel)
    assert why in str(found.value)


def test_plan_in_words() -> None:
    """The start prints the split modules by kind and the largest whole modules, a line for all layers."""
    model = Model()
    text = tensor.in_words(model, planned(model))
    assert text.startswith(
        "split column layers.*.q, layers.*.k, layers.*.v, layers.*.mlp.0; row layers.*.o, layers.*.mlp.2"
    )
    assert "whole on each rank words, head, places, layers.*.norm_1" in text


# ------------------------------------------------------------------------------------------------------- with ranks

TENSOR, SEQUENCE = {"tensor": 2}, {"tensor": 2, "sequence": True}
STILL = {"dropout": 0.0}  # ranks that share a sequence draw different masks
PARTS = {"layers.*.[qkv]": "column", "layers.*.o": "row", "layers.*.mlp.0": "column", "layers.*.mlp.2": "row"}
ENDS = {"words": "embedding", "places": "embedding", "head": "head"}
# The cases of each run; a run's name begins with the number of ranks.
CASES: dict[str, dict[str, Any]] = {
    "1": {"plain": {}, "tied": {"tied": True}, "still": STILL, "lamb": {**STILL, "optimizer": "lamb"}},
    "2": {
        "plain": {"parallel": TENSOR},
        "plain again": {"parallel": TENSOR},
        "plain recomputed": {"parallel": TENSOR, "activation_checkpointing": True},
        "plain bf16": {"parallel": TENSOR, "precision": "bf16"},
        "tied": {"parallel": TENSOR, "tied": True},
        "still sequence": {"parallel": SEQUENCE, **STILL},
        "lamb sequence": {"parallel": SEQUENCE, **STILL, "optimizer": "lamb"},
        "wrong": {"parallel": {**SEQUENCE, "plan": {**PARTS, **ENDS, "layers.*.norm_1": "sequence"}}, **STILL},
    },
    "4": {
        "plain fsdp": {"parallel": TENSOR, "strategy": "fsdp"},
        "still sequence": {"parallel": SEQUENCE, "strategy": "fsdp", **STILL},
    },
    "4 more": {
        "plain four": {"parallel": {"tensor": 4}},
        "plain ddp": {"parallel": TENSOR},
        "plain recomputed": {"parallel": TENSOR, "strategy": "fsdp", "activation_checkpointing": True},
        "tied fsdp": {"parallel": TENSOR, "strategy": "fsdp", "tied": True},
        "still sequence ddp": {"parallel": SEQUENCE, **STILL},
        "lamb fsdp": {"parallel": TENSOR, "strategy": "fsdp", **STILL, "optimizer": "lamb"},
    },
}
SOAK = dict.fromkeys(("4", "4 more"), pytest.mark.soak)  # the same settings run on two ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Return the results of the named run by rank, then by case; each run happens once."""
    return functools.cache(lambda name: on_ranks(__file__, int(name[0]), tmp_path_factory.mktemp("ranks"), name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=SOAK.get(name, ()))
        for name in ("2", "4", "4 more")
        for case in CASES[name]
        if "bf16" not in case and case != "wrong"
    ],
)
def test_split_layers_train_as_one_process(results: Any, name: str, case: str) -> None:
    """All losses within 1e-6 of one process's, gradient norms within 1e-6; evaluation and weights are the same."""
    (one,) = [results("1")[0][case.split()[0]]]
    for rank in results(name):
        found = rank[case]
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-6 if "bf16" not in case else 0.1)
        assert found["evaluated"] == pytest.approx(one["evaluated"], rel=1e-5)
        assert found["names"] == one["names"]
        assert found["weights"] == pytest.approx(one["weights"], rel=1e-4)
        assert found["differing"] == []


@pytest.mark.slow
def test_split_layers_repeat_their_bits(results: Any) -> None:
    """Two runs are equal bit for bit, and recomputed activations change no bit."""
    for rank in results("2"):
        assert rank["plain"] == rank["plain again"]
        assert rank["plain"]["losses"] == rank["plain recomputed"]["losses"]


@pytest.mark.slow
def test_columns_with_one_input_send_one_gradient(results: Any) -> None:
    """Each of 2 layers sends 2 outputs, and the gradients of 2 inputs: that of attention once, not for q, k and v."""
    assert results("2")[0]["plain"]["transfers"] == 2 * (2 + 2)
    assert results("1")[0]["plain"]["transfers"] == 0


def test_shared_input_has_a_gradient_and_is_not_kept(alone: None) -> None:
    """An earlier pass without gradients does not take the input's gradient; after a forward pass nothing is kept."""
    layer, x = Layer(16, 4), torch.ones(1, TIME, 16, requires_grad=True)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    tensor.split(layer, {"q": "column", "k": "column"}, mesh, [], sequence=False)
    with torch.no_grad():
        layer.q(x)
    layer.k(x).sum().backward()
    assert x.grad is not None
    seen: list[StorageWeakRef] = []
    layer.norm_1.register_forward_hook(lambda part, args, out: seen.append(StorageWeakRef(out.untyped_storage())))
    with torch.no_grad():
        layer(x)
    assert seen[0].expired()


@pytest.mark.slow
def test_split_layers_train_in_bf16(results: Any) -> None:
    """Losses equal the losses of fp32 to about bf16's two digits."""
    found = results("2")[0]["plain bf16"]["losses"]
    assert found != results("1")[0]["plain"]["losses"]
    assert found == pytest.approx(results("1")[0]["plain"]["losses"], rel=0.03)


@pytest.mark.slow
def test_parameters_that_differ_between_ranks_are_found(results: Any) -> None:
    """A norm that sees a part of the sequence needs the kind `sequence`: else it differs, and the loss looks right."""
    for rank in results("2"):
        assert rank["wrong"]["losses"] == pytest.approx(results("1")[0]["still"]["losses"], rel=1e-2)
        assert {"layers.0.norm_2.weight", "norm.weight"} <= set(rank["wrong"]["differing"])


# -------------------------------------------------------------------------------------------------------- the ranks


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def train(
    tied: bool = False, dropout: float = 0.1, optimizer: str = "adamw", parallel: Any = None, **settings: Any
) -> dict[str, Any]:
    """Train some steps of 4 micro-batches, and return what the ranks must agree on."""
    layout = ParallelSettings(**(parallel or {}))
    data.seed_all(3 + dist.get_rank())  # ranks may draw different weights: rank 0's count
    data.seed_all(3)
    model = Model(tied)
    for part in model.modules():
        if isinstance(part, Layer):
            part.dropout = dropout
    ranks = dist.get_world_size() // layout.tensor
    data_rank = dist.get_rank() // layout.tensor
    split = data.Split(4 * MICRO, MICRO, ranks, 4 // ranks)
    training = TrainingSettings(global_batch_size=4 * MICRO, max_steps=STEPS, parallel=layout, **settings)
    spread = wrap(training, model, CPU, split)
    moving = optim.build(OptimizerSettings(optimizer, lr=0.01), spread.module.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        owned, total = split.owned(data_rank), torch.zeros((), dtype=torch.float64)
        for virtual in owned:
            generator = torch.Generator().manual_seed(data.mix(5, step, virtual))
            text = torch.randint(0, WORDS, (MICRO, TIME + 1), generator=generator)
            data.seed_all(data.mix(1, data.FORWARD, step, virtual))
            with spread.micro_batch(virtual, virtual == owned[-1]):
                with spread.autocast():
                    loss = F.cross_entropy(called(spread, text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())
                total += loss.detach().double()
                (loss / spread.divisor).backward()
        spread.finish()
        norms.append(spread.clip(1.0).item())
        moving.step()
        moving.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / 4 / layout.tensor)
    model.eval()
    with torch.no_grad():
        scores = called(spread, torch.arange(TIME).expand(2, -1))
    with CommDebugMode() as transfers:
        called(spread, torch.arange(TIME).expand(2, -1)).sum().backward()
    weights = {name: whole(value).double() for name, value in spread.module.state_dict().items()}
    return {
        "losses": losses,
        "norms": norms,
        "transfers": transfers.get_total_counts(),
        "evaluated": scores.double().abs().mean().item(),
        "names": sorted(weights),
        "weights": [weights[name].square().mean().sqrt().item() for name in sorted(weights)],
        "differing": modelform.differing(spread.module, range(dist.get_world_size())),
    }


def on_rank(name: str) -> dict[str, Any]:
    """Return this rank's results of the named run."""
    return {case: train(**settings) for case, settings in CASES[name].items()}
