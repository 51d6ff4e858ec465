"""The schema, and the JSON schema that is generated from the schema."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from cloudtrain.launcher.backend_table import BUILT_IN
from cloudtrain.launcher.commands.schema import command, json_schema
from cloudtrain.launcher.config import fields, schema, yamlfile


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    """Return a validator of the published schema."""
    published = json_schema()
    jsonschema.Draft202012Validator.check_schema(published)
    return jsonschema.Draft202012Validator(published)


def every_field(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of the schema with its field."""
    for key, field in model.model_fields.items():
        yield above + key, field
        if inner := fields.section(field):
            yield from every_field(inner, f"{above}{key}.")


@pytest.mark.parametrize(("path", "field"), [pytest.param(*pair, id=pair[0]) for pair in every_field(schema.model())])
def test_every_key_has_help_and_valid_examples(path: str, field: Any) -> None:
    """Each key has a description, and its section accepts its examples."""
    assert field.description.endswith("."), path
    assert field.examples, path
    *above, key = path.split(".")
    parent = fields.field_at(tuple(above))
    model = fields.section(parent) if parent is not None else schema.model()
    required = {name: (item.examples or [None])[0] for name, item in model.model_fields.items() if item.is_required()}
    for example in field.examples:
        model.model_validate({**required, key: example})


@pytest.mark.parametrize("kind", ["task", "script"])
def test_json_schema_accepts_the_starters(validator: jsonschema.Draft202012Validator, kind: str) -> None:
    """An editor marks no fault in a file that `init` writes."""
    text = files("cloudtrain.templates").joinpath("starters", kind, "cloudtrain.yaml").read_text("utf-8")
    root = yamlfile.parse(text, "f.yaml", {}).root
    validator.validate(root.data())


@pytest.mark.parametrize(
    "config",
    [
        {"name": "x", "instanecs": 1},
        {"name": "X"},
        {"name": "x", "resources": {"instances": 0}},
        {"name": "x", "limits": {"max_duration": "12 hours"}},
        {"name": "x", "budget": {"limit": "150 EUR"}},
        {"name": "x", "training": {"precision": "fp8"}},
        {"name": "x", "notify": [{"slack": "foo"}]},
        {},
    ],
)
def test_json_schema_refuses_invalid_configs(
    validator: jsonschema.Draft202012Validator, config: dict[str, Any]
) -> None:
    """An editor marks unknown keys, bad choices, bounds, durations and money."""
    assert not validator.is_valid(config)


def test_json_schema_accepts_the_short_forms(validator: jsonschema.Draft202012Validator) -> None:
    """Hosts as text, arguments as a mapping, durations with units and numbers as variables' values are valid."""
    validator.validate(
        {
            "name": "x",
            "args": {"epochs": 10, "flag": True},
            "env": {"A": 1},
            "ssh": {"hosts": ["gpu1", {"host": "gpu2"}], "price_per_hour": 2.5},
            "limits": {"max_duration": "1h"},
        }
    )


def test_schema_command_prints_json_with_descriptions() -> None:
    """An editor shows the texts of `explain`; a default duration is 24h, not 86400."""
    result = CliRunner().invoke(command, [])
    assert json.loads(result.output) == json_schema()
    assert json_schema()["$schema"].endswith("2020-12/schema")
    resources = json_schema()["$defs"]["Resources"]
    assert "interruptible" in resources["properties"]["spot"]["description"]
    assert resources["additionalProperties"] is False
    assert json_schema()["$defs"]["Limits"]["properties"]["max_duration"]["default"] == "24h"


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu1", {"host": "gpu1"}),
        ("me@gpu1:2222", {"host": "gpu1", "port": 2222, "user": "me"}),
        ("fe80::1", {"host": "fe80::1"}),
    ],
)
def test_ssh_host_as_text(text: str, host: dict[str, Any]) -> None:
    """A host is a name, `user@host:port`, or a mapping of the same values."""
    short = schema.model().model_validate({"name": "x", "ssh": {"hosts": [text]}})
    assert short == schema.model().model_validate({"name": "x", "ssh": {"hosts": [host]}})


def test_every_built_in_backend_has_its_block() -> None:
    """The section has the backend's name."""
    blocks = schema.model().model_fields.keys() - schema.JobConfig.model_fields.keys()
    assert blocks == set(BUILT_IN)
