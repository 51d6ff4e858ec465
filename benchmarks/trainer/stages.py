"""How long the stages of a pipeline wait: the measured bubble beside the formula, and cuts by time beside even cuts.

Blocks that sleep for given times stand for devices of their own: ranks that share cores do not slow each other. The
lopsided model is real arithmetic on two ranks. Figures are means of a run's steps after the first.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Report
from sandbox import fresh_folder

from trainer import contest

ROUNDS, STEPS = 3, 9
EQUAL = [4.0] * 8
UNEQUAL = [8, 6, 4, 2, *[1] * 8]  # a CNN's: the first blocks have the largest images
WIDTHS = [256] * 5 + [1024, 1024, 2048]
BUBBLE, GAIN = 0.15, 1.3  # the distance from the formula, and the gain of the cut by time


def run(rounds: int, repo: Path | None, say: Callable[[str], None]) -> Report:
    """Measure; return the table."""
    table = Report("Stages of a pipeline: how long they wait, and what a cut by time saves")
    for stages, parallel in (
        (2, {}),
        (4, {}),
        (4, {"schedule": "gpipe"}),
        (4, {"schedule": "interleaved", "chunks": 2}),
    ):
        layout = {"pipeline": stages, **parallel}
        found = [_measured(layout, {"sleeps_ms": EQUAL}, 8, repo) for _ in range(rounds)]
        bubble, expected = (statistics.median(each[key] for each in found) for key in ("bubble", "bubble_expected"))
        name = f"{parallel.get('schedule', '1f1b')}, {stages} stages, 8 micro-batches: bubble"
        ok = abs(bubble - expected) <= BUBBLE * expected
        table.timing(name, f"{100 * bubble:.1f} % (formula {100 * expected:.1f} %)", "within 15 %", ok=ok)
        say(name)
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("12 blocks like a CNN's, 2 stages", 2, {"sleeps_ms": UNEQUAL}),
        ("12 blocks like a CNN's, 4 stages", 4, {"sleeps_ms": UNEQUAL}),
        ("lopsided, real arithmetic, 2 stages", 2, {"widths": WIDTHS}),
    ]
    for name, stages, params in cases:
        gains, bubbles = [], []
        for _ in range(rounds):
            even, timed = (_measured({"pipeline": stages, "cut": cut}, params, 8, repo) for cut in ("even", "timed"))
            gains.append(even["step_s"] / timed["step_s"])
            bubbles.append((even["bubble"], timed["bubble"], timed["bubble_expected"]))
        even_wait, timed_wait, expected = (100 * statistics.median(each) for each in zip(*bubbles, strict=True))
        gain = statistics.median(gains)
        waits = f"bubble {even_wait:.0f} % to {timed_wait:.0f} %, expected {expected:.0f} %"
        table.timing(f"{name}: cut by time", f"{gain:.2f}x as fast as even; {waits}", f">= {GAIN}x", ok=gain >= GAIN)
        say(name)
    for count in (1, 2, 8):
        flush, never = (
            [
                _measured({"pipeline": 2, "schedule": schedule}, {"sleeps_ms": EQUAL}, count, repo)["step_s"]
                for _ in range(rounds)
            ]
            for schedule in ("1f1b", "async")
        )
        gain = statistics.median(flush) / statistics.median(never)
        table.timing(f"async, 2 stages, {count} micro-batches a step", f"{gain:.2f}x as fast as 1f1b")
        say(f"async, {count}")
    table.notes.append(f"medians of {rounds} runs of {STEPS} steps")
    return table


def _measured(
    parallel: dict[str, Any], params: dict[str, Any], micro_batches: int, repo: Path | None
) -> dict[str, Any]:
    """Return the last step event of a run, whose figures are means over the steps since the first."""
    micro = 32 if "widths" in params else 4
    with fresh_folder() as folder:
        shutil.copy(Path(__file__).with_name("stages_task.py"), folder)
        spec = contest.spec_of(
            contest.Model("stages", micro, STEPS),
            global_batch_size=micro * micro_batches,
            parallel=parallel,
            log_every=STEPS,
        )
        spec |= {"params": params, "run": {"kind": "task", "target": "stages_task.py"}}
        contest.launch(contest.OURS, spec, folder, ranks=parallel["pipeline"], repo=repo)
        steps = [event for event in contest.events_of(folder / "output.txt") if event["e"] == "step"]
        return steps[-1]
