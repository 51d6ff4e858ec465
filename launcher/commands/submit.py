"""`cloudtrain submit`: plan, send, follow. With --dry-run, print the request and send nothing."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..advice.preparing import prepare
from ..backend_table import ALL, CHEAPEST
from ..errors import NOTHING, ConfigError, UsageError
from ..job import require_name
from ..jobs.approval import approved, require_allowed
from ..text.tables import labelled, width
from ..text.terminal import print_json, say, say_each
from .options import Overrides, config_command, config_options, flag, json_option, path_option, yes_option

if TYPE_CHECKING:
    from ..backend import Request
    from ..config.schema import JobConfig
    from ..job import Job
    from ..planning.prepare import Prepared
    from ..store.registry import Registry


@config_command(
    "submit",
    "cloudtrain submit job.yaml -- --lr 0.1",
    "cloudtrain submit train.py --instances 2 -- --lr 0.1",
    "cloudtrain submit -- torchrun --nnodes 2 --nproc-per-node 8 train.py --lr 0.1",
    "cloudtrain submit --instances 2",
    "cloudtrain submit --backend sagemaker --dry-run -o request",
    "cloudtrain submit -d --set training.max_steps=500 --budget 20",
)
@config_options
@click.option(
    "--name", help="The job's id, and the config's missing `name`; must be free. Default: `name` and five letters."
)
@flag("--dry-run", help="Print the request exactly as it would be sent, and the plan; send nothing.")
@path_option("-o", "--output", help="Dry run: write the request's files here too.")
@flag("-d", "--detach", help="Return once the job is sent; else follow it.")
@click.option(
    "--idempotency-key", metavar="KEY", help="The same key sends once: again, it follows the job that has it."
)
@flag("--queue", help="Wait in line for machines that are in use (docs/queue.md).")
@flag(
    "--force",
    help="Send a job whose resume no rehearsal has proven, and a job whose parent's weights do not fit its model.",
)
@yes_option
@json_option
def command(
    overrides: Overrides,
    name: str | None,
    dry_run: bool,
    output: Path | None,
    detach: bool,
    idempotency_key: str | None,
    queue: bool,
    force: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Send a job, and follow it to its end; Ctrl-C leaves it running.

    FILE is the config file, as with -f; ARGS take the place of the config's `args`. The exit code is the job's.
    Closing the terminal does not stop the job.

    SCRIPT needs no file; with cloudtrain.yaml beside it, it takes the place of the program there. ARGS may also be
    a whole command line of torchrun, python or accelerate launch.
    """
    if queue:
        overrides = replace(overrides, settings=(*overrides.settings, "queue.wait=true"))
    if name is not None:
        require_name(name)
        overrides = overrides.named(name)
    try:
        if dry_run:
            return _dry_run(overrides, output, as_json)
        if output is not None:
            raise UsageError("-o writes a dry run's files", hint="add --dry-run")
        if overrides.backend == ALL:
            raise UsageError("`--backend all` is for a dry run", hint="add --dry-run, or choose one backend")
        if overrides.compares():
            overrides = _chosen(overrides)
        sent = _send(overrides, name, idempotency_key, force=force, yes=yes)
    except (click.Abort, KeyboardInterrupt) as error:
        raise KeyboardInterrupt(*(error.args or (NOTHING,))) from None
    return 1 if sent is None else _follow(*sent, detach=detach, as_json=as_json)


def _send(
    overrides: Overrides, name: str | None, key: str | None, *, force: bool, yes: bool
) -> tuple[Registry, Job, bool] | None:
    """Return the registry, the job and whether the job is new, None if the user does not approve the costs."""
    from ..jobs import queue, submit
    from ..store.home import home
    from ..store.registry import Registry

    folder = home()
    config = overrides.load()
    with overrides.placing():
        prepared = prepare(config, overrides.file, folder / "bundles", dry=False)
    prepared = replace(prepared, settings=overrides.assignments(config.backend))
    registry = Registry(folder)

    def check() -> None:
        with overrides.placing():
            lines = require_allowed(registry, prepared, key=key, force=force)
        say_each(lines)

    if config.sweep is not None:
        from ..sweeps.overview import plan_lines

        lines = plan_lines(config.model_dump(mode="json"), prepared.plan)
        prepared = replace(prepared, notes=(*prepared.notes, *lines))
    if not approved(prepared, yes=yes, check=check):
        return None
    job, is_new = submit.send(registry, prepared, name=name, key=key)
    return registry, queue.drive(registry, job), is_new


def _follow(registry: Registry, job: Job, is_new: bool, *, detach: bool, as_json: bool) -> int:
    from ..jobs.failover import is_on
    from ..jobs.follow import follow, log_view
    from ..jobs.view import unattended
    from ..logs.view import View

    is_sent, queue = job.attempt.phase != "queued", job.attempt.state.queue or {}
    new = "sent" if is_sent else "in line, nothing is sent yet"
    say(f"{new if is_new else 'was sent before, with this key'}: {job.id}")
    if as_json:
        print_json({"job": job.id, "backend": job.backend, "new": is_new, "plan": job.attempt.plan.dump()})
    if not is_sent and (detach or not is_on(job.attempt)):
        rows = [("reason", str(queue.get("reason"))), ("send it", "cloudtrain advance")]
        rows += [("", "or cloudtrain watch: a candidate is sent while a command runs")] if is_on(job.attempt) else []
        say("\n".join(labelled([*rows, ("stop it", f"cloudtrain stop {job.id}")])))
        return 0
    if detach:
        say("\n".join(unattended(job)))
        return 0
    return follow(registry, job, log_view(job, View(as_json=as_json)))


