"""Tests of the kept files of a working directory: folders, files, patterns, several starts and nodes."""

import math
import os
import shutil
import time
import zipfile
from pathlib import Path

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.scripts import keep
from cloudtrain.entrypoints.scripts.keep import FileKeeper, Unkept
from doubles.waiting import until

PATIENCE_S = 30.0
NEW_S = 1e9  # unix seconds, in the past


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return a working directory with a script."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("pass")
    return tmp_path / "code"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return an empty checkpoint folder."""
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


def started(keeper: FileKeeper) -> FileKeeper:
    """Return the keeper when the ranks may start."""
    keeper.open()
    assert keeper._is_open.wait(PATIENCE_S)
    assert keeper.fault is None
    return keeper


def ended(keeper: FileKeeper) -> None:
    """Return when all files that the ranks have left are kept."""
    assert keeper.close(PATIENCE_S)


def files(root: Path) -> dict[str, str]:
    """Return the files below a folder, links followed, with their texts."""
    paths = (Path(place, name) for place, _, names in os.walk(root, followlinks=True) for name in names)
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def test_kept_folder_is_in_the_checkpoint_folder_at_once(code: Path, kept: Path) -> None:
    """The script writes through a link, and files that were shipped in the folder are there."""
    (code / "out").mkdir()
    (code / "out" / "vocabulary.txt").write_text("shipped")
    keeper = started(FileKeeper(code, kept, ["out/"]))
    (code / "out" / "ckpt.pt").write_text("1")
    assert files(kept) == {"out/ckpt.pt": "1", "out/vocabulary.txt": "shipped"}
    ended(keeper)


def test_files_and_patterns_are_kept_at_the_end(code: Path, kept: Path) -> None:
    """A file replaced by a rename, as some scripts save, is kept too; an unchanged shipped file is not kept."""
    (code / "base.pt").write_text("shipped")
    keeper = started(FileKeeper(code, kept, ["snapshot.json", "*.pt", "runs/*/best"]))
    (code / "snapshot.json.new").write_text("2")
    (code / "snapshot.json.new").replace(code / "snapshot.json")
    (code / "a.pt").write_text("a")
    (code / "runs" / "7").mkdir(parents=True)
    (code / "runs" / "7" / "best").write_text("b")
    ended(keeper)
    assert files(kept) == {"snapshot.json": "2", "a.pt": "a", "runs/7/best": "b"}


def test_new_checkpoints_are_reported_in_the_log(code: Path, kept: Path, tmp_path: Path) -> None:
    """While the ranks run and at their end, by their paths; a checkpoint from before the start is not reported."""
    log = tmp_path / "rank-0.log"
    log.write_text("loss: ")
    (kept / "out").mkdir()
    (kept / "out" / "old.pt").write_text("0")
    os.utime(kept / "out" / "old.pt", (1.0, 1.0))
    keeper = started(FileKeeper(code, kept, ["out/"], log))
    keeper._report_saved(is_last=True)
    assert log.read_text() == "loss: "
    (code / "out" / "ckpt.pt").write_text("1")
    os.utime(code / "out" / "ckpt.pt", (NEW_S, NEW_S))
    until(lambda: "ckpt.pt" in log.read_text())
    (code / "out" / "ckpt.pt").write_text("2")
    os.utime(code / "out" / "ckpt.pt", (NEW_S + 1, NEW_S + 1))
    ended(keeper)
    told = [events.parse(line) for line in log.read_text().splitlines()[1:]]
    event = {"e": "checkpoint", "path": "out/ckpt.pt"}
    assert told == [("saved out/ckpt.pt", event | {"changed_s": changed_s}) for changed_s in (NEW_S, NEW_S + 1)]


def test_file_is_kept_while_the_ranks_run(code: Path, kept: Path) -> None:
    """A killed machine loses no file that was whole before."""
    keeper = started(FileKeeper(code, kept, ["a.pt"]))
    (code / "a.pt").write_text("x")
    until((kept / "a.pt").exists)
    assert (kept / "a.pt").read_text() == "x"
    ended(keeper)


def test_file_that_is_saved_all_the_time_is_kept(code: Path, kept: Path) -> None:
    """A script that saves more often than the keeper polls has a whole copy, before the end."""
    keeper, number, end_s = started(FileKeeper(code, kept, ["s.pt"])), 0, time.monotonic() + PATIENCE_S
    while not (kept / "s.pt").exists() and time.monotonic() < end_s:
        number += 1
        with zipfile.ZipFile(code / "s.pt", "w") as archive:
            archive.writestr("data", f"{number}" * 10_000)
        keeper._is_over.wait(keep.EVERY_S / 50)
    with zipfile.ZipFile(kept / "s.pt") as copied:
        assert copied.testzip() is None
    ended(keeper)


def test_next_start_and_another_node_have_the_kept_files(code: Path, kept: Path, tmp_path: Path) -> None:
    """The kept files also arrive if the files of the last start are gone with its machine."""
    ended_keeper = started(FileKeeper(code, kept, ["out/", "*.pt"]))
    (code / "out" / "log").write_text("1")
    (code / "s.pt").write_text("2")
    ended(ended_keeper)
    other = tmp_path / "other"
    other.mkdir()
    (other / "s.pt").write_text("as it was shipped")
    ended(started(FileKeeper(other, kept, ["out/", "*.pt"])))
    assert files(other) == {"out/log": "1", "s.pt": "2"}


def test_restart_takes_over_a_file_written_by_the_other_node(code: Path, kept: Path, tmp_path: Path) -> None:
    """Two nodes on one checkpoint folder: both start from the same file, though only the first node wrote the file."""
    other = tmp_path / "other"
    other.mkdir()
    first, second = FileKeeper(code, kept, ["s.pt"]), FileKeeper(other, kept, ["s.pt"])
    for keeper in (first, second):
        started(keeper)
    (code / "s.pt").write_text("epoch 30")
    for keeper in (first, second):
        ended(keeper)
    for keeper in (first, second):
        ended(started(keeper))
    assert (other / "s.pt").read_text() == "epoch 30"


def test_save_that_was_cut_off_leaves_the_previous_save(code: Path, kept: Path) -> None:
    """The next start has the whole file again."""
    keeper = started(FileKeeper(code, kept, ["s.pt"]))
    with zipfile.ZipFile(code / "s.pt", "w") as archive:
        archive.writestr("data", "x" * 1000)
    whole = (code / "s.pt").read_bytes()
    ended(keeper)
    started(keeper)
    (code / "s.pt").write_bytes(whole[:500])
    ended(keeper)
    assert (kept / "s.pt").read_bytes() == whole
    ended(started(keeper))
    assert (code / "s.pt").read_bytes() == whole


def test_removed_file_is_removed_from_the_kept(code: Path, kept: Path) -> None:
    """A script that keeps its last two checkpoints keeps two; a file of another node stays."""
    (kept / "c-9.pt").write_text("of another node")
    keeper = started(FileKeeper(code, kept, ["c-*.pt"]))
    (code / "c-1.pt").write_text("1")
    ended(keeper)
    started(keeper)
    (code / "c-1.pt").unlink()
    (code / "c-2.pt").write_text("2")
    until(lambda: not (kept / "c-1.pt").exists())
    ended(keeper)
    assert files(kept) == {"c-2.pt": "2", "c-9.pt": "of another node"}


def test_folder_that_replaces_its_link_is_kept(code: Path, kept: Path) -> None:
    """A script may save to a new folder and rename the folder."""
    keeper = started(FileKeeper(code, kept, ["out/"]))
    (code / "out").unlink()
    (code / "out").mkdir()
    (code / "out" / "a").write_text("1")
    ended(keeper)
    assert files(kept) == {"out/a": "1"}


def test_new_files_that_are_not_kept_are_named(code: Path, kept: Path) -> None:
    """The list omits kept and disposable files, empty files, the interpreter's own files and shipped files."""
    keeper = started(FileKeeper(code, kept, ["out/", "*.pt", "!data/"]))
    for name in ("out/a", "b.pt", "data/mnist", "__pycache__/x.pyc", "runs/1/events", "runs/2/events", "stray.txt"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text("four")
    (code / "train.py").write_text("changed")
    (code / "main.log").touch()
    ended(keeper)
    assert keeper.unkept() == [Unkept("runs/", 2, 8), Unkept("stray.txt", 1, 4)]
    words = keep.unkept_words(keeper.unkept())
    assert "runs/ (2 files, 8B), stray.txt (4B)" in words
    assert "`keep: [runs/, stray.txt]`" in words


@pytest.mark.parametrize(("names", "told"), [(["out/"], " (out/)"), ([], "")])
def test_checkpoints_outside_keep_are_named_while_the_ranks_run(
    code: Path, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], told: str
) -> None:
    """The warning comes once, and not for other files; a user can stop the job before the hours are lost."""
    monkeypatch.setattr(keep, "LOOK_S", 0.0)
    log = tmp_path / "rank-0.log"
    log.write_text("begin\n")
    keeper = started(FileKeeper(code, kept, names, log))
    (code / "saves").mkdir()
    (code / "saves" / "metrics.csv").write_text("four")
    (code / "saves" / "1.pt").write_text("four")
    until(lambda: keeper._look_s == math.inf)
    ended(keeper)
    begin, line = log.read_text().splitlines()
    words, event = events.parse(line)
    assert event["names"] == ["saves/"]
    assert (begin, words.partition("; ")[0]) == ("begin", f"cloudtrain: warning: no checkpoint is kept yet{told}")
    assert words.endswith("not kept: saves/ (4B); `keep: [saves/]` in the config keeps it from the next submit on")


