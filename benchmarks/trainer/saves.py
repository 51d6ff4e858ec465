"""What a checkpoint of the 10 M transformer and its AdamW state (120 MB) costs: the save, and the load on resume.

Each way trains with saves and then starts again in the same folder. Cloudtrain's figures are those of its own event
lines; `stalled` is what no way can hide: how much longer than the median the steps took, added up, per save. A save
behind the training's back still needs the processor, and two ranks on two cores leave none free. A run without any
save shows how much of it is the machine's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from report import Report
from sandbox import fresh_folder

from trainer import contest
from trainer.contest import OURS, Run

ROUNDS = 3
STEPS, EVERY, MORE = 66, 16, 4  # four saves, the last of them before the end; then a few steps after the resume
BLOCKED_TARGET = 0.20  # of rank 0's torch.save
LOAD_TARGET_MS = 60
TORCH = "torch.save by rank 0"
NONE = "no saves"
WAYS = {NONE: "none", TORCH: "torch", "DCP": "dcp", "DCP async": "dcp-async", OURS: ""}


@dataclass
class Times:
    """Milliseconds of one way, by round; the values of a round are the medians of its saves."""

    blocked: list[float] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    stalled: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    first_step: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)


def run(rounds: int = ROUNDS, repo: Path | None = None, say: Callable[[str], None] = lambda line: None) -> list[Report]:
    """Measure; return one table."""
    times = {name: Times() for name in WAYS}
    for round_ in range(rounds):
        for name in WAYS if round_ % 2 == 0 else reversed(WAYS):
            _measure(name, times[name], repo)
            say(f"round {round_ + 1} of {rounds}: {name}: stalled {times[name].stalled[-1]:.0f} ms a save")
    head = (
        "way",
        "blocked ms",
        "x torch.save",
        "worst ms",
        "until durable ms",
        "stalled ms",
        "load ms",
        "first step s",
        "RSS MB",
    )
    table = Report("Checkpoints: 10 M transformer + AdamW, about 120 MB", head)
    for name, found in times.items():
        table.rows.append(
            (
                name,
                _shown(found.blocked),
                f"{_ratio(found.blocked, times[TORCH].blocked):.2f}" if found.blocked else "-",
                _shown(found.worst),
                _shown(found.durable) if name != TORCH else f"{_shown(found.durable)} (no fsync)",
                _shown(found.stalled),
                _shown(found.load),
                f"{statistics.median(found.first_step):.2f}" if found.first_step else "-",
                _shown(found.rss_mb),
            )
        )
    table.notes.append(f"medians of {rounds} rounds, the ways in turn; stalled: lost to steps, per save, by the clock")
    promised = Report("Checkpoints: what cloudtrain promises")
    ours = times[OURS]
    blocked = _ratio(ours.blocked, times[TORCH].blocked)
    promised.timing(
        "training stands still for a save",
        f"{_shown(ours.blocked)} ms, {blocked:.2f}x torch.save by rank 0",
        f"<= {BLOCKED_TARGET}x",
        ok=blocked <= BLOCKED_TARGET,
    )
    if ours.load:
        load = statistics.median(ours.load)
        promised.timing("load on resume", f"{load:.0f} ms", f"<= {LOAD_TARGET_MS} ms", ok=load <= LOAD_TARGET_MS)
    else:
        promised.timing("load on resume", "its event says no load_s", f"<= {LOAD_TARGET_MS} ms", ok=False)
    return [table, promised]


def _measure(name: str, times: Times, repo: Path | None) -> None:
    """Train with saves, then once more from the last of them."""
    with fresh_folder() as folder:
        first = _run(name, folder, STEPS, 0, repo)
        took = _took(name, first, folder)
        if name != NONE:
            times.blocked.append(1e3 * statistics.median(took["blocked_s"]))
            times.worst.append(1e3 * max(took["blocked_s"]))
            times.durable.append(1e3 * statistics.median(took["seconds"]))
        steps = [b - a for a, b in pairwise(first.wall_s[5:])]
        usual = statistics.median(steps)
        times.stalled.append(1e3 * sum(step - usual for step in steps) / (STEPS // EVERY))
        times.rss_mb.append(first.rss_mb)
        if name == NONE:
            return
        done = STEPS if name == OURS else STEPS // EVERY * EVERY  # cloudtrain saves at the end too
        second = _run(name, folder, STEPS + MORE, done, repo)
        times.load += [1e3 * value for value in _took(name, second, folder)["load_s"]]
        times.first_step.append(second.first_step_s)


def _run(name: str, folder: Path, max_steps: int, done: int, repo: Path | None) -> Run:
    transformer = next(model for model in contest.MODELS if model.name == "transformer")
    checkpoint = {"every_steps": EVERY, "keep": 3, "resume": "auto"}
    spec = contest.spec_of(transformer, checkpoint, max_steps=max_steps)
    here = {"BENCH_STEPS": str(max_steps - done), "BENCH_WAY": WAYS[name]}  # forward passes of this start
    script = None if name == OURS else contest.HERE / "bare_saves.py"
    return contest.run(name, spec, folder, repo=repo, script=script, **here)


def _took(name: str, run: Run, folder: Path) -> dict[str, list[float]]:
    """Return the seconds that each save and load took, as the way itself has them."""
    if name != OURS:
        found: dict[str, list[float]] = json.loads((folder / "saves.json").read_text())
        return found
    saves = [e for e in run.events if e["e"] == "checkpoint" and "seconds" in e and e["step"] % EVERY == 0]
    loads = [e for e in run.events if e["e"] == "restart" and "load_s" in e]
    return {
        "blocked_s": [e.get("blocked_s", e["seconds"]) for e in saves],
        "seconds": [e["seconds"] for e in saves],
        "load_s": [e["load_s"] for e in loads],
    }


def _shown(values: list[Any]) -> str:
    return f"{statistics.median(values):.0f}" if values else "-"


def _ratio(values: list[float], base: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(values, base, strict=True))
