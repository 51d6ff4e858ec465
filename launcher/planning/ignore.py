"""Ignore files as git reads them: gitignore(5) on bytes, in time that grows with the length of pattern and name.

A pattern becomes a regular expression. The text between two `*` matches at the first possible place, without a second
try: a later place cannot help the rest of the pattern. Python 3.10 has no atomic groups: `(?=(?P<g>...))(?P=g)`. Lines
that git accepts and never matches, as `!` or `[z-a]`, never match here.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

_CLASSES = {
    b"alnum": rb"A-Za-z0-9",
    b"alpha": rb"A-Za-z",
    b"blank": rb" \t",
    b"cntrl": rb"\x00-\x1f\x7f",
    b"digit": rb"0-9",
    b"graph": rb"\x21-\x7e",
    b"lower": rb"a-z",
    b"print": rb"\x20-\x7e",
    b"punct": rb"\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e",
    b"space": rb" \t\n\r\f\v",
    b"upper": rb"A-Z",
    b"xdigit": rb"A-Fa-f0-9",
}
_TOKEN = re.compile(rb"\*+|\\.?|.", re.DOTALL)
_SPECIAL = re.compile(rb"[*?\\[]")
_SLASH = re.compile(rb"\\?/|$")
_NOTHING = rb"(?!)"
# On first use, since most lines match no name; bounded, for a process that reads many files.
_compiled = functools.lru_cache(1 << 13)(functools.partial(re.compile, flags=re.DOTALL))


class _Rule(NamedTuple):
    is_ignored: bool
    is_of_folders: bool
    is_of_names: bool  # the last part of a path, in any folder
    regex: bytes


class IgnoreFile:
    """The lines of an ignore file; the last line that matches decides."""

    def __init__(self, text: bytes) -> None:
        numbers = itertools.count()
        lines = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        found = [_rule(_trimmed(line.removesuffix(b"\r")), numbers) for line in lines if not line.startswith(b"#")]
        self._rules = [rule for rule in reversed(found) if rule is not None]
        self._of_names, self._of_paths = map(self._any, (True, False))

    def __bool__(self) -> bool:
        return bool(self._rules)

    def _any(self, is_of_names: bool) -> re.Pattern[bytes]:
        patterns = [rule.regex for rule in self._rules if rule.is_of_names is is_of_names]
        return re.compile(b"|".join(patterns) or _NOTHING, re.DOTALL)

    def verdict(self, path: bytes, *, is_dir: bool) -> bool | None:
        """Return whether the path, relative to the file's folder, is left out; None if no line matches."""
        name = path[path.rfind(b"/") + 1 :]
        if not (self._of_names.fullmatch(name) or self._of_paths.fullmatch(path)):
            return None
        for rule in self._rules:
            part = name if rule.is_of_names else path
            if (is_dir or not rule.is_of_folders) and _compiled(rule.regex).fullmatch(part):
                return rule.is_ignored
        return None


def _trimmed(line: bytes) -> bytes:
    """Return the line without the spaces at its end, unless a backslash keeps them."""
    bare = line.rstrip(b" ")
    is_kept = (len(bare) - len(bare.rstrip(b"\\"))) % 2 == 1
    return line[: len(bare) + 1] if is_kept and len(bare) < len(line) else bare


def _rule(line: bytes, numbers: Iterator[int]) -> _Rule | None:
    pattern = line.removeprefix(b"!")
    is_of_folders = pattern.endswith(b"/")
    pattern = pattern[:-1] if is_of_folders else pattern
    if not pattern:
        return None
    regex = _translated(_names(pattern.removeprefix(b"/")), numbers)
    return _Rule(not line.startswith(b"!"), is_of_folders, b"/" not in pattern, regex)