@pytest.mark.parametrize("kept_name", ["out/1.pt", "saves/data.csv"])
def test_kept_checkpoint_or_a_file_of_another_kind_causes_no_warning(
    code: Path, kept: Path, tmp_path: Path, kept_name: str
) -> None:
    """A script with a kept checkpoint may write further files, and downloads data before the first save."""
    log = tmp_path / "rank-0.log"
    log.touch()
    keeper = FileKeeper(code, kept, ["out/"], log)
    ended(started(keeper))
    for name in (kept_name, "cache/data.csv", *(["best.pt"] if kept_name.startswith("out") else [])):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text("four")
    keeper._report_saved(is_last=True)
    before = log.read_text()
    for _ in range(3):
        keeper._look_s = 0.0
        keeper._warn_of_unkept()
    assert log.read_text() == before


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every copy fail as on a full disk."""

    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", fail)


@pytest.mark.usefixtures("full")
def test_full_disk_is_reported_once(code: Path, kept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The ranks run on, and the copy is tried again."""
    keeper = started(FileKeeper(code, kept, ["s.pt"]))
    (code / "s.pt").write_text("x")
    ended(keeper)
    ended(started(keeper))
    assert capfd.readouterr().out.count("No space left") == 1


def test_folder_in_a_kept_folder_loses_nothing(code: Path, kept: Path) -> None:
    """The inner name adds no entry; no file is removed, copied onto itself, or linked to itself."""
    (kept / "out" / "ckpt").mkdir(parents=True)
    (kept / "out" / "ckpt" / "a.pt").write_text("precious")
    keeper = started(FileKeeper(code, kept, ["out/ckpt/", "out/", "**/*.pt"]))
    inode = (kept / "out" / "ckpt" / "a.pt").stat().st_ino
    ended(keeper)
    ended(started(keeper))
    assert (code / "out" / "ckpt" / "a.pt").read_text() == "precious"
    assert (kept / "out" / "ckpt" / "a.pt").stat().st_ino == inode


