"""Loads `cloudtrain.yaml`: text -> tree -> overrides -> validated Config. One ConfigError reports all faults."""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cloudtrain.entrypoints import foreign

from ..backend_table import DEFAULT
from ..errors import BudgetError, ConfigError, Fault, Place, refuse
from . import accelerate, codefiles, entries, fields, rules, schema, schemafaults, yamlfile
from .schema import JobConfig
from .yamlfile import KeyPath, YamlNode

DEFAULT_FILE = "cloudtrain.yaml"
_LARGEST_FILE = 256_000  # bytes; a job's description is a page


def load(
    path: Path,
    *,
    data: Mapping[str, Any] | None = None,
    backend: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    further: Callable[[JobConfig, Path], Sequence[Fault]] | None = None,
) -> JobConfig:
    """Return the config with every default filled in.

    `data` takes the place of the file, which then need not exist; its text is literal: `${NAME}` is not filled in.
    `overrides` are `a.b=value`; a later override wins, and `backend` wins over all overrides. Paths in the config are
    relative to the config file. `further` returns the faults that the backend and the code folder add. Raises
    ConfigError with every fault: first the faults in the file, in the file's order, then those of the command line.
    """
    environ = os.environ if environ is None else environ
    if data is None:
        root, before = yamlfile.parse(_text(path, overrides), os.fspath(path), environ)
    else:
        root, before = yamlfile.from_data(data, Place(path.name)), ()
    if root is None:
        raise ConfigError(before or [Fault(f"{path} is empty", hint="`cloudtrain init` writes an example")])
    if not isinstance(root.value, dict):
        message = f"expected a mapping of keys, found {schemafaults.found(root)}"
        raise ConfigError(before or [Fault(message, place=root.place, hint="begin with `name: my-job`")])
    root, faults = _overridden(root, overrides, environ, backend)
    return _checked(root, [*before, *faults], path, further)


def _checked(
    root: YamlNode,
    faults: list[Fault],
    path: Path,
    further: Callable[[JobConfig, Path], Sequence[Fault]] | None,
) -> JobConfig:
    """Return the config of the tree. Raises ConfigError with `faults` and those that are found here."""
    config, more = _validated(root)
    faults += [*more, *rules.faults_of(root), *codefiles.faults_of(root, path.parent)]
    tried, more = _candidates(root, path.parent, faults, config)
    faults += more
    if config is not None and config.capacity is not None:
        config = config.model_copy(update={"capacity": config.capacity.model_copy(update={"try": tuple(tried)})})
    if (
        faults
        and further is not None
        and (sound := config or _sound(*_model_and_data(root), [fault.key for fault in faults])) is not None
    ):
        is_unread = config is None and any(fault.key.startswith("capacity") for fault in faults)
        others = further(sound.model_copy(update={"capacity": None}) if is_unread else sound, path)
        faults += [_placed(fault, root, ()) for fault in others if not _follows(fault, faults, root)]
    if config is None or faults:
        raise ConfigError(sorted(faults, key=lambda fault: _order(fault, os.fspath(path))))
    data = _model_and_data(root)[1]
    options = ((f"{key}.{name}", data[key][name]) for key, name, _ in _options(root))
    config._left_out = tuple(name for name, value in options if value is None or value is False)
    return accelerate.applied(config, path.parent)


def _candidates(
    root: YamlNode, folder: Path, before: Sequence[Fault], file: JobConfig | None
) -> tuple[list[dict[str, Any]], list[Fault]]:
    """Return the completed entries of `capacity.try`, and the faults that the file under each has in addition.

    A faulty entry is completed with the values of the file.
    """
    known, found, faults = {(fault.message, fault.key) for fault in before}, [], list[Fault]()
    as_written = {} if file is None else accelerate.applied(file, folder).model_dump(mode="json", exclude_defaults=True)
    wrong = [f"{each.key.replace('[', '.').replace(']', '')}." for each in before]
    seen = dict[str, int]()
    for index, entry in enumerate(entries.of_tree(root)):
        tree = YamlNode({key: each for key, each in root.value.items() if key != "capacity"}, root.place)
        for key, member in entry.items():
            tree = _grafted(tree, (), tuple(key.split(".")), member, member.key or member.place)
        config, more = _validated(tree)
        new = [each for each in (*more, *rules.faults_of(tree)) if (each.message, each.key) not in known]
        data = as_written
        if config is not None and not new:
            data = accelerate.applied(config, folder).model_dump(mode="json", exclude_defaults=True)
            if not any(each.startswith(f"capacity.try.{index}.") for each in wrong):
                new = [*entries.repeated(index, data, seen)]
        faults += [_placed(entries.named(fault, index, entry), root, ()) for fault in new]
        found.append(data)
    return entries.completed(root, found), faults