def _chosen(overrides: Overrides) -> Overrides:
    """Return the overrides with the cheapest backend. Raises UsageError, ConfigError without a price."""
    from ..jobs import compare

    found = compare.offers(overrides.load, overrides.backends(), overrides.file)
    say_each([*compare.lines(found, width(sys.stderr) or compare.COLUMNS), *compare.unlike(found)])
    first = compare.cheapest(found)
    if overrides.backend != CHEAPEST:
        planned = [offer.backend for offer in found if offer.prepared]
        hint = f"--backend {planned[0]}" if planned else "fix the problems"
        if first is not None:
            hint = f"--backend {first.backend} is the cheapest by the hour; `--backend cheapest` takes that"
        raise UsageError(f"several backends, and none chosen: {', '.join(overrides.backends())}", hint=hint)
    if first is None:
        hint = "set `price_per_hour` in a backend's block, or choose one by --backend NAME"
        what = " of a backend that has the accelerators" if any(offer.lacks for offer in found) else ""
        raise ConfigError(f"the cheapest backend is not known: no price{what} is known", hint=hint)
    say(f"the cheapest by the hour, of those whose price is known: {first.backend}")
    return replace(overrides, backend=first.backend)


def _dry_run(overrides: Overrides, output: Path | None, as_json: bool) -> int:
    if overrides.compares() and overrides.backend != CHEAPEST:
        return _dry_run_of_several(overrides, output, as_json)
    overrides = _chosen(overrides) if overrides.backend == CHEAPEST else overrides
    config = overrides.load()
    with overrides.placing():
        prepared = prepare(config, overrides.file, Path(), dry=True)
    shown = _show(prepared, overrides, output, "", as_json=as_json)
    if as_json:
        print_json(shown)
    return 0


def _dry_run_of_several(overrides: Overrides, output: Path | None, as_json: bool) -> int:
    """Print each backend's request, all plans side by side, and for each impossible plan the reason."""
    from ..jobs import compare

    found = compare.offers(overrides.load, overrides.backends(), overrides.file, packs=True)
    shown = [
        _show(offer.prepared, overrides, output, offer.backend, as_json=as_json) for offer in found if offer.prepared
    ]
    plans = compare.lines(found, width(sys.stderr) or compare.COLUMNS)
    say_each(["", *plans, *compare.unlike(found), *compare.refused(found)])
    if as_json:
        missing = [{"backend": offer.backend, "error": offer.why} for offer in found if not offer.prepared]
        print_json([*shown, *missing])
    return 0 if shown else 3


def _show(
    prepared: Prepared, overrides: Overrides, output: Path | None, backend: str, *, as_json: bool
) -> dict[str, Any]:
    """Print a request and the plan, write the files; return the JSON. `backend` is "" for a single backend."""
    from ..money.budget_preview import books_of
    from ..planning.prepared import candidates_of

    request, config = prepared.request, prepared.config
    books, worst_micro = books_of(config), prepared.plan.most_micro
    if output is not None:
        _write(output / backend, request, config, overrides.file)
        for each in prepared.candidates[1:]:
            _write(output / backend / f"candidate-{each.candidate}", each.request, each.config, overrides.file)
    if not as_json:
        click.echo(request.text, nl=False)
        for name in request.decoded if output is None else ():
            say(f"{f'{backend}: ' if backend else ''}{name} in the request is encoded; `-o DIR` writes it as text")
    for line in [*prepared.lines(), *books.lines(worst_micro)]:  # after the request: a request may fill many screens
        say(f"{backend}: {line.removeprefix(f'{backend}: ')}" if backend else line)
    say("dry run: nothing was sent")
    decoded = {name: json.loads(text) for name, text in request.decoded.items()}
    more: dict[str, Any] = {"candidates": candidates_of(prepared), "decoded": decoded}
    shown = {"job": request.name.rpartition("-")[0], "backend": config.backend, "request": request.body}
    shown |= {"plan": prepared.plan.dump(), **{name: each for name, each in more.items() if each}}
    return {**shown, "budgets": books.dump(worst_micro)}


def _write(folder: Path, request: Request, config: JobConfig, config_file: Path) -> None:
    """Write the request's files, and the archive of the code if a vendor's CLI uploads the archive by itself."""
    from tempfile import TemporaryDirectory

    from ..planning import bundle as bundles
    from ..planning.shipped import MB

    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if is_new:  # the folder may be inside the code folder, and must not be shipped
            (folder / ".gitignore").write_text("*\n", encoding="utf-8")
        for name, text in request.files.items():
            (folder / name).write_text(text, encoding="utf-8")
            say(f"wrote {folder / name}")
        if request.archive is not None:
            target = folder / request.archive
            target.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix="cloudtrain-") as scratch:
                code, most = config_file.parent / config.code.dir, config.code.max_size_mb * MB
                shutil.copyfile(bundles.pack(code, config.code.exclude, most, Path(scratch)).path, target)
            say(f"wrote {target}")
    except OSError as error:
        raise ConfigError(f"the files cannot be written: {error.strerror}", where=error.filename) from error
