"""Runs a page's commands as its reader would: writes files, runs commands in bash, compares the output.

Two kinds of a page's fenced blocks are run, from top to bottom, in one folder:

- a block whose first line is a comment with a file's name (`# cloudtrain.yaml`), or whose fence names a file
  (```json title="trust.json"), is written to the file unchanged;
- ```console has commands behind `$ ` (`> ` for further lines of a command) and, below each command, its output.

All other blocks are ignored. `cd` and `export` hold for all later commands. A command has to end with 0, unless the
next command is `echo $?` and shows a different code.

The page's output matches if all its lines are printed in order, without other lines between adjacent lines:

- `...` alone on a line matches any number of lines, also zero; within a line it matches any text;
- a figure with a decimal point or a unit (`0.1827`, `3.1k`, `12s`, `45%`) matches any figure of the form; whole
  numbers, as of steps and ranks, match only themselves;
- the width of a column is free: two or more blanks of the page match two or more blanks;
- the five letters of a job's id (`spirals-x7k2m`) match any five.

`python tests/docs/console.py PAGE` prints a page's commands with their real output, as material for the page.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)(?: title=\"([\w./-]+)\")?\s*$")
FILE_NAMED = re.compile(r"^# ([\w./-]+\.\w+)$")
UNIT = r"(?:ms|s|m|h|d|k|M|G|kB|MB|GB|%)"
FIGURE = re.compile(rf"\d+\.\d+(?:e-?\d+)?{UNIT}?\b|\d+(?:ms|[smhd](?: \d+[smhd])*|k|M|kB|MB|GB|%)(?![\w-])")
ANY_FIGURE = rf"\d[\d.]*(?:e-?\d+)?{UNIT}?(?: \d+[smhd])*"
ID = "-[2-9b-df-hjkmnp-tv-xz]{5}(?![\\w])"  # launcher.job's alphabet
COMMAND_LIMIT_S = 300.0


@dataclass(frozen=True)
class Written:
    """A file that the page asks its reader to write."""

    line: int
    name: str
    text: str


@dataclass(frozen=True)
class Step:
    """A command, and its output on the page; `line` is the command's line number, from 1."""

    line: int
    command: str
    shown: tuple[str, ...]


def steps(page: str) -> Iterator[Written | Step]:
    """Yield the files and commands of the page in order."""
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        end = lines.index("```", number)
        block = lines[number:end]
        comment = FILE_NAMED.match(block[0]) if block else None
        name = fence[2] or (comment[1] if comment else None)
        if fence[1] == "console":
            yield from _commands(block, number + 1)
        elif name:
            yield Written(number + 1, name, "\n".join(block) + "\n")
        number = end + 1


def _commands(block: list[str], first: int) -> Iterator[Step]:
    at = [index for index, line in enumerate(block) if line.startswith("$ ")]
    for begin, end in zip(at, [*at[1:], len(block)], strict=True):
        command, shown = [block[begin][2:]], block[begin + 1 : end]
        while shown and shown[0].startswith("> "):
            command.append(shown.pop(0)[2:])
        yield Step(first + begin, "\n".join(command), tuple(shown))


class Session:
    """A reader's terminal: a folder, variables, and the last command's exit code."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.top, self.folder, self.environment, self.code = folder, folder, environment, 0
        self._state = Path(tempfile.mkdtemp(dir=folder.parent)) / "state"
        self._state.write_text("")

    def write(self, file: Written) -> None:
        """Write a file to the present folder."""
        (self.folder / file.name).write_text(file.text)

    def run(self, command: str) -> list[str]:
        """Return the lines that the command prints; its exports and its folder hold for later commands."""
        script = f'source "{self._state}"; (exit {self.code})\n{command}\ncode=$?; export -p > "{self._state}"\n'
        script += f'pwd > "{self._state}.folder"; exit $code'
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_LIMIT_S,
        )
        self.code = done.returncode
        self.folder = Path((self._state.parent / "state.folder").read_text().strip())
        return done.stdout.splitlines()


def missing(shown: tuple[str, ...], printed: list[str]) -> str | None:
    """Return the first line of the page that was not printed in order, or None if the output matches.

    A page without output below a command makes no statement about the output.
    """
    if not shown:
        return None
    text = "".join(f"{line.rstrip()}\n" for line in printed)
    patterns = [_pattern(line) for line in shown]
    if re.fullmatch("".join(patterns), text):
        return None
    for count in range(1, len(patterns) + 1):
        if not re.match("".join(patterns[:count]), text):
            return shown[count - 1]
    return "(an end: more was printed)"


def _pattern(line: str) -> str:
    """Return the regular expression for a printed line, its newline included."""
    if line.strip() == "...":
        return "(?:.*\n)*?"
    return "".join(".*?" if part == "..." else _varying(part) for part in re.split(r"(\.\.\.)", line.rstrip())) + "\n"


def _varying(text: str) -> str:
    """Return the regular expression of a text without dots: figures and ids are free, the rest is literal."""
    parts, at = [], 0
    for found in re.finditer(rf"(?P<id>{ID})|(?P<gap> {{2,}})|{FIGURE.pattern}", text):
        any_ = ID if found["id"] else " {2,}" if found["gap"] else ANY_FIGURE
        parts += [re.escape(text[at : found.start()]), any_]
        at = found.end()
    return "".join([*parts, re.escape(text[at:])])


def _record(path: Path) -> None:
    """Print every command of a page with its real output."""
    import os

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "reader"
        folder.mkdir()
        own = {"CLOUDTRAIN_HOME": f"{name}/home", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        session = Session(folder, {**os.environ, **own})
        for step in steps(path.read_text(encoding="utf-8")):
            if isinstance(step, Written):
                session.write(step)
                continue
            print("$ " + step.command.replace("\n", "\n> "))
            printed = session.run(step.command)
            print("\n".join(printed))
            if lacking := missing(step.shown, printed):
                print(f"!!! line {step.line}: not as shown: {lacking}")


if __name__ == "__main__":
    _record(Path(sys.argv[1]))
