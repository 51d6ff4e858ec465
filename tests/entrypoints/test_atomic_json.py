"""JSON files that are whole or absent."""

import errno
import os
from pathlib import Path

import pytest

from cloudtrain.entrypoints import atomic_json


def test_write_json_that_fails_leaves_the_old_value(tmp_path: Path) -> None:
    """`read_json` returns the value that `write_json` wrote; a value that cannot be written leaves no partial file."""
    atomic_json.write_json(tmp_path / "a.json", {"x": [1, None]})
    with pytest.raises(TypeError):
        atomic_json.write_json(tmp_path / "a.json", object())
    assert atomic_json.read_json(tmp_path / "a.json") == {"x": [1, None]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_write_json_that_is_not_durable_leaves_the_old_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk cannot make the new bytes durable, the old file keeps its name: a power cut loses no value."""
    atomic_json.write_json(tmp_path / "a.json", 1)

    def broken_disk(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken_disk)
    with pytest.raises(OSError, match="Input/output error"):
        atomic_json.write_json(tmp_path / "a.json", 2)
    assert atomic_json.read_json(tmp_path / "a.json") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_write_json_on_a_full_disk_takes_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full at the first try, the writer frees a piece of the reserve and the second try works."""
    monkeypatch.setenv(atomic_json.RESERVE, "")
    atomic_json.reserve(tmp_path / "reserve")
    write = atomic_json.write_text

    def write_when_there_is_room(path: Path, text: str, mode: int) -> None:
        if len(list((tmp_path / "reserve").iterdir())) == atomic_json.PIECES:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text, mode)

    monkeypatch.setattr(atomic_json, "write_text", write_when_there_is_room)
    atomic_json.write_json(tmp_path / "a.json", 1)
    assert atomic_json.read_json(tmp_path / "a.json") == 1


@pytest.mark.parametrize("text", [None, "", "{", "\0"])
def test_read_json_of_missing_or_broken_file_is_none(tmp_path: Path, text: str | None) -> None:
    """A missing file and a file without valid JSON both give None."""
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    assert atomic_json.read_json(tmp_path / "a.json") is None
