"""The environment of a job on the user's own host: an interpreter, a venv, a conda environment, a container.

`prepare` is called on each host before the job starts; the node's agent needs the result to start boot.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import Refused
from . import interpreter
from .spec import EnvironmentSpec, PreparedEnvironment

KINDS = ("none", "venv", "conda", "docker", "podman")


def prepare(*, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare the job's environment (an EnvironmentSpec), and return the PreparedEnvironment. Raises Refused."""
    started_s = time.monotonic()
    made = _prepared(EnvironmentSpec.load(spec))
    return replace(made, seconds=round(time.monotonic() - started_s, 3)).dump()


def _prepared(spec: EnvironmentSpec) -> PreparedEnvironment:
    if spec.kind == "none":
        found = interpreter.find(spec.python)
        return PreparedEnvironment(python=found.path, detail=found.words)
    if spec.kind == "venv":
        from . import venvs

        return venvs.build(spec)
    if spec.kind == "conda":
        from . import condaenvs

        return condaenvs.find(spec.conda or "")
    if spec.kind in ("docker", "podman"):
        from . import images

        return images.ready(spec)
    raise Refused(f"no environment `{spec.kind}` is known; choose one of {', '.join(KINDS)}")
