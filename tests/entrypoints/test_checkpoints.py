"""Checkpoints: complete or absent, verified, retained, written in the background, and loaded into any layout."""

import json
import os
import random
import re
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainerruns import torchrun

from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.checkpoints import layout, loader, mirror, shards, weights
from cloudtrain.entrypoints.checkpoints.folder import CheckpointError
from cloudtrain.entrypoints.checkpoints.mirror import Uploader
from cloudtrain.entrypoints.checkpoints.saver import Saver, Snapshot
from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.stores.folder import FolderStore
from cloudtrain.entrypoints.trainer import resume
from doubles import damage

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")


def state(size: int = 10) -> dict[str, torch.Tensor]:
    """Return tensors of several types and shapes."""
    return {
        "model.w": torch.arange(float(size)),
        "model.half": torch.arange(6.0).reshape(2, 3).bfloat16(),
        "model.flags": torch.tensor([True, False, True]),
        "model.empty": torch.zeros(0, 4),
        "optimizer.w.step": torch.tensor(7.0),
    }


def write(folder: Path, *steps: int, size: int = 10, keep: int = 9, uploads: Uploader | None = None) -> list[Path]:
    """Save one small checkpoint a step; return their paths. Raises CheckpointError."""
    saver = Saver(folder, CPU, keep, uploads)
    for step in steps:
        saver.begin(Snapshot(step, state(size), {}, {"lr": 0.1}, {"step": step, "samples": 8 * step}))
        saver.wait()
        if saver.failure is not None:
            raise CheckpointError(saver.failure.message)
    return [saved.path for saved in saver.news()]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit files to 4 kB during the test: the error equals the error of a full disk except for its number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_saved_state_loads_unchanged(tmp_path: Path) -> None:
    """A checkpoint loads its tensors bit for bit, and the remaining state unchanged."""
    (path,) = write(tmp_path, 5)
    assert path == tmp_path / "step-00000005"
    found = folders.open_found(path)
    reader = loader.open_reader(found)
    assert (found.trainer["samples"], reader.plain) == (40, {"lr": 0.1})
    for name, tensor in state().items():
        assert torch.equal(reader.read(name), tensor), name


def test_save_copies_before_it_returns(tmp_path: Path) -> None:
    """A change of a tensor after `begin` is not in the checkpoint."""
    saver = Saver(tmp_path, CPU, 3)
    tensors = {"model.w": torch.ones(1000)}
    saver.begin(Snapshot(1, tensors, {}, {}, {"step": 1}))
    tensors["model.w"].zero_()
    saver.wait()
    (saved,) = saver.news()
    assert weights.from_checkpoint(saved.path)["w"].sum() == 1000
    assert saved.blocked_s <= saved.seconds


def test_nan_is_never_saved(tmp_path: Path) -> None:
    """A save with a non-finite parameter fails, names the parameter and leaves no files; optimizer state may be NaN."""
    saver = Saver(tmp_path, CPU, 3)
    nan = torch.tensor([1.0, torch.nan])
    saver.begin(Snapshot(1, {"model.w": torch.ones(2), "optimizer.w.x": nan}, {}, {}, {"step": 1}))
    saver.wait()
    assert saver.failure is None
    mask = torch.tensor([0.0, -torch.inf])
    saver.begin(Snapshot(1, {"model.mask": mask}, {}, {}, {"step": 1}, frozenset({"model.w"})))
    saver.wait()
    assert saver.failure is None
    saver.begin(Snapshot(2, {"model.w": mask}, {}, {}, {"step": 2}, frozenset({"model.w"})))
    saver.wait()
    assert (saver.failure.is_sick, "parameter w is nan" in saver.failure.message) == (True, True)
    assert [step for step, _ in folders.list_steps(tmp_path)] == [1]


def test_flipped_byte_is_found_anywhere(tmp_path: Path) -> None:
    """A flipped bit at any of 200 random places in any file makes the checkpoint damaged."""
    (path,) = write(tmp_path, 1)
    chance = random.Random(1)
    for _ in range(200):
        file = chance.choice(sorted(path.iterdir()))
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        assert loader.check(path), file
        file.write_bytes(whole)
    assert loader.check(path) is None


