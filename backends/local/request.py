"""The local request: the message for each node's agent on this machine, without the paths."""

from __future__ import annotations

import sys
from typing import Any

from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.plan import Plan
from cloudtrain.launcher.planning import images, render
from cloudtrain.launcher.planning.job_spec import job_order

from .block import Local


def build(plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
    """Return the request; relative paths begin at the config file's folder."""
    order = job_order(plan, config, job_id, attempt, bundle_sha256)
    body = render.render_json(
        "local/request.json",
        python=config.block(Local).python,
        **order,
        nodes=[_node(rank, plan) for rank in range(plan.instances)],
    )
    text = render.as_json(body)
    python, key = config.block(Local).python, "local.python"
    runtime = images.of(python, "yours", key) if python else images.of_this_interpreter(sys.executable, "this one", key)
    carried = frozenset({"resources.min_instances"})
    return Request(order["name"], body, text, {"request.json": text}, carried=carried, runtime=runtime)


def _node(rank: int, plan: Plan) -> dict[str, Any]:
    """Return one node: an address of its own in 127/8, and its share of the machine's GPUs."""
    high, low = divmod(rank + 1, 254)
    first = rank * plan.gpus_per_instance
    gpus = list(range(first, first + plan.gpus_per_instance))
    return {"node": rank, "address": f"127.0.{high}.{low + 1 if high else low}", "gpus": gpus}
