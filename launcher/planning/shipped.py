"""Which files of the code folder a job ships: ignore files, secrets, links, modes and the size are looked at."""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.entrypoints import foreign
from cloudtrain.entrypoints.models.folder import CHECK, SUMS

from ..errors import ConfigError, Fault, refuse
from . import git
from .ignore import IgnoreFile
from .secret_files import Secrets

IGNORE_FILES = (".gitignore", ".cloudtrainignore")
# Never code, often large: left out before any ignore file is read, unless git tracks it. Names, then endings; and
# `._name`, in which macOS keeps a file's further attributes on foreign disks.
ALWAYS_IGNORED = {
    *(".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".DS_Store", "node_modules", ".ipynb_checkpoints"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache"),
}
ALWAYS_IGNORED_ENDINGS = (".pyc", ".egg-info")
GENERATOR = "cloudtrain report"  # as in the head of a report's HTML
_BEGINNING = 4000  # bytes in which a report identifies itself
MB = 1_000_000
ONLY = "the code: code.dir, or the place of the config"  # what a folder to ship should hold
MOST_FAULTS = 10  # files that cannot be shipped, named in the errors


class _OfGit(NamedTuple):
    """What git answers: tracked files, with their folders, that look like no code; and what git leaves out."""

    odd: set[str]
    ignored: set[str]


class _Own(NamedTuple):
    """What the user says to cloudtrain alone: `code.exclude`, and the root's .cloudtrainignore.

    `brought`: folders and files that `!` brings back, each up to its first wildcard, and whether a wildcard follows.
    """

    excluded: IgnoreFile
    ignored: IgnoreFile
    brought: list[tuple[str, bool]]

    def leads_into(self, path: str) -> bool:
        """Return whether a `!` line can bring back a file below the folder."""
        return any(
            place.startswith(f"{path}/") or (is_pattern and f"{path}/".startswith(place))
            for place, is_pattern in self.brought
        )


class _Lines(NamedTuple):
    """An ignore file above a path: `skip` bytes of the path are not below the file's folder, or `before` is missing."""

    rules: IgnoreFile
    skip: int
    before: bytes = b""


class _Folder(NamedTuple):
    """A folder to look into; of one that is left out only the user's `!` lines bring files back."""

    below: str
    lines: list[_Lines]
    kept: _OfGit | None
    is_left_out: bool = False


def collect(folder: Path, exclude: Iterable[str] = ()) -> list[str]:
    """Return the files to ship, sorted, relative to `folder`. Raises ConfigError for a folder that cannot be read.

    In a work tree, what git has or would add: git itself is asked. Elsewhere .gitignore counts, a later, deeper line
    before others. .cloudtrainignore and `exclude` win over git (`!name` brings a file back).
    """
    return sorted(_found(folder, exclude)[1])


def check(folder: Path, exclude: Iterable[str], most: int, needed: Iterable[tuple[str, str]] = ()) -> dict[str, int]:
    """Return the files to ship, sorted, with their sizes. Raises ConfigError with every fault found."""
    sizes, secrets = look(folder, exclude, most, needed)
    secrets.read()
    refuse_files(secrets.faults())
    return sizes


def look(
    folder: Path, exclude: Iterable[str], max_bytes: int, needed: Iterable[tuple[str, str]] = ()
) -> tuple[dict[str, int], Secrets]:
    """Return the files to ship, sorted, with their sizes, and the search of their texts, which is left to do.

    `needed`: keys of the config, with files that they name. Raises ConfigError with every fault found: if there is one
    already, the texts are searched too.
    """
    folder, found = _found(folder, exclude)
    if not found:
        message = f"there is nothing to ship: every file of {folder} is ignored"
        raise ConfigError([Fault(message, key="code.dir")])
    sizes = {name: found[name].st_size for name in sorted(found)}
    secrets = Secrets(folder, sizes, exclude)
    lost = (fault for fault in left_out(folder, found, needed) if not fault.is_warning)
    faults, further = list(_links_and_modes(folder, found)), [*_size(sizes, max_bytes), *lost]
    if faults or further or any(secrets.faults()):
        secrets.read()
        refuse_files([*faults, *secrets.faults()], further)
    return sizes, secrets


