"""Fixtures for all tests: a private home folder, the installed command as a process, a check for leftover processes."""

import contextlib
import functools
import gc
import getpass
import hashlib
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

import order
from browser import browser, open_page, page_seen  # noqa: F401 - fixtures
from cloudtrain.entrypoints import processes
from doubles import namespaces, warmnodes, warmpython
from doubles.fixtures import (  # noqa: F401 - fixtures
    aws,
    aws_server,
    azure,
    azure_server,
    cluster,
    google,
    google_server,
    slurm,
    slurm_server,
    ssh_pair,
    ssh_server,
)

# A waiting thread of torch must not spin: with several tests on a core, a training took four times the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

ROOT = Path(__file__).resolve().parents[1]
COMMAND = Path(sys.executable).with_name("cloudtrain")

# The imports of commands, third-party modules first: of most commands, and of commands that use a cloud's SDK.
PRELOADED = (
    *("pydantic", "jinja2", "yaml", "rich.console", "rich.live", "rich.table", "click"),
    *("cloudtrain.launcher.*", "cloudtrain.backends.local.*", "cloudtrain.backends.ssh.*"),
    str(Path(__file__).parent / "doubles/builtschema.py"),
)
CLOUDS = (
    *("azure.ai.ml", "azure.identity", "requests", "boto3", "botocore.session", "s3transfer.manager"),
    *("google.cloud.aiplatform_v1", "cloudtrain.backends.*", *PRELOADED),
)

SOAK_S = 1800  # for a test of many repeats on a busy machine

# Runs for a minute in small steps, with only light imports: for jobs that a test stops.
LOOP = """\
import time

print("looping", flush=True)
for _ in range(600):
    time.sleep(0.1)
"""


# Drops every capability (capset(2), linux/capability.h version 3): then root has an ordinary user's rights.
_AS_ANYBODY = """\
import ctypes
ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
from cloudtrain.launcher.cli import main
main()
"""


# Accepts a cap of some seconds as useful: no test waits for the minutes of the shortest cap on a cloud.
_CONTENT_WITH_LITTLE = """\
from cloudtrain.launcher.metering import limit as cap
cap.least_useful_s = lambda terms: max(terms.least_s, 20)
from cloudtrain.launcher.cli import main
main()
"""


def pytest_configure(config: pytest.Config) -> None:
    """Make the outcome of a test independent of the shell and of the load.

    A background job and `nohup` ignore signals, and the commands of the tests would inherit that. A property has no
    deadline: a busy machine takes any time for an example.
    """
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    patient = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    settings.register_profile("tests", deadline=None, suppress_health_check=patient)
    settings.load_profile("tests")
    gc.disable()  # until the end of the collection, which makes a million objects that stay
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        _keep_folders_in_memory()
        _rewrite_once(config)


def _rewrite_once(config: pytest.Config) -> None:
    """Rewrite the assertions of all tests in two processes before the workers start.

    In a fresh clone each worker would rewrite each file, in 10 s of processor time.
    """
    files = [] if sys.dont_write_bytecode else sorted(Path(__file__).parent.rglob("test_*.py"))
    children = []
    for number in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            with contextlib.suppress(Exception):  # pytest's own functions: without these, the workers do the work
                for path in files[number::2]:
                    _rewrite(path, config)
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)


def _rewrite(path: Path, config: pytest.Config) -> None:
    folder = rewrite.get_cache_dir(path)
    compiled = folder / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(path, compiled) is None and rewrite.try_makedirs(folder):
        source, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, compiled)


def _keep_folders_in_memory() -> None:
    """Give this session and its processes a mount of their own for the tests' folders, if the user is root.

    On a disk, each file that a test makes looks past the thousands that other tests have just removed.
    """
    folder = Path(tempfile.gettempdir(), f"pytest-of-{getpass.getuser()}")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        namespaces.unshare(namespaces.CLONE_NEWNS)
        namespaces.mount(None, "/", None, namespaces.MS_REC | namespaces.MS_PRIVATE)
        namespaces.mount("tmpfs", str(folder), "tmpfs", 0, "mode=700")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave further cases to the soak."""
    if order.is_further(item.nodeid):
        item.add_marker(pytest.mark.soak)


@pytest.hookimpl(trylast=True)  # after the choice by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests for several workers, and give tests of many repeats their time."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(SOAK_S))
    if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        items[:] = order.in_shares(items, workers)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Share botocore's data files among all sessions, and leave all imported objects out of a search for garbage.

    Each boto3 session reads some 10 MB of JSON (0.1 s), and each search of this process takes 0.2 s.
    """
    session = importlib.import_module("botocore.session")
    session.create_loader = functools.cache(session.create_loader)  # type: ignore[attr-defined]
    gc.freeze()
    gc.enable()


@dataclass(frozen=True)
class Result:
    """The result of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Return the output read as JSON."""
        return json.loads(self.stdout)


