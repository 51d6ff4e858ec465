"""docs/python.md runs from top to bottom as one Python session, and prints the output on the page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docs.console import FENCE, Session, missing, steps

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
# Runs each block as a notebook does: the value of its last line is shown. One line of JSON in, one out.
NOTEBOOK = """
import ast, contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            body = ast.parse(json.loads(line)).body
            last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), "block", "exec"), names)
            if last and (value := eval(compile(last, "block", "eval"), names)) is not None:
                print(repr(value))
        except Exception:
            traceback.print_exc(file=shown)
    print(json.dumps(shown.getvalue()), flush=True)
"""


def blocks(page: str) -> list[tuple[int, str, list[str]]]:
    """Return the page's blocks: line number, language, and lines."""
    found, lines, number = list[tuple[int, str, list[str]]](), page.splitlines(), 0
    while number < len(lines):
        fence, number = FENCE.match(lines[number]), number + 1
        if fence:
            end = lines.index("```", number)
            found.append((number + 1, fence[1], lines[number:end]))
            number = end + 1
    return found


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_page_runs_as_one_session(cli: Any, tmp_path: Path) -> None:
    """Each block runs without an exception, and prints the lines of the text block below it."""
    (folder := tmp_path / "reader").mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    session = Session(folder, cli.environment({}) | {"PATH": path})
    for step in steps(page := PAGE.read_text(encoding="utf-8")):
        session.run(step.command)
    found = blocks(page)
    with subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK],
        cwd=folder,
        env=session.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as notebook:
        for (line, language, code), (_, below, shown) in zip(found, [*found[1:], (0, "", [])], strict=True):
            if language != "python":
                continue
            notebook.stdin.write(json.dumps("\n".join(code)) + "\n")
            notebook.stdin.flush()
            printed = json.loads(notebook.stdout.readline()).splitlines()
            told = "\n".join(["", f"docs/python.md:{line}", *code, "---", *printed])
            assert "Traceback" not in "".join(printed[:1]), told
            lacking = missing(tuple(shown), printed) if below == "text" else None
            assert lacking is None, f"{told}\n--- not as shown: {lacking}"


def test_page_names_every_function() -> None:
    """The page has each public name of the interface."""
    from cloudtrain.launcher import api

    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in api.__all__ if not re.search(rf"\b{name}\b", text)] == []
