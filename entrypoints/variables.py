"""The job's own variables in a config's arguments and environment: their names, and their expansion on the node.

`$CLOUDTRAIN_JOB` and `${CLOUDTRAIN_JOB}` are replaced; `$$CLOUDTRAIN_JOB` becomes the text `$CLOUDTRAIN_JOB`. Every
other `$` stays unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

__all__ = ["NAMES", "PREFIX", "expanded", "references"]

PREFIX = "CLOUDTRAIN_"
# Besides these a job has CLOUDTRAIN_INPUT_<NAME> for each entry of `inputs`.
NAMES = tuple(
    f"{PREFIX}{name}"
    for name in (
        "ATTEMPT",
        "CHECKPOINT_DIR",
        "CODE_DIR",
        "DEADLINE",
        "JOB",
        "NODE_RANK",
        "NUM_NODES",
        "OUTPUT_DIR",
        "RESUME_PATH",
    )
)
_REFERENCE = re.compile(rf"\$(\$?)(?:({PREFIX}\w*)|\{{({PREFIX}\w*)\}})", re.ASCII)


def references(text: str) -> Iterator[str]:
    """Yield the names of the variables that the text refers to."""
    for match in _REFERENCE.finditer(text):
        if not match[1]:
            yield match[2] or match[3]


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Return the text with the values of its variables; a variable without a value becomes empty."""

    def value(match: re.Match[str]) -> str:
        return match[0][1:] if match[1] else values.get(match[2] or match[3], "")

    return _REFERENCE.sub(value, text)
