"""The files that a script writes into its working directory: the kept files, and the files that a node's end loses.

A kept folder is a link into the checkpoint folder, so the script writes to the checkpoint folder at once. A kept file,
or a file that matches a pattern, is copied to the checkpoint folder when the file is whole: many scripts replace a
file, which would replace a link too, and a save that a fault cuts off must not replace the save before. Before each
start of the ranks all kept files are copied back, with the files of other nodes where the nodes share the folder.
`newest` finds a script's newest checkpoint, which `resume_args` name.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .. import events
from ..contract import is_whole
from ..format import quantity
from ..replication.rotation import BEST, FOLDER, Saved, is_in_series, numbers_of

EVERY_S = 0.5  # between two polls of the working directory; a file is copied when two polls find it unchanged,
# and a file of torch.save at each poll, because its end shows whether it is whole: a script may save more often
SHARE = 20  # polls take at most this fraction (1/SHARE) of the time
LOOK_S = 2.0  # between two searches for checkpoints that nothing keeps
EVENTS_EVERY_S = 5.0  # at least, between two event lines of new checkpoints
PATIENCE_S = 0.05  # for few and small files, so that they do not cost a round of the agent
_IGNORED = frozenset({"__pycache__"})
_TMP = ".kept.tmp"
_MOST_NAMED = 6
_MOST_IN_EVENT = 20

_ARCHIVE = b"PK\x03\x04"  # the first bytes of a file of torch.save, a zip archive
_SAVED = re.compile(r"\.(?:pt|pth|ckpt|tar|bin|safetensors|pkl|npz|h5|msgpack|distcp)$", re.IGNORECASE)
_LOG = re.compile(
    r"tfevents|\.(?:log|txt|csv|tsv|jsonl|ya?ml|md|html|png|svg|out|err|tmp)$|^hparams|^\.", re.IGNORECASE
)
_DIGITS = re.compile(r"\d+")
_STAGED = re.compile(r"tmp[-_](?:checkpoint|ckpt|step|epoch)")  # Hugging Face's name of a save, until it is complete
_NUMBER = re.compile(r"[-_]?\d+")  # of a rank: one rank alone writes rng_state.pth, two write rng_state_0.pth

_Stamp = tuple[int, int]  # size in bytes, time of the last change in nanoseconds


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint's path below the folder; `rank` is 2 for a folder, 1 for a file with a known suffix, else 0."""

    path: str
    rank: int
    changed_s: float
    kinds: frozenset[str] = frozenset()  # the names of a folder's files, without numbers


@dataclass(frozen=True)
class Unkept:
    """A file of the working directory, or a folder (the name ends with a slash), that a node's end loses."""

    name: str
    files: int
    bytes: int


