"""The order of an export: the message from `cloudtrain export` to the process that writes the model folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..contract import Message

HUGGINGFACE = "huggingface"  # the form, and the folder of transformers' configuration files


@dataclass(frozen=True)
class ExportOrder(Message):
    """A checkpoint's folder, the place of the model folder, and the task.

    `archive`: the job's code archive with its `archive_sha256`; None if only the checkpoint is known, and then no form
    but safetensors can be written, and nothing checked. `task`: the file below the code folder. `environment`: the
    job's variables, with the inputs' paths on this machine. `name`: of the model. `facts`: the job's records, for the
    model card and config.json. `key`: an ssh key to sign with. `is_unchecked`: write the folder without a check.
    `forms`: the wanted forms, safetensors first; `needed`: a form without which the export fails. `seed`: of the random
    state in which the task builds the model and draws the samples of the check; `params`: the job's, for the task's
    functions.
    """

    checkpoint: str
    place: str
    name: str
    archive: str | None = None
    archive_sha256: str | None = None
    task: str = "task.py"
    params: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    forms: tuple[str, ...] = ("safetensors", "pt2")
    seed: int = 0
    key: str | None = None
    is_unchecked: bool = False
    needed: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