SHARD = "shard-00000-of-00001.safetensors"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / SHARD).write_bytes(b"short"), rf"{SHARD} has 5 bytes of \d+"),
        (lambda path: (path / SHARD).unlink(), f"{SHARD} is missing"),
        (lambda path: (path / "trainer.json").unlink(), "trainer.json is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text('{"files":{}}'), "manifest.json is not readable"),
    ],
)
def test_damage_is_reported_in_words(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    """The message names the file and the kind of damage."""
    (path,) = write(tmp_path, 1)
    damage(path)
    assert re.search(reason, loader.check(path) or "")


@pytest.mark.parametrize("form", damage.FORMS)
def test_contradiction_is_damage(tmp_path: Path, form: str) -> None:
    """Every contradiction is found before loading, in one line with the file's name; the older checkpoint is intact."""
    older, newer = write(tmp_path, 5, 10)
    damage.FORMS[form](newer)
    wrong = loader.check(newer)
    if wrong is None:  # the contradiction is inside the files
        with pytest.raises(CheckpointError) as raised:
            loader.open_reader(folders.open_found(newer))
        wrong = str(raised.value)
    assert re.search(r"(manifest|trainer)\.json|plain\.pt|shard|step-00000010", wrong), wrong
    assert "\n" not in wrong
    assert loader.check(older) is None


@pytest.mark.parametrize("kind", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_file_without_an_end_is_not_read(tmp_path: Path, kind: Callable[[Path], object]) -> None:
    """The mark of the best step, a file of a store, and a file that an index of weights lists, in the place of which a
    pipe or a device lies: no reader waits."""
    kind(tmp_path / folders.BEST)
    assert folders.best_step(tmp_path) is None
    for read in (shards.open_shard, lambda path: FolderStore(path.parent).read(path.name)):
        with pytest.raises(OSError, match="not a regular file"):
            read(tmp_path / folders.BEST)


def test_flipped_bit_makes_no_other_step_the_best(tmp_path: Path) -> None:
    """A damaged mark of the best step is no mark, and an error where the best is meant."""
    write(tmp_path, 5, 10)
    folders.mark_best(tmp_path, 5, "loss", 0.5)
    whole = (tmp_path / folders.BEST).read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / folders.BEST).write_bytes(flipped)
        assert folders.best_step(tmp_path) in (5, None), flipped
    (tmp_path / folders.BEST).write_bytes(whole[:9])
    with pytest.raises(CheckpointError, match=r"best\.json is damaged"):
        folders.choose(tmp_path, None)


def test_mirror_brings_no_file_outside(tmp_path: Path) -> None:
    """A bucket's names may be any text: no name leads out of the checkpoint's folder."""
    names = ["step-00000005/manifest.json", "step-00000005/../../evil", f"step-00000005/{tmp_path}/evil"]
    store = SimpleNamespace(
        read=lambda name: (b'{"step": 5}', ""), names=lambda prefix: names, get=lambda name, path: path.write_text("x")
    )
    (tmp_path / "job" / "step-00000005.tmp").mkdir(parents=True)
    assert mirror.fetch(store, tmp_path / "job") == tmp_path / "job" / "step-00000005"
    assert not (tmp_path / "evil").exists()


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150)
@given(field=st.sampled_from(sorted(folders._TRAINER)), value=ANY_JSON, where=st.sampled_from(["trainer", "manifest"]))
def test_any_value_is_sound_or_named_as_damage(tmp_path: Path, field: str, value: object, where: str) -> None:
    """Any JSON in a field of trainer.json or in the list of files is valid or gives a message with the file's name."""
    path = tmp_path / "step-00000005"
    if not path.exists():
        write(tmp_path, 5)
    files = {name: (path / name).read_bytes() for name in ("trainer.json", "manifest.json")}
    if where == "trainer":
        damage.rewrite(path, {"trainer.json": json.dumps({"step": 5, field: value}).encode()})
    else:
        damage.rewrite(path, {}, lambda listed: {**listed, "files": {**listed["files"], field: value}})
    wrong = folders.verify(path)
    assert (where, wrong) == ("trainer", None) or (wrong and ".json" in wrong) or f"{field} is missing" == wrong
    for name, data in files.items():
        (path / name).write_bytes(data)


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    """The newest k and the best checkpoint stay, all older ones go; k = 0 still keeps one."""
    write(tmp_path, 1, 2, 3, 4)
    folders.mark_best(tmp_path, 1, "loss", 0.5)
    folders.retain(tmp_path, 2)
    assert [step for step, _ in folders.list_steps(tmp_path)] == [4, 3, 1]
    folders.mark_best(tmp_path, 4, "loss", 0.4)
    folders.retain(tmp_path, 0)
    assert [step for step, _ in folders.list_steps(tmp_path)] == [4]


