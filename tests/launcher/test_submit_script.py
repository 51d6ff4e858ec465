"""`submit` without a config file: of a script, and of a launcher's command line."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
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
        ("torchrun --lr 1 t.py", "unrecognized arguments: --lr", "those of the script stand behind the script"),
        ("torchrun --nnodes", "expected one argument", "torchrun --help"),
        ("accelerate launch --use_fsdp t.py", "unrecognized arguments: --use_fsdp", "accelerate config --config_file"),
        ("accelerate launch --num_processes 3 --num_machines 2 t.py", "3 processes cannot be shared by 2", ""),
        ("python -c 1", "unrecognized arguments: -c", "name a script"),
        ("python -O t.py", "unrecognized arguments: -O", "env.PYTHONOPTIMIZE=1"),
        ("./train.sh", "`train.sh` is none that it can read", "`setup`"),
        (
            "srun -N 2 torchrun t.py --lr 1",
            "`srun` is none",
            "leave srun out: cloudtrain submit -- torchrun t.py --lr 1",
        ),
        ("sbatch -N 2 job.sh", "`sbatch` is none", "options of #SBATCH: docs/slurm.md"),
        ("deepspeed t.py", "`deepspeed` is none that it can read", "cloudtrain submit train.py"),
    ],
)
def test_launch_line_is_refused_with_what_to_do(line: str, message: str, hint: str) -> None:
    """Nothing is dropped in silence."""
    with pytest.raises(UsageError) as caught:
        launch_line.read(shlex.split(line))
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a script and no config."""
    (tmp_path / "train.py").write_text("import sys\nsys.exit(3)\n")
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "train.py --instances 2 --set distributed.nproc_per_node=2 -- --lr 3e-4 -n 10 'a b'",
        "-- torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d train.py --lr 3e-4 -n 10 'a b'",
        "--no-spot -- torchrun --nnodes 2 --nproc_per_node=2 train.py --lr 3e-4 -n 10 'a b'",
        "./train.py --backend local --save --set distributed.nproc_per_node=2 --instances 2 -- --lr 3e-4 -n 10 'a b'",
    ],
)
def test_job_without_a_file_is_the_job_of_its_file(cli: Any, folder: Path, line: str) -> None:
    """The config is shown as YAML; --save writes it, and the file gives the same request."""
    (folder / "requirements.txt").write_text("rich\n")
    done = cli.ok("render", "--json", *shlex.split(line), cwd=folder)
    assert "  script: train.py\n" in done.stderr
    assert "  requirements: requirements.txt\n" in done.stderr
    assert (folder / "cloudtrain.yaml").exists() == ("--save" in line)
    for is_there in (True,) if "--save" in line else (False, True):  # the file that it has written is no hindrance
        said = cli.ok("validate", "--save", *shlex.split(line.replace("--save ", "")), cwd=folder).stderr
        assert ("cloudtrain.yaml has this config already" in said) == is_there
    saved = cli.ok("render", "--json", cwd=folder).json["request"]
    assert saved["spec"]["run"]["args"] == ["--lr", "3e-4", "-n", "10", "a b"]
    assert (saved["spec"]["nodes"], saved["spec"]["nproc_per_node"]) == (2, 2)
    assert {**done.json["request"], "bundle": ""} == {**saved, "bundle": ""}  # the file is shipped, too


def test_file_in_the_folder_keeps_its_keys_and_loses_its_program(cli: Any, folder: Path) -> None:
    """Backend, limits and budget stay; keys of the other program go, in one line; --save replaces no file."""
    file = folder / "cloudtrain.yaml"
    file.write_text("name: t\ntask: task.py\ntraining: {epochs: 2}\nparams: {a: 1}\nlimits: {max_duration: 3h}\n")
    done = cli.ok("plan", "train.py", cwd=folder)
    place = "`script: train.py` in place of its `task`, `training`, `params`"
    assert f"cloudtrain.yaml is used, with {place}\n" in done.stderr
    assert "at most 3h" in done.stdout
    refused = cli("submit", "train.py", "--save", cwd=folder)
    assert (refused.code, "cloudtrain.yaml exists, and is not replaced" in refused.stderr) == (2, True)
    file.write_text("name: t\nscript: src/main.py\nargs: [--a]\nlimits: {max_duration: 3h}\ncode: {dir: src}\n")
    (folder / "src").mkdir()
    for name in ("main.py", "other.py"):
        (folder / "src" / name).write_text("")
    file.write_text("name: t\nscript: main.py\nargs: [--a]\ncode: {dir: src}\n")
    for name, args in (("main", ["--a"]), ("other", [])):
        done = cli.ok("render", "--json", f"src/{name}.py", cwd=folder)
        assert done.json["request"]["spec"]["run"]["args"] == args


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.py -- --lr 1", "with `script: train.py` and these arguments in place of its `args`"),
        ("-- --lr 1", "with these arguments in place of its `args`"),
        ("-- python other.py --lr 1", "with `script: other.py` and these arguments in place of its `script`, `args`"),
    ],
)
def test_arguments_in_place_of_the_files_are_told(cli: Any, folder: Path, line: str, said: str) -> None:
    """The arguments of the file are not joined with the typed arguments, and nobody has to guess."""
    (folder / "other.py").write_text("")
    (folder / "cloudtrain.yaml").write_text("name: t\nscript: train.py\nargs: [--data, x]\n")
    done = cli.ok("render", "--json", *line.split(), cwd=folder)
    assert f"cloudtrain.yaml is used, {said}\n" in done.stderr
    if line == "-- --lr 1":
        assert (
            "hint: write them under `args` in cloudtrain.yaml"
            in cli("plan", "--save", *line.split(), cwd=folder).stderr
        )
    assert done.json["request"]["spec"]["run"]["args"] == ["--lr", "1"]


