"""`cloudtrain init`: a small project, ready to train."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files
from pathlib import Path

import click

from ..backend_table import BUILT_IN
from ..errors import UsageError
from ..job import name_of
from .options import DEFAULT_FILE, completes

KINDS = ("task", "script")
_BLOCKS = files("cloudtrain.templates") / "starters" / "backends"
BACKENDS = tuple(name for name in BUILT_IN if (_BLOCKS / f"{name}.yaml").is_file())
SCRIPT = "train.py"  # of the kind `script`; a user's own file of the name stays
_EVERYWHERE = re.compile(r"\n# Where else it can run.*", re.DOTALL)  # the starter's commented blocks of all backends
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
@click.option(
    "--backend", type=click.Choice(BACKENDS), shell_complete=completes("backends"),
    help="Where it runs: write that block with the keys that it needs.",
)  # fmt: skip
@click.option(
    "--force", is_flag=True,
    help="Overwrite files that exist, a train.py of your own too; of each a copy stays, FILE.before-init.",
)  # fmt: skip
def command(folder: Path, kind: str, backend: str | None, force: bool) -> None:
    """Write a small project that trains as it is, on this machine, in seconds.

    Beside a train.py of your own, `--kind script` writes only cloudtrain.yaml, for your script. With `--backend` only
    that backend's block is in the file; `cloudtrain submit --backend local` still trains here.
    """
    entries = sorted((files("cloudtrain.templates") / "starters" / kind).iterdir(), key=lambda entry: entry.name)
    starter = {entry.name: entry.read_text(encoding="utf-8") for entry in entries if entry.is_file()}
    if backend:
        starter[DEFAULT_FILE] = _for(backend, starter[DEFAULT_FILE])
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
            _write(folder / name, text)
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
    if backend:
        doctor = f"cloudtrain doctor {backend}"
        steps = {**REHEARSE, doctor: f"once the block `{backend}` is filled in", "cloudtrain submit": "train there"}
    if own:  # possibly for one process
        steps = {line.removesuffix(TWO): comment.removesuffix(AS_TWO) for line, comment in steps.items()}
    for line, comment in steps.items():
        click.echo(f"  {line:<{max(map(len, steps))}}  # {comment}")


def _for(backend: str, text: str) -> str:
    """Return the starter's config with the block of one backend, in place of the commented blocks of all."""
    machine, _, block = (_BLOCKS / f"{backend}.yaml").read_text(encoding="utf-8").partition("\n")  # first the machine
    text = text.replace("  instances: 1\n", f"  instances: 1\n  {machine}\n", 1)
    return _EVERYWHERE.sub(lambda _: f"\n{block}", text.replace("backend: local", f"backend: {backend}", 1))


def _write(file: Path, text: str) -> None:
    """Write the file; a file with other text, which `--force` replaces, stays under another name."""
    if file.exists() and file.read_bytes() != text.encode():
        names = (file.with_name(f"{file.name}.before-init{number or ''}") for number in itertools.count())
        kept = next(name for name in names if not name.exists())
        file.replace(kept)
        click.echo(f"{file} is kept as {kept.name}")
    file.write_text(text, encoding="utf-8")
