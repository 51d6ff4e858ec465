"""Sources of a job's packages, refused sources, and copies of environments in a store."""

import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cloudtrain.entrypoints.environments import requirements, venvs
from cloudtrain.entrypoints.errors import Refused

PROJECT = """\
[project]
name = "My_Lib"
requires-python = ">=3.10"
dependencies = ["numpy>=2", "tiny[x]==1.0 ; python_version > '3'"]
[project.optional-dependencies]
train = ["accelerate"]
All = ["my-lib[train,Dev]", "numpy>=2"]
dev = ["my.lib[all]", "pytest"]
"""
SCRIPT = """\
#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "tiny==1.0",
#
#   "rich",  # tables
# ]
# ///
print("hello")
"""
UV = "[project]\ndependencies=['my-lib>=1','torch']\n[tool.uv.sources]\ntorch={{index='cu'}}\n{}={{path='l'}}"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return a code folder."""
    folder = tmp_path / "a code folder"
    (folder / "sub").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("wanted", "lines"),
    [
        ("sub/pyproject.toml", ["numpy>=2", "tiny[x]==1.0 ; python_version > '3'"]),
        ("sub/pyproject.toml[train]", ["numpy>=2", "tiny[x]==1.0 ; python_version > '3'", "accelerate"]),
        ("sub/pyproject.toml[ALL]", ["numpy>=2", "tiny[x]==1.0 ; python_version > '3'", "accelerate", "pytest"]),
    ],
)
def test_project_gives_its_dependencies_and_its_extras(code: Path, wanted: str, lines: list[str]) -> None:
    """Each package appears once; an extra may name extras of the same project, also in a circle."""
    (code / "sub" / "pyproject.toml").write_text(PROJECT)
    found = requirements.read(wanted, code)
    assert (found.text.splitlines(), found.folder, found.python) == (lines, code / "sub", ">=3.10")


def test_sources_of_torch_and_of_other_packages_are_no_matter(code: Path) -> None:
    """torch stays as the image has it, and a source of a package that nothing asks for is not used."""
    (code / "pyproject.toml").write_text(UV.format("c"))
    assert requirements.read("pyproject.toml", code).text == "my-lib>=1\ntorch\n"


def test_script_gives_the_packages_of_its_header(code: Path) -> None:
    """The header follows PEP 723, with the line ends of any system."""
    for ending in ("\n", "\r\n"):
        (code / "train.py").write_bytes(SCRIPT.replace("\n", ending).encode())
        assert requirements.read("train.py", code) == requirements.Requirements("tiny==1.0\nrich\n", code, ">=3.11")


def test_pip_file_is_passed_unchanged(code: Path) -> None:
    """Options and nested files are left to pip."""
    (code / "sub" / "reqs [1].txt").write_text("\ufeff--no-index\n-r more.txt\n", encoding="utf-8")
    assert requirements.read("sub/reqs [1].txt", code) == requirements.Requirements(
        "--no-index\n-r more.txt\n", code / "sub", file="reqs [1].txt"
    )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gone.txt", None, "no file `gone.txt`"),
        ("../outside.txt", "tiny", "outside the code folder"),
        ("a\0b.txt", None, "no file"),
        ("pyproject.toml", "[tool.poetry]", r"no table \[project\]"),
        ("pyproject.toml", "[project]\ndependencies = 'tiny'", "is not a list"),
        ("pyproject.toml", "[project\nx = 1", "not valid TOML.*line 1"),
        ("pyproject.toml", "[project]\ndynamic = ['dependencies']", "leaves `dependencies` to its build"),
        ("pyproject.toml[a]", "[project]\ndynamic = ['optional-dependencies']", "leaves `optional-dependencies`"),
        ("pyproject.toml[trian]", PROJECT, "no extra `trian`; did you mean `train`?"),
        ("pyproject.toml[g]", "[project]\n[dependency-groups]\ng=['a']", "a dependency group: `uv export.* --group g`"),
        ("pyproject.toml", "[tool.poetry.dependencies]\na='*'", "`poetry export"),
        ("pyproject.toml", UV.format("My_Lib"), r"where `My_Lib` comes from.*--no-editable --no-emit-project"),
        ("train.py", "# /// script\n# dependencies=['a']\n# [tool.uv.sources]\n# a={git='x'}\n# ///", "--script train"),
        ("pyproject.toml[]", "[project]", "no extra ``; known extras: none"),
        ("pyproject.toml", "[project]\ndependencies = ['--index-url=http://evil']", "not a requirement such as"),
        ("pyproject.toml", '[project]\ndependencies = ["a\\n-e ."]', "not a requirement such as"),
        ("pyproject.toml", "[project]\ndependencies = ['a\\']", "not a requirement such as"),
        ("pyproject.toml", "[project]\ndependencies = [1]", "not a requirement such as"),
        ("environment.yml", "dependencies: [numpy]", "a file of conda, and pip installs"),
        ("env/cuda.yaml", "dependencies: [numpy]", "a file of conda"),
        ("uv.lock", "version = 1", "uv export --no-emit-project -o requirements.txt"),
        ("pylock.toml", "lock-version = '1.0'", "export a requirements.txt from it"),
        ("pylock.train.toml", "lock-version = '1.0'", "a file of a lock"),
        ("poetry.lock", "", "poetry export"),
        ("Pipfile", "[packages]", "pipenv requirements"),
        ("setup.py", "import setuptools", r"setup: \[pip install \.\]"),
        ("train.py", "print()", "no header"),
        ("train.py", SCRIPT + SCRIPT, "several headers"),
    ],
)
def test_file_without_packages_is_refused(code: Path, name: str, text: str | None, words: str) -> None:
    """The message names the file, and a line that pip would take for an option is refused."""
    if text is not None:
        (code / requirements.split(name)[0]).parent.mkdir(exist_ok=True)
        (code / requirements.split(name)[0]).write_text(text)
    with pytest.raises(Refused, match=words):
        requirements.read(name, code)


def test_toml_is_read_without_the_standard_librarys_reader(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.10 has no TOML reader, but any pip brings one."""
    (code / "pyproject.toml").write_text("[project]\ndependencies = ['tiny']")
    monkeypatch.setattr(requirements, "_TOML", ("no_such_module", "pip._vendor.tomli"))
    assert requirements.read("pyproject.toml", code).text == "tiny\n"
    monkeypatch.setattr(requirements, "_TOML", ("no_such_module",))
    with pytest.raises(Refused, match=r"Python 3\.10 needs pip"):
        requirements.read("pyproject.toml", code)


