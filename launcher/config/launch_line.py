"""The command line of a launcher, such as `torchrun --nnodes 2 train.py --lr 1`, as settings of a config."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from shlex import join
from typing import Any, NamedTuple, NoReturn

from ..errors import UsageError
from .foreign_keys import entries

_STARTS = "cloudtrain starts the ranks"
# The options of each launcher: the key that counts, or a remedy, with `!` for a refused option. `=`: with a value;
# `m/`: a short form. Tests hold the tables to torch 2.13, accelerate 1.15. _ELSE: for other options.
_TABLES = {
    "torchrun": f"""
nnodes=: `resources.instances` counts
nproc_per_node=: `distributed.nproc_per_node` counts
max_restarts=: `distributed.max_restarts` counts
rdzv_backend= rdzv_endpoint= rdzv_id= rdzv_conf= standalone node_rank= master_addr= master_port= local_addr=: {_STARTS}
no_python run_path: !cloudtrain starts a Python script, or a module by `-m`, on each rank
signals_to_handle= shutdown_timeout=: !leave it out: `on_stop` and `distributed.stop_signal` say how the ranks stop
log_dir= r/redirects= t/tee= local_ranks_filter= logs_specs= role= duplicate_stdout_filters= duplicate_stderr_filters=
    event_log_handler=: !leave it out: `cloudtrain logs` has the lines of all ranks
monitor_interval= start_method= numa_binding= virtual_local_rank: !leave it out: cloudtrain has no such setting""",
    "accelerate launch": f"""
num_machines=: `resources.instances` counts
num_processes=: `distributed.nproc_per_node` counts
max_restarts=: `distributed.max_restarts` counts
config_file=: `distributed.accelerate_config` counts
mixed_precision=: `env.ACCELERATE_MIXED_PRECISION` counts
multi_gpu same_network machine_rank= main_process_ip= main_process_port= rdzv_backend= rdzv_conf=: {_STARTS}""",
    "python": f"\nu: {_STARTS}",
    "deepspeed": f"""
hostfile= include= exclude=: `backend: ssh` has machines in `ssh.hosts`
num_nodes=: `resources.instances` counts
num_gpus=: `distributed.nproc_per_node` counts
master_addr= master_port= launcher= no_local_rank: {_STARTS}""",
}
_ELSE = {
    "torchrun": "`torchrun --help` lists its options; those of the script stand behind the script",
    "accelerate launch": "write the settings by `accelerate config --config_file FILE`, and name it by --config_file",
    "python": "name a script, or a module by -m; python's options are variables, as `--set env.PYTHONOPTIMIZE=1`",
}
_MODULES = {"torch.distributed.run": ["torchrun"], "accelerate.commands.launch": ["accelerate", "launch"]}


class Program(NamedTuple):
    """The program of a command line: `key` is `script` or `module`; `settings` are as `--set` takes them."""

    key: str
    name: str
    args: Sequence[str] | None  # None: as the config has them
    settings: tuple[str, ...] = ()
    note: str = ""  # which options of the launcher are left out


def remedies(launcher: str) -> dict[str, str]:
    """Return the remedy for each option of a launcher, in place of the option."""
    rows = entries(_TABLES[launcher]).items()
    return {re.sub("^./|=$", "", option): remedy for options, remedy in rows for option in options.split()}


def parser(launcher: str) -> Any:
    """Return the ArgumentParser of the words behind the launcher's name."""
    import argparse  # for a launcher's command line only

    class LaunchLineParser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{self.prog}: {message}", hint=_ELSE[self.prog])

    made = LaunchLineParser(launcher, add_help=False, argument_default=argparse.SUPPRESS)
    for option in " ".join([*entries(_TABLES[launcher]), "m/module"]).split():
        short, _, name = option.rstrip("=").rpartition("/")
        long = [f"--{name.replace('_', '-')}", f"--{name}"] if name[1:] else [f"-{name}"]
        names = dict.fromkeys([*([f"-{short}"] if short else []), *long])
        made.add_argument(*names, action="store" if option.endswith("=") else "store_true")
    made.add_argument("training_script")
    made.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return made


def read(words: Sequence[str]) -> Program:
    """Return the program of a command line. Raises UsageError."""
    launcher, rest = re.sub(r"^python[\d.]+$", "python", PurePath(words[0]).name), list(words[1:])
    if launcher.endswith((".py", ".ipynb")):  # a notebook is refused with the files
        return Program("script", words[0], rest)
    if launcher == "accelerate" and rest[:1] == ["launch"]:
        launcher, rest = "accelerate launch", rest[1:]
    if launcher not in _ELSE:
        hint = "name the Python script that it starts: cloudtrain submit train.py; commands before it: `setup`; "
        hint += "options of #SBATCH: docs/slurm.md"
        starts = (at for at, word in enumerate(rest) if PurePath(word).name.startswith((*_ELSE, "accelerate")))
        if (at := next(starts, None)) is not None:
            hint = f"leave {launcher} out: cloudtrain submit -- {join(rest[at:])}"
        raise UsageError(f"cloudtrain starts Python programs, and `{launcher}` is none that it can read", hint=hint)
    given, known = vars(parser(launcher).parse_args(rest)), remedies(launcher)
    name, args, key = given.pop("training_script"), given.pop("training_script_args"), "script"
    if given.pop("module", False):
        key = "module"
        if name in _MODULES and launcher == "python":
            return read([*_MODULES[name], *args])
    typed = {option: f"-{'-' * (len(option) > 1)}{option}" for option in given}
    for option in given:
        if known[option].startswith("!"):
            raise UsageError(f"{launcher}: a job has no place for {typed[option]}", hint=known[option][1:])
    settings = []
    least, _, given_most = given.get("nnodes", "").partition(":")
    if given_most:
        given["nnodes"] = given_most
        settings = [f"resources.min_instances={least}"] * (least != given_most)
    if given.get("nproc_per_node") == "gpu":
        given["nproc_per_node"] = "auto"
    if ranks := given.get("num_processes"):
        machines = given.get("num_machines", "1")
        if not f"{ranks}{machines}".isdecimal() or not int(machines) or int(ranks) % int(machines):
            raise UsageError(f"{launcher}: {ranks} processes cannot be shared by {machines} machines")
        given["num_processes"] = int(ranks) // int(machines)
    settings += [f"{known[option].split('`')[1]}={given[option]}" for option in given if "` counts" in known[option]]
    left = ", ".join(typed[option] for option in given if known[option] == _STARTS)
    note = f"{launcher}: {left} {'are' if ',' in left else 'is'} left out: {_STARTS}" if left else ""
    return Program(key, name, args, tuple(settings), note)
