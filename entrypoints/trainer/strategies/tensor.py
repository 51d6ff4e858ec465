"""Tensor and sequence parallelism: neighbouring ranks share the matrices of each layer (Shoeybi et al. 2019).

A plan gives each module a kind. `column` and `row` split the weight of a Linear along its output or its input. `head`
is a `column` with the whole output, and `embedding` splits an Embedding by rows. All other modules are `whole`: every
rank computes them with the same weights. The optimizer sees these weights as replicated DTensors, because torch's
clipping and its fused optimizers refuse a mixture of DTensors and plain tensors.

With sequence parallelism (Korthikanti et al. 2022) the ranks also share the sequence between the layers. The kind
`sequence` is for modules with whole weights that see a part of the sequence: the gradients of all ranks are added.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ...errors import TaskError
from ...format import first_of
from ..settings import ParallelSettings, suggest

Plan = dict[str, str]  # kind of each split module, by its name; all others are whole
TensorPlan = Callable[[Any], Mapping[str, str]]
SharedInput = dict[tuple[int, int, bool], tuple[torch.Tensor, DTensor]]  # an input, and its DTensor, by what it is

KINDS = ("column", "row", "head", "embedding", "sequence", "whole")

# A layer's parts, by the last part of their names: as the models of transformers, torchtitan and nanoGPT name them.
_QUERY, _KEY, _VALUE = ("q", "q_proj", "wq", "query"), ("k", "k_proj", "wk", "key"), ("v", "v_proj", "wv", "value")
_OUT = ("o", "o_proj", "wo", "out_proj", "proj", "project")
_GATE, _UP = ("gate", "gate_proj", "w1"), ("up", "up_proj", "w3", "fc1", "c_fc", "fc_in", "linear1", "lin1")
_DOWN = ("down", "down_proj", "w2", "fc2", "fc_out", "linear2", "lin2")
_ATTENTION, _GATED, _PLAIN = ((_QUERY, _KEY, _VALUE), _OUT), ((_GATE, _UP), _DOWN), ((_UP,), _DOWN)
_FUSED = ("qkv", "qkv_proj", "wqkv", "c_attn", "query_key_value", "in_proj", "to_qkv", "gate_up_proj", "w12")
# The kinds of transformers' plans (5.23) that have a counterpart here.
_TRANSFORMERS = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "head",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "sequence",
}
_SIZES = {"row": "in_features", "embedding": "num_embeddings"}  # what each kind divides; else the outputs
_SEQUENCE = Shard(-2)  # of (batch, sequence, width) or (sequence, width)


def find_plan(
    settings: ParallelSettings, module: nn.Module, blocks: Iterable[nn.Module], tensor_plan: TensorPlan | None
) -> Plan:
    """Return the kind of each module that is not whole: by the config, the task, the model's own plan, or by names.

    Raises TaskError with the first fault of the plan.
    """
    if settings.plan or tensor_plan is not None:
        wanted = settings.plan or (tensor_plan(module) if tensor_plan is not None else {})
        where = "training.parallel.plan" if settings.plan else "tensor_plan(model)"
        plan = _matched(module, wanted, where)
    elif isinstance(own := getattr(module, "_tp_plan", None), Mapping) and own:
        plan = _of_transformers(module, own)
    else:
        plan = _by_names(module, blocks, settings.sequence)
    for fault in _faults(module, plan, settings.tensor):
        raise TaskError(fault)
    return plan


def _matched(module: nn.Module, wanted: Mapping[str, str], where: str) -> Plan:
    names = [name for name, _ in module.named_modules() if name]
    plan: Plan = {}
    for pattern, kind in wanted.items():
        if kind not in KINDS:
            raise TaskError(f"{where}: {pattern} is {kind!r}; there are {', '.join(KINDS)}{suggest(str(kind), KINDS)}")
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            raise TaskError(f"{where}: no module of the model is named {pattern}{suggest(pattern, names)}")
        plan |= dict.fromkeys(found, kind)
    return {name: kind for name, kind in plan.items() if kind != "whole"}


def _of_transformers(module: nn.Module, own: Mapping[str, Any]) -> Plan:
    """Return the plan of a model of the package transformers; the package itself is not needed."""
    if unknown := sorted({str(kind) for kind in own.values()} - _TRANSFORMERS.keys()):
        raise TaskError(
            f"the model's own tensor plan has {', '.join(unknown)}, which the trainer does not know; write "
            "tensor_plan(model) in the task"
        )
    tied = _tied(module)
    names = [name for name, _ in module.named_modules()]
    return {
        name: _TRANSFORMERS[kind]
        for pattern, kind in own.items()
        for name in names
        if fnmatchcase(name, pattern) and name not in tied
    }


def _by_names(module: nn.Module, blocks: Iterable[nn.Module], sequence: bool) -> Plan:
    """Return the plan of well-known layers: attention with separate q, k, v, o; networks of two or three Linears."""
    names = {part: name for name, part in module.named_modules()}
    plan: Plan = {}
    for block in blocks:
        for part in block.modules():
            plan |= {names[linear]: kind for linear, kind in _known(part)}
    if not plan:
        linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        raise TaskError(
            f"parallel.tensor found no layer to split by name; the Linears are {first_of(linears, 8)}: write "
            "tensor_plan(model) in the task, or training.parallel.plan"
        )
    if sequence:
        inside = {part for block in blocks for part in block.modules()}
        for part, name in names.items():
            if isinstance(part, nn.Embedding) and part not in inside:
                plan[name] = "embedding"
            elif isinstance(part, nn.Linear) and part not in inside:
                plan[name] = "head"
            elif name and name not in plan and any(True for _ in part.parameters(recurse=False)):
                plan[name] = "sequence"
    return plan


def _known(part: nn.Module) -> Iterator[tuple[nn.Linear, str]]:
    """Yield the Linears of a well-known layer with their kinds."""
    children = {name: child for name, child in part.named_children() if isinstance(child, nn.Linear)}
    if isinstance(part, nn.Sequential) and len(children) == 2:
        first, last = children.values()
        others = [child for child in part.children() if child not in (first, last)]
        is_plain = not any(True for child in others for _ in child.parameters())
        if is_plain and first.out_features == last.in_features and next(iter(part.children())) is first:
            yield from ((first, "column"), (last, "row"))
        return
    for columns, row in (_ATTENTION, _GATED, _PLAIN):
        found = [next((children[name] for name in known if name in children), None) for known in (*columns, row)]
        if all(found):
            *firsts, last = [linear for linear in found if linear is not None]
            yield from ((first, "column") for first in firsts)
            yield last, "row"
            if columns is _GATED[0]:
                return


def _tied(module: nn.Module) -> set[str]:
    """Return the names of modules with a parameter that is also a parameter of a different module."""
    owners: dict[nn.Parameter, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, set()).add(name.rpartition(".")[0])
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _faults(module: nn.Module, plan: Plan, ranks: int) -> Iterator[str]:
    """Yield the modules that their kind would break, or would train wrongly without an error."""
    parts = dict(module.named_modules())
    opaque = [name for name, part in parts.items() if isinstance(part, nn.MultiheadAttention)]
    tied = _tied(module)
    for name, kind in plan.items():
        part, wanted = parts[name], nn.Embedding if kind == "embedding" else nn.Linear
        if kind == "sequence":
            continue
        if any(name == inner or name.startswith(f"{inner}.") for inner in opaque):
            yield (
                f"{name} cannot be split: nn.MultiheadAttention reads the weights of its parts without calling them; "
                "use separate Linears for q, k, v and the output, or leave it whole"
            )
        elif not isinstance(part, wanted):
            yield f"{name} is a {type(part).__name__}, and the kind {kind} is for nn.{wanted.__name__}: leave it whole"
        elif name in tied:
            yield (
                f"the weight of {name} is also the weight of another module, and a split would untie them: leave "
                f"both whole, or give the model two weights"
            )
        elif (
            isinstance(part, nn.Linear)
            and kind == "column"
            and (name.rpartition(".")[2].lower() in _FUSED or part.out_features == 3 * part.in_features)
        ):
            yield (
                f"{name} looks like several matrices in one, and a split would give the ranks the wrong rows: use "
                "separate Linears for q, k and v, or leave it whole"
            )
        elif (size := getattr(part, _SIZES.get(kind, "out_features"))) % ranks:
            fits = [n for n in range(2, size + 1) if size % n == 0][:6]
            axis = {"row": "inputs", "embedding": "rows"}.get(kind, "outputs")
            yield (
                f"parallel.tensor {ranks} does not divide the {size} {axis} of {name}; set one of "
                f"{', '.join(map(str, fits))}, or use parallel.pipeline"
            )


def split(module: nn.Module, plan: Plan, mesh: DeviceMesh, units: Iterable[nn.Module], *, sequence: bool) -> None:
    """Split the module over the one-dimensional mesh. The values must be equal on all ranks.

    `units` are the modules whose forward passes run alone, for example when activations are recomputed: inside each
    unit's forward pass its whole parameters are plain tensors.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # warns of the order of sums
    styles = {name: _style(kind, sequence) for name, kind in plan.items() if kind != "sequence"}
    parallelize_module(module, mesh, styles, src_data_rank=None)
    _share_inputs(module, plan, mesh, _SEQUENCE if sequence else Replicate())
    partial = {part for name, part in module.named_modules() if plan.get(name) == "sequence"}
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one parameter
    whole: list[tuple[nn.Module, str]] = []
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                if parameter not in made:
                    spread = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                    made[parameter] = nn.Parameter(spread, requires_grad=parameter.requires_grad)
                part.register_parameter(name, made[parameter])
                whole.append((part, name))
    unit_of: dict[nn.Module, nn.Module] = {}  # the innermost
    alone = {module, *units}
    for unit in (part for part in module.modules() if part in alone):  # outer before inner
        unit_of |= dict.fromkeys(unit.modules(), unit)
    for unit in set(unit_of.values()):
        _with_plain_parameters(unit, [place for place in whole if unit_of[place[0]] is unit], partial)


