"""The files of a job in its bucket are fetched whole, with any name, and never outside the folder."""

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.entrypoints.stores import google_http
from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT, REGION

CONFIG = f"""\
name: j
backend: vertex
script: loop.py
resources: {{instances: 1, instance_type: n1-standard-4}}
limits: {{max_duration: 1h}}
vertex: {{project: {PROJECT}, location: {REGION}, staging_bucket: {BUCKET}}}
"""
OUTPUT = "cloudtrain/jobs/one/output"


@pytest.fixture
def out(vertex: Any, tmp_path: Path, google: Google) -> Path:
    """Return the target folder for a running job's output."""
    google.settings(execute=False)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "loop.py").write_text("print('x')\n")
    (folder / "cloudtrain.yaml").write_text(CONFIG)
    assert vertex("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    google.begin("one-1")
    return tmp_path / "out"


def came(out: Path) -> dict[str, bytes]:
    """Return the files in the folder, without the mark that excludes them from the code."""
    files = [path for path in out.rglob("*") if path.is_file() and path.name != ".gitignore"]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


def test_special_names_are_kept(vertex: Any, out: Path, google: Google, tmp_path: Path) -> None:
    """Names are unchanged; a name that is no file below the folder is skipped."""
    names = ["a b", "50%", "%2e%2e", "ü/é…/日本", "a+b&c=d?e#f", "x.part", "x", "back\\slash", "...", "new\tline", "~"]
    for name in names:
        google.put_object(f"{OUTPUT}/{name}", f"of {name}")
    for name in ("../../up", "..", "a/../../up", "folder/", "/root", "a//b", "./here", "n\0l", "../output-2/near"):
        google.put_object(f"{OUTPUT}/{name}", "not this")
    google.put_object(f"{OUTPUT}-2/near", "not this")
    before = {path for path in tmp_path.rglob("*") if out not in path.parents}
    done = vertex("artifacts", "one", "-o", out)
    assert done.code == 0, done.stderr
    assert came(out) == {name: f"of {name}".encode() for name in names}
    outside = {path for path in tmp_path.rglob("*") if out not in path.parents and "home" not in path.parts}
    assert outside <= {*before, out}
    assert "is still running" in done.stderr


def test_names_that_a_disk_rejects_are_skipped(vertex: Any, out: Path, google: Google) -> None:
    """A bucket may contain a file and a folder of one name, and longer names: both are named, the rest is fetched."""
    for name in ("a", "a/b", "long/" + "n" * 300, "z"):
        google.put_object(f"{OUTPUT}/{name}", name)
    done = vertex("artifacts", "one", "-o", out)
    assert (done.code, came(out)["z"], done.stderr.count("left out: ")) == (0, b"z", 2), done.stderr
    assert len({"a", "a/b"} & set(came(out))) == 1


def test_all_pages_are_fetched(vertex: Any, out: Path, google: Google) -> None:
    """Ten files on pages of three all arrive."""
    google.settings(storage_page_size=3)
    for number in range(10):
        google.put_object(f"{OUTPUT}/{number}", str(number))
    assert vertex("artifacts", "one", "-o", out).code == 0
    assert len(came(out)) == 10


@pytest.mark.parametrize("kind", ["cut", "drop", "503", "lost"])
def test_broken_download_continues_at_its_offset(vertex: Any, out: Path, google: Google, kind: str) -> None:
    """A partial file never has the file's name."""
    data = os.urandom(6 << 20)
    google.put_object(f"{OUTPUT}/big", data)
    google.clear_journal()
    google.fault("storage.download", kind, count=3)
    done = vertex("artifacts", "one", "-o", out)
    assert done.code == 0, done.stderr
    assert hashlib.sha256(came(out)["big"]).digest() == hashlib.sha256(data).digest()
    ranges = [call["range"] for call in google.journal("storage.download")]
    assert (len(ranges), any(ranges)) == (4, kind == "cut")


def test_failed_download_is_reported(vertex: Any, out: Path, google: Google) -> None:
    """The message gives the reason; the earlier file stays."""
    out.mkdir()
    (out / "big").write_text("before")
    google.put_object(f"{OUTPUT}/big", b"x" * (3 << 20))
    google.fault("storage.download", "drop")
    done = vertex("artifacts", "one", "-o", out)
    assert (done.code, "cannot download the outputs" in done.stderr) == (7, True), done.stderr
    assert came(out) == {"big": b"before"}


def test_file_replaced_during_the_download_is_not_mixed(
    vertex: Any, out: Path, google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the object changes after a break, the whole new object is fetched, never a mixture."""
    google.put_object(f"{OUTPUT}/x", b"old" * 1_000_000)
    google.fault("storage.download", "cut", count=1)
    clock = SimpleNamespace(sleep=lambda seconds: google.put_object(f"{OUTPUT}/x", b"new" * 500_000))
    monkeypatch.setattr(google_http, "time", clock)  # of this module alone: threads of earlier tests sleep, too
    assert vertex("artifacts", "one", "-o", out).code == 0
    assert came(out) == {"x": b"new" * 500_000}


def test_file_deleted_during_the_download_is_skipped(vertex: Any, out: Path, google: Google) -> None:
    """A listed object is missing: the rest is fetched."""
    for name in ("a", "b"):
        google.put_object(f"{OUTPUT}/{name}", name)
    google.fault("storage.download", "404", count=1)
    assert (vertex("artifacts", "one", "-o", out).code, len(came(out))) == (0, 1)


def test_missing_output_is_reported(vertex: Any, out: Path) -> None:
    """No folder is made."""
    done = vertex("artifacts", "one", "-o", out)
    assert (done.code, "there is no output" in done.stderr, out.exists()) == (1, True, False), done.stderr


def test_unwritable_folder_is_reported(vertex: Any, out: Path, google: Google) -> None:
    """The fault is neither Google's nor ours."""
    google.put_object(f"{OUTPUT}/a/b", "x")
    out.write_text("a file")
    done = vertex("artifacts", "one", "-o", out / "below")
    assert (done.code, "cannot write there: Not a directory" in done.stderr) == (3, True), done.stderr


def test_unreadable_bucket_is_reported(vertex: Any, out: Path, google: Google) -> None:
    """The message names the necessary role."""
    google.put_object(f"{OUTPUT}/a", "x")
    google.settings(denied=["storage.list"])
    done = vertex("artifacts", "one", "-o", out)
    assert (done.code, "Storage Object User" in done.stderr) == (4, True), done.stderr
