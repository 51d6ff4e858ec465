"""Checks the name of a region against the cloud's known regions, before a submit."""

from __future__ import annotations

from collections.abc import Collection, Iterator

__all__ = ["doubts"]


def doubts(key: str, region: str | None, known: Collection[str], as_of: str) -> Iterator[str]:
    """Yield a warning for an unknown region, with similar names. Clouds add regions, so the region may still exist."""
    if region is None or region in known:
        return
    from difflib import get_close_matches

    near = get_close_matches(region, sorted(known), 3, 0.6)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    yield f"{key}: no region `{region}` was known in {as_of}, so the platform may refuse it{meant}"
