"""The rules of a vendor's request, as a table, and a check of a request against the table.

The tables are the backends' rules.json, and rules_serving.json for the requests of an endpoint, written by
tools/*_table.py from the vendors' own packages. Each table has `shapes`, rules by name, and the name of the `root`.
request_keys.tsv has the config's key for each part of a request.
A rule is a mapping, the name of a shape, or only a type.

    type                           object choice either map list string integer int64 number boolean any
    members, required, read_only   of an object: rules by name; names; names
    by, cases                      of a choice: the field that names the kind; rules by kind
    of, key                        rules of a list's items, or of a map's values and names; of `either`: a list of rules
    min, max                       of a number, or of the length of a text or a list
    pattern, said                  of a whole text; the pattern's meaning in words
    enum, fold                     words; `lower` or `snake`: the conversion of a word before the lookup
    nullable                       null is valid, too
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..errors import Fault
from ..text import addresses

if TYPE_CHECKING:
    from cloudtrain.entrypoints.contract import JobSpec

    from ..config.schema import JobConfig

Found = tuple[str, str, bool]  # path in the request, message, whether only a warning
Rule = str | dict[str, Any]

# The name of each type in messages, and its Python types after JSON; protobuf's JSON has int64 as text or a number.
_TYPES: dict[str, tuple[str, Any]] = {
    "object": ("a mapping", Mapping),
    "choice": ("a mapping", Mapping),
    "map": ("a mapping", Mapping),
    "list": ("a list", list),
    "string": ("a string", str),
    "boolean": ("true or false", bool),
    "integer": ("an integer", int),
    "int64": ("an integer", (int, str)),
    "number": ("a number", (int, float)),
    "any": ("anything", object),
}
_NUMBERS = ("integer", "int64", "number")
# The name of a container image. Source: github.com/distribution/reference, regexp.go.
IMAGE = re.compile(
    r"([a-zA-Z0-9.-]+(:\d+)?/)?[a-z0-9]+((\.|_|__|-+|/)[a-z0-9]+)*(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_SHOWN = 80  # characters of a wrong value


@dataclass(frozen=True)
class Table:
    """Rules with words for messages: `thing` is the name of a request, `vendor` the name of the vendor.

    `growing` names the enumerations that the vendor extends: an unknown word may be newer than the table.
    """

    root: str
    shapes: Mapping[str, dict[str, Any]]
    thing: str
    vendor: str
    growing: tuple[str, ...] = ()


@functools.lru_cache(maxsize=8)
def read(backend: str, thing: str, vendor: str, *growing: str, file: str = "rules.json") -> Table:
    """Return the table in the file of the backend's folder."""
    rules = json.loads(_text(backend, file))
    return Table(rules["root"], rules["shapes"], thing, vendor, growing)


def violations(table: Table, value: Any, shape: str = "") -> Iterator[Found]:
    """Yield each breach of the table by a request, or by a value with the shape `shape`."""
    yield from _value(table, shape or table.root, value, "")


def meant(word: Any, known: Iterable[Any]) -> str:
    """Return `; did you mean ...?` if a known word has a similar spelling, else ""."""
    names = [str(each) for each in known]
    same = [name for name in names if _letters(name) == _letters(str(word))]
    close = same or get_close_matches(str(word), names, 1)
    return f"; did you mean `{close[0]}`?" if close else ""


@functools.cache
def regions(backend: str) -> dict[str, str]:
    """Return the regions of regions.txt in the backend's folder, each with the rest of its line."""
    lines = _text(backend, "regions.txt").splitlines()
    return {name: rest for name, _, rest in (line.partition(" ") for line in lines) if name != "#"}


def unknown_region(backend: str, key: str, region: str | None, as_of: str) -> Fault | None:
    """Return a warning for an unknown region, with similar names. Clouds add regions, so the region may still exist.

    `key`: the block's key that sets the region. `as_of`: the date of the list of regions.
    """
    if region is None or region in regions(backend):
        return None
    letters = _sorted_letters(region)  # `us-east-1` is `eastus` at another cloud
    known = sorted(regions(backend))
    turned = [name for name in known if _sorted_letters(name) == letters]
    near = turned or get_close_matches(region, known, 3, 0.6)
    hint = f"did you mean {' or '.join(f'`{each}`' for each in near)}?" if near else "look for a typing error"
    when = f"{'on' if '-' in as_of else 'in'} {as_of}"  # a day, or a year
    message = f"no region `{region}` was known {when}, so the platform may refuse it"
    return Fault(message, key=f"{backend}.{key}", hint=hint, is_warning=True)


