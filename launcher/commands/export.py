"""`cloudtrain export`: a job's model as a checked folder."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..backend_table import SERVING
from ..errors import UsageError
from ..job import Job
from ..text.terminal import print_json, print_lines, say, say_each
from .options import cli_command, completes, flag, json_option, path_option

_FORMS = "safetensors,pt2"


@cli_command(
    "export",
    "cloudtrain export last",
    "cloudtrain export digits -o digits-v2 --form safetensors,pt2,onnx",
    "cloudtrain export digits --checkpoint step-200 --sign ~/.ssh/id_ed25519",
    "cloudtrain export digits --for sagemaker --machine ml.g5.xlarge",
)
@click.argument("job", default="last", shell_complete=completes("jobs"))
@click.option(
    "--checkpoint", "choice", metavar="WHICH", help="best, last or step-N.  [default: best if kept, else last]"
)
@path_option("-o", "--output", help="The folder to write.  [default: JOB-model, or JOB-VENDOR]")
@click.option("--name", metavar="NAME", help="The model's name.  [default: the job's name, or the folder's]")
@click.option("--form", "forms", help="Forms: safetensors, pt2, onnx, huggingface.  [default: safetensors,pt2]")
@click.option("--input", "inputs", multiple=True, metavar="NAME=PATH", help="An input of the job, on this machine.")
@click.option("--for", "vendor", metavar="VENDOR", help=f"Add what its tools take: {SERVING}.")
@click.option("--machine", metavar="TYPE", help="With --for: the endpoint's machine.  [default: 4 cores, no GPU]")
@path_option("--sign", "key", help="Sign the checksums with this ssh key.")
@flag("--unchecked", help="Write the folder without a check, and record that.")
@json_option
def command(
    job: str,
    choice: str | None,
    output: Path | None,
    name: str | None,
    forms: str | None,
    inputs: tuple[str, ...],
    vendor: str | None,
    machine: str | None,
    key: Path | None,
    unchecked: bool,
    as_json: bool,
) -> int:
    """Write a job's model as a folder: weights, traced model, config, code, model card, checksums.

    A new process opens the files and compares their results with the checkpoint's model, on samples of the split
    `eval`; if they differ, nothing is written and the exit code is 1. JOB may be a checkpoint's folder: then only the
    weights are exported, and --unchecked must be given.

    With --for, the folder is `model` in the output folder, beside a Dockerfile, the vendor's requests, and a README of
    the vendor's own commands that start an endpoint and remove the endpoint again. Nothing is sent.
    """
    from ..jobs.refresh import refresh
    from ..models import exporting
    from ..store.registry import Registry

    exporting.require_choice(choice)
    if name is not None:
        exporting.require_model_name(name)
    if machine is not None and vendor is None:
        raise UsageError("--machine is of an endpoint", hint=f"add --for {SERVING}")
    wanted, given = exporting.parse_forms(forms or _FORMS), _inputs(inputs)
    if key is not None:
        key = key.expanduser()
        exporting.require_key(key)
    registry = Registry()
    _end_on_signals()
    if "/" in job:
        _require_job(choice, inputs, forms, vendor)
        place = (output or Path(f"{Path(job).name}-model")).absolute()
        exported = exporting.export_path(registry, Path(job), place, name=name, key=key, is_unchecked=unchecked)
        return _print(exported, (), as_json=as_json)
    exporting.require_torch("an export")
    one = refresh(registry, registry.find(job))
    place = (output or Path(f"{one.id}-{vendor or 'model'}")).absolute()
    say(f"exporting {one.id}")
    export = partial(
        exporting.export_job,
        registry,
        one,
        choice=choice,
        name=name,
        forms=wanted,
        inputs=given,
        key=key,
        is_unchecked=unchecked,
        needed=wanted[1] if forms is not None and len(wanted) == 2 else None,
    )
    exported, notes = _written(export, place, one, vendor, name or one.name, machine)
    return _print(exported, notes, as_json=as_json)


def _written(
    export: Callable[[Path], dict[str, Any]], place: Path, job: Job, vendor: str | None, name: str, machine: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Write the model, and the vendor's files if a vendor is named; return the result of `export`, and notes."""
    if vendor is None:
        return export(place), ()
    from .. import config
    from ..models import deployment

    return deployment.write(vendor, config.stored(job.config), name, machine, place, export)


def _require_job(choice: str | None, inputs: tuple[str, ...], forms: str | None, vendor: str | None) -> None:
    """Raise UsageError for an option that a checkpoint's folder has no use for."""
    named = forms if forms != "safetensors" else None
    given = {"--checkpoint": choice, "--input": inputs, "--form": named, "--for": vendor}
    if wrong := [name for name, value in given.items() if value]:
        hint = "a folder is one checkpoint without its job's code: only its weights are exported"
        raise UsageError(f"{wrong[0]} needs a job, not a folder", hint=hint)


def _end_on_signals() -> None:
    """Have SIGTERM and SIGHUP end the command as Ctrl-C does: by an exception, so that no folder is left."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as after nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def _inputs(given: tuple[str, ...]) -> dict[str, str]:
    for each in given:
        name, _, path = each.partition("=")
        if not name or not path:
            raise UsageError(f"--input {each}: expected NAME=PATH", hint="as in --input train=data/train")
    return {name: str(Path(path).absolute()) for name, _, path in (each.partition("=") for each in given)}


def _print(exported: dict[str, Any], notes: tuple[str, ...], *, as_json: bool) -> int:
    """Print the result of the check and the notes for people, and the folder as data; return the exit code."""
    if as_json:
        print_json(exported)
        return 0
    check = exported["check"]
    say_each(f"without {form}: {reason}" for form, reason in check["left_out"].items())
    if check["passed"] is None:
        say(f"not checked: {check['why']}")
    for form, found in check["forms"].items():
        far = "" if found["same_bits"] else f", to {found['difference']:.1e} of the largest value"
        say(f"{form}: {'the same bits' if not far else 'the same results'} as the checkpoint's model{far}")
    say_each(notes)
    print_lines([exported["place"]])
    return 0
