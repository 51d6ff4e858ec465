"""The environment of a job on the user's own host: an interpreter, a venv, a conda environment, a container.

`prepare` is called on each host before the job starts; the node's agent needs the result to start boot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import interpreter
from .spec import EnvironmentSpec, PreparedEnvironment


def prepare(*, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare the job's environment (an EnvironmentSpec), and return the PreparedEnvironment. Raises Refused."""
    return _prepared(EnvironmentSpec.load(spec)).dump()


def _prepared(spec: EnvironmentSpec) -> PreparedEnvironment:
    """Return the environment of the spec's kind; only that kind's module is imported."""
    if spec.kind == "none":
        found = interpreter.find(spec.python)
        return PreparedEnvironment(python=found.path, detail=found.words)
    if spec.kind == "venv":
        from . import venvs

        return venvs.build(spec)
    if spec.kind == "conda":
        from . import condaenvs

        return condaenvs.find(spec.conda or "")
    from . import images

    return images.ready(spec)
