"""The verbs of a host: typed arguments, and an answer for each call."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.host import calls
from cloudtrain.entrypoints.host.calls import Here

HERE = Here(Path("/nowhere"), "/nowhere/runtime", 0o022, "h1")
BACKENDS = Path(__file__).resolve().parents[2] / "backends"
_VERB = re.compile(r'(?:\bCall\(|\.(?:call|ask|poll)\((?:[^,"\n]+, )?|"verb": )\s*"(\w+\.\w+)"')
VERBS = sorted({verb for path in BACKENDS.rglob("*.py") for verb in _VERB.findall(path.read_text())})


@pytest.mark.parametrize("verb", VERBS)
def test_verb_has_typed_keyword_arguments(verb: str) -> None:
    """A verb that a backend calls names each argument with its type; some verbs begin with the host."""
    module, _, name = verb.partition(".")
    found = inspect.signature(getattr(importlib.import_module(f"cloudtrain.entrypoints.host.{module}"), name))
    assert found.return_annotation in ("dict[str, Any]", "None")
    for number, each in enumerate(found.parameters.values()):
        if (number, each.name) == (0, "here"):
            assert each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            continue
        assert each.kind is inspect.Parameter.KEYWORD_ONLY, each
        is_open = each.annotation in (inspect.Parameter.empty, "Any", "dict[str, Any]", "Mapping[str, Any]")
        assert not is_open or each.name in ("record", "request", "spec")  # in their JSON form


def test_backends_call_all_verbs() -> None:
    """The search for verbs in the backends' code finds the calls of both kinds of hosts."""
    assert len(VERBS) == 45


@pytest.mark.parametrize(
    ("verb", "ask", "kind", "words"),
    [
        ("verbs.look", {}, "TypeError", "missing"),
        ("verbs.look", {"root": "/", "checkpoints": "/", "more": 1}, "TypeError", "more"),
        ("files.put", {}, "TypeError", "missing"),
        ("nowhere", {}, "ModuleNotFoundError", "nowhere"),
        ("verbs.nowhere", {}, "AttributeError", "nowhere"),
    ],
)
def test_wrong_call_is_an_answer(verb: str, ask: dict[str, Any], kind: str, words: str) -> None:
    """The channel stays open; a launcher of a later version may know more verbs."""
    answer, data = calls._run_verb(verb, ask, HERE)
    assert (answer["kind"], data) == (kind, b"")
    assert words in answer["failed"]


def test_clock_answers() -> None:
    """The answer is JSON without bytes."""
    answer, data = calls._run_verb("calls.clock", {}, HERE)
    assert (answer["told"]["now_s"] > 1.7e9, data) == (True, b"")
