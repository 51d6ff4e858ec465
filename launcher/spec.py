"""The job as the nodes see it: one JSON object, the same on every backend, read by boot and by the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import Config
    from cloudtrain.launcher.plan import Plan

__all__ = ["job_spec"]


def job_spec(plan: Plan, config: Config, job_id: str, attempt: int) -> dict[str, Any]:
    """Return the object; durations in seconds, no secrets, nothing of this machine."""
    kind = "task" if config.task else "script" if config.script else "module"
    checkpoint = config.checkpoint
    spec: dict[str, Any] = {
        "job": job_id,
        "attempt": attempt,
        "nodes": plan.instances,
        "nproc_per_node": plan.nproc_per_node,
        "max_restarts": config.distributed.max_restarts,
        "timeout_s": config.distributed.timeout_s,
        "run": {"kind": kind, "target": config.task or config.script or config.module, "args": list(config.args)},
        "checkpoint": {
            "every_steps": checkpoint.every_steps,
            "every_s": checkpoint.every,
            "keep": checkpoint.keep,
            "keep_best": checkpoint.keep_best,
            "blocking": checkpoint.blocking,
            "export": checkpoint.export,
            "resume": checkpoint.resume,
        },
    }
    if kind == "task":
        spec["params"] = config.params
        spec["training"] = config.training.model_dump(mode="json")
    return spec
