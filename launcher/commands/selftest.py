"""`cloudtrain selftest`: prove on your own account, hosts or cluster that the whole life of a job works."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .options import DEFAULT_FILE, completes, examples, file_option, json_option, reads, yes_option

if TYPE_CHECKING:
    from ..selftest.report import Row


@click.command(
    "selftest",
    epilog=examples(
        "cloudtrain selftest local",
        "cloudtrain selftest sagemaker --budget 2USD -o proof.json",
        "cloudtrain selftest --from new.json --against old.json",
    ),
)
@click.argument("backend", required=False, shell_complete=completes("backends"))
@file_option("Take the backend's block of this file.")
@click.option(
    "--budget",
    "budget_micro",
    default="2USD",
    metavar="USD",
    callback=reads("parse_money"),
    show_default=True,
    help="Most that the selftest may cost.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The report.  [default: selftest-BACKEND.json]")
@click.option("--against", type=click.Path(path_type=Path), metavar="FILE", help="Compare with an older report.")
@click.option("--from", "given", type=click.Path(path_type=Path), metavar="FILE", help="Compare this one; run nothing.")
@yes_option
@json_option
def command(
    backend: str | None,
    file: Path | None,
    budget_micro: int,
    output: Path | None,
    against: Path | None,
    given: Path | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Run two small jobs through the whole life of a job, and compare each step with what is expected.

    On two small machines without GPUs: a kill of a rank, a stop, a resume, a time limit, the bill; then all is removed.
    The report holds no account, bucket, address, name or path. Exit code 1 if a step differs or was not checked.
    """
    from ..selftest import report as reports
    from ..text.terminal import print_json, print_text

    if given is not None and against is None:
        raise UsageError("--from compares a report with an older one", hint="add --against FILE")
    old = None if against is None else reports.read(against)
    if given is None:
        data, is_ok = _run(backend, file, budget_micro, output, yes=yes)
    else:
        data, is_ok = reports.read(given), True
    unlike = None if old is None else reports.compared(data, old)
    if as_json:
        print_json(data if unlike is None else {**data, "unlike": unlike})
    elif unlike is not None:
        print_text(unlike or [f"no step differs from {against}"])
    return int(not is_ok or (given is not None and bool(unlike)))


def _run(
    backend: str | None, file: Path | None, budget_micro: int, output: Path | None, *, yes: bool
) -> tuple[dict[str, Any], bool]:
    """Return the report's data, and whether all is well."""
    from collections import Counter
    from contextlib import closing
    from tempfile import TemporaryDirectory

    from cloudtrain.entrypoints.format import most

    from .. import config as configs
    from ..backend_table import DEFAULT
    from ..jobs.approval import require_allowed
    from ..selftest import life, planned, report
    from ..store.home import home
    from ..store.registry import Registry
    from ..text.terminal import confirm, say, say_each

    file = file or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)
    backend = backend or (configs.backends_asked(file)[0] if file else DEFAULT)
    with TemporaryDirectory(prefix="cloudtrain-") as folder, closing(Registry(home())) as registry:
        block = planned.block_of(file, backend)
        cache = registry.folder / "bundles"
        jobs, worst_micro = planned.jobs_of(block, backend, Path(folder), cache, budget_micro)
        for each in jobs:
            say_each(each.lines())
            say_each(require_allowed(registry, each))
        if worst_micro and not confirm(f"The selftest may cost up to {most(worst_micro)}. Start it?", yes=yes):
            raise click.Abort
        say("" if worst_micro else "the selftest costs nothing: the machines have no price")
        head = report.head_of(jobs[0])
        private = report.private_values(block, frozenset({head.get("region", ""), head["machine"]}))
        path = output or Path(f"selftest-{backend}.json")
        found = report.Report(path, head, private, tuple(life.STEPS))
        try:
            life.Selftest(registry, jobs, found, _show).run()
        finally:
            counts = Counter(row.verdict for row in found.rows)
            counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
            say(f"{len(life.STEPS)} steps: {counted}; the report is in {path}")
        return found.dump(), found.is_ok


def _show(row: Row) -> None:
    from ..text.terminal import say_each

    say_each(row.lines())