def backends_asked(path: Path, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names under `backend`, in the file's order, or `local`. Raises ConfigError for a faulty list."""
    node = yamlfile.find(_tree(path, overrides), ("backend",))
    if node is None or node.value is None:
        return (DEFAULT,)
    if not isinstance(node.value, tuple):
        return (str(node.value),)
    hint = "as in `backend: [sagemaker, vertex]`"
    odd = [item for item in node.value if not isinstance(item.value, str)]
    faults = [Fault("expected a backend's name", "backend", item.place, hint) for item in odd]
    names = [str(item.value) for item in node.value]
    again = [item for index, item in enumerate(node.value) if names[index] in names[:index]]
    faults += [Fault(f"`{item.value}` is listed twice", "backend", item.place, "once is enough") for item in again]
    if not names:
        faults.append(Fault("no backend is named", "backend", node.place, hint))
    refuse(faults)
    return tuple(names)


def backends_configured(path: Path, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """Return `local`, the backends with a block in the file, and the backends under `backend`. Raises ConfigError."""
    root = _tree(path, overrides)
    members = root.value if isinstance(root.value, dict) else {}
    blocks = [name for name in schema.blocks_of(members) if members[name].value is not None]
    return tuple(dict.fromkeys([DEFAULT, *blocks, *backends_asked(path, overrides)]))


def written(path: Path, key: KeyPath, overrides: Sequence[str] = ()) -> Any:
    """Return the unchecked value of a key in the file with the overrides, or None. Raises ConfigError."""
    node = yamlfile.find(_tree(path, overrides), key)
    return None if node is None else node.data()


def stored(data: Mapping[str, Any], *, overrides: Sequence[str] = ()) -> JobConfig:
    """Return a config that was stored as JSON, with `${NAME}` filled in, with the overrides. Raises ConfigError."""
    # Without the defaults: the rules that span keys would report a default as a misplaced key.
    asked = schema.model(data).model_validate(data).model_dump(mode="json", exclude_defaults=True)
    root, faults = _overridden(yamlfile.from_data(asked, Place(rules.STORED)), overrides, os.environ)
    config, more = _validated(root)
    faults += [*more, *rules.faults_of(root)]
    if config is None or faults:
        raise ConfigError(faults)
    return config


def placed(error: ConfigError, path: Path, overrides: Sequence[str] = ()) -> ConfigError:
    """Return the error with the place of each faulty key in the file; a key that an override sets has no place."""
    root = None
    with suppress(ConfigError):
        root = _tree(path, ())
    given = tuple(assignment.partition("=")[0].strip() for assignment in overrides)
    faults = [_placed(fault, root, given) for fault in error.faults]
    return ConfigError(sorted(faults, key=lambda fault: _order(fault, os.fspath(path))))


@contextmanager
def placing(path: Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Add the place in the config file to the faults that the block raises, if the file can be read."""
    try:
        yield
    except ConfigError as error:
        raise (placed(error, path, overrides) if not error.where else error) from error
    except BudgetError as error:  # `where` of the error is a key of the config
        fault = placed(ConfigError([Fault("", error.where)]), path, overrides).faults[0]
        error.where = f"{fault.place}, {fault.key}" if fault.place is not None else fault.key
        raise


def _placed(fault: Fault, root: YamlNode | None, given: tuple[str, ...]) -> Fault:
    if root is None or fault.place is not None or not fault.key or fault.key.startswith(given or "\0"):
        return fault
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", fault.key))
    node = yamlfile.find(root, path)
    if node is None and path[:2] == ("capacity", "try"):  # an entry has dotted keys
        key = ".".join(map(str, path[3:]))
        node = yamlfile.find(root, (*path[:3], key)) or yamlfile.find(root, path[:3])
    if node is None and len(path) > 1 and isinstance(path[-2], int):  # the user of the host `alice@gpu1`
        node = yamlfile.find(root, path[:-1])
    return replace(fault, place=node.place) if node is not None else fault


def _tree(path: Path, overrides: Sequence[str]) -> YamlNode:
    """Return the tree with the overrides applied; faults are ignored, because loading the config reports the faults."""
    root = yamlfile.parse(_text(path, overrides), os.fspath(path), os.environ).root or YamlNode({}, Place(path.name))
    if not isinstance(root.value, dict):
        return root
    return _overridden(root, overrides, os.environ)[0]


def _overridden(
    root: YamlNode, overrides: Sequence[str], environ: Mapping[str, str], backend: str | None = None
) -> tuple[YamlNode, list[Fault]]:
    """Return the tree with the overrides and the backend applied, and the faults."""
    faults = list[Fault]()
    assignments = [("--set", assignment) for assignment in overrides]
    for option, assignment in [*assignments, *([("--backend", f"backend={backend}")] if backend is not None else [])]:
        root, more = _applied(root, option, assignment, environ)
        faults += more
    return root, faults


def _applied(root: YamlNode, option: str, assignment: str, environ: Mapping[str, str]) -> tuple[YamlNode, list[Fault]]:
    """Return the tree with the value of `a.b=value`, and the faults. The value is YAML; missing mappings are added.

    `option` is the option on the command line: `--set`, or `--backend` for an assignment to the key `backend`.
    """
    key, equals, text = assignment.partition("=")
    key = key.strip()
    secret = key.startswith("secrets") or yamlfile.SECRET_NAME.search(key) is not None
    shown = f"{key}=..." if secret and equals else assignment
    place = Place(f"{option} {text if option != '--set' else shown}")
    if not equals or not all(key.split(".")):
        hint = "as in `--set resources.instances=2`"
        return root, [Fault(f"`{place}` is not an assignment", hint=hint)]
    parsed = yamlfile.parse(text, place.file, environ, place)
    faults = [replace(fault, key=key) for fault in parsed.faults]
    if parsed.root is None and faults:
        return root, faults
    value = parsed.root
    if value is None or (value.plain and not value.text):  # also of an empty variable
        hint = f"{key}=null unsets it, {key}=\"''\" is an empty text"
        return root, faults or [Fault(f"`{place}` has no value", key, place, hint)]
    steps: KeyPath = tuple(int(step) if step.isascii() and step.isdigit() else step for step in key.split("."))
    try:
        return _grafted(root, (), steps, value, place), faults
    except IndexError as exc:
        message = f"no item `{exc}`: a list counts from 0, and only its next item can be added"
        return root, [*faults, Fault(message, key, place)]


def _grafted(node: YamlNode | None, above: KeyPath, steps: KeyPath, value: YamlNode, place: Place) -> YamlNode:
    """Return `node` with `value` at the end of `steps`. Raises IndexError with the path if an item cannot be added."""
    if not steps:
        return value
    step, *rest = steps
    if above in (("args",), ("resume_args",)) and isinstance(step, str) and node is not None and not rest:
        with suppress(ValueError):  # text without a closing quote: the rules report it
            words = yamlfile.from_data(shlex.split(node.value), node.place) if isinstance(node.value, str) else node
            if isinstance(words.value, tuple):
                return replace(words, value=_with_option(words.value, step if step[0] == "-" else f"--{step}", value))
    field = fields.field_at(above)
    into_list = isinstance(step, int) and (
        isinstance(node.value, tuple)
        if node is not None and isinstance(node.value, tuple | dict)
        else bool(above) and field is not None and fields.is_list(field)
    )
    if into_list and isinstance(step, int):
        items = list(node.value) if node is not None and isinstance(node.value, tuple) else []
        if step > len(items):
            raise IndexError(schemafaults.dotted((*above, step)))
        there = items[step] if step < len(items) else None
        items[step : step + 1] = [_grafted(there, (*above, step), tuple(rest), value, place)]
        return YamlNode(tuple(items), node.place if node is not None else place)
    members = dict(node.value) if node is not None and isinstance(node.value, dict) else {}
    name = str(step)
    old = members.get(name)
    inner = _grafted(old, (*above, step), tuple(rest), value, place)
    members[name] = replace(inner, key=place if not rest or old is None else old.key)
    return YamlNode(members, node.place if node is not None and isinstance(node.value, dict) else place)


def _with_option(words: tuple[YamlNode, ...], option: str, value: YamlNode) -> tuple[YamlNode, ...]:
    """Return the words of `args` with an option's value in place of its old one: `true` is the option alone."""
    at = next((index for index, word in enumerate(words) if word.text.partition("=")[0] == option), len(words))
    has_next = words[at + 1 :] and "=" not in words[at].text and not re.match(r"-\D", words[at + 1].text)
    values = value.value if isinstance(value.value, tuple) else () if value.value is True else (value,)
    is_off = value.value is None or value.value is False or (value.plain and value.text in yamlfile.FALSE_OF_YAML_1_1)
    new = () if is_off else (YamlNode(option, value.place, text=option), *values)
    return (*words[:at], *new, *words[at + (2 if has_next else 1) :])


def is_whole(overrides: Sequence[str]) -> bool:
    """Return whether the overrides are the job of a command line without a file: they begin with name and program."""
    return [each.partition("=")[0] for each in overrides[:2]] in (["name", "script"], ["name", "module"])


def _text(path: Path, overrides: Sequence[str]) -> str:
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", hint=f"name the file: {path / DEFAULT_FILE}")
        return foreign.read(path, _LARGEST_FILE).decode("utf-8-sig")
    except FileNotFoundError:
        if path.name == DEFAULT_FILE and is_whole(overrides):
            return "{}"
        raise ConfigError(f"no file {path}", hint=_missing_file_hint(path)) from None
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        raise ConfigError(f"{path} is not UTF-8 text (line {line})", hint="save it as UTF-8") from None
    except (OSError, ValueError) as exc:
        hint = "write it to a file first" if getattr(exc, "errno", None) == errno.EINVAL else ""
        raise ConfigError(f"{path} cannot be read: {getattr(exc, 'strerror', None) or exc}", hint=hint) from None


def _missing_file_hint(path: Path) -> str:
    if hint := schemafaults.slashed(str(path)):
        return hint
    folder = path.parent
    names = sorted(file.name for file in folder.glob("*.y*ml")) if folder.is_dir() else []
    if close := get_close_matches(path.name, names, 1):
        return f"did you mean {folder / close[0]}?"
    if not path.suffix:  # likely a job's name
        return f"name a config file, not a job: for example {DEFAULT_FILE}"
    return "`cloudtrain init` writes one; `-f FILE` names another; a script needs none: `cloudtrain submit train.py`"


def _validated(root: YamlNode) -> tuple[JobConfig | None, list[Fault]]:
    """Return the config, or the faults of single values."""
    model, data = _model_and_data(root)
    try:
        return model.model_validate(data), []
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False)
    # A text key takes a plain scalar as written: the tag `1.10` does not become 1.1, nor the env value `true` True.
    for error in errors:
        node = yamlfile.find(root, error["loc"])
        is_plain = node is not None and node.plain and isinstance(node.value, bool | int | float)
        if node is not None and is_plain and error["type"] in {"string_type", "value_error"}:
            _put(data, error["loc"], node.text)
    try:
        return model.model_validate(data), []
    except ValidationError as exc:
        return None, list(schemafaults.faults_of(exc, root))


def cured(config: JobConfig, faults: Sequence[Fault]) -> JobConfig | None:
    """Return the config with sound values for the faulty keys, to look for further faults; None if there is none."""
    data = config.model_dump(mode="json", exclude_defaults=True)
    return _sound(schema.model(data), data, [fault.key for fault in faults])


def _sound(model: type[JobConfig], data: dict[str, Any], keys: Sequence[str]) -> JobConfig | None:
    """Return the config without the faulty keys; None if the remaining keys are not a valid config."""
    paths: list[KeyPath] = [tuple(key.split(".")) for key in keys]
    for _ in range(3):
        places: list[KeyPath] = []
        try:
            sound = model.model_validate(data)
        except ValidationError as error:
            places = [each["loc"] for each in error.errors()]
        if not places and not paths:
            return sound
        # A faulty entry is removed alone, though the fault is that of the mapping.
        places += [path for path in paths if not any(place[: len(path)] == path for place in places)]
        for place in dict.fromkeys(places):
            _cure(data, place)
        paths = []
    return None


def _cure(data: dict[Any, Any], path: KeyPath) -> None:
    """Remove the key; in place of a missing key, set the schema's example."""
    # No space suits each job, and no limit each price.
    section, path = data, path[:1] if path[:2] in (("sweep", "space"), ("budget", "limit")) else path
    for step in path[:-1]:
        if not isinstance(section.setdefault(step, {}), dict):
            path = (step,)  # the key is in a list
            break
        section = section[step]
    field = fields.field_at(path)
    if path and section.pop(path[-1], None) is None and field is not None and field.examples:
        section[path[-1]] = field.examples[0]


def _follows(fault: Fault, faults: Sequence[Fault], root: YamlNode) -> bool:
    """Return whether an earlier fault explains a backend's fault: a faulty key or section, or an unknown sibling."""
    section = fault.key.rpartition(".")[0]
    is_written = yamlfile.find(root, tuple(fault.key.split("."))) is not None
    return any(
        f"{fault.key}.".startswith(f"{other.key}.")
        or f"{other.key}.".startswith(f"{fault.key}.")
        or (not is_written and other.message.startswith("unknown key") and other.key.rpartition(".")[0] == section)
        for other in faults
        if other.key
    )


def _without_nothing(node: YamlNode, model: type[BaseModel] | None) -> Any:
    """Return plain data without config keys that have no value: `resources:` with every line below commented out."""
    if model is None:
        return node.data()
    if isinstance(node.value, tuple):
        return [_without_nothing(item, model) for item in node.value]
    if not isinstance(node.value, dict):
        return node.data()
    data = {}
    for key, member in node.value.items():
        field = model.model_fields.get(key)
        if field is None or member.value is not None:
            data[key] = _without_nothing(member, fields.section(field) if field is not None else None)
    return data


def _model_and_data(root: YamlNode) -> tuple[type[JobConfig], dict[str, Any]]:
    """Return the model of the root's keys, and the data for the model, without keys that have no value.

    The numbers of an `args` mapping are as the text in the file, so that `lr: 3e-4` becomes `--lr 3e-4`. An option is
    false in every spelling of YAML 1.1 and 1.2; in quotes the word is text.
    """
    model = schema.model_of(root.value)
    data = _without_nothing(root, model)
    for key, name, member in _options(root):
        items = member.value if isinstance(member.value, tuple) else (member,)
        texts = [item.text if type(item.value) in (int, float) else item.data() for item in items]
        data[key][name] = texts if isinstance(member.value, tuple) else texts[0]
        if member.plain and member.text in yamlfile.FALSE_OF_YAML_1_1:
            data[key][name] = False
    return model, data


def _options(root: YamlNode) -> Iterator[tuple[str, str, YamlNode]]:
    """Yield the options of `args` and `resume_args`, if these are mappings: the key, the option's name, the member."""
    for key in ("args", "resume_args"):
        node = yamlfile.find(root, (key,))
        for name, member in node.value.items() if node is not None and isinstance(node.value, dict) else ():
            yield key, name, member


def _put(data: Any, path: KeyPath, value: str) -> None:
    """Set the value at the path, if the path exists."""
    with suppress(KeyError, IndexError, TypeError):
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value


def _order(fault: Fault, file: str) -> tuple[int, int, int]:
    """Sort by the place in the config file; then faults of the command line; then faults without a place."""
    if fault.place is None:
        return (3, 0, 0)
    if not fault.place.line:
        return (2, 0, 0)
    place = fault.place if fault.place.file == file else (*fault.also, fault.place)[0]  # code: the key of the file
    return (0, place.line, place.column)
