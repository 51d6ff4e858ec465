"""Registration of a model folder: the registry by its name, then find, upload and create."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import backend as backends
from .. import config as configs
from ..backend.models import CheckedModel, ModelRegistry
from ..errors import UsageError

if TYPE_CHECKING:
    from ..config.schema import JobConfig

MLFLOW = "mlflow"


def registry_of(
    target: str, model: CheckedModel, file: Path, settings: Sequence[str], store: str | None
) -> ModelRegistry:
    """Return the model's place in the registry `target`; sends nothing. Raises UsageError, ConfigError."""
    if target == MLFLOW:
        from .mlflow import MlflowRegistry

        return MlflowRegistry(model, store)
    if store is not None:
        raise UsageError("--store is for mlflow", hint="the files go to the backend's bucket")
    if target not in backends.names():
        raise UsageError(f"`{target}` is no registry", hint=f"{backends.similar(target)}; or {MLFLOW}")
    backend = backends.load(target)
    if not isinstance(backend, backends.Registers):
        raise UsageError(f"{target} has no registry of models", hint=f"a cloud's backend, or {MLFLOW}")
    with configs.placing(file, settings):
        return backend.registry(model, config_of(target, file, settings))


def config_of(target: str, file: Path, settings: Sequence[str]) -> JobConfig:
    """Return the config file's settings for the backend. Raises ConfigError."""
    return configs.load(file, backend=target, overrides=settings)


def register(registry: ModelRegistry) -> tuple[str, bool]:
    """Upload and register the model; return its version, and False if the registry had the version already."""
    if (known := registry.find()) is not None:
        return known, False
    registry.upload()
    if (known := registry.find()) is not None:  # another process was faster
        return known, False
    return registry.create(), True
