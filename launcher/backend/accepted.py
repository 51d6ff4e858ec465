"""A request beside the platform's record of it, and the platform's own words for a job's states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..text.terminal import say
from ..text.times import duration_s
from . import JobRef, Request

_NAMES = ("name", "Key", "ChannelName")  # of an element of a list
_OF_USERS = re.compile(r"(?:.*\.)?(?:tags|labels|environmentVariables|Environment|env)\.(?!cloudtrain)", re.IGNORECASE)
# Harmless conversions: an ARN stands for a name, a project's number for its name; PT90S is PT1M30S.
_PREFIX = re.compile(r"^(?:arn:(?:[^:]*:){4}(?:[\w-]+[:/])?|projects/[^/]+/)")


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


def of_requests(records: Iterable[Accepted]) -> dict[str, Any]:
    """Return the keys of the values that the platform changed, left out or added; the values are only said."""
    came: dict[str, list[str]] = {"keys": [], "changed": [], "left_out": [], "added": []}
    for record in records:
        _compare(record.sent, record.there, "", came)
    return {name: [*dict.fromkeys(each)] for name, each in came.items()} | {"keys": len(came["keys"])}


def of_words(heard: Sequence[Sequence[str]], stages: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the attempts' words, those that the vendor does not document, and those after a later stage, or twice."""
    known = {word: number for number, stage in enumerate(stages) for word in stage}
    pairs = [pair for words in heard for pair in pairwise(word for word in words if word in known)]
    back = [f"{after} after {word}" for word, after in pairs if known[after] < known[word] or word == after]
    words = [word for each in heard for word in each]
    return {"unknown": sorted({*words} - {*known}), "back": back, "words": words}


def _compare(sent: Any, there: Any, path: str, came: dict[str, list[str]]) -> None:
    if not isinstance(sent, dict | list):
        came["keys"].append(path)
        is_id = str(sent).startswith("/subscriptions/")  # Azure's control plane does not keep the case of ids
        form = re.compile(re.escape(str(sent)).replace(r"\{\}", ".+"), re.IGNORECASE if is_id else 0)
        if _meaning(sent) != _meaning(there) and not form.fullmatch(str(there)):
            came["changed"].append(f"{path}: {_shown(path, sent)}, accepted {_shown(path, there)}")
            say(f"{path}: sent {sent!s:.80}, accepted {there!s:.80}")
        return
    ours, theirs = _by_name(sent), _by_name(there)
    for name in sorted(ours.keys() | theirs.keys()):
        below, value, answer = f"{path}.{name}".strip("."), ours.get(name), theirs.get(name)
        if answer is None and value:
            came["left_out"].append(below)
        elif name in ours and answer is not None:
            _compare(value, answer, below, came)
        elif answer and not name.upper().startswith("CLOUDTRAIN"):
            # An organisation's own tag, or an id as a key, may name the account.
            is_public = re.fullmatch(r"[A-Za-z]\w{0,40}|\d{1,3}", name) and not _OF_USERS.match(below)
            came["added"].append(below if is_public else f"{path}.?".strip("."))


def _by_name(value: Any) -> dict[str, Any]:
    """Return the parts of a value; an element of a list by its own name, else by its number."""
    if not isinstance(value, list):
        return value if isinstance(value, dict) else {}
    named = [next((each[key] for key in _NAMES if key in each), "") if isinstance(each, dict) else "" for each in value]
    return {str(name or number): each for number, (name, each) in enumerate(zip(named, value, strict=True))}


def _meaning(value: Any) -> float | str:
    """Return seconds for a duration, a number for its text, the name for an ARN."""
    if (seconds := duration_s(str(value))) is not None:
        return seconds
    text = _PREFIX.sub("", str(value))
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text


def _shown(path: str, value: Any) -> str:
    """Return a number, a duration or a machine's type; of other texts, and of an account's number, the length."""
    is_public = path.endswith(("nstanceType", "machineType")) or re.fullmatch(r"[\d.]{1,9}s?|P[\dDTHMS.]+", str(value))
    return str(value) if is_public or isinstance(value, bool) else f"{len(str(value))} characters"
