"""The scale of a rehearsal on this machine: fewer nodes and ranks, with micro-batches of the planned size."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.entrypoints.processes import cores

from ..config.schema import JobConfig
from ..plan import Plan

DEVICES = Path("/dev")


@dataclass(frozen=True)
class Scale:
    """The rehearsed nodes and ranks per node."""

    nodes: int
    nproc: int
    gpus: tuple[tuple[str, ...], ...]  # of each node, by CUDA's numbers; empty if training runs on the CPU
    settings: tuple[str, ...]  # apply the scale to the config
    words: tuple[str, ...]  # list the differences

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.nproc

    @property
    def threads(self) -> int:
        """Return the number of CPU threads for each rank."""
        return max(1, cores() // self.ranks)


def gpus_here() -> list[str]:
    """Return the GPUs that this process may use, by CUDA's numbers."""
    count = sum(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir(DEVICES))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not count:
        return [str(number) for number in range(count)]
    return [each.strip() for each in itertools.takewhile(lambda one: one.strip() != "-1", chosen.split(",")) if each]


def choose(config: JobConfig, plan: Plan, most_nodes: int, most_nproc: int | None, gpus: list[str]) -> Scale:
    """Return the largest scale of the plan that this machine supports.

    With GPUs each rank has its own GPU; without GPUs two ranks stand for several. A task's micro-batches are shared
    evenly, so only some numbers of ranks are possible.
    """
    nodes_most = min(plan.instances, most_nodes)
    has_gpus = bool(plan.gpus_per_instance) and len(gpus) >= nodes_most
    bears = len(gpus) // nodes_most if has_gpus else (1 if nodes_most > 1 else 2)
    nproc_most = min(plan.nproc_per_node, bears if most_nproc is None else most_nproc)
    if most_nproc is not None and nproc_most * nodes_most > len(gpus):
        has_gpus = False
    nodes, nproc = _fitting(plan, nodes_most, nproc_most)
    has_gpus = has_gpus and nproc <= nproc_most
    each = len(gpus) // nodes if has_gpus else 0
    shares = tuple(tuple(gpus[number * each : number * each + each][:nproc]) for number in range(nodes))
    settings, words = [], []
    if nodes < plan.instances or nproc < plan.nproc_per_node:
        ranks = f" x {nproc} of {plan.nproc_per_node} ranks" if nproc < plan.nproc_per_node else ""
        words.append(f"{nodes} of {plan.instances} nodes{ranks}")
        settings += [f"resources.instances={nodes}", f"distributed.nproc_per_node={nproc}"]
        if config.resources.min_instances is not None:  # a rehearsal loses no machine
            settings.append(f"resources.min_instances={nodes}")
        if plan.batch is not None:
            settings.append(f"training.micro_batch_size={plan.batch.micro_size}")
            data_ranks = plan.batch.data_ranks(nodes * nproc)
            steps = plan.batch.global_size // (plan.batch.micro_size * data_ranks)
            planned = plan.batch.accumulation
            words.append(f"{steps} micro-batches of {plan.batch.micro_size} a rank and step, not {planned}")
            shard = config.training.shard_size
            if shard is not None and data_ranks % shard:
                width = max(1, nproc // plan.batch.tensor)
                settings.append(f"training.shard_size={width}")
                words.append(f"shards over {width} ranks, not {shard}")
    if not has_gpus and plan.gpus_per_instance:
        words.append("on the CPU, over gloo")
    return Scale(nodes, nproc, shares, tuple(settings), tuple(words))


def _fitting(plan: Plan, nodes_most: int, nproc_most: int) -> tuple[int, int]:
    """Return the largest numbers of nodes and ranks that give each copy of the model the same number of micro-batches.

    A copy that is spread over more ranks than fit is rehearsed on one node.
    """
    if plan.batch is None:
        return nodes_most, nproc_most
    tried = itertools.product(range(nodes_most, 0, -1), range(nproc_most, 0, -1))
    tensor = plan.batch.tensor  # ranks that share a layer are on one node
    fits = ((nodes, nproc) for nodes, nproc in tried if plan.batch.fits(nodes * nproc) and not nproc % tensor)
    return next(fits, (1, tensor * plan.batch.pipeline))
