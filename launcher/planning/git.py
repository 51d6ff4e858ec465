"""All calls of git: no text of a repository can run a program.

git obeys the configuration of the folder's repository: monitors, hooks, filters and included files are commands. So git
gets a new repository with a plain configuration, and with the index, the objects and the refs of the user's repository.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 20.0
MOST_BYTES = 256 << 20  # of an index
# The settings that are taken over: the form of files and objects.
_PLAIN = re.compile(
    r"(core|extensions)\.(autocrlf|eol|filemode|ignorecase|precomposeunicode|symlinks|objectformat)\n([a-z0-9]{1,12})"
)
_ALWAYS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")


def state(folder: Path) -> dict[str, Any]:
    """Return the folder's commit and branch, and whether changes are uncommitted; empty without an answer from git."""
    with (
        contextlib.suppress(OSError, ValueError, subprocess.SubprocessError),
        _borrowed(folder.resolve()) as (top, environ),
    ):
        words = ["status", "--porcelain=v2", "--branch", "--ignore-submodules=all", "--", str(folder.resolve())]
        answer = _git(words, top, environ).splitlines()
        head = next((line.split()[-1] for line in answer if line.startswith("# branch.oid")), "")
        branch = next((line.split()[-1] for line in answer if line.startswith("# branch.head")), "")
        dirty = any(not line.startswith("#") for line in answer)
        return {"commit": head if head != "(initial)" else None, "branch": branch, "dirty": dirty}
    return {}


def _git(words: list[str], folder: Path | str, environ: dict[str, str]) -> str:
    """Return git's answer. Raises OSError, subprocess.SubprocessError."""
    return subprocess.run(
        ["git", *_ALWAYS, *words],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE_S,
        check=True,
    ).stdout


@contextlib.contextmanager
def _borrowed(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield the top of the work tree, and git's environment. Raises OSError outside a work tree."""
    top, own = _repository(folder)
    beside = own / "commondir"  # of a second work tree
    common = (own / _read(beside).decode().strip()).resolve() if beside.exists() else own
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    with tempfile.TemporaryDirectory(prefix="cloudtrain-git-") as name:
        made = Path(name)
        (made / "info").mkdir()
        shared = (common / each for each in ("packed-refs", "shallow", "info/exclude"))
        for source in (own / "HEAD", own / "index", *shared):
            if source.exists():
                copy = made / source.relative_to(own if source.is_relative_to(own) else common)
                copy.write_bytes(_read(source))
                shutil.copystat(source, copy)  # git compares the index's time with the files'
        for part in ("refs", "objects"):
            (made / part).symlink_to((common / part).resolve())
        (made / "theirs").write_bytes(_read(common / "config"))
        said = _git(["config", "--file", "theirs", "--no-includes", "--null", "--list"], made, environ)
        kept = (found for each in said.split("\0") if (found := _PLAIN.fullmatch(each)))
        lines = [f"[{found[1]}]\n{found[2]} = {found[3]}\n" for found in kept]
        (made / "config").write_text("[core]\nrepositoryformatversion = 1\n" + "".join(lines))
        yield top, {**environ, "GIT_DIR": name, "GIT_WORK_TREE": str(top)}


def _repository(folder: Path) -> tuple[Path, Path]:
    """Return the folder's work tree, and the tree's `.git`, also of a second work tree. Raises OSError."""
    for top in (folder, *folder.parents):
        own = top / ".git"
        if own.is_dir():
            return top, own
        if own.exists():
            return top, (top / _read(own).decode().removeprefix("gitdir:").strip()).resolve()
    raise FileNotFoundError(f"{folder} is in no work tree of git")


def _read(path: Path) -> bytes:
    """Return the bytes of a regular file of a bounded size. Raises OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise OSError(f"{path} is no file of git's")
        return file.read(MOST_BYTES)
