"""Computes an asynchronous run again from its update logs, to the same bits, in one process.

    python -m cloudtrain.entrypoints.trainer.parameter_server.replay SPEC OUTPUT_FOLDER

SPEC is a node's spec.json. The task file's path in the spec is relative to the folder of the job's code: start there.
A log has the order of a shard's updates and, for each, the version of the weights that the gradient was computed from.
A gradient is a pure function of weights and ticket, so the same weights follow. The command writes the weights to
`replayed.pt` in the output folder.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
import traceback
from collections import Counter, deque
from pathlib import Path

import torch
from torch import nn

from ...checkpoints import weights
from ...errors import TaskError
from ..settings import Spec, read_spec
from ..strategies.buffers import pack
from ..task import load_task
from .shard import FLUSHED, LEFT_OUT, STARTED, UpdateEntry, Versions, WeightShard, cloned, pieces_of, read_log
from .worker import Gradients

_NAME = re.compile(r"ranks-(\d+)-shard-(\d+)-of-(\d+)\.log")
_Key = tuple[int, Versions]  # a ticket may have been computed twice, if its first worker died between two shards
_Computed = tuple[torch.Tensor, torch.Tensor]  # a ticket's gradient over all shards, and the buffers afterwards


class _History:
    """A shard that is computed again: the entries still to apply, and old weights that later gradients read."""

    def __init__(self, shard: WeightShard, entries: list[UpdateEntry], readers: Counter[int]) -> None:
        """`readers`: by version of this shard, the gradients that were computed from it."""
        self.shard = shard
        self.left = deque(entries)
        self._readers = readers
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # weights and buffers by version
        self.keep()

    def keep(self) -> None:
        """Keep the present weights if a gradient was computed from them."""
        version = self.shard.version
        if version not in self.kept and self._readers[version]:
            self.kept[version] = (self.shard.weights.clone(), cloned(self.shard.buffers))

    def take(self, version: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the version's weights and buffers, and drop them after the last reader."""
        self._readers[version] -= 1
        return self.kept[version] if self._readers[version] else self.kept.pop(version)


def replay(spec: Spec, folder: Path) -> nn.Module:
    """Return the model after all updates in the folder's logs. Raises TaskError if the logs are incomplete."""
    ranks, logs = _logs(folder)
    task = load_task(spec.target, spec.training.seed)
    compute = Gradients(spec, task, ranks, 0, 0)
    module = compute.job.strategy.module
    arrived = dataclasses.replace(spec.training.server, order="arrival")  # the logs have the order
    settings = dataclasses.replace(spec.training, server=arrived)
    of_epochs = (settings.epochs or 1) * compute.job.order.length / settings.global_batch_size
    compute.max_steps = steps = settings.max_steps or math.ceil(of_epochs)
    uses = Counter((entry.ticket, entry.versions) for entries in logs for entry in entries if entry.versions[0] >= 0)
    histories = []
    for number, entries in enumerate(logs):
        pieces, buffers = pieces_of(module, number, len(logs)), pack(module) if number == 0 else None
        shard = WeightShard(settings, number, pieces, ranks, 0, steps, buffers)
        histories.append(_History(shard, entries, Counter(versions[number] for _, versions in uses)))
    computed: dict[_Key, _Computed] = {}
    while any(history.left for history in histories):
        if not sum(_advance(number, histories, compute, computed, uses) for number in range(len(histories))):
            raise TaskError(f"the update logs in {folder} do not fit together; is one of them cut off?")
    torch.cat([history.shard.weights for history in histories], out=compute.weights)
    last = histories[0].shard.buffers
    compute.load(pack(module) if last is None else last)
    return module


def _advance(
    number: int, histories: list[_History], compute: Gradients, computed: dict[_Key, _Computed], uses: Counter[_Key]
) -> int:
    """Apply the shard's next entries, as far as the weights for their gradients exist; return their number.

    `uses`: the shards that apply a gradient.
    """
    history = histories[number]
    before = len(history.left)
    start = sum(other.shard.weights.numel() for other in histories[:number])
    own = slice(start, start + history.shard.weights.numel())
    while history.left:
        entry = history.left[0]
        key = (entry.ticket, entry.versions)
        if entry.versions[0] == FLUSHED:
            history.shard.flush()
        elif entry.versions[0] == LEFT_OUT:
            history.shard.push(entry.ticket, entry.versions, None)
        else:
            if key not in computed:
                if not all(version in other.kept for other, version in zip(histories, entry.versions, strict=True)):
                    break
                computed[key] = _compute(entry, histories, compute)
            gradient, after = computed[key]
            buffers = after if number == 0 and entry.ticket % compute.ranks == 0 else None
            history.shard.push(entry.ticket, entry.versions, gradient[own].clone(), buffers)
            uses[key] -= 1
            if not uses[key]:
                del computed[key]
        history.left.popleft()
        history.keep()
    return before - len(history.left)


def _compute(entry: UpdateEntry, histories: list[_History], compute: Gradients) -> _Computed:
    read = [history.take(version) for history, version in zip(histories, entry.versions, strict=True)]
    torch.cat([own for own, _ in read], out=compute.weights)
    compute.load(pack(compute.job.strategy.module) if read[0][1] is None else read[0][1])
    compute.compute(entry.ticket)
    return compute.weights.clone(), compute.buffers()


def _logs(folder: Path) -> tuple[int, list[list[UpdateEntry]]]:
    """Return the number of ranks, and each shard's entries. Raises TaskError if the logs are not a whole run's."""
    found = {path: match for path in sorted(folder.glob("updates/*.log")) if (match := _NAME.fullmatch(path.name))}
    layouts = {(int(match[1]), int(match[3])) for match in found.values()}
    if len(layouts) != 1:
        raise TaskError(f"{folder}/updates has the logs of {len(layouts)} layouts; a replay needs one layout's")
    ((ranks, shards),) = layouts
    logs = [read_log(path, shards) for path in found]
    if len(logs) != shards:
        raise TaskError(f"{folder}/updates has {len(logs)} of {shards} logs; copy the others from their nodes")
    for entries in logs:
        if not entries or entries[0].versions[0] != STARTED or entries[0].ticket != 0:
            raise TaskError(f"the update logs in {folder} do not begin at the run's first ticket")
    return ranks, [entries[1:] for entries in logs]


def main() -> int:
    """Replay the run in the folder that the command line names; return the exit code."""
    if len(sys.argv) != 3:
        raise TaskError("two arguments are needed: SPEC (a node's spec.json) and OUTPUT_FOLDER")
    spec, folder = map(Path, sys.argv[1:])
    if not spec.is_file():
        raise TaskError(f"there is no spec {spec}; a node's folder has spec.json")
    module = replay(read_spec(spec), folder)
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    weights.write(folder / "replayed.pt", state)
    print(f"replayed the run's updates; the weights are in {folder / 'replayed.pt'}")
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except TaskError as error:
        sys.stderr.writelines(traceback.format_exception_only(error))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # tearing gloo down may hang (see train.py)
