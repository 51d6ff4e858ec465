"""The verbs of a host: typed arguments, and an answer for each call."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.host import calls
from cloudtrain.entrypoints.host.calls import VERBS, VERBS_OF_HOST, Here

HERE = Here(Path("/nowhere"), "/nowhere/runtime", 0o022, "h1")


@pytest.mark.parametrize("verb", sorted({**VERBS, **VERBS_OF_HOST}))
def test_verb_has_typed_keyword_arguments(verb: str) -> None:
    """A verb names each argument with its type, and returns JSON; some verbs begin with the host."""
    module, _, name = {**VERBS, **VERBS_OF_HOST}[verb].partition(":")
    found = inspect.signature(getattr(importlib.import_module(f"cloudtrain.entrypoints.{module}"), name))
    first, *rest = [*found.parameters.values(), None]
    assert found.return_annotation == "dict[str, Any]"
    assert (first is not None and first.name == "here") == (verb in VERBS_OF_HOST)
    for each in [first, *rest] if verb not in VERBS_OF_HOST else rest:
        if each is not None:
            assert each.kind is inspect.Parameter.KEYWORD_ONLY, each
            is_open = each.annotation in (inspect.Parameter.empty, "Any", "dict[str, Any]", "Mapping[str, Any]")
            assert not is_open or each.name in ("record", "request", "spec")  # in their JSON form


@pytest.mark.parametrize(
    ("verb", "ask", "words"),
    [("look", {}, "missing"), ("look", {"root": "/", "checkpoints": "/", "more": 1}, "more"), ("put", {}, "missing")],
)
def test_wrong_arguments_are_an_answer(verb: str, ask: dict[str, Any], words: str) -> None:
    """The channel stays open."""
    answer, data = calls._run_verb(verb, ask, HERE)
    assert (answer["kind"], data) == ("TypeError", b"")
    assert words in answer["failed"]


def test_unknown_verb_is_an_answer() -> None:
    """A launcher of a later version may know more verbs; the channel stays open."""
    answer, _ = calls._run_verb("nowhere", {}, HERE)
    assert answer == {"failed": "KeyError('nowhere')", "kind": "KeyError"}


def test_clock_answers() -> None:
    """The answer is JSON without bytes."""
    answer, data = calls._run_verb("clock", {}, HERE)
    assert (answer["told"]["now_s"] > 1.7e9, data) == (True, b"")
