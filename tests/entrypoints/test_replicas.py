"""A replica of a job's checkpoints on a second node: fetched, retired and untouched entries."""

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from savedentries import checkpoint, names

from cloudtrain.entrypoints.checkpoints import folder as checkpoints
from cloudtrain.entrypoints.replication import copies, entries, partial_files
from cloudtrain.entrypoints.replication import replicas as replicating
from cloudtrain.entrypoints.replication.replicas import Replicas
from doubles.waiting import until

TOKEN = "a" * 64
HOST = "127.0.0.1"
Keep = Callable[..., Replicas]


@pytest.fixture
def server(there: Path) -> Iterator[copies.Server]:
    """Return node 0's server."""
    server = copies.Server(there, HOST, 0, TOKEN)
    yield server
    server.close()


def note_of(folder: Path) -> Path:
    """Return the path of the note on fetched entries."""
    return folder.with_name(f"{folder.name}-fetched.json")


@pytest.fixture
def keep(here: Path, server: copies.Server) -> Iterator[Keep]:
    """Return a function that keeps a replica, with many rounds a second, until the test's end."""
    made: list[Replicas] = []

    def start(source: Any = None, folder: Path = here, token: str = TOKEN) -> Replicas:
        made.append(Replicas(folder, source or (lambda: server.address), token, note_of(folder)))
        made[-1].start()
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:  # not the test's own, which a test may undo
        for name, value in (("EVERY_S", 0.02), ("QUIET_S", 0.3), ("PAUSE_S", 0.05)):
            patch.setattr(replicating, name, value)
        yield start
        for each in made:
            each.finish()


def counted(server: copies.Server) -> tuple[Callable[[], tuple[str, int]], list[int]]:
    """Return a source of the server's address, and a list that grows with each call."""
    rounds: list[int] = []
    return lambda: (rounds.append(1), server.address)[1], rounds


def equal(one: Path, other: Path) -> bool:
    """Return whether both folders have the same entries."""
    return entries.list_entries(one) == entries.list_entries(other)


def test_replica_follows_the_trainer(keep: Keep, there: Path, here: Path) -> None:
    """Saved checkpoints arrive, retired ones go, and the replica always has a complete checkpoint.

    A manifest without its files does not count as a copy, and is fetched again.
    """
    checkpoint(there, 1)
    keep()
    until(lambda: equal(there, here))
    for step in range(2, 8):
        checkpoint(there, step)
        checkpoints.retain(there, 2)
        assert names(here)
        until(lambda: equal(there, here))
    assert names(here) == ["step-00000007", "step-00000006"]
    (here / "step-00000007" / "plain.pt").unlink()
    until(lambda: equal(there, here))
    assert checkpoints.verify(here / "step-00000007") is None


def test_newest_comes_first(keep: Keep, there: Path, here: Path, monkeypatch: Any) -> None:
    """Steps come by number, despite the order of names or times; then the rest. Each is noted before its arrival."""
    for step in (100000000, 3, 20):
        checkpoint(there, step)
    (there / "best.json").write_text("{}")
    came: list[str] = []
    plain = partial_files.place

    def place(partial: Path, final: Path, *args: Any, **options: Any) -> None:
        if final.name in entries.read_note(note_of(here)):
            came.append(final.name)
        plain(partial, final, *args, **options)

    monkeypatch.setattr(partial_files, "place", place)
    keep()
    until(lambda: equal(there, here))
    assert came == ["step-100000000", "step-00000020", "step-00000003", "best.json"]


