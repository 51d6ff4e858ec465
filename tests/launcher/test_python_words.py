"""Errors of the Python interface name keywords and functions, not options and commands of the command line."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.launcher import api, cli
from cloudtrain.launcher.errors import ConfigError, Fault, Place
from cloudtrain.launcher.text import python_words
from cloudtrain.launcher.text.python_words import in_python

ROOT = Path(__file__).resolve().parents[2]
# The rooms below commands, page and live view; `models`, `rehearsal` and the report's page serve commands alone.
REACHED = ("advice", "backend", "config", "jobs", "logs", "metering", "money", "notices", "planning", "prices", "store")
# Options of other programs, and of commands without a function; the texts name these programs.
OWN = "set name budget backend instances force trials now from-older update-code update-config price-per-hour"
FOREIGN = re.compile(rf"--(?!(?:{OWN.replace(' ', '|')})(?![\w=-]))")


def texts() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every literal that names an option or a command; `J1` stands for a value."""
    folders = [ROOT / "launcher" / room for room in REACHED] + [ROOT / "backends"]
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        if path.name in ("foreign_words.py", "launch_line.py"):  # for words that only the command line knows
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if id(node) not in inner else []
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "J1" for part in parts)
            if isinstance(node, ast.Constant | ast.JoinedStr) and re.search(r"--[a-z]|cloudtrain [a-z]", text):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def test_no_text_that_the_interface_may_raise_names_an_option() -> None:
    """In each text below the commands, options became keywords, and what is left of commands is called a command."""
    found = dict(texts())
    assert len(found) > 60
    names = "|".join(cli.COMMANDS)
    wrong = []
    for place, text in found.items():
        told = in_python(text)
        kept = re.sub(rf"the command `?cloudtrain (?:{names})\b[^,;:`()]*", "", told)
        if re.search(rf"cloudtrain (?:{names})\b", kept) or (re.search(r"--[a-z]", kept) and not FOREIGN.search(kept)):
            wrong.append((place, told))
    assert wrong == []


def test_tables_name_every_command_and_real_keywords() -> None:
    """Each command is a function of the interface or listed as a command; each keyword is one of a function."""
    functions = {*python_words.OF_JOBS.split("|"), *python_words.OF_ALL.split("|")}
    assert set(cli.COMMANDS) <= functions | set(python_words.OTHERS.split("|"))
    assert {"jobs" if name == "list" else name for name in functions} <= set(api.__all__)
    words = {word for name in api.__all__ for word in inspect.signature(getattr(api, name)).parameters}
    taken = {*python_words.FLAGS.split("|"), *python_words.TEXTS.split("|"), "overrides"}
    assert {name.replace("-", "_") for name in taken} <= words


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cloudtrain resume --update-code takes the code", "resume(update_code=True) takes the code"),
        ("more trials: cloudtrain resume x-1 --trials +N", 'more trials: resume("x-1", trials="+N")'),
        (
            "cloudtrain stop q1; else: cloudtrain stop --forget q1",
            'stop("q1"); else: the command cloudtrain stop --forget q1',
        ),
        ("cloudtrain logs --tail 50 x-1", "the command cloudtrain logs --tail 50 x-1"),
        ("choose another --name, or look: cloudtrain status x", 'choose another `name`, or look: status("x")'),
        ("`cloudtrain init` writes an example", "the command `cloudtrain init` writes an example"),
        ("submit a new job with --backend vertex", 'submit a new job with backend="vertex"'),
        ("see `cloudtrain wait x`, or --set 'ssh.hosts=[a]'", 'see `wait("x")`, or overrides=["ssh.hosts=[a]"]'),
        ("write --set resources.accelerators=A100:8: done", 'write overrides=["resources.accelerators=A100:8"]: done'),
        (
            "pip install --force-reinstall torch; squeue --name=x",
            "pip install --force-reinstall torch; squeue --name=x",
        ),
        ("gcloud storage buckets create gs://b --location eu", "gcloud storage buckets create gs://b --location eu"),
    ],
)
def test_texts_become_calls(text: str, told: str) -> None:
    """A command with a function becomes a call, an option a keyword; another program's command stays."""
    assert in_python(text) == told


def test_every_fault_of_an_error_speaks_python() -> None:
    """Message, hint and place of each fault are translated; the place of a keyword is the setting itself."""
    fault = Fault("--set a.b is odd", "a.b", Place("--set a.b=1", 0, 0, ""), "add --force")
    with pytest.raises(ConfigError) as caught, python_words.speaking(lambda message: None):
        raise ConfigError([fault, fault])
    first, second = caught.value.faults
    assert first == second
    assert (first.message, str(first.place), first.hint) == ("`overrides` a.b is odd", "a.b=1", "add force=True")
