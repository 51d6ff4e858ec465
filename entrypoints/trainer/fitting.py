"""Whether a parent's weights fit the task's model, by names and shapes alone: the check of `init_from` before a submit.

    python -m cloudtrain.entrypoints.trainer.fitting SPEC SAVED

Runs in the code folder, as memory.py. SAVED is a JSON file with the shape of each saved weight. Prints one JSON line:
`fits` (the number of weights), `fault` (the text that the node would report), or `why` there was no comparison.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..checkpoints import matching
from ..contract import InitSettings
from ..errors import TaskError
from .initial import same_tensors
from .memory import answering, without_data
from .settings import read_spec
from .task import load_task


def main(spec_file: str, saved_file: str) -> None:
    """Print the result of the comparison."""
    with answering() as answer:  # after an exception of the task, the node will tell
        answer(compare(spec_file, json.loads(Path(saved_file).read_text())))


def compare(spec_file: str, saved: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the result of the comparison. Raises the errors of the task."""
    spec = read_spec(spec_file)
    wanted = spec.init_from or InitSettings()
    module = without_data(spec, load_task(spec.target), FakeTensorMode(allow_non_fake_inputs=True))
    live = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    here = {name: tuple(value.shape) for name, value in live.items()}
    there = {name: tuple(shape) for name, shape in saved.items()}
    try:
        return {"fits": len(matching.pair(there, here, wanted, same_tensors(live)).sources)}
    except TaskError as error:
        return {"fault": str(error)}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # a task may leave threads
