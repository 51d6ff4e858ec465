"""The sync of a folder with a prefix in a bucket: files that are copied, and files that never are."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.container import folder_sync
from cloudtrain.entrypoints.container.folder_sync import Carrier, bring
from cloudtrain.entrypoints.container.inputs import NAME, Note, used_s
from cloudtrain.entrypoints.stores import gcs, google_http
from cloudtrain.entrypoints.stores.folder import FolderStore
from doubles.google.handle import Google
from doubles.google.names import BUCKET
from doubles.waiting import until

MIB = 1 << 20
URI = f"gs://{BUCKET}/jobs/one"
Carriers = Callable[..., Carrier]


@pytest.fixture
def store(google_store: Google, monkeypatch: pytest.MonkeyPatch) -> Google:
    """Return Google's stand-in; folder syncs scan ten times a second, and requests fail after short retries."""
    for name, value in {"EVERY_S": 0.1, "QUIET_S": 0.05}.items():
        monkeypatch.setattr(folder_sync, name, value)
    for name, value in {"ATTEMPTS": 3, "PAUSE_S": 0.01}.items():
        monkeypatch.setattr(google_http, name, value)
    return google_store


@pytest.fixture
def carriers() -> Iterator[Carriers]:
    """Return a function that starts a folder sync, which ends with the test."""
    begun: list[Carrier] = []

    def start(folder: Path, by: str = "node-0", uri: str = URI) -> Carrier:
        begun.append(Carrier(folder, uri, by))
        begun[-1].start()
        return begun[-1]

    yield start
    for each in begun:
        each.finish()


def there(store: Google) -> dict[str, bytes | None]:
    """Return the objects of the prefix, by name."""
    return {name.removeprefix("jobs/one/"): store.object(name) for name in store.objects("jobs/one/")}


def put(path: Path, data: bytes, age_s: float = 0.0) -> Path:
    """Write a file with an older modification time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    when_s = time.time() - age_s
    os.utime(path, (when_s, when_s))
    return path


def test_whole_prefix_is_downloaded(store: Google, here: Path) -> None:
    """Files in folders arrive with any name and their times; markers, partial files and other jobs' do not."""
    names = ["last.pt", "a b/é #?%25&+.bin", "deep/er/empty"]
    for name in [*names, "folder/", "../outside", "a//b", "half.tmp", "step-1.tmp/shard"]:
        store.put_object(f"jobs/one/{name}", name.encode())
    store.put_object("jobs/one-more/other", b"")
    before_s = time.time()
    assert bring(URI, here) == 3
    found = {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()}
    assert found == set(names)
    assert all((here / name).read_bytes() == name.encode() for name in names)
    assert all((here / name).stat().st_mtime < before_s + 1 for name in names)


def test_single_object_is_downloaded_alone(store: Google, here: Path) -> None:
    """A uri may name a file; objects whose names begin with the file's name stay in the bucket."""
    store.put_object("data/train.bin", b"data")
    store.put_object("data/train.bin.idx", b"index")
    assert bring(f"gs://{BUCKET}/data/train.bin", here) == 1
    assert [path.name for path in here.iterdir()] == ["train.bin"]
    assert bring(f"gs://{BUCKET}/data/nothing", here) == 0


def test_current_local_files_are_not_downloaded(store: Google, here: Path) -> None:
    """Equal and newer local files stay; an older local file is replaced."""
    for name in ("same", "newer", "older"):
        store.put_object(f"jobs/one/{name}", b"there")
    bring(URI, here)
    put(here / "newer", b"here", age_s=-5)
    put(here / "older", b"here", age_s=100)
    store.clear_journal()
    assert bring(URI, here) == 3
    found = {path.name: path.read_bytes() for path in here.iterdir()}
    assert found == {"same": b"there", "newer": b"here", "older": b"there"}
    assert len(store.journal("storage.download")) == 1


