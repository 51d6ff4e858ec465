"""The client on macOS: no call that only Linux has, and the commands as Linux can play macOS (doubles/macos.py)."""

import ast
import json
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import wholejobs
from conftest import ROOT, Cli

from cloudtrain.backends.channel import master
from cloudtrain.entrypoints import processes
from cloudtrain.launcher.planning import local_data, shipped
from doubles.aws.handle import Aws
from doubles.macos import linux_only
from doubles.signatures import MakeProject
from doubles.waiting import until

PLAYED = (sys.executable, str(ROOT / "tests" / "doubles" / "macos.py"))
# What runs on Linux alone: a rehearsal's cell, which is refused elsewhere, and nodes, hosts and containers.
ON_LINUX = {"launcher/rehearsal/cell.py", "entrypoints/agent/", "entrypoints/container/", "entrypoints/host/"}
ON_LINUX |= {"entrypoints/sweep/segments.py", "entrypoints/trainer/metrics.py"}
# Reads of /proc with another way beside it; texts; commands on a host or on the cluster's login node.
GUARDED = {"entrypoints/processes.py", "backends/local/jobs.py", "backends/ssh/preflight/hostcheck.py"}
GUARDED |= {"backends/slurm/check.py", "backends/slurm/doctor.py"}
OF_LINUX = re.compile(r"(^|[ \"'])/(proc|sys|run|dev/shm)(/|$)|\bprctl\b|--reflink|readlink -f|^stat$|date -d")


