"""What a job does if a machine dies, by the config: the line of `plan`, and a `min_instances` without effect."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from cloudtrain.entrypoints.format import counted

from ..backend_table import traits
from ..errors import Fault
from . import planner
from .job_spec import node_counts

if TYPE_CHECKING:
    from ..backend import Request
    from ..config.schema import JobConfig
    from ..plan import Plan

MIN_INSTANCES = "resources.min_instances"


def fault(config: JobConfig, plan: Plan, request: Request) -> Fault | None:
    """Return the fault of a `min_instances` with which no fewer machines could share the batch; None if some could."""
    fewest, most, batch = config.resources.min_instances, plan.instances, plan.batch
    if fewest is None or fewest == most or batch is None or MIN_INSTANCES not in request.carried:
        return None
    if _fewer(config, plan):
        return None
    whole, micro = batch.global_size, batch.micro_size
    found = [planner.copies(config, count * plan.nproc_per_node) for count in range(fewest, most)]
    units = [lcm(count, batch.data_ranks(plan.ranks)) for count in found if count]
    hint = "leave it out"
    if sizes := sorted({whole // unit for unit in units if whole % unit == 0}):
        hint = f"leave `micro_batch_size` out, or write {' or '.join(map(str, sizes))}"
    elif units:
        unit = min(units)
        near = " or ".join(str(size) for size in (whole // unit * unit, (whole // unit + 1) * unit) if size)
        hint = f"write `global_batch_size` {near}, without `micro_batch_size`"
    fewer = f"{fewest}" if fewest == most - 1 else f"{fewest} to {most - 1}"
    message = f"`min_instances` {fewest} has no effect: {fewer} instances cannot share a global batch of {whole}"
    message += f" in micro-batches of {micro}"
    return Fault(message, MIN_INSTANCES, hint=hint)


def words(config: JobConfig, plan: Plan, request: Request) -> str:
    """Return in a line what follows if a machine dies; empty if the nodes are processes of this machine."""
    if traits(config.backend).runs_here:
        return ""
    is_elastic = MIN_INSTANCES in request.carried and plan.instances > 1
    parts, fewer = [], _fewer(config, plan) if is_elastic and config.distributed.max_restarts else []
    if fewer:
        parts.append(
            f"the job goes on with {' or '.join(map(str, reversed(fewer)))} of {plan.instances} (min_instances)"
        )
    if retries := config.retry.max_attempts - 1 if "node_failure" in config.retry.on else 0:
        spare = len(getattr(getattr(config, config.backend, None), "hosts", ())) - plan.instances
        hosts = f" ({counted(spare, 'spare host')})" if spare > 0 else ""
        parts.append(f"at most {retries} retr{'y' if retries == 1 else 'ies'}{hosts}")
    if plan.terms.starts > 1 and not retries:
        parts.append("the platform starts the job again")
    keys = "`retry`, no `min_instances`" if is_elastic else "`retry`"
    which, what = "a" if plan.instances > 1 else "the", ", else ".join(parts) or f"the job fails (no {keys})"
    return f"if {which} machine dies: {what}; {_copies(config, plan)}"


def _fewer(config: JobConfig, plan: Plan) -> list[int]:
    """Return the smaller numbers of machines with which a restart may go on."""
    fewest = config.resources.min_instances or plan.instances
    return [count for count in node_counts(plan, config) if fewest <= count < plan.instances]


def _copies(config: JobConfig, plan: Plan) -> str:
    """Return where the checkpoints are after the loss of a machine."""
    if not (plan.saves or plan.keeps):
        return "no file is kept (`keep`)"
    if config.checkpoint.mirror:
        return f"checkpoints have copies in {config.checkpoint.mirror}"
    if config.checkpoint.uri or not traits(config.backend).keeps_on_nodes:
        return "checkpoints are not on the machines"
    return "checkpoints are copied to the next machine" if plan.instances > 1 else "checkpoints are lost (no mirror)"
