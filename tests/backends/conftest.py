"""Fixtures of the backends' tests: accounts on the clouds' stand-ins."""

import gc
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wholejobs
from conftest import Result

from cloudtrain.backends import http
from cloudtrain.backends.vertex import jobs
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import cli as command_line
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.planning import planner as plans
from doubles.aws.handle import Aws
from doubles.azure.handle import Azure
from doubles.google.handle import Google
from doubles.sshhosts import lightpython
from doubles.sshhosts.cluster import Cluster

PLUGIN = Path(__file__).resolve().parents[2] / "examples" / "plugin"


@pytest.fixture(scope="session")
def plugin_package(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return the environment in which the package of examples/plugin is installed, from a copy, without a network."""
    source, site = tmp_path_factory.mktemp("plugin") / "source", tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", site, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(environ={"PYTHONPATH": str(site)})


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of the session share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture
def account(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """Return an account at AWS with role and bucket, configured for the command."""
    for key, value in aws.environ.items():
        monkeypatch.setenv(key, value)
    aws.role()
    aws.bucket()
    aws.settings(stop_grace_s=30, interrupt_grace_s=20)
    return aws


@pytest.fixture
def pair(ssh_pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return two hosts that the command finds, with an interpreter that starts no torchrun."""
    ssh_pair.apply(monkeypatch)
    for host in ssh_pair.hosts:
        lightpython.install(host)
    return ssh_pair


@pytest.fixture
def azure_account(azure: Azure, monkeypatch: pytest.MonkeyPatch) -> Azure:
    """Return a workspace at Azure, configured for the command."""
    azure.apply(monkeypatch)
    return azure


@pytest.fixture
def google_project(google: Google, monkeypatch: pytest.MonkeyPatch) -> Google:
    """Return a project at Google Cloud with a bucket, configured for the command."""
    google.apply(monkeypatch)
    return google


@pytest.fixture(scope="session")
def google_libraries() -> None:
    """Import Google's libraries, and leave their objects out of each search for garbage (0.16 s)."""
    importlib.import_module("google.cloud.aiplatform")
    gc.collect()
    gc.freeze()


@pytest.fixture
def vertex(
    google_libraries: None,
    google_project: Google,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., Result]]:
    """Return the command, run in this process: Google's libraries are imported only once.

    For tests without a separate process. Each run has connections and credentials of its own; pauses are short.
    """
    monkeypatch.setattr(http, "PAUSE_S", 0.01)
    monkeypatch.setattr(jobs, "PAUSE_S", 0.01)

    def run(*args: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> Result:
        backends._made.cache_clear()  # as in a new process
        capsys.readouterr()
        with monkeypatch.context() as patch:
            if cwd is not None:
                patch.chdir(cwd)
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            gc.disable()  # a registry belongs to its thread: collect no feed's registry during the run
            code = command_line._run([str(arg) for arg in args], debug=False, as_json="--json" in args)
            gc.collect()
            gc.enable()
        return Result(code, *capsys.readouterr())

    yield run
    backends._made.cache_clear()


@pytest.fixture
def cold_cli(cli: Any) -> Any:
    """Return the command as it starts for users."""
    return replace(cli, preloaded=())


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a project's folder with a script, a task, and the CONFIG of the test's module."""
    folder = wholejobs.write_task(tmp_path / "project", request.module.CONFIG)
    (folder / "loop.py").write_text("print('x')\n")
    return folder


@pytest.fixture
def whole(cli: Any, folder: Path, shared: Path) -> wholejobs.Results:
    """Return the result of the project's job on this machine without disturbance."""
    return wholejobs.run_whole(cli, folder, shared)


@pytest.fixture
def render(tmp_path: Path) -> Callable[..., Request]:
    """Return a function that renders a config's text into its backend's request, with settings as `key=value`."""
    task = "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"
    (tmp_path / "task.py").write_text(task)
    (tmp_path / "train.py").write_text("")

    def make(text: str, *overrides: str) -> Request:
        (tmp_path / "cloudtrain.yaml").write_text(text)
        config = configs.load(tmp_path / "cloudtrain.yaml", overrides=overrides, environ={})
        backend = backends.load(config.backend)
        found: Request = backend.request(
            plans.make(config, backend.capacity(config)), config, "digits-abcde", 1, "f" * 64
        )
        return found

    return make
