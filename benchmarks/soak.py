"""The same counts, bigger: what fails once in a hundred times shows here."""

from __future__ import annotations

import sys

import alerts
import aws_jobs
import azure_jobs
import budget_simulation
import faults
import restart
import soak_week
import ssh_faults
import ssh_queue
import vertex_jobs
import vertex_submits
from report import Report


def _faults() -> Report:
    return faults.run(kills=100, damages=200, clocks=50, exits=50, signals=20)


def main() -> int:
    """Run them all; return the exit code."""
    failed = False
    aws = (lambda: aws_jobs.submits(200), lambda: aws_jobs.lines(100_000), lambda: aws_jobs.causes(10))
    azure = (lambda: azure_jobs.submits(200), lambda: azure_jobs.lines(100_000))
    vertex = (lambda: vertex_submits.submits(200), lambda: vertex_jobs.lines(12_000, 600.0))
    local = (lambda: restart.run(20), _faults)
    ssh = (lambda: ssh_faults.run(20), soak_week.run)
    queue = (ssh_queue.run, lambda: ssh_queue.run(40, 0))
    for benchmark in (budget_simulation.run, alerts.run, *local, *aws, *azure, *vertex, *ssh, *queue):
        report = benchmark()
        report.show()
        sys.stdout.flush()
        failed = failed or report.failed
    print(f"\n{'some count is wrong' if failed else 'every count is right'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
