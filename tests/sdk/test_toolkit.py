"""The captured variables of SageMaker's training toolkit are those of the installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CAPTURED = Path(__file__).with_name("toolkit.json")
OF_MACHINE = ("num_cpus", "num_gpus")


def plain(text: str) -> dict[str, Any]:
    """Return the variables without the machine's counts."""
    found = {name: value for name, value in json.loads(text).items() if name[3:].lower() not in OF_MACHINE}
    training = json.loads(found.pop("SM_TRAINING_ENV"))
    return {**found, "training": {name: value for name, value in training.items() if name not in OF_MACHINE}}


def test_captured_variables_are_the_toolkits(tmp_path: Path) -> None:
    """tests/entrypoints/test_toolkit.py holds cloudtrain's variables to the captured file."""
    env = {**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path)}
    program = Path(__file__).with_name("toolkit.py")
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, check=True)
    assert plain(done.stdout) == plain(CAPTURED.read_text())
