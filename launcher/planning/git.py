"""All calls of git: no text of a repository can run a program.

git obeys the configuration of the folder's repository: monitors, hooks, filters and included files are commands. So git
gets a new repository with a plain configuration, and with the index, the objects and the refs of the user's repository.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import foreign, processes

PATIENCE_S = 20.0
MOST_BYTES = 64 << 20  # of an index: some 600,000 files
# The settings that are taken over: the form of files and objects.
_PLAIN = re.compile(
    r"(core|extensions|status)\.(autocrlf|eol|filemode|ignorecase|precomposeunicode|symlinks|objectformat"
    r"|showuntrackedfiles)\n([a-z0-9]{1,12})"
)
_HARMLESS = re.compile(r"extensions\.(objectformat|worktreeconfig|partialclone|noop|relativeworktrees)\n.*", re.DOTALL)
_OF_USER = {"GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"}
_ENVIRONMENT = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_LITERAL_PATHSPECS": "1",
    "GIT_ALLOC_LIMIT": "256m",  # a small object can be a large tree
}
_ALWAYS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
_PATTERNS = "core.excludesfile\n"
_SUBMODULE = "160000 "  # the mode in an index
_UNANSWERED = (OSError, RuntimeError, ValueError, subprocess.SubprocessError)


def state(folder: Path) -> dict[str, Any]:
    """Return the folder's commit and branch, and whether changes are uncommitted; empty without an answer from git.

    A filter of the repository's own does not run, so a file that was touched since may count as changed.
    """
    with contextlib.suppress(*_UNANSWERED), _borrowed(folder, reads_refs=True) as (folder, top, environ):
        words = ["status", "--porcelain=v2", "--branch", "--no-renames", "--ignore-submodules=dirty", "--", str(folder)]
        answer = _git(words, top, environ).splitlines()
        head = next((line.split()[-1] for line in answer if line.startswith("# branch.oid")), "")
        branch = next((line.split()[-1] for line in answer if line.startswith("# branch.head")), "")
        if not head or branch == "(unknown)":
            return {}
        dirty = any(not line.startswith("#") for line in answer)
        if not dirty and (top / ".gitmodules").exists():
            listed = _git(["ls-files", "--stage", "-z", "--", str(folder)], top, environ).split("\0")
            inside = [top / line.partition("\t")[2] for line in listed if line.startswith(_SUBMODULE)]
            dirty = any((each / ".git").exists() and state(each).get("dirty", True) for each in inside)
        return {"commit": head if head != "(initial)" else None, "branch": branch, "dirty": dirty}
    return {}


def tracked_and_ignored(folder: Path) -> tuple[list[str], set[str]] | None:
    """Return the tracked files below the folder, and what git leaves out, folders with a slash at their end.

    All of git's rules count, wherever they are kept. None without an answer from git: outside a work tree, or where git
    leaves out the folder itself.
    """
    with contextlib.suppress(*_UNANSWERED), _borrowed(folder, reads_refs=False) as (folder, _, environ):
        tracked = _git(["ls-files", "-z"], folder, environ).split("\0")
        ask = ["ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory"]
        ignored = set(_git(ask, folder, environ).split("\0")) - {""}
        return None if "./" in ignored else (tracked[:-1], ignored)
    return None


def _git(words: list[str], folder: Path, environ: dict[str, str]) -> str:
    """Return git's answer. Raises OSError, subprocess.SubprocessError."""
    places = [place for place in os.get_exec_path() if Path(place).is_absolute()]  # never a program of the folder's
    program = shutil.which("git", path=os.pathsep.join(places))
    if program is None:
        raise FileNotFoundError("git is not installed")
    argv = [program, "-C", str(folder), *_ALWAYS, *words]
    done = processes.completed(argv, PATIENCE_S, env=environ, errors="surrogateescape")
    done.check_returncode()
    return done.stdout


@contextlib.contextmanager
def _borrowed(folder: Path, *, reads_refs: bool) -> Iterator[tuple[Path, Path, dict[str, str]]]:
    """Yield the resolved folder, its work tree's top, and git's environment. Raises OSError outside a work tree."""
    folder = folder.resolve()
    top, own = _repository(folder)
    beside = own / "commondir"  # of a second work tree
    common = (own / foreign.read(beside).decode().strip()).resolve() if beside.exists() else own
    kept = {name: value for name, value in os.environ.items() if name in _OF_USER or not name.startswith("GIT_")}
    environ = {**kept, **_ENVIRONMENT}
    with tempfile.TemporaryDirectory(prefix="cloudtrain-git-") as name:
        made = Path(name)
        (made / "info").mkdir()
        shared = (common / each for each in ("packed-refs", "shallow", "info/exclude", "info/attributes"))
        for source in (own / "HEAD", own / "index", *own.glob("sharedindex.*"), *shared):
            if source.exists():
                copy = made / source.relative_to(own if source.is_relative_to(own) else common)
                copy.write_bytes(foreign.read(source, MOST_BYTES))
                shutil.copystat(source, copy)  # git compares the index's time with the files'
        for part in ("refs", "objects"):
            (made / part).symlink_to((common / part).resolve())
        (made / "theirs").write_bytes(foreign.read(common / "config", MOST_BYTES))
        said = _git(["config", "--file", "theirs", "--no-includes", "--null", "--list"], made, environ)
        settings = said.split("\0")
        strange = [each for each in settings if each.startswith("extensions.") and not _HARMLESS.fullmatch(each)]
        if strange and reads_refs:
            raise ValueError(f"a repository of another form: {strange[0]}")  # refs in a table, as an example
        lines = [f"[{found[1]}]\n{found[2]} = {found[3]}\n" for each in settings if (found := _PLAIN.fullmatch(each))]
        if named := [each[len(_PATTERNS) :] for each in settings if each.startswith(_PATTERNS)]:
            path = top / Path(named[-1]).expanduser()  # in the place of the user's own file of patterns
            (made / "patterns").write_bytes(foreign.read(path) if path.is_file() else b"")
            lines.append(f'[core]\nexcludesFile = "{made}/patterns"\n')
        (made / "config").write_text("[core]\nrepositoryformatversion = 1\n" + "".join(lines))
        yield folder, top, {**environ, "GIT_DIR": name, "GIT_WORK_TREE": str(top)}


def _repository(folder: Path) -> tuple[Path, Path]:
    """Return the folder's work tree, and the tree's `.git`, also of a second work tree. Raises OSError."""
    for top in (folder, *folder.parents):
        own = top / ".git"
        if own.is_dir():
            return top, own
        if own.exists():
            return top, (top / foreign.read(own).decode().removeprefix("gitdir:").strip()).resolve()
    raise FileNotFoundError(f"{folder} is in no work tree of git")
