"""What a shell is told after TAB: asked as its function asks, and typed into real bash, zsh and fish."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import sqlite3
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from cloudtrain.launcher import cli as command_line
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.store.registry import Registry

SHELLS = ("bash", "zsh", "fish")
Ask = Callable[..., list[str]]


@pytest.fixture
def ask(cli: Any) -> Ask:
    """Return the words that the command offers: `ask("logs ")`."""

    def words(line: str, **variables: str) -> list[str]:
        typed = f"cloudtrain {line}"
        asked = {"_CLOUDTRAIN_COMPLETE": "bash", "COMP_LINE": typed, "COMP_POINT": str(len(os.fsencode(typed)))}
        done = cli(env={**asked, "COMP_WORDBREAKS": "", **variables})
        assert (done.code, done.stderr) == (0, ""), done
        return [row.split("\t")[1] or row.split("\t")[0] for row in done.stdout.splitlines()]

    return words


def told(cli: Any, *words: str) -> dict[str, str]:
    """Return each word that zsh and fish are offered, and what stands beside it."""
    done = cli(*words, env={"_CLOUDTRAIN_COMPLETE": "zsh"})
    rows = (row.split("\t") for row in done.stdout.splitlines())
    return {word: help_ for _, word, help_ in rows}


def test_commands_and_aliases_are_offered(ask: Ask) -> None:
    """Every name in the table of commands, and every other name of one."""
    assert set(ask("")) == {*command_line.COMMANDS, *command_line.ALIASES}
    assert ask("can") == ["cancel"]


def test_jobs_are_offered_newest_first(ask: Ask, seed: Callable[..., Job]) -> None:
    """Ids in the order of their making, then the word for the newest."""
    for name in ("aa-2", "aa-9", "aa-1"):
        seed(name, State("succeeded"))
    assert ask("logs ") == ["aa-1", "aa-9", "aa-2", "aa", "last"]
    assert ask("logs aa-") == ["aa-1", "aa-9", "aa-2"]
    assert ask("wait aa-9 aa-") == ["aa-1", "aa-2"]


def test_state_stands_beside_a_job(cli: Any, seed: Callable[..., Job]) -> None:
    """What zsh and fish show of it, with the backend and its age."""
    seed("aa-1", State("failed", reason="error"))
    assert told(cli, "status", "aa-")["aa-1"].startswith("failed on local, sent ")


def test_stop_is_offered_what_runs_and_resume_what_has_ended(ask: Ask, seed: Callable[..., Job]) -> None:
    """No other job could be meant."""
    seed("ended-1", State("stopped", resumable=True))
    seed("going-1", State("running"))
    assert (ask("stop ")[0], ask("resume ")[0]) == ("going-1", "ended-1")
    assert ("ended-1" in ask("stop "), "going-1" in ask("resume ")) == (False, False)


def test_attempts_of_the_named_job_are_offered(ask: Ask, seed: Callable[..., Job]) -> None:
    """The numbers that the job has, the newest first, wherever the option stands."""
    job = seed("aa-1", State("stopped", resumable=True))
    registry = Registry()
    registry.add_attempt(job.attempt.__class__(**{**vars(job.attempt), "number": 2}), {}, {})
    registry.close()
    assert ask("logs aa-1 --attempt ") == ["2", "1", "all"]
    assert ask("logs last --attempt=") == ["--attempt=2", "--attempt=1", "--attempt=all"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("submit --backend a", ["azureml", "all"]),
        ("submit --backend=ver", ["--backend=vertex"]),
        ("plan --backend local,s", ["local,ssh", "local,sagemaker"]),
        ("doctor ss", ["ssh"]),
        ("explain resources.sp", ["resources.spot"]),
        ("explain reso", ["resources."]),
        ("submit --set resources.sp", ["resources.spot="]),
        ("submit --set training.strategy=", [f"training.strategy={name}" for name in ("ddp", "fsdp", "hsdp")]),
        ("resume last --set resources.spot=t", ["resources.spot=true"]),
        ("submit --set 'resources.sp", ["resources.spot="]),
        ("submit -f ", ["file"]),
        ("init --kind ", ["task", "script"]),
        ("completion z", ["zsh"]),
        ("nonsense ", []),
        ("logs --nonsense x ", []),
    ],
)
def test_arguments_and_options_are_completed(ask: Ask, line: str, words: list[str]) -> None:
    """Values where there is a choice, keys level by level, files by the shell itself; nothing where nothing fits."""
    assert ask(line) == words


def test_word_is_cut_where_bash_cuts_it(ask: Ask) -> None:
    """Bash replaces only what stands behind `=`, unless its user has changed COMP_WORDBREAKS."""
    assert ask("submit --set resources.spot=t", COMP_WORDBREAKS=" =:") == ["true"]
    assert ask("submit --backend=loc", COMP_WORDBREAKS=" =:") == ["local"]


def test_registry_that_is_not_there_is_not_made(ask: Ask, cli: Any) -> None:
    """To ask changes nothing."""
    assert ask("logs ") == []
    assert not cli.home.exists()


@pytest.mark.parametrize("harm", ["damaged", "locked", "newer", "a folder"])
def test_registry_that_cannot_be_read_is_passed_over(ask: Ask, cli: Any, seed: Callable[..., Job], harm: str) -> None:
    """Silence, at once: an error would stand in the middle of what is typed."""
    seed("aa-1", State("succeeded"))
    path, holder = cli.home / "registry.sqlite", None
    if harm == "damaged":
        path.write_bytes(b"no database at all" * 1000)
    elif harm == "a folder":
        path.unlink()
        path.mkdir()
    else:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("PRAGMA locking_mode = EXCLUSIVE" if harm == "locked" else "DROP TABLE attempts")
        holder.execute("BEGIN EXCLUSIVE")
    assert ask("logs ") == []
    if holder is not None:
        holder.close()


@pytest.mark.parametrize("shell", SHELLS)
def test_script_is_printed_for_each_shell(cli: Any, shell: str) -> None:
    """The very file that is tried below."""
    done = cli("completion", shell)
    assert (done.code, "_CLOUDTRAIN_COMPLETE=" + shell in done.stdout) == (0, True)


def test_shell_is_the_user_s_own_where_none_is_named(cli: Any) -> None:
    """By $SHELL; another one than the three is asked for."""
    assert "#compdef" in cli("completion", env={"SHELL": "/bin/zsh"}).stdout
    refused = cli("completion", env={"SHELL": "/bin/tcsh"})
    assert (refused.code, "bash | zsh | fish" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", "data/bash-completion/completions/cloudtrain"),
        ("zsh", "data/zsh/site-functions/_cloudtrain"),
        ("fish", "config/fish/completions/cloudtrain.fish"),
    ],
)
def test_install_says_where_it_has_put_it(cli: Any, tmp_path: Path, shell: str, place: str) -> None:
    """Where each shell looks by itself, and nowhere else: no start-up file is changed."""
    done = cli("completion", shell, "--install", env=own_folders(tmp_path))
    assert (done.code, str(tmp_path / place) in done.stderr) == (0, True)
    assert (tmp_path / place).read_text() == cli("completion", shell).stdout
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / place]


def own_folders(tmp_path: Path) -> dict[str, str]:
    """Return the variables by which shells keep to the test's folder."""
    return {
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


# How each shell is started so that it reads no start-up file, and what makes it know the command.
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
SETUP = {
    "bash": "source <(cloudtrain completion bash)",
    "zsh": "autoload -Uz compinit; compinit -u -D; source <(cloudtrain completion zsh)",
    "fish": "cloudtrain completion fish | source",
}


class Typing:
    """A shell on a terminal of its own, and somebody who types."""

    def __init__(self, shell: str, environment: dict[str, str], cwd: Path) -> None:
        self.master, slave = pty.openpty()
        size = {"LINES": "40", "COLUMNS": "150", "TERM": "xterm", "PS1": "", "fish_greeting": ""}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            START[shell],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env={**environment, **size, "PATH": path},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # fish wants it to be its own
        )
        os.close(slave)
        self.seen = ""

    def type(self, keys: str) -> None:
        """Type, as fast as a machine does."""
        os.write(self.master, keys.encode())

    def until(self, text: str, timeout_s: float = 60.0) -> str:
        """Return what was shown since the last time, up to the text; AssertionError after the time."""
        end = time.monotonic() + timeout_s
        while text not in self.seen:
            left_s = end - time.monotonic()
            assert left_s > 0, f"{text!r} was not shown: {self.seen!r}"
            if select.select([self.master], [], [], left_s)[0]:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
        shown, _, self.seen = self.seen.partition(text)
        return shown

    def close(self) -> None:
        """End the shell."""
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def typing(cli: Any, tmp_path: Path) -> Iterator[Callable[[str], Typing]]:
    """Return a function that starts a shell which knows the command."""
    started: list[Typing] = []

    def start(shell: str) -> Typing:
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed; .ci/run installs it")
        started.append(Typing(shell, cli.environment(own_folders(tmp_path)), tmp_path))
        started[-1].type(f"{SETUP[shell]}; echo rea''dy\n")
        started[-1].until("ready\r\n")
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_in_a_real_shell(
    typing: Callable[[str], Typing], seed: Callable[..., Job], tmp_path: Path, shell: str
) -> None:
    """TAB makes whole words of a command, a job, a setting and a file; the line that results is shown by `echo`."""
    seed("spirals-x7k2m", State("succeeded"))
    (tmp_path / "other.yaml").write_text("")
    terminal = typing(shell)
    for typed, line in {
        "cloudtrain statu\tspir\t": "status spirals-x7k2m",
        "cloudtrain submit --backend az\t": "submit --backend azureml",
        "cloudtrain submit --set resources.sp\ttr\t": "submit --set resources.spot=true",
        "cloudtrain submit -f oth\t": "submit -f other.yaml",
    }.items():
        terminal.type(typed)
        terminal.type("\x01echo '<'\x05 '>'\n")  # to the line's beginning, and to its end
        shown = terminal.until(" >\r\n") if shell == "bash" else terminal.until(" >")
        assert line in " ".join(shown.split()), shown


def test_every_parameter_is_completed_or_free_text() -> None:
    """A new option of a fixed choice, a job or a backend gets its completion: what is left here is text and numbers."""
    free = {"--grep", "--since", "--timeout", "--name"}
    missing = []
    context = click.Context(command_line.cli)
    for name in command_line.COMMANDS:
        command = command_line.cli.get_command(context, name)
        assert command is not None
        for param in command.params:
            wanted = param.name in ("job", "jobs", "backend", "settings", "attempt")
            if wanted and param._custom_shell_complete is None and not set(param.opts) & free:
                missing.append(f"{name} {param.opts[-1]}")
    assert missing == []
