"""Everything that `make bench` promises: start-up, first step, killed workers, hosts by ssh, the clouds.

Timings are ratios and processor seconds, so that they mean something on a busy machine. A count that is wrong makes
the exit code 1; a timing that misses its target is only said.
"""

from __future__ import annotations

import sys

import aws_jobs
import azure_jobs
import environments
import faults
import first_step
import growth
import restart
import ssh_fleet
import startup
import sweep_decisions
import vertex_jobs
import vertex_submits


def main() -> int:
    """Run them all; return the exit code."""
    failed = False
    local = (startup, first_step, environments, restart, faults, ssh_fleet, sweep_decisions, growth)
    aws = (aws_jobs.cost, aws_jobs.submits, aws_jobs.lines)
    azure = (azure_jobs.cost, azure_jobs.submits, azure_jobs.lines)
    vertex = (vertex_jobs.cost, vertex_submits.ambiguous, lambda: vertex_submits.submits(20), vertex_jobs.lines)
    for run in (*(benchmark.run for benchmark in local), *aws, *azure, *vertex):
        report = run()
        report.show()
        sys.stdout.flush()
        failed = failed or report.failed
    print(f"\n{'some count is wrong' if failed else 'every count is right'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
