"""The job spec for the nodes: a JSON object, the same on every backend, read by boot and by the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.plan import Plan

__all__ = ["default_hang_timeout_s", "job_spec", "job_surroundings"]

HANG_MARGIN_S = 300  # after a collective's timeout, so that the timeout's message names the cause
SCRIPT_HANG_S = 3600  # a script may evaluate for long and print nothing


def job_spec(plan: Plan, config: JobConfig, job_id: str, attempt: int) -> dict[str, Any]:
    """Return the job spec; durations in seconds, no secrets, no data about the local machine."""
    kind = "task" if config.task else "script" if config.script else "module"
    checkpoint = config.checkpoint
    fewest = config.resources.min_instances or plan.instances
    spec: dict[str, Any] = {
        "job": job_id,
        "attempt": attempt,
        "nodes": plan.instances,
        "min_nodes": fewest,
        "node_counts": _node_counts(plan, config),
        "nproc_per_node": plan.nproc_per_node,
        "max_restarts": config.distributed.max_restarts,
        "timeout_s": config.distributed.timeout_s,
        "hang_timeout_s": config.distributed.hang_timeout
        or default_hang_timeout_s(config.distributed.timeout_s, is_task=kind == "task"),
        "run": {
            "kind": kind,
            "target": config.task or config.script or config.module,
            "args": list(config.args),
            **_script_options(config),
        },
        "checkpoint": {
            "every_steps": checkpoint.every_steps,
            "every_s": checkpoint.every,
            "keep": checkpoint.keep,
            "keep_best": checkpoint.keep_best,
            "blocking": checkpoint.blocking,
            "export": checkpoint.export,
            "mirror": checkpoint.mirror,
            "resume": checkpoint.resume,
            **({} if checkpoint.all_damaged == "stop" else {"all_damaged": checkpoint.all_damaged}),
        },
    }
    if kind == "task":
        spec["params"] = config.params
        spec["training"] = config.training.model_dump(mode="json")
        if plan.batch is not None and fewest < plan.instances:
            # The default is a rank's whole share: fewer ranks would change the number, and the split of the samples.
            spec["training"]["micro_batch_size"] = plan.batch.micro_size
    if config.requirements or config.setup:
        spec["setup"] = {"requirements": config.requirements, "commands": list(config.setup)}
    if any(entry.from_job for entry in config.notify):
        spec["notices"] = _notices(plan, config)
    return spec


def default_hang_timeout_s(timeout_s: int, *, is_task: bool) -> int:
    """Return the seconds without a step after which a rank counts as hung; `timeout_s` is a collective call's."""
    return max(timeout_s + HANG_MARGIN_S, 0 if is_task else SCRIPT_HANG_S)


def _script_options(config: JobConfig) -> dict[str, Any]:
    """Return the options of a script or module that differ from their defaults."""
    progress = config.progress.model_dump(mode="json", exclude_defaults=True)
    options = {
        "resume_args": list(config.resume_args),
        "keep": list(config.keep),
        "progress": progress,
        "on_stop": config.on_stop if config.on_stop != "signal" else None,
        "allow_alone": config.distributed.allow_alone,
    }
    return {name: value for name, value in options.items() if value}


def _notices(plan: Plan, config: JobConfig) -> dict[str, Any]:
    """Return the settings of the job's own notifications (entrypoints/notices/teller.py); secrets hold addresses."""
    from cloudtrain.launcher.store.channels import entries

    found = [entry for entry in entries(config.model_dump(mode="json", include={"notify"})) if entry.from_job]
    channels = [
        {
            "id": entry.id,
            "kind": entry.kind,
            "secret": (entry.smtp if entry.kind == "email" else entry.place).removeprefix("env:"),
            "to": entry.place if entry.kind == "email" else "",
            "sender": entry.sender,
            "on": list(entry.on),
        }
        for entry in found
    ]
    return {
        "channels": channels,
        "backend": config.backend,
        "limit_micro": plan.budget_micro,
        "alert_at": list(config.budget.alert_at) if config.budget and plan.budget_micro is not None else [],
        "on_limit": plan.on_limit,
        "rate_micro_h": None if plan.price_micro is None else plan.price_micro * plan.instances,
        "uncertainty": plan.uncertainty,
        "tail_s": plan.tail_s,
        "lead_s": plan.cap_s - plan.own_limit_s,
        "unit_s": plan.unit_s,
        "least_bill_s": plan.minimum_bill_s,
        "least_s": plan.useful_s or 0,
        "starts": plan.attempts,
        "spent_micro": plan.spent_micro,
    }


def _node_counts(plan: Plan, config: JobConfig) -> list[int]:
    """Return the possible numbers of nodes: for a task, those whose ranks share its micro-batches evenly; else all."""
    if plan.batch is None:
        return list(range(1, plan.instances + 1))
    micro_batches = plan.batch.global_size // plan.batch.micro_size
    shard = config.training.shard_size or 1
    ranks = {nodes: nodes * plan.nproc_per_node for nodes in range(1, plan.instances + 1)}
    return [nodes for nodes, count in ranks.items() if micro_batches % count == 0 and count % shard == 0]


def job_surroundings(config: JobConfig) -> dict[str, Any]:
    """Return a job's environment besides the spec, if its folders are plain paths: variables, secrets' names, paths."""
    return {
        "environment": dict(config.env),
        "secrets": list(config.secrets),
        "checkpoint_dir": _plain(config.checkpoint.uri),
        "inputs": {key: _plain(value) for key, value in config.inputs.items()},
        "outputs": {key: _plain(value) for key, value in config.outputs.items()},
    }


def _plain(uri: str | None) -> str | None:
    """Return a path without `file://`."""
    return None if uri is None else uri.removeprefix("file://")
