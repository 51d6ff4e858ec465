"""Model folders: every changed byte is refused, and weights are copied in pieces."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.entrypoints.checkpoints import shards
from cloudtrain.entrypoints.models import folder as folders
from cloudtrain.entrypoints.models import tensors
from cloudtrain.entrypoints.models.folder import ModelFolderError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a small model folder, checked."""
    path = tmp_path / "model"
    (path / "code").mkdir(parents=True)
    (path / "code" / "task.py").write_text("def model(params): ...\n")
    (path / "model.safetensors").write_bytes(os.urandom(3000))
    (path / "config.json").write_text(json.dumps({"format": 1, "name": "m"}))
    (path / "check.json").write_text(json.dumps({"passed": True}))
    folders.write_sums(path, {})
    return path


def test_whole_folder_is_accepted(model: Path) -> None:
    """The files and the digest of SHA256SUMS come back; sha256sum agrees."""
    found = folders.verify(model, checked=True)
    assert sorted(found.files) == ["check.json", "code/task.py", "config.json", "model.safetensors"]
    assert len(found.digest) == 64
    done = subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=model, check=False)
    assert done.returncode == 0


def test_flipped_bit_is_refused_anywhere(model: Path) -> None:
    """A flipped bit at any of 200 random places, SHA256SUMS included, is refused 200 times."""
    chance, files = random.Random(1), sorted(path for path in model.rglob("*") if path.is_file())
    refused = 0
    for _ in range(200):
        file = chance.choice(files)
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        with pytest.raises(ModelFolderError):
            folders.verify(model)
        refused += 1
        file.write_bytes(whole)
    assert refused == 200
    folders.verify(model)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda model: (model / "code" / "task.py").unlink(), "task.py is missing"),
        (lambda model: (model / "code" / "new.py").write_text(""), "code/new.py, which SHA256SUMS does not list"),
        (lambda model: (model / "link").symlink_to("config.json"), "link, which SHA256SUMS does not list"),
        (lambda model: (model / "SHA256SUMS").unlink(), "is no model folder"),
        (lambda model: (model / "SHA256SUMS").write_text(""), "no list of all files"),
        (lambda model: relisted(model, "config.json", {"format": 9}), "has format 9"),
        (lambda model: relisted(model, "config.json", []), "holds no object"),
        (lambda model: shutil.rmtree(model), "is no model folder"),
    ],
)
def test_other_damage_is_named(model: Path, damage: Callable[[Path], object], reason: str) -> None:
    """The message names the file and the damage."""
    damage(model)
    with pytest.raises(ModelFolderError, match=reason):
        folders.verify(model)


def relisted(model: Path, name: str, value: Any) -> None:
    """Change a file, and its checksum with it."""
    (model / name).write_text(json.dumps(value))
    folders.write_sums(model, {})


@pytest.mark.parametrize(
    ("check", "reason"), [({"passed": None}, "not checked"), ({"passed": False}, "its check failed")]
)
def test_unproven_folder_is_refused_on_demand(model: Path, check: dict[str, Any], reason: str) -> None:
    """A folder without a passed check is whole, and is refused by readers that need the proof."""
    relisted(model, "check.json", check)
    assert not folders.verify(model).is_checked
    with pytest.raises(ModelFolderError, match=reason):
        folders.verify(model, checked=True)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_signature_covers_every_file(model: Path, tmp_path: Path) -> None:
    """A signature is valid for its signer alone, and a model with another SHA256SUMS is refused."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signers = tmp_path / "signers"
    signers.write_text(f"me@example.org {(tmp_path / 'key.pub').read_text()}")
    folders.sign(model, key)
    folders.verify(model)

    def verified(identity: str) -> bool:
        names = ["-n", "cloudtrain-model", "-f", signers, "-I", identity, "-s", model / "SHA256SUMS.sig"]
        sums = (model / "SHA256SUMS").read_bytes()
        command = ["ssh-keygen", "-Y", "verify", *names]
        return subprocess.run(command, input=sums, capture_output=True, check=False).returncode == 0

    assert (verified("me@example.org"), verified("you@example.org")) == (True, False)
    relisted(model, "code/task.py", "other")
    assert not verified("me@example.org")
    with pytest.raises(ModelFolderError, match="cannot be signed with"):
        folders.sign(model, tmp_path / "none")


def write_shards(folder: Path, boxes: list[list[tuple[shards.Box, torch.Tensor]]]) -> list[Path]:
    """Write a file for each list of boxes, as ranks write a checkpoint's shards."""
    files = []
    for rank, own in enumerate(boxes):
        head, positions, size = shards.place([box for box, _ in own])
        data = torch.empty(size, dtype=torch.uint8)
        for (box, values), at in zip(own, positions, strict=True):
            data[at : at + box.nbytes].view(box.dtype).view(box.shape).copy_(values)
        files.append(folder / f"{rank}.safetensors")
        shards.write(files[-1], head, data)
    return files


