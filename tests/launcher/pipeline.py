"""A pipeline of the Python interface, as in docs/python.md: run by a test, and checked by mypy in strict mode."""

import sys

from cloudtrain.launcher.api import Config, DryRun, JobLine, JobStatus, logs, resume, status, submit, wait
from cloudtrain.launcher.errors import BudgetError


def train(file: str, steps: int) -> float | None:
    """Show the request of a job, send the job, follow the log, and return the cost in US dollars."""
    config = Config(file, env={"STEPS": steps})
    dry: DryRun = submit(config, dry_run=True)
    print(f"{dry.backend}: {dry.plan['ranks']} ranks, {dry.worst_case_usd} USD at most")
    try:
        job: JobStatus = submit(config, idempotency_key=f"steps-{steps}")
    except BudgetError as error:
        raise SystemExit(str(error)) from error
    for line in logs(job, follow=True):
        show(line)
    job = wait(job, timeout_s=600)
    if job.state != "succeeded" and job.resumable:
        job = wait(resume(job))
    return status(job).cost_usd


def show(line: JobLine) -> None:
    """Print a line of a rank."""
    if line.rank is not None:
        print(f"[{line.rank}] {line.text}")


def main() -> None:
    """Run the pipeline for a file of the command line."""
    print(train(sys.argv[1], steps=3))


if __name__ == "__main__":
    main()
