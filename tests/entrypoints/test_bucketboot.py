"""What a replica's first process brings before anything of ours is there."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doubles.google.handle import BUCKET, Google

SOURCE = Path(__file__).resolve().parents[2] / "entrypoints" / "container" / "bucket_boot.py"
ORDER = f"gs://{BUCKET}/jobs/j/attempt-1/order.json"

# In place of container.py: what it is started with.
CONTAINER = b"""
import json, os, sys
names = ("PYTHONPATH", "CLOUDTRAIN_STORAGE_ENDPOINT")
print(json.dumps({"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}))
"""


def bundle() -> bytes:
    """Return an archive of a runtime, with members that must not be unpacked."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        members = {"runtime/cloudtrain/entrypoints/container/__main__.py": CONTAINER, "code/train.py": b""}
        members |= {"runtime/../outside": b"x", "/tmp/outside": b"x", "other/runtime/x": b"x"}
        for name, text in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
        link = tarfile.TarInfo("runtime/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/nowhere"
        tar.addfile(link)
    return data.getvalue()


DATA = bundle()
KEY = f"a b é/code/{hashlib.sha256(DATA).hexdigest()}/bundle.tar.gz"
CODE = f"gs://{BUCKET}/{KEY}"


def boot(folder: Path, *more: str, **env: str) -> subprocess.Popen[str]:
    """Start it as a job's container does, with the text itself as an argument."""
    argv = [sys.executable, "-u", "-c", SOURCE.read_text(), CODE, ORDER, "mark-1", *more]
    told = {**os.environ, "TMPDIR": str(folder), "CLOUDTRAIN_BOOT_PATIENCE_S": "20", **env}
    return subprocess.Popen(argv, env=told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return its exit code and what it has said."""
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


@pytest.fixture
def store(google_store: Google, metadata: Any) -> Google:
    """Return a bucket with the code in it, for a machine with a metadata server."""
    google_store.put_object(KEY, DATA)
    return google_store


def test_source_can_travel_in_a_job_s_arguments() -> None:
    """It is short, has no reference to a variable that Vertex AI would expand, and imports the standard library."""
    text = SOURCE.read_text()
    assert len(text.encode()) < 5000
    assert "$(" not in text
    nodes = list(ast.walk(ast.parse(text)))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_container_runs_from_what_was_brought(store: Google, tmp_path: Path) -> None:
    """Its runtime, before what the image's PYTHONPATH has; nothing outside, and nothing that is not the runtime's."""
    code, said = ended(boot(tmp_path, PYTHONPATH="/of/the/image"))
    assert code == 0, said
    root = tmp_path / "cloudtrain"
    assert json.loads(said) == {
        "argv": [str(root), ORDER, "fence=mark-1"],
        "PYTHONPATH": f"{root}/runtime:/of/the/image",
        "CLOUDTRAIN_STORAGE_ENDPOINT": None,
    }
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}
    assert found == {"bundle.tar.gz", "runtime/cloudtrain/entrypoints/container/__main__.py"}
    assert (root / "bundle.tar.gz").read_bytes() == DATA
    assert list(tmp_path.iterdir()) == [root]


def test_second_start_on_the_same_disk_is_like_the_first(store: Google, tmp_path: Path) -> None:
    """A container may be started anew where it was."""
    for _ in range(2):
        code, said = ended(boot(tmp_path))
        assert code == 0, said


def test_given_endpoint_is_asked_and_passed_on(store: Google, tmp_path: Path) -> None:
    """The last argument; past the proxy, which would be asked for Google's own."""
    endpoint = store.endpoints["storage"] + "/"
    env = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    code, said = ended(boot(tmp_path, endpoint, **env))
    assert code == 0, said
    assert json.loads(said)["CLOUDTRAIN_STORAGE_ENDPOINT"] == endpoint


REFUSED: list[tuple[str, Callable[[Google], Any], str]] = [
    (
        "gone",
        lambda store: store.remove_object(KEY),
        f"{CODE} no longer exists: submit the job again: HTTP Error 404",
    ),
    ("damaged", lambda store: store.put_object(KEY, DATA[:-1]), f"submit the job again: {CODE} is not the code"),
    ("empty", lambda store: store.put_object(KEY, b""), f"submit the job again: {CODE} is not the code that was sent"),
    (
        "denied",
        lambda store: store.settings(denied=["storage.download", "storage.get"]),
        f"the job's service account needs storage.objects.get for {CODE}: HTTP Error 403",
    ),
]


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_job_that_cannot_run_says_why_in_a_line(
    change: Callable[[Google], Any], words: str, store: Google, tmp_path: Path
) -> None:
    """And ends with 1, at which Vertex AI tries nothing again; nothing is unpacked."""
    change(store)
    code, said = ended(boot(tmp_path))
    assert (code, said.count("\n")) == (1, 1), said
    assert said.startswith(f"cloudtrain: {words}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["drop", "cut", "429", "503", "401"])
def test_what_passes_is_waited_for(kind: str, store: Google, tmp_path: Path) -> None:
    """Broken off, busy, or of a token that is not good yet: it is asked for again, and nothing is said of it."""
    store.fault("storage.*", kind, count=2)
    code, said = ended(boot(tmp_path))
    assert (code, said.count("\n")) == (0, 1), said
    assert len(store.journal("storage.download")) == 3


@pytest.mark.parametrize("failures", [[503, 404], [403]])
def test_metadata_server_that_comes_late_is_waited_for(
    store: Google, metadata: Any, tmp_path: Path, failures: list[int]
) -> None:
    """At a machine's start it may not answer yet; what it says is nothing that the bucket says."""
    token = metadata.token

    def late() -> str:
        if failures:
            raise LookupError(failures.pop())
        return str(token())

    metadata.token = late
    code, said = ended(boot(tmp_path))
    assert code == 0, said


@pytest.mark.parametrize("away", ["storage", "metadata"])
def test_network_that_stays_away_may_be_tried_again(away: str, store: Google, tmp_path: Path) -> None:
    """143 is no fault of the job's: the platform may start it anew."""
    nowhere = "http://127.0.0.1:9"
    more = [nowhere] if away == "storage" else []
    env = {"GCE_METADATA_HOST": "127.0.0.1:9"} if away == "metadata" else {"NO_PROXY": "127.0.0.1"}
    code, said = ended(boot(tmp_path, *more, CLOUDTRAIN_BOOT_PATIENCE_S="0.2", **env))
    assert (code, said.count("\n")) == (143, 1), said
    assert said.startswith(f"cloudtrain: cannot read {CODE} for 0 s: check the network route to http")
    assert "refused" in said


def test_image_without_certificates_is_said_at_once(store: Google, tmp_path: Path) -> None:
    """With what to add to it: waiting would cost the machines' price for nothing."""
    code, said = ended(boot(tmp_path, SSL_CERT_FILE="/dev/null"))
    assert code == 1
    assert said.startswith("cloudtrain: add ca-certificates to the image: https://storage.googleapis.com is not trust")


def test_stop_before_the_start_ends_it(store: Google, tmp_path: Path, wait_until: Callable[..., Any]) -> None:
    """As a container's first process it gets no help from the kernel's own way with signals."""
    store.fault("storage.*", "hang")
    process = boot(tmp_path)
    wait_until(lambda: store.journal("storage.download"))
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, "cloudtrain: stopped before the start\n")
