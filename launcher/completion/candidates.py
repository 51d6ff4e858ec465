"""Answers a shell's completion request with the possible next words: jobs, attempts, projects, backends, config keys.

The shell's function (templates/completion) runs `_CLOUDTRAIN_COMPLETE=SHELL cloudtrain WORDS...`; the last word is the
word under the cursor. bash passes the whole line instead, because bash splits words at `=` and `:`. Each line of the
answer is `KIND<TAB>WORD<TAB>HELP`: `plain` is a whole word, `part` an unfinished word (no space follows), `file` and
`dir` ask the shell to complete paths. After any error nothing is printed: a message would appear in the middle of the
user's command line.

The registry file is only read: never created, never updated, without a wait for a lock and without calls to a backend.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.resources import files
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

VARIABLE = "_CLOUDTRAIN_COMPLETE"
KINDS = ("plain", "part", "file", "dir")
KEYS = "keys.tsv"  # in this folder, written by tools/cli_pages.py: the import of the schema takes 0.2 s
SHOWN = 200  # the newest jobs
PATIENCE_S = 0.1  # for a locked registry
WANTED = {"stop": True, "resume": False}  # by command: only active jobs, or only ended jobs

Items = list[CompletionItem]

_JOBS = """
SELECT jobs.id, jobs.name, jobs.backend, a.state, a.number, a.created_s
FROM jobs JOIN attempts a ON a.job_id = jobs.id
WHERE a.number = (SELECT MAX(number) FROM attempts WHERE job_id = jobs.id)
  AND (substr(jobs.id, 1, length(?1)) = ?1 OR substr(jobs.name, 1, length(?1)) = ?1)
ORDER BY jobs.seq DESC LIMIT ?2
"""
_ATTEMPTS = """
SELECT number, state, created_s FROM attempts
WHERE job_id = COALESCE(
    (SELECT id FROM jobs WHERE id = ?1),
    (SELECT id FROM jobs WHERE name = ?1 ORDER BY seq DESC LIMIT 1),
    (SELECT id FROM jobs WHERE ?1 IN ('last', '-') OR substr(id, 1, length(?1)) = ?1 ORDER BY seq DESC LIMIT 1)
)
ORDER BY number DESC
"""


def answer(cli: click.Command, words: list[str]) -> None:
    """Print the possible next words; after any error print nothing."""
    is_bash = os.environ[VARIABLE] == "bash"
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - open to the end of the process
    try:
        if is_bash:
            words = _words_of_line()
        # click only finds the parameter under the cursor; this module reads the words and prints the answer.
        before, incomplete = words[:-1], words[-1] if words else ""
        asked = ShellComplete(cli, {}, "cloudtrain", VARIABLE)
        found = [item for item in asked.get_completions(before, incomplete) if item.type in KINDS]
        option, has_value, _ = incomplete.partition("=")
        if incomplete.startswith("--") and has_value:  # the shell replaces the whole word
            found = [CompletionItem(f"{option}={item.value}", item.type, item.help) for item in found]
        # For bash, the characters before such a mark are separate, earlier words.
        marks = os.environ.get("COMP_WORDBREAKS", "=:") if is_bash else ""
        cut = max((incomplete.rfind(mark) + 1 for mark in "=:" if mark in marks), default=0)
        sys.stdout.write("".join(_line(item, cut) for item in found))
        sys.stdout.flush()
    except (Exception, SystemExit):
        return


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Return the ids of jobs, the newest first, then names of several jobs.

    The help shows state, backend and age. The state is the last state in the registry. `stop` gets only active jobs,
    `resume` only ended jobs.
    """
    rows = _read(_JOBS, incomplete, SHOWN)
    if (is_active := WANTED.get(ctx.command.name or "")) is not None:
        rows = [row for row in rows if (row[3] in ("pending", "running", "stopping")) is is_active]
    found = {row[0]: f"{row[3]} on {row[2]}, sent {_ago(row[5])}" for row in rows}
    names = [row[1] for row in rows]
    for row in rows:
        if row[1] not in found and names.count(row[1]) > 1:  # for a single job the id is enough
            found[row[1]] = f"the newest of this name: {row[0]}"
    if rows and "last".startswith(incomplete):
        found["last"] = f"the newest job: {rows[0][0]}" if not incomplete else "the newest job"
    value = ctx.params.get(param.name or "")  # the words that the same argument already has, as in `wait a b`
    given = value if isinstance(value, (tuple, list)) else ()
    words = [word for word in found if word.startswith(incomplete) and word not in given]
    return [CompletionItem(word, help=found[word]) for word in words]


