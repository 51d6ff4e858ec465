"""Translates the errors of the YAML parser into messages for readers without knowledge of the YAML grammar."""

from __future__ import annotations

from collections.abc import Callable

import yaml

from ..errors import Fault, Place

# A part of the parser's message (libyaml's and PyYAML's words differ a little) -> the problem, the fix.
_SAID: tuple[tuple[str, str, str], ...] = (
    ("'\\t'", "a tab cannot indent YAML", "use spaces"),
    ("violates indentation", "a tab cannot indent YAML", "use spaces"),
    (
        "mapping values are not allowed",
        "a `:` where none can stand",
        "",  # _colon_hint looks at the lines
    ),
    ("while scanning a quoted scalar", "the quote that opens here is not closed", "close it, or leave both quotes out"),
    ("expected ',' or '}'", "the `{` that opens here is not closed, or a comma is missing", "every `{` needs its `}`"),
    ("expected ',' or ']'", "the `[` that opens here is not closed, or a comma is missing", "every `[` needs its `]`"),
    ("expected ':'", "a key without its `:`", "write `key: value`, with a space after the colon"),
    (
        "parsing a block collection",
        "this line fits neither the mapping nor the list around it",
        "indent alike what belongs together",
    ),
    ("block sequence entries", "a list cannot begin here", "put the `-` on a line of its own, below its key"),
    ("expected key", "this line fits no mapping around it", "indent the keys of one mapping alike"),
    ("<block end>", "this line fits no mapping around it", "indent the keys of one mapping alike"),
    ("cannot start any token", "this character cannot begin a value", "put quotes around the value"),
    ("undefined alias", "this `*name` has no anchor", "define it before with `&name`"),
    ("anchor", "this `&name` or `*name` is not well formed", "put quotes around text that begins with `&` or `*`"),
    ("alias", "this `&name` or `*name` is not well formed", "put quotes around text that begins with `&` or `*`"),
    ("escape", "this backslash means nothing inside double quotes", "use single quotes, or double the backslash"),
    ("tag", "text that begins with `!` needs quotes", ""),
    ("block scalar", "this `|` or `>` block is not well formed", "indent its lines below their key"),
    ("document start", "this line fits nothing above it", "indent it as the keys around it, or quote what is above"),
    ("directive", "text that begins with `%` needs quotes", ""),
)


def human_fault(exc: yaml.YAMLError, place_at: Callable[[int, int], Place]) -> Fault:
    """Return the parser's error as a fault; `place_at` takes a line and a column, both counted from 0."""
    if not isinstance(exc, yaml.MarkedYAMLError):
        return Fault(f"not YAML: {exc}")
    said = f"{exc.context or ''}: {exc.problem or ''}"
    message, hint = next(
        ((message, hint) for part, message, hint in _SAID if part in said),
        (f"not YAML: {exc.problem or 'the parser gives no reason'}", ""),
    )
    places = [place_at(mark.line, mark.column) for mark in (exc.problem_mark, exc.context_mark) if mark is not None]
    if not places:
        return Fault(message, hint=hint)
    if "\t" in places[0].excerpt[: places[0].column]:
        return Fault("a tab cannot indent YAML", place=places[0], hint="use spaces")
    if "a `:` where" in message:
        above = place_at(places[0].line - 2, 0).excerpt if places[0].line > 1 else ""
        return Fault(message, place=places[0], hint=_colon_hint(places[0], above))
    if "opens here" not in message:
        return Fault(message, place=places[0], hint=hint)
    variable = places[0].excerpt.find("${")
    if variable >= 0 and "comma" in message:
        hint = 'as in `"${NAME}"`, or write the mapping or list over several lines'
        place = place_at(places[0].line - 1, variable)
        return Fault("a variable inside `{ }` or `[ ]` needs quotes", place=place, hint=hint)
    end, opener = places[0], places[-1]
    return Fault(message, place=opener, hint=hint, also=(end,) if end.line != opener.line and end.excerpt else ())


def _colon_hint(place: Place, above: str) -> str:
    """Return the hint for the likely reason of a misplaced `:`: unquoted text, a missing `:` above, or the indent."""
    if ": " in place.excerpt[: place.column - 1]:
        return "put quotes around text that holds `: `"
    if above.strip() and ":" not in above:
        return "the line above has no `:`"
    return "indent the keys of one mapping alike"
