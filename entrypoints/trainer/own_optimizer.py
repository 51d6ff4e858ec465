"""A task's own optimizer: the forms that the trainer takes, and the state beside `state` and `param_groups`.

A composite of optimizers, a wrapper with tensors of its own, or a plain class keeps state in its attributes. A save
makes a tree of the attributes, in which tensors and parameters have names; a load fills the same objects. So nothing
is lost that a `state_dict` forgets. The task's `load_state_dict` gets the value of `state_dict` at the save. Generators
are seeded before each step, and have no state to save.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
import traceback
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from ..checkpoints.loader import CheckpointReader
from ..errors import FormError, TaskError
from ..format import first_of
from ..rank import exchange
from .ema import restored
from .generators import is_generator, search, walk
from .optim import put_lr, set_lr
from .strategies.fsdp import reshard

Tree = Any  # a number, a text or None; or a node, [kind, content]
Tensors = dict[str, torch.Tensor]
Names = Mapping[Any, str]  # of the model's parameters

PLAIN = (type(None), bool, int, float, str)
_KEEP: Tree = ["keep", None]  # no state, or an object that is elsewhere in the tree
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque, "set": set}
_OF_SHARDS = str(Path(dtensor.__file__).parent)  # the code of DTensors
_ONE_STEP = (
    "the trainer calls step() once, with the gradients of the global batch: return another optimizer, such as AdamW, "
    "or run the training as a script (`script:` in place of `task:`)"
)


def require_form(optimizer: Any) -> None:
    """Raise FormError if the trainer cannot take a step with the optimizer."""
    name = type(optimizer).__name__
    if lacking := [need for need in ("step", "zero_grad", "param_groups") if not hasattr(optimizer, need)]:
        raise FormError(
            f"optimizer(model, params) returned a {name} without {first_of(lacking, 3)}; return a torch optimizer, or "
            "an object of a class with step(), zero_grad() and the param_groups of all optimizers inside"
        )
    # A scheduler of torch replaces the method by a function that takes any arguments.
    signature = inspect.signature(optimizer.step, follow_wrapped=inspect.ismethod(optimizer.step))
    try:
        signature.bind()
    except TypeError as error:
        raise FormError(f"{name}.step{signature} needs an argument, and {_ONE_STEP}") from error


@contextmanager
def explained(optimizer: Any) -> Iterator[None]:
    """Raise an error of step() as FormError if step() wants a closure, whole parameters or sparse gradients."""
    try:
        yield
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        name = type(optimizer).__name__
        wants = "closure" in inspect.signature(optimizer.step).parameters
        if wants and any(word in str(error) for word in ("closure", "'NoneType' object is not callable")):
            why = f"{name}.step() failed without a closure ({error}), and {_ONE_STEP}"
            raise FormError(why) from error
        if traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_OF_SHARDS):  # else a peer may be lost
            raise FormError(
                f"{name}.step() cannot work on shards of the parameters; set strategy: ddp without `shard`, or return "
                f"an optimizer that works element by element ({type(error).__name__}: {str(error).partition('. ')[0]})"
            ) from error
        if "not support dense gradients" in str(error):
            raise FormError(
                f"{name}.step() got a dense gradient ({error}); create the layer with sparse=True, and leave out "
                "reproducible: strict and compression, which make gradients dense; or return Adam"
            ) from error
        raise


class OwnOptimizer:
    """A task's optimizer, and the optimizers inside."""

    def __init__(
        self, optimizer: Any, names: Names, unable: str | None = None, trained: Sequence[nn.Parameter] = ()
    ) -> None:
        """`unable`: the setting, if any, with which only `state` by parameter can be saved. Raises FormError.

        `trained`: the model's parameters that get gradients.
        """
        require_form(optimizer)
        self.optimizer, self._unable = optimizer, unable
        # Else all state is in the tree: of a plain class, or of a wrapper that does not call super().__init__.
        self.is_torch = hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks")
        pair = [getattr(type(optimizer), name, None) for name in ("state_dict", "load_state_dict")]
        torchs = (None, torch.optim.Optimizer.state_dict, torch.optim.Optimizer.load_state_dict)
        self._has_dict = all(method not in torchs for method in pair)
        self._start, self._outside = Encoder(self, names), _outside(optimizer.step, names)
        self.parts = [part for part in self._start.objects.values() if hasattr(part, "param_groups")]
        outside = [each for each in _schedulers((optimizer, *self.parts)) if id(each) not in self._start.seen]
        if outside:  # that a hook or after_step calls
            optimizer.schedulers_outside = outside
            self._start = Encoder(self, names)
        self.rated = [group for group in self.groups() if group.get("lr") is not None]
        self._lrs, self._set = [float(group["lr"]) for group in self.rated], list[Any]()
        self.generators = search(optimizer)
        self._members = self._parameters()
        grouped = {p for group in self.groups() for p in group["params"]}
        self.left = [p for p in trained if p not in grouped]  # get gradients, which zero_grad() does not clear
        # For the loss scaler, which divides the gradients of param_groups: each parameter once, also those left.
        own = [p for group in optimizer.param_groups for p in group["params"]]
        every, self.scaled = list(dict.fromkeys([*own, *grouped, *trained])), optimizer
        if [*map(id, own)] != [*map(id, every)]:
            self.scaled = SimpleNamespace(step=optimizer.step, param_groups=[{"params": every}])
        if self.has_modes:
            optimizer.train()
        # Of optimizers inside they may be attributes, such as fp32 copies of the weights.
        held = {*map(id, tree_leaves([value for name, value in vars(optimizer).items() if name != "param_groups"]))}
        strangers = [{id(p) for p in ps if p not in names} for ps in (own, grouped)]
        if not strangers[1] <= held or (self.is_torch and strangers[0]):
            raise FormError(
                f"the {type(optimizer).__name__} of optimizer(model, params) changes a tensor that is no parameter of "
                "the model, and no checkpoint would have it: make it an nn.Parameter of the model"
            )
        if unable and (self.parts or not self.is_torch):
            self._refuse(f"{unable} saves only state[p], of one torch optimizer: leave {unable} out, or return one")

    @property
    def has_modes(self) -> bool:
        """Whether it is schedule-free, with weights of their own for an evaluation."""
        return all(callable(getattr(self.optimizer, mode, None)) for mode in ("eval", "train"))

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of all optimizers inside, each once."""
        groups = [group for part in (self.optimizer, *self.parts) for group in part.param_groups]
        return list({id(group): group for group in groups}.values())

    def _parameters(self) -> list[list[int]]:
        """Return the ids of the parameters in each group."""
        return [[id(p) for p in group["params"]] for group in self.groups()]

    def set_lr(self, groups: list[dict[str, Any]], base_lrs: list[float], factor: float) -> float:
        """Set the rates, and return the first. Raises TaskError if they have changed since the last call."""
        now = [_mark(group["lr"]) for group in self.rated]
        if self._set and not set(now) <= set(self._set):  # a wrapper may hand a rate on
            where = f"{type(self.optimizer).__name__}.step(), a scheduler inside, or after_step"
            raise TaskError(f"{where} changes lr, and the training's schedule sets it: leave one of them out")
        lr = set_lr(groups, base_lrs, factor)
        self._set = [_mark(group["lr"]) for group in self.rated]
        return lr

    @contextmanager
    def averaged(self, module: nn.Module) -> Iterator[None]:
        """Let a schedule-free optimizer give the module the weights to evaluate, then restore the weights exactly."""
        with restored(module, [p for group in self.groups() for p in group["params"]]):
            self.optimizer.eval()
            try:
                yield
            finally:
                reshard(module)
                self.optimizer.train()

    def load_lrs(self, trees: dict[str, Any] | None) -> None:
        """Keep this start's rate in groups whose rate was the same at the other start and at the save."""
        then = [float(group["lr"]) for group in self.rated] if trees is None else trees.get("lrs", self._lrs)
        for group, at_start, now in zip(self.rated, then, self._lrs, strict=True):
            if float(group["lr"]) == at_start:
                put_lr(group, now)

    def check(self, names: Names) -> None:
        """Raise TaskError, after the first step, if a save would lose state. Collective."""
        self.saved(names)
        for key, version in _outside(self.optimizer.step, names).items() if not self._has_dict else ():
            if version != self._outside.get(key):
                self._refuse(f"step() keeps tensors in {key[0]}, outside the optimizer: use state[p] or an attribute")

    def saved(self, names: Names) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors by name, and the trees. Collective. Raises TaskError if a resume would lose state."""
        now = Encoder(self, names)
        tree = ["object", {k: v for k, v in now.tree[1].items() if k not in now.plain or v != self._start.plain.get(k)}]
        own = now.node(self.optimizer.state_dict(), "dict") if self._has_dict else None
        tensors = {name: tensor for name, tensor in now.tensors.items() if name.startswith("own.")}
        if not self._has_dict and (late := [place for place in now.objects if place not in self._start.objects]):
            self._refuse(f"step() makes the object {late[0]}: make it in __init__")
        if self._parameters() != self._members:
            self._refuse("its groups have changed: make all groups in optimizer(model, params), with lr 0 until then")
        if now.unnamed != self._start.unnamed:
            where = next(iter(now.unnamed.items() - self._start.unnamed.items()), "?")[0]
            self._refuse(f"step() makes objects the keys of {where}: use parameters or names as keys")
        if self._unable and (held := [name[4:] for name in tensors] or [name for name in tree[1] if name == "state"]):
            self._refuse(f"{self._unable} saves only tensors and numbers in state[p]: leave it out, or move {held[0]}")
        # Whole tensors and rates beside shards are saved once for all ranks, so they must be equal.
        is_sharded = any(isinstance(p, DTensor) for p in names)
        sums = {n: _sum(t) if is_sharded else "" for n, t in tensors.items()}
        rates = {
            f"own.param_groups.{i}.lr": f"{float(group['lr'])}" for i, group in enumerate(self.rated) if is_sharded
        }
        ranks = exchange.gather(sums | rates)
        if differing := [n[4:] for n in ranks[0] | ranks[-1] if len({rank.get(n) for rank in ranks}) > 1]:
            self._refuse(
                f"the ranks differ in {first_of(differing, 4)}: make it like p, by torch.zeros_like(p), or average it"
            )
        return tensors, {"tree": tree, "dict": own, "tensors": now.about, "lrs": self._lrs}

    def load_dict(self, state: Tree, tensors: Tensors, parameters: Tensors) -> None:
        """Call the task's `load_state_dict`, if defined, and keep the groups, which others may share."""
        if state is None or not self._has_dict:
            return
        parts = [part for part in (self.optimizer, *self.parts) if "param_groups" in vars(part)]
        before = [(part, part.param_groups, list(part.param_groups)) for part in parts]
        self.optimizer.load_state_dict(filled(None, state, tensors, parameters))
        for part, listed, groups in before:
            for group, loaded in zip(groups, list(part.param_groups), strict=True):
                group.update(loaded)
            listed[:], part.param_groups = groups, listed

    def _refuse(self, why: str) -> None:
        raise FormError(f"a checkpoint would lose state of the {type(self.optimizer).__name__}: {why}")


