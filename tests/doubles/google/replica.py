"""A replica: a named machine that starts and restarts the container."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from doubles import sandbox
from doubles.google import gcsmount
from doubles.google.environment import CA, HOME, environment
from doubles.google.errors import GoogleError
from doubles.google.jobs import Job, Pool
from doubles.kit.life import Machine

if TYPE_CHECKING:
    from doubles.google.world import World

__all__ = ["Replica", "Run"]

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
        assert self.running is not None
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
        assert self.running is not None
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
    due: float | None = None  # time of its next start
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
        run = Run(self.root / f"{self.name}-{self.starts}", self.on_change)
        run.disk.mkdir(parents=True)
        shutil.copy(world.ca, run.disk / Path(CA).name)
        names = {one.hostname: one.address for one in job.replicas}
        container = sandbox.Container(
            argv=self._argv(world, run),
            env=environment(world, job, self),
            root=run.root / "container",
            hostname=self.hostname,
            private={HOME: run.disk},
            read_only={gcsmount.PLACE: gcsmount.lay_out(world, run.root / "gcs")} if world.settings.gcs else {},
            hosts=names,
            address=self.address if world.switch is not None else None,
            cwd=HOME,
        )
        run.running = sandbox.start(container, world.switch, is_split=True)
        self.run, self.due = run, None
        run.read(lambda line, stream: world.logs.write(job.id, self.name, line, stream=stream))

    def pids(self) -> list[int]:
        """Return the process numbers of the replica, the container's first process first."""
        return _descendants(self.running.process.pid) if self.is_running and self.running is not None else []

    def told(self) -> dict[str, Any]:
        """Return all fields of the replica, for the handle."""
        state = "waiting" if self.run is None or self.due is not None else "exited" if self.run.is_over else "running"
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
