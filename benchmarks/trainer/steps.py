"""What a step, a start and 400 steps' output cost: a bare DDP loop, cloudtrain, Lightning and Accelerate.

All train the same model on the same data for as many steps, two ranks with one thread each. The contestants take turns
within a round, and a ratio is the median over rounds of contestant to bare loop in the same round: on a busy machine
neither absolute times nor single rounds say much. Processor time is the steadier of the two.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from report import BELOW, PASS, Report
from sandbox import fresh_folder

from trainer import contest
from trainer.contest import MODELS, OURS, Run

ROUNDS = 5
BARE, AGAIN = "bare", "bare, once more"  # the second shows what a ratio of 1 looks like on this machine now
OWN_PACE = "cloudtrain, log_every unset"
CONTESTANTS = (BARE, OURS, OWN_PACE, "accelerate", "lightning", AGAIN)
SCRIPTS = {OWN_PACE: OURS, AGAIN: BARE}  # of those that are not their own name
FIRST_STEP_TARGET = 1.05
UNDECIDED = "too noisy to say"
OUTPUT_TARGET = 2048  # bytes per 400 steps of the smallest model: the most steps a second


def run(
    rounds: int = ROUNDS,
    models: Sequence[str] = tuple(model.name for model in MODELS),
    contestants: Sequence[str] = CONTESTANTS,
    repo: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    **env: str,
) -> list[Report]:
    """Measure; return a table of everything, and one of what cloudtrain promises."""
    head = ("model", "contestant", "step ms", "x bare", "cpu ms", "x bare", "first step s", "x bare", "RSS MB")
    table = Report("Steps: two ranks, one thread each", (*head, "bytes / 400 steps"))
    promised = Report("Steps: what cloudtrain promises, as ratios to the bare loop")
    for model in (model for model in MODELS if model.name in models):
        runs: dict[str, list[Run]] = {name: [] for name in contestants}
        for round_ in range(rounds):
            # Every other round goes backwards, so that none always follows the same neighbour.
            for name in contestants if round_ % 2 == 0 else list(reversed(contestants)):
                runs[name].append(_one(name, model, repo, env))
                say(f"round {round_ + 1} of {rounds}: {model.name}, {name}: {runs[name][-1].step_ms:.2f} ms a step")
        for name, found in runs.items():
            table.rows.append(_row(model.name, name, found, runs[BARE]))
        for name in (name for name in (OURS, OWN_PACE) if name in runs):
            _promise(promised, model.name, name, runs[name], runs[BARE], runs[AGAIN])
    promised.notes.append(f"+-: how far the bare loop is from itself; within it of the target, it is {UNDECIDED!r}")
    note = f"medians of {rounds} rounds, contestants in turn; ratios are medians of each round's ratio"
    table.notes += [note, "step: median of the steps after the first 50; cpu: all threads of rank 0, the mean of them"]
    if "lightning" in contestants or "accelerate" in contestants:
        way = "told to use" if "BENCH_TUNED" in env else "at DDP's default, without"
        table.notes.append(f"Lightning and Accelerate are {way} gradient_as_bucket_view; bare and cloudtrain use it")
    return [table, promised]


def _one(name: str, model: contest.Model, repo: Path | None, env: dict[str, str]) -> Run:
    with fresh_folder() as folder:
        pace = {"log_every": None} if name == OWN_PACE else {}
        return contest.run(SCRIPTS.get(name, name), contest.spec_of(model, **pace), folder, repo=repo, **env)


def _row(model: str, name: str, runs: list[Run], bare: list[Run]) -> tuple[str, ...]:
    cells: list[str] = [model, name]
    for what, form in (("step_ms", ".2f"), ("cpu_ms", ".2f"), ("first_step_s", ".2f")):
        cells += [f"{statistics.median(getattr(run, what) for run in runs):{form}}", f"{ratio(what, runs, bare):.3f}"]
    cells.append(f"{statistics.median(run.rss_mb for run in runs):.0f}")
    return (*cells, f"{statistics.median(run.bytes_per_400 for run in runs):.0f}")


def _promise(report: Report, model: str, name: str, runs: list[Run], bare: list[Run], again: list[Run]) -> None:
    """Add what whole runs can tell; the cost of a step is paired.py's, which is steadier."""
    found, doubt = ratio("first_step_s", runs, bare), noise("first_step_s", again, bare)
    limit = FIRST_STEP_TARGET
    verdict = PASS if found + doubt <= limit else BELOW if found - doubt > limit else UNDECIDED
    what = f"{model}, {name}: start to first step"
    report.rows.append((what, f"{found:.3f}x, +- {doubt:.3f}", f"<= {limit}x", verdict))
    if name == OWN_PACE and model == "mlp":
        size = statistics.median(run.bytes_per_400 for run in runs)
        verdict = PASS if size <= OUTPUT_TARGET else BELOW
        report.rows.append(
            (f"{model}, {name}: output of 400 steps", f"{size:.0f} bytes", f"<= {OUTPUT_TARGET}", verdict)
        )


def ratio(what: str, runs: list[Run], bare: list[Run]) -> float:
    """Return the median over rounds of the contestant's figure to the bare loop's."""
    return statistics.median(getattr(a, what) / getattr(b, what) for a, b in zip(runs, bare, strict=True))


def noise(what: str, again: list[Run], bare: list[Run]) -> float:
    """Return how far the bare loop's second run of a round is from its first, as the median over rounds."""
    return statistics.median(abs(getattr(a, what) / getattr(b, what) - 1) for a, b in zip(again, bare, strict=True))
