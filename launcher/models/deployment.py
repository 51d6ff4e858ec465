"""A folder for a vendor's own tools: the model folder, and beside it Dockerfile, requests and a README of the commands.

    model/                     the checked model folder
    Dockerfile, serve          the image: the server of `cloudtrain serve`
    cloudtrain/entrypoints/    the server's code
    *.json or *.yml            the vendor's requests
    README.md                  the commands in order, to start and to remove

The backend of the vendor renders and checks the texts; nothing is sent.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import foreign
from cloudtrain.entrypoints.models import folder as folders

from .. import backend as backends
from ..backend.model_files import ServedModel
from ..backend_table import SERVING
from ..config.schema import JobConfig
from ..errors import UsageError
from .exporting import hidden_beside, require_model_name

MODEL = "model"
_VERSION = "0" * 12  # before the export


def write(
    vendor: str, config: JobConfig, name: str, machine: str | None, place: Path, make: Callable[[Path], dict[str, Any]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Write the folder at once, when all is made; return the result of `make`, for this place, and notes for people.

    `make` writes a model folder of this name to a path. Raises UsageError for a vendor without endpoints or a wrong
    name, ConfigError for a value that the vendor refuses, both before the export.
    """
    backend = backends.load(vendor) if vendor in backends.names() else None
    if not isinstance(backend, backends.Serves):
        raise UsageError(f"`{vendor}` has no endpoints", hint=f"--for {SERVING}")
    require_model_name(name)
    backend.serving(ServedModel(name, _VERSION, machine), config)
    with hidden_beside(place) as hidden:
        whole = hidden / "whole"
        exported = make(whole / MODEL)
        served = backend.serving(_served(whole / MODEL, config, machine), config)
        for file, text in served.files.items():
            (whole / file).write_text(text, encoding="utf-8")
        (whole / "serve").chmod(0o755)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(str(files("cloudtrain.entrypoints")), whole / "cloudtrain/entrypoints", ignore=ignored)
        os.rename(whole, place)  # noqa: PTH104  # unlike Path.replace, replaces no file
    written = [*served.files, *(f"{MODEL}/{path}" for path in exported["files"])]
    return {**exported, "place": str(place), "files": sorted(written)}, served.notes


def _served(model: Path, config: JobConfig, machine: str | None) -> ServedModel:
    """Return what the files say of the model folder."""
    check = json.loads(foreign.read(model / folders.CHECK, foreign.JSON_BYTES))
    packages = config.requirements if not (model / folders.PT2).exists() else None
    is_pips = packages is not None and packages.endswith(".txt")
    name, digest = folders.read_config(model)["name"], folders.file_sha256(model / folders.SUMS)
    return ServedModel(name, digest[:12], machine, check.get("torch"), packages if is_pips else None)