class FileKeeper:
    """Keeps the files of one node's working directory, over all starts of its ranks."""

    def __init__(self, code: Path, kept: Path, names: Sequence[str], log: Path | None = None) -> None:
        """`code` is the working directory, `kept` the checkpoint folder; `!` before a name: the file may be lost.

        New checkpoints are reported by event lines in `log`, rank 0's log, if the log is on this node.
        """
        self._code, self._kept = code, kept
        self.log = log  # rank 0's log, if the log is on this node
        self._names = [name for name in names if not name.startswith("!")]
        self._lost = [name[1:] for name in names if name.startswith("!")]
        self._links: list[str] = []
        self._shipped: set[str] | None = None
        self._here: dict[str, _Stamp] = {}  # files of the working directory as they were when last equal to the kept
        self._there: dict[str, _Stamp] = {}  # the kept files at the same moment
        self._seen: dict[str, _Stamp] = {}
        self._reported: set[str] = set()
        self._is_open, self._is_over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.fault: str | None = None
        self.newest: tuple[str, float] | None = None  # the newest checkpoint, complete after the ranks' end
        self._due_s = 0.0  # when the next event line may be written
        self._look_s = 0.0  # when the next search for checkpoints that nothing keeps may begin; infinite once warned
        self._lonely: set[str] = set()  # the unkept checkpoints that the last search found

    @property
    def tops(self) -> tuple[str, ...]:
        """The first parts of the kept names: the entries of the checkpoint folder that all nodes share."""
        return tuple(name.partition("/")[0] for name in self._names)

    def open(self) -> None:
        """Begin to copy the kept files back, for a start of the ranks."""
        self._is_open.clear()
        self._is_over.clear()
        self.fault = None
        self._thread = threading.Thread(target=self._run, name="keep", daemon=True)
        self._thread.start()

    def has_opened(self) -> bool:
        """Return whether the ranks may start; the first call begins to copy the kept files back."""
        if self._thread is None or self._is_over.is_set():
            if not self.close():  # the thread of the previous start still copies
                return False
            self.open()
        return self._is_open.wait(PATIENCE_S)

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called since the last start."""
        return self._is_over.is_set()

    def close(self, patience_s: float = PATIENCE_S) -> bool:
        """Copy the changed files after the ranks' end; return whether all are copied, within `patience_s`."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(patience_s)
        return self._thread is None or not self._thread.is_alive()

    def unkept(self) -> list[Unkept]:
        """Return the new files that are neither kept nor empty, by their first folder, the largest group first."""
        return self._grouped(self._unkept_names())

    def _unkept_names(self) -> set[str]:
        if self._shipped is None:  # no rank has started
            return set()
        return _listing(self._code) - self._shipped - {*_matching(self._code, self._lost), *self._found(self._code)}

    def _grouped(self, names: Iterable[str]) -> list[Unkept]:
        found: dict[str, list[int]] = {}
        for name in names:
            first, slash, _ = name.partition("/")
            with contextlib.suppress(OSError):
                if size := (self._code / name).stat().st_size:  # Hydra leaves an empty log behind every job
                    shown = (first + slash).encode(errors="replace").decode()  # a name may be any bytes
                    found.setdefault(shown, []).append(size)
        grouped = [Unkept(name, len(sizes), sum(sizes)) for name, sizes in found.items()]
        return sorted(grouped, key=lambda each: (-each.bytes, each.name))

    def _run(self) -> None:
        try:
            if self._shipped is None:
                self._shipped = _listing(self._code)
            self._link()
            # Each kept file is copied to the working directory, unless the file there is equal.
            for name, there in self._found(self._kept).items():
                here = _stamp(self._code / name)
                if here is None or here != self._here.get(name) or there != self._there.get(name):
                    _copy(self._kept / name, self._code / name)
                self._there[name] = there
            self._here = self._seen = self._found(self._code)
            self.newest = newest(self._kept)
        except Exception as error:
            self.fault = f"the files that `keep` names cannot be copied to the working directory: {error}"
        finally:
            self._is_open.set()
        wait_s = EVERY_S
        while not self._is_over.wait(wait_s):
            begin_s = time.monotonic()
            self._try_to_copy(is_last=False)
            wait_s = max(EVERY_S, SHARE * (time.monotonic() - begin_s))
        self._try_to_copy(is_last=True)

    def _report_saved(self, *, is_last: bool) -> None:
        """Find the newest checkpoint, and report a new checkpoint by an event line; the step is unknown."""
        if not is_last and time.monotonic() < self._due_s:
            return
        found = newest(self._kept)
        if not is_last and (found is None or 0 <= time.time() - found[1] < EVERY_S):
            return  # a file that changed just now may be incomplete
        previous, self.newest = self.newest, found
        if found is not None and found != previous and self.log is not None:
            self._due_s = time.monotonic() + EVENTS_EVERY_S
            path = found[0].encode(errors="replace").decode()  # a file's name may be any bytes
            about = {"path": path, "changed_s": round(found[1], 3)}
            events.append(self.log, [events.format_line("checkpoint", f"saved {path}", about)])

    def _warn_of_unkept(self) -> None:
        """Warn once, in the log, of checkpoints that nothing keeps, if no checkpoint is kept yet.

        Two searches must find the files, because a script may save a second file, which is kept, right after.
        """
        if self.newest is not None or self.log is None or time.monotonic() < self._look_s:
            return
        found = {name for name in self._unkept_names() if _SAVED.search(name)}
        groups, self._lonely = self._grouped(found & self._lonely), found
        self._look_s = time.monotonic() + LOOK_S
        if groups:
            self._look_s = math.inf
            report_unkept(groups, self.log, self._names)

    def _try_to_copy(self, *, is_last: bool) -> None:
        try:
            self._copy_kept(is_last=is_last)
            if not is_last:
                self._warn_of_unkept()
        except Exception as error:  # the next poll retries
            self._say(f"keep: {error}")
        self._report_saved(is_last=is_last)

    def _link(self) -> None:
        """Make each kept folder a link into the checkpoint folder, with the files that were shipped in the folder."""
        for name in sorted(self._names, key=len):  # a folder before the folders in it
            place, target = self._code / name, self._kept / name
            if glob.has_magic(name) or self._is_linked(name) or not _is_folder(name, place) or place.is_symlink():
                continue
            target.mkdir(parents=True, exist_ok=True)
            if place.is_dir():
                for each in sorted(_listing(place, hidden=True)):
                    here, there = place / each, _stamp(target / each)
                    if there is None or (there[1] < here.stat().st_mtime_ns and not _is_torn(here)):
                        _copy(here, target / each)
                shutil.rmtree(place)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(target, target_is_directory=True)
            self._links.append(name)

    def _is_linked(self, name: str) -> bool:
        """Return whether the name lies below a link into the checkpoint folder: such a file needs no copy."""
        tops = (link.rstrip("/") for link in self._links if (self._code / link).is_symlink())
        return any(name.startswith(f"{top}/") for top in tops)

    def _found(self, root: Path) -> dict[str, _Stamp]:
        """Return the kept files below the folder, but for the files of linked folders."""
        # Names of files: patterns, and a folder only where the script has replaced its link.
        names = [name for name in self._names if name not in self._links or not (self._code / name).is_symlink()]
        stamps = {name: _stamp(root / name) for name in _matching(root, names) if not self._is_linked(name)}
        return {name: stamp for name, stamp in stamps.items() if stamp is not None}

    def _copy_kept(self, *, is_last: bool) -> None:
        """Copy changed files to the checkpoint folder, and remove kept files that the script has removed."""
        found = self._found(self._code)
        for name, stamp in found.items():
            path = self._code / name
            if self._here.get(name) == stamp or not (is_last or self._seen.get(name) == stamp or _is_archive(path)):
                continue
            try:
                is_emptied = not stamp[0] and (_stamp(self._kept / name) or stamp)[0] > 0
                if is_emptied or _is_torn(path) or not _copy(path, self._kept / name):
                    if is_last:
                        self._say(f"keep: {name} is incomplete; the last complete copy stays")
                    continue
                self._here[name] = stamp
                self._there[name] = _stamp(self._kept / name) or stamp
            except OSError as error:
                self._say(f"keep: {name} cannot be kept: {error}")
        # Absent at two polls, and never at the last poll: a kill may fall between a removal and the next save.
        for name in () if is_last else self._here.keys() - found.keys() - self._seen.keys():
            with contextlib.suppress(OSError):
                if _stamp(self._kept / name) == self._there.get(name):  # else another node has written the file since
                    (self._kept / name).unlink()
            self._here.pop(name, None)
        self._seen = found

    def _say(self, words: str) -> None:
        words = words.encode(errors="replace").decode()  # a file's name may be any bytes
        if words not in self._reported:
            self._reported.add(words)
            print(words, flush=True)


