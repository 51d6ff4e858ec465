"""Whether a region is one that its cloud is known to have: a wrong name is told before anything is sent."""

from __future__ import annotations

from collections.abc import Collection, Iterator

__all__ = ["doubts"]


def doubts(key: str, region: str | None, known: Collection[str], as_of: str) -> Iterator[str]:
    """Yield that the region under the key is not among the known ones, with those of like names: new ones come."""
    if region is None or region in known:
        return
    from difflib import get_close_matches

    near = get_close_matches(region, sorted(known), 3, 0.6)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    yield f"{key}: no region `{region}` was known in {as_of}, so the platform may refuse it{meant}"
