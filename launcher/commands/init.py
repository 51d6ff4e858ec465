"""`cloudtrain init`: a small project, ready to train."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import click

from ..errors import UsageError
from ..job import name_of
from .options import DEFAULT_FILE

KINDS = ("task", "script")
SCRIPT = "train.py"  # of the kind `script`; a user's own file of the name stays
_STARTER_ARGUMENTS = re.compile("^(args|keep|resume_args):", re.MULTILINE)  # of the starter's script, not of the user's
REHEARSE = {"cloudtrain rehearse": "a few steps, by the same commands"}
RESUME = {"cloudtrain rehearse --preempt-at 20": "once `keep` and `resume_args` are set: a stop and a resume"}
TWO, AS_TWO = " --instances 2", ", as two instances"
NEXT = {
    f"cloudtrain submit{TWO}": f"train here{AS_TWO}",
    "cloudtrain report last -o ../report.html": "curves, costs and code in one file",
    "cloudtrain explain": "every key of cloudtrain.yaml",
}


@click.command("init")
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default=".")
@click.option(
    "--kind", type=click.Choice(KINDS), default="task", show_default=True,
    help="task: three functions for the shared trainer; script: a torchrun script of your own.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite files that exist, a train.py of your own too.")
def command(folder: Path, kind: str, force: bool) -> None:
    """Write a small project that trains as it is, on this machine, in seconds.

    Beside a train.py of your own, `--kind script` writes only cloudtrain.yaml, for your script.
    """
    starter = {
        entry.name: entry.read_text(encoding="utf-8")
        for entry in sorted((files("cloudtrain.templates") / "starters" / kind).iterdir(), key=lambda e: e.name)
        if entry.is_file()
    }
    try:
        existing = [str(folder / name) for name in starter if (folder / name).exists()]
        own = str(folder / SCRIPT) if kind == "script" and not force and existing == [str(folder / SCRIPT)] else ""
        if own:
            del starter[SCRIPT]
            starter[DEFAULT_FILE] = _STARTER_ARGUMENTS.sub(r"# \g<0>", starter[DEFAULT_FILE])
        elif existing and not force:
            hint = f"`--force` overwrites {' and '.join(existing)}; `cloudtrain init DIR` writes elsewhere"
            raise UsageError(f"already there: {', '.join(existing)}", hint=hint)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in starter.items():
            text = text.replace("name: starter", f"name: {name_of(folder)}", 1) if name.endswith(".yaml") else text
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write to {folder}: {exc.strerror or exc}") from exc
    click.echo(f"wrote {', '.join(str(folder / name) for name in starter)}")
    if own:
        click.echo(f"{own} exists and is used: in {folder / DEFAULT_FILE}, write its options under `args`,")
        click.echo("and the files that the script saves under `keep`: other files are lost with the machines")
    click.echo("\nnext:")
    if folder.resolve() != Path.cwd():
        click.echo(f"  cd {folder}")
    steps = REHEARSE | (RESUME if own else {}) | NEXT if kind == "script" else NEXT
    if own:  # possibly for one process
        steps = {line.removesuffix(TWO): comment.removesuffix(AS_TWO) for line, comment in steps.items()}
    for line, comment in steps.items():
        click.echo(f"  {line:<{max(map(len, steps))}}  # {comment}")
