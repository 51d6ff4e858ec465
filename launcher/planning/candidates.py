"""The candidates of a job: its config under each entry of `capacity.try`, their order, and the faults of all; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .. import backend as backends
from ..errors import BudgetError, ConfigError, Fault

if TYPE_CHECKING:
    from ..config.schema import JobConfig

S = TypeVar("S")
T = TypeVar("T")


def candidates(config: JobConfig) -> tuple[JobConfig, ...]:
    """Return the config under each entry of `capacity.try`, in the entries' order; the config itself without entries.

    A loaded config has an entry's value, or the file's, for each key that any entry changes, null for a default. So the
    candidates of each candidate are the same, and the number of an entry names a candidate of a stored job too.
    """
    if config.capacity is None:
        return (config,)
    data = config.model_dump(mode="json", exclude_defaults=True)
    return tuple(_under(data, entry) for entry in config.capacity.entries)


def _under(data: Mapping[str, Any], entry: Mapping[str, Any]) -> JobConfig:
    """Return the config of the data, without defaults, with the values of an entry."""
    from ..config import schema  # `--help` reads no config

    for key, value in entry.items():
        data = _with(data, key.split("."), value)
    return schema.model_of(data).model_validate(data)


def _with(section: Mapping[str, Any], steps: Sequence[str], value: Any) -> dict[str, Any]:
    """Return the section with a value at the path; null unsets the key, and a section without keys goes too."""
    step, *rest = steps
    inner = (_with(section.get(step) or {}, rest, value) or None) if rest else value
    return {key: each for key, each in {**section, step: inner}.items() if key != step or inner is not None}


def joined(configs: Sequence[JobConfig], gpus: Sequence[int]) -> Iterator[tuple[int, JobConfig]]:
    """Yield the config of each request with the number of its first candidate; `gpus`: of each candidate's machine.

    Neighbours that differ by their machine type alone, with as many GPUs, become one request with a list of types, if
    the platform itself moves from a type without machines to the next.
    """
    at = 0
    while at < len(configs):
        first, backend = configs[at], backends.load(configs[at].backend)
        types = [str(first.resources.instance_type)]
        most = backend.types_at_once(first) if isinstance(backend, backends.ListsTypes) else 1
        for each, count in zip(configs[at + 1 : at + most], gpus[at + 1 : at + most], strict=True):
            name = each.resources.instance_type or types[0]
            if "," in f"{types[0]}{name}" or name in types or count != gpus[at] or _of_type(each, types[0]) != first:
                break
            types.append(name)
        yield at, first if len(types) == 1 else _of_type(first, ",".join(types))
        at += len(types)


def _of_type(config: JobConfig, instance_type: str) -> JobConfig:
    resources = config.resources.model_copy(update={"instance_type": instance_type})
    return config.model_copy(update={"resources": resources})


def of_all(
    config: JobConfig, configs: Iterable[tuple[int, S]], ask: Callable[[S], T], *, needs_all: bool = True
) -> list[T]:
    """Return the result of `ask` for each candidate. Raises ConfigError with the faults of all candidates.

    A fault of a candidate alone stands at its entry, with the key that the entry changes; a fault of all at its own
    key. Raises BudgetError if money alone is short; unless `needs_all`, such candidates are left out while others stay.
    """
    from ..config.entries import name_of  # `--help` reads no config

    results, faults, poor = list[T](), dict[Fault, list[int]](), list[tuple[int, BudgetError]]()
    for index, each in (known := list(configs)):
        try:
            results.append(ask(each))
        except ConfigError as error:
            if error.where:
                raise
            for fault in error.faults:
                faults.setdefault(fault, []).append(index)
        except BudgetError as error:
            poor.append((index, error))
    if poor and not faults and (needs_all or not results):
        index, first = poor[0]
        first.message = f"{name_of(index)}: {first.message}" if len(known) > 1 else first.message
        raise first
    if faults:
        raise ConfigError([each for fault, at in faults.items() for each in _named(config, fault, at, len(known))])
    return results


def _named(config: JobConfig, fault: Fault, at: Sequence[int], count: int) -> list[Fault]:
    from ..config.entries import named, value_at

    if len(at) == count or config.capacity is None:
        return [fault]
    file = config.model_dump(mode="json", exclude_defaults=True)
    tried = {index: config.capacity.entries[index] for index in at}
    new = {i: [key for key, value in tried[i].items() if value != value_at(file, key)] for i in at}
    return [named(fault, index, new[index]) if new[index] else fault for index in at]
