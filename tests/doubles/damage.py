"""Ways to damage a checkpoint and keep the checksums right: a resume must find each contradiction."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

OLDER = "step-00000005"  # the intact checkpoint beside the damaged one


def rewrite(path: Path, files: dict[str, bytes], manifest: Any = None) -> None:
    """Replace files of the checkpoint, and write a manifest that agrees with the files, or the given manifest."""
    listed = json.loads((path / "manifest.json").read_text().partition("\n")[0])
    for name, data in files.items():
        (path / name).write_bytes(data)
        listed["files"][name] = {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    text = json.dumps(listed if manifest is None else manifest(listed))
    (path / "manifest.json").write_text(f"{text}\n{zlib.crc32(text.encode()):08x}\n")


def edit_trainer(**fields: Any) -> Callable[[Path], None]:
    """Return a function that sets fields of trainer.json; `None` removes the field."""

    def edit(path: Path) -> None:
        trainer = {**json.loads((path / "trainer.json").read_text()), **fields}
        kept = {name: value for name, value in trainer.items() if value is not None}
        rewrite(path, {"trainer.json": json.dumps(kept).encode()})

    return edit


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        shutil.rmtree(path)
        make(path)

    return replace


def swap(path: Path) -> None:
    """Swap the names of the checkpoint and the older checkpoint."""
    older = path.with_name(OLDER)
    path.rename(path.with_name("x"))
    older.rename(path)
    path.with_name("x").rename(older)


def _shard(path: Path) -> Path:
    return min(path.glob("shard-*"))


def _edit_header(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = _shard(path).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        rewrite(path, {_shard(path).name: len(text).to_bytes(8, "little") + text + data[8 + length :]})

    return change


def _first(header: dict[str, Any]) -> dict[str, Any]:
    return next(value for name, value in header.items() if name != "__metadata__")


def _without(listed: dict[str, Any], name: str) -> dict[str, Any]:
    return {**listed, "files": {key: value for key, value in listed["files"].items() if not key.startswith(name)}}


# Form of damage -> function that damages the newest checkpoint; the older checkpoint stays intact.
FORMS: dict[str, Callable[[Path], object]] = {
    "copied": _replaced(lambda path: shutil.copytree(path.with_name(OLDER), path)),
    "linked": _replaced(lambda path: path.symlink_to(OLDER)),
    "link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "link to nothing": _replaced(lambda path: path.symlink_to("nowhere")),
    "file": _replaced(lambda path: path.write_bytes(b"x")),
    "pipe": _replaced(lambda path: os.mkfifo(path)),
    "empty folder": _replaced(lambda path: path.mkdir()),
    "manifest is a folder": lambda path: ((path / "manifest.json").unlink(), (path / "manifest.json").mkdir()),
    "manifest is a pipe": lambda path: ((path / "manifest.json").unlink(), os.mkfifo(path / "manifest.json")),
    "manifest is a list": lambda path: rewrite(path, {}, lambda listed: [listed]),
    "manifest lists words": lambda path: rewrite(path, {}, lambda listed: {**listed, "files": "all"}),
    "manifest without sizes": lambda path: rewrite(
        path, {}, lambda listed: {**listed, "files": dict.fromkeys(listed["files"])}
    ),
    "manifest without the trainer": lambda path: rewrite(path, {}, lambda listed: _without(listed, "trainer")),
    "manifest without shards": lambda path: rewrite(path, {}, lambda listed: _without(listed, "shard-")),
    "manifest of another folder": lambda path: rewrite(
        path, {}, lambda listed: {**listed, "files": {**listed["files"], "../x": {"size": 0, "crc32": "0"}}}
    ),
    "shard is a link to itself": lambda path: (
        name := _shard(path).name,
        _shard(path).unlink(),
        (path / name).symlink_to(name),
    ),
    "shard without a header": lambda path: rewrite(path, {_shard(path).name: b"\0" * 50}),
    "shard of words": lambda path: rewrite(path, {_shard(path).name: b"\x02" + b"\0" * 7 + b"[]" + b"\0" * 50}),
    "shard beyond its end": _edit_header(lambda header: _first(header).update(data_offsets=[0, 1 << 40])),
    "shard of another type": _edit_header(lambda header: _first(header).update(dtype="Q7")),
    "shard of the older step": lambda path: rewrite(
        path, {_shard(path).name: _shard(path.with_name(OLDER)).read_bytes()}
    ),
    "shard with a broken side": _edit_header(lambda header: _first(header).update(shape=[10.0])),
    "shard off its place": _edit_header(lambda header: _first(header).update(data_offsets=[1, 41])),
    "shard of another shape": _edit_header(lambda header: _first(header).update(shape=[-1, 3])),
    "plain of the older step": lambda path: rewrite(
        path, {"plain.pt": (path.with_name(OLDER) / "plain.pt").read_bytes()}
    ),
    "plain of words": lambda path: rewrite(path, {"plain.pt": b"words"}),
    "plain is empty": lambda path: rewrite(path, {"plain.pt": b""}),
    "trainer of words": lambda path: rewrite(path, {"trainer.json": b"words"}),
    "trainer is a list": lambda path: rewrite(path, {"trainer.json": b"[1]"}),
    "trainer of another step": edit_trainer(step=7),
    "trainer without a step": edit_trainer(step=None),
    "trainer with a step of words": edit_trainer(step="10"),
    "trainer with a true step": edit_trainer(step=True),
    "trainer before the first sample": edit_trainer(samples=-1),
    "trainer with metrics of words": edit_trainer(metrics="none"),
    "trainer evaluated later": edit_trainer(evaluated_step=99),
    "trainer with ranks of words": edit_trainer(world_size="two"),
}
