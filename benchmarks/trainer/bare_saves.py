"""The plain loop with checkpoints, in one of three ways; a second start in the same folder goes on from the last one.

BENCH_WAY: none, torch (rank 0 writes everything, the others wait), dcp, or dcp-async (by a thread, over a group of its
own, since on the training's group it aborts the process). What each save and load took is in saves.json.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import bare
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

FOLDER = Path("saves")
Optimizer = torch.optim.Optimizer


def main() -> None:
    """Train with saves, after a load where there is something to load."""
    spec = json.loads(Path(os.environ["CLOUDTRAIN_SPEC"]).read_text())
    dist.init_process_group("gloo")
    FOLDER.mkdir(exist_ok=True)
    way = os.environ["BENCH_WAY"]
    model, optimizer = bare.build(spec)
    took: dict[str, list[float]] = {"blocked_s": [], "seconds": [], "load_s": []}
    step = max((int(path.stem) for path in FOLDER.iterdir()), default=0)
    if step:
        begin_s = time.perf_counter()
        (_load_torch if way == "torch" else _load_dcp)(model, optimizer, step)
        took["load_s"].append(time.perf_counter() - begin_s)
    dist.barrier()
    running: list[Callable[[], Any]] = []
    group = dist.new_group(backend="gloo")

    def save(at: int) -> None:
        while running:  # one at a time, as the others have it
            running.pop()()
        begin_s = time.perf_counter()

        def done(_future: Future[Any] | None = None) -> None:
            took["seconds"].append(time.perf_counter() - begin_s)

        if way == "torch":
            if dist.get_rank() == 0:
                torch.save(
                    {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, FOLDER / f"{at}.pt"
                )
            dist.barrier()
        elif way == "dcp":
            dcp.save(_state(model, optimizer), checkpoint_id=FOLDER / str(at))
        else:
            future = dcp.async_save(_state(model, optimizer), checkpoint_id=FOLDER / str(at), process_group=group)
            future.add_done_callback(done)
            running.append(future.result)
        took["blocked_s"].append(time.perf_counter() - begin_s)
        if way != "dcp-async":
            done()

    bare.train(spec, model, optimizer, step, None if way == "none" else save)
    while running:
        running.pop()()
    if dist.get_rank() == 0:
        Path("saves.json").write_text(json.dumps(took))
    bare.leave()


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def _load_torch(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    state = torch.load(FOLDER / f"{step}.pt", map_location="cpu", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _load_dcp(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=FOLDER / str(step))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


if __name__ == "__main__":
    main()
