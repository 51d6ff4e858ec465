"""A rehearsal of the CustomJob on this machine: each replica's boot reads code and order from a local bucket.

The bucket is a server on loopback: it takes the calls of our nodes to Cloud Storage's JSON API and the metadata server.
Objects are files in a folder, by bucket and key. The server answers only the calls of
entrypoints/stores/gcs.py and bucket_boot.py, and any other call with 501: the server is no emulator.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from cloudtrain.entrypoints.contract import FetchedInput
from cloudtrain.entrypoints.stores.store import whole_file
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.rehearsal.stage import NodeRun, Rehearsal, Stage

from .records import VertexSending
from .request import boot_source

_OBJECTS = "/storage/v1/b/"
STORAGE = "storage"  # below `kept`: a folder for each bucket, with objects by their keys
GRACE_S = 30.0  # as for any container, and as in a spot machine's notice
DONE, AGAIN = 0, 143  # after exit code 143 Vertex AI restarts the job
PORT, MASTER_PORT = 2222, "3333"  # the ports that Vertex AI puts into CLUSTER_SPEC and MASTER_PORT


def rehearsal(request: Request, stage: Stage) -> Rehearsal:
    """Prepare the replicas. Raises ConfigError if `raw` has added pools, because they are not nodes of the training."""
    pools = request.body["jobSpec"]["workerPoolSpecs"]
    plan = VertexSending.load(request.sending)
    # As a send writes the order, but without secrets, which a rehearsal passes as variables.
    order, mirrored = replace(plan.order, secrets=None, token=request.name), dict[str, Path]()
    if not str(order.job.checkpoint.mirror).startswith("gs://"):  # a folder here replaces another cloud's store
        job, mirrored = stage.with_own_mirror(order.job)
        order = replace(order, job=job)
    _fill(stage, order.fetched or {})
    _put(stage, plan.code_uri, stage.bundle.path.read_bytes())
    _put(stage, plan.order_uri, json.dumps(order.dump()).encode())
    replicas = [(pool, index) for pool, spec in enumerate(pools) for index in range(int(spec["replicaCount"]))]
    if len(replicas) != len(stage.addresses):
        message = f"{len(replicas)} replicas are asked for, of which {len(stage.addresses)} train"
        raise ConfigError(message, where="vertex.raw", hint="leave workerPoolSpecs out, to rehearse it")
    hosts = [f"cmle-training-workerpool{pool}-{index}" for pool, index in replicas]
    shown = hosts if stage.has_own_places else list(stage.addresses)
    nodes = []
    for number, (pool, _) in enumerate(replicas):
        disk = stage.folder / hosts[number]
        (disk / "cloudtrain").mkdir(parents=True)
        usual = stage.container_variables(number, hosts[number], disk)
        platform = {
            **usual,
            "TMPDIR": usual["HOME"],
            **_platform(request, replicas, shown, number),
            "GCE_METADATA_HOST": stage.service.removeprefix("http://"),
            "CLOUDTRAIN_BOOT_PATIENCE_S": "20",
        }
        task = pools[pool].get("containerSpec") or pools[pool]["pythonPackageSpec"]
        asked = {str(each["name"]): str(each["value"]) for each in task.get("env", ())}
        command = task.get("command") or ["python3", "-u", "-c", boot_source()]
        nodes.append(
            NodeRun(
                hostname=hosts[number],
                argv=(*command, *task["args"][:3], stage.service),  # with the local storage endpoint
                env={**platform, **asked, **stage.secrets, **stage.variables},
                agents=(disk / "cloudtrain/cloudtrain",),
                places={"/tmp/cloudtrain": disk / "cloudtrain", "/gcs": stage.kept / STORAGE, **mirrored},
                cwd=usual["HOME"],
                names=dict(zip(hosts, stage.addresses, strict=True)),
            )
        )
    checkpoints = str(order.job.checkpoint.mirror) if mirrored else plan.checkpoint_uri or ""
    return Rehearsal(
        tuple(nodes),
        notice="SIGTERM to every replica, SIGKILL after 30 s; all start again with empty disks, from the bucket",
        grace_s=GRACE_S,
        checkpoints=Path(checkpoints) / order.job.job if mirrored else _file(stage, checkpoints),
        codes={"done": DONE, "interrupted": AGAIN},
        replaced=(
            "Cloud Storage and the metadata server: a folder here answers, by an address added to the boot's arguments",
            f"the image {task.get('imageUri') or task.get('executorImageUri')}",
            *(["Secret Manager"] if plan.order.secrets else []),
            *(["how pip installs the boot's package"] if "pythonModule" in task else []),
        ),
    )


def _platform(request: Request, replicas: list[tuple[int, int]], hosts: list[str], number: int) -> dict[str, str]:
    """Return the variables that Vertex AI sets in a replica; a single replica gets no variables for ranks."""
    cluster: dict[str, list[str]] = {}
    for (pool, _), host in zip(replicas, hosts, strict=True):
        cluster.setdefault(f"workerpool{pool}", []).append(f"{host}:{PORT}")
    pool, index = replicas[number]
    task = {"type": f"workerpool{pool}", "index": index, "trial": ""}
    spec = {"cluster": cluster, "environment": "cloud", "task": task, "job": "{}"}
    ranks = {"MASTER_ADDR": hosts[0], "MASTER_PORT": MASTER_PORT, "RANK": str(number), "WORLD_SIZE": str(len(hosts))}
    plan = VertexSending.load(request.sending)
    prefix = request.body["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"].rstrip("/")
    folders = {"MODEL_DIR": "model", "CHECKPOINT_DIR": "checkpoints", "TENSORBOARD_LOG_DIR": "logs"}
    return {
        "CLOUD_ML_JOB_ID": "0000000000000000000",
        "CLOUD_ML_PROJECT_ID": plan.project,
        "CLOUD_ML_REGION": plan.location,
        "CLUSTER_SPEC": json.dumps(spec),
        **(ranks if len(hosts) > 1 else {}),
        **{f"AIP_{name}": f"{prefix}/{folder}/" for name, folder in folders.items()},
    }


def _file(stage: Stage, uri: str) -> Path:
    return stage.kept / STORAGE / uri.removeprefix("gs://")


def _put(stage: Stage, uri: str, data: bytes) -> None:
    """Put an object into the bucket, as a send does."""
    path = _file(stage, uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _fill(stage: Stage, fetched: Mapping[str, FetchedInput]) -> None:
    """Copy the inputs that exist here into the bucket; each missing input becomes one empty object."""
    for name, package in fetched.items():
        target, source = _file(stage, package.uri), stage.inputs.get(name)
        if source is not None and source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        elif not target.exists():
            target.mkdir(parents=True)
            (target / "empty").touch()


@contextlib.contextmanager
def serving(kept: Path) -> Iterator[str]:
    """Serve the kept folder as buckets until the context ends; yield the address."""
    root = kept / STORAGE
    root.mkdir(parents=True, exist_ok=True)
    store = _Store(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (_Handler,), {"store": store}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Unfit(Exception):
    """The server refuses the call with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class _Store:
    """The objects. Their metadata is kept in memory; a file placed by hand has no metadata."""

    root: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    lock: threading.RLock = field(default_factory=threading.RLock)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)  # bucket/key -> metadata
    uploads: dict[str, tuple[str, str, dict[str, Any], bytearray]] = field(default_factory=dict)

    def path(self, bucket: str, key: str) -> Path:
        """Return the object's file. Raises _Unfit for a key that leads outside the folder."""
        parts = f"{bucket}/{key}".split("/")
        if not key or any(part in ("", ".", "..") for part in parts):
            raise _Unfit(400, f"a rehearsal keeps no object of the name {key!r}")
        return self.root.joinpath(*parts)

    def item(self, bucket: str, key: str) -> dict[str, Any]:
        """Return the object's resource, with size, generation and metadata. Raises _Unfit."""
        path = self.path(bucket, key)
        if not path.is_file():
            raise _Unfit(404, f"No such object: {bucket}/{key}")
        written = path.stat()
        return {
            "name": key,
            "size": str(written.st_size),
            "generation": str(written.st_mtime_ns),
            "updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(written.st_mtime)),
            "metadata": self.about.get(f"{bucket}/{key}", {}),
        }

    def items(self, bucket: str, prefix: str) -> list[dict[str, Any]]:
        """Return the objects whose keys begin with the prefix."""
        base, found = self.root / bucket, []
        paths = (Path(place, name) for place, _, files in os.walk(base) for name in files)
        for key in sorted(path.relative_to(base).as_posix() for path in paths):
            if key.startswith(prefix):
                with contextlib.suppress(_Unfit, FileNotFoundError):  # removed by the job below its /gcs meanwhile
                    found.append(self.item(bucket, key))
        return found

    def put(self, bucket: str, answer: dict[str, Any], data: bytes, query: dict[str, str]) -> dict[str, Any]:
        """Write the object as a whole; return its resource. Raises _Unfit."""
        path = self.path(bucket, answer["name"])
        if query.get("ifGenerationMatch") == "0" and path.exists():
            raise _Unfit(412, "At least one of the pre-conditions you specified did not hold.")
        with whole_file(path) as partial:
            partial.write_bytes(data)
        self.about[f"{bucket}/{answer['name']}"] = answer.get("metadata", {})
        return self.item(bucket, answer["name"])


