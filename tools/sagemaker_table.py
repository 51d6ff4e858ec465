"""Writes backends/sagemaker/rules.json and rules_serving.json: what SageMaker accepts, from the installed botocore.

    .venv/bin/python tools/sagemaker_table.py            # writes it
    .venv/bin/python tools/sagemaker_table.py --check    # compares, and fails where botocore says something else

rules.json is of CreateTrainingJob; rules_serving.json is of the requests of an endpoint, with the members that we send.
Facts only, in the form that launcher/planning/request_rules.py walks: types, required members, limits, patterns,
enumerations. A dry run reads the table, so that it needs no SDK; a test runs `--check`.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import rulesfile

ROOT = "CreateTrainingJobRequest"
KINDS = {"structure": "object", "list": "list", "map": "map", "string": "string", "boolean": "boolean"}
# As Java reads \\p{Z}: no tab and no newline.
_SEPARATORS = " \\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
# Classes of Java's patterns that Python's `re` lacks; all stand inside brackets.
CLASSES = {r"\p{Alnum}": "a-zA-Z0-9", r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": _SEPARATORS}
# The members of an endpoint's requests that we send: the others would fill pages.
SENT = {
    "CreateModelInput": {
        *("ModelName", "PrimaryContainer", "ExecutionRoleArn", "EnableNetworkIsolation", "VpcConfig", "Tags")
    },
    "ContainerDefinition": {"Image"},
    "CreateEndpointConfigInput": {"EndpointConfigName", "ProductionVariants", "Tags"},
    "ProductionVariant": {
        *("VariantName", "ModelName", "InstanceType", "InitialInstanceCount"),
        "ContainerStartupHealthCheckTimeoutInSeconds",
    },
    "CreateEndpointInput": {"EndpointName", "EndpointConfigName", "Tags"},
}
NUMBERS = {"integer": "integer", "long": "integer", "float": "number", "double": "number"}


def table() -> dict[str, Any]:
    """Return the rules: the version they are from, and every shape that a request can hold, by name."""
    import botocore.session

    session = botocore.session.get_session()
    model = session.get_service_model("sagemaker")
    shapes: dict[str, Any] = {}
    _walk(model.operation_model("CreateTrainingJob").input_shape, shapes)
    shapes[ROOT] = shapes.pop(model.operation_model("CreateTrainingJob").input_shape.name)
    return {"root": ROOT, "shapes": dict(sorted(shapes.items()))}


def serving() -> dict[str, Any]:
    """Return the rules of the three requests that start an endpoint."""
    import botocore.session

    model = botocore.session.get_session().get_service_model("sagemaker")
    shapes: dict[str, Any] = {}
    for name in ("CreateModel", "CreateEndpointConfig", "CreateEndpoint"):
        _walk(model.operation_model(name).input_shape, shapes)
    return {"root": "CreateEndpointInput", "shapes": dict(sorted(shapes.items()))}


def _walk(shape: Any, shapes: dict[str, Any]) -> None:
    if shape.name in shapes:
        return
    rule: dict[str, Any] = {"type": KINDS.get(shape.type_name) or NUMBERS[shape.type_name]}
    shapes[shape.name] = rule
    for key in ("min", "max"):
        if key in shape.metadata:
            rule[key] = shape.metadata[key]
    if shape.metadata.get("pattern"):
        rule["pattern"] = translated(shape.metadata["pattern"])
    if getattr(shape, "enum", None):
        rule["enum"] = list(shape.enum)
    below: list[Any] = []
    if shape.type_name == "structure":
        kept = SENT.get(shape.name, shape.members)
        rule["members"] = {name: member.name for name, member in shape.members.items() if name in kept}
        rule["required"] = list(shape.required_members)
        below = [member for name, member in shape.members.items() if name in kept]
    elif shape.type_name == "list":
        rule["of"] = shape.member.name
        below = [shape.member]
    elif shape.type_name == "map":
        rule |= {"key": shape.key.name, "of": shape.value.name}
        below = [shape.key, shape.value]
    for each in below:
        _walk(each, shapes)


def translated(pattern: str) -> str:
    """Return the pattern as Python's `re` takes it. Raises ValueError where it cannot be."""
    for theirs, ours in CLASSES.items():
        pattern = pattern.replace(theirs, ours)
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is a pattern that Python does not read: {error}") from error
    return pattern


if __name__ == "__main__":
    sys.exit(rulesfile.main(sys.argv[1:], "sagemaker", "this botocore", table, serving))
