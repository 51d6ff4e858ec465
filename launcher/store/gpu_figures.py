"""The use of the job's GPUs, folded from `gpu` events (agent/gpumeter.py), and a warning about idle GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudtrain.entrypoints.format import span

from ..text import sanitize

IDLE_PERCENT, IDLE_S = 10.0, 300.0  # a GPU below this use for IDLE_S seconds idles
GONE_S = 600.0  # without figures, after which a rank is dropped
MOST_RANKS = 1024
_MOST = {"use": 100.0, "memory_mib": 1e7, "total_mib": 1e7, "watts": 1e5}

# By rank: the newest figures, their time, the mean use, and the start of an idle time.
Gpus = Mapping[str, Mapping[str, Any]]


def fold(known: Gpus, entries: Any, time_s: float) -> dict[str, dict[str, Any]]:
    """Return the figures after an event's `gpus`: lists of rank, use, memory used and in all, and power."""
    now = {rank: dict(each) for rank, each in known.items() if time_s - each["told_s"] < GONE_S}
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, list) or len(entry) != 1 + len(_MOST) or (rank := sanitize.count(entry[0])) is None:
            continue
        if len(now) >= MOST_RANKS and str(rank) not in now:
            continue
        before = now.get(str(rank), {})
        found: dict[str, Any] = {
            name: _figure(each, most) for (name, most), each in zip(_MOST.items(), entry[1:], strict=True)
        }
        use, count = found["use"], before.get("count", 0)
        if use is not None:
            found |= {"count": count + 1, "mean": (before.get("mean", 0.0) * count + use) / (count + 1)}
            if use < IDLE_PERCENT:
                found["idle_since_s"] = before.get("idle_since_s", time_s)
        now[str(rank)] = found | {"told_s": time_s}
    return now


def as_list(progress: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for JSON each rank's newest figures: percent, MiB and watts, None if unknown; `idle_s` of idle time."""
    gpus: Gpus = progress.get("gpus") or {}
    return [
        {"rank": int(rank), **{name: gpus[rank].get(name) for name in _MOST}, "idle_s": _idle_s(gpus[rank])}
        for rank in sorted(gpus, key=int)
    ]


def mean(progress: Mapping[str, Any]) -> float | None:
    """Return the mean use of all GPUs over the attempt, in percent; None without figures."""
    known = [each["mean"] for each in (progress.get("gpus") or {}).values() if "mean" in each]
    return sum(known) / len(known) if known else None


def words(progress: Mapping[str, Any]) -> str:
    """Return the newest figures in a few words; empty without figures."""
    gpus: Gpus = progress.get("gpus") or {}
    uses = {rank: each["use"] for rank, each in gpus.items() if each.get("use") is not None}
    parts = []
    if uses:
        least = min(uses, key=lambda rank: uses[rank])
        lowest = f" (lowest {uses[least]:.0f} %, rank {least})" if len(uses) > 1 else ""
        parts.append(f"{sum(uses.values()) / len(uses):.0f} % busy{lowest}")
    used, total, watts = (_sum(gpus, name) for name in ("memory_mib", "total_mib", "watts"))
    if used is not None:
        parts.append(f"{used / 1024:.1f}{f' of {total / 1024:.0f}' if total else ''} GiB")
    if watts is not None:
        parts.append(f"{watts:.0f} W")
    return ", ".join(parts)


def warning(progress: Mapping[str, Any]) -> str:
    """Return which GPUs have idled for minutes, and a remedy; empty without an idle GPU."""
    gpus: Gpus = progress.get("gpus") or {}
    idle = {int(rank): idle_s for rank, figures in gpus.items() if (idle_s := _idle_s(figures)) >= IDLE_S}
    if not idle:
        return ""
    named = ", ".join(map(str, sorted(idle)[:8])) + (f" and {len(idle) - 8} more" if len(idle) > 8 else "")
    who = f"the GPU of rank {named} is" if len(idle) == 1 else f"the GPUs of ranks {named} are"
    return f"{who} below {IDLE_PERCENT:.0f} % for {span(min(idle.values()))}: look at data loading, or use fewer GPUs"


def _idle_s(figures: Mapping[str, Any]) -> float:
    """Return for how long a GPU has been below IDLE_PERCENT."""
    return float(figures["told_s"] - figures["idle_since_s"]) if "idle_since_s" in figures else 0.0


def _figure(value: Any, most: float) -> float | None:
    found = sanitize.value(value)
    return float(found) if isinstance(found, float | int) and 0 <= found <= most else None


def _sum(gpus: Gpus, name: str) -> float | None:
    known = [each[name] for each in gpus.values() if each.get(name) is not None]
    return sum(known) if known else None
