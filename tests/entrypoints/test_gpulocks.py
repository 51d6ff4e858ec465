"""GPU locks, held by real processes of several users."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.agent import gpulocks

GPU = "GPU-6f1c2d3e-0000-1111-2222-333344445555"
LABEL = f"GPU 3 (NVIDIA A100, {GPU})"
ALICE, BOB = 54321, 54322  # numbers without a login

# Takes the locks as the user, prints the result, and holds the locks until a line arrives on stdin.
HOLD = """
import json, os, pwd, sys
from pathlib import Path
from cloudtrain.entrypoints.agent import gpulocks
folder, names, uid, about = sys.argv[1:]
os.umask(0o077)
if int(uid) != os.getuid():
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
try:
    taken = gpulocks.take(gpulocks.folder(folder), names.split(","), json.loads(about))
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
else:
    print("taken", flush=True)
    sys.stdin.readline()
    taken.release()
    print("released", flush=True)
    sys.stdin.readline()
"""

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be several users")
Hold = Callable[..., tuple[Any, str]]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder for locks that every user can reach, unlike pytest's own folders."""
    above = Path(tempfile.mkdtemp())
    above.chmod(0o755)
    place = above / "locks"
    place.mkdir()
    place.chmod(0o1777)
    yield place
    shutil.rmtree(above)


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Return a function that starts a process which takes locks, and returns the process and its first line."""
    started = []

    def start(folder: Path, *names: str, uid: int | None = None, **about: Any) -> tuple[Any, str]:
        told = [str(folder), ",".join(names), str(os.getuid() if uid is None else uid), json.dumps(about)]
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, *told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, process.stdout.readline().strip() if process.stdout else ""

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _let_go(process: Any) -> None:
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline().strip() == "released"


def test_second_job_learns_the_holder_of_the_gpu(open_folder: Path, hold: Hold) -> None:
    """The message names the GPU, the user, the job, and the start time."""
    two_hours_ago = time.time() - 7300
    hold(open_folder, GPU, user="alice", job="x-abcde", since_s=two_hours_ago)
    with pytest.raises(gpulocks.GpuBusy) as caught:
        gpulocks.take(open_folder, [GPU], {"job": "y", "labels": {GPU: LABEL}})
    login = gpulocks.login(os.getuid())
    assert str(caught.value) == f"{LABEL}: alice's job x-abcde (login {login}) holds it, since 2 h"
    assert caught.value.name == GPU
    assert caught.value.holder["job"] == "x-abcde"


def test_lock_is_free_after_release(open_folder: Path, hold: Hold) -> None:
    """A released lock leaves no note, even while its process lives."""
    process, _ = hold(open_folder, GPU, job="x")
    _let_go(process)
    assert gpulocks.holders(open_folder) == []
    assert list(open_folder.glob("*.json")) == []
    gpulocks.take(open_folder, [GPU], {"job": "y"}).release()


def test_kill_of_the_holder_frees_its_locks(open_folder: Path, hold: Hold) -> None:
    """After kill -9 of the holder the note is stale, and the lock is free despite the note."""
    process, _ = hold(open_folder, GPU, job="x")
    assert [holder["job"] for holder in gpulocks.holders(open_folder)] == ["x"]
    process.kill()
    process.wait()
    assert list(open_folder.glob("*.json")) != []
    assert gpulocks.holders(open_folder) == []
    assert hold(open_folder, GPU, job="y")[1] == "taken"


def test_all_locks_or_none(open_folder: Path, hold: Hold) -> None:
    """A lock that is held makes `take` release all its locks, in any order of names."""
    hold(open_folder, "GPU-b", job="x")
    with pytest.raises(gpulocks.GpuBusy, match=r"^GPU-b: "):
        gpulocks.take(open_folder, ["GPU-c", "GPU-b", "GPU-a"], {"job": "y"})
    assert [holder["name"] for holder in gpulocks.holders(open_folder)] == ["GPU-b"]
    gpulocks.take(open_folder, ["GPU-a", "GPU-c"], {"job": "y"}).release()


def test_one_of_many_simultaneous_takers_wins(open_folder: Path) -> None:
    """Of eight processes that want the same two GPUs, one gets both."""
    told = [str(open_folder), "GPU-a,GPU-b", str(os.getuid()), "{}"]
    racers = [
        subprocess.Popen([sys.executable, "-c", HOLD, *told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    said = [racer.stdout.readline().strip() for racer in racers if racer.stdout]
    for racer in racers:
        racer.kill()
        racer.communicate()
    assert sorted(line.partition(":")[0] for line in said) == ["GpuBusy"] * 7 + ["taken"]


def test_note_of_a_reused_pid_names_no_holder(open_folder: Path, hold: Hold) -> None:
    """A living process with the pid of a dead holder is not reported as the holder."""
    process, _ = hold(open_folder, GPU, job="old")
    note = next(open_folder.glob("*.json"))
    told = json.loads(note.read_text())
    process.kill()
    process.wait()
    holder, _ = hold(open_folder, GPU, job="new")
    note.write_text(json.dumps({**told, "pid": os.getpid()}))
    with pytest.raises(gpulocks.GpuBusy) as caught:
        gpulocks.take(open_folder, [GPU], {})
    assert caught.value.holder is None
    assert "held by an unidentified process" in str(caught.value)
    assert gpulocks.holders(open_folder) == [{"name": GPU, "label": GPU}]
    assert holder.poll() is None


def test_polling_of_holders_blocks_no_taker(open_folder: Path) -> None:
    """`take` succeeds while a second process polls all the time."""
    looker = (
        "import sys; from pathlib import Path; from cloudtrain.entrypoints.agent import gpulocks; print(flush=True)\n"
        "while True: gpulocks.holders(Path(sys.argv[1]))"
    )
    gpulocks.take(open_folder, [GPU], {}).release()
    looking = subprocess.Popen([sys.executable, "-c", looker, str(open_folder)], stdout=subprocess.PIPE)
    looking.stdout.readline()
    try:
        for _ in range(100):
            gpulocks.take(open_folder, [GPU], {"job": "x"}).release()
    finally:
        looking.kill()
        looking.communicate()


def test_forked_child_keeps_the_lock_and_updates_the_note(open_folder: Path) -> None:
    """A starter takes the locks and exits; its child holds them under its own pid, since the same time."""
    taken = gpulocks.take(open_folder, [GPU], {"job": "x"})
    before = gpulocks.holders(open_folder)[0]
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            taken.write_notes()
            os.write(tell, b"!")
            time.sleep(60)
        os._exit(0)
    os.read(told, 1)
    taken.hand_over()
    try:
        after = gpulocks.holders(open_folder)[0]
        assert (before["pid"], after["pid"]) == (os.getpid(), child)
        assert after["since_s"] == before["since_s"]
        assert after["stamp"] == processes.stamp(child)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)
    assert gpulocks.holders(open_folder) == []


def test_started_program_does_not_hold_the_lock(open_folder: Path) -> None:
    """A program started by the holder inherits no lock, even without close_fds."""
    taken = gpulocks.take(open_folder, [GPU], {"job": "x"})
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    taken.hand_over()
    try:
        assert gpulocks.holders(open_folder) == []
    finally:
        child.kill()
        child.wait()


def test_lock_whose_file_was_removed_uses_the_new_file(open_folder: Path) -> None:
    """If a cleaner removed the file after the open, `take` tries again on the new file."""
    taken = gpulocks.take(open_folder, [GPU], {"job": "x"})
    old = os.fstat(taken.files[GPU]).st_ino
    (open_folder / f"{GPU}.lock").unlink()
    again = gpulocks.take(open_folder, [GPU], {"job": "y"})
    assert os.fstat(again.files[GPU]).st_ino != old
    assert not gpulocks._is_still(open_folder / f"{GPU}.lock", taken.files[GPU])
    taken.release()
    again.release()


def test_lock_whose_file_is_removed_before_the_lock_is_no_lock(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a cleaner removes the file between the open and the lock, a second job still finds the GPU held."""
    flock = fcntl.flock

    def lock_after_the_cleaner(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (open_folder / f"{GPU}.lock").unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_after_the_cleaner)
    taken = gpulocks.take(open_folder, [GPU], {"job": "x"})
    with pytest.raises(gpulocks.GpuBusy):
        gpulocks.take(open_folder, [GPU], {"job": "y"})
    taken.release()


