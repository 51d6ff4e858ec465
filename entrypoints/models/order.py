"""The order of an export: the message from `cloudtrain export` to the process that writes the model folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..contract import Message

HUGGINGFACE = "huggingface"  # the form, and the folder of transformers' configuration files


@dataclass(frozen=True)
class ExportOrder(Message):
    """A checkpoint, the place of the model folder, and the task."""

    checkpoint: str
    """The checkpoint's folder."""
    place: str
    """The path of the model folder."""
    name: str
    """The model's name."""
    archive: str | None = None
    """The job's code archive. None if only the checkpoint is known: then safetensors alone is written, unchecked."""
    archive_sha256: str | None = None
    task: str = "task.py"
    """The file below the code folder."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """The job's, for the task's functions."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The job's variables, with the inputs' paths on this machine."""
    forms: tuple[str, ...] = ("safetensors", "pt2")
    """The wanted forms, safetensors first."""
    seed: int = 0
    """Of the random state in which the task builds the model and draws the samples of the check."""
    key: str | None = None
    """An ssh key to sign with."""
    is_unchecked: bool = False
    """Whether the folder is written without a check."""
    needed: str | None = None
    """A form without which the export fails."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The job's records, for the model card and config.json."""
