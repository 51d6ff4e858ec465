"""Templates into requests: Jinja fills in data, Python has decided, and the result is parsed back before use."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

__all__ = ["render_json"]


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
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n", body


def _source(name: str) -> str:
    return files("cloudtrain.templates").joinpath(*name.split("/")).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
