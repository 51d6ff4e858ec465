"""Templates into requests: Jinja fills in data, Python has decided, and the result is parsed back before use."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.errors import Fault

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["as_json", "as_yaml", "at", "changed", "overlaid", "render_json", "render_yaml"]

# What a YAML reader takes only as an escape, or for an end of a line (YAML 1.1, "c-printable" and "b-char").
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
YAML_WIDTH = 120
_TEXT = "tag:yaml.org,2002:str"


def render_json(template: str, **values: Any) -> dict[str, Any]:
    """Return the JSON object that the rendered text holds. The template says `{{ value | json }}` for every value.

    A value that a template names and nobody gives is an error of ours: jinja2.UndefinedError.
    """
    body: dict[str, Any] = json.loads(_rendered(template, values))
    return body


def render_yaml(template: str, **values: Any) -> dict[str, Any]:
    """Return the YAML mapping that the rendered text holds. The template says `{{ value | yaml }}` for every value."""
    import yaml

    body: dict[str, Any] = yaml.load(_rendered(template, values), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return body


def as_json(body: dict[str, Any]) -> str:
    """Return the object as a dry run prints it."""
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


def as_yaml(body: dict[str, Any]) -> str:
    """Return the mapping as a dry run prints it, in its own order."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        """Writes texts of several lines as they are."""

    def shown(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar(_TEXT, text, "|" if "\n" in text else None)

    Dumper.add_representer(str, shown)
    text: str = yaml.dump(body, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=YAML_WIDTH)
    return text


def overlaid(body: dict[str, Any], raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the request with the user's `raw` merged into it, and each change in a line.

    Mappings are merged key by key; anything else takes the place of what was there, and None removes it.
    """
    changes: list[str] = []
    return _overlaid(body, raw, "", changes), changes


def _overlaid(body: dict[str, Any], raw: dict[str, Any], path: str, changes: list[str]) -> dict[str, Any]:
    merged = dict(body)
    for key, value in raw.items():
        here, before = f"{path}{key}", merged.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[key] = _overlaid(before, value, f"{here}.", changes)
        elif value is None:
            merged.pop(key, None)
            if before is not None:
                changes.append(f"raw: {here} removed, was {_json(before)}")
        elif value != before:
            merged[key] = value
            changes.append(f"raw: {here} {_json(value)}, {'new' if key not in body else f'was {_json(before)}'}")
    return merged


def changed(
    planned: dict[str, Any], body: dict[str, Any], paths: Mapping[tuple[str, ...], str], raw: str
) -> Iterator[Fault]:
    """Yield a fault for each place of what was planned with that the user's `raw` has changed.

    `paths` are the places in the request and the config's key for each; `raw` is that of the user's own changes.
    """
    for path, key in paths.items():
        if at(planned, path) != at(body, path):
            message = f"`raw` changes {'.'.join(path)}, and with it what was planned"
            yield Fault(message, key=raw, hint=f"set {key} instead")


def at(body: Any, path: tuple[str, ...]) -> Any:
    """Return what is at a place of the request, None where there is none."""
    for name in path:
        body = body.get(name) if isinstance(body, dict) else None
    return body


def _rendered(template: str, values: dict[str, Any]) -> str:
    return str(_environment().get_template(template).render(**values))


@functools.cache
def _environment() -> Environment:
    """Return what renders, with the templates that it has compiled: a comparison of backends renders several."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_source),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = _json
    environment.filters["yaml"] = _yaml
    return environment


def _source(name: str) -> str:
    return files("cloudtrain.templates").joinpath(*name.split("/")).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _yaml(value: Any) -> str:
    """Return the value as JSON, which is YAML but for characters that YAML wants escaped."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", _json(value))
