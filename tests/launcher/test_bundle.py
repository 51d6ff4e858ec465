"""The bundle: its files, its name, and refused content on both sides."""

import hashlib
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.foreign import BundleError, unpack
from cloudtrain.launcher.backend import Bundle
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.planning import bundle as bundles
from cloudtrain.launcher.planning import shipped
from cloudtrain.launcher.planning.bundle import changed, pack, summary
from cloudtrain.launcher.planning.shipped import MB, collect

Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return a function that writes files, given as {path: text}, and returns their folder."""

    def write(files: dict[str, str], folder: str = "code") -> Path:
        for name, text in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / folder

    return write


def packed(folder: Path, exclude: tuple[str, ...] = (), max_mb: int = 10) -> Bundle:
    """Return the folder's bundle, written beside the folder."""
    return pack(folder, exclude, max_mb * MB, folder.parent / "bundles")


def names_in(folder: Path, exclude: tuple[str, ...] = ()) -> list[str]:
    """Return the names of the files to ship."""
    return collect(folder.resolve(), exclude)


def test_changed_names_the_files_that_differ_from_the_archive(tree: Tree, tmp_path: Path) -> None:
    """Changed, new and removed files and links count; equal files, ignored files and the config file do not."""
    folder = tree({"a.py": "1", "b.py": "2", "gone.py": "3", "job.yaml": "x", "sub/c.py": "4"})
    (folder / "link.py").symlink_to("a.py")
    bundle, config = packed(folder), folder / "job.yaml"
    assert changed(bundle, folder, (), config) == []
    tree({"b.py": "5", "job.yaml": "y", "new.py": "6", "x.tmp": "7"})
    (folder / "gone.py").unlink()
    (folder / "link.py").unlink()
    (folder / "link.py").symlink_to("b.py")
    assert changed(bundle, folder, ("*.tmp",), config) == ["b.py", "gone.py", "link.py", "new.py"]
    bundle.path.write_bytes(b"no archive")
    assert changed(bundle, folder, (), config) == changed(bundle, tmp_path / "none", (), config) == []


# -- the name --------------------------------------------------------------------------------------------------------


def test_bundle_is_named_by_its_content_alone(tree: Tree) -> None:
    """The name is the hash, packing twice leaves one file, and order of writing, times and umask change nothing."""
    folder = tree({"a.py": "1"})
    bundle = packed(folder)
    packed(folder)
    assert bundle.path.name == f"{hashlib.sha256(bundle.path.read_bytes()).hexdigest()}.tar.gz"
    assert [path.name for path in bundle.path.parent.iterdir()] == [bundle.path.name]
    first = tree({"a.py": "1", "sub/b.py": "2"}, "one")
    old_umask = os.umask(0o077)
    try:
        second = tree({"sub/b.py": "2", "a.py": "1"}, "two")
    finally:
        os.umask(old_umask)
    os.utime(second / "a.py", (0, 0))
    assert packed(first).sha256 == packed(second).sha256


def alike(one: bytes, other: bytes) -> int:
    """Return the number of equal bytes at the beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_change_in_a_large_file_changes_few_bytes_of_the_bundle(tree: Tree) -> None:
    """gzip restarts at each MiB: unchanged parts, before and after a change, are packed to the same bytes."""
    folder = tree({"a.py": "1"})
    noise = bytes(range(256)) * 16
    for name in ("blob", "other"):
        lines = b"".join(hashlib.sha256(b"%d" % number).digest() + noise[: number % 900] for number in range(9000))
        (folder / name).write_bytes(lines)
    before = packed(folder).path.read_bytes()
    with (folder / "blob").open("r+b") as file:
        file.seek(2_000_000)
        file.write(bytes(100))
    after = packed(folder).path.read_bytes()
    same = alike(before, after) + alike(before[-9::-1], after[-9::-1])  # before the checksum of gzip at the end
    assert len(after) > 800_000
    assert len(after) - same < 250_000
    assert len(packed(folder, ("blob",)).path.read_bytes()) < len(after)


@pytest.mark.parametrize("change", ["byte", "name", "mode"])
def test_bundle_changes_with_a_byte_a_name_or_a_mode(tree: Tree, change: str) -> None:
    """Any difference that affects a run changes the hash."""
    folder = tree({"a.py": "12", "b.py": "3"})
    before = packed(folder).sha256
    if change == "byte":
        (folder / "a.py").write_text("13")
    elif change == "name":
        (folder / "b.py").rename(folder / "c.py")
    else:
        (folder / "a.py").chmod(0o755)
    assert packed(folder).sha256 != before


def test_dry_run_and_partial_archives_change_no_bundle(tree: Tree) -> None:
    """A partial file of an earlier process of the pid is replaced; `scratch` computes hash and size without a file."""
    folder = tree({"a.py": "1"})
    (folder.parent / "bundles").mkdir()
    (folder.parent / "bundles" / f"partial-{os.getpid()}.tar.gz").write_bytes(b"half")
    assert packed(folder).path.exists()
    dry = pack(folder, (), MB, folder.parent / "nowhere", scratch=True)
    assert not (folder.parent / "nowhere").exists()
    assert (dry.sha256, dry.bytes) == (packed(folder).sha256, packed(folder).bytes)


# -- shipped files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".gitignore", ".cloudtrainignore", "sub/.gitignore"])
def test_ignore_file_in_utf_16_is_refused(tmp_path: Path, name: str) -> None:
    """PowerShell's `>` writes UTF-16, whose lines would match no file: the data would be shipped."""
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_bytes("*.bin\r\n".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"ignore` in the code folder cannot be read: not UTF-8 text; save"):
        collect(tmp_path, ())


