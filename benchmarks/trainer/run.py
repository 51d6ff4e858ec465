"""The trainer against a bare DDP loop, Lightning, Accelerate and DCP: `make bench-trainer`, some 40 minutes.

    cd benchmarks && ../.venv-bench/bin/python -m trainer.run --only steps --models mlp --rounds 3

Timings are said, not enforced: the exit code is 0 wherever everything ran.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from report import Report

from trainer import codes, layouts, methods, paired, relayout, saves, server, stages, steps, virtual


def main() -> int:
    """Measure what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = ("paired", "stages", "layouts", "relayout", "methods", "codes", "server", "virtual", "steps", "saves")
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--rounds", type=int, help="of each part; by default as many as it needs")
    parser.add_argument("--models", default=",".join(paired.TARGETS))
    parser.add_argument(
        "--contestants", help=f"beside the bare loop, of, by semicolons: {'; '.join(steps.CONTESTANTS[1:-1])}"
    )
    parser.add_argument("--tuned", action="store_true", help="give Lightning and Accelerate gradient_as_bucket_view")
    parser.add_argument(
        "--repo", type=Path, help="a checkout whose cloudtrain is measured in place of the installed one"
    )
    asked = parser.parse_args()
    reports: list[Report] = []
    if asked.only in (None, "paired"):
        reports.append(paired.run(asked.rounds or paired.ROUNDS, asked.models.split(","), asked.repo, _say))
    if asked.only in (None, "stages"):
        reports.append(stages.run(asked.rounds or stages.ROUNDS, asked.repo, _say))
    if asked.only in (None, "layouts"):
        reports.append(layouts.run(asked.rounds or layouts.ROUNDS, asked.repo, _say))
    if asked.only in (None, "codes"):
        reports.append(codes.run(asked.rounds or codes.ROUNDS, asked.repo, _say))
    if asked.only in (None, "relayout"):
        reports.append(relayout.run(asked.rounds or relayout.ROUNDS, asked.repo, _say))
    if asked.only in (None, "server"):
        reports.append(server.run(asked.rounds or server.ROUNDS, _say))
    if asked.only in (None, "virtual"):
        reports.append(virtual.run(asked.rounds or virtual.ROUNDS, _say))
    if asked.only in (None, "steps"):
        chosen = asked.contestants.split(";") if asked.contestants else steps.CONTESTANTS
        contestants = tuple(name for name in steps.CONTESTANTS if name in (steps.BARE, steps.AGAIN) or name in chosen)
        rounds, tuned = asked.rounds or steps.ROUNDS, {"BENCH_TUNED": "1"} if asked.tuned else {}
        reports += steps.run(rounds, asked.models.split(","), contestants, asked.repo, _say, **tuned)
    if asked.only in (None, "saves"):
        reports += saves.run(asked.rounds or saves.ROUNDS, asked.repo, _say)
    if asked.only in (None, "methods"):
        reports.append(methods.run(asked.rounds or methods.ROUNDS, asked.repo, _say))
    for report in reports:
        report.show()
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