class Encoder:
    """The tree of an optimizer; its tensors by name, and about each its like parameter, its shards and its device."""

    def __init__(self, own: OwnOptimizer, names: Names) -> None:
        self._names, self._nodes, root = names, dict[int, Tree](), own.optimizer
        self._by_id = {id(parameter): parameter for parameter in names}
        self.tensors: Tensors = {}
        self.about: dict[str, list[Any]] = {}
        self.objects: dict[str, Any] = {}  # that a load fills, by place
        self.plain: dict[str, Tree] = {}  # attributes without tensors
        self.unnamed: dict[str, int] = {}  # the number of keys that only their position tells, by place
        attributes = dict(vars(root))
        self.seen = {id(root): root}
        if own.is_torch:  # saving.py saves the groups, and tensors and numbers in `state` by the parameter's name
            self.seen |= {id(each): each for each in (root.param_groups, *root.param_groups)}
            is_by_name = [self._by_name(key, values) for key, values in root.state.items()]
            if all(is_by_name):
                del attributes["state"]
        self.tree: Tree = ["object", {}]
        for name, value in _state_last(attributes):
            known = len(self.tensors)
            if (node := self._item(value, "", name)) != _KEEP:
                self.tree[1][name] = node
                if len(self.tensors) == known and name != "state":
                    self.plain[name] = node

    def _by_name(self, key: Any, values: Any) -> bool:
        """Name the tensors in `state` of a parameter; return whether nothing but tensors and numbers is there."""
        if not isinstance(key, torch.Tensor) or key not in self._names or not isinstance(values, dict):
            return False
        tensors = {kind: value for kind, value in values.items() if isinstance(value, torch.Tensor) and is_name(kind)}
        for kind, value in tensors.items():
            self._named(f"optimizer.{self._names[key]}.{kind}", value, key)
        return all(kind in tensors or type(value) in PLAIN for kind, value in values.items())

    def node(self, value: Any, place: str, near: Any = None) -> Tree:
        """Return the node of a value at a place; `near` is the parameter whose key led there."""
        if type(value) in PLAIN:
            return ["id", self._names[self._by_id[value]]] if value in self._by_id else value
        if isinstance(value, torch.Tensor):
            known = ["parameter", self._names[value]] if value in self._names else self._nodes.get(id(value))
            return known or self._named(f"own.{place}", value, near)
        if hasattr(type(value), "__array__"):  # of numpy
            return ["array", self.node(torch.as_tensor(value), place)] if value.ndim else value.item()
        if is_generator(value):
            self.objects[place] = value
            return _KEEP
        if id(value) in self.seen and not isinstance(value, tuple):
            return _KEEP
        self.seen[id(value)] = value
        if isinstance(value, Mapping):
            pairs = []
            for i, (key, item) in enumerate(value.items()):
                part = key if type(key) in PLAIN or id(key) in self._by_id else i
                pairs.append([self._key(key, f"{place}.{i}"), self._item(item, place, part, near)])
            if unnamed := sum(key == _KEEP for key, _ in pairs):
                self.unnamed[place] = unnamed
            return ["dict", pairs]
        for kind, of in _LISTS.items():
            if isinstance(value, of):
                items = [self._item(item, place, i, near) for i, item in enumerate(value)]
                return [kind, items, value.maxlen] if kind == "deque" else [kind, items]
        if not self._has_state(value):
            return _KEEP
        self.objects[place] = value
        slots = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ()) if hasattr(value, n)]
        held = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        nodes = {name: self._item(item, place, name) for name, item in _state_last(held)}
        return ["object", {name: node for name, node in nodes.items() if node != _KEEP}]

    def _key(self, key: Any, place: str) -> Tree:
        """Return the node of a key of a dict; of an object there is only the position."""
        is_known = isinstance(key, torch.Tensor) and (key in self._names or id(key) in self._nodes)
        return self.node(key, place) if is_known or type(key) in PLAIN or isinstance(key, tuple) else _KEEP

    def _item(self, value: Any, place: str, key: Any, near: Any = None) -> Tree:
        """Return the node of an item: its key is an attribute, an index, or what a dict has."""
        if (parameter := self._by_id.get(key if type(key) is int else id(key))) is not None:
            near, key = parameter, self._names[parameter]
        return self.node(value, f"{place}.{key}".lstrip("."), near)

    def _has_state(self, value: Any) -> bool:
        """Return whether the attributes may be state: not of functions, of the model's modules, or of libraries."""
        if isinstance(value, nn.Module) and any(parameter in self._names for parameter in value.parameters()):
            return False
        library = type(value).__module__.partition(".")[0]
        return hasattr(value, "load_state_dict") if library == "torch" else library not in sys.stdlib_module_names

    def _named(self, name: str, tensor: torch.Tensor, near: Any) -> Tree:
        while name in self.tensors:
            name += "~"
        kind = (tensor.shape, isinstance(tensor, DTensor))
        alike = (p for p in ([near] if near is not None else self._names) if (p.shape, isinstance(p, DTensor)) == kind)
        like = next((p for p in alike if p.dim()), None)
        usual = _strides(torch.empty(tensor.shape, device="meta") if like is None else like)
        shards = [getattr(way, "dim", None) for way in tensor.placements] if isinstance(tensor, DTensor) else None
        strides = [] if shards is not None or _strides(tensor) == usual else [_strides(tensor)]
        if name.startswith("own.") or (like is None and shards is not None) or strides:  # else it is like the parameter
            self.about[name] = [None if like is None else self._names[like], shards, tensor.device.type, *strides]
        self.tensors[name] = tensor
        self._nodes[id(tensor)] = node = ["tensor", name]
        return node