def sources(gone: dict[str, set[str]]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of the client's side, and of entrypoints, whose text has a name or a path of Linux."""
    for folder in ("launcher", "backends", "entrypoints"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            used = any(word in gone.get(module, ()) for module, word in re.findall(r"\b(\w+)\.(\w+)", text))
            taken = re.search(rf"^\s*from ({'|'.join(gone)}) import", text, re.MULTILINE)
            if (used or taken or OF_LINUX.search(text)) and not any(name.startswith(each) for each in ON_LINUX):
                yield name, ast.parse(text)


def guarded(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes behind a test of sys.platform, or of an attribute by hasattr."""
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp)]
    asked = [node for node in tests if re.search(r"sys\.platform|hasattr\(", ast.unparse(node.test))]
    return {inner for node in asked for inner in ast.walk(node)}


def uses_of_linux(name: str, tree: ast.Module, gone: dict[str, set[str]]) -> Iterator[tuple[str, int, str]]:
    """Yield what a module uses that only Linux has, outside of guards and docstrings."""
    safe, said = guarded(tree), {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in (node for node in ast.walk(tree) if node not in safe and node not in said):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in gone.get(node.value.id, ()):
                yield name, node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and gone.get(node.module or "", set()) & {x.name for x in node.names}:
            yield name, node.lineno, f"from {node.module}"
        elif isinstance(node, ast.Constant) and OF_LINUX.search(str(node.value)) and name not in GUARDED:
            yield name, node.lineno, str(node.value)


def test_client_calls_nothing_that_only_linux_has() -> None:
    """No module of the client's side uses a name that typeshed has for Linux and not for macOS, or a path of Linux."""
    gone = linux_only()
    assert gone["os"] > {"memfd_create", "pidfd_open", "sched_getaffinity", "O_TMPFILE", "O_PATH"}
    assert gone["signal"] > {"pidfd_send_signal"}
    assert gone["fcntl"] > {"F_SETPIPE_SZ"}
    assert [found for name, tree in sources(gone) for found in uses_of_linux(name, tree, gone)] == []
    lines = "import os", "os.listdir('/proc')", "os.pidfd_open(1)", "if hasattr(os, 'pipe2'):", "    os.pipe2(0)"
    assert len(list(uses_of_linux("seeded", ast.parse("\n".join(lines)), gone))) == 2


def dry_runs(folder: Path, program: str = "") -> Any:
    """Return the request, the plan and the archive of each backend, as a fresh process prints them."""
    program += """
import json, os, sys
from cloudtrain.launcher.api import Config, submit
found = {}
for name, text in json.loads(sys.argv[1]).items():
    with open("cloudtrain.yaml", "w") as file:
        file.write("name: x\\nscript: loop.py\\n" + text)
    dry = submit(Config("cloudtrain.yaml"), dry_run=True)
    found[name] = dry.text, dry.plan, dry.warnings
print(json.dumps([sys.platform, found]))
"""
    settings = {name: text for name, text in wholejobs.SETTINGS.items() if name != "processes"}
    command = [sys.executable, "-c", program, json.dumps(settings)]
    environ = {**os.environ, "SSH_CONFIG": "/none", "AWS_REGION": "us-east-1", "SSH_PYTHON": "/usr/bin/python3"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.usefixtures("home")
def test_dry_run_is_the_same_on_macos(project: MakeProject) -> None:
    """On all six backends the request, the plan and the warnings are those of Linux, byte for byte."""
    begin = f"import sys; sys.path.append({str(Path(PLAYED[1]).parent)!r}); import macos; macos.become_mac()"
    there, found = dry_runs(project(), begin)
    assert (there, found) == ("darwin", dry_runs(project())[1])
    assert set(found) == set(wholejobs.SETTINGS) - {"processes"}


def test_commands_that_need_linux_say_so(cli: Cli, project: MakeProject) -> None:
    """`submit` on local and `rehearse` name the reason and another way."""
    mac, folder = replace(cli, command=PLAYED), project()
    refused = mac("submit", "-y", cwd=folder)
    assert refused.code == 3
    assert "the local backend needs Linux: its agents follow process trees" in refused.stderr
    assert "ssh, slurm or a cloud by --backend" in refused.stderr
    assert "a rehearsal needs Linux" in mac("rehearse", cwd=folder).stderr


def test_names_of_files_are_those_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS a decomposed name (NFD) is shipped composed; `._*` and .DS_Store go nowhere, on Linux too."""
    name = "caf\u00e9.py"
    (tmp_path / unicodedata.normalize("NFD", name)).touch()
    for other in ("._train.py", ".DS_Store", "train.py"):
        (tmp_path / other).touch()
    assert shipped.collect(tmp_path) == [unicodedata.normalize("NFD", name), "train.py"]
    assert "._train.py" not in list(local_data._names(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert shipped.collect(tmp_path) == [name, "train.py"]


def test_sockets_of_ssh_fit_on_macos(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has at most 103 bytes there, with ssh's 17 while it listens; macOS's TMPDIR has 49 alone."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    (folder := tmp_path / ("T" * 49)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    made = master._folder()
    assert made.parent == Path("/tmp")
    assert len(os.fsencode(made / f"jump-{'0' * 16}")) + 17 <= 103


def test_lock_of_a_byte_excludes_threads_on_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without locks of open files each byte is a file: a second holder is refused, and another byte is free."""
    monkeypatch.setattr(sys, "platform", "darwin")
    path = tmp_path / "lock"
    with processes.byte_locked(path, 1) as first:
        with processes.byte_locked(path, 1) as again, processes.byte_locked(path, 2) as other:
            assert (first, again, other) == (True, False, True)
        with processes.byte_locked(path, 1) as again:
            assert not again, "the end of another holder frees no lock"
    with processes.byte_locked(path, 1) as first:
        assert first
    assert list(tmp_path.iterdir()) == []


WAITS = """
import os, signal, sys, time
from pathlib import Path

def save(signum, frame):
    (Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]) / f"saved-{os.environ['RANK']}").touch()
    sys.exit(1)

signal.signal(signal.SIGTERM, save)
(Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"]) / "result.txt").write_text("made")
print("line 0", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("backend", ["sagemaker", "ssh", "slurm"])
def test_job_is_sent_followed_and_stopped_from_macos(
    backend: str, cli: Cli, project: MakeProject, request: pytest.FixtureRequest
) -> None:
    """Each command of a client works as on Linux, and none ends in a failure of cloudtrain itself."""
    platform = request.getfixturevalue(wholejobs.STAND_INS[backend])
    if isinstance(platform, Aws):
        platform.role()
        platform.bucket()
        platform.settings(stop_grace_s=30, interrupt_grace_s=20)
    mac = replace(cli, command=PLAYED, env=platform.environ)
    folder = project(wholejobs.SETTINGS[backend], script="train.py", text=WAITS)
    checked = mac("doctor", cwd=folder)
    assert "cloudtrain itself failed" not in checked.stdout + checked.stderr
    mac.watch("line 0", "submit", "-y", "--name", "mac", count=2, cwd=folder)  # then killed
    until(lambda: mac("status", "mac", "--json").json["state"] == "running", 60, 1.0)
    assert [job["job"] for job in mac.ok("list", "--json").json["jobs"]] == ["mac"]
    assert "line 0" in mac.ok("logs", "mac").stdout
    assert mac.ok("cost", "mac", "--json").json["job"] == "mac"
    assert "mac" in mac("watch", "--once").stdout
    mac.ok("stop", "mac", "-y")
    assert mac("wait", "mac").code == 9
    status = mac.ok("status", "mac", "--json").json
    assert (status["state"], status["reason"], status["resumable"]) == ("stopped", "user", True)
    files = mac.ok("artifacts", "mac", "-o", "out", "--json", cwd=folder).json["files"]
    assert any(file.endswith("result.txt") for file in files)