@dataclass(frozen=True)
class Cli:
    """The installed `cloudtrain`, run as by a user: a separate process, in a folder, with the private home folder.

    A command that a test runs to its end begins with the modules `preloaded`, if any: the imports of a command, and of
    a cloud's SDK, cost more than most commands.
    """

    home: Path
    cwd: Path
    env: dict[str, str] = field(default_factory=dict)
    preloaded: tuple[str, ...] = PRELOADED
    command: tuple[str, ...] = (str(COMMAND),)

    def __call__(
        self,
        *args: str | Path,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdin: str | None = None,
        timeout_s: float = 120,
    ) -> Result:
        """Run the command to its end."""
        command, where, environment = [*self.command, *map(str, args)], cwd or self.cwd, self.environment(env)
        if stdin is None and self._is_warm(environment):
            done = warmpython.run(command, where, environment, timeout_s, self.preloaded, may_leave=True)
            return Result(done.returncode, done.stdout, done.stderr)
        done = subprocess.run(
            command,
            cwd=where,
            env=environment,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def ok(self, *args: str | Path, **options: Any) -> Result:
        """Run a command that must succeed."""
        done = self(*args, **options)
        assert done.code == 0, done.stdout + done.stderr
        return done

    def start(self, *args: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> Any:
        """Start the command and return the process, as subprocess.Popen does, with its output in pipes."""
        command, where, environment = [*self.command, *map(str, args)], cwd or self.cwd, self.environment(env)
        if self._is_warm(environment):
            return warmpython.Process(command, where, environment, self.preloaded)
        return subprocess.Popen(
            command,
            cwd=where,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def watch(self, text: str, *args: str, count: int = 1, cwd: Path | None = None, timeout_s: float = 120) -> None:
        """Run until the output has the text `count` times, then kill the process: cheaper than repeated commands."""
        process = self.start(*args, cwd=cwd)
        too_late = threading.Timer(timeout_s, process.kill)
        too_late.start()
        seen = list(itertools.islice((line for line in process.stdout if text in line), count))
        too_late.cancel()
        process.kill()
        said = process.communicate()[1]
        assert len(seen) == count, f"{text!r} was printed {len(seen)} times: {said}"

    def _is_warm(self, environment: dict[str, str]) -> bool:
        is_script = len(self.command) == 1  # not an interpreter with a program text
        return bool(self.preloaded) and is_script and "PYTHONPATH" not in environment

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a user without CLOUDTRAIN variables, except for the home folder."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("CLOUDTRAIN_", "PYTEST_"))}
        return {**clean, "CLOUDTRAIN_HOME": str(self.home), **self.env, **(more or {})}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a private state folder, not yet made, for every process that the test starts; remove ssh's sockets."""
    folder = tmp_path / "home"
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(folder))
    yield folder
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    shutil.rmtree(Path(tempfile.gettempdir()) / f"cloudtrain-{os.getuid()}-{digest}", ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def torchrun_logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the log folders of torchrun in pytest's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PET_LOG_DIR", str(tmp_path_factory.mktemp("torchrun")))
        yield


@pytest.fixture
def cli(home: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Cli:
    """Return the installed command, run in `tmp_path` by default."""
    return Cli(home, tmp_path, preloaded=CLOUDS if request.path.parent.name == "backends" else PRELOADED)


@pytest.fixture
def content_cli(cli: Cli, tmp_path: Path) -> Cli:
    """Return the command line with one change: even a short cap from a budget counts as useful."""
    program = tmp_path / "content.py"
    program.write_text(f"#!{sys.executable}\n{_CONTENT_WITH_LITTLE}")
    program.chmod(0o755)
    return replace(cli, command=(str(program),))


@pytest.fixture
def unprivileged(cli: Cli) -> Callable[..., Result]:
    """Return the command line without root's right to read and write all files (unchanged for other users)."""

    def run(*args: str | Path, cwd: Path) -> Result:
        done = subprocess.run(
            [sys.executable, "-c", _AS_ANYBODY, *map(str, args)],
            cwd=cwd,
            env=cli.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a project and returns its folder: `project("name: x", "train.py")`."""

    def write(more: str = "", script: str = "loop.py", text: str = LOOP, folder: str = "project") -> Path:
        where = tmp_path / folder
        where.mkdir(parents=True, exist_ok=True)
        (where / script).write_text(text)
        (where / "cloudtrain.yaml").write_text(f"name: loop\nscript: {script}\n{more}")
        return where

    return write


@pytest.fixture
def idle_python(tmp_path: Path) -> Path:
    """Return an interpreter that only sleeps: for tests of the start of jobs, without training.

    `local.python` set to it makes real agents start a real process, without the seconds of importing torch.
    """
    path = tmp_path / "idle-python"
    path.write_text("#!/bin/sh\nexec sleep 300\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="session")
def warm_nodes() -> Iterator[None]:
    """Have torchrun and ranks on all nodes start with torch imported."""
    with warmnodes.server():
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after every slow test that no process of its private home folder is left; kill the processes left."""
    if request.node.get_closest_marker("slow") is None:
        yield
        return
    request.getfixturevalue("warm_nodes")
    home = str(request.getfixturevalue("home"))
    yield
    end = time.monotonic() + 10.0
    while (left := processes.with_environment(CLOUDTRAIN_HOME=home)) and time.monotonic() < end:
        time.sleep(0.05)
    told = [_command_of(pid) for pid in left]
    for pid in left:
        processes.kill(pid, 9)
    assert not left, f"left behind: {told}"


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return f"{pid}"
