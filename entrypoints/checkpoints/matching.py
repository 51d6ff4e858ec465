"""Pairs the names of saved weights with a model's names: every weight is paired, skipped by a pattern, or refused.

Needs no torch. Shapes are whole shapes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

from ..contract import InitSettings
from ..errors import TaskError
from ..format import first_of

_MOST_NAMED = 20  # names of one kind in the message
_MOST_LETTERS = 200  # of a name in the message
_MOST_MENDING = 4000  # letters of the lines that mend the differences
_MOST_COMPARED = 50  # saved names for a missing name
_ALIKE = 0.5  # the least similarity of two names for a suggestion; `fc.weight` and `head.weight` have 0.8

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class Paired:
    """The saved name for each of the model's names; the model's names that keep their values; unused saved names."""

    sources: Mapping[str, str]
    kept: tuple[str, ...]
    unused: tuple[str, ...]


def saved_names(names: Collection[str], *, averaged: bool, tied: Mapping[str, str] = {}) -> dict[str, str]:
    """Return a checkpoint's name of each weight, by the model's name; `averaged`: of the average, if kept.

    `tied`: the further names of each tied weight, with the name that its average has.
    """
    found = {name.removeprefix("model."): name for name in names if name.startswith("model.")}
    if averaged:
        averages = {name.removeprefix("ema."): name for name in names if name.startswith("ema.")}
        found |= averages | {name: averages[first] for name, first in tied.items() if first in averages}
    return found


def pair(saved: Shapes, model: Shapes, wishes: InitSettings, tied: Mapping[str, Collection[str]] = {}) -> Paired:
    """Return the pairs. `tied`: the names of the same tensor, for names of tied weights.

    Raises TaskError with all differences, the nearest names and lines that mend them, and for a pattern without effect.
    """
    faults, renamed = _renamed(saved, wishes.rename)
    patterns = _compiled("skip", wishes.skip, faults)
    if faults:
        raise _fault(faults)
    skipped = {name for name in (*model, *renamed) if any(pattern.search(name) for pattern in patterns)}
    for pattern in patterns:
        if not any(pattern.search(name) for name in skipped):
            faults.append(f"skip '{pattern.pattern}' finds no name{_nearest(pattern.pattern, model)}")
    here = {name: shape for name, shape in model.items() if name not in skipped}
    there = {name: saved[old] for name, old in renamed.items() if name not in skipped}
    wrong = {name: there[name] for name, shape in here.items() if there.get(name, shape) != shape}
    sources = {name: renamed[name] for name in here if name in there and name not in wrong}
    missing = [name for name in here if name not in there and not any(same in sources for same in tied.get(name, ()))]
    extra = [name for name in there if name not in here]
    if faults or wrong or not sources or (wishes.strict and (missing or extra)):
        found = [*faults, *_differences(here, there, wrong, missing, extra, wishes)]
        raise _fault(found)
    kept = tuple(name for name in model if name in skipped or name in missing)
    return Paired(sources, kept, tuple(old for name, old in renamed.items() if name in skipped or name in extra))


def _fault(found: list[str]) -> TaskError:
    """Return the error, in one line whatever the names hold."""
    return TaskError(f"init_from: {_printable('; '.join(found))}")


def _renamed(saved: Shapes, rename: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the faults of the patterns, and the saved name by new name."""
    faults: list[str] = []
    names = {name: name for name in saved}
    for pattern, to in zip(_compiled("rename", rename, faults), rename.values(), strict=False):
        try:
            changed = {old: pattern.sub(to, new) for old, new in names.items()}
        except (re.error, IndexError) as error:
            faults.append(f"rename '{pattern.pattern}': '{to}' cannot be filled in: {error}")
            continue
        if changed == names and not any(pattern.search(new) for new in names.values()):
            faults.append(f"rename '{pattern.pattern}' finds no name{_nearest(pattern.pattern, names.values())}")
        names = changed
    found: dict[str, str] = {}
    for old, new in names.items():
        if new in found:
            faults.append(f"rename gives {_cut(found[new])} and {_cut(old)} the same name {_cut(new)}")
        found[new] = old
    return faults, found


def _compiled(key: str, patterns: Collection[str], faults: list[str]) -> list[re.Pattern[str]]:
    found = []
    for pattern in patterns:
        try:
            found.append(re.compile(pattern))
        except re.error as error:
            faults.append(f"{key} '{pattern}' is no regular expression: {error}")
    return [] if faults else found


