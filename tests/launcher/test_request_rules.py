"""The check of a request against a vendor's table, with a small table that has every kind of rule."""

from typing import Any

import pytest

from cloudtrain.launcher.planning.request_rules import Table, meant, regions, unknown_region, violations
from cloudtrain.launcher.prices import catalog

_KINDS = {kind: {"type": {"type": "string", "enum": [kind]}, "path": "string"} for kind in ("file", "model")}
FILE, MODEL = ({"type": "object", "members": members, "required": ["path", "type"]} for members in _KINDS.values())
TABLE = Table(
    root="Job",
    shapes={
        "Job": {
            "type": "object",
            "members": {
                "name": "Name",
                "nodes": {"type": "integer", "min": 1, "max": 8},
                "size": "int64",
                "price": "number",
                "isSpot": "boolean",
                "machine": "Machine",
                "tags": {"type": "map", "key": "Name", "of": "string"},
                "words": {"type": "list", "of": "string", "max": 2},
                "task": "Task",
                "input": {"type": "either", "of": ["number", FILE, MODEL]},
                "mode": {"type": "string", "enum": ["read_only", "copy"], "fold": "snake", "nullable": True},
                "extra": "any",
            },
            "required": ["name"],
            "read_only": ["state"],
        },
        "Name": {"type": "string", "min": 1, "pattern": "[a-z-]*", "said": "name in small letters"},
        "Machine": {"type": "string", "enum": ["a1", "b2"]},
        "Task": {"type": "choice", "by": "kind", "cases": {"script": "Script"}},
        "Script": {"type": "object", "members": {"kind": "string", "path": "string"}, "required": ["path"]},
    },
    thing="a job",
    vendor="Acme",
    growing=("Machine",),
)
GOOD: dict[str, Any] = {"name": "digits"}


@pytest.mark.parametrize(
    "more",
    [
        {"nodes": 8, "size": 5, "price": 1, "isSpot": False},
        {"size": "5", "price": 0.5, "machine": "a1", "tags": {"team": "Vision"}, "words": []},
        {"task": {"kind": "script", "path": "x"}, "input": 3, "mode": None, "extra": [None]},
        {"input": {"type": "model", "path": "x"}, "mode": "ReadOnly"},
    ],
)
def test_valid_value_has_no_violation(more: dict[str, Any]) -> None:
    """The cases cover every kind of rule in the table."""
    assert list(violations(TABLE, {**GOOD, **more})) == []


@pytest.mark.parametrize(
    ("more", "path", "message"),
    [
        ({"name": "Digits"}, "name", "`Digits` is not a valid name in small letters"),
        ({"name": ""}, "name", "0 characters is less than 1"),
        ({"nodes": 0}, "nodes", "0 is less than 1"),
        ({"nodes": 9}, "nodes", "9 is more than 8"),
        ({"nodes": 2.0}, "nodes", "expected an integer, found 2.0"),
        ({"nodes": True}, "nodes", "expected an integer, found true"),
        ({"size": 2.5}, "size", "expected an integer, found 2.5"),
        ({"price": "1"}, "price", 'expected a number, found "1"'),
        ({"isSpot": 0}, "isSpot", "expected true or false, found 0"),
        ({"tags": {"Team": "x"}}, "tags.Team", "`Team` is not a valid name in small letters"),
        ({"tags": {"team": 1}}, "tags.team", "expected a string, found 1"),
        ({"tags": {1: "x"}}, "tags.1", "expected a string, found 1"),
        ({"words": ["a", None]}, "words[1]", "expected a string, found null"),
        ({"words": ["a"] * 3}, "words", "3 entries is more than 2"),
        ({"task": {"path": "x"}}, "task.kind", "is required"),
        ({"task": {"kind": "module"}}, "task.kind", "`module` is not one of script"),
        ({"task": {"kind": "script"}}, "task.path", "is required"),
        ({"input": "x"}, "input", 'expected a number or a mapping, found "x"'),
        ({"input": {"type": "folder", "path": "x"}}, "input.type", "`folder` is not one of file, model"),
        ({"input": {"path": "x"}}, "input.type", "is required: one of file, model"),
        ({"input": {"type": "model"}}, "input.path", "is required"),
        ({"mode": "reed_only"}, "mode", "`reed_only` is not one of read_only, copy; did you mean `read_only`?"),
        ({"state": "x"}, "state", "is set by Acme; a request must not contain it"),
        ({"is_spot": True}, "is_spot", "is not a field of a job; did you mean `isSpot`?"),
        ({"colour": "x"}, "colour", "is not a field of a job"),
        ({"words": "x" * 100}, "words", f'expected a list, found "{"x" * 79}...'),
    ],
)
def test_violation_is_reported_with_its_path(more: dict[str, Any], path: str, message: str) -> None:
    """Each violation is reported once and alone."""
    assert list(violations(TABLE, {**GOOD, **more})) == [(path, message, False)]


def test_growing_enumerations_and_parts_are_checked() -> None:
    """The vendor adds values, so a new one is a warning; the paths of a part start at the part."""
    told = ("machine", "`c3` is not in our table of 2; Acme may know it", True)
    assert list(violations(TABLE, {**GOOD, "machine": "c3"})) == [told]
    assert [path for path, _, _ in violations(TABLE, {"kind": "script", "x": 1}, "Task")] == ["path", "x"]


@pytest.mark.parametrize(("word", "name"), [("isspot", "isSpot"), ("is_spot", "isSpot"), ("nmae", "name")])
def test_misspelt_and_respelt_field_names_are_recognised(word: str, name: str) -> None:
    """A name that differs only in case and punctuation is preferred to a merely similar name."""
    assert meant(word, ["is_spots", "name", "isSpot"]) == f"; did you mean `{name}`?"


def test_unknown_region_has_a_warning_with_similar_names() -> None:
    """A known, priced or missing region has no warning; a new region may be valid, so the submit is not refused."""
    for region in ("us-east-1", "eu-north-1", "cn-north-1", "me-west-1", None):
        assert unknown_region("sagemaker", "region", region, "2026") is None
    for backend, key, region, hint in (
        ("sagemaker", "region", "eu-wset-1", "did you mean `eu-west-1`"),
        ("azureml", "region", "eastuss", "did you mean `eastus`"),
        ("azureml", "region", "us-east-1", "did you mean `eastus` or `eastus2`"),
        ("vertex", "location", "x", "typing error"),
    ):
        found = unknown_region(backend, key, region, "2026")
        assert (found.key, found.is_warning) == (f"{backend}.{key}", True)
        assert found.message == f"no region `{region}` was known in 2026, so the platform may refuse it"
        assert hint in found.hint
    daily = unknown_region("sagemaker", "region", "x", "2026-08-21")
    assert daily.message == "no region `x` was known on 2026-08-21, so the platform may refuse it"
    for backend in ("sagemaker", "azureml", "vertex"):
        assert {row["region"] for row in catalog.rows(backend)} - {""} <= regions(backend).keys()
