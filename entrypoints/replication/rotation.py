"""Which saved checkpoints of a script the nodes need: of each series the newest complete checkpoint, and later ones.

A series is the checkpoints of a folder with equal names except for the numbers: `out/checkpoint-10`,
`out/checkpoint-20`. A script removes old checkpoints on node 0 alone, so the other nodes remove the copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from .. import atomic_json

Saved = Mapping[str, Set[str]]
"""Path of a complete checkpoint -> the names of the files without numbers; no names if the checkpoint is a file."""

_COUNT = r"(?:^|[-_])(?:checkpoint|ckpt|step|epoch|iter|iteration|global_?step|save)[-_=]?(\d+)"
_METRICS = r"(?:[-_]+(?!rank)[A-Za-z][\w.]*=-?[\d.]+)"
# Libraries' names: Hugging Face `checkpoint-500`, Accelerate `step_10`, DeepSpeed `global_step10`, timm
# `checkpoint-12.pth.tar`, Lightning `epoch=3-val_loss=0.52-v1.ckpt`, a file or a folder; or a number alone.
FOLDER = re.compile(rf"{_COUNT}{_METRICS}*(?:-v\d+|-last)?(?:\.ckpt|\.pth)?$|^\d+$")
BEST = re.compile(r"best", re.IGNORECASE)
_OURS = re.compile(r"step-\d{8}$")  # the trainer keeps its checkpoints itself
_METRIC = re.compile(r"=-?\d+\.\d")  # in a name: the script may keep the best checkpoints, as save_top_k does
_DIGITS = re.compile(r"\d+")


def numbers_of(path: str) -> tuple[int, ...]:
    """Return the numbers of a path: in the name first the steps and epochs, since a metric may stand before them."""
    folder, _, name = path.rpartition("/")
    return tuple(map(int, _DIGITS.findall(folder) + re.findall(_COUNT, name) + _DIGITS.findall(name)))


def place_in_series(path: str) -> tuple[str, tuple[int, ...]]:
    """Return the series of a checkpoint, and its place there."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{_DIGITS.sub('#', name)}", numbers_of(name)


def is_in_series(stem: str) -> bool:
    """Return whether a name is of a series: a number alone may be a rank, and the best checkpoint stays."""
    return bool(FOLDER.search(stem)) and not stem.isdigit() and not BEST.search(stem) and not _OURS.match(stem)


def unseen(paths: Iterable[str], leader: Iterable[str]) -> set[str]:
    """Return the files of checkpoints that node 0, with the files `leader`, has replaced by later checkpoints."""
    there = set(filter(None, map(_checkpoint_of, leader)))
    here = {path: name for path in paths if (name := _checkpoint_of(path)) and name not in there}
    old = older({name: set() for name in there}, {name: set() for name in here.values()})
    last = {place_in_series(name)[0] for name in there}
    return {path for path, name in here.items() if name in old and place_in_series(name)[0] in last}


def _checkpoint_of(path: str) -> str | None:
    """Return the path's first part with a checkpoint's name, with the folders before; None without a checkpoint."""
    parts = path.split("/")
    at = next(
        (at for at, part in enumerate(parts) if is_in_series(part if at < len(parts) - 1 else Path(part).stem)), None
    )
    return None if at is None else "/".join(parts[: at + 1])


def union(*nodes: Saved) -> Saved:
    """Return the checkpoints of all nodes; a checkpoint may be spread over several nodes."""
    return {name: set().union(*(node.get(name, ()) for node in nodes)) for name in set().union(*nodes)}


def older(*nodes: Saved) -> set[str]:
    """Return all checkpoints before the newest complete checkpoint of the series, with all kinds of files.

    If the names have metrics, the checkpoints beside the newest checkpoint, on its node, are not among them.
    """
    saved = union(*nodes)
    series: dict[str, list[str]] = {}
    for name in sorted(saved, key=place_in_series):
        series.setdefault(place_in_series(name)[0], []).append(name)
    found = set[str]()
    for names in series.values():
        kinds = [saved[name] for name in names]
        newest = max(at for at, own in enumerate(kinds) if all(own >= before for before in kinds[:at]))
        is_by_metric = _METRIC.search(names[newest].rpartition("/")[2])
        best = union(*(node for node in nodes if is_by_metric and names[newest] in node))
        found.update(set(names[:newest]) - best.keys())
    return found


def is_in(path: str, names: Iterable[str]) -> bool:
    """Return whether the path is among the names, or below a name."""
    return any(path == name or path.startswith(f"{name}/") for name in names)


def note_copies(note: Path, folder: Path, source: str, paths: Iterable[Path]) -> None:
    """Record files below the folder as copies from the address `source`. Raises OSError."""
    copies = {path.relative_to(folder).as_posix(): [source, path.stat().st_mtime_ns] for path in paths}
    if copies:
        atomic_json.write_json(note, {**(atomic_json.read_json(note) or {}), **copies})


def remove_copies(note: Path, folder: Path, source: str, names: Set[str]) -> list[str]:
    """Remove these checkpoints' copies from `source`, and folders left empty; return the names. Raises OSError.

    A file changed since the copy is the node's own, and stays.
    """
    copies = atomic_json.read_json(note) or {}
    gone = [path for path, (origin, _) in copies.items() if origin == source and is_in(path, names)]
    for path in gone:
        file, (_, written_ns) = folder / path, copies.pop(path)
        if file.is_file() and file.stat().st_mtime_ns == written_ns:
            file.unlink()
            for above in file.parents:
                if above == folder or any(above.iterdir()):
                    break
                above.rmdir()
    if gone:
        atomic_json.write_json(note, copies)
    return sorted(name for name in names if any(is_in(path, [name]) for path in gone))