def without_effect(exclude: Iterable[str], names: Iterable[str]) -> Iterator[str]:
    """Yield a note for each `!` line of `code.exclude` that is the pattern of no shipped file."""
    for line in (each for each in exclude if each.startswith("!")):
        pattern = IgnoreFile(_git_form(line)[1:].encode(errors="surrogateescape"))
        parts = ((part, part != name) for name in names for part in (name, *_parents(name)))
        if not any(pattern.verdict(os.fsencode(part), is_dir=is_dir) for part, is_dir in parts):
            yield f"code.exclude: `{line}` brings no file back: write the path of a file or folder, from `code.dir` on"


def left_out(folder: Path, names: Mapping[str, Any], needed: Iterable[tuple[str, str]]) -> Iterator[Fault]:
    """Yield a fault for each file or folder that a config needs (see `look`) beside the names; for `args` a warning."""
    top = folder.resolve()
    for key, name in needed:
        path = (top / name).resolve()
        ways = {os.path.normpath(name), path.relative_to(top).as_posix()} if path.is_relative_to(top) else {"."}
        is_there = any(way in names or any(each.startswith(f"{way}/") for each in names) for way in ways)
        if "." not in ways and not is_there:
            is_data, file = key == "args", os.path.normpath(name)
            hint = f"add `!{file}` to `code.exclude`, or change the ignore file or the input that names it"
            data = f"data comes by `inputs: {{data: ./{file}}}`: write `$CLOUDTRAIN_INPUT_DATA` for the path in `args`"
            hint = data if is_data else hint
            message = f"`{file}` is not shipped: git, an ignore file, `code.exclude` or `inputs` leaves it out"
            yield Fault(message, key, hint=hint, is_warning=is_data)


def refuse_files(faults: Iterable[Fault], more: Iterable[Fault] = (), only: str = ONLY) -> None:
    """Raise ConfigError if there are faults, with the first faults of files and their number."""
    faults = list(faults)
    if len(faults) > MOST_FAULTS:
        message = f"{len(faults) - MOST_FAULTS} more files cannot be shipped"
        hint = f"name a folder that holds only {only}"
        faults[MOST_FAULTS:] = [Fault(message, key="code.dir", hint=hint)]
    refuse([*faults, *more])


def _size(sizes: Mapping[str, int], max_bytes: int) -> Iterator[Fault]:
    total = sum(sizes.values())
    if total > max_bytes:
        top = sorted(sizes.items(), key=lambda item: -item[1])[:5]
        listed = ", ".join(f"{name} {size / MB:.1f} MB" for name, size in top)
        message = f"the code folder holds {total / MB:.1f} MB, over the cap of {max_bytes / MB:.0f} MB: {listed}"
        hint = "put data under `inputs:`, exclude the files, or raise code.max_size_mb"
        yield Fault(message, key="code.max_size_mb", hint=hint)


def is_report(path: Path) -> bool:
    """Return whether the file is a report or comparison, which a newer report may replace. Raises OSError."""
    with path.open("rb") as file:
        return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(_BEGINNING)


def _found(folder: Path, exclude: Iterable[str]) -> tuple[Path, dict[str, os.stat_result]]:
    try:
        folder = folder.resolve(strict=True)
        return folder, _walk(folder, exclude)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself, before Python 3.13
        where, why = getattr(error, "filename", None) or folder, getattr(error, "strerror", None) or error
        message = f"`{where}` in the code folder cannot be read: {why}"
        raise ConfigError([Fault(message, key="code.dir", hint="mend it, or exclude it")]) from error


