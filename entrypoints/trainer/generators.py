"""Random generators that a task keeps of its own, beside the global ones of torch, random and numpy."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from .search import walk

Form = tuple[Any, ...]  # whether the object was used, and the types of its attributes
_known: dict[int, tuple[Any, tuple[Any, ...], set[Form]]] = {}  # by the id of an object, which the reference keeps


def own_generators(root: Any, *, is_used: bool = False) -> tuple[Any, ...]:
    """Return the generators that the object holds, or that its code names.

    The search is made at the first call, at the first call after a use, for attributes of other types than before, and
    after `forget`.
    """
    form = (is_used, *map(type, getattr(root, "__dict__", {}).values()))
    _, found, forms = _known.get(id(root), (None, (), set[Form]()))
    if form not in forms:
        if len(_known) >= 16:  # the functions and splits of a job, with room
            _known.clear()
        numpy = sys.modules.get("numpy")
        shared = [torch.default_generator, random._inst, numpy and numpy.random.mtrand._rand]
        parts = walk({"": root}, skip=shared, enters=lambda value: not is_generator(value))
        found = tuple(value for _, value in parts if is_generator(value))
        _known[id(root)] = (root, found, forms | {form})
    return found


def forget(root: Any) -> None:
    """Let the next call of `own_generators` search anew."""
    _known.pop(id(root), None)


def is_generator(value: Any) -> bool:
    """Return whether the value is a generator that can be seeded."""
    numpy, kind = sys.modules.get("numpy"), type(value)  # isinstance would ask a proxy for the class of its object
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    return issubclass(kind, kinds) and not issubclass(kind, random.SystemRandom)


def reseed(generator: Any, value: int) -> None:
    """Seed a generator in place with 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(value).state
    else:  # numpy's RandomState takes 32 bits
        generator.seed(value if isinstance(generator, random.Random) else value & 0xFFFFFFFF)


def draw(generator: Any) -> float:
    """Return a number from the generator."""
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator, device=generator.device).item()
    return float(generator.random())
