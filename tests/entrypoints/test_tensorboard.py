"""Event files, read back by TensorBoard."""

import errno
import math
import os
import struct
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as Server
from tensorboard.util.tensor_util import make_ndarray

from cloudtrain.entrypoints.trainer import tensorboard
from cloudtrain.entrypoints.trainer.tensorboard import Board


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Return TensorBoard's view of a folder, value by step by tag; its two readers agree."""
    old, new = EventAccumulator(str(folder)), Server(str(folder))
    old.Reload()
    new.Reload()
    found = {tag: {e.step: e.value for e in old.Scalars(tag)} for tag in old.Tags()["scalars"]}
    assert all(len(found[tag]) == len(old.Scalars(tag)) for tag in found), "a step shows twice"
    again = {
        tag: {e.step: make_ndarray(e.tensor_proto).item() for e in new.Tensors(tag)} for tag in new.Tags()["tensors"]
    }
    assert {t: {s: repr(v) for s, v in values.items()} for t, values in again.items() if values} == {
        t: {s: repr(v) for s, v in values.items()} for t, values in found.items() if values
    }
    return found


def test_scalars_are_read_back(tmp_path: Path) -> None:
    """Values, tags and steps survive, with a big step, infinite values, and values too big for float32."""
    board = Board(tmp_path)
    board.scalars(1, {"train/loss": 0.5, "größe": 3})
    board.scalars(2**40, {"train/loss": -math.inf, "größe": 1e300})
    board.close()
    assert read(tmp_path) == {"train/loss": {1: 0.5, 2**40: -math.inf}, "größe": {1: 3.0, 2**40: math.inf}}
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("events.out.tfevents.")


def test_nan_is_shown_as_nan(tmp_path: Path) -> None:
    """A nan loss is a value too."""
    board = Board(tmp_path)
    board.scalars(1, {"loss": math.nan})
    board.close()
    assert math.isnan(read(tmp_path)["loss"][1])


def test_non_numbers_are_left_out(tmp_path: Path) -> None:
    """Paths, flags and unknown values stay in the event line; without a number no file is made."""
    board = Board(tmp_path / "new")
    board.scalars(1, {"path": "x", "saved": True, "mfu": None})
    board.close()
    assert not (tmp_path / "new").exists()


def test_events_of_the_trainer_are_written_by_group(tmp_path: Path) -> None:
    """A step event's numbers get the prefix train; events without numbers write no scalars."""
    board = Board(tmp_path)
    board.write("start", {"step": 0, "ranks": 2})
    board.write("step", {"step": 10, "max_steps": 20, "loss": 0.5, "lr": 0.25})
    board.write("eval", {"step": 10, "accuracy": 0.75, "metrics": {"accuracy": 0.75}})
    board.write("error", {"message": "no step"})
    board.write("done", {"step": 20, "seconds": 3.0})
    board.close()
    assert read(tmp_path) == {"train/loss": {10: 0.5}, "train/lr": {10: 0.25}, "eval/accuracy": {10: 0.75}}


def test_steps_trained_again_show_once(tmp_path: Path) -> None:
    """Three sessions in one second, each resumed before the end of the last; lost tags vanish too."""
    for first, last, value in ((0, 10, 1.0), (6, 12, 2.0), (8, 9, 3.0)):
        board = Board(tmp_path)
        board.write("start", {"step": first})
        for step in range(first + 1, last + 1):
            board.scalars(step, {"loss": value})
        if first == 0:
            board.scalars(10, {"late": 1.0})
        board.close()
    found = read(tmp_path)
    assert found["loss"] == {**dict.fromkeys(range(1, 7), 1.0), 7: 2.0, 8: 2.0, 9: 3.0}
    assert found["late"] == {}


def test_full_disk_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused bytes wait, and the file is whole when space is free again."""
    board = Board(tmp_path)
    write = os.write
    room = [50]

    def full(handle: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(handle, bytes(data[: room[0]]))
        room[0] -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for step in range(5):
            board.scalars(step, {"loss": float(step)})
            board.flush()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == 50
    board.scalars(5, {"loss": 5.0})
    board.close()
    assert read(tmp_path) == {"loss": {step: float(step) for step in range(6)}}


def test_unusable_folder_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues without curves, and the buffer has a limit."""
    (tmp_path / "file").touch()
    board = Board(tmp_path / "file" / "folder")
    monkeypatch.setattr(tensorboard, "_MAX_BYTES", 500)
    for step in range(100):
        board.scalars(step, {"loss": 1.0})
    board.close()
    assert 500 <= len(board._waiting) < 600


def test_writing_waits_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is written within seconds, but not for every line."""
    board = Board(tmp_path)
    board.scalars(1, {"loss": 1.0})
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tensorboard, "_FLUSH_S", 0.0)
    board.scalars(2, {"loss": 2.0})
    assert read(tmp_path)["loss"] == {1: 1.0, 2: 2.0}


def test_checksum_is_castagnolis() -> None:
    """The check value of RFC 3720, appendix B.4, and its masked form in the header of a record."""
    assert tensorboard._crc(bytes(32)) == 0x8A9136AA
    assert tensorboard._crc(b"123456789") == 0xE3069283
    record = tensorboard._record(b"abc")
    assert struct.unpack("<Q", record[:8]) == (3,)
    assert len(record) == 8 + 4 + 3 + 4