def cut(name: str, tensor: torch.Tensor, dim: int, at: int) -> list[tuple[shards.Box, torch.Tensor]]:
    """Return the two boxes of a tensor that is cut in a dimension."""
    found = []
    for begin, end in ((0, at), (at, tensor.shape[dim])):
        offset = tuple(begin if i == dim else 0 for i in range(tensor.dim()))
        part = tensor.narrow(dim, begin, end - begin).contiguous()
        found.append((shards.Box(name, tensor.dtype, tuple(tensor.shape), offset, tuple(part.shape)), part))
    return found


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder's files, read by the library safetensors."""
    from safetensors.torch import load_file

    return {name: value for file in tensors.files(folder) for name, value in load_file(file).items()}


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    cuts=st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3), st.integers(0, 5)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_tensor_cut_in_any_way_is_whole_again(
    tmp_path: Path, shape: list[int], cuts: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Boxes of any two cuts, as of fsdp and tensor parallel ranks, give the tensor, equal to the bit."""
    whole = torch.randn(shape).mul(4).to(dtype)
    first, at, second, then = cuts[0] % len(shape), cuts[1], cuts[2] % len(shape), cuts[3]
    boxes: list[list[tuple[shards.Box, torch.Tensor]]] = [[], []]
    for rank, (box, part) in enumerate(cut("model.w", whole, first, min(at, shape[first]))):
        for inner, values in cut("model.w", part, second, min(then, part.shape[second])):
            offset = tuple(a + b for a, b in zip(box.offset, inner.offset, strict=True))
            boxes[rank].append((shards.Box("model.w", dtype, tuple(shape), offset, inner.shape), values))
    named = [[each for each in own if 0 not in each[0].shape] for own in boxes]
    files = write_shards(tmp_path, named)
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    tensors.write(out, tensors.find(files))
    assert torch.equal(read(out)["model.w"], whole)
    assert torch.equal(tensors.load(tensors.find(files)["model.w"]), whole)


def test_files_have_a_limit_and_an_index(tmp_path: Path) -> None:
    """Tensors above the limit of a file go to the next; the index names each tensor's file; sums are of the files."""
    values = {f"w{i}": torch.randn(50) for i in range(5)}
    boxes = [(shards.Box(name, value.dtype, (50,), (0,), (50,)), value) for name, value in values.items()]
    out = tmp_path / "out"
    out.mkdir()
    sums = tensors.write(out, tensors.find(write_shards(tmp_path, [boxes])), file_bytes=450)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 1000}
    assert index["weight_map"]["w4"] == "model-00003-of-00003.safetensors"
    assert sums == {name: folders.file_sha256(out / name) for name in set(index["weight_map"].values())}
    assert all(torch.equal(value, values[name]) for name, value in read(out).items())


@pytest.mark.parametrize(("taken", "reason"), [([0], "w: the shards lack a part"), ([0, 1, 1], "have a part twice")])
def test_incomplete_tensor_is_refused(tmp_path: Path, taken: list[int], reason: str) -> None:
    """A missing box and a doubled box are named with the tensor."""
    halves = cut("w", torch.randn(4, 3), 0, 2)
    files = write_shards(tmp_path, [[halves[i]] for i in taken])
    with pytest.raises(ValueError, match=reason):
        tensors.write(tmp_path, tensors.find(files))


PROGRAM = """
import sys
from pathlib import Path
from cloudtrain.entrypoints.models import tensors
tensors.write(Path(sys.argv[1]), tensors.find(sorted(Path(sys.argv[2]).glob("*.safetensors"))))
assert "torch" not in sys.modules
print(int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024)
"""


def test_copy_needs_little_memory_and_no_torch(tmp_path: Path) -> None:
    """Weights of 64 MB in two shards are written with 50 MB of memory, Python's own included."""
    boxes = cut("w", torch.zeros(16, 1 << 20), 0, 8)
    (tmp_path / "in").mkdir()
    write_shards(tmp_path / "in", [[each] for each in boxes])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, tmp_path / "in"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50
