"""Commands and options of other tools: each leads to a command line that the parser of `cloudtrain` accepts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from cloudtrain.launcher import cli as commandline
from cloudtrain.launcher.config import foreign_keys, foreign_words

OWN = {*commandline.COMMANDS, *commandline.ALIASES}


def require_parsed(line: str) -> None:
    """Raise click's error if `cloudtrain` does not accept the command line; no command runs."""
    words = shlex.split(line)[1:]
    if words == ["--version"]:
        return
    above = click.Context(commandline.cli, info_name="cloudtrain")
    name, command, rest = commandline.cli.resolve_command(above, words)
    assert command is not None
    command.make_context(name, rest, parent=above)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("det e create job.yaml", "cloudtrain submit job.yaml"),
        ("sky launch train.py", "cloudtrain submit train.py"),
        ("scontrol show job 3", "cloudtrain list"),
        ("queue", "cloudtrain list (`submit --queue` waits"),
        ("autostop", "cloudtrain explain limits ("),
    ],
)
def test_words_of_another_tool_lead_on_behind_its_name(typed: str, line: str) -> None:
    """The name of the tool is left out, and a word with another use here says which."""
    assert foreign_words.command_line(typed.split(), OWN).startswith(line)


def test_each_foreign_command_leads_to_a_command_line_that_parses() -> None:
    """The user's own words are in it: a job's name, a config file. A word of ours is not in the table."""
    table = foreign_words._by_name(foreign_words._COMMANDS)
    for word in table:
        assert word not in OWN
        for more in ([], ["digits-x4k2p"], ["job.yaml", "--gpus", "4"]):
            line = foreign_words.command_line([word, *more], OWN)
            require_parsed(line.partition(" (")[0])
            marks = set(table[word].split())
            assert more[:1] != ["job.yaml"] or "job.yaml" in line or "." not in marks, line
            assert more[:1] != ["digits-x4k2p"] or "digits-x4k2p" in line or not marks & {"?", "*", "+"}, line


@pytest.mark.parametrize("command", ["submit", "plan", "resume", "logs", "stop", "status"])
def test_each_foreign_option_leads_to_options_that_parse(command: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Of the table of options, and of the foreign keys of a config."""
    monkeypatch.chdir(tmp_path)
    above = click.Context(commandline.cli, info_name="cloudtrain")
    found = commandline.cli.get_command(above, command)
    assert found is not None
    known = {option for param in found.params for option in param.opts}
    names = [*foreign_words._by_name(foreign_words._OPTIONS), "epochs", "lr", "region"]
    names += foreign_keys.our_keys() if command == "submit" else []
    for name in names:
        option = "-" * (1 + (len(name) > 1)) + name.rpartition(".")[2].replace("_", "-")
        for argv in ([option, "4"], [option], ["train.py", f"{option}=7"]):
            hint = foreign_words.option_line(command, option, [command, *argv], known)
            if not hint or hint.startswith("leave it out") or option in known:
                continue
            for one in hint.split(" or "):
                job = " last" if command == "resume" else ""
                require_parsed(one if one.startswith("cloudtrain") else f"cloudtrain {command}{job} {one}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kill last", "There is no command `kill`; here: cloudtrain stop --now last"),
        ("sweep sweep.yaml", "cloudtrain submit sweep.yaml (a sweep is the section `sweep` of the config"),
        ("launch -c me job.yaml", "here: cloudtrain submit job.yaml"),
        ("jobs logs digits", "here: cloudtrain logs digits"),
        ("jobs launch job.yaml", "here: cloudtrain submit job.yaml"),
        ("torchrun --nnodes 2 train.py", "here: cloudtrain submit -- torchrun --nnodes 2 train.py"),
        ("train.py", "here: cloudtrain submit train.py"),
        ("sumbit", "Did you mean `submit`?"),
        ("submit --gpus 4", "hint: --accelerators TYPE:4\n"),
        ("submit -N 2", "hint: --instances 2\n"),
        ("submit --num-nodes=3", "hint: --instances 3\n"),
        ("submit -e A=b", "hint: --set env.A=b\n"),
        ("submit --time 12:30:00", "hint: --set limits.max_duration=12h30m\n"),
        ("submit --time 1-02:30:00", "hint: --set limits.max_duration=1d02h30m\n"),
        ("submit -t 60", "hint: --set limits.max_duration=60m\n"),
        ("submit --gres=gpu:a100:4", "hint: --accelerators a100:4\n"),
        ("submit --cpus-per-task 4", "hint: --backend slurm --set slurm.cpus_per_node=4\n"),
        ("submit --mem 64G", "hint: --backend slurm --set slurm.mem=64G\n"),
        ("submit --array=0-3", "hint: leave it out, a sweep is the section `sweep`"),
        ("submit --slots 4", "hint: --accelerators TYPE:4\n"),
        ("submit --num_processes 8", "hint: cloudtrain submit -- accelerate launch --num_processes 8 train.py\n"),
        ("submit --host gpu1", "hint: --backend ssh --set 'ssh.hosts=[gpu1]'\n"),
        ("submit --user bob", "hint: --backend ssh --set ssh.user=bob\n"),
        ("submit --use-spot", "hint: --spot\n"),
        ("submit train.py 3 out", "hint: arguments of the script stand behind `--`: train.py -- ARGS\n"),
        ("submit --max-run 3600", "hint: --set limits.max_duration=3600s\n"),
        ("submit --time 60", "hint: --set limits.max_duration=60m\n"),
        ("submit --gres gpu:8", "hint: --accelerators TYPE:8\n"),
        ("submit --input text=./data", "hint: --set inputs.text=./data\n"),
        ("submit --volume ./data", "hint: --set inputs.data=./data\n"),
        ("submit --secret HF_TOKEN", "hint: --set 'secrets=[HF_TOKEN]'\n"),
        ("submit train.py --data ./data", "hint: -- --data ./data\n"),
        ("submit --cloud gcp", "hint: --backend vertex\n"),
        ("submit --region europe-west4", "or --set vertex.location=europe-west4\n"),
        ("submit train.py --epochs 3", "hint: -- --epochs 3\n"),
        ("submit train.py --hidden 64", "hint: -- --hidden 64\n"),
        ("submit train.py --instnces 2", "(Did you mean one of: '--instance-type', '--instances'?)"),
        ("submit --down", "hint: leave it out, machines live as long as the job\n"),
        ("resume last --epochs 5", "hint: --set training.epochs=5\n"),
        ("stop --force", "hint: --now\n"),
    ],
)
def test_foreign_words_lead_on_with_the_users_own_value(cli: Any, line: str, said: str) -> None:
    """A typo still has its close match."""
    done = cli(*line.split())
    assert (done.code, said in done.stderr) == (2, True), done.stderr


def test_file_says_whether_an_option_is_of_the_script_or_of_the_task(cli: Any, tmp_path: Path) -> None:
    """A script gets its own options behind `--`, a task has them as keys."""
    for key, hint in (("script: train.py", "-- --epochs 3"), ("task: task.py", "--set training.epochs=3")):
        (tmp_path / "cloudtrain.yaml").write_text(f"name: x\n{key}\n")
        assert f"hint: {hint}\n" in cli("plan", "--epochs", "3", cwd=tmp_path).stderr
