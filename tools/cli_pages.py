"""Write what the documentation and the shells' completion have from the code: `python tools/cli_pages.py`.

    docs/cli.md                        every command's help, as `cloudtrain COMMAND --help` prints it
    docs/config.md                     every key of the config file, as `cloudtrain explain` has it
    launcher/completion/keys.tsv       key, type and first sentence, for the shell: the schema is slow to import

With `--check` it writes nothing, and exits with 1 where a file is not what would be written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.cli import ALIASES, COMMANDS, cli
from cloudtrain.launcher.commands.explain import default_words, facts_of
from cloudtrain.launcher.completion.candidates import KEYS
from cloudtrain.launcher.config.fields import as_yaml, every_key, field_at, section
from cloudtrain.launcher.config.schema import model
from cloudtrain.launcher.planning import planner as plans

ROOT = Path(__file__).resolve().parents[1]
RENEW = "python tools/cli_pages.py"
WIDTH = 100  # columns of the help; a terminal's may be others

# Keys that not every backend supports, and a value that asks for it; the rest of a config that each would take.
ASKED = {
    "resources.min_instances": "resources.min_instances=1",
    "resources.spot": "resources.spot=true",
    "resources.disk_gb": "resources.disk_gb=200",
    "limits.max_wait": "limits.max_wait=2h",
    "retry": "retry.max_attempts=3",
}
FLEX = "vertex.scheduling=flex_start"
WITH = {  # there alone
    ("limits.max_wait", "slurm"): ("budget.limit=9 USD", "slurm.price_per_hour=1 USD"),
    ("limits.max_wait", "sagemaker"): ("resources.spot=true",),
    ("limits.max_wait", "vertex"): (FLEX,),
}
TYPES = {"sagemaker": "ml.m5.xlarge", "azureml": "Standard_D4s_v5", "vertex": "n1-standard-4"}
NEEDED = {
    "local": (),
    "ssh": ("ssh.hosts=[a, b]",),
    "slurm": (),
    "sagemaker": ("sagemaker.role=arn:aws:iam::123456789012:role/x", "sagemaker.region=eu-west-1"),
    "azureml": (
        f"azureml.subscription={'0' * 8}-0000-0000-0000-{'0' * 12}",
        "azureml.resource_group=g",
        "azureml.workspace=w",
        "azureml.region=eastus",
    ),
    "vertex": ("vertex.project=a-project", "vertex.location=us-central1", "vertex.staging_bucket=gs://a-bucket"),
}
CLI_HEAD = f"""\
# The command line

Every command's help, as `cloudtrain COMMAND --help` prints it. This page is written by `{RENEW}`, and a test holds it
to the code. What the keys of the config file mean: [config.md](config.md). Walks: [README.md](README.md).

| exit code | |
| --- | --- |
| 0 | done: the job succeeded, or the command did its work |
| 1 | the job failed; of `doctor`: a check failed |
| 2 | usage: the command line makes no sense |
| 3 | config: the file, the code folder, or a file named there |
| 4 | no credentials, or no permission |
| 5 | no quota, no capacity: the submit was refused, or the job got no machines (reason `no_machines`) |
| 6 | refused by the budget, or stopped at it |
| 7 | the backend cannot be reached: the job's state is not known |
| 8 | no such job |
| 9 | the job was stopped by a user |
| 124 | `wait --timeout`: not over yet |
| 130 | interrupted; the job runs on |

A job of a script needs no config file: `cloudtrain submit train.py --instances 2 -- --lr 3e-4`, or the command line of
today, `cloudtrain submit -- torchrun --nnodes 2 --nproc-per-node 8 train.py --lr 3e-4` (also `python train.py`,
`python -m pkg.train`, `accelerate launch`). The command shows the config that it makes, and `--save` writes it as
`cloudtrain.yaml`. If that file is there already, its backends, limits and budget count, and the script takes the place
of its program. `plan`, `validate` and `rehearse` take the same words.

A command or an option of another tool, as `cloudtrain kill JOB` or `--gpus 4`, is refused with what to type instead.

With `--json` a call that is refused also prints `{{"error": {{"message", "where", "hint", "exit_code"}}}}` on standard
output: what stands there is always JSON, and all talk goes to standard error.
"""
CONFIG_HEAD = f"""\
# The config file

Every key of `cloudtrain.yaml`, as `cloudtrain explain KEY` tells it; `cloudtrain schema` prints the JSON schema for
editors. This page is written by `{RENEW}`, and a test holds it to the code. How the trainer uses `training:`:
[training.md](training.md); what `budget:` guarantees: [budget.md](budget.md).

- `${{VAR}}` and `${{VAR:-default}}` are taken from the environment; `--set KEY=VALUE` and typed options beat the file.
- Durations are `90s`, `10m`, `12h`, `2d`; money is `150 USD`; sizes are in GB.
- An unknown key is refused, with its line and what was probably meant.
"""


def main() -> int:
    """Write the files, or compare them; return the exit code."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the code says now: {RENEW}", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


