"""The entries of `capacity.try`: the keys that an entry may change, and the faults and values of the candidates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..backend_table import DEFAULT
from ..errors import Fault
from . import fields, schema
from .yamlfile import YamlNode, given

# What a candidate may change: where and on what the job runs. What it trains is the same in all.
_CHANGEABLE = (
    *("backend", "image", "setup", "resources", "env", "inputs", "outputs", "limits", "checkpoint.uri"),
    *("checkpoint.mirror", "distributed.nproc_per_node", "training.micro_batch_size"),
)


def of_tree(root: YamlNode) -> list[dict[str, YamlNode]]:
    """Return the keys of each entry that a candidate may change; an entry of a wrong form has no keys."""
    return [{key: each for key, each in entry.items() if not _problem(key, root)} for entry in _written(root)]


def faults_of(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for each key of an entry that no candidate may change."""
    for index, entry in enumerate(_written(root)):
        for key, member in entry.items():
            if problem := _problem(key, root):
                yield Fault(problem[0], f"{name_of(index)}.{key}", member.key, problem[1])


def name_of(index: int) -> str:
    """Return the name of an entry, for messages."""
    return f"capacity.try[{index}]"


def named(fault: Fault, index: int, changed: Iterable[str]) -> Fault:
    """Return the fault of a candidate at the key that the entry changes, or for another key at the entry."""
    name, message, hint = name_of(index), fault.message, fault.hint
    if is_own := any(f"{fault.key}.".startswith(f"{key}.") for key in changed):
        name = f"{name}.{fault.key}"
    elif fault.key:
        message += f" ({fault.key})"
    if "exclude each other" in message:
        hint += f"; `{'KEY' if is_own else fault.key}: null` in the entry takes the file's away"
    return replace(fault, message=message, key=name, place=None, hint=hint, also=())


def repeated(index: int, data: Mapping[str, Any], seen: dict[str, int]) -> Iterator[Fault]:
    """Yield a fault for data in `seen`, apart from other backends' blocks; else add the data and the number."""
    own = data.get("backend", DEFAULT)
    counting = {key: value for key, value in data.items() if key == own or not schema.blocks_of([key])}
    if (first := seen.setdefault(json.dumps(counting, sort_keys=True), index)) != index:
        hint = "remove the entry, or change a key that counts on this backend; each round asks all candidates again"
        yield Fault(f"the same candidate as {name_of(first)}", hint=hint)


def completed(root: YamlNode, candidates: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries with the candidates' values, null for a default, for each key that any entry changes."""
    keys = dict.fromkeys(key for entry in of_tree(root) for key in entry)
    inputs = given(root, "inputs") if "backend" in keys else None  # may have a place for each backend
    if inputs is not None and isinstance(inputs.value, dict):
        keys |= {f"inputs.{name}": None for name, each in inputs.value.items() if isinstance(each.value, dict)}
    return [{key: value_at(data, key) for key in keys} for data in candidates]


def alike(config: schema.JobConfig, settings: Iterable[str]) -> schema.JobConfig:
    """Return the config, whose candidates all have the values that the settings `a.b=value` give."""
    given_now = {each.partition("=")[0].strip() for each in settings}
    if config.capacity is None or not given_now:
        return config
    entries = tuple({key: each[key] for key in each if key not in given_now} for each in config.capacity.entries)
    return config.model_copy(update={"capacity": config.capacity.model_copy(update={"try": entries})})


def value_at(data: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key of a config's data; None if not set."""
    value: Any = data
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _written(root: YamlNode) -> list[dict[str, YamlNode]]:
    node = given(root, "capacity", "try")
    found = node.value if node is not None and isinstance(node.value, tuple) else ()
    return [each.value if isinstance(each.value, dict) else {} for each in found]


def _problem(key: str, root: YamlNode) -> tuple[str, str] | None:
    """Return the message and the hint for a key that no candidate may change."""
    field = fields.field_at(tuple(key.split(".")))
    if field is not None and fields.section(field) is not None and not fields.is_list(field):
        return f"`{key}` is a section", f"name a key of the section, as in `{key}.NAME`"
    names = (*_CHANGEABLE, *schema.blocks_of([*root.value, key.split(".")[0]]))
    if any(f"{key}.".startswith(f"{name}.") for name in names):
        return None
    return f"`{key}` cannot differ between candidates", f"an entry may change {', '.join(names)}"
