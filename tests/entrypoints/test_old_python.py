"""An interpreter older than 3.10: the node's first programs say so in a sentence, where `status` finds the sentence."""

import ast
import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.backend import container_output
from doubles.google.handle import Google
from doubles.google.names import BUCKET

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "entrypoints" / "container"
# Each file that an interpreter reads before the check of its version.
FIRST = (
    "entrypoints/__init__.py",
    "entrypoints/agent/__init__.py",
    "entrypoints/container/__init__.py",
    "entrypoints/container/__main__.py",
    "entrypoints/container/bucket_boot.py",
    "entrypoints/host/bootstrap.py",
)
FAKE = "import sys; sys.version_info = (3, 8, 10, 'final', 0); sys.version = '3.8.10 (fake)'; "


def old_pythons() -> list[list[str]]:
    """Return commands of old interpreters: real ones of this machine, else this one that calls itself 3.8."""
    found = sorted(Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python3"))
    return [[str(path)] for path in found] or [[sys.executable]]


def run(python: list[str], code: str, *argv: str, **env: str) -> tuple[int, str, str]:
    """Run the code with the interpreter; return its exit code, output and errors."""
    fake = FAKE if python == [sys.executable] else ""
    told = {**os.environ, "PYTHONPATH": str(ROOT / "typings"), **env}
    done = subprocess.run([*python, "-c", fake + code, *argv], env=told, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", FIRST)
def test_first_files_are_in_the_syntax_of_python_3_6(name: str) -> None:
    """The grammar of 3.6 parses the file, and no annotation is a type that 3.6 cannot evaluate."""
    text = (ROOT / name).read_text()
    tree = ast.parse(text, feature_version=(3, 6))
    assert "annotations" not in {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)):
        types = [arg.annotation for arg in node.args.args] + [node.returns]
        assert not any(isinstance(each, (ast.Subscript, ast.BinOp)) for each in types), node.name


@pytest.mark.parametrize("python", old_pythons())
@pytest.mark.parametrize("place", ["output/failure", None])
def test_container_reports_an_old_python(python: list[str], place: str | None, tmp_path: Path) -> None:
    """SageMaker's file for failures, or the log, gets the exit report, and the launcher reads it."""
    order: dict[str, Any] = {"places": {"failure": place}}
    (tmp_path / "spec.json").write_text(json.dumps(order))
    code = "import runpy; runpy.run_module('cloudtrain.entrypoints.container', run_name='__main__', alter_sys=True)"
    source, env = ("spec.json", {}) if place else ("env:ORDER", {"ORDER": base64.b64encode(b"{}").decode()})
    status, out, errors = run(python, code, str(tmp_path), source, **env)
    said = (tmp_path / place).read_text() if place else out
    report = container_output.report_in(f"AlgorithmError: {said.strip()}, exit code: 64")
    assert (status, "Traceback" in errors) == (64, False)
    assert report is not None
    assert "cloudtrain needs 3.10 or newer" in report["message"]
    assert (report["state"], report["kind"]) == ("failed", "config")
    assert container_output.last_word(said.splitlines(), "ended", stamped=False) == report


@pytest.mark.parametrize("python", old_pythons())
def test_replica_leaves_the_report_in_the_bucket(python: list[str], google_store: Google, metadata: Any) -> None:
    """On Vertex AI the launcher reads the report beside the order; without a network the log has the sentence."""
    text = (CONTAINER / "bucket_boot.py").read_text()
    argv = ["code", f"gs://{BUCKET}/jobs/j/attempt-1/order.json", "mark", google_store.endpoints["storage"]]
    status, out, _ = run(python, f"exec({text!r})", *argv, NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
    assert (status, out.count("\n")) == (1, 1)
    assert out.startswith("cloudtrain: use an image with Python 3.10 or newer: this image has 3.")
    report = json.loads(google_store.object("jobs/j/attempt-1/ended-0.json") or b"")
    assert f"cloudtrain: {report['message']}" == out.strip()


@pytest.mark.parametrize("python", old_pythons())
@pytest.mark.parametrize("module", ["slurm_step", "boot"])
def test_agent_names_the_interpreter(python: list[str], module: str) -> None:
    """A node of Slurm and a local job end with one line, which their backends show."""
    status, _, errors = run(python, f"from cloudtrain.entrypoints.agent import {module}")
    assert (status, errors.count("\n")) == (1, 1), errors
    assert errors.startswith("Python 3.10 or newer is needed, and /")
