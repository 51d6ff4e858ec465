"""git on a repository that is somebody else's: no command of the repository runs, and its state is still known."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.launcher import cli as command_line
from cloudtrain.launcher.planning import git

YAML = "name: x\nscript: train.py\nbackend: local\ncode: {dir: src}\n"


class Place:
    """A repository with one commit of `src`, whose author adds commands that leave a canary."""

    def __init__(self, top: Path) -> None:
        self.top, self.canary = top / "work", top / "canary"
        self.command = f"touch {self.canary}; false"
        self.write("src/train.py", "print('step 1/1')\n")
        self.write("cloudtrain.yaml", YAML)
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()

    def write(self, name: str, text: str) -> Path:
        """Write a file of the work tree."""
        path = self.top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def git(self, *words: str) -> str:
        """Run git as the author."""
        own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        who = {f"GIT_{role}_{part}": "a" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
        command = ["git", "-C", str(self.top), *words]
        return subprocess.run(command, env=os.environ | own | who, check=True, capture_output=True, text=True).stdout

    def commit(self) -> None:
        """Commit all files."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "x")

    def script(self, path: Path) -> None:
        """Make the file a program that leaves the canary."""
        path.write_text(f"#!/bin/sh\ntouch {self.canary}\n")
        path.chmod(0o755)


def monitor(place: Place) -> None:
    """A file system monitor."""
    place.git("config", "core.fsmonitor", place.command)


def hooks(place: Place) -> None:
    """All hooks, in their own folder and in a folder of the work tree."""
    names = ("post-index-change", "fsmonitor-watchman", "post-checkout", "pre-commit", "reference-transaction")
    for name in names:
        place.script(place.top / ".git" / "hooks" / name)
    place.git("config", "core.fsmonitor", ".git/hooks/fsmonitor-watchman")
    place.git("config", "core.hooksPath", "hooks")


def filters(place: Place) -> None:
    """A filter that git asks about a changed file."""
    place.write(".gitattributes", "* filter=own\n")
    place.commit()
    for key in ("clean", "smudge", "process"):
        place.git("config", f"filter.own.{key}", place.command)
    place.write("src/train.py", "print('step 2/2')\n")


def textconv(place: Place) -> None:
    """Programs that show differences."""
    place.write(".gitattributes", "* diff=own\n")
    place.git("config", "diff.own.textconv", place.command)
    place.git("config", "diff.external", place.command)


def pager(place: Place) -> None:
    """A pager for each command, an editor, and a program that asks for passwords."""
    for key in ("core.pager", "pager.status", "core.editor", "core.askPass", "core.sshCommand", "gpg.program"):
        place.git("config", key, place.command)


def alias(place: Place) -> None:
    """An alias of the command that git is asked for."""
    place.git("config", "alias.status", f"!{place.command}")


def included(place: Place) -> None:
    """A configuration that another file of the work tree completes."""
    place.write("more", f'[core]\n\tfsmonitor = "{place.command}"\n')
    place.git("config", "include.path", str(place.top / "more"))
    place.git("config", f"includeIf.gitdir:{place.top}/.path", str(place.top / "more"))


def bare(place: Place) -> None:
    """A repository without a `.git`, in ordinary files of the code folder."""
    form = "repositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n\tworktree = ../src"
    place.write("src/HEAD", "ref: refs/heads/main\n")
    place.write("src/config", f'[core]\n\t{form}\n\tfsmonitor = "{place.command}"\n')
    for name in ("src/objects/.keep", "src/refs/.keep"):
        place.write(name, "")
    place.commit()


def worktree(place: Place) -> None:
    """A second work tree with a configuration of its own."""
    place.git("worktree", "add", "--quiet", str(place.top.parent / "second"))
    place.git("config", "extensions.worktreeConfig", "true")
    place.top = place.top.parent / "second"
    place.git("config", "--worktree", "core.fsmonitor", place.command)


def submodule(place: Place) -> None:
    """A repository inside, whose own configuration has a monitor, and an address that is a command."""
    inner = Place(place.top / "src" / "inner")
    place.git("config", "protocol.ext.allow", "always")
    url = f"ext::sh -c {place.command.replace(' ', '% ')}"
    place.write(
        ".gitmodules", f'[submodule "x"]\n\tpath = src/inner/work\n\turl = "{url}"\n\tupdate = !{place.command}\n'
    )
    place.commit()
    inner.git("config", "core.fsmonitor", place.command)


