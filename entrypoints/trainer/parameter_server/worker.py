"""A worker: the child process of a rank that computes gradients and holds no state of its own.

For each ticket it pulls the weights, computes the gradient that a rank would compute under ddp, and pushes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import traceback

import torch

from ... import processes
from ...errors import TaskError
from ...rank.agree import Agreement
from ...replication.wire import Wire
from .. import data
from ..job import TrainingJob, TrainState, build, connect
from ..settings import Spec, read_spec
from ..strategies.buffers import changed, keep_frozen, pack, refusal, unpack
from ..strategies.facts import together
from ..task import Task, load_task
from . import wire
from .shard import shard_range, trained
from .wire import VARIABLE, MessageKind, WireMessage, WorkerOrder, connected

_BEATS_IN_LEASE = 5


class Gradients:
    """Computes the gradients of tickets: those that a rank would compute under ddp, before they are averaged."""

    def __init__(self, spec: Spec, task: Task, ranks: int, step: int, samples: int, max_steps: int = 1) -> None:
        """Build the model as a single rank's, in its own process group. Raises TaskError."""
        wanted = spec.training
        alone = dataclasses.replace(
            together(wanted),
            global_batch_size=wanted.global_batch_size // ranks,
            micro_batch_size=data.split_batch(wanted.global_batch_size, wanted.micro_batch_size, ranks).micro,
            eval_every=None,
            ema_decay=None,
            tensorboard=False,
            on_nan="stop",
        )
        only_training = dataclasses.replace(
            task, evaluate=None, dataset=lambda params, split: task.dataset(params, split) if split == "train" else None
        )
        spec = dataclasses.replace(
            spec, training=alone, checkpoint=dataclasses.replace(spec.checkpoint, mirror=None, every_s=None)
        )
        agreement = Agreement(None, is_alone=True)
        for number in (signal.SIGTERM, signal.SIGUSR1):  # the rank decides when to stop
            signal.signal(number, signal.SIG_IGN)
        hidden = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
        place = connect(spec.timeout_s)  # as the only rank of its process group
        os.environ.update(hidden)  # torchrun's, for the task
        with tempfile.TemporaryDirectory() as scratch:  # a worker saves nothing
            os.environ["CLOUDTRAIN_CHECKPOINT_DIR"] = scratch
            self.job: TrainingJob = build(spec, only_training, place, agreement)
        self.ranks, self._step, self._samples, self.max_steps = ranks, step, samples, max_steps
        self._each, self._global_batch = self.job.split.accumulation, spec.training.global_batch_size * ranks
        self.parameters = trained(self.job.strategy.module)
        self._frozen = keep_frozen(self.job.strategy.module)
        self.weights = torch.empty(sum(p.numel() for p in self.parameters), dtype=self.parameters[0].dtype)

    @torch.no_grad()
    def load(self, buffers: torch.Tensor) -> None:
        """Give the model the values of `weights`, and the buffers."""
        parts = torch.split(self.weights, [p.numel() for p in self.parameters])
        for parameter, values in zip(self.parameters, parts, strict=True):
            parameter.copy_(values.view(parameter.shape))
        unpack(self.job.strategy.module, buffers)

    def compute(self, ticket: int) -> tuple[float, bool]:
        """Replace `weights` by the gradient; return the mean loss, and whether loss and gradient are finite."""
        from ..train import gradients  # train.py starts this module

        step, number = divmod(ticket, self.ranks)
        owned = range(number * self._each, (number + 1) * self._each)
        micro_batch = self.job.strategy.micro_batch
        strategy = dataclasses.replace(
            self.job.strategy, micro_batch=lambda virtual, last: micro_batch(virtual - owned.start, last)
        )
        job = dataclasses.replace(self.job, owned=owned, strategy=strategy)
        position = self._samples + (step - self._step) * self._global_batch
        training = job.spec.training
        keys = (data.stream(job.order, position + virtual * job.split.micro, job.split.micro) for virtual in owned)
        batches = job.batches(job.train_data, keys)
        job.optimizer.zero_grad()
        gradients(job, TrainState(step, position, self.max_steps), batches, is_logged=True)
        verdict = job.agreement.finish()
        if names := changed(self._frozen):
            raise TaskError(refusal(names))
        self._frozen = {}
        if count := job.tally.total(verdict, is_lone=True):
            strategy.scale(self._each / count)
        loss = verdict.loss / (count or self._each)
        if training.clip_norm:
            strategy.clip(training.clip_norm)
        found = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self.parameters]
        torch.cat([gradient.reshape(-1) for gradient in found], out=self.weights)
        return loss, bool(torch.isfinite(self.weights).all()) and math.isfinite(loss)

    def buffers(self) -> torch.Tensor:
        """Return the model's persistent buffers as bytes."""
        return pack(self.job.strategy.module)


