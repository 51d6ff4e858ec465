"""The environment of a job on the user's own host: an interpreter, a venv, a conda environment, a container.

`prepare` is called on each host before the job starts; the node's agent needs the result to start boot.
"""

from __future__ import annotations

import time
from typing import Any

from cloudtrain.entrypoints.environments import interpreter
from cloudtrain.entrypoints.errors import Refused

__all__ = ["KINDS", "prepare", "progress"]

KINDS = ("none", "venv", "conda", "docker", "podman")


def prepare(**ask: Any) -> dict[str, Any]:
    """Prepare the job's environment; return how the agent starts Python in it.

    Asked: `kind`, `python` (to run, to build the venv with, or inside the image), `requirements` (the file's text or
    None), `requirements_folder` (of that file, below `code`), `system_site_packages`, `conda` (name or prefix), `image`
    (by digest), `gpus` (UUIDs, for a container's trial), `workdir`, `code` (the unpacked code or None), `limit_s`.
    Answered: `python` (absolute path), `environment` (variables), `container` (for dockerrun.command, or None), `lock`
    (for venvs.hold, or None), `detail` (words), `seconds`. Raises Refused.
    """
    started_s = time.monotonic()
    kind = ask["kind"]
    made: dict[str, Any] = {"python": None, "environment": {}, "container": None, "lock": None}
    if kind == "none":
        found = interpreter.find(ask["python"])
        made |= {"python": found.path, "detail": found.words}
    elif kind == "venv":
        from cloudtrain.entrypoints.environments import venvs

        made |= venvs.build(ask)
    elif kind == "conda":
        from cloudtrain.entrypoints.environments import condaenvs

        made |= condaenvs.find(ask["conda"])
    elif kind in ("docker", "podman"):
        from cloudtrain.entrypoints.environments import images

        made |= images.ready(ask)
    else:
        raise Refused(f"no environment `{kind}` is known; choose one of {', '.join(KINDS)}")
    return {**made, "seconds": round(time.monotonic() - started_s, 3)}


def progress(**ask: Any) -> dict[str, Any]:
    """Return the last line of a `prepare` with the same `ask` that still runs in another process: `line`."""
    if ask["kind"] == "venv":
        from cloudtrain.entrypoints.environments import venvs

        return {"line": venvs.last_line(ask)}
    if ask["kind"] in ("docker", "podman"):
        from cloudtrain.entrypoints.environments import images

        return {"line": images.last_line(ask)}
    return {"line": None}