def test_failed_download_is_reported(store: Google, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A denied read and a full disk raise errors; no partial file remains."""
    store.put_object("jobs/one/name", b"some bytes")
    store.settings(denied=["storage.download", "storage.get"])
    with pytest.raises(PermissionError, match="Storage Object User"):
        bring(URI, here)
    store.settings(denied=[])
    usage = shutil.disk_usage(here)
    monkeypatch.setattr(folder_sync.shutil, "disk_usage", lambda path: usage._replace(free=5))
    with pytest.raises(OSError, match=r"GB are in gs://.*: use a larger disk"):
        bring(URI, here)
    assert list(here.iterdir()) == []


def test_new_and_changed_files_are_uploaded(store: Google, here: Path, carriers: Carriers) -> None:
    """Each version is uploaded once; partial files, links and pipes never."""
    put(here / "a b/é #?%.pt", b"first")
    put(here / "empty", b"", age_s=-3600)  # dated in the future
    for name in ("half.tmp", "step-1.tmp/shard"):
        put(here / name, b"half")
    (here / "link").symlink_to(here / "empty")
    os.mkfifo(here / "pipe")
    one = carriers(here)
    until(lambda: there(store) == {"a b/é #?%.pt": b"first", "empty": b""})
    put(here / "a b/é #?%.pt", b"second")
    until(lambda: there(store) == {"a b/é #?%.pt": b"second", "empty": b""})
    one.finish()
    assert len(store.journal("storage.insert")) == 3
    assert bring(URI, here.parent / "back") == 2
    assert (here.parent / "back/empty").stat().st_mtime_ns == (here / "empty").stat().st_mtime_ns


def test_invalid_object_name_is_reported(
    store: Google, here: Path, carriers: Carriers, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remaining files are uploaded."""
    put(here / "two\nlines", b"x")
    Path(os.fsdecode(os.fsencode(here) + b"/\xff")).write_bytes(b"x")
    put(here / "good", b"x")
    carriers(here).finish()
    assert list(there(store)) == ["good"]
    assert "invalid object name" in capsys.readouterr().out


def test_log_that_is_held_open_is_uploaded(
    store: Google, here: Path, carriers: Carriers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload comes after a quiet period, and at the end in any case."""
    monkeypatch.setattr(folder_sync, "OPEN_QUIET_S", 0.2)
    with (here / "events").open("wb", buffering=0) as file:
        file.write(b"one")
        one = carriers(here)
        until(lambda: there(store) == {"events": b"one"})
        file.write(b" two")
        one.finish()
        assert there(store) == {"events": b"one two"}


def test_file_saved_in_place_repeatedly_is_always_uploaded_whole(
    store: Google, here: Path, carriers: Carriers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object is always a version that was saved, and in the end the last version."""
    monkeypatch.setattr(folder_sync, "EVERY_S", 0.01)
    monkeypatch.setattr(folder_sync, "QUIET_S", 0.02)  # more than the resolution of file times
    for name in ("SINGLE_BYTES", "CHUNK_BYTES"):
        monkeypatch.setattr(gcs, name, MIB // 4)
    is_over = threading.Event()
    seen: list[tuple[int, int]] = []  # length, number of distinct bytes
    versions: set[int] = set()

    def look() -> None:
        while not is_over.is_set():
            if data := there(store).get("last.pt"):
                seen.append((len(data), len(set(data))))
                versions.add(data[0])

    looking = threading.Thread(target=look)
    looking.start()
    one = carriers(here)
    for number in range(1, 31):
        with (here / "last.pt").open("wb") as file:
            for _ in range(8):
                file.write(bytes([number]) * (MIB // 8))
                file.flush()
                time.sleep(0.002)
        time.sleep(0.05 * (number % 4))
        if number % 10 == 0:  # now and then the writer pauses
            until(lambda number=number: number in versions)
    one.finish()
    is_over.set()
    looking.join()
    assert there(store)["last.pt"] == bytes([30]) * MIB
    assert set(seen) == {(MIB, 1)}


def test_local_deletions_reach_the_bucket(store: Google, here: Path, carriers: Carriers) -> None:
    """Only the node's own objects are deleted; objects that another writer made or replaced stay."""
    store.put_object("jobs/one/of-another", b"x")
    for number in range(3):
        put(here / f"step-{number}.pt", b"x")
    carriers(here)
    until(lambda: len(there(store)) == 4)
    store.put_object("jobs/one/step-1.pt", b"of another")
    (here / "step-0.pt").unlink()
    (here / "step-1.pt").unlink()
    until(lambda: "step-0.pt" not in there(store))
    until(lambda: len(store.journal("storage.delete")) == 2)
    assert there(store) == {"of-another": b"x", "step-1.pt": b"of another", "step-2.pt": b"x"}


def test_uploads_before_a_restart_remain_the_nodes_own(store: Google, here: Path, carriers: Carriers) -> None:
    """After a restart they are not sent again, and are deleted with the local file; other nodes' objects stay."""
    put(here / "old.pt", b"x")
    put(here / "kept.pt", b"x")
    carriers(here, "node-0").finish()
    put(here.parent / "second/theirs.pt", b"x")
    carriers(here.parent / "second", "node-1").finish()
    store.put_object("jobs/one/of-another", b"x")
    shutil.rmtree(here)
    bring(URI, here)
    store.clear_journal()
    carriers(here, "node-0")
    for name in ("old.pt", "theirs.pt", "of-another"):
        (here / name).unlink()
    until(lambda: "old.pt" not in there(store))
    assert set(there(store)) == {"kept.pt", "theirs.pt", "of-another"}
    assert store.journal("storage.insert") == []


def test_files_never_downloaded_are_not_deleted(store: Google, here: Path, carriers: Carriers) -> None:
    """On a new disk, a missing local file is no deletion."""
    put(here / "result", b"x")
    carriers(here).finish()
    (here / "result").unlink()
    put(here / "more", b"x")
    carriers(here).finish()
    assert set(there(store)) == {"result", "more"}


def test_nothing_is_deleted_before_new_files_are_uploaded(store: Google, here: Path, carriers: Carriers) -> None:
    """If a script replaces its checkpoint, the bucket always holds a checkpoint."""
    put(here / "epoch-1.pt", b"x")
    carriers(here)
    until(lambda: "epoch-1.pt" in there(store))
    store.fault("storage.insert", "503")
    (here / "epoch-1.pt").unlink()
    put(here / "epoch-2.pt", b"x")
    until(lambda: len([call for call in store.journal("storage.insert") if call["outcome"] != "ok"]) > 9)
    assert set(there(store)) == {"epoch-1.pt"}
    store.clear_faults()
    until(lambda: set(there(store)) == {"epoch-2.pt"})


def test_file_that_is_being_written_waits(store: Google, here: Path, carriers: Carriers) -> None:
    """An unfinished file waits through all pauses of its writer; older files behind the unfinished one do not wait.

    Nothing is deleted meanwhile: the script removes the old checkpoint before the new checkpoint is whole.
    """
    put(here / "epoch-1.pt", b"x")
    carriers(here)
    until(lambda: "epoch-1.pt" in there(store))
    with (here / "epoch-2.pt").open("wb") as file:
        (here / "epoch-1.pt").unlink()
        for number in range(6):
            file.write(b"x" * 100)
            file.flush()
            put(here / "other", b"%d" % number, age_s=5)
            until(lambda number=number: there(store).get("other") == b"%d" % number)
            assert set(there(store)) == {"epoch-1.pt", "other"}
    until(lambda: there(store) == {"epoch-2.pt": b"x" * 600, "other": b"5"})


def test_file_missing_for_a_moment_stays_in_the_bucket(
    store: Google, here: Path, carriers: Carriers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is absent in a single scan, as during a replacement, is not deleted."""
    put(here / "last.pt", b"old", age_s=5)
    scanned = Carrier._scan
    gone: list[bool] = []

    def scan(self: Carrier) -> Any:
        found = scanned(self)
        if gone == [True]:
            gone.append(False)
            del found["last.pt"]
        return found

    monkeypatch.setattr(Carrier, "_scan", scan)
    carriers(here)
    until(lambda: there(store) == {"last.pt": b"old"})
    gone.append(True)
    until(lambda: len(gone) == 2)
    put(here / "last.pt", b"new", age_s=4)
    until(lambda: there(store) == {"last.pt": b"new"})
    assert store.journal("storage.delete") == []


def test_small_file_waits_for_the_large_file_it_names(
    store: Google, here: Path, carriers: Carriers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` never names a missing object; an older file does not wait."""
    monkeypatch.setattr(gcs, "SINGLE_BYTES", MIB)
    store.fault("storage.chunk", "503")
    put(here / "log", b"x", age_s=9)
    put(here / "step-2.pt", bytes(2 * MIB), age_s=5)
    put(here / "latest", b"step-2.pt", age_s=4)
    carriers(here)
    until(lambda: len(store.journal("storage.chunk")) > 6)
    assert set(there(store)) <= {"log"}
    store.clear_faults()
    until(lambda: set(there(store)) == {"log", "step-2.pt", "latest"})


def test_failing_bucket_is_reported_once_and_retried(
    store: Google, here: Path, carriers: Carriers, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single sentence gives the advice; the remaining files are uploaded later."""
    store.settings(denied=["storage.insert"])
    put(here / "one", b"x", age_s=5)
    one = carriers(here)
    until(lambda: len(store.journal("storage.insert")) > 3)
    store.settings(denied=[])
    until(lambda: set(there(store)) == {"one"})
    one.finish()
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert said.startswith(f"sync of {here} to {URI} failed, retrying: no access to gs://")


def test_end_has_a_limit(
    store: Google, here: Path, carriers: Carriers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that never answers does not delay the job's end; missing files are reported."""
    put(here / "one", b"x")
    one = carriers(here)
    store.fault("storage.*", "hang")
    begin_s = time.monotonic()
    monkeypatch.setattr(folder_sync, "FINISH_S", 0.5)
    one.finish()
    assert time.monotonic() - begin_s < 5
    assert f"not all of {here} is in {URI}: 0 s were not enough" in capsys.readouterr().out
    store.clear_faults()


def test_failure_at_the_end_is_reported(store: Google, here: Path, carriers: Carriers, capsys: Any) -> None:
    """The message gives the reason."""
    store.settings(denied=["storage.*"])
    put(here / "one", b"x")
    carriers(here).finish()
    assert f"not all of {here} is in {URI}: no access to gs://" in capsys.readouterr().out


def test_nodes_share_a_prefix(store: Google, here: Path, carriers: Carriers) -> None:
    """Each node uploads its own files; of files with one name the last wins."""
    second = here.parent / "second"
    put(here / "rank-0", b"0")
    put(here / "both", b"0")
    put(second / "rank-1", b"1")
    put(second / "both", b"1")
    carriers(here, "node-0").finish()
    carriers(second, "node-1").finish()
    assert there(store) == {"rank-0": b"0", "rank-1": b"1", "both": b"1"}


@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_time_used_is_also_kept_in_a_place(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A new disk has no note, so the note of the place counts, for this attempt alone."""
    place = str(tmp_path / "kept")
    if kind == "bucket":
        request.getfixturevalue("store")
        place = f"{URI}/kept"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    assert used_s(tmp_path / "first", "j", 2, place) == 0
    note = Note(tmp_path / "first", "j", 2, 100.0, place)
    note.start()
    note.finish()
    assert 100 <= used_s(tmp_path / "second", "j", 2, place) < 120
    assert used_s(tmp_path / "second", "j", 3, place) == 0
    assert list((tmp_path / "second").iterdir()) == []


def test_unreachable_note_of_time_used_is_reported(
    store: Google, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The local note counts; a note that cannot be uploaded does not end the job."""
    store.settings(denied=["storage.*"])
    note = Note(tmp_path, "j", 2, 100.0, URI)
    note.start()
    note.finish()
    assert used_s(tmp_path, "j", 2, URI) >= 100
    said = capsys.readouterr().out
    assert said.startswith("the earlier run time of the job is not known, so its time limit starts again: no access")


def test_newer_of_two_notes_counts(tmp_path: Path) -> None:
    """A restart on the same disk may have a newer note than the place."""
    for name, before_s in (("kept", 50.0), ("here", 70.0)):
        (tmp_path / name).mkdir()
        note = Note(tmp_path / name, "j", 1, before_s)
        note.start()
        note.finish()
    assert FolderStore(tmp_path / "kept").names("") == [NAME]
    assert used_s(tmp_path / "here", "j", 1, str(tmp_path / "kept")) >= 70