def test_entries_not_fetched_are_never_touched(
    keep: Keep, there: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are neither removed nor replaced by node 0's entries of the same name; a message reports the difference."""
    mine = checkpoint(here, 1), checkpoint(here, 2)
    before = [(path / "plain.pt").read_bytes() for path in mine]
    checkpoint(there, 2)
    checkpoint(there, 3)
    keep()
    said = list[str]()

    def differs() -> bool:
        said.append(capsys.readouterr().out)
        return "differs" in "".join(said)

    until(lambda: differs() and "step-00000003" in names(here))  # before node 0 removes its step 2
    checkpoint(there, 4)
    checkpoints.retain(there, 1)
    until(lambda: names(here) == ["step-00000004", "step-00000002", "step-00000001"])
    assert [(path / "plain.pt").read_bytes() for path in mine] == before
    told = "".join([*said, capsys.readouterr().out])
    assert told.count("step-00000002 differs from node 0's, and was not copied: it stays unchanged") == 1


def test_fetched_entry_written_to_since_is_not_removed(keep: Keep, there: Path, here: Path) -> None:
    """A checkpoint that the node's own trainer saved in place of a copy is no copy any more."""
    checkpoint(there, 1)
    first = keep()
    until(lambda: equal(there, here))
    first.finish()
    mine = checkpoint(here, 1)
    checkpoint(there, 2)
    checkpoints.retain(there, 1)
    keep()
    until(lambda: "step-00000002" in names(here))
    checkpoint(there, 3)
    until(lambda: "step-00000003" in names(here))
    assert mine.exists()


def test_emptied_source_removes_nothing(keep: Keep, there: Path, here: Path) -> None:
    """If node 0 has a new, empty disk, the replica is the only copy, and stays."""
    checkpoint(there, 1)
    checkpoint(there, 2)
    replicas = keep()
    until(lambda: equal(there, here))
    for path in there.iterdir():
        path.rename(path.with_name(f"{path.name}.tmp"))
    asked = threading.Event()
    plain = replicas._retire
    replicas._retire = lambda *args: (asked.set(), plain(*args))[1]  # type: ignore[method-assign]
    assert asked.wait(10)
    asked.clear()
    assert asked.wait(10)
    assert names(here) == ["step-00000002", "step-00000001"]


def test_resumed_run_replaces_copies(keep: Keep, there: Path, here: Path) -> None:
    """A step that node 0 saved again is fetched again, also by a new process."""
    checkpoint(there, 5)
    first = keep()
    until(lambda: equal(there, here))
    first.finish()
    checkpoint(there, 5)
    keep()
    until(lambda: equal(there, here))
    assert [name for name in os.listdir(here) if name.startswith("step")] == ["step-00000005"]


def test_shared_folder_is_left_alone(
    there: Path, server: copies.Server, keep: Keep, monkeypatch: Any, capsys: Any
) -> None:
    """On a disk that both nodes see nothing is copied, noted or removed, even before caches are up to date."""
    source, rounds = counted(server)
    monkeypatch.setattr(copies, "entries", lambda *args, **options: pytest.fail("there is nothing to ask for"))
    checkpoint(there, 1)
    keep(source, there)
    until(lambda: len(rounds) > 3)
    checkpoint(there, 2)
    checkpoints.retain(there, 1)
    before = len(rounds)
    until(lambda: len(rounds) > before + 3)
    assert os.listdir(there) == ["step-00000002"]
    assert capsys.readouterr().out == ""


def test_same_entries_are_not_fetched(keep: Keep, there: Path, here: Path) -> None:
    """A local entry with the same fingerprint, as on a disk that other nodes fill too, is no copy of ours."""
    copied = checkpoint(there, 1)
    shutil.copytree(copied, here / copied.name)
    keep()
    checkpoint(there, 2)
    until(lambda: equal(there, here))
    assert list(entries.read_note(note_of(here))) == ["step-00000002"]


def test_half_written_file_does_not_replace_a_good_copy(
    keep: Keep, there: Path, here: Path, server: copies.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's own code may write in place: a changing file is fetched after a quiet period."""
    source, rounds = counted(server)
    (there / "last.ckpt").write_text("good")
    monkeypatch.setattr(replicating, "QUIET_S", 0.0)
    keep(source)
    until(lambda: equal(there, here))
    monkeypatch.setattr(replicating, "QUIET_S", 60.0)
    for _ in range(3):
        with (there / "last.ckpt").open("a") as file:
            file.write("bad")
        before = len(rounds)
        until(lambda before=before: len(rounds) > before + 2)
    assert (here / "last.ckpt").read_text() == "good"
    monkeypatch.setattr(replicating, "QUIET_S", 0.0)
    until(lambda: equal(there, here))


def test_source_that_comes_late_or_goes_is_found(
    keep: Keep, there: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing server is reported once and used again at any new address; a source may also be None."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    where: list[tuple[str, int] | None] = [None]
    asked = threading.Semaphore(0)

    def source() -> tuple[str, int] | None:
        asked.release()
        return where[0]

    checkpoint(there, 1)
    keep(source)
    assert asked.acquire(timeout=10)
    where[0] = (HOST, port)
    for _ in range(40):
        assert asked.acquire(timeout=10)
    told = capsys.readouterr().out
    assert told.count("\n") == 1
    assert f"{HOST}:{port}" in told
    assert "Connection refused" in told
    with_it = copies.Server(there, HOST, port, TOKEN)
    until(lambda: equal(there, here))
    with_it.close()
    assert capsys.readouterr().out.count(": recovered") == 1
    checkpoint(there, 2)
    elsewhere = copies.Server(there, HOST, 0, TOKEN)
    where[0] = elsewhere.address
    until(lambda: equal(there, here))
    elsewhere.close()


def test_source_that_raises_ends_no_replica(
    keep: Keep, there: Path, here: Path, server: copies.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any error in the thread is reported, and the round is tried again."""
    checkpoint(there, 1)
    calls: list[int] = []

    def source() -> tuple[str, int]:
        calls.append(1)
        if len(calls) < 3:
            raise ZeroDivisionError("by the test")
        return server.address

    keep(source)
    until(lambda: equal(there, here))
    assert capsys.readouterr().out.count("by the test") == 1


def test_wrong_token_is_reported_once(keep: Keep, capsys: pytest.CaptureFixture[str]) -> None:
    """A server of a different job is no source."""
    replicas = keep(token="b" * 64)
    until(lambda: replicas._faults.get("", (0, 0))[0] >= 3)
    assert capsys.readouterr().out.count("has a different token") == 1


def test_damaged_checkpoint_does_not_block_older_ones(
    keep: Keep, there: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest is damaged at its source: the older one arrives, and the fault is reported once."""
    checkpoint(there, 1)
    (checkpoint(there, 2) / "plain.pt").write_bytes(b"\0" * 100)
    replicas = keep()
    until(lambda: names(here) == ["step-00000001"])
    until(lambda: replicas._faults.get("step-00000002", (0, 0))[0] >= 2)
    assert capsys.readouterr().out.count("the source's copy is damaged") == 1


def test_full_disk_is_reported_once(
    keep: Keep, there: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """A lack of space gives a single line for all entries, and copies continue when space is free."""
    for step in (1, 2, 3):
        checkpoint(there, step)
    monkeypatch.setattr(copies, "MARGIN_BYTES", 0)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=500))
        replicas = keep()
        until(lambda: replicas._faults.get("/room", (0, 0))[0] >= 3)
        assert capsys.readouterr().out.count("make room") == 1
    until(lambda: equal(there, here))


def test_finish_ends_a_copy_at_once(there: Path, here: Path, keep: Keep) -> None:
    """`finish` ends even a copy from a stalled server; no partial copy counts as complete afterwards."""
    checkpoint(there, 1, 1 << 20)
    still = threading.Event()
    plain = copies._send_bytes

    def stand_still(*args: Any) -> None:
        still.wait(20)
        plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_send_bytes", stand_still)
        replicas = keep()
        until(lambda: list(here.glob(".*.tmp/*")))
        begin_s = time.monotonic()
        replicas.finish()
        assert time.monotonic() - begin_s < 1
        still.set()
    assert not replicas.is_alive()
    assert names(here) == []
