"""A replica: a named machine that starts and restarts the container, with the container's variables and its /gcs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from doubles import sandbox
from doubles.google.errors import GoogleError
from doubles.google.jobs import Job, Pool
from doubles.google.names import PROJECT, REGION
from doubles.kit.differences import Heard
from doubles.kit.handle import proxied
from doubles.kit.life import Machine

if TYPE_CHECKING:
    from doubles.google.world import World

HOME = "/mnt/replica"
CA = f"{HOME}/.ca.pem"
PORT = 2222  # in CLUSTER_SPEC
MASTER_PORT = "3333"  # as in block-cascade
RANKED_POOLS = (0, 1)  # replicas of other pools serve: parameter servers or reducers, and an evaluator
GCS = "/gcs"
# Installs the folder's packages and becomes the module, whose name is in $0.
_PACKAGES = f"""
python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-cache-dir --no-index \\
  --no-deps --no-build-isolation --target {HOME}/.installed {HOME}/.packages/* || exit 1
export PYTHONPATH={HOME}/.installed${{PYTHONPATH:+:$PYTHONPATH}}
exec python3 -m "$0" "$@"
"""


@dataclass(eq=False)
class Run:
    """One start of the container, with an empty disk below `root`; `is_over` once all its output has been read."""

    root: Path
    on_change: Callable[[], None]
    running: sandbox.Running | None = None
    code: int | None = None
    is_over: bool = False
    over_at: float = 0.0
    is_preempted: bool = False

    @property
    def disk(self) -> Path:
        """Return the folder that the container sees as its home folder."""
        return self.root / "disk"

    def kill(self) -> None:
        """Kill all processes of the container."""
        if self.running is not None:
            self.running.kill()

    def read(self, write: Callable[[bytes, str], None]) -> None:
        """Read lines in threads until the container has ended."""
        process = self.running.process
        assert process.stdout is not None
        assert process.stderr is not None
        threads = [
            threading.Thread(target=_read_lines, args=(stream, name, write), daemon=True)
            for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr"))
        ]
        for thread in threads:
            thread.start()
        threading.Thread(target=self._finish, args=(threads,), daemon=True).start()

    def _finish(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join()
        code = self.running.process.wait()
        self.code = code if code >= 0 else 128 - code
        self.over_at, self.is_over = time.time(), True
        self.on_change()


@dataclass(eq=False)
class Replica(Machine):
    """A worker of the job, independent of its machine."""

    pool: Pool
    index: int
    hostname: str
    address: str
    root: Path
    on_change: Callable[[], None]
    run: Run | None = None
    starts: int = 0
    restarts: int = 0  # since the job's last start
    is_done: bool = False
    codes: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the replica's name in logs and errors."""
        return f"{self.pool.name}-{self.index}"

    @property
    def is_chief(self) -> bool:
        """Return whether the job ends with the replica."""
        return self.pool.number == 0

    @property
    def running(self) -> sandbox.Running | None:  # type: ignore[override]
        """Return the container of the last start."""
        return None if self.run is None else self.run.running

    @property
    def is_running(self) -> bool:
        """Return whether the container runs, or a part of its output has not been read."""
        return self.run is not None and not self.run.is_over

    @property
    def task(self) -> Any:
        """Return the ContainerSpec or PythonPackageSpec."""
        return getattr(self.pool.spec, self.pool.spec.WhichOneof("task"))

    def start(self, world: World, job: Job) -> None:
        """Start the container, which dies with the calling thread, on an empty disk."""
        self.starts += 1
        self.put_written(world)
        run = Run(self.root / f"{self.name}-{self.starts}", self.on_change)
        run.disk.mkdir(parents=True)
        shutil.copy(world.ca, run.disk / Path(CA).name)
        names = {one.hostname: one.address for one in job.replicas}
        mounted = {GCS: _lay_out_buckets(world, run.root / "gcs")} if world.settings.gcs else {}
        container = sandbox.Container(
            argv=self._argv(world, run),
            env=_environment(world, job, self),
            root=run.root / "container",
            hostname=self.hostname,
            private={HOME: run.disk, **mounted},
            hosts=names,
            address=self.address if world.switch is not None else None,
            cwd=HOME,
        )
        run.running = sandbox.start(container, world.switch, is_split=True)
        self.run = run
        heard = Heard(lambda: world.settings, world.killed, job.id, run.kill)

        def write(line: bytes, stream: str) -> None:
            world.logs.write_lines(job.id, self.name, heard.told([line]), stream=stream)

        run.read(write)

    def put_written(self, world: World) -> None:
        """Put the files that the last container wrote below /gcs into the buckets."""
        if self.run is None:
            return
        mount = self.run.root / "gcs"
        for file in [path for path in mount.rglob("*") if path.is_file() and path.stat().st_mtime_ns]:
            bucket, _, name = file.relative_to(mount).as_posix().partition("/")
            with contextlib.suppress(GoogleError):  # a folder beside the buckets
                if world.storage.read(bucket, name) != (data := file.read_bytes()):
                    world.storage.put(bucket, name, data)

    def pids(self) -> list[int]:
        """Return the process numbers of the replica, the container's first process first."""
        return _descendants(self.running.process.pid) if self.is_running and self.running is not None else []

    def told(self) -> dict[str, Any]:
        """Return all fields of the replica, for the handle."""
        state = "waiting" if self.run is None else "exited" if self.run.is_over else "running"
        folder, code = (None, None) if self.run is None else (str(self.run.disk), self.run.code)
        told = {name: getattr(self, name) for name in ("name", "hostname", "address", "starts", "restarts")}
        return {**told, "folder": folder, "code": code, "state": state, "pids": self.pids(), "codes": list(self.codes)}

    def _argv(self, world: World, run: Run) -> list[str]:
        task = self.task
        if self.pool.spec.WhichOneof("task") == "container_spec":
            # Without a command the image's own entry point would run, but the stand-in has no image.
            return [*task.command, *task.args] or ["true"]
        folder = run.disk / ".packages"
        folder.mkdir()
        missing = []
        for uri in task.package_uris:
            bucket, _, name = uri.removeprefix("gs://").partition("/")
            data = None
            with contextlib.suppress(GoogleError):  # the bucket does not exist
                data = world.storage.read(bucket, name)
            if data is None:
                missing.append(uri)
            else:
                (folder / Path(name).name).write_bytes(data)
        if missing:
            return ["sh", "-c", 'echo "cannot download $*" >&2; exit 1', "sh", *missing]
        return ["sh", "-c", _PACKAGES, task.python_module, *task.args]


def _read_lines(stream: BinaryIO, name: str, write: Callable[[bytes, str], None]) -> None:
    with stream:
        for line in stream:
            write(line.rstrip(b"\r\n"), name)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    for child in map(int, children):
        found += [child, *_descendants(child)]
    return found


def _environment(world: World, job: Job, replica: Replica) -> dict[str, str]:
    """Return the environment of a replica's process."""
    task = replica.task
    return {
        "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": HOME,
        "HOSTNAME": replica.hostname,
        "LANG": "C.UTF-8",
        "CLOUD_ML_JOB_ID": job.id,
        "CLOUD_ML_PROJECT_ID": PROJECT,
        "CLOUD_ML_REGION": REGION,
        **_cluster(job, replica),
        **_ranks(job, replica),
        **_outputs(job),
        **_network(world),
        **{one.name: _expanded(one.value, task.env) for one in task.env},
    }


def _cluster(job: Job, replica: Replica) -> dict[str, str]:
    pools: dict[str, list[str]] = {}
    for one in job.replicas:
        pools.setdefault(one.pool.name, []).append(f"{_host(one)}:{PORT}")
    task: dict[str, Any] = {"type": replica.pool.name, "index": replica.index, "trial": ""}
    told = json.dumps({"job_id": job.id, "display_name": job.asked.display_name})  # a string of undocumented content
    return {"CLUSTER_SPEC": json.dumps({"cluster": pools, "environment": "cloud", "task": task, "job": told})}


def _ranks(job: Job, replica: Replica) -> dict[str, str]:
    """Return torch's env:// variables with nodes as processes; empty for a job of one replica."""
    ranked = [one for one in job.replicas if one.pool.number in RANKED_POOLS]
    if len(job.replicas) == 1 or replica not in ranked:
        return {}
    master = {"MASTER_ADDR": _host(ranked[0]), "MASTER_PORT": MASTER_PORT}
    return {**master, "RANK": str(ranked.index(replica)), "WORLD_SIZE": str(len(ranked))}


def _outputs(job: Job) -> dict[str, str]:
    prefix = job.spec.base_output_directory.output_uri_prefix.rstrip("/")
    if not prefix:
        return {}
    folders = {"MODEL_DIR": "model", "CHECKPOINT_DIR": "checkpoints", "TENSORBOARD_LOG_DIR": "logs"}
    return {f"AIP_{name}": f"{prefix}/{folder}/" for name, folder in folders.items()}


def _network(world: World) -> dict[str, str]:
    """Return the variables for reaching the outer world: only through the proxy, which serves metadata too."""
    proxy = world.container_url
    place = proxy.removeprefix("http://")
    none = f"localhost,127.0.0.1,{place.partition(':')[0]}"
    return {
        **proxied(proxy, CA, none),
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": CA,
        **dict.fromkeys(("GCE_METADATA_HOST", "GCE_METADATA_IP"), place),
    }


def _host(replica: Replica) -> str:
    """Return the name by which peers find the replica, or its address if names are not available."""
    return replica.address if sandbox.mode() == "none" else replica.hostname


def _expanded(value: str, env: Any) -> str:
    """Return the value with $(NAME) of the request's own variables expanded, as in the API's description."""
    known = {one.name: one.value for one in env}
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda found: _reference(found, known), value)


def _reference(found: re.Match[str], known: dict[str, str]) -> str:
    if found[1] is None:
        return "$"
    return known.get(found[1], found[0])


def _lay_out_buckets(world: World, folder: Path) -> Path:
    """Return the folder with every bucket; an object replaced or removed later keeps its old file in the folder.

    The time of change 0 marks the files that the container has not written.
    """
    objects = world.storage.objects
    with objects.lock:
        for bucket in objects.buckets():
            (folder / bucket.name).mkdir(parents=True)
            for name, found in objects.objects(bucket.name).items():
                if PurePosixPath(name).is_absolute() or {"", ".", ".."} & set(name.split("/")):
                    continue  # not a valid file name; consoles make empty objects with these names as folders
                place = folder / bucket.name / name
                with contextlib.suppress(FileExistsError, NotADirectoryError):  # the name is a folder's, too
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(found.file, place)
                    os.utime(place, (0, 0))
    return folder