def test_command_line_without_dashes_is_refused_whole(cli: Any, folder: Path) -> None:
    """An option of the money would go to the script. Behind `--` it is the script's."""
    for words in (["-y", "python", "train.py", "--budget", "2"], ["torchrun", "--nnodes", "2", "train.py"]):
        done = cli("submit", *words, cwd=folder)
        told = "a command line stands behind `--`: cloudtrain submit -- " in done.stderr
        assert (done.code, told) == (2, True), done.stderr
    done = cli.ok("render", "--json", "--", "python", "train.py", "--budget", "2", cwd=folder)
    assert done.json["request"]["spec"]["run"]["args"] == ["--budget", "2"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("submit -f no.yaml train.py", 3, "no file no.yaml"),
        ("submit no.yaml -- torchrun train.py", 3, "no file no.yaml"),
        ("submit nope.py", 3, "no file `nope.py`"),
        ("submit train.py -- torchrun train.py", 2, "are two programs"),
        ("submit run.sh", 2, "`run.sh` is none that it can read"),
        ("submit job.sbatch", 2, "`job.sbatch` is none that it can read"),
        ("plan train.py --set slurm.partition=gpu", 0, "ignored on local: slurm.partition; --backend slurm takes it\n"),
        ("hosts --backend sagemaker", 2, "`sagemaker` has no machines of yours"),
        ("submit --save", 2, "--save writes the config of a script"),
        ("submit -- --lr 1", 3, "no file cloudtrain.yaml"),
        ("submit --set script=train.py", 3, "no file cloudtrain.yaml"),
    ],
)
def test_refusals_without_a_file(cli: Any, folder: Path, line: str, code: int, said: str) -> None:
    """A missing file that was typed, a missing script, two programs, a shell script."""
    done = cli(*line.split(), cwd=folder)
    assert (done.code, said in done.stderr) == (code, True), done.stderr


def test_job_without_a_file_lives_as_any_job(cli: Any, folder: Path, tmp_path_factory: Any) -> None:
    """Status, report, compare, and resume from another folder: with its settings, then with a file saved since."""
    done = cli("submit", "-y", "train.py", "--set", "distributed.max_restarts=0", "--", "--lr", "1", cwd=folder)
    assert done.code == 1, done.stderr
    other = tmp_path_factory.mktemp("other")
    name = cli.ok("list", "--json", cwd=other).json["jobs"][0]["job"]
    assert "exited with code 3" in cli("status", name, cwd=other).stdout
    cli.ok("report", name, "-o", "report.html", cwd=other)
    assert "cloudtrain submit --set=name=" in (other / "report.html").read_text()
    again = cli.ok("resume", name, "--update-config", "--dry-run", "--json", cwd=other)
    assert again.json["request"]["spec"]["run"]["args"] == ["--lr", "1"]
    (folder / "cloudtrain.yaml").write_text("name: x\nscript: train.py\nlimits: {max_duration: 5h}\n")
    assert "max_duration" in cli.ok("resume", name, "--update-config", "--dry-run", cwd=other).stderr


def test_advice_about_a_job_without_a_file_names_its_script(cli: Any, folder: Path) -> None:
    """Of the cheapest backend, and of a rehearsal before spot machines."""
    block = "sagemaker={role: 'arn:aws:iam::123456789012:role/x', region: eu-west-1}"
    line = ["plan", "train.py", "--set", block, "--accelerators", "A10G:1", "--backend"]
    assert "cloudtrain submit train.py --backend sagemaker" in cli.ok(*line, "all", cwd=folder).stderr
    spot = cli.ok(*line, "sagemaker", "--spot", "--set", "keep=[out/]", cwd=folder)
    assert "cloudtrain rehearse train.py --backend sagemaker" in spot.stdout


def test_secret_of_env_is_not_shown(cli: Any, folder: Path) -> None:
    """The shown config, and the saved one, name the variable."""
    shown = cli.ok("validate", "train.py", "--set", "env.HF_TOKEN=hf_value", cwd=folder).stderr
    assert "env: {HF_TOKEN: '${HF_TOKEN}'}" in shown
    assert "hf_value" not in shown