def is_name(key: Any) -> bool:
    """Return whether `state[p]` may be saved by this key, behind the parameter's name."""
    return isinstance(key, str) and "." not in key


def _state_last(attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the attributes, so that the tensors that are keys of `state` have names by then."""
    return sorted(attributes.items(), key=lambda item: item[0] == "state")


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy; () for shards. Products of matrices have other bits with other strides."""
    return () if isinstance(tensor, DTensor) else torch.empty_like(tensor, device="meta").stride()


def filled(live: Any, node: Tree, tensors: Tensors, parameters: Mapping[str, Any]) -> Any:
    """Return the value of a node: `live` with the node's content if `live` is of the node's kind, else a new value."""

    def of(live: Any, node: Tree) -> Any:
        return filled(live, node, tensors, parameters)

    if not isinstance(node, list):
        return node
    kind, content, *more = node
    if kind in ("parameter", "id"):
        return parameters[content] if kind == "parameter" else id(parameters[content])
    if kind == "tensor":
        value = tensors[content]
        if not isinstance(live, torch.Tensor) or (live.shape, live.dtype) != (value.shape, value.dtype):
            return value
        if live.stride() == _strides(live) != value.stride():
            return value
        live.detach().copy_(value)  # others may share it
        tensors[content] = live  # it may be a key of `state`
        return live
    if kind == "array":
        return of(None, content).numpy()
    if kind == "dict":
        old = live if isinstance(live, dict) else {}
        was = list(old)
        pairs = [(was[i] if key == _KEEP else of(None, key), value) for i, (key, value) in enumerate(content)]
        new = {key: of(old.get(key), value) for key, value in pairs if value != _KEEP or key in old}
        old.clear()
        old.update(new)
        return old
    if kind in _LISTS:
        here = list(live)[: len(content)] if isinstance(live, _LISTS[kind]) else []
        items = [of(was, item) for was, item in itertools.zip_longest(here, content)]
        if not isinstance(live, list | deque):
            return type(live)(*items) if hasattr(live, "_fields") else _LISTS[kind](items, *more)
        live.clear()
        live.extend(items)
    elif kind == "object" and live is None:
        raise TaskError(
            "the checkpoint's optimizer has other objects inside than this optimizer; return the same form from "
            "optimizer(model, params), or start from step 0 with checkpoint.resume: never"
        )
    elif kind == "object":
        for name, item in content.items():
            object.__setattr__(live, name, of(getattr(live, name, None), item))
    return live


def _outside(step: Any, names: Names) -> dict[tuple[str, int], int]:
    """Return the versions, by place and object, of tensors but parameters in globals and closures that step() uses."""
    function = inspect.unwrap(getattr(step, "__func__", step))
    kinds = (types.FunctionType, dict, *_LISTS.values())
    held = walk({"": function}, enters=lambda value: isinstance(value, kinds))
    tensors = ((place, t) for place, t in held if isinstance(t, torch.Tensor) and t not in names)
    return {(place.partition("[")[0], id(t)): t._version for place, t in tensors}


def _schedulers(parts: Sequence[Any]) -> list[LRScheduler]:
    """Return the learning-rate schedulers that change these optimizers."""
    made = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    return [each for each in made if any(vars(each).get("optimizer") is part for part in parts)]


def _mark(lr: Any) -> Any:
    return (id(lr), lr._version) if isinstance(lr, torch.Tensor) else lr


def _sum(tensor: torch.Tensor) -> str:
    """Return a sum of a whole tensor's elements, weighted by place, to compare on the ranks; the text is short."""
    if isinstance(tensor, DTensor):
        return ""
    values = tensor.detach().flatten().double()
    return f"{float(values @ torch.arange(len(values), dtype=values.dtype, device=values.device).cos()):.6g}"


def room(reader: CheckpointReader, name: str, about: list[Any], parameters: Mapping[str, Any]) -> torch.Tensor:
    """Return room for a tensor of the state: like the parameter of the same shape, if any."""
    like, shards, place, *strides = about
    shape, dtype, parameter = reader.shapes[name], reader.dtypes[name], parameters.get(like)
    some = next(iter(parameters.values()))
    if strides and not isinstance(parameter, DTensor):
        return torch.empty_strided(shape, strides[0], dtype=dtype, device="cpu" if place == "cpu" else some.device)
    if shape and parameter is not None and tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    mesh = next((p.device_mesh for p in parameters.values() if isinstance(p, DTensor)), None)
    if shards is not None and mesh is not None:
        ways = [Replicate() if dim is None else Shard(dim) for dim in shards]
        ways = ways if len(ways) == mesh.ndim else [Replicate()] * mesh.ndim
        return dtensor.empty(shape, dtype=dtype, device_mesh=mesh, placements=ways)
    return torch.empty(shape, dtype=dtype, device="cpu" if place == "cpu" else some.device)
