"""Renders templates into requests: Python decides, Jinja fills in data, and the result is parsed before use."""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..errors import Fault

if TYPE_CHECKING:
    from jinja2 import Environment

# Characters that YAML accepts only escaped, or reads as an end of a line (YAML 1.1, "c-printable" and "b-char").
_UNPRINTABLE = "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]"
LONG_TEXT = 1000
YAML_WIDTH = 120
_TEXT = "tag:yaml.org,2002:str"
_EXPONENT = re.compile(r"-?\d+(\.\d+)?[eE][-+]?\d+$")


def render_json(template: str, **values: Any) -> dict[str, Any]:
    """Return the JSON object of the rendered text. The template contains `{{ value | json }}` for every value."""
    body: dict[str, Any] = json.loads(render_text(template, **values))
    return body


def render_yaml(template: str, **values: Any) -> dict[str, Any]:
    """Return the YAML mapping of the rendered text. The template contains `{{ value | yaml }}` for every value."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Reads JSON's `1e-08` as a number; YAML 1.1 asks for a point."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-0123456789"))
    body: dict[str, Any] = yaml.load(render_text(template, **values), Loader=Loader)
    return body


def render_text(template: str, **values: Any) -> str:
    """Return the rendered text, such as a shell script. The template contains `{{ value | sh }}` for every value."""
    return str(_environment().get_template(template).render(**values))


def as_json(body: dict[str, Any]) -> str:
    """Return the object as JSON for a dry run."""
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


def as_yaml(body: dict[str, Any], *, repeats: bool = True) -> str:
    """Return the mapping as YAML, with the keys in order; without `repeats`, a long text once, and then its alias."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        """Writes texts of several lines as literal blocks, and quotes a text that YAML 1.2 reads as a number, 12e3."""

        def represent_data(self, data: Any) -> Any:
            return super().represent_data(sys.intern(data) if isinstance(data, str) else data)

        def ignore_aliases(self, data: Any) -> bool:
            is_long = isinstance(data, str) and len(data) > LONG_TEXT
            return bool(super().ignore_aliases(data)) and (repeats or not is_long)

    def shown(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else "'" if _EXPONENT.match(text) else None
        return dumper.represent_scalar(_TEXT, text, style)

    Dumper.add_representer(str, shown)
    text: str = yaml.dump(body, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=YAML_WIDTH)
    return text


def overlaid(body: dict[str, Any], raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the request with the user's `raw` merged in, key by key (None removes one), and a line for each change."""
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
    """Yield a fault at the key `raw` for each planned value that it changes; `paths`: places in the request -> keys."""
    for path, key in paths.items():
        if at(planned, path) != at(body, path):
            message = f"`raw` changes {'.'.join(path)}, and with it what was planned"
            yield Fault(message, key=raw, hint=f"set {key} instead")


def at(body: Any, path: tuple[str, ...]) -> Any:
    """Return the value at a path in the request, None if absent."""
    for name in path:
        body = body.get(name) if isinstance(body, dict) else None
    return body


def environment(folder: str, **options: Any) -> Environment:
    """Return a Jinja environment of the folder's templates, which keeps the compiled templates."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    place = files("cloudtrain.templates").joinpath(folder)
    loader = FunctionLoader(lambda name: place.joinpath(name).read_text(encoding="utf-8"))
    return Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)


@functools.cache
def _environment() -> Environment:
    """Return the environment of requests, once: a comparison of backends renders several."""
    made = environment("", autoescape=False, keep_trailing_newline=True)
    made.filters.update(json=_json, yaml=_yaml, sh=_sh)
    return made


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _sh(value: object) -> str:
    """Return the value as a word of a POSIX shell; a leading `~/` is the user's home folder."""
    text = str(value)
    return f'"$HOME"/{shlex.quote(text[2:])}' if text.startswith("~/") and len(text) > 2 else shlex.quote(text)


def _yaml(value: Any) -> str:
    """Return the value as JSON with YAML's unprintable characters escaped, which is valid YAML."""
    return re.sub(_UNPRINTABLE, lambda found: f"\\u{ord(found[0]):04x}", _json(value))
