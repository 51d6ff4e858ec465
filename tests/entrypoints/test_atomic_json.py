"""JSON files that are whole or absent."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cloudtrain.entrypoints import atomic_json


def test_write_json_comes_back(tmp_path: Path) -> None:
    """What is written is read."""
    atomic_json.write_json(tmp_path / "a.json", {"x": [1, None]})
    assert atomic_json.read_json(tmp_path / "a.json") == {"x": [1, None]}


def test_write_json_that_fails_leaves_the_old_value(tmp_path: Path) -> None:
    """A value that cannot be written changes nothing and leaves no partial file."""
    atomic_json.write_json(tmp_path / "a.json", 1)
    with pytest.raises(TypeError):
        atomic_json.write_json(tmp_path / "a.json", object())
    assert atomic_json.read_json(tmp_path / "a.json") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_write_json_on_a_full_disk_takes_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first try finds no room, a piece of the reserve goes, and the second finds some."""
    monkeypatch.setenv(atomic_json.RESERVE, "")
    atomic_json.reserve(tmp_path / "reserve")
    write = atomic_json._write

    def write_when_there_is_room(path: Path, value: object) -> None:
        if len(list((tmp_path / "reserve").iterdir())) == atomic_json.PIECES:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, value)

    monkeypatch.setattr(atomic_json, "_write", write_when_there_is_room)
    atomic_json.write_json(tmp_path / "a.json", 1)
    assert atomic_json.read_json(tmp_path / "a.json") == 1


@pytest.mark.parametrize("text", [None, "", "{", "\0"])
def test_read_json_of_nothing_is_none(tmp_path: Path, text: str | None) -> None:
    """No file, and a file that holds no JSON, are both nothing."""
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    assert atomic_json.read_json(tmp_path / "a.json") is None
