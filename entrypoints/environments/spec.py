"""The messages between the launcher and a host about the environment of a job (see contract.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..contract import Message


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(Message):
    """The environment of a job on a host; most fields apply to some kinds only."""

    kind: str = "venv"  # none venv conda docker podman
    workdir: str = ""
    python: str = "python3"  # to run, to build the venv with, or in the image
    requirements: str | None = None  # the text of a requirements file
    requirements_folder: str = "."  # the file's folder below `code`
    requirements_file: str | None = None  # the file in that folder with exactly this text
    system_site_packages: bool = False  # a venv sees all packages of the interpreter
    conda: str | None = None  # a name or a prefix
    image: str | None = None  # by digest
    gpus: tuple[str, ...] = ()  # UUIDs, for a container's trial
    code: str = ""  # the unpacked code
    holds_torch: bool = False  # pip leaves the interpreter's torch in a venv as installed
    is_apart: bool = False  # of the interpreter's packages, a venv sees only torch and torch's requirements
    shows: bool = False  # pip's output goes to the standard output
    store: str | None = None  # has copies of environments
    keeps: bool = False  # the store gets a copy of a new environment


@dataclass(frozen=True, kw_only=True)
class PreparedEnvironment(Message):
    """How the agent starts Python in a job's environment."""

    python: str  # an absolute path, in the container if there is a `container`
    detail: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)  # variables
    container: Mapping[str, Any] | None = None  # the fields of dockerrun.Container
    lock: str | None = None  # held by each process that uses the venv (venvs.hold)
