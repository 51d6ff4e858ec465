"""Writes backends/azureml/rules.json and rules_serving.json: what Azure ML accepts, from the installed azure-ai-ml.

    .venv/bin/python tools/azureml_table.py            # writes it
    .venv/bin/python tools/azureml_table.py --check    # compares, and fails where azure-ai-ml says something else

rules.json is of a command job; rules_serving.json is of the files of an endpoint (`az ml model create -f` and two of
`az ml online-...`), with the fields that we write.

Facts only, in the form that launcher/planning/request_rules.py walks: types, required fields, enumerations, read-only
fields, and which field tells the kinds of a thing apart. A job twice: the body of the PUT, from the client's models,
and as JobFile the file that `az ml job create` and `load_job` read, from their schema. The models know no lengths and
no patterns; the few that the published ARM schema has stand below. A dry run reads the table, so that it needs no SDK;
a test runs `--check`.
"""

from __future__ import annotations

import datetime
import importlib
import logging
import sys
import types
import typing
from enum import Enum
from typing import Any

import rulesfile

MODELS = "azure.ai.ml._restclient.arm_ml_service.models"
KINDS: dict[Any, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    datetime.timedelta: "Duration",
}

# What the published ARM schema says and the SDK's models leave out. Source: Azure/azure-resource-manager-schemas,
# commit a1454431 (2026-08-16), Microsoft.MachineLearningServices 2025-01-01-preview, which the SDK sends; 2026-05-01
# says the same. A pattern without anchors is there one to be found somewhere in the text ("holds a letter, a digit or
# _"); shmSize's is taken for the whole, because its description says so.
_NOT_EMPTY = {"min": 1, "pattern": r"(?s:.*)[a-zA-Z0-9_](?s:.*)"}
_GUID = {"min": 36, "max": 36, "pattern": r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "CommandJob.command": _NOT_EMPTY,
    "CommandJob.environmentId": _NOT_EMPTY,
    "JobResourceConfiguration.shmSize": {"pattern": r"\d+[bBkKmMgG]"},
    "LiteralJobInput.value": _NOT_EMPTY,
    "ManagedIdentity.clientId": _GUID,
    "ManagedIdentity.objectId": _GUID,
    **{
        f"{kind}JobInput.uri": _NOT_EMPTY
        for kind in ("CustomModel", "MLFlowModel", "MLTable", "TritonModel", "UriFile", "UriFolder")
    },
}
# Fields of that version which the models have lost, and the SDK still writes into the body by hand. Source: the same
# schema, and azure-ai-ml 1.35.2, entities/_job/command_job.py, _to_rest_object.
LOST: dict[str, dict[str, Any]] = {"CommandJob.parentJobName": {}}
# The job's name stands in the URL, not in the body. Source: the same schema, resourceDefinitions.workspaces_jobs.
JOB_NAME = {"type": "string", "min": 1, "max": 255, "pattern": r"[a-zA-Z0-9][a-zA-Z0-9\-_]{0,254}"}
# As the client writes a timedelta.
DURATION = {
    "type": "string",
    "pattern": r"P(?=.)(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?",
    "said": "ISO 8601 duration in whole seconds, such as PT3600S",
}


# The fields of an endpoint's files that we write: the others would fill pages.
SENT = {
    "ModelFile": {"$schema", "name", "version", "type", "path", "description"},
    "EndpointFile": {"$schema", "name", "auth_mode", "description"},
    "DeploymentFile": {
        *("$schema", "name", "endpoint_name", "model", "environment", "instance_type", "instance_count"),
        *("request_settings", "liveness_probe", "readiness_probe"),
    },
}
# Source: learn.microsoft.com, azure/machine-learning/how-to-manage-quotas, "Azure Machine Learning online endpoints".
ENDPOINT_NAME = {"type": "string", "min": 3, "max": 32, "pattern": r"[a-zA-Z][a-zA-Z0-9-]*[a-zA-Z0-9]"}


def table() -> dict[str, Any]:
    """Return the rules: the version they are from, the file's, and every shape that the body can hold, by name."""
    from azure.ai.ml._schema.job.command_job import CommandJobSchema
    from azure.ai.ml._version import VERSION

    models = importlib.import_module(MODELS)
    schema: Any = CommandJobSchema
    job_file = _file_object(schema(context={"base_path": "./"}))
    shapes: dict[str, Any] = {"Duration": DURATION, "JobFile": job_file, "JobName": JOB_NAME}
    _model(models.JobBase, shapes)
    for place, facts in {**PUBLISHED, **LOST}.items():
        shape, _, field = place.partition(".")
        shapes[shape]["members"][field] = {"type": "string", **facts}
    source = f"azure-ai-ml {VERSION}"
    return {"source": source, "root": models.JobBase.__name__, "shapes": dict(sorted(shapes.items()))}


def serving() -> dict[str, Any]:
    """Return the rules of the three files that start an endpoint."""
    from azure.ai.ml._schema._deployment.online.online_deployment import ManagedOnlineDeploymentSchema
    from azure.ai.ml._schema._endpoint.online.online_endpoint import ManagedOnlineEndpointSchema
    from azure.ai.ml._schema.assets.model import ModelSchema
    from azure.ai.ml._version import VERSION

    schemas: dict[str, Any] = {"ModelFile": ModelSchema, "EndpointFile": ManagedOnlineEndpointSchema}
    shapes: dict[str, Any] = {}
    for name, schema in {**schemas, "DeploymentFile": ManagedOnlineDeploymentSchema}.items():
        shape = shapes[name] = _file_object(schema(context={"base_path": "./"}))
        shape["members"] = {field: rule for field, rule in shape["members"].items() if field in SENT[name]}
    shapes["EndpointFile"]["members"]["name"] = shapes["DeploymentFile"]["members"]["endpoint_name"] = ENDPOINT_NAME
    shapes["DeploymentFile"]["members"]["model"] = {"type": "string"}  # or a whole model: here a file of its own
    return {"source": f"azure-ai-ml {VERSION}", "root": "EndpointFile", "shapes": shapes}


