"""Imports decide the start-up time of a command; no command may need torch or an SDK."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.launcher.backend_table import BUILT_IN
from cloudtrain.launcher.job import State
from cloudtrain.launcher.store.home import home
from doubles.signatures import MakeJob, MakeProject

HEAVY = {"torch", "numpy", "scipy", "pandas", "boto3", "botocore", "sagemaker", "azure", "google", "setuptools"}
HEAVY |= {"starlette", "uvicorn", "anyio"}  # only the page needs them
# Each takes 8 to 80 ms of processor time.
MODEL, TEMPLATES, YAML, RICH = "pydantic", "jinja2", "yaml", "rich"

# A namespace without a file is not imported: the .pth file of google-cloud-aiplatform begins `google`.
IMPORTED = '{name.split(".")[0] for name, module in [*sys.modules.items()] if getattr(module, "__file__", None)}'
# Runs the command line like the console script, then prints the imported names as the last line of stderr.
PROBE = f"""\
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted({IMPORTED})), file=sys.stderr))
from cloudtrain.launcher.cli import main
main()
"""

LIGHT = {MODEL, TEMPLATES, YAML, RICH}
COMMANDS = {
    "--help": LIGHT,
    "--version": LIGHT,
    "list": LIGHT,
    "list --json": LIGHT,
    "list --active": LIGHT,
    "cost": LIGHT,
    "cost ended --json": LIGHT,
    "status ended": LIGHT,
    "status ended --json": LIGHT,
    "status interrupted": LIGHT,
    "logs ended": LIGHT,
    "wait ended": LIGHT,
    "budget": LIGHT,
    "budget set 100USD": LIGHT,
    "budget set vision 100USD": {TEMPLATES, RICH},  # looks for the project in the config
    "watch --once": LIGHT,
    "watch --once ended": LIGHT,
    "report ended --json": LIGHT,
    "report ended": {MODEL, RICH},
    "completion bash": LIGHT,
    "backends": LIGHT,
    "prices --all --json": LIGHT,
    "prices refresh --help": LIGHT,
    "doctor": {TEMPLATES, RICH},
    "submit --help": LIGHT,
    "ui --help": LIGHT,
    "export --help": LIGHT,
    "serve --help": LIGHT,
    "validate": {RICH},
    "explain": {TEMPLATES, RICH},
    "schema": {TEMPLATES, RICH},
    "submit --dry-run": {RICH},
    "submit --dry-run --backend sagemaker --set resources.instance_type=ml.m5.xlarge --set sagemaker.region=eu-west-1 "
    "--set sagemaker.role=arn:aws:iam::123456789012:role/x": {RICH},
    "submit --dry-run --backend azureml --set resources.instance_type=Standard_D4s_v5 "
    "--set azureml.subscription=00000000-0000-0000-0000-000000000000 "
    "--set azureml.resource_group=g --set azureml.workspace=w": {RICH},
    "submit --dry-run --backend vertex --set resources.instance_type=n1-standard-8 --set vertex.project=a-project "
    "--set vertex.location=us-central1 --set vertex.staging_bucket=gs://bucket": {RICH},
}
# Modules, each with the modules below, that the quickest runs of a command leave out; together 15 to 40 ms.
OTHER_BLOCKS = {f"cloudtrain.backends.{name}" for name in BUILT_IN if name != "local"}
OF_A_RUNNING_JOB = {f"cloudtrain.{name}" for name in ("launcher.logs", "launcher.store.registry")}
OF_A_RUNNING_JOB |= {"cloudtrain.launcher.backend.agent_state", "cloudtrain.entrypoints.environments"}
UNNEEDED = {
    "--help": {"cloudtrain.launcher.commands", "cloudtrain.launcher.backend_table", "hashlib", "sqlite3", "subprocess"},
    "list": {"cloudtrain.backends", "cloudtrain.launcher.backend", "hashlib", "secrets", "shutil", "socket"},
    "validate": OTHER_BLOCKS | OF_A_RUNNING_JOB | {"cloudtrain.launcher.prices", "sqlite3"},
    "submit --dry-run": OTHER_BLOCKS | OF_A_RUNNING_JOB | {"cloudtrain.launcher.prices", "sqlite3"},
}


def imported(args: list[str], cwd: Path) -> set[str]:
    """Return the top-level names that the command has imported."""
    done = subprocess.run([sys.executable, "-c", PROBE, *args], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("line", COMMANDS)
def test_command_imports_nothing_heavy(line: str, project: MakeProject, seed: MakeJob) -> None:
    """Only a real submit needs torch or an SDK, and most commands need only click."""
    seed("ended", State("succeeded"))
    interrupted(seed)
    modules = imported(line.split(), project())
    assert modules & HEAVY == set()
    assert modules & COMMANDS[line] == set()


MODULES = {  # with the names that their imports leave out
    **{
        f"backends.{cloud}.backend backends.{cloud}.jobs": HEAVY | LIGHT for cloud in ("azureml", "sagemaker", "vertex")
    },
    "launcher.api": HEAVY | LIGHT,
    "launcher.commands.export launcher.commands.serve launcher.models.exporting entrypoints.export.build": {"torch"},
}


@pytest.mark.parametrize("modules", MODULES)
def test_import_of_a_module_is_light(modules: str) -> None:
    """`logs` and `status` of a cloud job need no config; Python's interface and an export import nothing heavy."""
    names = ", ".join(f"cloudtrain.{name}" for name in modules.split())
    program = f"import sys, {names}\nprint(*{IMPORTED})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & MODULES[modules] == set()


