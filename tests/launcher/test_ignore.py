"""Ignore files, against git itself, and in bounded time."""

import random
import subprocess
import time
from pathlib import Path

import pytest

from cloudtrain.launcher.planning.ignore import IgnoreFile

NAMES = ["a", "b", "c", "ab", "abc", "ba", ".a", "a b", "é", "z", "[", "\\", "*", "a ", "-", "]", "b1", "!", "#a"]
PARTS = [
    *(
        *("a", "b", "c", "ab", "*", "**", "?", "/", "/", "[ab]", "[!a]", "[^b]", "[a-c]", "[z-a]", "[[:alpha:]]"),
        *("é", "\t"),
    ),
    *("[[:evil:]]", "[a/b]", "[]a]", "[\\]]", "[a-]", "[", "\\", "\\a", "\\*", "\\/", " ", "\\ ", "!", "#", ".", "[a"),
    *("[[:digit:]b]", "[b-\\c]", "**/", "/**", "[[:upper:]-a]", "[!]"),
]


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 250), marks=pytest.mark.soak)], ids=["one", "many"])
def test_lines_leave_out_what_git_leaves_out(tmp_path: Path, seeds: range) -> None:
    """Random lines, odd ones among them, leave out the same files and folders of a random tree as git does."""
    for seed in seeds:
        rng, root = random.Random(seed), tmp_path / str(seed)
        subprocess.run(["git", "init", "-q", root], check=True)
        paths = _tree(rng, root)
        for _ in range(40):
            lines = ["".join(rng.choice(PARTS) for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(1, 2))]
            text = ("\n".join(lines) + rng.choice(["", "\n", "\r\n", " \n"])).encode()
            (root / ".gitignore").write_bytes(text)
            ask = ["git", "-C", root, "check-ignore", "--no-index", "-v", "-n", "-z", "--stdin"]
            said = subprocess.run(ask, input="\0".join(paths).encode(), capture_output=True, check=False).stdout
            fields = said.split(b"\0")[:-1]
            theirs = {
                path.decode(): bool(source) and not line.startswith(b"!")
                for source, line, path in zip(fields[::4], fields[2::4], fields[3::4], strict=True)
            }
            rules = IgnoreFile(text)
            assert {path: _is_left_out(rules, root, path) for path in paths} == theirs, text


def _tree(rng: random.Random, root: Path) -> list[str]:
    for _ in range(120):
        path = root.joinpath(*(rng.choice(NAMES) for _ in range(rng.randint(1, 4))))
        if rng.random() < 0.5 and not any(each.is_file() for each in (path, *path.parents)):
            path.mkdir(parents=True, exist_ok=True)
        elif not path.exists() and not any(each.is_file() for each in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    found = (path.relative_to(root).as_posix() for path in root.rglob("*"))
    return sorted(path for path in found if not path.startswith(".git/") and path != ".git")


def _is_left_out(rules: IgnoreFile, root: Path, path: str) -> bool:
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts))]
    if any(rules.verdict(each.encode(), is_dir=True) for each in above):
        return True
    return rules.verdict(path.encode(), is_dir=(root / path).is_dir()) is True


@pytest.mark.parametrize("line", ["!", "\\", "foo\\", "[z-a]", "[[:evil:]]", "[", "/", "//", "!/", "[]", ""])
def test_line_that_matches_nothing_is_no_fault(line: str) -> None:
    """Git accepts such a line, and so do we; the lines around it count."""
    rules = IgnoreFile(f"a\n{line}\nb".encode())
    verdicts = [rules.verdict(name, is_dir=False) for name in (b"a", b"b", b"foo", b"[", b"\\")]
    assert verdicts == [True, True, None, None, None]


@pytest.mark.parametrize("pattern", ["*a" * 28, "**/a*" * 28, "a/**/" * 28 + "b", "?*" * 28 + "b", "[a]*" * 28 + "b"])
@pytest.mark.parametrize("name", ["a" * 200 + "c", "a/" * 100 + "c", "a" * 40 + "/" + "a" * 40 + "c"])
def test_many_stars_take_linear_time(pattern: str, name: str) -> None:
    """28 stars took more than a minute where each star tries all of its places again."""
    rules, began_s = IgnoreFile(pattern.encode()), time.process_time()
    assert rules.verdict(name.encode(), is_dir=False) is None
    assert time.process_time() - began_s < 0.5
