"""`cloudtrain adopt`: add unknown running jobs to the registry."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import click

from cloudtrain.entrypoints.format import counted

from .. import backend as backends
from ..backend import FoundAttempt
from ..errors import CloudtrainError, ConfigError, NoSuchJobError
from ..jobs import adopt
from ..store.registry import Registry
from ..text.terminal import confirm, print_json, say
from .options import DEFAULT_FILE, backend_option, cli_command, file_option, json_option, yes_option


@cli_command("adopt", "cloudtrain adopt", "cloudtrain adopt --backend sagemaker digits-x4k2p")
@click.argument("wanted", nargs=-1, metavar="[JOB]...")  # without completion: the registry does not know the names
@backend_option(metavar="NAME", help="Ask only this backend.")
@file_option("Look where its jobs run.")
@yes_option
@json_option
def command(wanted: tuple[str, ...], backend: str | None, file: Path | None, yes: bool, as_json: bool) -> int:
    """Find running jobs that the registry does not know, and add the jobs to the registry again.

    Without JOB: all jobs that this home has sent, after a question. A job from another home needs its name as JOB.
    Budgets reserve the worst case of each adopted job.
    """
    registry = Registry()
    there, not_asked = _found([backend] if backend else backends.names(), file, registry.folder)
    there = [(name, found) for name, found in there if not wanted or found.job_id in wanted]
    for name, found in there:
        say(f"{found.job_id}  {name}, attempt {found.number}{'' if found.is_own else ', sent from another home'}")
    if missing := set(wanted) - {found.job_id for _, found in there}:
        message = f"no running job `{min(missing)}` that the registry does not know"
        raise NoSuchJobError(message, hint="cloudtrain adopt lists them; cloudtrain list --all shows known jobs")
    rows = []
    for name, found in there:
        try:
            rows += [(adopt.row_of(name, found), found)] if wanted or found.is_own else []
        except ConfigError as error:
            if wanted:
                raise
            say(error.message)
    if not rows:
        say("no running job of this home is missing in the registry")
    elif not wanted and not confirm(f"Adopt {counted(len(rows), 'job')}?", yes=yes):
        return 1
    for job, found in rows:
        adopt.adopt(registry, job, found)
        say(f"adopted {job.id}: cloudtrain status {job.id}")
    if as_json:
        print_json({"adopted": [job.id for job, _ in rows], "not_asked": not_asked})
    return 0


def _found(names: list[str], file: Path | None, home: Path) -> tuple[list[tuple[str, FoundAttempt]], dict[str, str]]:
    """Return the unknown attempts with their backends, asked at once, and errors; a single backend's is raised."""
    path = file or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)
    there, not_asked = [], {}
    with ThreadPoolExecutor(len(names)) as pool:
        for name, (found, error) in zip(names, pool.map(partial(_asked, path, home), names), strict=True):
            there += [(name, each) for each in found]
            if error is not None:
                if len(names) == 1:
                    raise error
                not_asked[name] = error.message
                say(f"{name}: not asked: {error.message}")
    return there, not_asked


def _asked(path: Path | None, home: Path, name: str) -> tuple[list[FoundAttempt], CloudtrainError | None]:
    from .. import config

    try:
        is_named = path is not None and name in config.backends_configured(path)
        loaded = config.load(path, backend=name) if path is not None and is_named else None
        return adopt.unknown(name, loaded, home), None
    except CloudtrainError as error:
        return [], error
