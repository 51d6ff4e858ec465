"""Where a step's processor time goes: microseconds of rank 0's main thread, by function, ours next to the bare loop's.

    cd benchmarks && ../.venv-bench/bin/python -m trainer.where --model mlp

Every function of cloudtrain.entrypoints is timed by itself, without what it calls; so are the task's loss, the backward
pass and the optimizer, which the bare loop has too. The clock is the thread's processor time: a busy machine does not
disturb it, and waiting for the other rank is not in it, nor are gloo's threads (their cost shows in `all threads`).
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFIX = "cloudtrain.entrypoints"
SKIP = 50  # as contest.SKIP; a rank imports nothing of this package
LEAST_US = 0.5

_clock = time.thread_time
_own_s: dict[str, float] = {}
_calls: dict[str, int] = {}
_inner_s = [0.0]  # of each call that is under way, the time its own calls took


def main() -> None:
    """Run both contestants in turn; print what each spends."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from sandbox import fresh_folder

    from trainer import contest

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="mlp", choices=[model.name for model in contest.MODELS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repo", type=Path)
    asked = parser.parse_args()
    model = next(model for model in contest.MODELS if model.name == asked.model)
    found: dict[str, list[dict[str, Any]]] = {"bare": [], contest.OURS: []}
    for _ in range(asked.rounds):
        for name in found:
            with fresh_folder() as folder:
                spec = contest.spec_of(model)
                run = contest.run("bare", spec, folder, repo=asked.repo, script=Path(__file__), BENCH_WHERE=name)
                times = json.loads((folder / "where.json").read_text())
                found[name].append({**times, "all threads": {"us": 1e3 * run.cpu_ms, "calls": 1}})
    for name, rounds in found.items():
        print(f"\n{name}, {asked.model}: microseconds and calls a step, medians of {asked.rounds} runs")
        rows = {key: statistics.median(r.get(key, {"us": 0.0})["us"] for r in rounds) for key in rounds[0]}
        for key, us in sorted(rows.items(), key=lambda row: -row[1]):
            if us >= LEAST_US:
                print(f"  {us:8.1f}  {rounds[0][key]['calls']:6.2f}  {key}")


def rank_main() -> None:
    """Train as one rank, everything timed from the first step after SKIP on."""
    import torch
    import workload

    steps, begun_s = int(os.environ["BENCH_STEPS"]), 0.0
    note = workload.note

    def noted() -> None:
        nonlocal begun_s
        note()
        if len(workload._wall_s) == SKIP + 1:
            _own_s.clear()
            _calls.clear()
            begun_s = _clock()
        if len(workload._wall_s) == steps and os.environ["RANK"] == "0":
            _write(steps - SKIP - 1, _clock() - begun_s)

    workload.note = noted
    torch.Tensor.backward = timed("backward", torch.Tensor.backward)
    torch.optim.AdamW.step = timed("optimizer.step", torch.optim.AdamW.step)
    torch.optim.Optimizer.zero_grad = timed("optimizer.zero_grad", torch.optim.Optimizer.zero_grad)
    workload.loss = timed("task.loss", workload.loss)
    if os.environ["BENCH_WHERE"] == "bare":
        import bare
        from torch.utils.data import dataloader

        each = dataloader._BaseDataLoaderIter
        each.__next__ = timed("DataLoader.__next__", each.__next__)
        bare.main()
        return
    from cloudtrain.entrypoints.trainer import task, train

    load_task = task.load_task

    def with_timed_loss(target: str | Path) -> Any:
        import dataclasses

        # The task file is a copy of workload.py, imported once more: it has to note in the same place.
        return dataclasses.replace(load_task(target), loss=workload.loss)

    time_package()
    train.load_task = with_timed_loss
    train.main()
    sys.stdout.flush()
    os._exit(0)


def time_package() -> None:
    """Time every plain function and method of the trainer, under each name that a module has it by."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(PREFIX)]
    done: dict[Any, Any] = {}
    for module in modules:
        for holder in [
            module,
            *(c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__),
        ]:
            for name, value in list(vars(holder).items()):
                if not inspect.isfunction(value) or not value.__module__.startswith(PREFIX):
                    continue
                if inspect.isgeneratorfunction(inspect.unwrap(value)) or value in done.values():
                    continue
                label = f"{value.__module__[len(PREFIX) + 1 :]}.{value.__qualname__}"
                done.setdefault(value, timed(label, value))
                setattr(holder, name, done[value])


def timed(label: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its own time, without that of timed functions in it, added up under the label."""

    @functools.wraps(call)
    def inner(*args: Any, **kwargs: Any) -> Any:
        begin_s = _clock()
        _inner_s.append(0.0)
        try:
            return call(*args, **kwargs)
        finally:
            took_s = _clock() - begin_s
            _own_s[label] = _own_s.get(label, 0.0) + took_s - _inner_s.pop()
            _calls[label] = _calls.get(label, 0) + 1
            _inner_s[-1] += took_s

    return inner


def _write(steps: int, took_s: float) -> None:
    known = {label: {"us": 1e6 * own_s / steps, "calls": _calls[label] / steps} for label, own_s in _own_s.items()}
    rest = 1e6 * (took_s - sum(_own_s.values())) / steps
    total = {"main thread, in all": {"us": 1e6 * took_s / steps, "calls": 1}}
    loop = {"the loop itself, and what is not timed": {"us": rest, "calls": 1}}
    Path("where.json").write_text(json.dumps({**known, **loop, **total}))


if __name__ == "__main__":
    if "BENCH_WHERE" in os.environ:
        rank_main()
    else:
        main()