def pages() -> dict[Path, str]:
    """Return every file and what is to be in it."""
    return {
        ROOT / "docs" / "cli.md": cli_page(),
        ROOT / "docs" / "config.md": config_page(),
        ROOT / "launcher" / "completion" / KEYS: completion_keys(),
    }


def cli_page() -> str:
    """Return the page of all commands: a table first, then the help of each."""
    size = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    above = click.Context(cli, info_name="cloudtrain", help_option_names=["-h", "--help"], **size)
    rows = [f"| [`{name}`](#{_anchor(f'cloudtrain {name}')}) | {told} |" for name, told in COMMANDS.items()]
    meant = {**ALIASES, "render": "submit --dry-run"}
    rows += [f"| `{alias}` | is `{name}` |" for alias, name in meant.items()]
    parts = [CLI_HEAD, "\n".join(["| command | |", "| --- | --- |", *rows]) + "\n"]
    for name in COMMANDS:
        command = cli.get_command(above, name)
        assert command is not None
        parts += _helps(command, click.Context(command, parent=above, info_name=name, **size))
    return "\n".join(parts)


def _helps(command: click.Command, context: click.Context) -> Iterator[str]:
    title = context.command_path
    yield f"## {title}\n\n```text\n{command.get_help(context).rstrip()}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _helps(inner, click.Context(inner, parent=context, info_name=name))


def config_page() -> str:
    """Return the page of all keys, a section of the file to each of its own."""
    top = {key: field for key, field in model().model_fields.items() if section(field) is None}
    parts = [CONFIG_HEAD, "## The top level\n", _table("", top)]
    for key, field in model().model_fields.items():
        if (inner := section(field)) is not None:
            parts += _section(key, inner, field.description or "")
    parts.append(_availability())
    return "\n".join(parts)


def _section(path: str, model: Any, told: str) -> Iterator[str]:
    yield f"## {path}\n\n{_cell(told)}\n"
    yield _table(f"{path}.", model.model_fields)
    for key, field in model.model_fields.items():
        if (inner := section(field)) is not None:
            yield from _section(f"{path}.{key}", inner, field.description or "")


def _table(above: str, fields: dict[str, Any]) -> str:
    rows = []
    for key, field in fields.items():
        facts = facts_of(field)
        kind = facts["type"] + ("" if section(field) is not None else default_words(facts))
        example = f" Example: `{key}: {as_yaml(facts['examples'][0])}`" if facts["examples"] else ""
        rows.append(f"| `{above}{key}` | {_cell(kind)} | {_cell(facts['help'] + example)} |")
    return "\n".join(["| key | type | |", "| --- | --- | --- |", *rows]) + "\n"


def _availability() -> str:
    """Return which backend carries out what not all do: asked of the request that each makes of it."""
    rows = []
    for key, setting in ASKED.items():
        more = {name: (setting, *WITH.get((key, name), ())) for name in backends.BUILT_IN}
        marks = ["yes" if key in _carried(name, *more[name]) else "-" for name in backends.BUILT_IN]
        rows.append(f"| `{key}` | {' | '.join(marks)} |")
    return "\n".join(
        [
            "## Keys that not every backend supports\n",
            "A plan names the keys that the backend ignores. Without a yes, retries happen only while a cloudtrain",
            "command follows the job (`submit`, `logs -f`, `wait`, `watch`); with a yes, the platform retries.",
            "`limits.max_wait`: the platform ends the wait on Slurm for a job with a budget, on SageMaker for spot",
            "machines and for accelerators, and on Vertex AI for a flex start; else such a command, or `advance`,",
            "stops the job.\n",
            f"| key | {' | '.join(backends.BUILT_IN)} |",
            f"| --- | {' | '.join('---' for _ in backends.BUILT_IN)} |",
            *rows,
            "",
        ]
    )


def _carried(name: str, *wanted: str) -> frozenset[str]:
    file = ROOT / "examples" / "digits" / "cloudtrain.yaml"
    own = [f"resources.instance_type={TYPES[name]}"] if name in TYPES else []
    settings = ("resources={instances: 2}", "budget=null", *own, *NEEDED[name], *wanted)
    config = configs.load(file, backend=name, overrides=settings)
    backend = backends.load(name)
    plan = plans.make(config, backend.capacity(config))
    return backend.request(plan, config, f"{config.name}-aaaaa", 1, "0" * 64).carried


def completion_keys() -> str:
    """Return a line for each key: its path, its type in words, the first sentence of its help."""
    lines = []
    for path in every_key(model()):
        field = field_at(tuple(path.split(".")))
        assert field is not None
        facts = facts_of(field)
        sentence = " ".join(str(facts["help"]).split()).split(". ")[0].rstrip(".")
        lines.append(f"{path}\t{facts['type']}\t{sentence}\n")
    return "".join(lines)


def _cell(text: str) -> str:
    """Return the text as it can stand in a table: `|` would end the cell, `<NAME>` be a tag where it is no code."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
