"""Model folders for hosts and buckets (`push`), and for a vendor's endpoint (`export --for`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PushedModel:
    """A verified model folder on its way: the model's name, its version (12 digits), and its files by relative name."""

    name: str
    version: str
    files: Mapping[str, Path]


@dataclass(frozen=True)
class PushOutcome:
    """The end of a push to one target: the current version after the push, or the error."""

    version: str | None
    error: str = ""


@dataclass(frozen=True)
class ServedModel:
    """An exported model that a vendor's endpoint is to serve."""

    name: str
    version: str
    """The first 12 digits of the folder's digest."""
    machine: str | None = None
    """The machine type; None for the backend's default."""
    torch: str | None = None
    """The version of torch that traced the model."""
    requirements: str | None = None
    """The file in `code/` with the packages that the model needs; None for a traced model."""


@dataclass(frozen=True)
class ServingFiles:
    """The files for a vendor's command line, as texts by name, and notes for people."""

    files: Mapping[str, str]
    notes: tuple[str, ...] = ()