def _refusing(act: Callable[[_Handler], None]) -> Callable[[_Handler], None]:
    """Return the method, alone in the store at a time, with a refusal as its answer."""

    def answer(handler: _Handler) -> None:
        try:
            with handler.store.lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                act(handler)
        except _Unfit as refusal:
            error = {"code": refusal.status, "message": str(refusal), "errors": [{"reason": "refused"}]}
            handler.send(refusal.status, json.dumps({"error": error}).encode())

    return answer


class _Handler(BaseHTTPRequestHandler):
    """One connection; the server's subclass sets `store`."""

    protocol_version = "HTTP/1.1"
    store: _Store

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: the terminal shows the rehearsal."""

    @_refusing
    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path.startswith("/computeMetadata/"):
            self._metadata(url.path)
            return
        bucket, key, query = self._asked()
        if key is None:
            found = self.store.items(bucket, query.get("prefix", ""))
            self.send(200, json.dumps({"items": found}).encode())
        elif query.get("alt") != "media":
            self.send(200, json.dumps(self.store.item(bucket, key)).encode())
        else:
            self._media(bucket, key, query)

    def _metadata(self, path: str) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            raise _Unfit(403, "Metadata-Flavor is missing")
        is_token = path.endswith("/token")
        answer = {"access_token": self.store.token, "expires_in": 3600, "token_type": "Bearer"}
        data = json.dumps(answer).encode() if is_token else b"rehearsal@localhost"
        self.send(200, data, {"Metadata-Flavor": "Google"})

    def _media(self, bucket: str, key: str, query: dict[str, str]) -> None:
        about = self.store.item(bucket, key)
        if query.get("generation") not in (None, about["generation"]):
            raise _Unfit(404, f"No such object: {bucket}/{key}")
        data = self.store.path(bucket, key).read_bytes()
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {
            "X-Goog-Generation": about["generation"],
            "X-Goog-Stored-Content-Length": about["size"],
            "Last-Modified": formatdate(usegmt=True),
        }
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self.send(206 if "Range" in self.headers else 200, data[begin:], headers)

    @_refusing
    def do_POST(self) -> None:
        bucket, _, query = self._asked("/upload")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if query.get("uploadType") == "resumable":
            session = secrets.token_hex(8)
            self.store.uploads[session] = (bucket, json.dumps(query), json.loads(body), bytearray())
            host = self.headers["Host"]
            self.send(200, b"", {"Location": f"http://{host}/upload{_OBJECTS}{bucket}/o?upload_id={session}"})
            return
        mark = self.headers["Content-Type"].partition("boundary=")[2].encode()
        _, about, data = body.split(b"\r\n\r\n", 2)  # in the form that entrypoints/stores/gcs.py writes
        answer = json.loads(about.partition(b"\r\n--" + mark)[0])
        data = data.rpartition(b"\r\n--" + mark + b"--")[0]
        self.send(200, json.dumps(self.store.put(bucket, answer, data, query)).encode())

    @_refusing
    def do_PUT(self) -> None:
        _, _, query = self._asked("/upload")
        session = query.get("upload_id", "")
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if session not in self.store.uploads:
            raise _Unfit(404, "no such upload")
        bucket, asked, answer, there = self.store.uploads[session]
        span, _, whole = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        if span != "*":
            begin = int(span.partition("-")[0])
            there[begin:] = data
        if len(there) == int(whole):
            del self.store.uploads[session]
            self.send(200, json.dumps(self.store.put(bucket, answer, bytes(there), json.loads(asked))).encode())
            return
        self.send(308, b"", {"Range": f"bytes=0-{len(there) - 1}"} if there else {})

    @_refusing
    def do_DELETE(self) -> None:
        bucket, key, query = self._asked()
        found = self.store.item(bucket, key or "")
        if query.get("ifGenerationMatch") not in (None, found["generation"]):
            raise _Unfit(412, "At least one of the pre-conditions you specified did not hold.")
        self.store.path(bucket, found["name"]).unlink()
        self.send(204, b"")

    def _asked(self, before: str = "") -> tuple[str, str | None, dict[str, str]]:
        """Return bucket, key and query. Raises _Unfit without the token, and for an unknown path."""
        url = urlsplit(self.path)
        if self.headers.get("Authorization") != f"Bearer {self.store.token}":
            raise _Unfit(401, "Invalid Credentials")
        if not url.path.startswith(before + _OBJECTS):
            raise _Unfit(501, f"a rehearsal does not know {self.command} {url.path}")
        bucket, _, rest = url.path.removeprefix(before + _OBJECTS).partition("/o")
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        return unquote(bucket), unquote(rest[1:]) if rest.startswith("/") else None, query

    def send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
