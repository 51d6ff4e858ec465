"""`cloudtrain report`: a file about a job or a sweep, to read and to send to people."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from ..errors import CloudtrainError
from ..job import Job
from ..store.registry import Registry
from ..text.terminal import print_json, print_lines, say
from .options import cli_command, flag, job_argument, json_option, path_option


@cli_command("report", "cloudtrain report last --open", "cloudtrain report digits -o digits.html")
@job_argument
@path_option("-o", "--output", help="The file to write.  [default: JOB.html]")
@flag("--open", "opens", help="Show it in the browser.")
@flag("--force", help="Replace a file that is not a cloudtrain report without asking.")
@json_option
def command(job: str, output: Path | None, opens: bool, force: bool, as_json: bool) -> None:
    """Write a job's report: curves, attempts, costs, code, environment, in a single file without network requests.

    The report of a running job shows the present state. An existing report is replaced. With --json the job and
    its series are printed, and no file is written. A sweep's report has its rungs, its trials and their results.
    """
    from ..jobs.view import view_of
    from ..report import page
    from ..report.data import chart_data
    from ..store import series

    registry = Registry()
    found, now_s = seen(registry, job), time.time()
    if found.config.get("sweep"):
        from ..report import sweep_page

        html = partial(sweep_page.sweep_html, registry, found, now_s)
        data = sweep_page.sweep_json(registry, found, now_s) if as_json else {}
    else:
        html = partial(page.report_html, registry, found, now_s)
        view = view_of(found, registry.attempts(found), now_s)
        data = chart_data(view, series.read(registry.database, found.id)) if as_json else {}
    if as_json:
        print_json(data)
        return
    path = output or Path(f"{found.id}.html")
    page.require_free(path, force=force)
    page.write(path, html())
    if found.active:
        say(f"{found.id} runs: the report tells how it is now")
    print_lines([str(path)])
    if opens:
        page.show(path)


def seen(registry: Registry, key: str) -> Job:
    """Return the job in its present state; the last known state, with a message, if the backend cannot be asked."""
    from ..jobs.refresh import refresh

    job = registry.find(key)
    try:
        return refresh(registry, job)
    except CloudtrainError as error:
        say(f"the report shows {job.id} as last seen: {error.message}")
        return job
