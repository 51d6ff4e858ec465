"""The base of a stand-in's settings, which a test may change."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from doubles.kit.differences import Differs


@dataclass(frozen=True)
class Settings(Differs):
    """Times in seconds of real time. The settings of differences from the documentation are inherited."""

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The permitted values of settings that have a fixed number of values."""
    execute: bool = True
    """Whether containers run; else the orders of a test alone change a job."""

    def changed(self, values: dict[str, Any]) -> Self:
        """Return the settings with new values. Raises ValueError for an unknown setting or choice."""
        known = {field.name for field in fields(self)}
        unknown = set(values) - known
        if unknown:
            raise ValueError(f"unknown settings {sorted(unknown)}; there are {sorted(known)}")
        for name, choices in self.CHOICES.items():
            if name in values and values[name] not in choices:
                raise ValueError(f"{name} is one of {choices}")
        return replace(self, **values)
