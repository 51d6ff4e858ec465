"""The variables of SageMaker's training toolkit, held to the toolkit's own (tests/sdk/toolkit.py printed them)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sdk.toolkit import ARGS, ENVIRON, lay_out

from cloudtrain.entrypoints.container import toolkit
from cloudtrain.entrypoints.contract import RunSpec

CAPTURED = Path(__file__).parents[1] / "sdk/toolkit.json"
# What another machine, or cloudtrain's own folder of the code, changes.
OF_MACHINE = {"SM_NUM_CPUS", "SM_NUM_GPUS", "SM_MODULE_DIR"}
IN_TRAINING = {name.removeprefix("SM_").lower() for name in OF_MACHINE}


def plain(values: Mapping[str, str], base: str) -> dict[str, Any]:
    """Return the variables without the machine's own; JSON is read, so that its spelling does not count."""
    found: dict[str, Any] = {name: value.replace(base, "BASE") for name, value in values.items()}
    for name, value in list(found.items()):
        if value[:1] in "{[":
            found[name] = json.loads(value) if value else value
    training = {name: value for name, value in found["SM_TRAINING_ENV"].items() if name not in IN_TRAINING}
    return {**{name: value for name, value in found.items() if name not in OF_MACHINE}, "SM_TRAINING_ENV": training}


def test_variables_equal_the_toolkits(tmp_path: Path) -> None:
    """Names and values are the toolkit's, without cloudtrain's own channels."""
    lay_out(tmp_path, {"code": {"TrainingInputMode": "File"}, "job": {"TrainingInputMode": "File"}})
    found = toolkit.variables(tmp_path, tmp_path / "cloudtrain", RunSpec("script", "train.py", ARGS), ENVIRON)
    assert found.keys() >= OF_MACHINE
    assert plain(found, str(tmp_path)) == plain(json.loads(CAPTURED.read_text()), "BASE")
    Path(found["SM_OUTPUT_INTERMEDIATE_DIR"], "a").touch()
    assert (tmp_path / "output/data/intermediate/a").exists()  # of the folder that SageMaker uploads


def test_other_platforms_get_no_variable(tmp_path: Path) -> None:
    """Without SageMaker's file nothing is set, and no folder is made."""
    assert toolkit.variables(tmp_path, tmp_path, RunSpec("script", "train.py"), {}) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--lr=0.1 --fast", {"lr": 0.1, "fast": True}),
        ("data.csv --sizes 1 2 --name x=y -b 4", {"sizes": [1, 2], "name": "x=y", "b": 4}),
        ("--shift -3 --scale -.5", {"shift": -3, "scale": "-.5"}),
    ],
)
def test_options_are_hyperparameters(words: str, found: dict[str, Any]) -> None:
    """Values keep their types; words before the first option have no name."""
    assert toolkit.hyperparameters(tuple(words.split())) == found
