"""`cloudtrain doctor`: the problems that would stop a job."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path

import click

from cloudtrain.entrypoints.format import counted

from .. import backend as backends
from ..backend import Check
from ..backend_table import ALL, DEFAULT
from ..checkup.checks import Ask, answers, of_this_installation
from ..errors import ConfigError, UsageError
from ..text.terminal import print_json, print_text, say
from .options import DEFAULT_FILE, completes, examples, file_option, json_option

HERE = "cloudtrain"  # the heading of the checks of this installation


@click.command("doctor", epilog=examples("cloudtrain doctor", "cloudtrain doctor sagemaker", "cloudtrain doctor all"))
@click.argument("backend", required=False, shell_complete=completes("backends"))
@click.option("--backend", "named", metavar="NAME", shell_complete=completes("backends"), help="As BACKEND.")
@file_option("Look at this job.")
@json_option
def command(backend: str | None, named: str | None, file: Path | None, as_json: bool) -> int:
    """Find the problems of a job: on this machine, and on every backend with a block in the config file.

    All are asked at once, each for a minute at most. BACKEND asks that backend alone, with or without a file; `all`
    asks every backend. Nothing is changed and nothing is sent. Exit code 1 where a check fails.
    """
    if backend and named and backend != named:
        raise UsageError(f"`{backend}` and `--backend {named}` name two backends", hint="give one of them")
    backend = backend or named
    path = file or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)
    groups: dict[str, list[Check]] = {}
    asks = {backend: _of_one(backend, path)} if backend not in (None, ALL) else _of_all(path, backend == ALL)
    here = [(HERE, of_this_installation())] if backend in (None, ALL) else []
    for name, checks in chain(here, answers(asks)):
        groups[name] = checks
        if not as_json:
            print_text([name, *(line for check in checks for line in _lines(check))])
    if as_json:
        print_json({name: [asdict(check) for check in checks] for name, checks in groups.items()})
    else:
        _sum_up(groups, path, backend)
    return int(any(check.verdict == "fail" for checks in groups.values() for check in checks))


def _of_one(name: str, path: Path | None) -> Ask:
    """Return the call for a backend's checks. Raises ConfigError for an unknown backend or a faulty config."""
    from .. import config
    from ..jobs import adopt

    backends.load(name)
    return partial(adopt.checks, name, config.load(path, backend=name) if path else None)


def _of_all(path: Path | None, with_others: bool) -> dict[str, Ask]:
    """Return the calls for the local backend, the backends in the file, and with `with_others` the remaining backends.

    A faulty config raises ConfigError if the file names a single backend; else the faults become that backend's checks.
    """
    others = {name: _of_one(name, None) for name in backends.names()} if with_others else {}
    if path is None:
        return others or {DEFAULT: _of_one(DEFAULT, None)}
    from .. import config

    names = config.backends_configured(path)
    asked = config.backends_asked(path)
    asks: dict[str, Ask] = {}
    for name in dict.fromkeys([DEFAULT, *asked, *names]):
        try:
            asks[name] = _of_one(name, path)
        except ConfigError as error:
            if name in asked and len(asked) == 1:
                raise
            asks[name] = partial(_faults, error)
    return others | asks


def _faults(error: ConfigError) -> list[Check]:
    return [
        Check("config", "fail", f"{f'{fault.place}, ' if fault.place else ''}{fault.key}: {fault.message}", fault.hint)
        for fault in error.faults
    ]


def _lines(check: Check) -> list[str]:
    cure = [f"        {check.cure}"] if check.cure else []
    return [f"  {check.verdict:4}  {check.name}: {check.found}", *cure]


def _sum_up(groups: dict[str, list[Check]], path: Path | None, backend: str | None) -> None:
    verdicts = [check.verdict for checks in groups.values() for check in checks]
    failed, warned = verdicts.count("fail"), verdicts.count("warn")
    words = [f"{failed} failed"] if failed else []
    words += [counted(warned, "warning")] if warned else []
    say(f"{counted(len(verdicts), 'check')}: {', '.join(words) or 'all is well'}")
    if backend is None and path is None:
        say(f"no {DEFAULT_FILE} here: `cloudtrain doctor ssh` checks another backend, `cloudtrain doctor all` all")
