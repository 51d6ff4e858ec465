"""Model folders for hosts and buckets (`push`), and for a vendor's endpoint (`export --for`); who takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ..config.schema import JobConfig


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


@runtime_checkable
class ReceivesModels(Protocol):
    """A backend whose machines keep model folders for servers."""

    def push_model(
        self, config: JobConfig | None, hosts: Sequence[str], place: str, model: PushedModel, *, replaces: bool
    ) -> dict[str, PushOutcome]:
        """Bring the model to the folder `place` of each host; return the outcome by host.

        Without `replaces`, a host whose current model has a different name refuses.
        """

    def restore_model(self, config: JobConfig | None, hosts: Sequence[str], place: str) -> dict[str, PushOutcome]:
        """Make the version before the current one current; return the outcome by host."""


@runtime_checkable
class Serves(Protocol):
    """A backend whose vendor's own command line starts an endpoint from files."""

    def serving(self, model: ServedModel, config: JobConfig) -> ServingFiles:
        """Return the files for a model with the settings of the config; pure. Raises ConfigError for a wrong value."""