def test_bundle_has_the_code_and_the_entrypoints(tree: Tree) -> None:
    """The bundle has the user's code and cloudtrain's entrypoints, which the nodes need not have installed."""
    bundle = packed(tree({"a.py": "1", "sub/data.txt": "2"}))
    with tarfile.open(bundle.path) as tar:
        names = tar.getnames()
    assert {name for name in names if name.startswith("code/")} == {"code/a.py", "code/sub/data.txt"}
    assert "runtime/cloudtrain/entrypoints/agent/boot.py" in names
    assert {name.split("/")[0] for name in names} == {"code", "runtime"}


@pytest.mark.parametrize(
    ("files", "empty", "exclude", "shipped"),
    [
        (
            {".gitignore": "*.log\n", "sub/.gitignore": "big.bin\n"},
            "a.log sub/big.bin sub/c.log big.bin sub/keep.py",
            (),
            ".gitignore big.bin sub/.gitignore sub/keep.py",
        ),
        (
            {".gitignore": "*.csv\n!small.csv\n", "sub/.gitignore": "!x.csv\n"},
            "big.csv small.csv sub/x.csv",
            (),
            ".gitignore small.csv sub/.gitignore sub/x.csv",
        ),
        (
            {".gitignore": "weights.bin\n", ".cloudtrainignore": "!weights.bin\nnotes.md\n"},
            "weights.bin notes.md a.py",
            (),
            ".cloudtrainignore .gitignore a.py weights.bin",
        ),
        ({".gitignore": "!data/\n"}, "data/x.bin a.ipynb a.py", ("data/", "*.ipynb"), ".gitignore a.py"),
        ({}, ".git/config .venv/bin/python __pycache__/a.pyc node_modules/x.js a.py", (), "a.py"),
        ({".git": "gitdir: /home/me/repo/.git/worktrees/x\n"}, "a.py", (), "a.py"),
    ],
    ids=["each folder and below", "reincluded", "cloudtrainignore wins", "code.exclude wins", "no file", "a worktree"],
)
def test_ignore_files_choose_the_shipped_files(
    tree: Tree, files: dict[str, str], empty: str, exclude: tuple[str, ...], shipped: str
) -> None:
    """A deeper or later line wins, `!name` includes again, and code.exclude is final."""
    assert names_in(tree(files | dict.fromkeys(empty.split(), "")), exclude) == shipped.split()


def test_ignore_files_of_the_parents_apply_up_to_the_git_root(tree: Tree) -> None:
    """A repository's .gitignore applies to a folder inside; above the root, or without a git root, none applies."""
    plain = tree({"a.py": ""}, "plain")
    (plain.parent / ".gitignore").write_text("*.py\n")
    assert names_in(plain) == ["a.py"]
    repo = tree({".gitignore": "*.ckpt\n/jobs/out/\n", "jobs/a.py": "", "jobs/x.ckpt": "", "jobs/out/y": ""})
    (repo / ".git").mkdir()
    assert names_in(repo / "jobs") == ["a.py"]


@pytest.mark.slow
def test_bundle_runs_where_cloudtrain_is_not_installed(tree: Tree, tmp_path: Path) -> None:
    """Every module of the entrypoints is there: with torch and without cloudtrain, the trainer imports from there."""
    bundle = packed(tree({"a.py": "1"}))
    unpack(bundle.path, bundle.sha256, tmp_path / "node")
    runtime = tmp_path / "node" / "runtime"
    program = f"""
import pkgutil, sys
sys.path[:0] = [{str(runtime)!r}, {sysconfig.get_path("purelib")!r}]
import cloudtrain.entrypoints as entrypoints
for found in pkgutil.walk_packages(entrypoints.__path__, "cloudtrain.entrypoints."):
    module = __import__(found.name, fromlist=["x"])
    assert module.__file__.startswith({str(runtime)!r}), module.__file__
    print(found.name)
"""
    # -S: without the option the editable installation would supply modules that the bundle lacks.
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cloudtrain.entrypoints.checkpoints.saver" in done.stdout
    assert "cloudtrain.entrypoints.trainer.strategies.fsdp" in done.stdout


