"""Asynchronous training with a slow worker, on a virtual clock: the product's tickets, shard and gradients.

Four workers train the digits CNN of methods.py for 224 steps of 4 x 16 samples. A step computes for 50 ms +- 10 % on
each worker; one worker is three times slower. Transfers take 10 Gbit/s. Sync waits for the slowest worker in each step.
The gradients and updates are real, only the time is virtual, so a busy machine does not change the result.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable

import torch
from report import Report
from torch import nn

from cloudtrain.entrypoints.contract import CheckpointSettings
from cloudtrain.entrypoints.trainer.parameter_server.server import Tickets
from cloudtrain.entrypoints.trainer.parameter_server.shard import WeightShard, pieces_of
from cloudtrain.entrypoints.trainer.parameter_server.worker import Gradients
from cloudtrain.entrypoints.trainer.settings import OptimizerSettings, ServerSettings, Spec, TrainingSettings
from cloudtrain.entrypoints.trainer.task import Task, load_task
from trainer.methods import RANKS, STEPS, TASK

ROUNDS, COMPUTE_S, SPREAD, SLOW, BYTES_PER_S = 3, 0.05, 0.1, 3.0, 1.25e9
LEAST_ACCURACY, MOST_TIME = 0.97, 0.41
RULES = {
    "capped": ServerSettings(),
    "none": ServerSettings(staleness="none"),
    "softsync 2": ServerSettings(softsync=2),
    "max_lead 3": ServerSettings(max_lead=3),
}


def run(rounds: int, say: Callable[[str], None]) -> Report:
    """Train with each rule and seed; return the table."""
    table = Report(f"Async with one of {RANKS} workers {SLOW:g} times slower, virtual time: mean of {rounds} seeds")
    task = load_task(TASK)
    for name, server in RULES.items():
        found = [_train(task, server, seed) for seed in range(1, rounds + 1)]
        accuracy = statistics.mean(each[0] for each in found)
        share = statistics.mean(each[1] for each in found)
        say(f"{name}: accuracy {accuracy:.4f}, {share:.2f} of sync's time")
        is_bar = name == "capped"
        ok = (accuracy >= LEAST_ACCURACY and share <= MOST_TIME) if is_bar else None
        bar = f">= {LEAST_ACCURACY} in <= {MOST_TIME}" if is_bar else ""
        staleness = statistics.mean(each[2] for each in found)
        table.timing(name, f"{accuracy:.4f} in {share:.2f} of sync's time, staleness {staleness:.2f}", bar, ok=ok)
    return table


def _train(task: Task, server: ServerSettings, seed: int) -> tuple[float, float, float]:
    """Return the accuracy, the share of sync's time, and the mean staleness."""
    training = TrainingSettings(
        global_batch_size=16 * RANKS,
        strategy="async",
        server=server,
        max_steps=STEPS,
        optimizer=OptimizerSettings("sgd", 0.05, momentum=0.9),
        seed=seed,
    )
    spec = Spec("virtual", 1, str(TASK), {}, training, CheckpointSettings(), 60.0, "")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    compute = Gradients(spec, task, RANKS, 0, 0)
    module = compute.job.strategy.module
    shard = WeightShard(training, 0, pieces_of(module, 0, 1), RANKS, 0, 1)
    tickets = Tickets(RANKS, max_lead=server.max_lead)
    tickets.limit = STEPS * RANKS
    chance, clock_s = random.Random(seed), 0.0
    workers = [f"{number}" for number in range(RANKS)]
    for worker in workers:
        tickets.join(worker)
    waiting, busy, kept = list(workers), list[tuple[float, str, int, int]](), dict[str, torch.Tensor]()
    sync_s = _sync_s(chance, compute.weights.nbytes)
    while not tickets.is_complete:
        for worker in list(waiting):
            ticket = tickets.take(worker)
            if ticket is None:
                continue
            waiting.remove(worker)
            kept[worker] = torch.empty_like(compute.weights)
            version = shard.pull(ticket, kept[worker])
            heapq.heappush(busy, (clock_s + _step_s(worker, chance, compute.weights.nbytes), worker, ticket, version))
        clock_s, worker, ticket, version = heapq.heappop(busy)
        compute.weights.copy_(kept.pop(worker))
        compute.load(torch.empty(0, dtype=torch.uint8))
        compute.compute(ticket)
        tickets.commit(worker, ticket)
        shard.push(ticket, (version,), compute.weights)
        tickets.finish(worker, ticket)
        waiting.append(worker)
    shard.flush()
    compute.weights.copy_(shard.weights)
    compute.load(torch.empty(0, dtype=torch.uint8))
    counts = shard.staleness
    mean = sum(tau * count for tau, count in counts.items()) / counts.total()
    return _accuracy(task, module), clock_s / sync_s, mean


def _step_s(worker: str, chance: random.Random, size: int) -> float:
    computes = COMPUTE_S * chance.uniform(1 - SPREAD, 1 + SPREAD) * (SLOW if worker == "0" else 1.0)
    return computes + 2 * size / BYTES_PER_S


def _sync_s(chance: random.Random, size: int) -> float:
    """Return the time of ddp: in each step all wait for the slowest, then a ring sends."""
    ring = 2 * (RANKS - 1) / RANKS * size / BYTES_PER_S
    slowest = (
        max(COMPUTE_S * chance.uniform(1 - SPREAD, 1 + SPREAD) * (SLOW if rank == 0 else 1.0) for rank in range(RANKS))
        for _ in range(STEPS)
    )
    return sum(slowest) + STEPS * ring


@torch.no_grad()
def _accuracy(task: Task, module: nn.Module) -> float:
    module.eval()
    held_back = task.dataset({}, "eval")
    images, labels = (torch.stack([torch.as_tensor(one[part]) for one in held_back]) for part in (0, 1))
    return float((module(images).argmax(1) == labels).float().mean())
