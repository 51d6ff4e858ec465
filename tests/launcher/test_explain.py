"""`cloudtrain explain` prints the documentation of keys."""

import json

import pytest
from click.testing import CliRunner

from cloudtrain.entrypoints.trainer.strategies.facts import FACTS
from cloudtrain.launcher.commands.explain import command
from cloudtrain.launcher.errors import UsageError


def explain(*arguments: str) -> str:
    """Return the output of the command."""
    return CliRunner().invoke(command, arguments, catch_exceptions=False).output


def test_explain_a_key_a_section_and_the_top_level() -> None:
    """A key has its type, default, help and example, as JSON too; a section lists its keys, each with its help."""
    output = explain("resources.spot")
    assert output.startswith("resources.spot: true or false, default false\n")
    assert "interruptible" in output
    assert "example: spot: true" in output
    output = explain("training.optimizer")
    assert all(f"\n{key} " in output for key in ("name", "lr", "weight_decay", "betas"))
    assert explain().startswith("name ")
    facts = json.loads(explain("resources", "--json"))
    assert facts["keys"]["spot"]["default"] is False
    assert facts["keys"]["instances"]["type"] == "whole number"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("limits.max_duration", "duration, default 24h"),
        ("training.strategy", f"{' | '.join(FACTS)}, default ddp"),
        ("budget.limit", "amount of money, required"),
        ("budget.alert_at", "list of percentage, default [50%, 80%, 100%]"),
        ("distributed.nproc_per_node", "whole number or auto, default auto"),
        ("ssh.hosts.0.port", "whole number"),
        ("params", "mapping of text to any value"),
    ],
)
def test_explain_prints_types_in_words(path: str, words: str) -> None:
    """Types and defaults have the spelling of the file."""
    assert f"{path}: {words}\n" in explain(path)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("resorces.spot", "resources.spot"),
        ("resources.project", "did you mean `project`?"),
        ("lr", "training.optimizer.lr"),
        ("limit", "did you mean `limits`?"),
        ("²", "lists the top level"),
    ],
)
def test_explain_an_unknown_key(path: str, hint: str) -> None:
    """An unknown path is a usage error with the most similar key."""
    with pytest.raises(UsageError) as caught:
        explain(path)
    assert hint in caught.value.hint
