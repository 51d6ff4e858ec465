"""Parses times and durations in the platforms' JSON. Every function returns None for invalid text."""

from __future__ import annotations

import re
from datetime import datetime

_TIME = re.compile(r"(.+?)(?:\.(\d+))?([Zz]|[+-]\d\d:\d\d)?")
_ISO = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?")
_PROTOBUF = re.compile(r"(\d+(?:\.\d+)?)s")


def seconds(when: object) -> float | None:
    """Return unix seconds of a time in ISO 8601 or RFC 3339; a time without a zone is UTC.

    Fractions may have any number of digits: .NET writes seven, Google nine, and Python 3.10 reads three or six.
    """
    found = _TIME.fullmatch(when) if isinstance(when, str) else None
    if found is None:
        return None
    whole, fraction, zone = found.groups()
    zone = "+00:00" if zone in (None, "Z", "z") else zone
    try:
        return datetime.fromisoformat(f"{whole}.{(fraction or '')[:6]:0<6}{zone}").timestamp()
    except ValueError:
        return None


def duration_s(text: object) -> float | None:
    """Return the seconds of a duration in ISO 8601 (PT2M), or in protobuf's JSON (120s)."""
    if not isinstance(text, str):
        return None
    if found := _PROTOBUF.fullmatch(text):
        return float(found[1])
    if (found := _ISO.fullmatch(text)) is None:
        return None
    days, hours, minutes, rest = (float(part or 0) for part in found.groups())
    return days * 86_400 + hours * 3600 + minutes * 60 + rest
