"""The order for an export, from the launcher to the process that writes the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.entrypoints.contract import Message

__all__ = ["FORMS", "SAFETENSORS", "ExportOrder"]

SAFETENSORS = "safetensors"
FORMS = (SAFETENSORS, "pt2", "onnx")


@dataclass(frozen=True)
class ExportOrder(Message):
    """A checkpoint's folder, the place of the model folder, and the task.

    `archive`: the job's code archive with its `archive_sha256`; None if only the checkpoint is known, and then no form
    but safetensors can be written, and nothing checked. `task`: the file below the code folder. `inputs`: the job's
    inputs by name, as paths on this machine. `name`: of the model. `facts`: what the job's records say, for the
    model card and config.json. `key`: an ssh key to sign with. `is_unchecked`: write the folder without a check.
    """

    checkpoint: str
    place: str
    name: str
    archive: str | None = None
    archive_sha256: str | None = None
    task: str = "task.py"
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    forms: tuple[str, ...] = (SAFETENSORS, "pt2")
    seed: int = 0
    key: str | None = None
    is_unchecked: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
