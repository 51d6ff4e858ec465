"""Conda environments, found and used without a shell and without conda itself."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .. import atomic_json, processes
from ..contract import PreparedEnvironment
from ..errors import Refused
from . import interpreter

ROOTS = ("miniconda3", "miniforge3", "mambaforge", "anaconda3", "micromamba", ".conda", "miniconda", "anaconda")
SYSTEM_ROOTS = ("/opt/conda", "/opt/miniconda3", "/opt/miniforge3", "/opt/anaconda3", "/usr/local/miniconda3")
PATIENCE_S = 60.0  # `conda info` takes seconds if its installation lies on a network share


def find(wanted: str) -> PreparedEnvironment:
    """Return the environment of this name or prefix. Raises Refused if unknown, ambiguous or without Python."""
    if "/" not in wanted and wanted != "~":
        prefix = _named(wanted)
    elif not _is_prefix(prefix := Path(wanted).expanduser().absolute()):
        raise Refused(f"{prefix} is no conda environment: it has no conda-meta folder; here are {_words(known(True))}")
    python = prefix / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise Refused(f"the conda environment {prefix} has no Python; `conda install -p {prefix} python` installs it")
    found = interpreter.probe(str(python))
    path = os.pathsep.join([str(prefix / "bin"), os.environ.get("PATH", os.defpath)])
    name = "base" if _is_root(prefix) else prefix.name if prefix.parent.name == "envs" else str(prefix)
    environment = {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": name, "CONDA_SHLVL": "1", "PATH": path}
    scripts = sorted(entry.name for entry in (prefix / "etc/conda/activate.d").glob("*.sh"))
    skipped = f"; not run, because no shell is used: activate.d/{', '.join(scripts)}" if scripts else ""
    state = atomic_json.read_json(prefix / "conda-meta" / "state")
    kept = state.get("env_vars", {}) if isinstance(state, dict) else {}
    # Of `conda env config vars set`; conda gives unset variables the value `***unset***`.
    variables = {key: str(value) for key, value in kept.items() if value != "***unset***"}
    detail = f"conda {name}: {found.words}{skipped}"
    return PreparedEnvironment(python=found.path, environment={**variables, **environment}, detail=detail)


def known(ask_conda: bool = False) -> list[Path]:
    """Return the prefixes of all environments found; asking conda itself costs seconds."""
    roots = [root for root in _roots() if _is_prefix(root)]
    listed: list[Path] = []
    with contextlib.suppress(OSError):
        lines = Path("~/.conda/environments.txt").expanduser().read_text().splitlines()
        listed = [Path(line.strip()) for line in lines]
    folders = [root / "envs" for root in _roots()]
    folders += [Path(place) for place in os.environ.get("CONDA_ENVS_PATH", "").split(os.pathsep) if place]
    for folder in folders:
        with contextlib.suppress(OSError):
            listed += sorted(folder.iterdir())
    if ask_conda:
        listed += _listed_by_conda()
    return list({prefix.resolve(): prefix for prefix in [*listed, *roots] if _is_prefix(prefix)}.values())


def _named(wanted: str) -> Path:
    for ask_conda in (False, True):
        prefixes = known(ask_conda)
        found = [prefix for prefix in prefixes if _name(prefix) == wanted]
        if len(found) > 1:
            raise Refused(f"there are several conda environments `{wanted}`; give the prefix: {_words(found)}")
        if found:
            return found[0]
    near = difflib.get_close_matches(wanted, [_name(prefix) for prefix in prefixes], 1)
    hint = f"did you mean `{near[0]}`? " if near else ""
    raise Refused(f"there is no conda environment `{wanted}`; {hint}here are {_words(prefixes)}")


def _roots() -> list[Path]:
    """Return possible installation folders of conda, the likeliest first."""
    roots = [Path(os.environ[name]).parent.parent for name in ("CONDA_EXE", "MAMBA_EXE") if name in os.environ]
    roots += [Path(os.environ[name]) for name in ("MAMBA_ROOT_PREFIX", "CONDA_ROOT") if name in os.environ]
    if tool := shutil.which("conda"):
        roots.append(Path(tool).resolve().parent.parent)
    roots += [Path.home() / name for name in ROOTS]
    return [*roots, *map(Path, SYSTEM_ROOTS)]


def _listed_by_conda() -> Iterator[Path]:
    tool = os.environ.get("CONDA_EXE") or shutil.which("conda") or shutil.which("mamba") or shutil.which("micromamba")
    tools = [tool] if tool else [str(root / "bin/conda") for root in _roots() if (root / "bin/conda").exists()]
    for path in tools:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired):
            command = [path, *(("env", "list") if "micromamba" in path else ("info",)), "--json"]
            answer = json.loads(processes.completed(command, PATIENCE_S).stdout)
            yield from [Path(prefix) for prefix in answer["envs"]]


def _is_prefix(folder: Path) -> bool:
    return (folder / "conda-meta").is_dir()


def _is_root(prefix: Path) -> bool:
    return (prefix / "condabin").is_dir() or (prefix / "bin" / "conda").exists()


def _name(prefix: Path) -> str:
    return "base" if _is_root(prefix) else prefix.name


def _words(prefixes: list[Path]) -> str:
    return ", ".join(f"`{_name(prefix)}` ({prefix})" for prefix in sorted(prefixes)) or "none to be found"
