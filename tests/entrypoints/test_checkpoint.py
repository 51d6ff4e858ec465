"""Checkpoints: complete or absent, verified, retained; and which one a resume takes."""

from __future__ import annotations

import random
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cloudtrain.entrypoints import checkpoint, resume
from cloudtrain.entrypoints.checkpoint import CheckpointError
from cloudtrain.entrypoints.settings import TaskError


def write(folder: Path, *steps: int, size: int = 10) -> list[Path]:
    """Save one small checkpoint a step; return their paths."""
    state = {"model": {"w": torch.arange(float(size))}, "optimizer": {"state": {}, "param_groups": []}}
    return [checkpoint.save(folder, step, state, {"step": step, "samples": 8 * step})[0] for step in steps]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 4 kB while the test runs: the error is that of a full disk in all but its number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_saved_state_comes_back(tmp_path: Path) -> None:
    """What was saved is loaded, tensors to the bit."""
    (path,) = write(tmp_path, 5)
    assert path == tmp_path / "step-00000005"
    assert torch.equal(checkpoint.read_state(path)["model"]["w"], torch.arange(10.0))
    assert checkpoint.open_found(path).trainer == {"step": 5, "samples": 40}


def test_flipped_byte_is_found_anywhere(tmp_path: Path) -> None:
    """One flipped bit at any of 200 places, in any file, makes the checkpoint damaged."""
    (path,) = write(tmp_path, 1)
    chance = random.Random(1)
    for _ in range(200):
        file = chance.choice(sorted(path.iterdir()))
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        assert checkpoint.verify(path), file
        file.write_bytes(whole)
    assert checkpoint.verify(path) is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "state.pt").write_bytes(b"short"), r"state.pt has 5 bytes of \d+"),
        (lambda path: (path / "trainer.json").unlink(), "trainer.json is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text('{"files":{}}'), "manifest.json does not list"),
    ],
)
def test_damaged_checkpoint_gives_way_to_the_older(tmp_path: Path, damage: object, reason: str) -> None:
    """The newest that is intact is taken, with what is wrong with the newer one, which is set aside."""
    older, newer = write(tmp_path, 1, 2)
    damage(newer)  # type: ignore[operator]
    found, passed_over = resume.choose(tmp_path, "auto", is_first=True)
    assert found is not None
    assert found.path == older
    assert [(path, bool(re.search(reason, fault))) for path, fault in passed_over] == [(newer, True)]
    assert checkpoint.list_steps(tmp_path) == [(1, older)]


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    """The newest k stay and the rest goes; k of 0 still keeps one."""
    write(tmp_path, 1, 2, 3, 4)
    checkpoint.retain(tmp_path, 2)
    assert [step for step, _ in checkpoint.list_steps(tmp_path)] == [4, 3]
    checkpoint.retain(tmp_path, 0)
    assert [step for step, _ in checkpoint.list_steps(tmp_path)] == [4]


def test_interrupted_save_leaves_no_trace(tmp_path: Path) -> None:
    """A half-written folder is no checkpoint, and the next start removes it."""
    (path,) = write(tmp_path, 1)
    path.rename(tmp_path / "step-00000002.tmp")
    assert checkpoint.newest(tmp_path) == (None, [])
    checkpoint.prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_names_the_intact_one(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A save that does not fit says what, where, how many bytes, and that the older one is intact; no file is left."""
    (older,) = write(tmp_path, 1)
    request.getfixturevalue("small_files")
    with pytest.raises(
        CheckpointError,
        match=r"cannot save step 2 in .*: File too large; about 40,000 bytes .*free there; .*step 1 is intact",
    ):
        write(tmp_path, 2, size=10_000)
    assert list(tmp_path.iterdir()) == [older]


def test_same_step_saved_again_keeps_the_first_aside(tmp_path: Path) -> None:
    """Saving a step that is there already replaces it and deletes nothing."""
    write(tmp_path, 1, 1)
    assert len(list(tmp_path.iterdir())) == 2
    assert [step for step, _ in checkpoint.list_steps(tmp_path)] == [1]


def test_never_starts_afresh_once(tmp_path: Path) -> None:
    """`never` sets older checkpoints aside at the first start; after a restart the run's own are taken."""
    write(tmp_path, 7)
    assert resume.choose(tmp_path, "never", is_first=True) == (None, [])
    write(tmp_path, 2)
    found, _ = resume.choose(tmp_path, "never", is_first=False)
    assert found is not None
    assert found.step == 2


def test_named_checkpoint_outranks_later_ones(tmp_path: Path) -> None:
    """Going back to step 1 sets step 2 aside: else retention would drop the new run's checkpoints for it."""
    first, _ = write(tmp_path, 1, 2)
    found, _ = resume.choose(tmp_path, str(first), is_first=True)
    assert found is not None
    assert found.path == first
    assert checkpoint.list_steps(tmp_path) == [(1, first)]


def test_named_checkpoint_must_exist_and_be_intact(tmp_path: Path) -> None:
    """A wrong path is the user's error; a damaged one is not replaced by another silently."""
    (path,) = write(tmp_path / "old", 1)
    with pytest.raises(TaskError, match="does not exist"):
        resume.choose(tmp_path, str(tmp_path / "nowhere"), is_first=True)
    (path / "state.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000001 is damaged: state.pt has 0 bytes"):
        resume.choose(tmp_path, str(path), is_first=True)


def test_differences_are_said_in_words() -> None:
    """Each changed field is one phrase with both values; equal ones say nothing."""
    then = {"seed": 1, "world_size": 4, "dataset_length": 10}
    assert resume.differences(then, then) == []
    assert resume.differences(then, {**then, "world_size": 2}) == [
        "2 ranks, then 4: losses agree to rounding, not to the bit"
    ]
