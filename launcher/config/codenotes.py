"""Notes of the plan on the code folder: missing modules, empty git submodules, unused lists of packages, lost files.

The notes on a script are guesses from the text of its file: a note is a warning, and refuses nothing.
"""

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
# A file that a script saves; a folder that outlives the node; an option that continues from a checkpoint.
_SAVES = re.compile(r"\b(?:torch\.save|save_file|save_pretrained|joblib\.dump|pickle\.dump|\w+\.save)\(")
_FOLDERS = re.compile(r"CLOUDTRAIN_(?:CHECKPOINT|OUTPUT)_DIR|\b(?:s3|gs|abfss?|https)://|SM_MODEL_DIR|AIP_\w+_DIR")
_RESUMES = re.compile(r"""["'](--?(?:resume|restore|continue|load|init|ckpt|checkpoint|snapshot)[\w-]*)["']""")
_JOINS = re.compile(
    r"distributed|process_group|accelerat|lightning|fabric|transformers|deepspeed|composer|horovod|\bray\b"
)


def notes_of(config: JobConfig, folder: Path) -> Iterator[str]:
    """Yield the notes on the code in `folder`, before the code is shipped."""
    yield from _submodules(folder)
    yield from _packages(config, folder)
    if config.script:
        yield from _script(config, config.script, _text(folder / config.script))
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


def _script(config: JobConfig, script: str, text: str) -> Iterator[str]:
    """Yield a note for files that are lost, for a missing `resume_args`, and for ranks that do not train together."""
    is_kept = any(not name.startswith("!") for name in config.keep)
    if _SAVES.search(text) and not (config.keep or config.outputs or _FOLDERS.search(text)):
        yield (
            f"{script} saves files, and `keep` is not set: files outside CLOUDTRAIN_CHECKPOINT_DIR are lost with the"
            " machines; name the files in `keep`"
        )
    if is_kept and not config.resume_args and (option := _RESUMES.search(text)):
        yield (
            f"{script} takes {option[1]}, and `resume_args` is not set: after a fault or a stop the script starts"
            " without this option: write the option in `resume_args`"
        )
    several = config.resources.instances > 1 or config.distributed.nproc_per_node not in ("auto", 1)
    if several and text and not config.distributed.allow_alone and not _JOINS.search(text):
        yield f"{script} does not name torch.distributed: each rank would train alone, on all of the data"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
