"""The examples of fine-tuning run as their comments say: a new head, and an adapter by peft."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FEWER = ("--set", "training.max_steps=200")  # enough for weights that are worth a fine-tuning


@pytest.mark.soak  # tests/entrypoints/test_initial.py proves the parts
@pytest.mark.slow
def test_examples_train_from_the_digits_weights(cli: Any, tmp_path: Path) -> None:
    """The head and the adapter train a small share of the parameters, and reach their accuracies."""
    digits, finetune = EXAMPLES / "digits" / "cloudtrain.yaml", EXAMPLES / "finetune"
    cli.ok("submit", "-y", "-f", digits, "--name", "digits", "--instances", "1", *FEWER, timeout_s=120)
    cli.ok("submit", "-y", "-f", finetune / "cloudtrain.yaml", timeout_s=120)
    assert cli("artifacts", "parity", "-o", tmp_path / "parity").code == 0
    test = json.loads((tmp_path / "parity" / "metrics-test.json").read_bytes())
    assert (test["split"], test["n"], test["accuracy"] > 0.85) == ("test", 179, True)
    cli.ok("submit", "-y", "-f", finetune / "lora.yaml", timeout_s=120)
    lines = cli("logs", "lora").stdout
    assert "10320 of 161626 parameters are trained" in lines
    before, after = (float(found) for found in re.findall(r"accuracy (?:before|after) (\S+)", lines))
    assert (before < 0.3, after > 0.85) == (True, True)
    files = cli("artifacts", "lora", "-o", tmp_path / "adapter", "--json").json["files"]
    assert any(name.endswith("adapter_model.safetensors") for name in files)