def places(checkpoint: str | None, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> dict[str, str]:
    """Return the URIs, or paths, of a job's files by the config's keys, without data that goes along."""
    found = {"checkpoint.uri": checkpoint or ""}
    found |= {f"inputs.{name}": uri for name, uri in inputs.items() if not addresses.is_beside(uri)}
    found |= {f"outputs.{name}": uri for name, uri in outputs.items()}
    return {key: uri for key, uri in found.items() if uri}


def own_places(config: JobConfig, job_id: str, before: Mapping[str, Any] | None = None) -> JobConfig:
    """Return the config with a place of the job's own, URI/JOB, in `checkpoint.uri` and in each of `outputs`.

    So no two jobs of a config file share a folder. `before`: the job's stored config, whose places stay as they are: in
    a job of an older version, they may lack the job's id.
    """
    stored = before or {}
    kept = {(stored.get("checkpoint") or {}).get("uri"), *(stored.get("outputs") or {}).values()}
    uri = config.checkpoint.uri
    checkpoint = {} if uri is None or uri in kept else {"uri": below(uri, job_id)}
    outputs = {name: uri if uri in kept else below(uri, job_id) for name, uri in config.outputs.items()}
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=checkpoint), "outputs": outputs})


def shared_places(config: Mapping[str, Any], job_id: str) -> dict[str, Any]:
    """Return the job's stored config with the places as the config file has them: for people, and for other jobs."""
    found = dict(config)
    for name in ("checkpoint", "outputs"):
        if isinstance(block := config.get(name), dict):
            keys = ["uri"] if name == "checkpoint" else [*block]
            uris = {key: block[key] for key in keys if isinstance(block.get(key), str)}
            found[name] = {**block, **{key: uri.removesuffix(f"/{job_id}") for key, uri in uris.items()}}
    return found


def own_mirror(job: JobSpec) -> str:
    """Return the job's folder below a mirror that is a folder; empty for a store, and without a mirror."""
    folder = (job.checkpoint.mirror or "").removeprefix("file://")
    return below(folder, job.job) if folder.startswith("/") else ""


def below(uri: str, job_id: str) -> str:
    """Return the address of the job's folder below the URI or path."""
    return f"{uri.rstrip('/')}/{job_id}"


def key_of(path: str, keys: Mapping[str, str], other: str) -> str:
    """Return the config's key that sets the request's part at the path, else `other`.

    `keys`: the config's keys by paths without numbers of items, longer paths first.
    """
    bare = re.sub(r"\[\d+\]", "", path)
    return next((key for prefix, key in keys.items() if f"{bare}.".startswith(f"{prefix}.")), other)


@functools.cache
def keys_of(backend: str) -> dict[str, str]:
    """Return the config's keys by the parts of a request that they set, from request_keys.tsv, for `key_of`."""
    return {path.replace("/", "."): key for path, key, _ in _request_keys(backend) if key != "-"}


def planned_of(backend: str) -> dict[tuple[str, ...], str]:
    """Return the parts of a request that `raw` must not change, each with the config's key to set instead."""
    return {tuple(path.split("/")): key for path, _, key in _request_keys(backend) if key != "-"}


def _request_keys(backend: str) -> Iterator[list[str]]:
    lines = _text(backend, "request_keys.tsv").splitlines()
    return (line.split("\t") for line in lines if not line.startswith("#"))


def _text(backend: str, file: str) -> str:
    return files("cloudtrain.backends").joinpath(backend).joinpath(file).read_text(encoding="utf-8")


def part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the mapping of this name, or an empty mapping."""
    found = whole.get(name)
    return found if isinstance(found, Mapping) else {}


def listed(whole: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list of this name, or an empty list."""
    found = whole.get(name)
    return found if isinstance(found, list) else []


def _sorted_letters(region: str) -> str:
    return "".join(sorted(each for each in region.lower() if each.isalpha()))


def notes_of(fault: Fault | None) -> Iterator[str]:
    """Yield the warning as a line of the plan."""
    if fault is not None:
        yield f"{fault.key}: {fault.message}; {fault.hint}"


