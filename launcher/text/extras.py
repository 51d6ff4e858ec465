"""The command that installs an extra of this package, which depends on where the package came from."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def install(extra: str) -> str:
    """Return the pip command for an extra: from the index, the folder, the file or the repository of the package.

    Source of the origin: PEP 610, direct_url.json beside the package's metadata; an index leaves no such file.
    """
    origin = _origin()
    url = str(origin.get("url") or "")
    folder = Path(unquote(urlsplit(url).path))
    if "dir_info" in origin and folder.is_dir():
        editable = "-e " if origin["dir_info"].get("editable") else ""
        place = "." if folder == Path.cwd() else str(folder)
        return f"pip install {editable}{shlex.quote(f'{place}[{extra}]')}"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    wanted = f"cloudtrain[{extra}]" + (f" @ {url}" if url and "dir_info" not in origin else "")
    return f"pip install {shlex.quote(wanted)}"


def _origin() -> dict[str, Any]:
    """Return the content of direct_url.json; empty for a package from an index, and for a damaged file."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = json.loads(distribution("cloudtrain").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
