"""The user's own prices, read from the vendors by `cloudtrain prices refresh`, in `$CLOUDTRAIN_HOME/prices.csv`.

A line for each machine type, region and kind of price. The file is replaced as a whole, so a reader finds either the
old or the new file; writers take turns.
"""

from __future__ import annotations

import csv
import datetime
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from cloudtrain.entrypoints import atomic_json, foreign, processes

from ..errors import ConfigError, Fault, Place
from ..metering import rate as rating
from ..metering.rate import KINDS, Key, Kind, Quote, Rate
from ..store import home
from ..store.home import PRICES as FILE
from ..text.tables import csv_text

COLUMNS = (*("backend", "instance_type", "region", "kind", "usd_per_hour", "derived", "uncertainty", "as_of"), "source")
AHEAD_DAYS = 1  # tolerance for a wrong clock


def rates(backend: str, instance_type: str, region: str) -> dict[Kind, Rate]:
    """Return the user's prices of a type in a region. Raises ConfigError if the file cannot be read."""
    known = everything()
    keys = (Key(backend, instance_type, region, kind) for kind in KINDS)
    return {key.kind: known[key] for key in keys if key in known}


def everything() -> Mapping[Key, Rate]:
    """Return all of the user's prices; empty without a file. Raises ConfigError if the file cannot be read."""
    try:
        path = home.where() / FILE
        stat = path.stat()
        return _sound(path, stat.st_mtime_ns, stat.st_size)
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # `~nobody`: home() reports the error when needed
        return {}
    except OSError as error:
        raise _unusable(path, error) from error


def refusal(quote: Quote) -> str:
    """Return why the price cannot be stored, or "": a price that the reader would refuse is never written."""
    try:
        if quote.rate is not None:
            _meant(_fields(quote.key, quote.rate), rating.today())
    except ValueError as error:
        return str(error)
    return ""


def add(quotes: Iterable[Quote]) -> Path | None:
    """Add the valid prices to the file; return the path of the copy of a damaged old file. Raises ConfigError."""
    path = home.home() / FILE
    try:
        with processes.locked(path.parent / "prices.lock"):
            data = foreign.read(path, 16 << 20) if path.exists() else b""
            known, faults = _parsed(data) if data else ({}, [])
            kept = path.with_name(f"{FILE}.damaged") if faults else None
            if kept is not None:
                kept.write_bytes(data)
            known |= {quote.key: quote.rate for quote in quotes if quote.rate is not None and not refusal(quote)}
            if known or kept is not None:
                atomic_json.write_text(path, _text(known), 0o600)
            return kept
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> ConfigError:
    hint = "free some room, fix its permissions, or set CLOUDTRAIN_HOME to another folder"
    return ConfigError(f"your own prices cannot be kept or read: {error.strerror or error}", where=path, hint=hint)


@functools.lru_cache(maxsize=1)
def _sound(path: Path, changed_ns: int, size: int) -> Mapping[Key, Rate]:
    """Return the file's prices; the arguments are the cache key of the file's state."""
    known, faults = _parsed(foreign.read(path, 16 << 20))
    if faults:
        hint = f"remove the line, or the file; or `cloudtrain prices refresh` keeps the good lines (of {len(known)})"
        raise ConfigError([Fault(why, place=Place(str(path), row, 1, text), hint=hint) for row, why, text in faults])
    return known


def _parsed(data: bytes) -> tuple[dict[Key, Rate], list[tuple[int, str, str]]]:
    """Return the prices; and for each damaged line its number, the error and its text."""
    known: dict[Key, Rate] = {}
    faults: list[tuple[int, str, str]] = []
    lines = data.decode("utf-8", errors="replace").splitlines()
    if not lines or lines[0] != ",".join(COLUMNS):
        return {}, [(1, f"this is not a list of prices: its first line is not `{','.join(COLUMNS)}`", "")]
    last = rating.today() + datetime.timedelta(days=AHEAD_DAYS)
    for number, line in enumerate(lines[1:], 2):  # a field holds no newline, so each line is a row
        try:
            key, rate = _meant(next(csv.reader([line], strict=True), []), last)
            if key in known:
                raise ValueError(f"a second price of {key.instance_type} in {key.region}, {key.kind}")
        except (ValueError, csv.Error) as error:
            faults.append((number, f"a damaged price: {error}", line[:120]))
        else:
            known[key] = rate
    return known, faults


def _meant(fields: list[str], last: datetime.date) -> tuple[Key, Rate]:
    """Return the key and the rate of the fields. Raises ValueError with the fault."""
    if len(fields) != len(COLUMNS):
        raise ValueError(f"{len(fields)} fields, not {len(COLUMNS)}")
    backend, instance_type, region, kind, usd, derived, factor, as_of, source = fields
    if not (backend and instance_type and region and source):
        raise ValueError("no backend, type, region or source")
    if kind not in KINDS:
        raise ValueError(f"`{kind}` is not one of {', '.join(KINDS)}")
    if derived not in ("yes", "no"):
        raise ValueError(f"derived is `{derived}`, neither yes nor no")
    hourly, more = _number(usd, "usd_per_hour"), _number(factor, "uncertainty")
    if hourly <= 0:
        raise ValueError(f"a price of {usd}: a machine costs more than nothing")
    if more < 1:
        raise ValueError(f"an uncertainty of {factor}: it is 1 or more")
    try:
        day = datetime.date.fromisoformat(as_of)
    except ValueError:
        raise ValueError(f"`{as_of}` is not a date such as 2026-11-22") from None
    if day > last:
        raise ValueError(f"the date {as_of} is in the future")
    return Key(backend, instance_type, region, kind), Rate(hourly, as_of, source, derived == "yes", True, more)


def _number(text: str, name: str) -> float:
    try:
        found = float(text)
    except ValueError:
        raise ValueError(f"{name} is `{text}`, no number") from None
    if not math.isfinite(found):
        raise ValueError(f"{name} is {text}")
    return found


def _text(known: Mapping[Key, Rate]) -> str:
    return csv_text(COLUMNS, [_fields(key, rate) for key, rate in sorted(known.items())]) + "\n"


def _fields(key: Key, rate: Rate) -> list[str]:
    # No exponents. The source is external text, so newlines are removed.
    usd, source = f"{rate.usd:.10f}".rstrip("0").rstrip("."), " ".join(rate.source.split())
    return [*key, usd, "yes" if rate.is_derived else "no", f"{rate.factor:g}", rate.as_of, source]
