"""The search for a script's newest checkpoint, which `resume_args` name."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..contract import is_whole

# Libraries' names: Hugging Face `checkpoint-500`, Accelerate `step_10`, DeepSpeed `global_step10`; or a number alone.
_FOLDER = re.compile(r"(?:^|[-_])(?:checkpoint|ckpt|step|epoch|iter|iteration|global_?step|save)[-_=]?\d+$|^\d+$")
ARCHIVE = b"PK\x03\x04"  # the first bytes of a file of torch.save, a zip archive
SAVED = re.compile(r"\.(?:pt|pth|ckpt|tar|bin|safetensors|pkl|npz|h5|msgpack|distcp)$", re.IGNORECASE)
_LOG = re.compile(
    r"tfevents|\.(?:log|txt|csv|tsv|jsonl|ya?ml|md|html|png|svg|out|err|tmp)$|^hparams|^\.", re.IGNORECASE
)
_BEST = re.compile(r"best", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
_NUMBER = re.compile(r"[-_]?\d+")  # of a rank: one rank alone writes rng_state.pth, two write rng_state_0.pth


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint's path below the folder; `rank` is 2 for a folder, 1 for a file with a known suffix, else 0."""

    path: str
    rank: int
    changed_s: float
    kinds: frozenset[str] = frozenset()  # the names of a folder's files, without numbers


def newest(folder: Path) -> tuple[str, float] | None:
    """Return the path of the newest whole checkpoint below the folder and the unix time of its last change, or None.

    Folders of checkpoints come before files, a checkpoint's suffix before other suffixes, and a name with `best` comes
    last. In a series (`checkpoint-500`, `checkpoint-1000`) the highest number wins, since a platform sets the times of
    files that are copied to a new machine; between series the latest time wins.
    """
    found = list(_candidates(folder, folder))
    if not found:
        return None
    is_plain = [each for each in found if not _BEST.search(each.path.rpartition("/")[2])] or found
    rank = max(each.rank for each in is_plain)
    series: dict[str, list[_Candidate]] = {}
    ranked = [each for each in is_plain if each.rank == rank]
    # The paths of a series are equal but for their numbers, which order them.
    for each in sorted(ranked, key=lambda each: [int(digits) for digits in _DIGITS.findall(each.path)]):
        series.setdefault(_DIGITS.sub("#", each.path), []).append(each)
    best = max((_last(each) for each in series.values()), key=lambda each: (each.changed_s, each.path))
    return best.path, best.changed_s


def _last(series: list[_Candidate]) -> _Candidate:
    """Return the last checkpoint of a series, or the previous if the last was cut off and lacks a kind of file."""
    return series[-2] if len(series) > 1 and not series[-2].kinds <= series[-1].kinds else series[-1]


def is_torn(path: Path) -> bool:
    """Return whether a save was cut off: torch.save's zip archive has no end, or the file is empty. Raises OSError."""
    with path.open("rb") as file:
        begin = file.read(len(ARCHIVE))
    if not begin:
        return bool(SAVED.search(path.name))
    return begin == ARCHIVE and not zipfile.is_zipfile(path)


def _candidates(root: Path, folder: Path) -> Iterator[_Candidate]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        path = Path(entry.path)
        name = path.relative_to(root).as_posix()
        try:
            if not is_whole(entry.name):
                continue
            if entry.is_dir():
                if _FOLDER.search(entry.name) or (path / ".metadata").exists():
                    files = [each for each in path.rglob("*") if each.is_file()]
                    has_data = any(not _LOG.search(each.name) or each.name == ".metadata" for each in files)
                    if has_data and _is_whole(path, files):
                        kinds = frozenset(_NUMBER.sub("", each.relative_to(path).as_posix()) for each in files)
                        yield _Candidate(name, 2, max(each.stat().st_mtime for each in files), kinds)
                else:
                    yield from _candidates(root, path)
            elif not _LOG.search(entry.name) and not is_torn(path):
                yield _Candidate(name, 1 if SAVED.search(entry.name) else 0, entry.stat().st_mtime)
        except OSError:  # removed by the script meanwhile
            continue


def _is_whole(folder: Path, files: list[Path]) -> bool:
    """Return whether the folder has the file that its library writes last, and no file that was cut off."""
    names = {path.name for path in files}
    if "training_args.bin" in names and "trainer_state.json" not in names:
        return False
    if any(name.endswith(".distcp") for name in names) and ".metadata" not in names:
        return False
    return not any(is_torn(path) for path in files)
