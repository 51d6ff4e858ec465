"""Answers a shell's completion request with the possible next words.

The shell's function (templates/completion) runs `_CLOUDTRAIN_COMPLETE=SHELL cloudtrain WORDS...`; the last word is the
word under the cursor. bash passes the whole line instead, because bash splits words at `=` and `:`. Each line of the
answer is `KIND<TAB>WORD<TAB>HELP`: `plain` is a whole word, `part` an unfinished word (no space follows), `file` and
`dir` ask the shell to complete paths. After any error nothing is printed: a message would appear in the middle of the
user's command line.
"""

from __future__ import annotations

import os
import sys

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

VARIABLE = "_CLOUDTRAIN_COMPLETE"
KINDS = ("plain", "part", "file", "dir")


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
        cut = _broken_off(incomplete) if is_bash else 0
        sys.stdout.write("".join(_line(item, cut) for item in found))
        sys.stdout.flush()
    except (Exception, SystemExit):
        return


def _words_of_line() -> list[str]:
    """Return the words before bash's cursor, without the command's name; the last word is cut at the cursor."""
    point = int(os.environ.get("COMP_POINT", "-1"))
    line = os.fsencode(os.environ["COMP_LINE"])
    typed = os.fsdecode(line[:point] if point >= 0 else line)  # bash counts bytes
    words = split_arg_string(typed)[1:]
    return [*words, ""] if typed[-1:].isspace() or not words else words


def _broken_off(word: str) -> int:
    """Return the number of leading characters of the word that bash treats as separate, earlier words."""
    breaks = os.environ.get("COMP_WORDBREAKS", "=:")
    return max((word.rfind(mark) + 1 for mark in "=:" if mark in breaks), default=0)


def _line(item: CompletionItem[str], cut: int) -> str:
    description = " ".join((item.help or "").split())
    return f"{item.type}\t{item.value[cut:] if item.type in ('plain', 'part') else ''}\t{description}\n"
