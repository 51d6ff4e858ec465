"""`cloudtrain rehearse`: run the job of a submit locally for a few steps, interrupt and resume the job."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backend_table import BUILT_IN, traits
from ..errors import CloudtrainError, UsageError
from ..rehearsal.stage import MOST_TOLERANCE, RehearsalOptions
from ..text import addresses
from ..text.terminal import print_json, print_text, say
from .options import Overrides, config_command, config_options, count_option, duration_option, flag, json_option

if TYPE_CHECKING:
    from ..config.schema import JobConfig


def _inputs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    found = {}
    for value in values:
        name, mark, path = value.partition("=")
        if not mark or not Path(path).exists():
            raise click.BadParameter(f"expected NAME=PATH, a path that is there, not `{value}`", ctx, param)
        found[name] = Path(path).absolute()
    return found


def _tolerance(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if math.isnan(value):  # click's range and every comparison accept NaN
        raise click.BadParameter("expected a number", ctx, param)
    return value


@config_command(
    "rehearse", "cloudtrain rehearse --preempt-at 20", "cloudtrain rehearse --backend sagemaker --steps 3 --nproc 1"
)
@config_options
@count_option("--steps", default=5, show_default=True, help="How many steps to run.")
@count_option("--preempt-at", metavar="STEP", help="Interrupt it there; prove the resume.")
@flag("--kill", "kills", help="With --preempt-at: kill it without a notice, as if the machine were lost.")
@count_option("--nodes", default=2, show_default=True, help="At most so many of its nodes.")
@count_option("--nproc", help="At most so many ranks a node.  [default: as many as this machine supports]")
@click.option("--input", "inputs", multiple=True, metavar="NAME=PATH", callback=_inputs, help="Give it this input.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, MOST_TOLERANCE),
    default=0.0,
    callback=_tolerance,
    metavar="SHARE",
    show_default=True,
    help=f"How far losses may part after the resume, relative: up to {MOST_TOLERANCE}.",
)
@duration_option("--timeout", "timeout_s", default="5m", show_default=True, help="For each start.")
@flag("--keep", "keeps", help="Keep the folder with all logs.")
@json_option
def command(
    overrides: Overrides,
    steps: int,
    preempt_at: int | None,
    kills: bool,
    nodes: int,
    nproc: int | None,
    inputs: dict[str, Path],
    tolerance: float,
    timeout_s: float,
    keeps: bool,
    as_json: bool,
) -> int:
    """Run a job here as its backend would, for a few steps; no network, no account.

    The job's code runs on this machine, with the platform's variables and the config's, not with yours.

    The same bundle is unpacked, and every node's rendered command starts in a sandbox with the platform's environment
    and folders. --preempt-at interrupts the job as the platform does, starts the job again and compares the losses
    with the losses of a run without interruption. The exit code is 1 if a check fails.
    """
    from ..rehearsal.rehearsing import require_torch

    if kills and preempt_at is None:
        raise UsageError("--kill says how to interrupt", hint="add --preempt-at STEP")
    require_torch()
    wish = RehearsalOptions(steps, preempt_at, kills, timeout_s, inputs, tolerance, keeps)
    names = overrides.backends() if overrides.compares() else (overrides.backend,)
    verdicts: list[dict[str, Any]] = []
    for name in names:
        try:
            verdicts.append(_rehearse(replace(overrides, backend=name), wish, nodes, nproc, as_json=as_json))
        except CloudtrainError as error:
            if len(names) == 1:
                raise
            say(f"{name}: {error}")
            verdicts.append({"backend": name, "ok": False, "error": {"message": str(error)}})
    is_right = all(entry["ok"] for entry in verdicts)
    if len(names) > 1 and not as_json:
        print_text(["", *(f"{entry['backend']}: {entry.get('verdict') or 'not rehearsed'}" for entry in verdicts)])
    if as_json:
        print_json(verdicts[0] if len(names) == 1 else {"ok": is_right, "backends": verdicts})
    return 0 if is_right else 1


def places_here(overrides: Overrides, config: JobConfig) -> dict[str, Path]:
    """Return the `local` places of inputs whose place for the rehearsed backend is elsewhere."""
    far = [name for name, uri in config.inputs.items() if not addresses.is_beside(uri)]
    with contextlib.suppress(CloudtrainError):  # the file may not suit this machine
        here = next(name for name in BUILT_IN if traits(name).runs_here)
        local = overrides.load(here).inputs if far else {}
        places = {name: overrides.file.absolute().parent / local[name] for name in local if name in far}
        return {name: place for name, place in places.items() if place.exists()}
    return {}


def _rehearse(
    overrides: Overrides, wish: RehearsalOptions, nodes: int, nproc: int | None, *, as_json: bool
) -> dict[str, Any]:
    """Prepare the job as a submit does, rehearse it at this machine's size, print the verdict, return its JSON."""
    from cloudtrain.entrypoints import processes

    from ..advice import proofs, taskcode
    from ..advice.preparing import prepare
    from ..rehearsal import rehearsing
    from ..store.home import home

    folder = home()
    config = overrides.load()
    if config.sweep is not None and config.task is None:  # the script with the file's own values
        overrides = replace(overrides, settings=(*overrides.settings, "sweep=null"))
        config = overrides.load()
    names = [*config.inputs, *(["init_from"] if config.init_from else [])]
    if unknown := [name for name in wish.inputs if name not in names]:
        known = ", ".join(names) or "none"
        raise UsageError(f"--input {unknown[0]}: the config names no such input", hint=f"there are: {known}")
    wish = replace(wish, inputs={**places_here(overrides, config), **wish.inputs})
    with overrides.placing(), rehearsing.place(folder, keeps=wish.keeps) as own:
        whole = prepare(config, overrides.file, own / "bundles", dry=False)
        given = f"with {', '.join(config.secrets)}" if config.secrets else "without its keys"
        taskcode.tell_once((whole.config_file.parent / config.code.dir).resolve(), given)
        chosen = rehearsing.choose_scale(config, whole.plan, nodes, nproc, processes.gpus())
        named = config.checkpoint.resume if config.checkpoint.resume not in ("auto", "never") else None
        afresh = ("checkpoint.resume=auto",) if named else ()  # the sandbox has no other job's files
        shown = replace(overrides, settings=(*overrides.settings, *chosen.settings, *afresh))
        prepared = prepare(shown.load(), overrides.file, own / "bundles", dry=False, shipped=whole.bundle)
        prepared = replace(prepared, warnings=whole.warnings)  # of the code, which the second look leaves out
        shipped = proofs.files_of(whole)
        unset = [name for name in config.secrets if name not in os.environ]
        secrets = {name: os.environ[name] for name in config.secrets if name in os.environ}
        verdict = rehearsing.rehearse(prepared, chosen, wish, secrets, say, own)
        if named:
            verdict.not_checked.append(f"the start from {named}: it began at step 0")
        if unset:
            verdict.not_checked.append(f"the secrets {', '.join(unset)}: not set here")
        verdict.folder = str(own) if wish.keeps else None
    if verdict.is_proven:
        from ..store.database import Database

        proofs.store(Database(folder), whole.bundle.code_sha256, config, verdict.words, shipped)
    if not as_json:
        print_text(verdict.lines())
    return verdict.dump()
