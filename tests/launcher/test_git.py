"""git on a repository that is somebody else's: no command of the repository runs, and its state is still known."""

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cloudtrain.launcher import cli as command_line
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.config.codefiles import needed
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.planning import git
from cloudtrain.launcher.planning.bundle import pack
from cloudtrain.launcher.planning.prepare import require_a_plan
from cloudtrain.launcher.planning.shipped import collect

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
    place.write(".gitignore", "src/\n")
    assert git.tracked_and_ignored(place.top / "src") == (["train.py"], set())


def test_last_file_of_patterns_counts_in_place_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """core.excludesFile of the repository, given twice, and of the user's own configuration."""
    place = Place(tmp_path)
    (tmp_path / "own").write_text(f"[core]\nexcludesFile = {place.write('one', '*.one')}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "own"))
    for name in ("a.one", "b.two", "c.three"):
        place.write(f"src/{name}", "")
    assert git.tracked_and_ignored(place.top / "src") == (["train.py"], {"a.one"})
    for name in ("two", "three"):
        place.git("config", "--add", "core.excludesFile", str(place.write(name, f"*.{name}")))
    assert git.tracked_and_ignored(place.top / "src") == (["train.py"], {"c.three"})


def _repository(folder: Path, files: dict[str, str], tracked: Sequence[str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run(["git", "-C", folder, "add", "-f", *tracked], check=True)
    return folder


@pytest.mark.parametrize(
    ("files", "tracked", "exclude", "shipped"),
    [
        ({".gitignore": "data/\n", "src/data/a.py": "", "data/big.bin": ""}, ["src/data/a.py"], [], ["src/data/a.py"]),
        ({"venv/tool.py": "", "venv/lib.py": ""}, ["venv/tool.py"], [], ["venv/tool.py"]),
        ({"x/__pycache__/a.py": "", "node_modules/b.js": "", "c.py": ""}, ["c.py"], [], ["c.py"]),
        ({".git/info/exclude": "*.log\n", "a.log": "", "b.py": ""}, ["b.py"], [], ["b.py"]),
        ({"mine": "*.log\n", "a.log": "", "b.py": ""}, ["b.py", "mine"], [], ["b.py", "mine"]),
        ({".gitignore": "*.bin\n", "a.bin": "", "b.bin": ""}, [".gitignore"], ["!a.bin"], ["a.bin"]),
        ({".gitignore": "data/\n", "data/x/a.csv": "", "data/b.csv": ""}, [], ["!data/x/a.csv"], ["data/x/a.csv"]),
        ({".cloudtrainignore": "!data/\n", ".gitignore": "data/\n", "data/a": ""}, [], [], ["data/a"]),
        ({".cloudtrainignore": "a.py\n", "a.py": "", "b.py": ""}, ["a.py", "b.py"], [], ["b.py"]),
        ({"a.py": "", "b.py": ""}, ["a.py", "b.py"], ["a.py"], ["b.py"]),
        ({".gitignore": "*.pt\n", "lib/w.pt": "", "lib/.gitignore": "!w.pt\n"}, [], [], ["lib/w.pt"]),
        ({".gitignore": "d/\n", "d/x/a": "", "d/b": "", ".cloudtrainignore": "!d/x/a\n"}, [], [], ["d/x/a"]),
        ({".gitignore": "d/*\n", "d/x/a": "", "d/b": "", ".cloudtrainignore": "!d/x/\n"}, [], [], ["d/x/a"]),
        ({".gitignore": "d/\n", "d/x/a.csv": "", "d/b.bin": ""}, [], ["!d/**/*.csv"], ["d/x/a.csv"]),
        ({".gitignore": "d/\n", "d/a": "", "d/b": "", "e/c": "", "f": ""}, [], ["!./d/a", "./e"], ["d/a", "f"]),
        ({".gitignore": "*.log\n", "d/caf\udce9.log": "", "f": ""}, [], [], ["f"]),
    ],
)
def test_code_is_what_git_has_or_would_add(
    tmp_path: Path, files: dict[str, str], tracked: list[str], exclude: list[str], shipped: list[str]
) -> None:
    """A tracked file is never left out by git's rules, and all places of rules count; `!path` brings a file back."""
    folder = _repository(tmp_path, files, tracked)
    if "mine" in files:
        subprocess.run(["git", "-C", folder, "config", "core.excludesFile", folder / "mine"], check=True)
    else:
        (folder / ".git/info/exclude").write_text(files.get(".git/info/exclude", ""))
    found = [name for name in collect(folder, exclude) if not name.startswith(".") and "/." not in name]
    assert found == shipped


def test_parts_of_a_repository_and_repositories_inside_have_their_own_rules(tmp_path: Path) -> None:
    """A folder below the top, one that git leaves out, a clone inside, and a folder outside of any work tree."""
    files = {".gitignore": "build/\n*.bin\n", "src/a.py": "", "src/b.bin": "", "build/c.py": "", "build/d.bin": ""}
    _repository(tmp_path / "top", files, ["src/a.py"])
    inside = {".gitignore": "e.py\n", "e.py": "", "f.py": "", "g.bin": ""}
    _repository(tmp_path / "top/src/inside", inside, ["e.py"])
    assert collect(tmp_path / "top/src") == [
        "a.py",
        *(f"inside/{name}" for name in (".gitignore", "e.py", "f.py", "g.bin")),
    ]
    assert collect(tmp_path / "top/build") == ["c.py", "d.bin"]
    (tmp_path / "top/build/.gitignore").write_text("*.bin\n")
    for lines in ("build/\n", "*\n"):  # a home folder under git has `*`
        (tmp_path / "top/.gitignore").write_text(lines)
        (tmp_path / "top/build/sub").mkdir(exist_ok=True)
        (tmp_path / "top/build/sub/e.bin").touch()
        assert collect(tmp_path / "top/build") == [".gitignore", "c.py"], lines
    (tmp_path / "bare").mkdir()
    for name, text in files.items():
        (tmp_path / "bare" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bare" / name).write_text(text)
    assert collect(tmp_path / "bare") == [".gitignore", "src/a.py"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("w.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "code: w.pt: a pointer of Git LFS"),
        ("install.sh", b"set -e\r\npip install x\r\n", "code: install.sh: a shell script with Windows line ends"),
        ("run", b"#!/usr/bin/env bash\r\n", "code: run: a shell script with Windows line ends"),
        ("run", b"#!/bin/sh\necho\r\n", "code: run: a shell script with Windows line ends"),
        ("setup.bash", b"echo\r\n", "code: setup.bash: a shell script with Windows line ends"),
        ("run", b"\xef\xbb\xbf#!/bin/sh\n", "code: run: a shell script with the mark of a Windows editor"),
        ("a.sh", "echo\n".encode("utf-16"), "code: a.sh: a shell script with the mark of a Windows editor"),
        ("a.py", b"import os\r\n", ""),
        ("b.sh", b"echo\n", ""),
    ],
)
def test_file_that_is_no_use_on_a_node_is_noted(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    """Pointers of Git LFS, and shell scripts with CRLF or a mark; the file is shipped as it is."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / name).write_bytes(data)
    made = pack(tmp_path / "code", [], 10**6, tmp_path / "bundles")
    assert [note[: len(words)] for note in made.notes] == [words] * bool(words)


def test_line_without_effect_and_an_answer_without_git_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`!name` reaches into no folder that is left out; without git a tracked file can be left out."""
    files = {".gitignore": "out/\n", "out/a.pt": "", "b.pt": "", "src/c.py": ""}
    folder = _repository(tmp_path / "code", files, ["out/a.pt"])
    made = pack(folder, ["*.pt", "!b.pt", "!c.pt", "!out/a.pt", "!./src"], 10**6, tmp_path / "bundles")
    (note,) = made.notes
    assert note.startswith("code.exclude: `!c.pt` brings no file back")
    assert made.files == 4
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pack(folder, [], 10**6, tmp_path / "bundles").notes == (
        "code: git does not answer here, so .gitignore files leave out tracked files too",
    )


@pytest.mark.parametrize(
    ("ignored", "key", "name", "more"),
    [
        ("train.py", "script", "train.py", ""),
        ("exp/", "script", "exp/train.py", ""),
        ("pkg/", "module", "pkg.train", ""),
        ("r.txt", "script", "train.py", "requirements: r.txt"),
        ("more.txt", "script", "train.py", "requirements: r.txt"),  # `-r more.txt`
        ("lib/", "script", "train.py", "requirements: r.txt"),  # `./lib`, a package
        ("acc.yaml", "script", "train.py", "distributed: {accelerate_config: acc.yaml}"),
        ("more.txt", "script", "train.py", "ssh: {hosts: [a], environment: venv, requirements: r.txt}\nbackend: ssh"),
        ("none", "script", "link/train.py", ""),
    ],
)
def test_file_that_the_config_names_is_shipped_or_refused(
    tmp_path: Path, ignored: str, key: str, name: str, more: str
) -> None:
    """A script that git ignores would be missed by the ranks alone, after the machines are paid for."""
    names = ("train.py", "exp/train.py", "pkg/train.py", "r.txt", "more.txt", "lib/setup.py", "acc.yaml")
    files = {**dict.fromkeys(names, ""), "r.txt": "-r more.txt\n./lib\n", ".gitignore": f"{ignored}\n"}
    files["acc.yaml"] = "distributed_type: MULTI_CPU\n"
    folder = _repository(tmp_path, files, [".gitignore"])
    config = folder / "cloudtrain.yaml"
    config.write_text(f"name: x\n{key}: {name}\n{more}\n")
    if ignored == "none":
        (folder / "link").symlink_to("exp")
        return require_a_plan(configs.load(config), config)
    with pytest.raises(ConfigError) as refused:
        require_a_plan(configs.load(config), config)
    (fault,) = refused.value.faults
    assert "is not shipped" in fault.message
    path = fault.message.split("`")[1]
    assert fault.hint == f"add `!{path}` to `code.exclude`, or change the ignore file or the input that names it"
    assert path.startswith(ignored.rstrip("/"))
    config.write_text(config.read_text() + f"code: {{exclude: ['!{path}']}}\n")
    return require_a_plan(configs.load(config), config)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("[--data, data/x.csv, --out, old.bin]", ["data/x.csv"]),
        ("{data_dir: data, output_dir: data, log: old.bin, workers: 4, name: data}", ["data"]),
        ("['model.ckpt=old.bin', train.py, /etc/hosts, ../up, gone.csv, data]", ["old.bin"]),
        ("[--ckpt, old.bin]\nkeep: [old.bin]", []),
        ("[--input, $CLOUDTRAIN_INPUT_X]\ninputs: {x: ./data}", []),
        ("[--lr, 1]", ["in"]),  # the script's own default
    ],
)
def test_argument_that_names_a_file_left_out_is_noted(tmp_path: Path, args: str, named: list[str]) -> None:
    """A file that the script is told to read exists here, and is on no node; what it writes is no matter."""
    script = "p.add_argument('--input', type=str,\n  default='in')" if "in" in named or "--input" in args else ""
    files = {"train.py": script, "data/x.csv": "", "in/x.csv": "", "old.bin": "", ".gitignore": "data/\nin/\n*.bin\n"}
    folder = _repository(tmp_path, files, [".gitignore"])
    (folder / "cloudtrain.yaml").write_text(f"name: x\nscript: train.py\nargs: {args}\n")
    config = configs.load(folder / "cloudtrain.yaml")
    notes = pack(folder, [], 10**6, tmp_path / ".git/bundles", needed=needed(config, folder)).notes
    why = "git, an ignore file, `code.exclude` or `inputs` leaves it out"
    cure = "data comes by `inputs: {{data: ./{}}}`: write `$CLOUDTRAIN_INPUT_DATA` for the path in `args`"
    assert list(notes) == [f"args: `{name}` is not shipped: {why}; {cure.format(name)}" for name in named]
