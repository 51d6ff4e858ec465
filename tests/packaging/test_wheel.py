"""The built wheel: its files, and its work in an empty environment."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("launcher", "backends", "templates", "entrypoints")
SIDE = ("pyproject.toml", "README.md", "LICENSE")
# Modules that boot and the agents need before torch is found.
STDLIB_ONLY = (
    *("agent.agent", "agent.boot", "agent.coordinate", "agent.elastic", "agent.node_logs", "agent.node"),
    *("agent.transport", "agent.worker", "atomic_json", "foreign", "events", "processes"),
)
NEVER_IN_BASE = ("torch", "numpy", "boto3", "botocore", "sagemaker", "azure", "google")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel once, from a copy, to leave the checkout unchanged."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SIDE:
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def names(wheel: Path) -> set[str]:
    """Return the names of the wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def files_below(folder: str) -> set[str]:
    """Return the repository's files below the folder, relative to its root."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_wheel_has_every_module(names: set[str], folder: str) -> None:
    """A new sub-folder missing in `packages` would be left out without an error."""
    modules = {f"cloudtrain/{name}" for name in files_below(folder) if name.endswith(".py")}
    assert modules - names == set()


def test_wheel_is_a_typed_part_of_an_open_namespace(names: set[str]) -> None:
    """No bare `launcher` is at the top of site-packages, and no `cloudtrain/__init__.py` hides a plug-in."""
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"cloudtrain"}
    assert "cloudtrain/__init__.py" not in names
    assert {f"cloudtrain/{package}/py.typed" for package in ("launcher", "backends", "entrypoints")} <= names
    data = {f"cloudtrain/{name}" for name in files_below("templates")}  # with names that begin with a dot
    assert any("starters" in name for name in data)
    assert data - names == set()


def test_wheel_has_the_command_the_licence_and_few_requirements(wheel: Path, names: set[str]) -> None:
    """The wheel has one console script and the licence's text and name; torch and the SDKs are extras."""
    info = next(name for name in names if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
    with zipfile.ZipFile(wheel) as archive:
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert "cloudtrain = cloudtrain.launcher.cli:main" in scripts
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["License-Expression"] == "Apache-2.0"
    base = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert not [need for need in base if need.lower().startswith(NEVER_IN_BASE)]


@pytest.mark.parametrize("module", STDLIB_ONLY)
def test_entrypoints_import_alone(wheel: Path, tmp_path: Path, module: str) -> None:
    """A node has only `cloudtrain/entrypoints` and Python: no torch, no launcher, no site-packages."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith("cloudtrain/entrypoints/")]
        archive.extractall(tmp_path, members)
    program = (
        "import sys\n"
        "class Forbid:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        ours = name.startswith('cloudtrain.') and not name.startswith('cloudtrain.entrypoints')\n"
        "        if ours or name.split('.')[0] in ('torch', 'numpy'): raise AssertionError(f'imports {name}')\n"
        f"sys.meta_path.insert(0, Forbid()); sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import cloudtrain.entrypoints.{module}"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_typings_links_exist_and_are_relative(folder: str) -> None:
    """Type checkers find `cloudtrain.*` through the links in every clone."""
    link = ROOT / "typings" / "cloudtrain" / folder
    assert str(link.readlink()) == f"../../{folder}"
    assert link.resolve() == ROOT / folder


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path, cli: Any) -> None:
    """With its base dependencies alone, the command prints help, starts a project, checks it and shows the request."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    options = ("--quiet", "--no-compile", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], check=True)
    absent = f"import importlib.util as u, sys; sys.exit(any(map(u.find_spec, {NEVER_IN_BASE!r})))"
    assert subprocess.run([python, "-c", absent], check=False).returncode == 0
    command = python.with_name("cloudtrain")
    runs = ("--help", "--version", "init new", "init --skill", "validate", "submit --dry-run")
    for args in map(str.split, runs):
        where = tmp_path / "new" if (tmp_path / "new").is_dir() else tmp_path
        done = subprocess.run([command, *args], cwd=where, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert '"nodes"' in done.stdout