def test_pattern_of_folders_keeps_hidden_files(code: Path, kept: Path) -> None:
    """A checkpoint of torch.distributed.checkpoint is useless without its .metadata."""
    keeper = started(FileKeeper(code, kept, ["step_*"]))
    for name in ("step_1/.metadata", "step_1/__0_0.distcp"):
        (code / name).parent.mkdir(exist_ok=True)
        (code / name).write_text("x")
    ended(keeper)
    assert set(files(kept)) == {"step_1/.metadata", "step_1/__0_0.distcp"}


def test_kill_between_removal_and_save_loses_nothing(code: Path, kept: Path) -> None:
    """A file that is missing or empty at the ranks' end does not remove the kept file."""
    keeper = started(FileKeeper(code, kept, ["a.json", "b.json"]))
    for name in ("a.json", "b.json"):
        (code / name).write_text("whole")
    ended(keeper)
    started(keeper)
    (code / "a.json").unlink()
    (code / "b.json").write_text("")
    ended(keeper)
    assert files(kept) == {"a.json": "whole", "b.json": "whole"}


def test_names_of_any_bytes_cause_no_error(code: Path, kept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Undecodable names break neither the list of lost files nor the log."""
    keeper = started(FileKeeper(code, kept, ["*.pt"]))
    (code / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    (code / os.fsdecode(b"caf\xe9.pt")).write_text("x")
    ended(keeper)
    assert keep.unkept_words(keeper.unkept()).encode()
    assert (kept / os.fsdecode(b"caf\xe9.pt")).exists()


@pytest.mark.parametrize("name", ["a b", "a[1].pt", "**", "**x", "é*", "a/b/c.pt", "x/"])
def test_hostile_names_cause_no_error(code: Path, kept: Path, name: str) -> None:
    """A name of any form causes no error."""
    ended(started(FileKeeper(code, kept, [name])))
