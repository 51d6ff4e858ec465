"""The first process of a replica, which downloads our runtime before any of our code is on the machine."""

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

from doubles.google.handle import Google
from doubles.google.names import BUCKET
from doubles.waiting import until

SOURCE = Path(__file__).resolve().parents[2] / "entrypoints" / "container" / "bucket_boot.py"
ORDER = f"gs://{BUCKET}/jobs/j/attempt-1/order.json"

# A stand-in of container.py that prints its arguments and variables.
CONTAINER = b"""
import json, os, sys
names = ("PYTHONPATH", "CLOUDTRAIN_STORAGE_ENDPOINT")
print(json.dumps({"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}))
"""


def bundle() -> bytes:
    """Return an archive of a runtime, with members that boot must not unpack."""
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
    """Start the boot program as a job's container does, with the program's text as an argument."""
    argv = [sys.executable, "-u", "-c", SOURCE.read_text(), CODE, ORDER, "mark-1", *more]
    told = {**os.environ, "TMPDIR": str(folder), "CLOUDTRAIN_BOOT_PATIENCE_S": "20", **env}
    return subprocess.Popen(argv, env=told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the process's exit code and output."""
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


@pytest.fixture
def store(google_store: Google, metadata: Any) -> Google:
    """Return a bucket with the code, for a machine with a metadata server."""
    google_store.put_object(KEY, DATA)
    return google_store


def test_source_can_travel_in_a_job_s_arguments() -> None:
    """The source is short, has no variable that Vertex AI would expand, and imports only the standard library."""
    text = SOURCE.read_text()
    assert len(text.encode()) < 5000
    assert "$(" not in text
    nodes = list(ast.walk(ast.parse(text)))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_container_runs_from_the_downloaded_runtime(store: Google, tmp_path: Path) -> None:
    """The runtime comes before the image's PYTHONPATH; members outside the runtime are not unpacked.

    The platform may start a container again on the same disk.
    """
    for _ in range(2):
        code, said = ended(boot(tmp_path, PYTHONPATH="/of/the/image"))
        assert code == 0, said
    root = tmp_path / "cloudtrain"
    assert json.loads(said) == {
        "argv": [str(root), ORDER, "fence=mark-1"],
        "PYTHONPATH": f"{root}/runtime:/of/the/image",
        "CLOUDTRAIN_STORAGE_ENDPOINT": None,
    }
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert found == {"bundle.tar.gz", "runtime/cloudtrain/entrypoints/container/__main__.py"}
    assert (root / "bundle.tar.gz").read_bytes() == DATA
    assert list(tmp_path.iterdir()) == [root]


def test_given_endpoint_is_used_and_passed_on(store: Google, tmp_path: Path) -> None:
    """The last argument is the endpoint; requests to the endpoint bypass the proxy."""
    endpoint = store.endpoints["storage"] + "/"
    env = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    code, said = ended(boot(tmp_path, endpoint, **env))
    assert code == 0, said
    assert json.loads(said)["CLOUDTRAIN_STORAGE_ENDPOINT"] == endpoint


REFUSED: list[tuple[str, Callable[[Google], Any], str]] = [
    ("gone", lambda store: store.remove_object(KEY), f"{CODE} no longer exists: submit the job again: HTTP Error 404"),
    ("damaged", lambda store: store.put_object(KEY, DATA[:-1]), f"submit the job again: {CODE} is not the code"),
    ("empty", lambda store: store.put_object(KEY, b""), f"submit the job again: {CODE} is not the code that was sent"),
    (
        "denied",
        lambda store: store.settings(denied=["storage.download", "storage.get"]),
        f"the job's service account needs storage.objects.get for {CODE}: HTTP Error 403",
    ),
]


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_job_that_cannot_run_prints_one_line(
    change: Callable[[Google], Any], words: str, store: Google, tmp_path: Path
) -> None:
    """The exit code is 1, so Vertex AI does not retry; no file is unpacked."""
    change(store)
    code, said = ended(boot(tmp_path))
    assert (code, said.count("\n")) == (1, 1), said
    assert said.startswith(f"cloudtrain: {words}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["drop", "cut", "429", "503", "401"])
def test_transient_faults_are_retried(kind: str, store: Google, tmp_path: Path) -> None:
    """After a broken connection, a busy server or an early token, boot asks again and prints no line."""
    store.fault("storage.*", kind, count=2)
    code, said = ended(boot(tmp_path))
    assert (code, said.count("\n")) == (0, 1), said
    assert len(store.journal("storage.download")) == 3


@pytest.mark.parametrize("failures", [[503, 404], [403]])
def test_metadata_server_that_comes_late_is_waited_for(
    store: Google, metadata: Any, tmp_path: Path, failures: list[int]
) -> None:
    """A metadata server may fail at the machine's start; boot does not take its failures for answers of the bucket."""
    token = metadata.token

    def late() -> str:
        if failures:
            raise LookupError(failures.pop())
        return str(token())

    metadata.token = late
    code, said = ended(boot(tmp_path))
    assert code == 0, said


@pytest.mark.parametrize("away", ["storage", "metadata"])
def test_network_outage_ends_with_a_retryable_code(away: str, store: Google, tmp_path: Path) -> None:
    """Exit code 143 is no fault of the job's, so the platform may start the container again."""
    nowhere = "http://127.0.0.1:9"
    more = [nowhere] if away == "storage" else []
    env = {"GCE_METADATA_HOST": "127.0.0.1:9"} if away == "metadata" else {"NO_PROXY": "127.0.0.1"}
    code, said = ended(boot(tmp_path, *more, CLOUDTRAIN_BOOT_PATIENCE_S="0.2", **env))
    assert (code, said.count("\n")) == (143, 1), said
    assert said.startswith(f"cloudtrain: cannot read {CODE} for 0 s: check the network route to http")
    assert "refused" in said


def test_image_without_certificates_is_reported_at_once(store: Google, tmp_path: Path) -> None:
    """The message names the missing package; waiting would only cost money."""
    code, said = ended(boot(tmp_path, SSL_CERT_FILE="/dev/null"))
    assert code == 1
    assert said.startswith("cloudtrain: add ca-certificates to the image: https://storage.googleapis.com is not trust")


def test_stop_before_the_start_ends_the_process(store: Google, tmp_path: Path) -> None:
    """The first process of a container gets no default signal handling from the kernel, so boot must handle SIGTERM."""
    store.fault("storage.*", "hang")
    process = boot(tmp_path)
    until(lambda: store.journal("storage.download"))
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, "cloudtrain: stopped before the start\n")