# -- refused content -------------------------------------------------------------------------------------------------


def test_bundle_refuses_what_cannot_be_shipped(tree: Tree) -> None:
    """All secret files are named with the fix, or the largest files above the limit; ignored files do not count."""
    with pytest.raises(ConfigError, match="nothing to ship"):
        packed(tree({".gitignore": "*\n", "a.py": ""}, "empty"))
    secrets = [".env", "deploy/id_ed25519", "tls.key", ".aws/credentials", "service-account-prod.json"]
    folder = tree({"a.py": "", ".env.example": "", "id_rsa.pub": "", **dict.fromkeys(secrets, "s3cret")})
    with pytest.raises(ConfigError) as caught:
        packed(folder)
    assert sorted(fault.message.split("`")[1] for fault in caught.value.faults) == sorted(secrets)
    assert all(".cloudtrainignore" in fault.hint for fault in caught.value.faults)
    folder = tree({"a.py": "", "small.bin": "x" * 1000, "huge.bin": "x" * 2 * MB}, "large")
    with pytest.raises(ConfigError, match=r"2\.0 MB, over the cap of 1 MB: huge\.bin 2\.0 MB, small\.bin"):
        packed(folder, max_mb=1)


def test_bundle_keeps_links_inside_the_folder(tree: Tree) -> None:
    """A link to a file or folder of the bundle stays a link, and becomes relative; its target may be missing."""
    folder = tree({"a.py": "1", "sub/b.py": "2"})
    (folder / "link.py").symlink_to(folder / "sub" / "b.py")
    (folder / "dir").symlink_to("sub")
    (folder / "later").symlink_to("output.txt")
    bundle = packed(folder)
    unpack(bundle.path, bundle.sha256, folder.parent / "out")
    code = folder.parent / "out" / "code"
    assert (str((code / "link.py").readlink()), str((code / "later").readlink())) == ("sub/b.py", "output.txt")
    assert (code / "dir" / "b.py").read_text() == "2"


def test_bundle_refuses_links_that_lead_nowhere(tree: Tree) -> None:
    """Ten faults of a wrong folder are named, and the rest is counted; a loop of links is a fault of the folder too."""
    folder = tree({"a.py": ""})
    for number in range(30):
        (folder / f"out{number:02}").symlink_to("../elsewhere" if number % 2 else "/etc/hosts")
    with pytest.raises(ConfigError) as caught:
        packed(folder)
    last = ["the link `out09` points outside the code folder", "20 more files cannot be shipped"]
    assert [fault.message for fault in caught.value.faults[-2:]] == last
    folder = tree({"a.py": "1"}, "loop")
    (folder / "x").symlink_to("y")
    (folder / "y").symlink_to("x")
    with pytest.raises(ConfigError):
        packed(folder)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_bundle_names_unreadable_files(tree: Tree, what: str, unprivileged: Callable[..., Any]) -> None:
    """A file or folder without permission is named, and no file is silently left out."""
    folder = tree({"a.py": "1", "sub/locked.bin": "2", "cloudtrain.yaml": "name: x\nscript: a.py\n"})
    locked = folder / "sub" if what == "folder" else folder / "sub" / "locked.bin"
    locked.chmod(0)
    try:
        result = unprivileged("submit", "--dry-run", cwd=folder)
    finally:
        locked.chmod(0o755)
    assert (result.code, locked.name in result.stderr) == (3, True), result.stderr


# -- git -------------------------------------------------------------------------------------------------------------


def test_bundle_records_the_commit_and_whether_the_folder_is_dirty(tree: Tree) -> None:
    """The commit is the folder's, none outside a repository; an edit makes the folder dirty, as the summary shows."""
    folder = tree({"a.py": "1"})
    assert packed(folder).git.get("commit") is None
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    clean = packed(folder)
    (folder / "a.py").write_text("2")
    dirty = packed(folder)
    assert (clean.git["commit"], clean.git["dirty"]) == (head, False)
    assert (dirty.git["commit"], dirty.git["dirty"]) == (head, True)
    assert "with uncommitted changes" in summary(dirty)


# -- unpacking -------------------------------------------------------------------------------------------------------