def newest(folder: Path) -> tuple[str, float] | None:
    """Return the path of the newest whole checkpoint below the folder and the unix time of its last change, or None.

    Folders of checkpoints come before files, a checkpoint's suffix before other suffixes, and a name with `best` comes
    last. In a series (`checkpoint-500`, `checkpoint-1000`) the highest number wins, since a platform sets the times of
    files that are copied to a new machine; between series the latest time wins.
    """
    found = list(_candidates(folder, folder))
    if not found:
        return None
    is_plain = [each for each in found if not BEST.search(each.path.rpartition("/")[2])] or found
    rank = max(each.rank for each in is_plain)
    series: dict[str, list[_Candidate]] = {}
    ranked = [each for each in is_plain if each.rank == rank]
    # The paths of a series are equal but for their numbers, which order them.
    for each in sorted(ranked, key=lambda each: numbers_of(each.path)):
        series.setdefault(_DIGITS.sub("#", each.path), []).append(each)
    best = max((_last(each) for each in series.values()), key=lambda each: (each.changed_s, each.path))
    return best.path, best.changed_s


def saved(folder: Path) -> Saved:
    """Return the complete checkpoints below the folder that are part of a series, with their kinds of files."""
    found = dict[str, frozenset[str]]()
    for each in _candidates(folder, folder):
        name = each.path.rpartition("/")[2]
        stem = name if each.rank == 2 else PurePosixPath(name).stem
        if each.rank and is_in_series(stem):
            found[each.path] = each.kinds
    return found


def report_unkept(found: Sequence[Unkept], log: Path, empty: Sequence[str] | None = None) -> list[str]:
    """Write which files nothing keeps into the log, as an event line; return their names. `empty`: `unkept_words`."""
    names = [each.name for each in found]
    if found:
        line = events.format_line("unkept", unkept_words(found, empty), {"names": names[:_MOST_IN_EVENT]})
        events.append(log, [line])
    return names


