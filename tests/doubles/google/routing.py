"""The pattern of a REST request, and its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from doubles.wire import Answer

__all__ = ["Route"]


class Route(NamedTuple):
    """A method and a pattern of the whole path; the function has (world, request, **named groups)."""

    method: str
    pattern: str
    name: str
    function: Callable[..., Answer]
