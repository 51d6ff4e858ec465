"""The entries of `capacity.try`: the faults of each, and the file's values for the keys that an entry leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import Fault
from . import fields, schema
from .schemafaults import key_hint
from .yamlfile import KeyPath, MappingEntry, YamlNode, given

if TYPE_CHECKING:
    from ..errors import Place
    from .schema import JobConfig

KEY = "capacity.try"
# What a candidate may change: where and on what the job runs. What it trains is the same in all.
_CHANGEABLE = (
    *("backend", "image", "setup", "resources", "env", "inputs", "outputs", "limits", "checkpoint.uri"),
    *("checkpoint.mirror", "distributed.nproc_per_node", "training.micro_batch_size"),
)
_FREE = ("env", "inputs", "outputs")  # sections whose keys the user names


def keys_fault(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for each key of an entry that no candidate can change, and for `capacity` of a wrong form."""
    for index, entry in _entries(root):
        for key, member in entry.items():
            if problem := _unchangeable(key, root):
                yield Fault(problem[0], name_of(index, key), member.place, problem[1])


def name_of(index: int, key: str = "") -> str:
    """Return the name of an entry, or of its key, for messages."""
    return f"{KEY}[{index}]" + (f".{key}" if key else "")


def completed(
    root: YamlNode,
    graft: Callable[[YamlNode, KeyPath, KeyPath, YamlNode, Place], YamlNode],
    check: Callable[[YamlNode], tuple[JobConfig | None, list[Fault]]],
    before: Sequence[Fault],
) -> tuple[list[dict[str, Any]], list[Fault]]:
    """Return the entries with a value for each key that any entry changes, and the faults of the candidates.

    `graft` returns the tree with a value at a path, `check` a tree's config and faults. `before`: the faults of the
    file as it stands, which are no faults of an entry.
    """
    known = {(fault.message, fault.key) for fault in before}
    configs, faults, keys = [], list[Fault](), dict[str, None]()
    for index, entry in _entries(root):
        tree, changed = root, {key: each for key, each in entry.items() if not _unchangeable(key, root)}
        keys |= dict.fromkeys(changed)
        for key, member in changed.items():
            tree = graft(tree, (), tuple(key.split(".")), member.node, member.place)
        config, more = check(tree)
        faults += [placed(fault, root, index) for fault in more if (fault.message, fault.key) not in known]
        configs.append({} if config is None else config.model_dump(mode="json", exclude_defaults=True))
    inputs = given(root, "inputs") if "backend" in keys else None  # may have a place for each backend
    if inputs is not None and isinstance(inputs.value, dict):
        keys |= {f"inputs.{name}": None for name, each in inputs.value.items() if isinstance(each.node.value, dict)}
    return [{key: value_at(data, key) for key in keys} for data in configs], faults


def value_at(data: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key of a config's data; None if not set."""
    value: Any = data
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def placed(fault: Fault, root: YamlNode, index: int) -> Fault:
    """Return the fault of a candidate at the entry's key; at the entry if the fault is of another key."""
    entry = dict(_entries(root)).get(index, {})
    places = (fault.place, *fault.also)
    own = next((key for key in entry if f"{fault.key}.".startswith(f"{key}.") or entry[key].place in places), None)
    if own is not None:
        null = ", and take the file's away by `KEY: null` in the entry" if "exclude each other" in fault.message else ""
        return replace(fault, key=name_of(index, own), place=entry[own].place, hint=fault.hint + null, also=())
    node = given(root, "capacity", "try", index)
    message = f"{fault.message} ({fault.key})" if fault.key else fault.message
    return replace(fault, message=message, key=name_of(index), place=node.place if node else None, also=())


def _entries(root: YamlNode) -> Iterator[tuple[int, dict[str, MappingEntry]]]:
    node = given(root, "capacity", "try")
    for index, entry in enumerate(node.value if node is not None and isinstance(node.value, tuple) else ()):
        if isinstance(entry.value, dict):
            yield index, entry.value


def _unchangeable(key: str, root: YamlNode) -> tuple[str, str] | None:
    """Return the message and the hint for a key that no candidate can change."""
    steps = tuple(key.split("."))
    unknown = f"unknown key `{key}`", key_hint(steps[-1], steps)
    changeable = (*_CHANGEABLE, *schema.blocks_of([*root.value, steps[0]]))
    if not any(f"{key}.".startswith(f"{name}.") for name in changeable):
        if fields.field_at(steps) is None:
            return unknown
        return f"`{key}` cannot differ between candidates", f"an entry may change {', '.join(changeable)}"
    field = fields.field_at(steps)
    if steps[0] in _FREE and len(steps) == 2:
        return None
    if field is None:
        return unknown
    if fields.section(field) is not None and not fields.is_list(field):
        return f"`{key}` is a section", f"name a key of the section, as in `{key}.NAME`"
    return None
