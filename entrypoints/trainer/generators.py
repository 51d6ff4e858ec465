"""Random generators that a task keeps of its own, beside the global ones of torch, random and numpy."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_MOST, _MOST_PARTS = 10_000, 256  # objects of a search, which takes 30 ms at most, and parts of one container
_PLAIN = (str, bytes, int, float, complex, type(None), torch.Tensor, types.ModuleType)
_known: dict[int, tuple[Any, tuple[Any, ...]]] = {}  # by the object's id, which the reference keeps in use


def own_generators(root: Any) -> tuple[Any, ...]:
    """Return the generators that the object holds, or that its code names: a search at the first call.

    Attributes, containers, closures and globals of functions count. Globals and classes of installed packages do not:
    their generators may serve to name files.
    """
    if id(root) not in _known:
        if len(_known) >= 8:  # the splits of a job, with room
            _known.clear()
        _known[id(root)] = (root, tuple(_search(root)))
    return _known[id(root)][1]


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


def _search(root: Any) -> Iterator[Any]:
    numpy = sys.modules.get("numpy")
    shared = [torch.default_generator, random._inst, numpy and numpy.random.mtrand._rand]
    seen: dict[int, Any] = {id(each): each for each in shared}  # the references keep the ids in use
    todo = deque([root])
    while todo and len(seen) < _MOST:
        value = todo.popleft()
        kind = type(value)
        if issubclass(kind, _PLAIN) or hasattr(kind, "tobytes") or id(value) in seen:
            continue
        seen[id(value)] = value
        if is_generator(value):
            yield value
        else:
            todo.extend(_parts(value, kind))


def _parts(value: Any, kind: type) -> Iterable[Any]:
    """Return the objects that a value refers to, as far as they may hold a generator of the task's."""
    if issubclass(kind, types.FunctionType):
        return _of_function(value)
    if issubclass(kind, type) and _is_library(str(value.__module__)):
        return ()
    parts = value if kind in (list, tuple) else value.values() if kind is dict else gc.get_referents(value)
    return itertools.islice(parts, _MOST_PARTS)


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    known, names = function.__globals__, set(_names(function.__code__))
    yield from (part for part in gc.get_referents(function) if part is not known)  # closure, defaults, what it wraps
    for value in () if _is_library(str(function.__module__)) else map(known.get, names):
        yield value
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
            yield from map(vars(value).get, names)


def _names(code: types.CodeType) -> Iterator[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))  # lambdas and comprehensions
    return itertools.chain(code.co_names, *map(_names, inner))


def _is_library(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] in sys.stdlib_module_names or "site-packages" in file or "dist-packages" in file