def main() -> int:
    """Compute tickets until the shards end the connection; return the exit code."""
    processes.die_with_parent()
    order = WorkerOrder(**json.loads(os.environ.pop(VARIABLE)))
    if os.getppid() != order.parent:  # the rank ended before this process could follow
        return 1
    spec = read_spec(os.environ["CLOUDTRAIN_SPEC"])
    with contextlib.suppress(OSError, EOFError), contextlib.ExitStack() as opened:
        is_ready = False
        try:
            task = load_task(spec.target, spec.training.seed)
            compute = Gradients(spec, task, order.ranks, order.step, order.samples, order.max_steps)
            shards = [opened.enter_context(connected(order, MessageKind.BEAT, 0))]
            wire.receive(shards[0])
            threading.Thread(target=_beat, args=(shards[0], spec.training.server.lease_s), daemon=True).start()
            shards = [opened.enter_context(connected(order, MessageKind.COMPUTE, n)) for n in range(len(order.shards))]
            is_ready = True
            _work(compute, shards, order.ranks)
        except Exception as error:
            if is_ready and isinstance(error, OSError | EOFError):  # the shards have ended the connection
                raise
            _report(order, error)
            return 1
    return 0


def _work(compute: Gradients, shards: list[Wire], ranks: int) -> None:
    """Compute tickets; return never. Raises EOFError or OSError at the end of the connection."""
    ranges = [shard_range(compute.weights.numel(), n, len(shards)) for n in range(len(shards))]
    rooms = [wire.memory(compute.weights[own.start : own.stop]) for own in ranges]
    buffers, finished = compute.buffers(), -1
    while True:
        wire.send(shards[0], WireMessage(MessageKind.TAKE, finished))
        ticket = wire.receive(shards[0]).ticket
        for shard in shards:
            wire.send(shard, WireMessage(MessageKind.PULL, ticket))
        versions = []
        for number, (shard, room) in enumerate(zip(shards, rooms, strict=True)):
            versions.append(wire.receive(shard).version)
            shard.read(room)
            if number == 0:
                shard.read(wire.memory(buffers))
        compute.load(buffers)
        loss, is_finite = compute.compute(ticket)
        kind = MessageKind.PUSH if is_finite else MessageKind.LEFT_OUT
        own = b"" if ticket % ranks else bytes(wire.memory(compute.buffers()))
        read = bytes(wire.memory(torch.tensor(versions)))
        for number, (shard, room) in enumerate(zip(shards, rooms, strict=True)):
            parts = (read, *((room,) if is_finite else ()), *((own,) if number == 0 else ()))
            wire.send(shard, WireMessage(kind, ticket, len(shards), loss), *parts)
            if number == 0:
                wire.receive(shard)  # the first shard decides whether the ticket counts
        for shard in shards[1:]:
            wire.receive(shard)
        finished = ticket


def _beat(connection: Wire, lease_s: float) -> None:
    with contextlib.suppress(OSError):
        while True:
            wire.send(connection, WireMessage(MessageKind.BEAT))
            time.sleep(lease_s / _BEATS_IN_LEASE)


def _report(order: WorkerOrder, error: Exception) -> None:
    """Tell the first shard of an error in the task: training cannot continue."""
    if isinstance(error, TaskError):
        text = str(error)
    else:
        traceback.print_exc()
        text = "".join(traceback.format_exception_only(error)).strip()
    sys.stderr.flush()
    with contextlib.suppress(OSError), connected(order, MessageKind.COMPUTE, 0) as connection:
        wire.send(connection, WireMessage(MessageKind.FAIL), text.encode())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # tearing gloo down may hang (see train.py)
