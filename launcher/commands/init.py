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
from .options import DEFAULT_FILE, PATH, backend_option, flag

KINDS = ("task", "script")
_BLOCKS = files("cloudtrain.templates") / "starters" / "backends"
BACKENDS = tuple(name for name in BUILT_IN if (_BLOCKS / f"{name}.yaml").is_file())
SKILLS = (".agents/skills", ".claude/skills")  # the folder of the Agent Skills format, and of Claude Code
SCRIPT = "train.py"  # of the kind `script`; a user's own script takes its place
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
@click.argument("folder", metavar="[DIR|SCRIPT]", type=PATH, default=".")
@click.option(
    "--kind", type=click.Choice(KINDS), default="task", show_default=True,
    help="task: three functions for the shared trainer; script: a torchrun script of your own.",
)  # fmt: skip
@backend_option(type=click.Choice(BACKENDS), help="Where it runs: write that block with the keys that it needs.")
@flag("--force", help="Overwrite files that exist, a train.py of your own too; of each a copy stays, FILE.before-init.")
@flag("--skill", help="Write only the skill for coding agents.")
def command(folder: Path, kind: str, backend: str | None, force: bool, skill: bool) -> None:
    """Write a small project that trains as it is, on this machine, in seconds.

    For a script of your own, `cloudtrain init SCRIPT` writes only cloudtrain.yaml, into the current folder, as
    `--kind script` does in a folder with one script. With `--backend` only the backend's block is in the file;
    `cloudtrain submit --backend local` still trains here.
    """
    if skill:
        _write_skill(folder, force)
        return
    is_named = folder.suffix == ".py"
    script = _own_script(folder) if is_named or (kind == "script" and not force) else ""
    folder, kind = (Path(), "script") if is_named else (folder, kind)
    entries = sorted((files("cloudtrain.templates") / "starters" / kind).iterdir(), key=lambda entry: entry.name)
    starter = {entry.name: entry.read_text(encoding="utf-8") for entry in entries if entry.is_file()}
    if backend:
        starter[DEFAULT_FILE] = _for(backend, starter[DEFAULT_FILE])
    try:
        names = {DEFAULT_FILE} if is_named else starter
        existing = [str(folder / name) for name in names if (folder / name).exists()]
        own = str(folder / script) if script else ""
        if own:
            del starter[SCRIPT]
            text = _STARTER_ARGUMENTS.sub(r"# \g<0>", starter[DEFAULT_FILE])
            packages = "\nrequirements: requirements.txt" * (folder / "requirements.txt").is_file()
            starter[DEFAULT_FILE] = text.replace(f"script: {SCRIPT}", f"script: {script}{packages}", 1)
        if (there := [each for each in existing if not own or each == str(folder / DEFAULT_FILE)]) and not force:
            hint = f"`--force` overwrites {' and '.join(existing)}; `cloudtrain init DIR` writes elsewhere"
            raise UsageError(f"already there: {', '.join(there)}", hint=hint)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in starter.items():
            text = text.replace("name: starter", f"name: {name_of(folder)}", 1) if name.endswith(".yaml") else text
            _write(folder / name, text)
    except OSError as exc:
        raise UsageError(f"cannot write to {folder}: {exc.strerror or exc}") from exc
    click.echo(f"wrote {', '.join(str(folder / name) for name in starter)}")
    if own:
        click.echo(f"{own} exists and is used: in {folder / DEFAULT_FILE}, write its options under `args`, its data")
        click.echo("under `inputs`, and the files that it saves under `keep`: other files are lost with the machines")
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


def _write_skill(folder: Path, force: bool) -> None:
    """Write the skill into the folders of SKILLS. Raises UsageError if a changed skill is there, unless `force`."""
    text = (files("cloudtrain.templates") / "skill" / "SKILL.md").read_text(encoding="utf-8")
    targets = [folder / place / "cloudtrain" / "SKILL.md" for place in SKILLS]
    try:
        other = [str(each) for each in targets if each.exists() and each.read_bytes() != text.encode()]
        if other and not force:
            raise UsageError(f"already there: {', '.join(other)}", hint="`--force` replaces the file, and keeps a copy")
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(target, text)
    except OSError as exc:
        raise UsageError(f"cannot write to {folder}: {exc.strerror or exc}") from exc
    click.echo(f"wrote {', '.join(map(str, targets))}")
    click.echo("a limit on the money of agents: cloudtrain budget set agent 50USD --month --ask-above 10USD")


def _own_script(given: Path) -> str:
    """Return the script by its name in the config: the given one, or the only one in the folder. Raises UsageError."""
    if given.suffix == ".py":
        if not given.is_file() or not given.resolve().is_relative_to(Path.cwd()):
            raise UsageError(f"there is no script {given} below this folder", hint="the config lies above its script")
        return given.resolve().relative_to(Path.cwd()).as_posix()
    levels = (sorted(given.glob(each)) for each in (SCRIPT, "*.py", "[!.]*/*.py"))
    found = next(filter(None, levels), [])
    if len(found) > 1:
        names = ", ".join(str(each) for each in found[:4]) + ", ..." * (len(found) > 4)
        hint = f"name it: cloudtrain init {found[0]}; --force writes the small project"
        raise UsageError(f"which is the script? here are {names}", hint=hint)
    return found[0].relative_to(given).as_posix() if found else ""


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