def _walk(root: Path, exclude: Iterable[str]) -> dict[str, os.stat_result]:
    """Return the files to ship. Raises OSError."""
    own = _own(root, exclude)
    found: dict[str, os.stat_result] = {}
    left = [_Folder("", _above(root, kept := _of_git(root, "")), kept)]  # no recursion: folders may be deep
    while left:
        below, lines, kept, _ = folder = left.pop()
        with os.scandir(root / below) as scanned:
            entries = list(scanned)
        names = {each.name for each in entries}
        if below and {SUMS, CHECK} <= names:  # an exported model beside the code
            continue
        if below and ".git" in names:  # a submodule, or a clone inside
            kept = _of_git(root, below)
        lines = [*lines, *_lines(root / below, names, len(os.fsencode(below)), has_git=kept is not None)]
        for entry in entries:
            path, is_dir = below + _name(entry), entry.is_dir(follow_symlinks=False)
            verdict = _verdict(path, own, folder._replace(lines=lines, kept=kept), is_dir=is_dir)
            if is_dir and (not verdict or own.leads_into(path)):
                left.append(_Folder(f"{path}/", lines, kept, verdict or _is_never_code(entry.name)))
            elif not is_dir and not verdict and (entry.is_symlink() or (entry.is_file() and not _is_report(entry))):
                found[path] = entry.stat(follow_symlinks=False)
    return found


def _read(path: Path) -> bytes:
    """Return the text of an ignore file. Raises OSError for UTF-16, of which no line would match a file."""
    text = foreign.read(path)
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise OSError(errno.EILSEQ, "not UTF-8 text; save the file as UTF-8", str(path))
    return text


def _own(root: Path, exclude: Iterable[str]) -> _Own:
    """Return the user's lines for cloudtrain. Raises OSError."""
    path = root / IGNORE_FILES[1]
    text = _read(path) if path.is_file() else b""
    lines = list(map(_git_form, exclude))
    wanted = [line[1:].strip().strip("/") for line in [*os.fsdecode(text).splitlines(), *lines] if line.startswith("!")]
    parts = [(place, re.split(r"[*?\[\\]", place, maxsplit=1)[0]) for place in wanted]
    brought = [(place, False) if head == place else (head[: head.rfind("/") + 1], True) for place, head in parts]
    excluded = IgnoreFile("\n".join(lines).encode(errors="surrogateescape"))
    return _Own(excluded, IgnoreFile(text), [each for each in brought if each[0]])


def _git_form(line: str) -> str:
    """Return the line with `/x` for `./x`, as a shell names a file: git knows no such form."""
    return re.sub(r"^(!?)\./", r"\1/", line)


def _of_git(root: Path, below: str) -> _OfGit | None:
    """Return git's answer on a work tree, or on a part of it; None outside."""
    if (answer := git.tracked_and_ignored(root / below)) is None:
        return None
    tracked = [below + name for name in answer[0]]
    odd = {name for name in tracked if any(map(_is_never_code, name[len(below) :].split("/")))}
    return _OfGit({each for name in odd for each in (name, *_parents(name))}, {below + name for name in answer[1]})


def _verdict(path: str, own: _Own, folder: _Folder, *, is_dir: bool) -> bool:
    """Return whether a file or a folder is left out."""
    name = os.fsencode(path) if own.excluded or folder.lines else b""
    if own.excluded and (verdict := own.excluded.verdict(name, is_dir=is_dir)) is not None:
        return verdict
    is_kept = folder.kept is not None and path in folder.kept.odd
    if not is_kept and _is_never_code(path[path.rfind("/") + 1 :]):
        return True
    if not is_kept and folder.is_left_out:
        return own.ignored.verdict(name, is_dir=is_dir) is not False
    for rules, skip, before in reversed(folder.lines):
        if (verdict := rules.verdict(before + name[skip:], is_dir=is_dir)) is not None:
            return verdict
    return folder.kept is not None and (f"{path}/" if is_dir else path) in folder.kept.ignored


