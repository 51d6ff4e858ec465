"""`submit` without a config file: of a script, and of a launcher's command line."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import pytest

from cloudtrain.launcher.config import launch_line
from cloudtrain.launcher.errors import UsageError


def facts(parser: argparse.ArgumentParser) -> dict[tuple[str, ...], Any]:
    """Return each option with its number of values, and the positional arguments."""
    named = ((tuple(sorted(each.option_strings)) or (each.dest,), each) for each in parser._actions)
    return {names: (each.nargs, each.dest) for names, each in named if names != ("--help", "-h")}


def test_options_of_torchrun_are_those_of_torch() -> None:
    """Names, short forms, which options take a value, and what follows the script: of the installed torch."""
    from torch.distributed.run import get_args_parser

    assert facts(launch_line.parser("torchrun")) == facts(get_args_parser())


def test_options_of_accelerate_are_those_of_accelerate() -> None:
    """The options that are read; all others are refused by name."""
    from accelerate.commands.launch import launch_command_parser

    theirs = facts(launch_command_parser())
    ours = facts(launch_line.parser("accelerate launch"))
    assert {names: values for names, values in ours.items() if theirs.get(names) != values} == {}


@pytest.mark.parametrize(
    ("line", "key", "name", "args", "settings"),
    [
        ("train.py --lr 1", "script", "train.py", "--lr 1", ""),
        ("python3.11 -u train.py -x", "script", "train.py", "-x", ""),
        ("/usr/bin/python -m pkg.train -m b", "module", "pkg.train", "-m b", ""),
        (
            "torchrun --nnodes=2 --nproc_per_node 8 train.py --nnodes 3",
            *("script", "train.py", "--nnodes 3", "resources.instances=2 distributed.nproc_per_node=8"),
        ),
        ("torchrun --nnodes 1:4 t.py", "script", "t.py", "", "resources.min_instances=1 resources.instances=4"),
        ("torchrun --nnodes 2:2 t.py", "script", "t.py", "", "resources.instances=2"),
        (
            "torchrun --nproc-per-node gpu --max-restarts 2 -m pkg.t a",
            *("module", "pkg.t", "a", "distributed.nproc_per_node=auto distributed.max_restarts=2"),
        ),
        ("torchrun --standalone --nproc-per 2 t.py", "script", "t.py", "", "distributed.nproc_per_node=2"),
        (
            "python -m torch.distributed.run --nnodes 2 --rdzv-endpoint=h:1 t.py b",
            *("script", "t.py", "b", "resources.instances=2"),
        ),
        (
            "accelerate launch --config_file a.yaml --num_machines 2 --num-processes 8 --machine_rank 0 t.py c",
            *("script", "t.py", "c"),
            "distributed.accelerate_config=a.yaml resources.instances=2 distributed.nproc_per_node=4",
        ),
    ],
)
def test_launch_line_becomes_settings(line: str, key: str, name: str, args: str, settings: str) -> None:
    """The words behind the script are the script's, options of the launcher too."""
    program = launch_line.read(shlex.split(line))
    assert (program.key, program.name, program.args) == (key, name, args.split())
    assert sorted(program.settings) == sorted(settings.split())


def test_addresses_of_a_launch_line_are_left_out_in_a_sentence() -> None:
    """cloudtrain chooses addresses, ports and numbers of nodes."""
    note = launch_line.read(shlex.split("torchrun --master-port 1 --node-rank 0 --nnodes 2 t.py")).note
    assert note == "torchrun: --master_port, --node_rank are left out: cloudtrain starts the ranks"


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("torchrun --no-python ./run.sh", "no place for --no_python", "a Python script, or a module by `-m`"),
        ("torchrun --log-dir out t.py", "no place for --log_dir", "`cloudtrain logs` has the lines of all ranks"),
        ("torchrun --lr 1 t.py", "no place for --lr", "those of the script stand behind the script"),
        ("torchrun --nnodes", "expected one argument", "torchrun --help"),
        ("accelerate launch --use_fsdp t.py", "no place for --use_fsdp", "accelerate config --config_file"),
        ("accelerate launch --num_processes 3 --num_machines 2 t.py", "3 processes cannot be shared by 2", ""),
        ("python -c 1", "no place for -c", "name a script"),
        ("python -O t.py", "no place for -O", "env.PYTHONOPTIMIZE=1"),
        ("./train.sh", "`train.sh` is none that it can read", "`setup`"),
        ("deepspeed t.py", "`deepspeed` is none that it can read", "cloudtrain submit train.py"),
    ],
)
def test_launch_line_is_refused_with_what_to_do(line: str, message: str, hint: str) -> None:
    """Nothing is dropped in silence."""
    with pytest.raises(UsageError) as caught:
        launch_line.read(shlex.split(line))
    assert message in caught.value.message
    assert hint in caught.value.hint
