"""`cloudtrain compare`: several jobs side by side, on the terminal or on a page with all curves in one chart."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ..errors import UsageError
from ..report import comparing
from ..report.comparing import Comparison
from ..store.registry import Registry
from ..text.charts import chart, signs_of
from ..text.tables import table, width
from ..text.terminal import print_json, print_lines, print_text, say
from .options import cli_command, completes, flag, json_option, path_option
from .report import seen

MOST = 8  # the colours that a reader can distinguish
CURVE_COLUMNS = 30


@cli_command(
    "compare",
    "cloudtrain compare digits digits-lr",
    "cloudtrain compare digits digits-lr -o compared.html",
    "cloudtrain compare digits digits-lr --loss 0.5",
)
@click.argument("jobs", nargs=-1, metavar="JOB JOB...", shell_complete=completes("jobs"))
@path_option("-o", "--output", help="Write a page with all curves to this file.")
@click.option(
    "--loss", type=float, help="The smoothed loss at which to compare costs.  [default: the lowest that all reached]"
)
@flag("--open", "opens", help="Show the page in the browser; needs -o.")
@flag("--force", help="Replace a file that is not a cloudtrain report without asking.")
@json_option
def command(
    jobs: tuple[str, ...], output: Path | None, loss: float | None, opens: bool, force: bool, as_json: bool
) -> None:
    """Lay jobs side by side: where their configs differ, and what came of each.

    Two to eight jobs: final and lowest loss, metrics, time, cost, throughput, and what it cost to come down to a loss
    that all of them reached.
    """
    registry = Registry()
    if not 2 <= len(jobs) <= MOST:
        raise UsageError(f"compare takes two to {MOST} jobs, not {len(jobs)}", hint="cloudtrain list shows their names")
    if opens and output is None:
        raise UsageError("--open shows the page, which is written with -o", hint="add -o compared.html")
    found = [seen(registry, key) for key in jobs]
    if twice := sorted({job.id for job in found if [each.id for each in found].count(job.id) > 1}):
        raise UsageError(f"{twice[0]} is named twice", hint="name another job")
    now_s = time.time()
    comparison = comparing.compared(registry, found, now_s, loss)
    if output is not None:
        from ..report import page

        page.require_free(output, force=force)
        page.write(output, page.comparison_html(comparison, now_s))
        if not as_json:
            print_lines([str(output)])
        if opens:
            page.show(output)
    if as_json:
        print_json(comparing.as_json(comparison))
    elif output is None:
        _print(comparison)


def _print(found: Comparison) -> None:
    names = [job.id for job in found.jobs]
    losses = [[loss for _, loss in comparing.smoothed(data)] for data in found.datas]
    if curves := [[name, _curve(each)] for name, each in zip(names, losses, strict=True) if each]:
        print_lines([*table(["JOB", "LOSS"], curves, columns=width()), ""])
    results = [[name, *values] for name, values in comparing.rows(found)]
    print_lines(table(["RESULT", *names], results, columns=width()))
    if words := comparing.crossing_words(found):
        print_text([words])
    if not found.config:
        print_lines(["", "all were submitted with the same config"])
        return
    rows = [[key, *(comparing.value_text(value) for value in values)] for key, values in found.config.items()]
    print_lines(["", *table(["CONFIG", *names], rows, columns=width())])
    if running := [job.id for job in found.jobs if job.active]:
        say(f"{', '.join(running)} still {'runs' if len(running) == 1 else 'run'}: this is how it is now")


def _curve(losses: list[float]) -> str:
    """Return the first loss, the curve as text, and the last loss."""
    return f"{losses[0]:.4g} {chart(losses, CURVE_COLUMNS, 1, signs_of())[0]} {losses[-1]:.4g}"