def _is_never_code(name: str) -> bool:
    return name in ALWAYS_IGNORED or name.endswith(ALWAYS_IGNORED_ENDINGS) or name.startswith("._")


def _name(entry: os.DirEntry[str]) -> str:
    """Return the name as configs and Linux have it: macOS may hold a letter and its accent apart, and finds both."""
    if sys.platform != "darwin":
        return entry.name
    import unicodedata  # 0.3 ms

    return unicodedata.normalize("NFC", entry.name)


def _lines(
    folder: Path, names: Iterable[str], skip: int, before: bytes = b"", *, has_git: bool = False
) -> Iterator[_Lines]:
    """Yield the ignore files of a folder, not git's where git answers itself. Raises OSError, also for a huge file."""
    for name in IGNORE_FILES[has_git:]:
        if name in names and (folder / name).is_file() and (rules := IgnoreFile(_read(folder / name))):
            yield _Lines(rules, skip, before)


def _above(root: Path, kept: _OfGit | None) -> list[_Lines]:
    """Return the ignore files above the root, from the git root inwards; empty without a git root above.

    Empty, too, if the files leave out the root itself, as a home folder under git does: its own ignore files count.
    """
    found: list[_Lines] = []
    for folder in root.parents if not (root / ".git").exists() else ():
        before = os.fsencode(root.relative_to(folder)) + b"/"
        found[:0] = _lines(folder, IGNORE_FILES, 0, before, has_git=kept is not None)
        if (folder / ".git").exists():
            return [] if _is_left_out(found) else found
    return []


def _is_left_out(above: list[_Lines]) -> bool:
    """Return whether the ignore files above the root leave out the root, or a folder above."""
    ways = [(each.rules, each.before.split(b"/")[:-1]) for each in reversed(above)]
    for less in range(max((len(way) for _, way in ways), default=0)):
        above_root = [(rules, b"/".join(way[: len(way) - less])) for rules, way in ways if len(way) > less]
        verdicts = [rules.verdict(path, is_dir=True) for rules, path in above_root]
        if next((verdict for verdict in verdicts if verdict is not None), False):
            return True
    return False


def _is_report(entry: os.DirEntry[str]) -> bool:
    """Return whether the file is a cloudtrain report beside the code, which would change the hash of the code."""
    if not entry.name.endswith(".html"):
        return False
    try:
        return is_report(Path(entry.path))
    except OSError:  # the packing step reports the error
        return False


def _links_and_modes(folder: Path, found: dict[str, os.stat_result]) -> Iterator[Fault]:
    links = [name for name in sorted(found) if stat.S_ISLNK(found[name].st_mode)]
    shipped = {parent for name in found for parent in (name, *_parents(name))} if links else set()
    for name in links:
        if why := _why_not_shipped(folder / name, folder, shipped):
            hint = "copy what it points to, or exclude it; data comes by `inputs`"
            yield Fault(f"the link `{name}` {why}", key="code.dir", hint=hint)
    for name, about in found.items():
        is_readable = stat.S_ISLNK(about.st_mode) or about.st_mode & 0o444 == 0o444
        if not is_readable and not os.access(folder / name, os.R_OK):
            yield Fault(f"`{name}` cannot be read", key="code.dir", hint="change its mode, or exclude it")


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def _why_not_shipped(link: Path, folder: Path, shipped: set[str]) -> str | None:
    """Return why the target of a link would be missing on a node, or None."""
    try:
        target = link.resolve()
    except (OSError, RuntimeError):  # RuntimeError before Python 3.13
        return "leads to itself"
    if target.is_symlink():
        return "leads to itself"
    if not target.is_relative_to(folder):
        return "points outside the code folder"
    if target.exists() and target != folder and target.relative_to(folder).as_posix() not in shipped:
        return "points to what is not shipped"
    return None
