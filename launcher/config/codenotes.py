"""Notes of the plan on the code folder: missing modules, empty git submodules, and unused lists of packages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.launcher.config.codefiles import is_in_code, is_installed

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

__all__ = ["notes_of"]

_SUBMODULE = re.compile(r"^\s*path\s*=\s*(.+?)\s*$", re.MULTILINE)
_HEADER = re.compile(r"^# /// script\s*$.*?^# dependencies\s*=.*?^# ///\s*$", re.MULTILINE | re.DOTALL)  # PEP 723


def notes_of(config: JobConfig, folder: Path) -> Iterator[str]:
    """Yield the notes on the code in `folder`, before the code is shipped."""
    yield from _submodules(folder)
    yield from _packages(config, folder)
    first = (config.module or "").partition(".")[0]
    if first and not is_in_code(folder, first) and not is_installed(first):
        yield f"module: `{first}` is neither in the code folder nor installed here; the nodes must have it"


def _submodules(folder: Path) -> Iterator[str]:
    """Yield a note for each git submodule in the folder that was not fetched: an empty folder."""
    top = next((each for each in (folder, *folder.resolve().parents) if (each / ".git").exists()), folder).resolve()
    for path in _SUBMODULE.findall(_text(top / ".gitmodules")):
        place = top / path
        if place.is_relative_to(folder.resolve()) and place.is_dir() and not any(place.iterdir()):
            yield f"code: the git submodule `{path}` is empty, and shipped so; git submodule update --init {path}"


def _packages(config: JobConfig, folder: Path) -> Iterator[str]:
    """Yield a note for each list of packages, in a file or in the header of the script, that no node installs."""
    own = getattr(config, config.backend, None)
    if config.requirements or getattr(own, "requirements", None) or any("install" in line for line in config.setup):
        return
    script = config.script or config.task
    if script and _HEADER.search(_text(folder / script)):
        yield f"the header of {script} lists packages, and nothing installs them: set `requirements: {script}`"
    beside = [Path(), *([Path(script).parent] if script else [])]
    found = next((name for each in beside if (folder / (name := each / "requirements.txt")).is_file()), None)
    if found is not None:
        yield f"nothing installs {found} on the nodes: set `requirements: {found}`"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
