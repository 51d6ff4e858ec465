"""Shell completion: asked like the shell function asks, and typed into real bash, zsh and fish."""

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
    """Return a function for the offered words: `ask("logs ")`."""

    def words(line: str, **variables: str) -> list[str]:
        typed = f"cloudtrain {line}"
        asked = {"_CLOUDTRAIN_COMPLETE": "bash", "COMP_LINE": typed, "COMP_POINT": str(len(os.fsencode(typed)))}
        done = cli(env={**asked, "COMP_WORDBREAKS": "", **variables})
        assert (done.code, done.stderr) == (0, ""), done
        return [row.split("\t")[1] or row.split("\t")[0] for row in done.stdout.splitlines()]

    return words


def told(cli: Any, *words: str) -> dict[str, str]:
    """Return each word that zsh and fish offer, with its description."""
    done = cli(*words, env={"_CLOUDTRAIN_COMPLETE": "zsh"})
    rows = (row.split("\t") for row in done.stdout.splitlines())
    return {word: help_ for _, word, help_ in rows}


def test_commands_and_aliases_are_offered(ask: Ask) -> None:
    """The words are every name in the table of commands, and every alias."""
    assert set(ask("")) == {*command_line.COMMANDS, *command_line.ALIASES}
    assert ask("can") == ["cancel"]


def test_jobs_are_offered_newest_first(ask: Ask, seed: Callable[..., Job]) -> None:
    """Ids come in the order of creation, newest first, then the config's name and `last`."""
    for name in ("aa-2", "aa-9", "aa-1"):
        seed(name, State("succeeded"))
    assert ask("logs ") == ["aa-1", "aa-9", "aa-2", "aa", "last"]
    assert ask("logs aa-") == ["aa-1", "aa-9", "aa-2"]
    assert ask("wait aa-9 aa-") == ["aa-1", "aa-2"]


def test_description_of_a_job_is_its_state(cli: Any, seed: Callable[..., Job]) -> None:
    """zsh and fish show the state with the backend and the age."""
    seed("aa-1", State("failed", reason="error"))
    assert told(cli, "status", "aa-")["aa-1"].startswith("failed on local, sent ")


def test_stop_offers_active_jobs_and_resume_offers_ended_jobs(ask: Ask, seed: Callable[..., Job]) -> None:
    """Jobs in the wrong state are not offered."""
    seed("ended-1", State("stopped", resumable=True))
    seed("going-1", State("running"))
    assert (ask("stop ")[0], ask("resume ")[0]) == ("going-1", "ended-1")
    assert ("ended-1" in ask("stop "), "going-1" in ask("resume ")) == (False, False)


def test_attempts_of_the_named_job_are_offered(registry: Registry, ask: Ask, seed: Callable[..., Job]) -> None:
    """The numbers of the job's attempts come newest first, for any position of the option."""
    job = seed("aa-1", State("stopped", resumable=True))
    registry.add_attempt(job.attempt.__class__(**{**vars(job.attempt), "number": 2}), {}, {})
    assert ask("logs aa-1 --attempt ") == ["2", "1", "all"]
    assert ask("logs last --attempt=") == ["--attempt=2", "--attempt=1", "--attempt=all"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("submit --backend a", ["azureml", "all"]),
        ("submit --backend=ver", ["--backend=vertex"]),
        ("plan --backend local,s", ["local,ssh", "local,slurm", "local,sagemaker"]),
        ("doctor ss", ["ssh"]),
        ("explain resources.sp", ["resources.spot"]),
        ("explain reso", ["resources."]),
        ("submit --set resources.sp", ["resources.spot="]),
        (
            "submit --set training.strategy=",
            [f"training.strategy={name}" for name in ("ddp", "fsdp", "hsdp", "local", "async")],
        ),
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
    """Choices offer values, keys come level by level, the shell completes files, and invalid lines offer no word."""
    assert ask(line) == words


def test_word_is_split_as_bash_splits_words(ask: Ask) -> None:
    """Bash replaces only the part after `=`, unless the user has changed COMP_WORDBREAKS."""
    assert ask("submit --set resources.spot=t", COMP_WORDBREAKS=" =:") == ["true"]
    assert ask("submit --backend=loc", COMP_WORDBREAKS=" =:") == ["local"]


def test_completion_does_not_create_a_registry(ask: Ask, cli: Any) -> None:
    """Completion changes no file."""
    assert ask("logs ") == []
    assert not cli.home.exists()


@pytest.mark.parametrize("harm", ["damaged", "locked", "newer", "a folder"])
def test_completion_ignores_an_unreadable_registry(ask: Ask, cli: Any, seed: Callable[..., Job], harm: str) -> None:
    """Completion is silent and quick, because an error would appear inside the typed line."""
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
def test_completion_script_is_printed_for_each_shell(cli: Any, shell: str) -> None:
    """The tests below use the same script."""
    done = cli("completion", shell)
    assert (done.code, "_CLOUDTRAIN_COMPLETE=" + shell in done.stdout) == (0, True)


def test_default_shell_is_the_shell_of_the_user(cli: Any) -> None:
    """$SHELL decides; an unknown shell is an error that lists the three shells."""
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
def test_install_names_the_installed_file(cli: Any, tmp_path: Path, shell: str, place: str) -> None:
    """Each shell searches the place by itself, and no start-up file is changed."""
    done = cli("completion", shell, "--install", env=own_folders(tmp_path))
    assert (done.code, str(tmp_path / place) in done.stderr) == (0, True)
    assert (tmp_path / place).read_text() == cli("completion", shell).stdout
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / place]


def own_folders(tmp_path: Path) -> dict[str, str]:
    """Return the variables that keep shells inside the test's folder."""
    return {
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


# The start of each shell without start-up files, and the line that loads the completion.
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
    """A shell on its own terminal, with simulated typing."""

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
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # fish requires a controlling terminal
        )
        os.close(slave)
        self.seen = ""

    def type(self, keys: str) -> None:
        """Type at the speed of a machine."""
        os.write(self.master, keys.encode())

    def until(self, text: str, timeout_s: float = 60.0) -> str:
        """Return the new output up to the text. Raises AssertionError after the time."""
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
    """Return a function that starts a shell with the completion loaded."""
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
    """TAB completes a command, a job, a setting and a file; `echo` shows the resulting line."""
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
        terminal.type("\x01echo '<'\x05 '>'\n")  # to the beginning and to the end of the line
        shown = terminal.until(" >\r\n") if shell == "bash" else terminal.until(" >")
        assert line in " ".join(shown.split()), shown


def test_every_parameter_is_completed_or_free_text() -> None:
    """A new option for a choice, a job or a backend needs a completion; only text and numbers have no completion."""
    free = {"--grep", "--since", "--timeout", "--name"}
    missing = []
    context = click.Context(command_line.cli)
    for name in command_line.COMMANDS:
        command = command_line.cli.get_command(context, name)
        for param in command.params:
            wanted = param.name in ("job", "jobs", "backend", "settings", "attempt")
            if wanted and param._custom_shell_complete is None and not set(param.opts) & free:
                missing.append(f"{name} {param.opts[-1]}")
    assert missing == []