def _value(table: Table, rule: Rule, value: Any, path: str) -> Iterator[Found]:
    name, rule = rule if isinstance(rule, str) else "", _spelt_out(table, rule)
    kind = rule["type"]
    if value is None and rule.get("nullable"):
        return
    if kind == "either":
        yield from _either(table, rule["of"], value, path)
        return
    if not _is_of(kind, value) or (isinstance(value, bool) and kind in _NUMBERS):
        yield path, f"expected {_TYPES[kind][0]}, found {_shown(value)}", False
        return
    yield from ((path, message, False) for message in _limits(rule, value))
    if kind == "object":
        yield from _members(table, rule, value, path)
    elif kind == "choice":
        yield from _case(table, rule, value, path)
    elif kind == "list":
        for index, item in enumerate(value):
            yield from _value(table, rule["of"], item, f"{path}[{index}]")
    elif kind == "map":
        for key, item in value.items():
            yield from _value(table, rule.get("key", "string"), key, f"{path}.{key}")
            yield from _value(table, rule["of"], item, f"{path}.{key}")
    elif "enum" in rule and _folded(value, rule.get("fold")) not in rule["enum"]:
        if name in table.growing:
            yield path, f"`{value}` is not in our table of {len(rule['enum'])}; {table.vendor} may know it", True
        else:
            yield path, f"`{value}` is not one of {', '.join(rule['enum'])}{meant(value, rule['enum'])}", False


def _members(table: Table, rule: dict[str, Any], value: Mapping[Any, Any], path: str) -> Iterator[Found]:
    prefix = f"{path}." if path else ""
    for name in rule["required"]:
        if name not in value:
            yield f"{prefix}{name}", "is required", False
    for name, item in value.items():
        if name in rule["members"]:
            yield from _value(table, rule["members"][name], item, f"{prefix}{name}")
        elif name in rule.get("read_only", ()):
            yield f"{prefix}{name}", f"is set by {table.vendor}; a request must not contain it", False
        else:
            yield f"{prefix}{name}", f"is not a field of {table.thing}{meant(name, rule['members'])}", False


def _either(table: Table, rules: list[Rule], value: Any, path: str) -> Iterator[Found]:
    """Yield the fewest breaches by any of the rules; a field `type` in the value chooses the rule."""
    spelt_out = [_spelt_out(table, rule) for rule in rules]
    fitting = [rule for rule in spelt_out if _is_of(rule["type"], value)]
    if not fitting:
        said = " or ".join(dict.fromkeys(_TYPES[rule["type"]][0] for rule in spelt_out))
        yield path, f"expected {said}, found {_shown(value)}", False
        return
    tried = []
    for rule in fitting:
        found = list(_value(table, rule, value, path))
        tried.append((any(each[0] == f"{path}.type" for each in found), len(found), found))
    is_other_type, _, best = min(tried, key=lambda each: each[:2])
    kinds = [_spelt_out(table, rule.get("members", {}).get("type", "any")) for rule in fitting]
    words = [word for kind in kinds for word in kind.get("enum", ())]
    if is_other_type and words:
        said = f"`{value['type']}` is not one of" if "type" in value else "is required: one of"
        yield f"{path}.type", f"{said} {', '.join(words)}", False
    else:
        yield from best


def _case(table: Table, rule: dict[str, Any], value: Mapping[Any, Any], path: str) -> Iterator[Found]:
    """Yield the breaches by a value of several kinds, under the rule of the kind that the value names."""
    word = value.get(rule["by"])
    if word is None:
        yield f"{path}.{rule['by']}", "is required", False
    elif not isinstance(word, str) or word not in rule["cases"]:
        yield f"{path}.{rule['by']}", f"`{word}` is not one of {', '.join(rule['cases'])}", False
    else:
        yield from _value(table, rule["cases"][word], value, path)


def _limits(rule: dict[str, Any], value: Any) -> Iterator[str]:
    if "min" in rule or "max" in rule:
        is_number = isinstance(value, (int, float))
        unit = "" if is_number else " characters" if isinstance(value, str) else " entries"
        size = value if is_number else len(value)
        if size < rule.get("min", size):
            yield f"{size}{unit} is less than {rule['min']}"
        if size > rule.get("max", size):
            yield f"{size}{unit} is more than {rule['max']}"
    if "pattern" in rule and isinstance(value, str) and not re.fullmatch(rule["pattern"], value):
        yield f"`{value}` {'is not a valid ' + rule['said'] if 'said' in rule else 'does not match ' + rule['pattern']}"


def _spelt_out(table: Table, rule: Rule) -> dict[str, Any]:
    return table.shapes.get(rule) or {"type": rule} if isinstance(rule, str) else rule


def _is_of(kind: str, value: Any) -> bool:
    return isinstance(value, _TYPES[kind][1])


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _folded(word: str, fold: str | None) -> str:
    if fold == "snake":
        word = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word)
    return word.lower() if fold else word


def _letters(word: str) -> str:
    return "".join(each for each in word.lower() if each.isalnum())
