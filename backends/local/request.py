"""The local request: the message for each node's agent on this machine, without the paths."""

from __future__ import annotations

from typing import Any

from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.job import platform_name
from cloudtrain.launcher.plan import Plan
from cloudtrain.launcher.planning import render
from cloudtrain.launcher.planning.job_spec import job_spec, job_surroundings, queue_terms
from cloudtrain.launcher.planning.planner import STOP_TAIL_S

from .block import Local


def build(plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
    """Return the request; relative paths begin at the config file's folder."""
    name = platform_name(job_id, attempt)
    body = render.render_json(
        "local/request.json",
        name=name,
        plan=plan,
        spec=job_spec(plan, config, job_id, attempt).dump(),
        bundle_sha256=bundle_sha256,
        grace_s=STOP_TAIL_S,
        queue=queue_terms(config),
        python=config.block(Local).python,
        **job_surroundings(config),
        nodes=[_node(rank, plan) for rank in range(plan.instances)],
    )
    text = render.as_json(body)
    return Request(name, body, text, {"request.json": text}, carried=frozenset({"resources.min_instances"}))


def _node(rank: int, plan: Plan) -> dict[str, Any]:
    """Return one node: an address of its own in 127/8, and its share of the machine's GPUs."""
    high, low = divmod(rank + 1, 254)
    first = rank * plan.gpus_per_instance
    gpus = list(range(first, first + plan.gpus_per_instance))
    return {"node": rank, "address": f"127.0.{high}.{low + 1 if high else low}", "gpus": gpus}
