"""`cloudtrain schema`: the config file's JSON schema, for editors."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command("schema")
def command() -> None:
    """Print the config file's JSON schema (draft 2020-12), for completion and checks in an editor.

    Save it, and begin the config with `# yaml-language-server: $schema=cloudtrain.schema.json`.
    """
    click.echo(json.dumps(json_schema(), indent=2))


def json_schema() -> dict[str, Any]:
    """Return the schema. The schema and the validation accept the same files, except for rules that span keys."""
    from ..backend_table import names
    from ..config.fields import sections, written_default
    from ..config.schema import model as config_model

    whole = config_model(names())
    published = whole.model_json_schema()
    for model in sections(whole):
        properties = (published if model is whole else published["$defs"][model.__name__])["properties"]
        for key, field in model.model_fields.items():
            properties[key].pop("title", None)  # a title that repeats the key is noise in the pop-up of an editor
            # pydantic's default is in seconds or micro-dollars; an editor needs the default in the form of the file.
            properties[key].pop("default", None)
            if not field.is_required() and (default := written_default(field)) not in (None, [], {}):
                properties[key]["default"] = default
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **published, "title": "cloudtrain"}