def alternates(place: Place) -> None:
    """Objects of another repository, and a program that lists its refs."""
    other = Place(place.top.parent / "other")
    place.write(".git/objects/info/alternates", f"{other.top}/.git/objects\n")
    place.git("config", "core.alternateRefsCommand", place.command)


def pointed(place: Place) -> None:
    """A `.git` that is a file and names a folder of the work tree, with a monitor."""
    (place.top / ".git").rename(place.top / "real")
    place.write(".git", "gitdir: real\n")
    place.git("config", "core.fsmonitor", place.command)


HOSTILE = (monitor, hooks, filters, textconv, pager, alias, included, bare, worktree, submodule, alternates, pointed)


@pytest.mark.parametrize("spoil", HOSTILE, ids=lambda spoil: spoil.__name__)
def test_command_of_a_repository_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path, spoil: Callable[[Place], None]
) -> None:
    """All commands before a send leave no canary, and still name the commit."""
    place = Place(tmp_path)
    spoil(place)
    place.canary.unlink(missing_ok=True)
    monkeypatch.chdir(place.top)
    for words in (("validate",), ("plan",), ("submit", "--dry-run"), ("explain", "code.dir"), ("doctor",)):
        command_line._run(list(words), debug=False, as_json=False)
        assert not place.canary.exists(), words
    commit = place.git("-c", "core.fsmonitor=false", "rev-parse", "HEAD").strip()
    assert git.state(place.top / "src")["commit"] == commit
    assert not place.canary.exists()


def test_state_is_gits(tmp_path: Path) -> None:
    """Commit, branch and changes below the folder, by the ignore rules and the line ends that the repository keeps."""
    place = Place(tmp_path)
    clean = {"commit": place.git("rev-parse", "HEAD").strip(), "branch": "main", "dirty": False}
    assert git.state(place.top / "src") == clean
    place.write("notes", "x")  # beside the code
    place.write("src/data.log", "x")
    place.write(".git/info/exclude", "*.log\n")
    assert git.state(place.top / "src") == clean
    place.git("config", "core.autocrlf", "true")
    place.write("src/lines.py", "one\r\n")
    place.commit()
    place.write("src/lines.py", "one\r\n")  # another time: git reads it again
    clean["commit"] = place.git("rev-parse", "HEAD").strip()
    assert git.state(place.top / "src") == clean
    place.write("src/new.py", "x")
    assert git.state(place.top / "src") == {**clean, "dirty": True}
    place.git("checkout", "--quiet", "--detach")
    assert git.state(place.top / "src")["branch"] == "(detached)"
    assert git.state(tmp_path) == {}


@pytest.mark.parametrize("name", ["HEAD", "index", "config", "packed-refs"])
def test_file_that_is_no_file_is_no_answer(tmp_path: Path, name: str) -> None:
    """A pipe in the place of a file of git's is not waited for."""
    place = Place(tmp_path)
    path = place.top / ".git" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert git.state(place.top / "src") == {}


def test_program_of_the_folder_is_not_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative part of PATH, empty too, means the current folder, whose `git` may be anybody's."""
    place = Place(tmp_path)
    place.script(place.top / "git")
    monkeypatch.chdir(place.top)
    monkeypatch.setenv("PATH", f"{os.pathsep}.{os.pathsep}{os.environ['PATH']}")
    assert git.state(place.top / "src")["branch"] == "main"
    assert not place.canary.exists()


def test_changed_submodule_is_a_change(tmp_path: Path) -> None:
    """Its files are shipped: a change of its files counts, as does another commit."""
    inner, place = Place(tmp_path / "lib"), Place(tmp_path)
    place.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner.top), "src/lib")
    place.commit()
    assert git.state(place.top / "src")["dirty"] is False
    place.write("src/lib/cloudtrain.yaml", "other")
    assert git.state(place.top / "src")["dirty"] is True


@pytest.mark.parametrize("name", [".git", ".git/refs"])
def test_loop_of_links_is_no_answer(tmp_path: Path, name: str) -> None:
    """A link that leads to itself is not followed for ever."""
    place = Place(tmp_path)
    path = place.top / name
    if path.is_dir():
        path.rename(tmp_path / "before")
    path.symlink_to(path.name)
    assert git.state(place.top / "src") == {}


def test_repository_of_another_form_is_no_answer(tmp_path: Path) -> None:
    """Refs in a table are not read, and a missing ref is no branch."""
    place = Place(tmp_path)
    place.git("config", "extensions.refstorage", "reftable")
    assert git.state(place.top / "src") == {}