def test_interrupted_save_leaves_no_trace(tmp_path: Path) -> None:
    """A half-written folder is no checkpoint, and the next start removes it."""
    (path,) = write(tmp_path, 1)
    path.rename(tmp_path / "step-00000002.tmp")
    assert folders.list_steps(tmp_path) == []
    folders.prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_error_names_the_intact_checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The error gives the cause, the place and the intact older step; no file remains."""
    (older,) = write(tmp_path, 1)
    request.getfixturevalue("small_files")
    with pytest.raises(CheckpointError, match=r"cannot save step 2 in .*: File too large; .*step 1 is intact"):
        write(tmp_path, 2, size=10_000)
    assert list(tmp_path.iterdir()) == [older]


def test_free_space_is_checked_before_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If free space is too small, no file is written, and the message has both figures."""
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100}))
    with pytest.raises(CheckpointError, match=r"No space left on device: [\d,]+ bytes needed, 100 free there"):
        write(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_same_step_saved_again_keeps_the_first_aside(tmp_path: Path) -> None:
    """A second save of the same step replaces the first, but deletes no files."""
    write(tmp_path, 1, 1)
    assert len(list(tmp_path.iterdir())) == 2
    assert [step for step, _ in folders.list_steps(tmp_path)] == [1]


def test_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    """The header follows the safetensors format, tensors are aligned, and a single shard has its plain name."""
    (path,) = write(tmp_path, 1)
    data = (path / SHARD).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["model.w"] == {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}
    assert length % 8 == 0
    ends = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    assert ends[-1][1] == len(data) - 8 - length


@pytest.mark.parametrize("writers", [1, 2, 3, 7])
def test_writers_share_the_bytes(writers: int) -> None:
    """The writers together write every row once, and about the same number of bytes each."""
    tensors = {"a": torch.arange(100.0).reshape(50, 2), "b": torch.tensor(3.0), "c": torch.arange(37.0)}
    parts = [layout._share(dict(tensors), index, writers) for index in range(writers)]
    for name, tensor in tensors.items():
        filled = torch.full_like(tensor, torch.nan)
        for box, values in (piece for part in parts for piece in part if piece[0].name == name):
            filled[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))] = values
        assert torch.equal(filled, tensor)
    sizes = [sum(box.nbytes for box, _ in part) for part in parts]
    assert max(sizes) - min(sizes) <= 16


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], None),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "twice"),  # the last row is nowhere
        ([((0, 0), (2, 4)), ((0, 0), (2, 4))], "twice"),
        ([((0, 0), (2, 4))], "lack a part"),
        ([((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))], None),
        ([((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((1, 2), (2, 2))], "twice"),
        ([((0, 0), (4, 4)), ((4, 0), (0, 4))], None),
    ],
)
def test_gap_is_found_by_place(boxes: list[tuple[tuple[int, int], tuple[int, int]]], fault: str | None) -> None:
    """An overlap hides no gap: the bytes may add up though a part of the tensor is nowhere."""
    shard = shards.Shard(Path(), torch.empty(0, dtype=torch.uint8), ())
    found = {"w": [(shard, shards.Box("w", torch.float32, (4, 4), *box), 0) for box in boxes]}
    assert re.search(fault or "^None$", str(loader._gap(found)))


def test_overlap_of_boxes() -> None:
    """`overlap` returns the common part of two blocks of a tensor, as slices of each block."""
    part = shards.Box("w", torch.float32, (10, 4), (2, 0), (5, 4))
    wanted = shards.Box("w", torch.float32, (10, 4), (6, 2), (4, 2))
    assert loader.overlap(part, wanted) == ((slice(4, 5), slice(2, 4)), (slice(0, 1), slice(0, 2)))
    assert loader.overlap(part, shards.Box("w", torch.float32, (10, 4), (7, 0), (3, 4))) is None


def test_never_ignores_older_checkpoints_once(tmp_path: Path) -> None:
    """`auto` tries the job's own checkpoints, the newest first; `never` sets older ones aside at the first start.

    A restart loads the run's own.
    """
    older, newer = write(tmp_path, 6, 7)
    assert resume.choose(tmp_path, "auto", is_first=True, job="j") == [newer, older]
    assert resume.choose(tmp_path, "never", is_first=True, job="j") == []
    (own,) = write(tmp_path, 2)
    assert resume.choose(tmp_path, "never", is_first=False, job="j") == [own]
    (theirs,) = write(tmp_path, 5)  # as a platform that has copied the folder restores it
    (theirs / "trainer.json").write_text('{"job": "another"}')
    assert resume.choose(tmp_path, "never", is_first=False, job="j") == [own]