def _style(kind: str, sequence: bool) -> ParallelStyle:
    between: Placement = _SEQUENCE if sequence else Replicate()
    if kind in ("column", "head"):
        return ColwiseParallel(input_layouts=between, output_layouts=Replicate() if kind == "head" else None)
    return RowwiseParallel(input_layouts=Replicate() if kind == "embedding" else None, output_layouts=between)


def _share_inputs(module: nn.Module, plan: Plan, mesh: DeviceMesh, layout: Placement) -> None:
    """Distribute the input of several columns, as of q, k and v, once: one transfer of their summed gradients."""
    for prefix, parent in module.named_modules():
        names = {name: f"{prefix}.{name}".lstrip(".") for name, _ in parent.named_children()}
        columns = [parent.get_submodule(name) for name, full in names.items() if plan.get(full) == "column"]
        if len(columns) > 1:
            shared: SharedInput = {}  # at most the newest input
            for column in columns:
                column.register_forward_pre_hook(functools.partial(_distributed, shared, mesh, layout), prepend=True)
            parent.register_forward_hook(lambda *_, shared=shared: shared.clear(), always_call=True)


def _distributed(
    shared: SharedInput, mesh: DeviceMesh, layout: Placement, _column: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    given = args[0] if args else None
    if not isinstance(given, torch.Tensor) or isinstance(given, DTensor):
        return None
    version = 0 if given.is_inference() else given._version
    key = (id(given), version, torch.is_grad_enabled())  # the input is kept, so no other tensor has its id
    if key not in shared:
        shared.clear()
        spread = DTensor.from_local(given, mesh, [layout], run_check=False)
        if not layout.is_replicate():
            spread = spread.redistribute(placements=[Replicate()])
        shared[key] = given, spread
    return shared[key][1], *args[1:]


def _with_plain_parameters(unit: nn.Module, places: list[tuple[nn.Module, str]], partial: set[nn.Module]) -> None:
    """Replace the unit's forward pass: inside, the parameters at `places` are this rank's plain tensors."""
    if not places:
        return
    forward = unit.forward

    @functools.wraps(forward)
    def plain(*args: Any, **kwargs: Any) -> Any:
        before = [(part, name, part._parameters[name]) for part, name in places]
        for part, name, parameter in before:
            if isinstance(parameter, DTensor):
                kinds: list[Placement] = [Partial() if part in partial else Replicate()]
                local: Any = parameter.to_local(grad_placements=kinds)
                part._parameters[name] = local
        try:
            return forward(*args, **kwargs)
        finally:
            for part, name, parameter in before:
                part._parameters[name] = parameter

    unit.forward = plain


@torch.no_grad()
def sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add the gradients of the kind `sequence` over the ranks."""
    for parameter in parameters:
        gradient, wanted = parameter.grad, getattr(parameter, "placements", None)
        if isinstance(gradient, DTensor) and gradient.placements != wanted:
            parameter.grad = gradient.redistribute(placements=wanted)


def explained(error: Exception) -> str | None:
    """Return why a forward pass of split layers failed, and what to change; None for an unrelated error."""
    text = str(error)
    if "mixed torch.Tensor and DTensor" in text:
        return (
            "parallel.tensor: a module's weight is used outside the module, for example by a tied head; give it "
            "the kind `whole` in training.parallel.plan or tensor_plan(model). Or loss uses parts of the model: call "
            "the model itself"
        )
    if any(part in text for part in ("invalid for input of size", "unflatten", "must match the size", "shapes cannot")):
        return (
            f"parallel.tensor: the forward pass failed on parts of layers: {text}; take the sizes of views from the "
            "tensor, for example -1 for the number of heads, and let `tensor` divide the numbers of heads"
        )
    return None


def in_words(module: nn.Module, plan: Plan) -> str:
    """Return which modules are split, and the largest modules that stay whole, each once for all layers."""
    groups: dict[str, list[str]] = {}
    for name, kind in plan.items():
        if kind != "sequence":
            groups.setdefault(kind, []).append(_pattern(name))
    told = "; ".join(f"{kind} {', '.join(dict.fromkeys(names))}" for kind, names in groups.items())
    sizes = Counter[str]()
    for name, part in module.named_modules():
        if plan.get(name, "sequence") == "sequence":
            sizes[_pattern(name)] += sum(parameter.numel() for parameter in part.parameters(recurse=False))
    largest = [name for name, size in sizes.most_common() if size]
    rest = f"; whole on each rank {first_of(largest, 4)}" if largest else ""
    return f"split {told}{rest}"


def _pattern(name: str) -> str:
    """Return the name with its first number, that of the layer, as `*`."""
    return re.sub(r"(?:^|(?<=\.))\d+(?=\.)", "*", name, count=1) or "the model's own parameters"
