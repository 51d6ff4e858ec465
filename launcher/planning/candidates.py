"""The candidates of a job: its config under each entry of `capacity.try`, pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config import schema

if TYPE_CHECKING:
    from ..config.schema import JobConfig


def candidates(config: JobConfig) -> tuple[JobConfig, ...]:
    """Return the config under each entry of `capacity.try`, in the entries' order; the config itself without entries.

    A loaded config has an entry's value, or the file's, for each key that any entry changes, null for a default. So the
    candidates of each candidate are the same, and the number of an entry names a candidate of a stored job too.
    """
    if config.capacity is None:
        return (config,)
    data = config.model_dump(mode="json", exclude_defaults=True)
    return tuple(under(data, entry) for entry in config.capacity.entries)


def under(data: Mapping[str, Any], entry: Mapping[str, Any]) -> JobConfig:
    """Return the config of the data, without defaults, with the values of an entry; null unsets a key."""
    changed = copy.deepcopy(dict(data))
    for key, value in entry.items():
        *above, last = key.split(".")
        sections = [changed]
        for step in above:
            sections.append(sections[-1].setdefault(step, {}))
        sections[-1][last] = value
        if value is None:
            del sections[-1][last]
            for step, section in zip(reversed(above), reversed(sections[:-1]), strict=True):
                if not section[step]:  # the same as a section that the file lacks
                    del section[step]
    return schema.model_of(changed).model_validate(changed)
