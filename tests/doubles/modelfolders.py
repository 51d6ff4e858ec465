"""Model folders in the form of `cloudtrain export`, without a training: for registries and endpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.models import folder


def write_model(
    path: Path, *, passed: bool | None = True, step: int = 40, test: dict[str, float] | None = None, same: bool = False
) -> Path:
    """Write a folder with small files; return its path.

    `test`: the metrics of an evaluation of the split `test`; `same`: the split is the split `eval`.
    """
    (path / "code").mkdir(parents=True)
    facts: dict[str, Any] = {"job": "digits-abcde", "metrics": {"accuracy": 0.9625, "loss": 0.12}, "commit": "0a1b2c"}
    if test is not None:
        facts["test"] = {"split": "test", "same_as_eval": same, "metrics": test}
    config = {"format": folder.FORMAT, "name": "digits", "job": facts, "checkpoint": {"step": step, "trainer": {}}}
    (path / folder.CONFIG).write_text(json.dumps(config))
    (path / folder.CHECK).write_text(json.dumps({"passed": passed, "forms": {}}))
    (path / folder.WEIGHTS).write_bytes(bytes(range(256)) * 8)
    (path / folder.CARD).write_text("# digits\n")
    (path / "code" / "task.py").write_text("")
    folder.write_sums(path, {})
    return path