def test_named_checkpoint_or_folder_of_them(tmp_path: Path) -> None:
    """A path is a checkpoint or a folder that stands for its newest checkpoint; a wrong path is a user's error."""
    first, second = write(tmp_path / "old", 1, 2)
    assert resume.choose(tmp_path, str(first), is_first=True, job="j") == [first]
    assert resume.choose(tmp_path, str(tmp_path / "old"), is_first=True, job="j") == [second, first]
    with pytest.raises(TaskError, match="does not exist"):
        resume.choose(tmp_path, str(tmp_path / "nowhere"), is_first=True, job="j")


def test_differences_are_reported_in_words() -> None:
    """Each changed field gives a phrase with both values; in strict mode the number of ranks may change."""
    then = {"seed": 1, "world_size": 4, "dataset_length": 10}
    assert resume.differences(then, then) == []
    assert resume.differences(then, {**then, "world_size": 2}) == [
        "the ranks were 4, now 2: losses agree to rounding, not to the bit"
    ]
    strict = {**then, "reproducible": "strict"}
    assert resume.differences(strict, {**strict, "world_size": 2}) == []


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_weights_for_use_elsewhere(tmp_path: Path, ending: str) -> None:
    """The command exports weights of a checkpoint without a job, for torch.load or as a single safetensors file."""
    (path,) = write(tmp_path, 1)
    out = tmp_path / f"model.{ending}"
    assert weights.main([str(path), str(out)]) == 0
    if ending == "pt":
        found = torch.load(out, weights_only=True)
    else:
        shard = shards.open_shard(out)
        found = {box.name: shard.tensor(box, begin) for box, begin in shard.boxes}
    assert set(found) == {"w", "half", "flags", "empty"}
    assert torch.equal(found["half"], state()["model.half"])


def test_weights_of_a_damaged_checkpoint_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command reports the damage and writes no file."""
    (path,) = write(tmp_path, 1)
    (path / SHARD).write_bytes(b"x" * 10)
    assert weights.main([str(path), str(tmp_path / "model.pt")]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "model.pt").exists()


def test_mirror_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    """The local checkpoint is durable, no half copy is published, and the job's last copy is tried twice.

    A kind of store that does not exist is refused.
    """
    with pytest.raises(TaskError, match="knows no ftp:// store"):
        mirror.open_mirror("ftp://host", "x")
    (tmp_path / "file").touch()
    uploads = Uploader(FolderStore(tmp_path / "file" / "below"), 3)
    assert len(write(tmp_path / "first", 3, uploads=uploads)) == 1
    uploads.wait()
    (tmp_path / "file").unlink()
    uploads.finish()
    failed, done = uploads.news()
    assert ("Not a directory" in str(failed.fault), done.fault) == (True, None)
    assert (tmp_path / "file/below/latest.json").exists()


def test_mirror_keeps_the_published_step_despite_later_steps(tmp_path: Path) -> None:
    """After a return to an older step, that published step is whole and can be fetched."""
    place = FolderStore(tmp_path / "second")
    for home, step in (("first", 90), ("first", 100), ("again", 70)):
        uploads = Uploader(place, 1)
        write(tmp_path / home, step, keep=1, uploads=uploads)
        uploads.finish()
    (tmp_path / "new").mkdir()
    assert mirror.fetch(place, tmp_path / "new") == tmp_path / "new" / "step-00000070"
    shutil.rmtree(tmp_path / "second" / "step-00000070")
    (tmp_path / "newer").mkdir()
    with pytest.raises(FileNotFoundError, match="names step-00000070, which is not there"):
        mirror.fetch(place, tmp_path / "newer")


def test_slow_mirror_delays_no_save(tmp_path: Path) -> None:
    """Saves continue during an upload and keep its files; steps in between are skipped, the last is sent."""
    hold, started = threading.Event(), threading.Event()

    class SlowMirror(FolderStore):
        def put(self, source: Path | bytes, name: str) -> None:
            started.set()
            assert hold.wait(60)
            super().put(source, name)

    uploads = Uploader(SlowMirror(tmp_path / "second"), 3)
    saver = Saver(tmp_path / "first", CPU, 1, uploads)
    for step in (1, 2, 3, 4):
        saver.begin(Snapshot(step, state(), {}, {}, {"step": step}))
        saver.wait()
        assert started.wait(60)
    assert [saved.step for saved in saver.news()] == [1, 2, 3, 4]
    assert [step for step, _ in folders.list_steps(tmp_path / "first")] == [4, 1]
    hold.set()
    uploads.finish()
    assert [(sent.step, sent.fault) for sent in uploads.news()] == [(1, None), (4, None)]
    assert (tmp_path / "second/step-00000004/manifest.json").exists()


# Saves with a strategy and a number of ranks, or loads and prints a checksum of all saved tensors.
RESHARD = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from cloudtrain.entrypoints.checkpoints import folder, loader, saver

folder_, what, strategy = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.BatchNorm1d(3))
if strategy == "fsdp":
    fully_shard(model[0]); fully_shard(model)
if os.environ.get("LONELY") and dist.get_rank() and what == "save":
    folder_ = folder_ / "elsewhere"  # this rank does not see rank 0's folder
tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
def print_sums():
    for name, value in tensors.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        print(name, float(whole.double().sum()), flush=True) if dist.get_rank() == 0 else None
if what == "save":
    print_sums()
    s = saver.Saver(folder_, torch.device("cpu"), 3)
    own = {"error": torch.full((3,), float(dist.get_rank()))}
    s.begin(saver.Snapshot(1, tensors, own, {"x": 1}, {"step": 1}))
    s.wait()
    assert s.failure is None, s.failure
else:
    path = folder_ / "step-00000001"
    assert loader.check(path) is None
    reader = loader.open_reader(folder.open_found(path))
    with torch.no_grad():
        for value in tensors.values():
            (value.to_local() if hasattr(value, "to_local") else value).zero_()
        reader.fill_all(tensors)
        print_sums()
dist.barrier()
os._exit(0)
"""


