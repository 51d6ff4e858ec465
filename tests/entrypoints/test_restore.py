"""Entries that a start of the job copies from the disks of other nodes: copied, kept, and reported as missing."""

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from savedentries import checkpoint, names

from cloudtrain.entrypoints.checkpoints import folder as checkpoints
from cloudtrain.entrypoints.replication import copies, entries
from cloudtrain.entrypoints.replication.replicas import Replicas
from cloudtrain.entrypoints.replication.restore import Gathering
from cloudtrain.entrypoints.replication.rotation import unseen
from cloudtrain.entrypoints.scripts.keep import saved
from doubles.waiting import until

TOKEN = "a" * 64
HOST = "127.0.0.1"
Source = tuple[str, int]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[], tuple[Path, Source]]]:
    """Return a function that starts a further node, and returns the node's folder and address."""
    made: list[copies.Server] = []

    def start() -> tuple[Path, Source]:
        folder = tmp_path / f"node-{len(made) + 1}"
        folder.mkdir()
        made.append(copies.Server(folder, HOST, 0, TOKEN, saved))
        return folder, made[-1].address

    yield start
    for server in made:
        server.close()


@pytest.fixture
def gather(here: Path) -> Callable[..., tuple[str, ...]]:
    """Return a function that gathers, and returns the missing entries."""

    def run(*sources: Source, newest_alone: bool = True, merged: tuple[str, ...] = (), **more: Any) -> tuple[str, ...]:
        gathering = Gathering(here, sources, TOKEN, note_of(here), newest_alone=newest_alone, merged=merged, **more)
        until(lambda: gathering.is_done)
        return gathering.missing

    return run


def note_of(here: Path) -> Path:
    """Return the path of the note on fetched entries."""
    return here.with_name("fetched.json")


def closed() -> Source:
    """Return an address without a listener."""
    with socket.create_server((HOST, 0)) as free:
        return HOST, free.getsockname()[1]


def test_only_the_newest_of_all_is_copied(node: Any, gather: Any, here: Path) -> None:
    """The highest step of several nodes is copied; no step if this node has an equal or later step."""
    (one, at_one), (other, at_other) = node(), node()
    for folder, step in ((one, 1), (other, 2), (one, 3)):
        checkpoint(folder, step)
    assert gather(at_other, at_one) == ()
    assert names(here) == ["step-00000003"]
    checkpoint(here, 4)
    checkpoint(other, 4)
    before = entries.list_entries(here)
    assert gather(at_other, at_one) == ()
    assert entries.list_entries(here) == before


def test_next_older_is_copied_if_the_newest_is_damaged(node: Any, gather: Any, here: Path) -> None:
    """A damaged source is reported as missing, and the start gets the newest intact checkpoint."""
    there, source = node()
    checkpoint(there, 1)
    checkpoint(there, 2)
    (checkpoint(there, 3) / "plain.pt").write_bytes(b"\0" * 100)
    (missing,) = gather(source)
    assert "cannot copy step-00000003" in missing
    assert "the source's copy is damaged: plain.pt differs from its manifest" in missing
    assert names(here) == ["step-00000002"]


def test_checkpoint_that_contradicts_its_name_does_not_count(node: Any, gather: Any, here: Path) -> None:
    """An older checkpoint under a newer name, or a file with a step's name, hides no intact checkpoint."""
    there, source = node()
    shutil.copytree(checkpoint(there, 1), there / "step-00000003")
    (there / "step-00000007").write_text("x")
    (here / "step-00000005").write_text("x")
    (missing,) = gather(source)
    assert "trainer.json is of step 1, which contradicts the folder's name step-00000003" in missing
    assert (here / "step-00000001" / "manifest.json").exists()
    assert not (here / "step-00000007").exists()


def test_same_entry_comes_from_the_next_node(node: Any, gather: Any, here: Path) -> None:
    """If the first node's copy is damaged, the intact copy of the next node is used, and no entry is missing."""
    (one, at_one), (other, at_other) = node(), node()
    checkpoint(other, 2)
    (checkpoint(one, 2) / "plain.pt").write_bytes(b"\0" * 100)  # the later copy, tried first
    assert gather(at_one, at_other) == ()
    assert names(here) == ["step-00000002"]
    assert checkpoints.verify(here / "step-00000002") is None


def test_unreachable_node_is_reported_as_missing(node: Any, gather: Any, here: Path) -> None:
    """The contents of an unreachable node are unknown; entries of reachable nodes are copied."""
    there, source = node()
    checkpoint(there, 1)
    gone = closed()
    (missing,) = gather(gone, source)
    assert f"{gone[0]}:{gone[1]}" in missing
    assert names(here) == ["step-00000001"]


def test_incomplete_own_checkpoint_is_set_aside(node: Any, gather: Any, here: Path) -> None:
    """The newest lacks a file on this node's disk, and a different node has the whole checkpoint."""
    there, source = node()
    checkpoint(there, 2)
    (checkpoint(here, 2) / "plain.pt").unlink()
    assert gather(source) == ()
    assert names(here) == ["step-00000002"]
    assert checkpoints.verify(here / "step-00000002") is None
    assert len(list(here.glob("step-00000002.old-*"))) == 1


