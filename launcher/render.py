"""Templates into requests: Jinja fills in data, Python has decided, and the result is parsed back before use."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

__all__ = ["as_json", "overlaid", "render_json"]


def render_json(template: str, **values: Any) -> tuple[str, dict[str, Any]]:
    """Return the rendered text and the JSON object in it. The template says `{{ value | json }}` for every value.

    A value that a template names and nobody gives is an error of ours: jinja2.UndefinedError.
    """
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
    text = environment.get_template(template).render(**values)
    body: dict[str, Any] = json.loads(text)
    return as_json(body), body


def as_json(body: dict[str, Any]) -> str:
    """Return the object as a dry run prints it."""
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


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


def _source(name: str) -> str:
    return files("cloudtrain.templates").joinpath(*name.split("/")).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
