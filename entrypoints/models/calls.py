"""The call of a model as JSON: the tensors of arguments and result by name, with the sides that vary between batches.

A task defines `loss(model, batch)`: a real call alone shows the model's arguments. `describe` turns the arguments
into a form without tensors, for config.json; `build` makes the arguments again from tensors by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..records import Record

Tensors = dict[str, torch.Tensor]
Form = dict[str, Any]


@dataclass(frozen=True)
class TensorSlot(Record):
    """A tensor of the call or the result."""

    name: str
    dtype: str
    """Torch's name, such as float32."""
    shape: tuple[int | None, ...]
    """The sides; None for a side that differs between batches."""
    is_batched: bool
    """Whether the first side is the number of samples."""


def describe(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Form, Tensors]:
    """Return the call's form and its tensors by name. Raises TypeError for an argument without a JSON form."""
    tensors: Tensors = {}
    # The positional arguments have the names of the parameters of `forward`.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [name for name, each in inspect.signature(model.forward).parameters.items() if each.kind in kinds]
    names = [known[i] if i < len(known) else f"arg{i}" for i in range(len(args))]
    listed = [_form(value, name, tensors) for name, value in zip(names, args, strict=True)]
    return {"args": listed, "kwargs": {name: _form(value, name, tensors) for name, value in kwargs.items()}}, tensors


def build(form: Form, tensors: Mapping[str, Any], *, constants: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs of a call with the tensors, or with any values in the tensors' places.

    `constants`: with the plain values of the recorded call; otherwise None in the places of plain values.
    """
    args = tuple(_value(each, tensors, constants) for each in form["args"])
    return args, {name: _value(each, tensors, constants) for name, each in form["kwargs"].items()}


def named(value: Any, name: str = "output") -> Tensors:
    """Return the tensors in a model's result by name, in order, without plain values."""
    return dict(_named(value, name))


def slots(calls: Mapping[int, Tensors]) -> list[TensorSlot]:
    """Return the slots from the tensors of several calls by number of samples. Raises TypeError if the calls differ."""
    first, *others = calls.values()
    if any(list(other) != list(first) for other in others):
        raise TypeError("the arguments or results of the model are not the same tensors at each number of samples")
    found = []
    for name, tensor in first.items():
        shapes = [tuple(tensors[name].shape) for tensors in calls.values()]
        if any(len(shape) != tensor.dim() for shape in shapes):
            raise TypeError(f"the number of dimensions of {name} depends on the number of samples")
        sides = tuple(side if len({shape[i] for shape in shapes}) == 1 else None for i, side in enumerate(tensor.shape))
        is_batched = all(shape[:1] == (size,) for shape, size in zip(shapes, calls, strict=True))
        found.append(TensorSlot(name, str(tensor.dtype).removeprefix("torch."), sides, is_batched))
    return found


def _form(value: Any, name: str, tensors: Tensors) -> Form:
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_form(each, f"{name}.{i}", tensors) for i, each in enumerate(value)]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _form(each, f"{name}.{key}", tensors) for key, each in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise TypeError(
        f"the model's argument {name} is a {type(value).__name__}, not a tensor, a list or a dict of tensors"
    )


def _value(form: Form, tensors: Mapping[str, Any], constants: bool) -> Any:
    ((kind, inner),) = form.items()
    if kind == "tensor":
        return tensors[inner]
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(_value(each, tensors, constants) for each in inner)
    if kind == "dict":
        return {key: _value(each, tensors, constants) for key, each in inner.items()}
    return inner if constants else None


def _named(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from _named(each, f"{name}.{i}")