def unkept_words(found: Sequence[Unkept], empty: Sequence[str] | None = None) -> str:
    """Return a sentence with the files and the key that keeps them; `empty`: `keep`, if no checkpoint is kept yet."""
    named = ", ".join(f"{each.name} ({_amount(each)})" for each in found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    keys = ", ".join(each.name for each in found[:_MOST_NAMED])
    when = "" if empty is None else " from the next submit on"
    cure = f"`keep: [{keys}]` in the config keeps {'them' if len(found) > 1 else 'it'}{when}"
    places = f" ({', '.join(empty)})" if empty else ""
    yet = "" if empty is None else f"warning: no checkpoint is kept yet{places}; "
    return f"cloudtrain: {yet}new in the working directory and not kept: {named}{more}; {cure}"


def _amount(each: Unkept) -> str:
    files = f"{each.files} files, " if each.files > 1 else ""
    return f"{files}{quantity(each.bytes)}B"


def _is_folder(name: str, place: Path) -> bool:
    """Return whether a name without a pattern is a folder: an existing folder, a final `/` or no suffix."""
    if place.exists():
        return place.is_dir()
    return name.endswith("/") or not PurePosixPath(name).suffix


def _matching(root: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the regular files that match the patterns, as paths relative to the folder."""
    for name in names:
        for found in glob.glob(name, root_dir=root, recursive=True):  # noqa: PTH207 - Path.glob refuses some patterns
            path = root / found
            if path.is_dir() and not path.is_symlink():
                yield from (f"{found.rstrip('/')}/{each}" for each in _listing(path, hidden=True))
            elif path.is_file() and not path.is_symlink() and not found.endswith((".tmp", _TMP)):
                yield found


def _stamp(path: Path) -> _Stamp | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_size, found.st_mtime_ns
    return None


def _listing(root: Path, *, hidden: bool = False) -> set[str]:
    """Return the regular files below the folder, `hidden` ones only if asked for; links are not followed."""
    found = set()
    for place, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _IGNORED and (hidden or not name.startswith("."))]
        for name in files:
            path = Path(place, name)
            if (hidden or not name.startswith(".")) and not name.endswith((".pyc", _TMP)) and not path.is_symlink():
                found.add(path.relative_to(root).as_posix())
    return found


def _is_archive(path: Path) -> bool:
    """Return whether the file is an archive, as torch.save writes it."""
    with contextlib.suppress(OSError), path.open("rb") as file:  # removed since the poll
        return file.read(len(_ARCHIVE)) == _ARCHIVE
    return False


def _copy(source: Path, target: Path) -> bool:
    """Copy a file with its mode and times; return False, without a copy, for a changed or torn file. Raises OSError."""
    before = _stamp(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.uname().nodename}-{os.getpid()}{_TMP}")
    try:
        shutil.copyfile(source, partial)
        shutil.copystat(source, partial)
        if _stamp(source) != before or _is_torn(partial):
            return False
        partial.replace(target)
        return True
    finally:
        partial.unlink(missing_ok=True)


def _last(series: list[_Candidate]) -> _Candidate:
    """Return the last checkpoint of a series, or the previous if the last was cut off and lacks a kind of file."""
    return series[-2] if len(series) > 1 and not series[-2].kinds <= series[-1].kinds else series[-1]


def _is_torn(path: Path) -> bool:
    """Return whether a save was cut off: torch.save's zip archive has no end, or the file is empty. Raises OSError."""
    with path.open("rb") as file:
        begin = file.read(len(_ARCHIVE))
    if not begin:
        return bool(_SAVED.search(path.name))
    return begin == _ARCHIVE and not zipfile.is_zipfile(path)


def _candidates(root: Path, folder: Path) -> Iterator[_Candidate]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        path = Path(entry.path)
        name = path.relative_to(root).as_posix()
        try:
            if not is_whole(entry.name) or _STAGED.match(entry.name):
                continue
            if entry.is_dir():
                if FOLDER.search(entry.name) or (path / ".metadata").exists():
                    files = [each for each in path.rglob("*") if each.is_file()]
                    has_data = any(not _LOG.search(each.name) or each.name == ".metadata" for each in files)
                    if has_data and _is_whole(path, files):
                        kinds = frozenset(_NUMBER.sub("", each.relative_to(path).as_posix()) for each in files)
                        yield _Candidate(name, 2, max(each.stat().st_mtime for each in files), kinds)
                else:
                    yield from _candidates(root, path)
            elif not _LOG.search(entry.name) and not _is_torn(path):
                yield _Candidate(name, 1 if _SAVED.search(entry.name) else 0, entry.stat().st_mtime)
        except OSError:  # removed by the script meanwhile
            continue


def _is_whole(folder: Path, files: list[Path]) -> bool:
    """Return whether the folder has the file that its library writes last, and no file that was cut off."""
    names = {path.name for path in files}
    if "training_args.bin" in names and "trainer_state.json" not in names:
        return False
    if any(name.endswith(".distcp") for name in names) and ".metadata" not in names:
        return False
    return not any(_is_torn(path) for path in files)