def reshard(folder: Path, what: str, strategy: str, ranks: int, **env: str) -> str:
    """Run the script on this number of ranks; return the output of rank 0."""
    (folder / "script.py").write_text(RESHARD)
    done = torchrun(ranks, ["script.py", str(folder / "checkpoints"), what, strategy], folder, env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("fsdp", 3), ("fsdp", 2)),
        (("ddp", 2), ("fsdp", 4)),
        pytest.param(("fsdp", 2), ("ddp", 1), marks=pytest.mark.soak),
        pytest.param(("fsdp", 4), ("ddp", 2), marks=pytest.mark.soak),
    ],
)
def test_state_moves_between_strategies_and_numbers_of_ranks(
    tmp_path: Path, saved: tuple[str, int], loaded: tuple[str, int]
) -> None:
    """Every strategy reads the checkpoints of every strategy: the sums of all tensors are equal."""
    written = reshard(tmp_path, "save", *saved)
    assert reshard(tmp_path, "load", *loaded) == written
    assert len(list((tmp_path / "checkpoints" / "step-00000001").glob("shard-*"))) == saved[1]


def test_share_with_read_errors_damages_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable checkpoint, or one of a later version, raises Unreadable; a transient error is retried."""
    (path,) = write(tmp_path, 1)
    real, broken = folders.read_manifest, [2]

    def stumble(where: Path) -> dict[str, dict[str, object]]:
        broken[0] -= 1
        if broken[0] >= 0:
            raise OSError(116, "Stale file handle")
        return real(where)

    monkeypatch.setattr(folders, "read_manifest", stumble)
    assert loader.check(path, patience_s=0.0) is None
    broken[0] = 99
    with pytest.raises(folders.Unreadable, match="Stale file handle"):
        loader.check(path, patience_s=0.0)
    monkeypatch.undo()
    monkeypatch.setattr(folders, "FORMAT", 3)
    with pytest.raises(folders.Unreadable, match="has format 2, this trainer reads format 3"):
        loader.check(path, patience_s=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_machines_without_a_shared_folder(tmp_path: Path, strategy: str) -> None:
    """Ranks that do not see rank 0's folder leave the writing of their shards to ranks that do."""
    written = reshard(tmp_path, "save", strategy, 2, LONELY="1")
    assert [p.name for p in (tmp_path / "checkpoints" / "step-00000001").glob("shard-*")] == [SHARD]
    assert reshard(tmp_path, "load", "fsdp", 2) == written
