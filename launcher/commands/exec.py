"""`cloudtrain exec`: a command or a shell on a machine of a job."""

from __future__ import annotations

import subprocess
import sys

import click

from ..errors import UsageError
from .options import WholeNumber, required_job


@click.command("exec", context_settings={"ignore_unknown_options": True})
@required_job
@click.option("--node", default=0, show_default=True, type=WholeNumber(min=0), help="Which of the job's machines.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(job: str, node: int, argv: tuple[str, ...]) -> int:
    """Run a command where a node's ranks run, in their code folder and with their variables; without one, a shell.

    The exit code is the command's. For jobs of the ssh and Slurm backends.
    """
    from .. import backend as backends
    from ..store.registry import Registry

    found = Registry().find(job)
    backend = backends.load(found.backend_of(found.attempt))
    if not isinstance(backend, backends.Machines):
        hint = "cloudtrain logs, status and artifacts show what there is to see"
        raise UsageError(f"the {found.backend} backend allows no login to its machines", hint=hint)
    if found.attempt.ref is None:
        raise UsageError(f"{found.id} was never sent: it runs nowhere")
    sys.stdout.flush()
    return subprocess.run(backend.shell(found.attempt.ref, node, list(argv)), check=False).returncode