def attempts(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Return the numbers of the named job's attempts, the newest first, and `all` if the job has several attempts."""
    # If the last option has no value yet, click leaves the arguments in `ctx.args`.
    job = ctx.params.get("job") or next((word for word in ctx.args if not word.startswith("-")), None)
    if not isinstance(job, str):
        return []
    words = [(str(number), f"{state}, sent {_ago(created_s)}") for number, state, created_s in _read(_ATTEMPTS, job)]
    words += [("all", "all attempts, in order")] if len(words) > 1 else []
    return [CompletionItem(word, help=summary) for word, summary in words if word.startswith(incomplete)]


def projects(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Return the projects that have a budget."""
    rows = _read("SELECT DISTINCT project FROM budgets WHERE project != '' ORDER BY project")
    return [CompletionItem(project) for (project,) in rows if str(project).startswith(incomplete)]


def backends(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Return the backends of this installation, plug-ins included."""
    from ..backend_table import names

    return [CompletionItem(name) for name in names() if name.startswith(incomplete)]


def backends_and_all(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Return the backends after the typed names and commas; without a comma also `all` and `cheapest`."""
    from ..backend_table import ALL, CHEAPEST

    before, comma, begun = incomplete.rpartition(",")
    given = before.split(",") if before else []
    words: Items = [item for item in backends(ctx, param, begun) if item.value not in given]
    if not comma:
        further = {ALL: "every backend that the file configures", CHEAPEST: "the cheapest of those"}
        words += [CompletionItem(word, help=summary) for word, summary in further.items() if word.startswith(begun)]
    return [CompletionItem(before + comma + item.value, help=item.help) for item in words]


def keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Return the config's keys, one level at a time: `resources.` is a part, `resources.spot` a whole word."""
    return [
        CompletionItem(f"{key}." if inner else key, type="part" if inner else "plain", help=summary)
        for key, _, summary, inner in _level(incomplete)
        if not inner or key != incomplete.rstrip(".")
    ]


def settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Return settings `KEY=`, one level of keys at a time; after `=` the values of a key with fixed choices."""
    key, has_value, begun = incomplete.partition("=")
    if has_value:
        kind = next((kind for name, kind, _ in _keys() if name == key), "")
        words = ["true", "false"] if kind == "true or false" else kind.split(" | ") if " | " in kind else []
        return [CompletionItem(f"{key}={word}") for word in words if word.startswith(begun)]
    return [
        CompletionItem(f"{name}{'.' if inner else '='}", type="part", help=summary)
        for name, _, summary, inner in _level(incomplete)
    ]


def _level(begun: str) -> Iterator[tuple[str, str, str, bool]]:
    """Yield key, type, help and "is a section" of each key that begins with the typed text, on the same level."""
    depth = begun.count(".")
    rows = _keys()
    for name, kind, summary in rows:
        if name.startswith(begun) and name.count(".") == depth:
            yield name, kind, summary, any(other.startswith(f"{name}.") for other, _, _ in rows)


def _keys() -> list[list[str]]:
    text = (files("cloudtrain.launcher.completion") / KEYS).read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines()]


def _read(sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a query; an empty list if the registry is missing or locked, or if the query fails."""
    from ..store.home import where

    path = where() / "registry.sqlite"
    if not path.is_file():
        return []
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=PATIENCE_S)) as database:
            return database.execute(sql, values).fetchall()
    except (sqlite3.Error, UnicodeDecodeError):  # as FAULTS of store/database.py
        return []


def _ago(time_s: float) -> str:
    from ..text.terminal import when

    return when(time_s) if time_s <= time.time() else "just now"


def _words_of_line() -> list[str]:
    """Return the words before bash's cursor, without the command's name; the last word is cut at the cursor."""
    point = int(os.environ.get("COMP_POINT", "-1"))
    line = os.fsencode(os.environ["COMP_LINE"])
    typed = os.fsdecode(line[:point] if point >= 0 else line)  # bash counts bytes
    words = split_arg_string(typed)[1:]
    return [*words, ""] if typed[-1:].isspace() or not words else words


def _line(item: CompletionItem[str], cut: int) -> str:
    description = " ".join((item.help or "").split())
    return f"{item.type}\t{item.value[cut:] if item.type in ('plain', 'part') else ''}\t{description}\n"
