"""A job for the report: three attempts, a restart, losses that are NaN, and texts that try to inject HTML."""

import math
import time
from dataclasses import replace
from typing import Any

from cloudtrain.entrypoints.events import format_line
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.store import series
from cloudtrain.launcher.store.progress import fold
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job, plan_of

BEGAN_S = 1_790_000_000.0
STEP_S = 2.0
PAUSE_S = 600.0
BREAKS_OUT = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>\u2028"
PLAN = plan_of(
    instances=2,
    nproc_per_node=4,
    ranks=8,
    machine="a big one",
    hourly_usd=7.2,
    price_micro=3_600_000,
    price_source="the list of 2026-11",
    cap_s=36_000,
    cap_reason="budget",
    worst_case_usd=72.0,
)
CONFIG = {
    "name": "seeded",
    "backend": "local",
    "task": "task.py",
    "params": {"note": BREAKS_OUT, "width": 32},
    "env": {"WANDB_API_KEY": "hunter2", "NCCL_DEBUG": "WARN"},
    "secrets": ["HF_TOKEN"],
    "notify": [{"webhook": "https://hooks.example.org/T0/secret", "on": ["failed"]}],
    "budget": {"limit": "10 USD"},
    "training": {"optimizer": {"lr": 0.1}, "monitor": {"metric": "accuracy", "mode": "max"}},
    "sagemaker": {"role": "arn:of:another:backend"},
}


def step_line(step: int, loss: float, **more: Any) -> str:
    """Return a step's line in the trainer's format."""
    fields = {"step": step, "max_steps": 600, "loss": loss, "lr": 0.1 / (step + 1), "grad_norm": 1 + step % 3}
    fields |= {"step_s": 2.0, "data_s": 0.25, "compute_s": 1.5, "communication_s": 0.25, "checkpoint_s": 0.0}
    fields |= {"samples_per_s": 1000.0 + step % 9, "memory_bytes": 2**30, "eta_s": 2.0 * (600 - step)}
    return format_line("step", f"step {step}", fields | more)


def attempt_lines(number: int, first: int, last: int) -> list[str]:
    """Return the lines of an attempt that trains from step `first` to step `last`."""
    told = {"ranks": 8, "device": "cuda:0", "gpu": "A card", "memory_total_bytes": 80 * 2**30, "strategy": BREAKS_OUT}
    lines = [format_line("start", "", told)]
    if number > 1:
        lines.insert(0, format_line("restart", "", {"step": first, "path": "/c", "restarts": 0}))
    for step in range(first + 1, last + 1):
        loss = 4 * math.exp(-step / 200) + 0.1 * math.sin(step)
        lines.append(step_line(step, math.nan if step in (150, 151) else loss))
        if (number, step) == (2, 300):
            lines.append(format_line("restart", "", {"step": step, "path": "/c", "restarts": 1}))
        if step % 50 == 0:
            lines.append(format_line("checkpoint", "", {"step": step, "path": f"/c/step-{step}", "seconds": 0.5}))
        if step % 100 == 0:
            lines.append(format_line("eval", "", {"step": step, "metrics": {"accuracy": step / 700, "loss": 1 / step}}))
    return lines


def put(registry: Registry, name: str = "seeded", **config: Any) -> Job:
    """Journal the job: a preemption, then a node failure after steps that were lost, then an error."""
    ends = [
        (0, 260, State("stopped", "preempted", resumable=True)),
        (250, 420, State("failed", "node_failure", resumable=True, restarts=1)),
        (400, 600, State("failed", "error", error={"rank": 3, "node": 1, "type": "ValueError", "message": BREAKS_OUT,
                                                   "traceback": f"Traceback\n  {BREAKS_OUT}\n"})),
    ]  # fmt: skip
    begin_s = BEGAN_S
    bundle = {"git": {"commit": "0123abcd" * 5, "dirty": True}, "sha256": "ff" * 32, "files": 3, "code_bytes": 1234}
    for number, (first, last, state) in enumerate(ends, 1):
        if number == 1:
            job, _ = registry.add(name, lambda *_: made(name, bundle, config), exclusive=True, key=None)
            attempt = job.attempt
        else:
            attempt = Attempt(name, number, "intent", PLAN, {}, begin_s, {"host": "h", "pid": 1, "stamp": None})
            registry.add_attempt(attempt, CONFIG | config, bundle)
        registry.mark_sent(attempt, {"x": 1})
        end_s = begin_s + STEP_S * (last - first) + 20
        lines = [(line, begin_s + 10 + STEP_S * i) for i, line in enumerate(attempt_lines(number, first, last))]
        with registry.database.transaction():
            series.append(registry.database, name, series.gather(number, lines))
            registry.set_state(attempt, replace(state, started_s=begin_s, ended_s=end_s), fold({}, lines))
        begin_s = end_s + PAUSE_S
    return registry.find(name)


def made(name: str, bundle: dict[str, Any], config: dict[str, Any]) -> Job:
    """Return the job before it is journalled."""
    job = make_job(name, created_s=BEGAN_S - 60, config=CONFIG | config, bundle=bundle)
    return replace(job, attempt=replace(job.attempt, plan=PLAN, created_s=BEGAN_S - 60))


def end_s() -> float:
    """Return a time after the whole job."""
    return time.time() + 1e6