def _differences(
    here: Shapes, there: Shapes, wrong: Shapes, missing: list[str], extra: list[str], wishes: InitSettings
) -> list[str]:
    """Return the differences in words, and the lines that mend them."""
    found = []
    if not here:
        return ["skip leaves out every weight: nothing would be loaded"]
    near = _partners(here, there, missing, extra)
    if missing:
        text = [
            f"{_cut(name)} {_sides(here[name])}" + (f" (nearest: {_cut(near[name])})" if name in near else "")
            for name in missing
        ]
        found.append(f"the parent has no {first_of(text, _MOST_NAMED)}")
    if extra:
        text = [f"{_cut(name)} {_sides(there[name])}" for name in extra]
        found.append(f"this model has no {first_of(text, _MOST_NAMED)}")
    for name, shape in list(wrong.items())[:_MOST_NAMED]:
        is_first = shape[1:] == here[name][1:] and len(shape) == len(here[name])
        why = ", only in the first dimension" if is_first else ""
        found.append(
            f"the shape of {_cut(name)} differs: {_sides(shape)} in the parent, {_sides(here[name])} here{why}"
        )
    if len(wrong) > _MOST_NAMED:
        found.append(f"{len(wrong) - _MOST_NAMED} more shapes differ")
    rename = _rules(there, near)
    random = {*wrong, *(name for name in missing if name not in near)}
    left = {*wrong, *(name for name in extra if name not in near.values())}
    skip = _covering(random | left, {*here, *there} - set(near.values()))
    both: dict[str, dict[str, str] | list[str]] = {
        "rename": {**wishes.rename, **rename} if rename else {},
        "skip": [*wishes.skip, *skip] if skip else [],
    }
    lines = [f"{key}: {_flow(value)}" for key, value in both.items() if value]
    mending = f"to go on, write {' and '.join(lines)}"
    # First: a long message is cut at its end. Hundreds of patterns are no help.
    return [mending, *found] if lines and len(mending) <= _MOST_MENDING else found


def _partners(here: Shapes, there: Shapes, missing: list[str], extra: list[str]) -> dict[str, str]:
    """Return a similar unused saved name of the same shape for each missing name, each used once.

    Compared are the names with the longest common end, so that thousands of names take no minutes.
    """
    by_end: dict[tuple[Shape, str], list[str]] = {}
    for other in extra:
        for end in _ends(other):
            by_end.setdefault((there[other], end), []).append(other)
    alike = []
    for name in missing:
        rivals = next(filter(None, (by_end.get((here[name], end)) for end in _ends(name))), [])
        for other in rivals[:_MOST_COMPARED]:
            alike.append((SequenceMatcher(None, name, other, autojunk=False).ratio(), name, other))
    found: dict[str, str] = {}
    taken: set[str] = set()
    for ratio, name, other in sorted(alike, key=lambda each: (-each[0], each[1:])):
        if ratio >= _ALIKE and name not in found and other not in taken:
            found[name] = other
            taken.add(other)
    return found


def _ends(name: str) -> list[str]:
    """Return the ends of the name at its dots, the longest first."""
    parts = name.split(".")
    return [".".join(parts[place:]) for place in range(len(parts))]


def _rules(there: Shapes, near: Mapping[str, str]) -> dict[str, str]:
    """Return patterns that rename the partners and no other name: by prefix where a prefix is enough."""
    rules: dict[str, str] = {}
    done: dict[str, str] = {}
    for name, other in near.items():
        if other in done:
            continue
        tail = 0
        while tail < min(len(name), len(other)) and name[-tail - 1] == other[-tail - 1]:
            tail += 1
        while tail and not (other[len(other) - tail :].startswith(".")):  # whole parts of the name
            tail -= 1
        begin, to = (other[: len(other) - tail] + ".", name[: len(name) - tail] + ".") if tail else ("", "")
        moved = {old: to + old[len(begin) :] for old in there if begin and old.startswith(begin)}
        if moved and all(near.get(new) == old for old, new in moved.items()):
            rules["^" + _escaped(begin)] = to.replace("\\", r"\\")
            done |= moved
        else:
            rules[f"^{_escaped(other)}$"] = name.replace("\\", r"\\")
            done[other] = name
    return rules


def _covering(names: Collection[str], known: Collection[str]) -> list[str]:
    """Return patterns that find these names and no other known name: the shortest prefix that does, else the name."""
    found: dict[str, None] = {}
    for name in sorted(names):
        parts = name.split(".")
        starts = [".".join(parts[: count + 1]) + "." for count in range(len(parts) - 1)]
        start = next(
            (each for each in starts if all(other in names for other in known if other.startswith(each))), None
        )
        found["^" + _escaped(start) if start else f"^{_escaped(name)}$"] = None
    return list(found)


def _nearest(pattern: str, names: Collection[str]) -> str:
    """Return the name most like the pattern's letters, for the end of a message."""
    plain = re.sub(r"[\\^$]", "", pattern)
    best = max(names, key=lambda name: SequenceMatcher(None, plain, name, autojunk=False).ratio(), default="")
    return f"; the nearest is {_cut(best)}" if best else ""


def _flow(value: Mapping[str, str] | list[str]) -> str:
    """Return the value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(key)}: {_quoted(to)}" for key, to in value.items()) + "}"
    return "[" + ", ".join(map(_quoted, value)) + "]"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _escaped(text: str) -> str:
    """Return a pattern of the text, in one line."""
    return "".join(re.escape(letter) if letter.isprintable() else _printable(letter) for letter in text)


def _printable(text: str) -> str:
    """Return the text with an escape for each line break and control character."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _cut(name: str) -> str:
    return name if len(name) <= _MOST_LETTERS else f"{name[:_MOST_LETTERS]}..."


def _sides(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"