def archive(folder: Path, *members: tuple[tarfile.TarInfo, bytes]) -> tuple[Path, str]:
    """Return a gzipped tar with the members, and its hash."""
    path = folder / "x.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    """Return a member of the given kind."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_unpack_restores_names_contents_and_the_executable_bit(tree: Tree) -> None:
    """Spaces, umlauts, a newline and bytes outside UTF-8 are unchanged; further permissions are not restored."""
    folder = tree({"a.py": "1", "run.sh": "2"})
    (folder / "run.sh").chmod(0o700)
    bundle = packed(folder)
    unpack(bundle.path, bundle.sha256, folder.parent / "out")
    code = folder.parent / "out" / "code"
    assert (code / "a.py").read_text() == "1"
    assert [os.access(code / name, os.X_OK) for name in ("a.py", "run.sh")] == [False, True]
    folder = tree({"a b.py": "", "übung.py": "", "new\nline.py": ""}, "odd")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.py")).write_text("")
    bundle = packed(folder)
    unpack(bundle.path, bundle.sha256, folder.parent / "odd-out")
    assert sorted(os.listdir(folder.parent / "odd-out" / "code")) == sorted(os.listdir(folder))


EVIL = {
    "absolute": [(member("/tmp/evil"), b"x")],
    "climbs": [(member("code/../../evil"), b"x")],
    "link out": [(member("code/l", tarfile.SYMTYPE, "../../etc"), b"")],
    "absolute link": [(member("code/l", tarfile.SYMTYPE, "/etc/passwd"), b"")],
    "link that climbs late": [(member("code/l", tarfile.SYMTYPE, "a/../../../etc"), b"")],
    "through a link": [(member("code/l", tarfile.SYMTYPE, "sub"), b""), (member("code/l/evil"), b"x")],
    "hard link": [(member("code/l", tarfile.LNKTYPE, "code/a"), b"")],
    "device": [(member("code/null", tarfile.CHRTYPE), b"")],
    "fifo": [(member("code/fifo", tarfile.FIFOTYPE), b"")],
}


@pytest.mark.parametrize("case", EVIL)
def test_unpack_refuses_members_outside_its_folder(tmp_path: Path, case: str) -> None:
    """For any archive, no file is written outside the folder, and no device or hard link is created."""
    path, sha256 = archive(tmp_path, *EVIL[case])
    with pytest.raises(BundleError):
        unpack(path, sha256, tmp_path / "out")
    assert not (tmp_path / "evil").exists()


def test_unpack_refuses_a_damaged_archive(tree: Tree, tmp_path: Path) -> None:
    """A flipped bit is detected before any file is unpacked; a truncated file with its hash is a BundleError."""
    bundle = packed(tree({"a.py": "1"}))
    data = bytearray(bundle.path.read_bytes())
    data[len(data) // 2] ^= 1
    bundle.path.write_bytes(data)
    with pytest.raises(BundleError, match="arrived damaged"):
        unpack(bundle.path, bundle.sha256, bundle.path.parent / "out")
    assert not (bundle.path.parent / "out").exists()
    path, _ = archive(tmp_path, (member("code/a"), b"x" * 100_000))
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(BundleError):
        unpack(path, hashlib.sha256(path.read_bytes()).hexdigest(), tmp_path / "out")


@pytest.mark.parametrize("name", ["a.py", "code/é.txt", "d/" * 49 + "xy", "d/" * 49 + "xyz", "x" * 300, "code/\udcff"])
@pytest.mark.parametrize("size", [0, 1, 8**11 - 1, 8**11])
def test_header_of_a_member_is_tarfiles(name: str, size: int) -> None:
    """Our own headers are tarfile's to the byte, so that an old archive and a new one have the same name."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o755
    assert bundles._header(name, 0o755, size) == member.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")


@pytest.mark.parametrize(("becomes", "why"), [("a pipe", "not a regular file"), ("nothing", "No such file")])
def test_file_that_changes_meanwhile_is_not_packed(
    becomes: str, why: str, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the pack: a sentence with the path, and no archive."""
    folder = tree({"a.py": "x" * 100, "b.py": ""})
    look = shipped.look

    def late(*args: Any) -> Any:
        found = look(*args)
        (folder / "b.py").unlink()
        if becomes == "a pipe":
            os.mkfifo(folder / "b.py")
        return found

    monkeypatch.setattr(shipped, "look", late)
    with pytest.raises(ConfigError, match=why) as caught:
        pack(folder, (), MB, tmp_path / "into")
    assert caught.value.where == str(folder / "b.py")
    assert list((tmp_path / "into").iterdir()) == []
