"""Writes backends/vertex/rules.json and rules_serving.json: what Vertex AI accepts, from google-api-python-client.

    .venv/bin/python tools/vertex_table.py                   # writes it
    .venv/bin/python tools/vertex_table.py --check [FILE]    # compares, and fails where Google says something else

rules.json is of a CustomJob; rules_serving.json is of the requests of an endpoint, with the fields that we send.
That package carries the API's discovery document; FILE is another copy of it. Facts only, in the form that
launcher/planning/request_rules.py walks: types, required and read-only fields, enumerations, and what the formats
int32, int64 and google-duration mean. Words that mean "unspecified", and those that Google has deprecated, are left
out: a job that we make has no use for them. A dry run reads the table, so that it needs no client; a test runs
`--check`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import rulesfile

ROOT = "CustomJob"
PREFIX = "GoogleCloudAiplatformV1"
# The fields of an endpoint's requests that we send: the others would fill pages.
SENT = {
    "UploadModelRequest": {"modelId", "model"},
    "Model": {"displayName", "versionDescription", "containerSpec", "labels"},
    "ModelContainerSpec": {"imageUri", "ports", "predictRoute", "healthRoute"},
    "Endpoint": {"displayName", "labels"},
    "DeployedModel": {"id", "model", "displayName", "dedicatedResources", "serviceAccount"},
    "DedicatedResources": {"machineSpec", "minReplicaCount", "maxReplicaCount"},
}
# What the formats mean. Source: protobuf.dev, "ProtoJSON Format"; a job's durations are never negative.
FORMATS: dict[str, dict[str, Any]] = {
    "int32": {"type": "integer", "min": -(2**31), "max": 2**31 - 1},
    "int64": {"type": "int64", "pattern": r"-?\d{1,19}", "said": "whole number"},
    "google-duration": {
        "type": "string",
        "pattern": r"\d{1,12}(\.\d{1,9})?s",
        "said": "duration in seconds, such as 3600s",
    },
}


def table(document: dict[str, Any]) -> dict[str, Any]:
    """Return the rules: the revision they are from, and every shape that a request can hold, by name."""
    shapes: dict[str, Any] = {}
    _walk(PREFIX + ROOT, document["schemas"], shapes)
    source = f"{document['id']}, revision {document['revision']}"
    return {"source": source, "root": ROOT, "shapes": dict(sorted(shapes.items()))}


def serving(document: dict[str, Any]) -> dict[str, Any]:
    """Return the rules of the three requests that start an endpoint."""
    shapes: dict[str, Any] = {}
    for name in ("UploadModelRequest", "Endpoint", "DeployModelRequest"):
        _walk(PREFIX + name, document["schemas"], shapes)
    source = f"{document['id']}, revision {document['revision']}"
    return {"source": source, "root": "Endpoint", "shapes": dict(sorted(shapes.items()))}


def _walk(name: str, schemas: dict[str, Any], shapes: dict[str, Any]) -> str:
    """Add the schema's shape and those below it; return its name."""
    short = name.removeprefix(PREFIX)
    if short in shapes:
        return short
    shape: dict[str, Any] = {"type": "object", "members": {}, "required": [], "read_only": []}
    shapes[short] = shape
    for field, told in sorted(schemas[name]["properties"].items()):
        if field not in SENT.get(short, (field,)):
            continue
        if told.get("readOnly"):
            shape["read_only"].append(field)
            continue
        shape["members"][field] = _rule(told, schemas, shapes)
        if told.get("description", "").startswith("Required."):
            shape["required"].append(field)
    return short


def _rule(told: dict[str, Any], schemas: dict[str, Any], shapes: dict[str, Any]) -> Any:
    """Return the rule of one value."""
    if "$ref" in told:
        return _walk(told["$ref"], schemas, shapes)
    if "format" in told:
        shapes[told["format"]] = FORMATS[told["format"]]
        return told["format"]
    if "enum" in told:
        deprecated = told.get("enumDeprecated", [False] * len(told["enum"]))
        words = [word for word, is_old in zip(told["enum"], deprecated, strict=True) if not is_old]
        return {"type": "string", "enum": [word for word in words if not word.endswith("_UNSPECIFIED")]}
    if told["type"] == "array":
        return {"type": "list", "of": _rule(told["items"], schemas, shapes)}
    if "additionalProperties" in told:
        return {"type": "map", "of": _rule(told["additionalProperties"], schemas, shapes)}
    return told["type"]


def discovery(path: str | None = None) -> dict[str, Any]:
    """Return the discovery document in the file, or the installed package's."""
    if path is None:
        import googleapiclient

        folder = Path(googleapiclient.__file__).parent / "discovery_cache" / "documents"
        path = str(folder / "aiplatform.v1.json")
    document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return document


if __name__ == "__main__":
    file = sys.argv[2] if len(sys.argv) > 2 else None
    tables = (lambda: table(discovery(file)), lambda: serving(discovery(file)))
    sys.exit(rulesfile.main(sys.argv[1:2], "vertex", "this description", *tables))
