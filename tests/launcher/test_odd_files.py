"""Files of a repository that are no regular files, or have no end: a sentence with their place, at once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import foreign
from cloudtrain.entrypoints.environments import requirements
from doubles.signatures import MakeProject

CONFIG = "distributed: {allow_alone: true}\n"


def pipe(path: Path) -> None:
    """Make a pipe that nobody writes to."""
    os.mkfifo(path)


def device(path: Path) -> None:
    """Make a link to a device without an end."""
    path.symlink_to("/dev/zero")


def hole(path: Path) -> None:
    """Make a file of 50 GB that takes no room."""
    with path.open("wb") as file:
        file.truncate(50 << 30)


KINDS: tuple[Callable[[Path], None], ...] = (pipe, device, hole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["train.py", "cloudtrain.yaml", "packages.txt", ".gitignore", "lib/.cloudtrainignore", ".gitmodules"]
)
def test_odd_file_is_told_at_once(name: str, kind: Callable[[Path], None], cli: Any, project: MakeProject) -> None:
    """A plan neither waits for a pipe, nor reads what has no end; git's and our lists in a pipe count as absent."""
    folder = project(f"{CONFIG}requirements: packages.txt\n", script="train.py")
    (folder / "packages.txt").touch()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    kind(folder / name)
    done = cli("plan", "--no-code", cwd=folder, timeout_s=20)
    is_left_out = kind is pipe and name.rpartition("/")[2].startswith(".")
    assert done.code == (0 if is_left_out else 3), done.stderr
    assert is_left_out or name in done.stderr
    assert "itself failed" not in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_bounded_regular_file_is_read(kind: Callable[[Path], None], tmp_path: Path) -> None:
    """The error is an OSError with the path, as for a file that is missing."""
    kind(tmp_path / "odd")
    with pytest.raises(OSError, match=r"regular file|larger than 2 MB") as caught:
        foreign.read(tmp_path / "odd")
    assert caught.value.filename == str(tmp_path / "odd")
    (tmp_path / "sound").write_bytes(b"1234")
    assert foreign.read(tmp_path / "sound", 4) == b"1234"
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IsADirectoryError, match="not a regular file"):
        foreign.read(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(OSError, match=r"larger than 0 kB"):
        foreign.read(tmp_path / "sound", 3)


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        ("# /// script\n# a = 1\n# ///\n", ["# a = 1"]),
        ("# /// script\n# a\n# ///\n# b\n# ///\nx", ["# a\n# ///\n# b"]),  # the last line that ends it, PEP 723
        ("# /// script\n# a\n\n# ///\n", []),
        ("# /// script\n# ///\n", []),
        ("# /// script\r\n#\r\n# ///\r\n# /// script\n# b\n# ///", ["#\n# ///\n# /// script\n# b"]),
        ("# /// script\n" * 20_000 + "# dependencies = x\n" * 20_000, []),
        ("# /// script\n# a\n# ///\n\n# /// script\n# b\n# ///\n", ["# a", "# b"]),
    ],
)
def test_header_of_a_script_is_found_in_one_pass(text: str, headers: list[str]) -> None:
    """As the expression in PEP 723 finds it, also in 700 kB of lines that begin one."""
    assert requirements.headers(text) == headers


@pytest.mark.parametrize("name", ["loop", "loop/loop"])
def test_code_folder_that_leads_to_itself_is_a_fault(name: str, cli: Any, project: MakeProject) -> None:
    """A link in the place of the code folder is said with its path."""
    folder = project(f"{CONFIG}code: {{dir: {name}}}\n")
    (folder / "loop").symlink_to("loop")
    for command in ("validate", "plan"):
        done = cli(command, cwd=folder)
        assert (done.code, "loop" in done.stderr, "itself failed" in done.stderr) == (3, True, False)


def test_colours_in_the_name_of_a_file_are_not_printed(cli: Any, project: MakeProject) -> None:
    """A name in the code folder is other people's text."""
    folder = project(CONFIG)
    (folder / "\x1b[31mred.py").write_text("x" * 999)
    printed = cli("plan", cwd=folder)
    assert ("red.py" in printed.stderr + printed.stdout, "\x1b" in printed.stderr + printed.stdout) == (True, False)


@pytest.mark.parametrize("pattern", ["(" * 1999, "((a)" * 400, "[" * 1999, "(a{99999999999})", "(" * 5000])
def test_pattern_that_cannot_be_compiled_is_a_fault(pattern: str, cli: Any, project: MakeProject) -> None:
    """Deep brackets and huge counts are said with the key, like any other wrong pattern."""
    done = cli("validate", "--json", cwd=project(f"{CONFIG}progress: {{step: {pattern!r}}}\n"))
    assert done.code == 3
    assert [fault["key"] for fault in done.json["faults"]] == ["progress.step"]
