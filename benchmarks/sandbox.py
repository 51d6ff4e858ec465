"""A private home and a project for one benchmark; whatever it started is gone when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import processes

COMMAND = str(Path(sys.executable).with_name("cloudtrain"))


@dataclass(frozen=True)
class Sandbox:
    """`home` is CLOUDTRAIN_HOME of everything that runs in it, `folder` the project, `more` further variables."""

    home: Path
    folder: Path
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Return the user's environment, with the private home, a thread a rank, and Python's cache of bytecode."""
        unusual = ("CLOUDTRAIN_", "PYTHONDONTWRITEBYTECODE")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(unusual)}
        return {**clean, **self.more, "CLOUDTRAIN_HOME": str(self.home), "OMP_NUM_THREADS": "1"}

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start a command line; its output is in pipes."""
        return self.start_program([COMMAND, *args])

    def start_program(
        self, command: list[str], stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start any program in the sandbox."""
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def call(self, *args: str) -> str:
        """Run a command line and return its standard output. Raises RuntimeError where it fails."""
        process = self.start(*args)
        out, err = process.communicate(timeout=300)
        if process.returncode not in (0, 9):
            raise RuntimeError(f"cloudtrain {' '.join(args)}: exit code {process.returncode}\n{err}")
        return out

    def jobs(self, *, active: bool = False) -> list[dict[str, Any]]:
        """Return what `list --json` says."""
        jobs: list[dict[str, Any]] = json.loads(self.call("list", "--json", *(["--active"] if active else [])))["jobs"]
        return jobs

    def stop_all(self) -> None:
        """Stop every active job at once, all together."""
        stops = [self.start("stop", job["job"], "--now", "-y") for job in self.jobs(active=True)]
        for stop in stops:
            stop.communicate(timeout=120)

    def processes(self, **more: str) -> list[int]:
        """Return the processes that have the private home in their environment."""
        return processes.with_environment(CLOUDTRAIN_HOME=str(self.home), **more)

    def processes_left(self, patience_s: float = 10.0) -> int:
        """Return how many processes are left after a moment in which they may go."""
        end = time.monotonic() + patience_s
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return len(left)

    def write(self, config: str, **files: str) -> None:
        """Write the project: the config, and `name=text` for each name.py."""
        (self.folder / "cloudtrain.yaml").write_text(config)
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text)

    def idle_python(self) -> Path:
        """Return an interpreter that sleeps: what starts jobs is real, and no rank imports torch."""
        path = self.home.parent / "idle-python"
        path.write_text("#!/bin/sh\nexec sleep 600\n")
        path.chmod(0o755)
        return path


@contextmanager
def fresh_folder() -> Iterator[Path]:
    """Give an empty folder, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="cloudtrain-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def sandbox(more: Mapping[str, str] | None = None) -> Iterator[Sandbox]:
    """Give a fresh sandbox; then stop its jobs, kill what is left, remove its folders."""
    with fresh_folder() as root:
        (root / "project").mkdir()
        box = Sandbox(root / "home", root / "project", more or {})
        try:
            yield box
        finally:
            if box.home.exists():
                box.stop_all()
            for pid in box.processes():
                processes.kill(pid, 9)


def wait_until(condition: Callable[[], Any], timeout_s: float, every_s: float = 0.01) -> Any:
    """Return the condition's first true value. Raises TimeoutError."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"did not come true within {timeout_s:.0f} s")
        time.sleep(every_s)
    return value
