"""The few packages of this interpreter that a rehearsal's environment sees: torch, torch's requirements, numpy, pip.

An image with torch holds the same packages. So an import that the requirements lack fails in the rehearsal.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

__all__ = ["SEEN", "lay_out"]

SEEN = ("torch", "numpy", "pip", "setuptools")


def lay_out(folder: Path) -> str:
    """Make a folder of links to the packages' files; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting, seen = list(SEEN), set[str]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).is_symlink():
                (folder / top).symlink_to(Path(str(found.locate_file(top))).absolute())
        named = (re.match(r"[\w.-]+", line) for line in found.requires or () if "extra ==" not in line)
        waiting += [match[0] for match in named if match]
    return str(folder)
