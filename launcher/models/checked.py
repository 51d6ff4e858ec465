"""A model folder for a registry or an endpoint: verified, with a passed check, with the metrics of the best split."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.models import folder as folders

from ..backend.models import CheckedModel
from ..errors import ConfigError, UsageError

# The letters that each registry and each kind of endpoint allows, with room for a suffix.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


def checked_folder(path: Path) -> folders.ModelFolder:
    """Return the verified folder. Raises ConfigError for a damaged folder, or without proof of the trained model."""
    try:
        return folders.verify(path, checked=True)
    except folders.ModelFolderError as error:
        raise ConfigError(f"{error}", hint="cloudtrain export writes and checks a model folder") from error


def require_model_name(name: str) -> None:
    """Raise UsageError for a name that a registry or a kind of endpoint refuses."""
    if not _NAME.fullmatch(name):
        hint = "--name with small letters, digits and `-`, at most 40, a letter first"
        raise UsageError(f"`{name}` cannot name a model in every registry", hint=hint)


def checked_model(path: Path, name: str | None, image: str | None) -> CheckedModel:
    """Return the folder's model; without a name, under the name of its job.

    Raises ConfigError for a damaged folder, or without proof of the trained model; UsageError for a name.
    """
    found = checked_folder(path)
    job, checkpoint = _mapping(found.config.get("job")), _mapping(found.config.get("checkpoint"))
    name = str(found.config.get("name") or path.resolve().name) if name is None else name
    require_model_name(name)
    split, metrics, file = _metrics(job, checkpoint)
    facts = {"job": job.get("job"), "step": checkpoint.get("step"), "commit": job.get("commit")}
    plain = {key: str(value) for key, value in facts.items() if value is not None}
    return CheckedModel(path, name, found.digest, found.files, split, metrics, file, plain, image)


def _metrics(job: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> tuple[str | None, dict[str, float], str]:
    """Return split, numbers, and the file with the numbers: of `test`, else of `eval`, which may be biased."""
    test = _mapping(job.get("test"))
    if test and not test.get("same_as_eval"):
        return "test", _numbers(test.get("metrics")), folders.CONFIG
    numbers = _numbers(job.get("metrics")) or _numbers(_mapping(checkpoint.get("trainer")).get("metrics"))
    return ("eval", numbers, folders.CONFIG) if numbers else (None, {}, "")


def _numbers(data: Any) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in _mapping(data).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _mapping(data: Any) -> Mapping[str, Any]:
    return data if isinstance(data, dict) else {}
