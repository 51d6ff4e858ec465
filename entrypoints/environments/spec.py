"""The messages between the launcher and a host about the environment of a job (see contract.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..contract import Message


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(Message):
    """The environment of a job on a host; most fields apply to some kinds only.

    `kind`: none venv conda docker podman. `python`: the interpreter to run, to build the venv with, or in the image.
    `requirements` is the text of a requirements file, whose folder is `requirements_folder` below `code` (the unpacked
    code); `requirements_file`: the file in that folder with exactly this text. `conda`: a name or a prefix; `image`: by
    digest; `gpus`: UUIDs, for a container's trial; `limit_s`: for a build or a pull, None for the default.

    For a venv: pip leaves the interpreter's torch as installed (`holds_torch`); of the interpreter's packages the venv
    sees all (`system_site_packages`), or only torch and torch's requirements (`is_apart`); pip's output goes to the
    standard output (`shows`); `store` has copies of environments, and gets a copy of a new environment (`keeps`).
    """

    kind: str = "venv"
    workdir: str = ""
    python: str = "python3"
    requirements: str | None = None
    requirements_folder: str = "."
    requirements_file: str | None = None
    system_site_packages: bool = False
    conda: str | None = None
    image: str | None = None
    gpus: tuple[str, ...] = ()
    code: str | None = None
    limit_s: float | None = None
    holds_torch: bool = False
    is_apart: bool = False
    shows: bool = False
    store: str | None = None
    keeps: bool = False


@dataclass(frozen=True, kw_only=True)
class PreparedEnvironment(Message):
    """How the agent starts Python in a job's environment.

    `python` is an absolute path, in the container if there is a `container` (fields of dockerrun.Container).
    `environment` holds variables; a process that uses the venv holds its `lock` (venvs.hold). `seconds`: of the build.
    """

    python: str
    detail: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    container: Mapping[str, Any] | None = None
    lock: str | None = None
    seconds: float = 0.0
