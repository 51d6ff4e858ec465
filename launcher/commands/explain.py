"""`cloudtrain explain resources.spot`: a config key's type, default, help and example."""

from __future__ import annotations

import json
import textwrap
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import click

from ..errors import UsageError
from ..text.tables import width as terminal_width
from .options import cli_command, completes, json_option

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_MOST = 100  # columns; longer lines are hard to read
_PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false"}


@cli_command("explain", "cloudtrain explain training", "cloudtrain explain checkpoint.every")
@click.argument("path", default="", shell_complete=completes("keys"))
@json_option
def command(path: str, as_json: bool) -> None:
    """Explain a key of the config file, such as `resources.spot`; without PATH, list the top level."""
    from ..backend_table import names
    from ..config import fields, schema

    steps = tuple(int(step) if step.isascii() and step.isdigit() else step for step in path.split(".") if step)
    field = fields.field_at(steps) if steps else None
    if steps and field is None:
        raise UsageError(f"no key `{path}`", hint=_closest(path))
    model = fields.section(field) if field is not None else schema.model(names())
    keys = {key: facts_of(inner) for key, inner in model.model_fields.items()} if model is not None else {}
    if as_json:
        facts = facts_of(field) if field is not None else {"type": "mapping", "help": schema.JobConfig.__doc__}
        click.echo(json.dumps({"key": path, **facts, **({"keys": keys} if keys else {})}, indent=2))
        return
    if field is not None:
        click.echo(_described(path, facts_of(field), is_section=model is not None))
    if keys:
        click.echo(("\n" if field is not None else "") + _listed(keys))


def type_name(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Return a type in words: `list of text`, `ddp | fsdp`, `duration`."""
    from ..config.kinds import Kind, Shorthand

    if shorthand := next((item.name for item in metadata if isinstance(item, Shorthand)), ""):
        return f"{type_name(annotation, tuple(m for m in metadata if not isinstance(m, Shorthand)))} or {shorthand}"
    kind = next((item for item in metadata if isinstance(item, Kind)), None)
    if kind is not None:
        return kind.name
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(args[0], args[1:])
    if origin is Literal:
        return " | ".join(str(choice) for choice in args)
    if origin is tuple:
        return f"list of {type_name(args[0])}"
    if origin is dict:
        return f"mapping of {type_name(args[0])} to {type_name(args[1])}"
    if args:  # a union; the schema has only unions with None
        return type_name(next(arg for arg in args if arg is not type(None)))
    return "any value" if annotation is Any else _PLAIN.get(annotation, "mapping")


def facts_of(field: FieldInfo) -> dict[str, Any]:
    """Return the facts about a key: type, required or default, help, examples."""
    from ..config.fields import written_default

    kind, is_required = type_name(field.annotation, tuple(field.metadata)), field.is_required()
    default = {} if is_required else {"default": written_default(field)}
    about = {"help": field.description, "examples": field.examples or []}
    return {"type": kind, "required": is_required, **default, **about}


def _described(path: str, facts: dict[str, Any], *, is_section: bool) -> str:
    from ..config.fields import as_yaml

    lines = [f"{path}: {facts['type']}{default_words(facts) if not is_section else ''}"]
    lines += textwrap.wrap(facts["help"], _columns(), initial_indent="  ", subsequent_indent="  ")
    name = path.rpartition(".")[2]
    lines += [f"  example: {name}: {as_yaml(example)}" for example in facts["examples"]]
    return "\n".join(lines)


def _listed(keys: dict[str, dict[str, Any]]) -> str:
    columns = _columns()
    width = min(max(map(len, keys)) + 2, columns // 2)
    blocks, indent = [], " " * width
    for key, facts in keys.items():
        first = f"{key:<{width}}{facts['type']}{default_words(facts)}"
        for text, begin in ((first, ""), (facts["help"], indent)):
            blocks += textwrap.wrap(text, columns, initial_indent=begin, subsequent_indent=indent)
    return "\n".join(blocks)


def _columns() -> int:
    return min(_MOST, terminal_width() or _MOST)


def default_words(facts: dict[str, Any]) -> str:
    """Return the text of the default after the type, such as `, default 3`; empty text for an empty default."""
    if facts["required"]:
        return ", required"
    from ..config.fields import as_yaml

    empty = facts["default"] is None or facts["default"] in ([], {})
    return "" if empty else f", default {as_yaml(facts['default'])}"


def _closest(path: str) -> str:
    from ..config.fields import TYPO, every_key, keys_named
    from ..config.schema import model

    if typo := get_close_matches(path, model().model_fields, 1, TYPO):
        return f"did you mean `{typo[0]}`?"
    elsewhere = keys_named(path.rpartition(".")[2])
    exact = sorted(elsewhere, key=lambda name: name.count("."))
    if len(exact) == 1 or (exact and exact[0].count(".") < exact[1].count(".")):  # the right key in a wrong section
        return f"did you mean `{exact[0]}`?"
    if close := get_close_matches(path, list(every_key(model())), 1):
        return f"did you mean `{close[0]}`?"
    return f"did you mean `{elsewhere[0]}`?" if elsewhere else "`cloudtrain explain` lists the top level"