def _names(pattern: bytes) -> list[list[bytes]]:
    """Return the pattern's names between slashes, each as the expressions of single bytes, and `*` or `**`."""
    if not _SPECIAL.search(pattern):
        return [[re.escape(name)] for name in pattern.split(b"/")]
    names: list[list[bytes]] = [[]]
    at, is_literal = 0, True  # literal so far: git compares such a beginning apart, and what follows begins a name
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        assert token is not None
        at = token.end()
        if token[0] in (b"/", rb"\/"):
            names.append([])
        elif token[0].startswith(b"*"):
            is_name = len(token[0]) > 1 and (is_literal or not names[-1]) and _SLASH.match(pattern, at) is not None
            some = b"**" if pattern[at : at + 1] != b"\\" else b"**\\"  # git: at least one name before `\\/`
            names[-1].append(some if is_name else b"*")
        elif token[0] == b"?":
            names[-1].append(rb"[^/]")
        elif token[0] == b"[":
            regex, at = _bracket(pattern, at)
            names[-1].append(regex)
        else:
            literal = token[0].removeprefix(b"\\") if len(token[0]) > 1 else token[0]
            names[-1].append(re.escape(literal) if token[0] != b"\\" else _NOTHING)
        is_literal = is_literal and token[0][:1] not in (b"*", b"?", b"[", b"\\")
    return names


def _translated(names: list[list[bytes]], numbers: Iterator[int]) -> bytes:
    """Return the expression for a whole path; `**` is any number of names."""
    made, run, free = b"", b"", b""  # free: the names that `**` stands for
    for at, name in enumerate(names):
        is_last = at == len(names) - 1
        if name[-1:] not in ([b"**"], [b"**\\"]):
            run += _name(name, numbers) + (b"" if is_last else b"/")
            continue
        run += b"".join(name[:-1])
        made += _first(free + run, numbers) if free and run else run
        if free.endswith(b"+?") and not run:
            made += rb"[^/]*/"
        run, free = b"", rb"(?:[^/]*/)*?" if name[-1] == b"**" else rb"(?:[^/]*/)+?"
        if is_last:
            return made + rb".*"
    return made + free + run


def _name(tokens: list[bytes], numbers: Iterator[int]) -> bytes:
    """Return the expression for one name."""
    pieces = [b""]
    for token in tokens:
        if token.startswith(b"*"):
            pieces.append(b"")
        else:
            pieces[-1] += token
    middle = b"".join(_first(rb"[^/]*?" + piece, numbers) for piece in pieces[1:-1] if piece)
    return pieces[0] + middle + (rb"[^/]*" + pieces[-1] if len(pieces) > 1 else b"")


def _first(regex: bytes, numbers: Iterator[int]) -> bytes:
    """Return an expression that takes the first match and tries no other."""
    group = b"g%d" % next(numbers)
    return rb"(?=(?P<%b>%b))(?P=%b)" % (group, regex, group)


def _bracket(name: bytes, at: int) -> tuple[bytes, int]:
    """Return the expression for the set of bytes that begins at `at`, behind its bracket, and the place behind it."""
    negated = name[at : at + 1] in (b"!", b"^")
    at += negated
    members, low = b"", b""  # `low`: the byte before, where a range may begin
    is_first = True
    while is_first or name[at : at + 1] != b"]":
        is_first = False
        byte = name[at : at + 1]
        ranged = byte == b"-" and low != b"" and name[at + 1 : at + 2] not in (b"", b"]")
        if byte == b"[" and name[at + 1 : at + 2] == b":" and (end := name.find(b"]", at + 2)) >= 0:
            kind = name[at + 2 : end]
            if kind.endswith(b":") and len(kind) > 0:
                if kind[:-1] not in _CLASSES:
                    return _NOTHING, len(name)
                members, low, at = members + _CLASSES[kind[:-1]], b"", end + 1
                continue
        at += ranged
        byte = name[at : at + 1]
        if byte == b"\\":
            at += 1
            byte = name[at : at + 1]
        if not byte:
            return _NOTHING, len(name)
        at += 1
        if ranged:
            members, low = members + (re.escape(low) + b"-" + re.escape(byte) if low <= byte else b""), b""
        else:
            members, low = members + re.escape(byte), byte
    if not members:
        return rb"[^/]" if negated else _NOTHING, at + 1
    return (rb"[^/%b]" if negated else rb"(?!/)[%b]") % members, at + 1
