"""`cloudtrain selftest`: prove on your own account, hosts or cluster that the whole life of a job works."""

from __future__ import annotations

import signal
from collections import Counter
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from cloudtrain.entrypoints.format import most

from ..backend_table import DEFAULT
from ..errors import UsageError
from ..text.terminal import confirm, print_json, print_text, say, say_each
from .options import DEFAULT_FILE, cli_command, completes, file_option, json_option, path_option, reads, yes_option

_BUDGET: dict[str, Any] = {"default": "2USD", "show_default": True, "metavar": "USD", "callback": reads("parse_money")}


@cli_command("selftest", "cloudtrain selftest ssh", "cloudtrain selftest --from new.json --against old.json")
@click.argument("backend", required=False, shell_complete=completes("backends"))
@file_option("Take the backend's block of this file.")
@click.option("--budget", "budget_micro", help="Most that the selftest may cost.", **_BUDGET)
@path_option("-o", "--output", help="The report.  [default: selftest-BACKEND.json]")
@path_option("--against", metavar="FILE", help="Compare the report with this older one.")
@path_option("--from", "given", metavar="FILE", help="With --against: compare this report; run nothing.")
@yes_option
@json_option
def command(against: Path | None, given: Path | None, as_json: bool, **options: Any) -> int:
    """Run two small jobs on two machines through the whole life of a job, and compare each step.

    A rank is killed; the job stops, resumes and reaches its time limit; then all is removed. BACKEND is by default the
    config file's, of which the backend's block, `image` and `project` count. The report holds no account, bucket,
    address, name or path. The exit code is 1 if a step differs; with --from, if the reports do.
    """
    from ..selftest import report

    if given is not None and against is None:
        raise UsageError("--from compares a report with an older one", hint="add --against FILE")
    old = report.read(against) if against else None
    data = report.read(given) if given else _run(**options)
    unlike = report.compared(data, old) if old else []
    if as_json:
        print_json(data | ({"unlike": unlike} if old else {}))
    elif old:
        print_text(unlike or [f"no step differs from {against}"])
    return int(bool(unlike) if given else not data["steps"] or "differs" in {row["verdict"] for row in data["steps"]})


def _run(backend: str | None, file: Path | None, budget_micro: int, output: Path | None, yes: bool) -> dict[str, Any]:
    """Return the report, without steps if the user does not approve the costs."""
    from .. import config as configs
    from ..jobs.approval import require_allowed
    from ..selftest import life, planned, report
    from ..store.registry import Registry

    file = file or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)
    backend = backend or (configs.backends_asked(file)[0] if file else DEFAULT)
    with TemporaryDirectory(prefix="cloudtrain-") as folder, closing(Registry()) as registry:
        block, cache = planned.block_of(file, backend), registry.folder / "bundles"
        jobs, worst_micro = planned.jobs_of(block, backend, Path(folder), cache, budget_micro)
        for each in jobs:
            say_each([*each.lines(), *require_allowed(registry, each)])
        head, path = report.head_of(jobs[0]), output or Path(f"selftest-{backend}.json")
        found = report.ProofReport(path, head, planned.read("steps.yaml"), report.private_texts(block, head))
        if not worst_micro:
            say("the selftest costs nothing")
        elif not confirm(f"The selftest may cost up to {most(worst_micro)}. Start it?", yes=yes):
            say("not sent")
            return found.data
        selftest = life.Selftest(registry, jobs, found)
        for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: no job stays after a kill or a closed terminal
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
        try:
            selftest.run()
        finally:
            for job in selftest.jobs:  # a job that the last step could not remove
                say(f"left: {job.id}; cloudtrain {'stop' if job.active else 'rm --everywhere'} {job.id}")
            counts = Counter(row["verdict"] for row in found.data["steps"])
            say(f"{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}; the report is in {path}")
        return found.data
