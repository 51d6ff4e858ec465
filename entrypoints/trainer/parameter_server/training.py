"""The rank process of asynchronous training: hosts a shard, supervises a worker, and meets the other ranks.

Training runs from boundary to boundary. A boundary is the end of a step at which a save, an evaluation or the end is
due: there all tickets handed out are applied, so the state is that of whole steps, on any number of ranks. In between
the rank processes, which compute nothing, meet a few times a second to agree on stops and saves.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import TaskError
from ...rank import exchange, heartbeat
from ...rank.agree import Agreed
from .. import report, saving
from ..job import TrainingJob, TrainState
from ..strategies.buffers import pack, unpack
from .server import ServerNews, ShardServer, Tickets
from .shard import UpdateLog, WeightShard, flat, pieces_of, shard_range, trained
from .wire import VARIABLE, WorkerOrder

_BATCH_NORM = """batch norm under strategy async has the statistics of one worker in turn; GroupNorm or LayerNorm \
does not depend on workers"""
_POLL_S = 0.2
_MOST_DEATHS, _SHORT_LIFE_S = 5, 60.0  # of a rank's worker in a row, each so soon after its start


class WorkerRank:
    """One rank's worker, and its server with a shard, None on ranks that host no shard; `_head` is rank 0's server."""

    def __init__(self, job: TrainingJob, progress: TrainState) -> None:
        """Start the shard and the worker. All ranks call it."""
        ranks, nodes = job.place.ranks, int(os.environ.get("GROUP_WORLD_SIZE") or 1)
        count = min(job.spec.training.server.shards or nodes, ranks)
        self._hosts = hosts = [number * ranks // count for number in range(count)]
        self._own = own = hosts.index(job.place.rank) if job.place.rank in hosts else None
        self._job, self._progress, self._ranks = job, progress, ranks
        self._finished, self._deaths, self._starts = 0, 0, 0
        secret = exchange.share(secrets.token_hex(32))
        self._server = None if own is None else self._hosted(own, secret)
        addresses = exchange.gather([_own_address(), self._server.port] if self._server else None)
        shards = [tuple(addresses[host]) for host in hosts]
        begin = {"step": progress.step, "samples": progress.samples, "max_steps": progress.max_steps}
        self._order = WorkerOrder("", shards, secret, self._ranks, parent=os.getpid(), **begin)
        self._head = self._server if job.place.is_head else None
        if self._head is not None:
            job.meter.figures = self._figures
            if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in job.strategy.module.modules()):
                print(_BATCH_NORM, flush=True)
        self._worker = self._started()

    def close(self) -> None:
        """End the worker and the server."""
        self._worker.kill()
        self._worker.wait()
        if self._server is not None:
            self._server.close()

    def train_to_boundary(self) -> Agreed:
        """Train to the next boundary; return the ranks' agreement: the reason to stop, or whether a save is due.

        All ranks call it. Raises TaskError or NonFiniteError, on all ranks, after a task's error.
        """
        job, progress = self._job, self._progress
        job.optimizer.state.clear()  # the shards have it
        if self._server is not None:
            self._server.shard.begin()
        dist.barrier()  # all shards are ready before a ticket is handed out
        if self._head is not None:
            self._head.open(_next_boundary(job, progress) * self._ranks)
        is_closing, seen = False, Agreed()
        while True:
            job.agreement.begin(job.meter.step_s, failed=job.saver.failure is not None, saving=job.saver.is_busy)
            verdict = job.agreement.finish()
            progress.log_every = verdict.log_every or progress.log_every
            if verdict.failed:
                saving.retry_later(job, progress)
            seen = Agreed(seen.stop or verdict.stop, seen.save or verdict.save)
            if self._head is not None and (seen.stop or (seen.save and not is_closing)):
                self._head.close_early(must_stop=seen.stop is not None)
                is_closing = True
            self._look_after_worker()
            if self._head is None and self._server is not None and (failure := self._server.pending.failure):
                raise TaskError(failure)
            news = ServerNews(**exchange.share(self._told()))
            self._follow(news)
            if news.done == news.limit:
                break
        self._gather()
        return seen

    def _told(self) -> dict[str, object]:
        """Return the first shard's news, on rank 0."""
        if self._head is None:
            return {}
        next_line = self._progress.step + 1
        while not report.is_logged(self._job, self._progress, next_line):
            next_line += 1
        return dataclasses.asdict(self._head.news(next_line * self._ranks, _POLL_S))

    def _follow(self, news: ServerNews) -> None:
        """Report the finished steps, and raise a worker's failure. All ranks have the same news."""
        job, progress = self._job, self._progress
        if news.done != self._finished:
            self._finished = news.done
            heartbeat.beat()
        for worker in news.lost:
            if worker == self._name:  # silent, perhaps stopped: the next one may compute again
                self._worker.kill()
            if job.place.is_head:
                print(f"worker {worker} is lost; its tickets are handed out again, and training continues", flush=True)
        for step in news.left_out:
            text = f"a part of step {step} is left out: its loss or gradient is not finite"
            report.say(job, "step", text, step=step, max_steps=progress.max_steps, skipped=True)
        if news.failure is not None:
            if news.is_sick:
                saving.fail(job, progress, news.failure)
            raise TaskError(news.failure)
        for loss in news.losses:
            progress.step += 1
            progress.samples += job.split.global_batch
            job.meter.tick()
            if loss is not None and report.is_logged(job, progress, progress.step):
                factor = job.factor(progress.step - 1, progress.max_steps, 0)
                report.say_step(job, progress, loss, job.base_lrs[0] * factor, None)

    def _figures(self) -> dict[str, Any]:
        # A worker pulls the weights and pushes a gradient for each ticket.
        sent = 2.0 * sum(p.nbytes for p in trained(self._job.strategy.module))
        return {"bytes_sent": sent, **(self._head.figures() if self._head else {})}

    def _look_after_worker(self) -> None:
        """Start the worker again if it has ended. Raises TaskError, on this rank, if it ends again and again."""
        code = self._worker.poll()
        if code is None:
            return
        lived_s = time.monotonic() - self._started_s
        self._deaths = self._deaths + 1 if lived_s < _SHORT_LIFE_S else 1
        if self._deaths > _MOST_DEATHS:
            raise TaskError(
                f"the worker of rank {self._job.place.rank} has ended {self._deaths} times soon after its start, at "
                f"last with code {code}; its log lines say why"
            )
        print(f"the worker of rank {self._job.place.rank} has ended with code {code}; it starts again", flush=True)
        self._worker = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        """Start the worker: a new process, since a fork after threads and CUDA is not safe."""
        self._starts, self._started_s = self._starts + 1, time.monotonic()
        self._name = f"{self._job.place.rank}.{self._starts}"
        order = dataclasses.replace(self._order, name=self._name)
        environment = {**os.environ, VARIABLE: json.dumps(dataclasses.asdict(order))}
        for name in ("CLOUDTRAIN_RESULT_DIR", "CLOUDTRAIN_OUTPUT_DIR"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "cloudtrain.entrypoints.trainer.parameter_server.worker"]
        return subprocess.Popen(command, env=environment)

    def _hosted(self, number: int, secret: str) -> ShardServer:
        """Return the server of a shard with the job's present weights, optimizer state and average."""
        job, ranks, shards = self._job, self._ranks, len(self._hosts)
        module, training, wanted = job.strategy.module, job.spec.training, job.spec.training.server
        first, log = self._progress.step * ranks, None
        if folder := os.environ.get("CLOUDTRAIN_OUTPUT_DIR"):  # a changed number of ranks begins other logs
            path = Path(folder) / "updates" / f"ranks-{ranks}-shard-{number}-of-{shards}.log"
            log = UpdateLog(path, shards, first)
        pieces = pieces_of(module, number, shards)
        sizes = [piece.numel() for piece in pieces]
        buffers = pack(module) if number == 0 else None
        shard = WeightShard(training, number, pieces, ranks, first, self._progress.max_steps, buffers, log)
        states = {p: job.optimizer.state.get(p, {}) for p in trained(module)}
        own = shard_range(sum(p.numel() for p in states), number, shards)
        for key in dict.fromkeys(itertools.chain(*states.values())):
            values = [of[key].expand(p.shape) if key in of else torch.zeros_like(p) for p, of in states.items()]
            parts = torch.split(flat(values)[own.start : own.stop], sizes)
            for piece, part in zip(pieces, parts, strict=True):
                shard.optimizer.state[piece][key] = part[0].float().clone() if key == "step" else part.clone()
        if job.ema is not None:
            ema = job.ema
            shard.average = average = flat(ema.averages.values())[own.start : own.stop].clone()

            def follow(step: int) -> None:
                average.lerp_(shard.weights.to(average.dtype), 1.0 - ema.decay(step))

            shard.after_step = follow
        tickets = Tickets(ranks, first, max_lead=wanted.max_lead, is_ordered=wanted.order == "tickets")
        skips = training.on_nan == "skip"
        return ShardServer(shard, secret, ranks, wanted.lease_s, tickets, skips=skips)

    @torch.no_grad()
    def _gather(self) -> None:
        """Give every rank the weights, the optimizer's state, the average and the buffers of all shards."""
        job, shard = self._job, self._server.shard if self._server is not None else None
        if shard is not None:
            shard.flush()
        mine = {} if shard is None else _held(shard)
        # The type, or the value of the optimizer's `step`, which all parameters share.
        described = exchange.gather(
            {k: float(of[0]) if k == "step" else str(of[0].dtype)[6:] for k, of in mine.items()}
        )
        parameters = trained(job.strategy.module)
        sizes = [p.numel() for p in parameters]
        targets: dict[str, Iterable[torch.Tensor]] = {"weights": parameters}
        if job.ema is not None:
            targets["average"] = job.ema.averages.values()
        for key, value in described[0].items():
            if key == "step":
                for p in parameters:
                    job.optimizer.state[p][key] = torch.tensor(value, dtype=torch.float32)
                continue
            whole = torch.empty(sum(sizes), dtype=getattr(torch, value))
            for number, host in enumerate(self._hosts):
                own = shard_range(len(whole), number, len(self._hosts))
                part = whole[own.start : own.stop]
                if self._own == number:
                    torch.cat(mine[key], out=part)
                dist.broadcast(part, host)
            for p in parameters if key not in targets else ():
                job.optimizer.state[p][key] = torch.empty_like(p, dtype=whole.dtype)
            filled = targets.get(key) or [job.optimizer.state[p][key] for p in parameters]
            for target, values in zip(filled, torch.split(whole, sizes), strict=True):
                target.copy_(values.view(target.shape))
        if shard is not None and shard.buffers is not None:
            unpack(job.strategy.module, shard.buffers)
        job.strategy.sync_buffers()


def _held(shard: WeightShard) -> dict[str, list[torch.Tensor]]:
    """Return the shard's weights, average and optimizer state, in the order of its elements."""
    states = [shard.optimizer.state[piece] for piece in shard.pieces]
    average = {} if shard.average is None else {"average": [shard.average]}
    return {"weights": [shard.weights], **average, **{key: [state[key] for state in states] for key in states[0]}}


def _next_boundary(job: TrainingJob, progress: TrainState) -> int:
    """Return the next step at which a save, an evaluation, a rehearsal's pause or the end is due."""
    every = (job.spec.checkpoint.every_steps, job.spec.training.eval_every if job.eval_data is not None else None)
    ends = [(progress.step // steps + 1) * steps for steps in every if steps]
    if progress.rehearsal is not None and (held := progress.rehearsal.hold_at) and held > progress.step:
        ends.append(held)
    return min([*ends, progress.last_step])


def _own_address() -> str:
    """Return this machine's address on the way to the first rank's machine."""
    master, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT") or 1)
    family, _, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
