"""The routes of a service: the method and the path of a request, and the operation."""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from doubles.wire import Answer


class Route(NamedTuple):
    """A method, a pattern of the whole path, and the operation; the function has (world, request, **named groups)."""

    method: str
    pattern: str
    name: str
    function: Callable[..., Answer]


def find(routes: Iterable[Any], method: str, path: str, flags: int = 0) -> tuple[Any, dict[str, Any]] | None:
    """Return the first route of the method and the path, with the values of the pattern's groups, or None."""
    for route in routes:
        matched = re.fullmatch(route.pattern, path, flags)
        if matched and route.method == method:
            return route, matched.groupdict()
    return None
