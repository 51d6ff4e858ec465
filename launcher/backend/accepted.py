"""A request beside the platform's record of it, and the platform's own words for a job's states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..text.terminal import say
from . import JobRef, Request

_NAMES = ("name", "Key", "ChannelName")  # of an element of a list
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
# Harmless conversions. The first group of two texts is compared: an ARN stands for a name, a project's number for its
# name, a number of seconds or an int64 of Google's JSON for a number.
_FORMS = [re.compile(form) for form in (r"arn:(?:[^:]*:){4}(?:[\w-]+[:/])?(.+)", r"projects/[^/]+/(.+)", r"([\d.]+)s?")]
_DURATION = re.compile(r"P(?=.)(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:([\d.]+)S)?)?")  # PT90S is PT1M30S


class Accepted(NamedTuple):
    """The request in the vendor's form, `{}` in a text for what only the platform knows, and the platform's record."""

    sent: Mapping[str, Any]
    there: Mapping[str, Any]
    words: Sequence[str]
    """The platform's own words for the job's states: all up to now, or the present one."""


@runtime_checkable
class TellsAccepted(Protocol):
    """A backend whose platform shows the request that it accepted."""

    def accepted(self, request: Request, ref: JobRef) -> Accepted:
        """Return the platform's record of the attempt. Raises CredentialError, UnreachableError."""


def of_requests(sent: Any, there: Any) -> dict[str, Any]:
    """Return the keys of the values that the platform changed, left out or added; the values are only said."""
    came: dict[str, Any] = {"keys": 0, "changed": [], "left_out": [], "added": []}
    _compare(sent, there, "", came)
    return came


def of_words(heard: Sequence[Sequence[str]], stages: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the attempts' words, those that the vendor does not document, and those after a later stage, or twice."""
    known = {word: number for number, stage in enumerate(stages) for word in stage}
    pairs = [pair for words in heard for pair in pairwise(word for word in words if word in known)]
    back = [f"{after} after {word}" for word, after in pairs if known[after] < known[word] or word == after]
    words = [word for each in heard for word in each]
    return {"unknown": sorted({*words} - {*known}), "back": back, "words": words}


def _compare(sent: Any, there: Any, path: str, came: dict[str, Any]) -> None:
    if not isinstance(sent, dict | list):
        came["keys"] += 1
        is_id = str(sent).startswith("/subscriptions/")  # Azure's control plane does not keep the case of ids
        form = re.compile(re.escape(str(sent)).replace(r"\{\}", ".+"), re.IGNORECASE if is_id else 0)
        if _meaning(sent) != _meaning(there) and not form.fullmatch(str(there)):
            came["changed"].append(f"{path}: {_shown(path, sent)}, accepted {_shown(path, there)}")
            say(f"{path}: sent {sent!s:.80}, accepted {there!s:.80}")
        return
    ours, theirs = _by_name(sent), _by_name(there)
    for name, value in ours.items():
        below = re.sub(r"[^\w.:-]", "?", f"{path}.{name}" if path else name)
        if theirs.get(name) is None:
            came["left_out"] += [below] if value not in _NOTHING else []
        else:
            _compare(value, theirs[name], below, came)
    new = (name for name in theirs.keys() - ours if theirs[name] not in _NOTHING)
    came["added"] += sorted(f"{path}.{name}".strip(".") for name in new if not name.upper().startswith("CLOUDTRAIN"))


def _by_name(value: Any) -> dict[str, Any]:
    """Return the parts of a value; an element of a list by its own name, else by its number."""
    if not isinstance(value, list):
        return value if isinstance(value, dict) else {}
    named = [next((each[key] for key in _NAMES if key in each), "") if isinstance(each, dict) else "" for each in value]
    return {str(name or number): each for number, (name, each) in enumerate(zip(named, value, strict=True))}


def _meaning(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    if found := _DURATION.fullmatch(str(value)):
        return sum(float(part or 0) * unit for part, unit in zip(found.groups(), (86_400, 3600, 60, 1), strict=True))
    part = next((found[1] for form in _FORMS if (found := form.fullmatch(str(value)))), str(value))
    return float(part) if re.fullmatch(r"\d+(\.\d+)?", part) else part


def _shown(path: str, value: Any) -> str:
    """Return a number or a machine's type; of other texts the length."""
    is_public = isinstance(value, int | float) or path.endswith(("nstanceType", "machineType"))
    return (
        str(value)
        if is_public or re.fullmatch(r"[\d.]+s?|P[\dDTHMS.]+", str(value))
        else f"{len(str(value))} characters"
    )