def test_touch_keeps_the_files_young(open_folder: Path) -> None:
    """Cleaners of /tmp go by the time of the last use."""
    taken = gpulocks.take(open_folder, [GPU], {"job": "x"})
    for path in open_folder.iterdir():
        os.utime(path, (0, 0))
    taken.touch()
    assert all(path.stat().st_mtime > 0 for path in open_folder.iterdir())
    taken.release()


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-x", "a" * 200])
def test_invalid_name_is_refused(open_folder: Path, name: str) -> None:
    """A lock's name never leaves its folder."""
    with pytest.raises(gpulocks.Unusable, match="not a valid lock name"):
        gpulocks.take(open_folder, [name], {})


def test_holder_is_known_if_its_process_is_hidden(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may hide other users' processes (hidepid); the kernel's list of locks does not."""
    taken = gpulocks.take(open_folder, [GPU], {"job": "x"})
    monkeypatch.setattr(processes, "alive", lambda pid, stamp: False)
    assert [holder["job"] for holder in gpulocks.holders(open_folder)] == ["x"]
    taken.release()


def test_link_or_pipe_in_place_of_a_lock_is_refused(open_folder: Path, tmp_path: Path) -> None:
    """The target of a link is neither created nor opened, and an open of a pipe would block."""
    for target in (tmp_path / "missing", tmp_path / "there"):
        link = open_folder / f"{GPU}.lock"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(gpulocks.Unusable, match=r"is a link of .*sudo rm"):
            gpulocks.take(open_folder, [GPU], {})
        assert not (tmp_path / "missing").exists()
        (tmp_path / "there").write_text("untouched")
    assert (tmp_path / "there").read_text() == "untouched"
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(gpulocks.Unusable, match="is not a regular file"):
        gpulocks.take(open_folder, [GPU], {})


def test_link_in_place_of_a_note_is_replaced(open_folder: Path, tmp_path: Path) -> None:
    """The target of a note's link is not written."""
    target = tmp_path / "precious"
    target.write_text("untouched")
    note = open_folder / f"{GPU}.{os.getuid()}.json"
    note.symlink_to(target)
    taken = gpulocks.take(open_folder, [GPU], {"job": "x"})
    assert target.read_text() == "untouched"
    assert not note.is_symlink()
    taken.release()


def test_folder_is_open_to_all_despite_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first user creates the folder for all: sticky, so that users cannot remove the files of others."""
    shared = tmp_path / "run"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(gpulocks, "PLACES", (str(shared / "cloudtrain"),))
    monkeypatch.setattr(gpulocks, "_is_open_to_all", Path.is_dir)  # for any user of the test
    umask = os.umask(0o077)
    try:
        place = gpulocks.folder()
    finally:
        os.umask(umask)
    assert place.stat().st_mode & 0o7777 == 0o1777


def test_root_chooses_the_folder_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that only its owner may write to does not count, even for its owner."""
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir(mode=0o755)
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(gpulocks, "PLACES", (str(own / "cloudtrain"), str(shared / "cloudtrain-locks")))
    monkeypatch.setattr(gpulocks, "_is_open_to_all", lambda parent: bool(parent.stat().st_mode & 0o1000))
    assert gpulocks.folder() == shared / "cloudtrain-locks"
    assert not (own / "cloudtrain").exists()


def test_query_makes_no_folder(tmp_path: Path) -> None:
    """A query of the holders creates no files."""
    assert gpulocks.holders(gpulocks.folder(str(tmp_path / "locks"), make=False)) == []
    assert not (tmp_path / "locks").exists()


def test_folder_that_another_user_may_change_is_refused(tmp_path: Path) -> None:
    """A foreign link decides where cloudtrain writes; without the sticky bit any user could replace a lock."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name, words in (("link", r"is a link of .*sudo rm"), ("open", r"any user can remove .*chmod 1777")):
        with pytest.raises(gpulocks.Unusable, match=words):
            gpulocks.folder(str(tmp_path / name))


def test_this_machine_has_a_folder() -> None:
    """One of the usual places works for all users, for every user of the test."""
    try:
        place = gpulocks.folder(make=False)
    except gpulocks.Unusable as error:
        assert "sudo" in str(error)  # noqa: PT017 - the message for a machine without shared places has a remedy
    else:
        assert place.name in ("cloudtrain", "cloudtrain-locks")


@as_root
def test_other_users_lock_is_seen_and_respected(open_folder: Path, hold: Hold) -> None:
    """Bob learns that Alice's job holds the lock; after a kill he takes the lock despite her stale note."""
    alice, said = hold(open_folder, GPU, uid=ALICE, job="x-abcde")
    assert said == "taken"
    _, said = hold(open_folder, GPU, uid=BOB, job="y")
    assert said.startswith(f"GpuBusy: {GPU}: user {ALICE}'s job x-abcde holds it, since ")
    assert gpulocks.holders(open_folder)[0]["owner"] == f"user {ALICE}"
    alice.kill()
    alice.wait()
    assert hold(open_folder, GPU, uid=BOB, job="y")[1] == "taken"
    assert [holder["job"] for holder in gpulocks.holders(open_folder)] == ["y"]


@as_root
def test_forged_note_of_a_different_user_is_ignored(open_folder: Path, hold: Hold) -> None:
    """A note that Bob writes in a file with Alice's number does not count."""
    holder, _ = hold(open_folder, GPU, uid=BOB, job="y")
    told = {"pid": holder.pid, "stamp": processes.stamp(holder.pid), "since_s": time.time() + 99, "job": "forged"}
    forged = open_folder / f"{GPU}.{ALICE}.json"
    forged.write_text(json.dumps(told))
    os.chown(forged, BOB, BOB)
    assert [found["job"] for found in gpulocks.holders(open_folder)] == ["y"]


@as_root
def test_foreign_file_in_place_of_the_note_blocks_no_job(open_folder: Path, hold: Hold) -> None:
    """In a sticky folder the file cannot be replaced: the lock works, and no holder is named."""
    squat = open_folder / f"{GPU}.{ALICE}.json"
    squat.write_text("{}")
    os.chown(squat, BOB, BOB)
    assert hold(open_folder, GPU, uid=ALICE, job="x")[1] == "taken"
    assert gpulocks.holders(open_folder) == [{"name": GPU, "label": GPU}]
    assert [path.name for path in open_folder.glob(".*")] == []


@as_root
def test_closed_folder_of_a_different_user_is_refused(open_folder: Path, hold: Hold) -> None:
    """The message names the folder with its owner and the remedy."""
    open_folder.chmod(0o700)
    os.chown(open_folder, BOB, BOB)
    _, said = hold(open_folder, GPU, uid=ALICE)
    assert said.startswith("Unusable: ")
    assert str(open_folder) in said


def test_seat_tries_again_until_its_locks_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is back waits for a different job, and gives its locks back while the job has enough nodes."""
    monkeypatch.setattr(gpulocks, "TRY_S", 0.0)
    other = gpulocks.take(tmp_path, [GPU], {"job": "other"})
    seat = gpulocks.Seat(None, lambda: gpulocks.take(tmp_path, [GPU], {"job": "mine"}))
    assert not seat.hold()
    other.release()
    assert seat.hold()
    assert [each["job"] for each in gpulocks.holders(tmp_path)] == ["mine"]
    seat.leave()
    assert gpulocks.holders(tmp_path) == []
    assert seat.hold()
    seat.leave()
    assert gpulocks.Seat(None, lambda: None).hold(), "a job on this machine may run without locks"
