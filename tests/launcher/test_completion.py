"""Shell completion: asked like the shell function asks, and typed into real bash, zsh and fish."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from cloudtrain.entrypoints.trainer.strategies.facts import FACTS
from cloudtrain.launcher import cli as command_line
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.store.registry import Registry
from doubles.terminals import COMMAND, Terminal

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


def test_commands_and_jobs_are_offered_newest_first(ask: Ask, seed: Callable[..., Job]) -> None:
    """The words are every command and alias; ids come newest first, then the config's name and `last`."""
    assert set(ask("")) == {*command_line.COMMANDS, *command_line.ALIASES}
    assert ask("can") == ["cancel"]
    for name in ("aa-2", "aa-9", "aa-1"):
        seed(name, State("succeeded"))
    assert ask("logs ") == ["aa-1", "aa-9", "aa-2", "aa", "last"]
    assert ask("logs aa-") == ["aa-1", "aa-9", "aa-2"]
    assert ask("wait aa-9 aa-") == ["aa-1", "aa-2"]


def test_jobs_are_offered_by_their_state(ask: Ask, seed: Callable[..., Job], registry: Registry, cli: Any) -> None:
    """`stop` offers active jobs, `resume` ended jobs, `--attempt` the attempts; zsh and fish show state and age."""
    seed("ended-1", State("stopped", resumable=True))
    seed("going-1", State("running"))
    assert (ask("stop ")[0], ask("resume ")[0]) == ("going-1", "ended-1")
    assert ("ended-1" in ask("stop "), "going-1" in ask("resume ")) == (False, False)
    job = seed("aa-1", State("stopped", resumable=True))
    registry.add_attempt(job.attempt.__class__(**{**vars(job.attempt), "number": 2}), {}, {})
    assert ask("logs aa-1 --attempt ") == ["2", "1", "all"]
    assert ask("logs last --attempt=") == ["--attempt=2", "--attempt=1", "--attempt=all"]
    seed("bb-1", State("failed", reason="error"))
    assert told(cli, "status", "bb-")["bb-1"].startswith("failed on local, sent ")


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
            [f"training.strategy={name}" for name in FACTS],
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


def test_word_is_split_as_bash_splits_words(ask: Ask, cli: Any) -> None:
    """Bash replaces only the part after `=`, unless the user has changed COMP_WORDBREAKS; no file is changed."""
    assert ask("submit --set resources.spot=t", COMP_WORDBREAKS=" =:") == ["true"]
    assert ask("submit --backend=loc", COMP_WORDBREAKS=" =:") == ["local"]
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


def test_completion_script_is_printed_for_each_shell(cli: Any) -> None:
    """$SHELL decides without a name; an unknown shell is an error that lists the three shells."""
    for shell in SHELLS:
        for done in (cli("completion", shell), cli("completion", env={"SHELL": f"/bin/{shell}"})):
            assert (done.code, "_CLOUDTRAIN_COMPLETE=" + shell in done.stdout) == (0, True)
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


@pytest.fixture
def typing(terminal: Callable[..., Terminal], cli: Any, tmp_path: Path) -> Callable[[str], Terminal]:
    """Return a function that starts a shell with the completion loaded."""

    def start(shell: str) -> Terminal:
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed; .ci/run installs it")
        path = f"{COMMAND.parent}:{os.environ['PATH']}"
        begun = terminal(argv=START[shell], **own_folders(tmp_path), PATH=path, PS1="", fish_greeting="")
        begun.resize(150, 40)
        begun.press(f"cd {tmp_path}; {SETUP[shell]}; echo rea''dy\n")
        begun.see("ready\r\n")
        return begun

    return start


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_in_a_real_shell(
    typing: Callable[[str], Terminal], seed: Callable[..., Job], tmp_path: Path, shell: str
) -> None:
    """TAB completes a command, a job, a setting and a file; `echo` shows the resulting line."""
    seed("spirals-x7k2m", State("succeeded"))
    (tmp_path / "other.yaml").write_text("")
    terminal = typing(shell)
    at = terminal.see("ready\r\n")
    for typed, line in {
        "cloudtrain statu\tspir\t": "status spirals-x7k2m",
        "cloudtrain submit --backend az\t": "submit --backend azureml",
        "cloudtrain submit --set resources.sp\ttr\t": "submit --set resources.spot=true",
        "cloudtrain submit -f oth\t": "submit -f other.yaml",
    }.items():
        terminal.press(typed)
        terminal.press("\x01echo '<'\x05 '>'\n")  # to the beginning and to the end of the line
        begin, at = at, terminal.see(" >\r\n" if shell == "bash" else " >", since=at)
        assert line in " ".join(terminal.output[begin:at].decode().split()), terminal.output


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
