"""What a task's functions and modules refer to: random generators of their own, and state beside the model."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_MOST, _AT_ONCE = 20_000, 256  # parts of a search, which takes 30 ms at most, and of an object before the next object
_PLAIN = (str, bytes, int, float, complex, type(None), torch.Tensor, types.ModuleType)
_DICTS = (dict, OrderedDict, defaultdict)
_MEMBERS = ("_parameters", "_buffers", "_modules")
Part = tuple[str, Any]  # the place, and the value there; the place of a part of no name is that of the whole
Form = tuple[Any, ...]  # whether the object was used, and the types of its attributes
_known: dict[int, tuple[Any, tuple[Any, ...], set[Form]]] = {}  # by the id of an object, which the reference keeps


def search(root: Any) -> tuple[Any, ...]:
    """Return the generators that the object holds, or that its code names."""
    numpy = sys.modules.get("numpy")
    shared = [torch.default_generator, random._inst, numpy and numpy.random.mtrand._rand]
    parts = walk({"": root}, skip=shared, enters=lambda value: not is_generator(value))
    return tuple(value for _, value in parts if is_generator(value))


def own_generators(root: Any, *, is_used: bool = False) -> tuple[Any, ...]:
    """Return the result of a search at the first call, at the first call after a use, or after `forget`.

    An object whose attributes have other types than before is searched anew.
    """
    form = (is_used, *map(type, getattr(root, "__dict__", {}).values()))
    _, found, forms = _known.get(id(root)) or (None, (), set[Form]())
    if form not in forms:
        if len(_known) >= 16:  # the functions and splits of a job, with room
            _known.clear()
        found = search(root)
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


def walk(
    roots: Mapping[str, Any], skip: Iterable[Any] = (), enters: Callable[[Any], bool] = lambda _: True
) -> Iterator[Part]:
    """Yield what the objects hold or their code names, the nearest first; numbers, texts and tensors at each place.

    Attributes, containers, closures and globals of functions count. Globals and classes of installed packages do not:
    they are no state of the task, and their generators may serve to name files. `enters`: whether to look inside.
    """
    seen = {id(each): each for each in skip}  # the references keep the ids in use
    todo = deque([("", iter(roots.items()))])
    left = _MOST
    while todo and left > 0:
        place, parts = todo.popleft()
        some = list(itertools.islice(parts, _AT_ONCE))
        left -= len(some)
        for name, value in some:
            at, kind = place + name if name[:1] in (".", "[", "") else name, type(value)
            if issubclass(kind, _PLAIN) or hasattr(kind, "tobytes"):
                if name:
                    yield at, value
            elif id(value) not in seen:
                seen[id(value)] = value
                yield at, value
                if enters(value):
                    todo.append((at, _parts(value, kind)))
        if len(some) == _AT_ONCE:
            todo.append((place, parts))


def _parts(value: Any, kind: type) -> Iterator[Part]:
    if issubclass(kind, types.FunctionType):
        return _of_function(value)
    if kind in (list, tuple, deque):  # copies of deques and dicts, which others may change meanwhile
        return ((f"[{number}]", part) for number, part in enumerate(list(value) if kind is deque else value))
    if kind in _DICTS:
        return ((f"[{key!r}]" if type(key) in (str, int) else "[]", part) for key, part in list(value.items()))
    if issubclass(kind, type) and is_library(str(value.__module__)):
        return iter(())
    own = getattr(value, "__dict__", {})
    held = dict(own)
    for members in map(held.pop, _MEMBERS) if issubclass(kind, nn.Module) else ():
        held |= members
    named = ((f".{name}", part) for name, part in held.items() if type(part) not in _DICTS or part)
    others = value.__bases__ if issubclass(kind, type) else gc.get_referents(value)
    return itertools.chain(named, (("", part) for part in others if part is not own))


def _of_function(function: types.FunctionType) -> Iterator[Part]:
    known, names = function.__globals__, set(_names(function.__code__))
    scopes = (id(known), id(getattr(function, "__builtins__", None)))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from ((name, value) for value in gc.get_referents(cell))
    yield from (("", part) for part in gc.get_referents(function) if id(part) not in scopes)  # defaults, what it wraps
    for name in () if is_library(str(function.__module__)) else names:
        value = known.get(name)
        yield name, value
        if isinstance(value, types.ModuleType) and not is_library(value.__name__):
            yield from ((f"{value.__name__}.{inner}", vars(value).get(inner)) for inner in names)


def _names(code: types.CodeType) -> Iterator[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))  # lambdas and comprehensions
    return itertools.chain(code.co_names, *map(_names, inner))


@functools.cache
def is_library(module: str) -> bool:
    """Return whether the module is of the standard library or of an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] in sys.stdlib_module_names or "site-packages" in file or "dist-packages" in file