def _model(model: Any, shapes: dict[str, Any]) -> None:
    """Add the model's shape, and those of everything that it holds."""
    if model.__name__ in shapes:
        return
    shape: dict[str, Any] = {}
    shapes[model.__name__] = shape
    model({})  # sets up the class's own list of fields
    if model.__dict__.get("__mapping__"):
        (by,) = (f._rest_name for f in model._attr_to_rest_field.values() if f._is_discriminator)
        shape |= {"type": "choice", "by": by, "cases": {}}
        for word, case in sorted(model.__mapping__.items()):
            shape["cases"][str(getattr(word, "value", word))] = case.__name__
            _model(case, shapes)
        return
    shape |= {"type": "object", "members": {}, "required": [], "read_only": []}
    hints = typing.get_type_hints(model, localns={"_models": sys.modules[MODELS]})
    for attribute, field in sorted(model._attr_to_rest_field.items()):
        if field._visibility == ["read"]:
            shape["read_only"].append(field._rest_name)
            continue
        hint, is_optional = _without_none(hints[attribute])
        shape["members"][field._rest_name] = _rule(hint, shapes)
        if not is_optional:
            shape["required"].append(field._rest_name)


def _rule(hint: Any, shapes: dict[str, Any]) -> Any:
    """Return the rule of one value."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in KINDS:
        return KINDS[hint]
    if hint is Any:
        return "any"
    if origin is typing.Literal:
        return {"type": "string", "enum": [arguments[0].value]}
    if origin is list:
        return {"type": "list", "of": _rule(arguments[0], shapes)}
    if origin is dict:
        return {"type": "map", "of": _rule(arguments[1], shapes)}
    if origin in (typing.Union, types.UnionType):
        # The models write an enumeration as `str or the enumeration`.
        (enum,) = (each for each in arguments if isinstance(each, type) and issubclass(each, Enum))
        shapes[enum.__name__] = {"type": "string", "enum": [member.value for member in enum]}
        return str(enum.__name__)
    if hint.__name__ == "JobBaseProperties":  # any kind of job in the models, a command job here
        hint = sys.modules[MODELS].CommandJob
    _model(hint, shapes)
    return str(hint.__name__)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return the hint without None, and whether it had it."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is not typing.Union or type(None) not in arguments:
        return hint, False
    return typing.Union[tuple(each for each in arguments if each is not type(None))], True  # noqa: UP007 - made here


def _file_object(schema: Any) -> dict[str, Any]:
    """Return the rule of a mapping in the job's file."""
    found: dict[str, Any] = {"type": "object", "members": {}, "required": [], "read_only": []}
    for name, field in sorted((field.data_key or name, field) for name, field in schema.fields.items()):
        if name == "$schema":  # for editors; load_job passes over it
            found["members"][name] = "string"
            continue
        if field.dump_only:
            found["read_only"].append(name)
            continue
        found["members"][name] = _file_rule(field)
        if field.required:
            found["required"].append(name)
    return found


def _file_rule(field: Any) -> dict[str, Any]:
    """Return the rule of one value in the job's file."""
    from azure.ai.ml._schema.core import fields as ours
    from azure.ai.ml._utils.utils import camel_to_snake
    from marshmallow import fields

    rule: dict[str, Any] = {"type": "string"}
    if isinstance(field, ours.ExperimentalField):
        return _file_rule(field.experimental_field)
    if isinstance(field, fields.Nested):
        rule = _file_object(field.schema)
    elif isinstance(field, ours.UnionField):
        rules = [_file_rule(each) for each in field.union_fields]
        rules = [below for each in rules for below in (each["of"] if each["type"] == "either" else [each])]
        rules = [each for index, each in enumerate(rules) if each not in rules[:index]]
        rules = [each for each in rules if each["type"] == "any"] or rules
        rule = rules[0] if len(rules) == 1 else {"type": "either", "of": rules}
    elif isinstance(field, ours.StringTransformedEnum):
        rule["enum"] = field.allowed_values
        rule["fold"] = "snake" if field.casing_transform is camel_to_snake else "lower"
    elif isinstance(field, fields.Dict):
        rule = {"type": "map", "of": _file_rule(field.value_field) if field.value_field else {"type": "any"}}
    elif isinstance(field, fields.List):
        rule = {"type": "list", "of": _file_rule(field.inner)}
    elif type(field) is fields.Raw:
        rule = {"type": "any"}
    else:
        numbers = ((fields.Integer, "integer"), (fields.Boolean, "boolean"), (fields.Float, "number"))
        rule["type"] = next((kind for each, kind in numbers if isinstance(field, each)), "string")
    return rule | {"nullable": True} if field.allow_none else rule


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the SDK calls half of its classes experimental
    sys.exit(rulesfile.main(sys.argv[1:], "azureml", "this azure-ai-ml", table, serving))