def test_check_reads_nested_files_and_hashes_none(code: Path) -> None:
    """The check before the submit reads no large wheels."""
    (code / "more.txt").write_text("-e .\n")
    with pytest.raises(Refused, match="outlives its folder"):
        venvs.check("-r more.txt", code)
    (code / "wheels").mkdir()
    (code / "wheels" / "large.whl").symlink_to("/dev/zero")
    assert venvs.check("--find-links wheels", code) == {code.resolve() / "wheels"}


def test_paths_start_where_pip_starts_them(code: Path) -> None:
    """Files of requirements at the file that names them, packages where pip runs, wheels' folders at either."""
    (code / "sub/near").mkdir(parents=True)
    for name in ("near", "a", "b"):
        (code / name).mkdir()
    (code / "sub/more.txt").write_text("./a ; python_version > '3'\n-f near\n--find-links=b\r\n-c limits.txt\n")
    (code / "sub/limits.txt").write_text("x==1 \\\r\n  --hash=sha256:0\r\n")
    names = ("sub/more.txt", "a", "sub/near", "b", "sub/limits.txt")
    assert venvs.check("-r sub/more.txt\n-f ${WHEELS}/x", code) == {code.resolve() / name for name in names}


def test_copy_of_an_environment_is_restored_in_place(tmp_path: Path) -> None:
    """Links and modes are kept too; a store without a copy prints no message."""
    place, store = tmp_path / "env" / "k1", str(tmp_path / "store")
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").symlink_to(sys.executable)
    (place / "bin" / "tool").write_text("#!/bin/sh\n")
    (place / "bin" / "tool").chmod(0o755)
    (place / venvs.MARK).write_text("{}")
    venvs.fetch_copy(store, place)
    venvs.put_copy(store, place)
    with tarfile.open(tmp_path / "store" / "k1.tar") as archive:
        assert archive.getnames()[-1] == venvs.MARK
    for path in (place / "bin" / "tool", place / venvs.MARK):
        path.unlink()
    venvs.fetch_copy(store, place)
    assert (place / venvs.MARK).exists()
    assert (place / "bin" / "python").readlink() == Path(sys.executable)
    assert stat.S_IMODE((place / "bin" / "tool").stat().st_mode) == 0o755
    assert sorted(os.listdir(place.parent)) == ["k1"]


def test_unusable_store_is_reported_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged copy, a copy with a path outside, and a place of an unknown kind are skipped."""
    place, store = tmp_path / "env" / "k1", tmp_path / "store"
    for folder in (place, store):
        folder.mkdir(parents=True)
    (store / "k1.tar").write_text("damaged")
    venvs.fetch_copy(str(store), place)
    outside = tarfile.TarInfo("../../outside")
    with tarfile.open(store / "k1.tar", "w") as archive:
        archive.addfile(outside)
    venvs.fetch_copy(str(store), place)
    venvs.fetch_copy("nfs://x", place)
    venvs.put_copy("nfs://x", place)
    said = capsys.readouterr().out
    assert said.count("the copy cannot be read, so the environment is built") == 3
    assert "cannot be kept for later jobs" in said
    assert not (tmp_path / "outside").exists()
    assert sorted(os.listdir(place.parent)) == ["k1"]


def test_apart_shows_torch_and_its_requirements_only(tmp_path: Path) -> None:
    """A package that torch does not require is hidden, even if this interpreter has the package."""
    folder = venvs.lay_out(tmp_path / "shown")
    program = (
        f"import sys; sys.path.append({folder!r}); import sympy, pip, importlib.util as u; print(u.find_spec(NAME))"
    )
    for name, is_there in (("torch", True), ("pydantic", False)):
        asked = program.replace("NAME", repr(name))
        done = subprocess.run([sys.executable, "-I", "-S", "-c", asked], capture_output=True, text=True, check=True)
        assert (done.stdout.strip() != "None") is is_there