def test_script_gets_all_but_its_own_and_newer_entries(node: Any, gather: Any, here: Path) -> None:
    """All entries of other nodes arrive, the latest of each name; own and later local entries stay."""
    (one, at_one), (other, at_other) = node(), node()
    for folder, when in ((one, 1e9), (other, 2e9)):
        for name in ("mine", "both", f"of {folder.name}"):
            (folder / name).write_text(folder.name)
            os.utime(folder / name, (when, when))
    (here / "mine").write_text("mine")
    os.utime(here / "mine", (1, 1))
    assert gather(at_one, at_other, newest_alone=False) == ()
    expected = {"mine": "mine", "both": "node-2", "of node-1": "node-1", "of node-2": "node-2"}
    assert {path.name: path.read_text() for path in here.iterdir()} == expected
    assert gather(at_one, newest_alone=False) == ()
    assert {path.name: path.read_text() for path in here.iterdir()} == expected


def test_kept_files_are_the_newest_on_all_nodes(node: Any, gather: Any, here: Path) -> None:
    """In a kept folder each file counts alone; local files that the config does not keep stay unchanged."""
    there, source = node()
    for folder, time_s, text in ((here, 50, "here"), (there, 60, "there")):
        for name in ("out/both.pt", "out/sub/log", "s.pt", "own.pt"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            os.utime(path, (time_s, time_s))
    (here / "out" / "newer.pt").write_text("here")
    os.utime(there / "out" / "sub" / "log", (40, 40))
    assert gather(source, newest_alone=False, merged=("out", "*.pt")) == ()
    texts = {name: (here / name).read_text() for name in ("out/both.pt", "out/sub/log", "out/newer.pt", "s.pt")}
    assert texts == {"out/both.pt": "there", "out/sub/log": "here", "out/newer.pt": "here", "s.pt": "there"}
    assert gather(source, newest_alone=False, merged=("out",)) == ()


def write(folder: Path, *paths: str) -> None:
    """Write the files, all with different times."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)


@pytest.mark.parametrize(
    ("there", "arrives"),
    [
        (("out/step_9/a.pt", "out/step_10/a.pt", "out/log.txt"), ("out/step_10/a.pt", "out/log.txt")),
        (("out/epoch=1.ckpt", "out/epoch=2.ckpt", "out/best.ckpt"), ("out/epoch=2.ckpt", "out/best.ckpt")),
        (("out/a/step_1/a.pt", "out/b/step_2/a.pt"), ("out/a/step_1/a.pt", "out/b/step_2/a.pt")),
        (("out/0/a.pt", "out/1/a.pt", "out/rng_state_0.pth"), ("out/0/a.pt", "out/1/a.pt", "out/rng_state_0.pth")),
        (("out/step_1/a.pt", "out/step_1/b.pt", "out/step_2/a.pt"),) * 2,  # the second is incomplete
        (("step_1/a.pt", "step_2/a.pt"), ("step_2/a.pt",)),
        (("out/checkpoint-9.pth.tar", "out/checkpoint-10.pth.tar"), ("out/checkpoint-10.pth.tar",)),  # timm
        (("out/step=9.ckpt/a.pt", "out/step=10.ckpt/a.pt"), ("out/step=10.ckpt/a.pt",)),
        (("out/epoch=1-val_loss=0.50.ckpt", "out/epoch=3-val_loss=0.25.ckpt"),) * 2,  # Lightning keeps the best
        (("out/loss=0.9-step=1.ckpt", "out/loss=0.5-step=2.ckpt"),) * 2,
        (("out/epoch=1-rank=0.ckpt", "out/epoch=1-rank=1.ckpt"),) * 2,
    ],
)
def test_newest_complete_checkpoint_of_a_script_is_copied(
    node: Any, gather: Any, here: Path, there: tuple[str, ...], arrives: tuple[str, ...]
) -> None:
    """Of a series only the newest complete checkpoint and later ones; ranks' files and other names are no series."""
    folder, source = node()
    write(folder, *there)
    assert gather(source, newest_alone=False, merged=("out", "step_*"), saved=saved) == ()
    assert {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()} == set(arrives)


def test_copy_that_its_node_has_removed_is_removed(node: Any, gather: Any, here: Path) -> None:
    """An own file of the checkpoint stays, and so do a changed copy, and all copies from a node that lost its disk."""
    folder, source = node()
    write(folder, "out/step_1/a.pt", "out/step_1/b.pt", "out/step_1/c.pt")
    ask = {"newest_alone": False, "merged": ("out",), "saved": saved}
    assert gather(source, **ask) == ()
    write(here, "out/step_1/own.pt")
    os.utime(here / "out/step_1/c.pt", (5, 5))
    shutil.rmtree(folder / "out")
    assert gather(source, **ask) == ()
    assert len(list((here / "out/step_1").iterdir())) == 4
    write(folder, "out/step_2/a.pt", "out/step_2/b.pt", "out/step_2/c.pt", "out/step_2/own.pt")
    assert gather(source, **ask) == ()
    left = sorted(path.relative_to(here).as_posix() for path in here.rglob("*.pt"))
    assert left == ["out/step_1/c.pt", "out/step_1/own.pt", *(f"out/step_2/{n}.pt" for n in ("a", "b", "c", "own"))]


@pytest.mark.parametrize("name", ["epoch={}-val_loss=0.{}.ckpt", "loss=0.{1}-epoch={0}.ckpt", "epoch={}.pth.tar"])
def test_best_checkpoints_follow_the_node_with_the_newest(node: Any, gather: Any, here: Path, name: str) -> None:
    """Lightning's save_top_k: the script has removed what is not beside the newest checkpoint, also the copies."""
    folder, source = node()
    names = [f"out/{name.format(epoch, loss)}" for epoch, loss in ((1, 90), (2, 70), (4, 30))]
    ask = {"newest_alone": False, "merged": ("out",), "saved": saved}
    for epochs in (names[:1], names[1:]):
        shutil.rmtree(folder / "out", ignore_errors=True)
        write(folder, *epochs)
        assert gather(source, **ask) == ()
    kept = names[1:] if "loss" in name else names[2:]
    assert sorted(path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()) == sorted(kept)
    assert unseen(names, kept) == {*names} - {*kept}


def test_link_to_the_latest_follows_its_node(node: Any, gather: Any, here: Path) -> None:
    """`latest` leads to the same checkpoint on each node, after the next save too."""
    folder, source = node()
    for step in (1, 2):
        write(folder, f"out/step_{step}/a.pt")
        (folder / "out/latest").unlink(missing_ok=True)
        (folder / "out/latest").symlink_to(f"step_{step}")
        assert gather(source, newest_alone=False, merged=("out",), saved=saved) == ()
        assert str((here / "out/latest").readlink()) == f"step_{step}"
        assert (here / "out/latest/a.pt").read_text() == f"out/step_{step}/a.pt"


def test_kept_folder_that_changes_during_the_copy_is_copied_again(
    node: Any, gather: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes merge the same folder at the same time: each node has all files afterwards."""
    there, source = node()
    (there / "out").mkdir()
    (there / "out" / "a.pt").write_text("a")
    sent, plain = list[str](), copies._send_bytes

    def change(*args: Any) -> None:
        if not sent:
            (there / "out" / "b.pt").write_text("b")
        sent.append("a file")
        plain(*args)

    monkeypatch.setattr(copies, "_send_bytes", change)
    assert gather(source, newest_alone=False, merged=("out",)) == ()
    assert sorted(path.name for path in (here / "out").iterdir()) == ["a.pt", "b.pt"]
    assert len(sent) == 3  # the first copy of a.pt, and both files


def test_empty_folder_does_not_hide_another_nodes(node: Any, gather: Any, here: Path) -> None:
    """A kept folder exists from the start, even without files of this node."""
    there, source = node()
    (here / "out").mkdir()
    (there / "out").mkdir()
    (there / "out" / "a.pt").write_text("x")
    assert gather(source, newest_alone=False) == ()
    assert (here / "out" / "a.pt").read_text() == "x"


def test_replica_in_progress_is_awaited(node: Any, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a replica is copying the same entry, the start waits and uses that copy."""
    there, source = node()
    checkpoint(there, 1)
    held, plain = threading.Event(), copies._send_bytes

    def hold(*args: Any) -> None:
        held.wait(20)
        plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_send_bytes", hold)
        patch.setattr("cloudtrain.entrypoints.replication.replicas.EVERY_S", 0.02)
        replicas = Replicas(here, lambda: source, TOKEN, note_of(here))
        replicas.start()
        with contextlib.ExitStack() as ends:
            ends.callback(replicas.finish)
            ends.callback(held.set)
            until(lambda: list(here.glob(".*.tmp/*")))
            gathering = Gathering(here, [source], TOKEN, note_of(here), newest_alone=True)
            gathering._thread.join(0.3)
            assert not gathering.is_done
            held.set()
            until(lambda: gathering.is_done)
    assert gathering.missing == ()
    assert names(here) == ["step-00000001"]
    assert capsys.readouterr().out == ""


def test_cancel_ends_a_copy_in_progress(node: Any, here: Path) -> None:
    """The unfinished copy is removed, and is not reported as missing."""
    there, source = node()
    checkpoint(there, 1)
    held = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_send_bytes", lambda *args: held.wait(20))
        gathering = Gathering(here, [source], TOKEN, note_of(here), newest_alone=True)
        until(lambda: list(here.glob(".*.tmp/*")))
        gathering.cancel()
        held.set()
    until(lambda: gathering.is_done)
    assert gathering.missing == ()
    assert os.listdir(here) == []