@pytest.mark.parametrize("backend", ["azureml", "sagemaker", "slurm", "ssh", "vertex"])
def test_backend_imports_its_modules_on_first_use(backend: str) -> None:
    """The backend's object imports a module of its folder when a method calls it."""
    program = f"import sys\nfrom cloudtrain.launcher.backend import load\nbackend = load('{backend}')\n"
    program += f"is_there = lambda: 'cloudtrain.backends.{backend}.jobs' in sys.modules\n"
    program += "print(is_there(), callable(backend.duty('jobs', 'state')), is_there())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False True True\n"


def interrupted(seed: MakeJob) -> None:
    """Add a job whose submit died, so that a poll imports the backend."""
    seed("interrupted")
    with sqlite3.connect(home() / "registry.sqlite") as db:
        db.execute(
            'UPDATE attempts SET submitter = \'{"host": "gone", "pid": 1, "stamp": null}\', created_s = 0'
            " WHERE job_id = 'interrupted'"
        )
    db.close()


@pytest.mark.parametrize("line", UNNEEDED)
def test_quick_command_imports_no_unneeded_module(line: str, project: MakeProject, home: Path) -> None:
    """An empty list imports no backend; a check or a dry run imports no block of a backend that is not in the file."""
    program = PROBE.replace('{name.split(".")[0] for', "{name for")
    assert program != PROBE
    command = [sys.executable, "-c", program, *line.split()]
    done = subprocess.run(command, cwd=project(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stderr.splitlines()[-1])
    assert not [name for name in found if any(f"{name}.".startswith(f"{each}.") for each in UNNEEDED[line])]


def test_command_searches_for_no_garbage(project: MakeProject, home: Path) -> None:
    """A dry run ends before the first search for garbage, and the end of the process searches nothing."""
    found = "{'searches': gc.get_stats()[0]['collections'] - before, 'frozen': gc.get_freeze_count()}"
    program = f"import atexit, gc, json, sys\natexit.register(lambda: print(json.dumps({found}), file=sys.stderr))\n"
    program += "from cloudtrain.launcher import cli\nbefore = gc.get_stats()[0]['collections']\ncli.main()"
    command = [sys.executable, "-c", program, "submit", "--dry-run"]
    done = subprocess.run(command, cwd=project(), capture_output=True, text=True, check=True)
    counts = json.loads(done.stderr.splitlines()[-1])
    assert counts["searches"] == 0
    assert counts["frozen"] > 10_000
