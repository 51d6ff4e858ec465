"""The job spec for the nodes, from plan and config: the same on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints import contract
from cloudtrain.entrypoints.contract import ContainerOrder, EvaluateSettings, JobSpec, SetupSpec
from cloudtrain.entrypoints.terms import Terms

from ..channels import entries
from ..job import platform_name
from ..metering import limit
from . import planner, search_spec

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..plan import Plan

PRIORITIES = {"low": 25, "normal": 50, "high": 75}

HANG_MARGIN_S = 300  # after a collective's timeout, so that the timeout's message names the cause
SCRIPT_HANG_S = 3600  # a script may evaluate for long and print nothing


def job_spec(plan: Plan, config: JobConfig, job_id: str, attempt: int) -> JobSpec:
    """Return the job spec; no secrets, no data about the local machine."""
    whole = config.model_dump(mode="json", include={"task", "training", "sweep"})
    is_sweep = config.sweep is not None
    kind = "task" if config.task else "script" if config.script else "module"
    checkpoint, distributed = config.checkpoint, config.distributed
    fewest = config.resources.min_instances or plan.instances
    training: dict[str, Any] | None = None
    if config.task:
        training = search_spec.training_of(whole) if is_sweep else whole["training"]
        if plan.batch is not None and fewest < plan.instances:
            # The default is a rank's whole share: fewer ranks would change the number, and the split of the samples.
            training["micro_batch_size"] = plan.batch.micro_size
    return JobSpec(
        job=job_id,
        attempt=attempt,
        nodes=plan.instances,
        min_nodes=fewest,
        node_counts=node_counts(plan, config),
        nproc_per_node=plan.nproc_per_node,
        max_restarts=distributed.max_restarts,
        timeout_s=distributed.timeout_s,
        hang_timeout_s=distributed.hang_timeout
        or default_hang_timeout_s(distributed.timeout_s, is_task=config.task is not None),
        run=contract.RunSpec(
            kind="sweep" if is_sweep else kind,
            target=config.task or config.script or config.module or "",
            args=tuple(config.args),
            resume_args=tuple(config.resume_args),
            keep=tuple(config.keep),
            progress=config.progress.model_dump(mode="json", exclude_defaults=True) or None,
            on_stop=config.on_stop if config.on_stop != "signal" else None,
            allow_alone=distributed.allow_alone,
            workdir=distributed.workdir,
            tracked_as=config.name if distributed.name_runs and not (config.task or config.sweep) else None,
            stop_signal=distributed.stop_signal if distributed.stop_signal != "SIGTERM" else None,
        ),
        checkpoint=contract.CheckpointSettings(
            every_s=checkpoint.every, saved_step=plan.saved_step, **checkpoint.model_dump(exclude={"every", "uri"})
        ),
        init_from=_init_settings(config),
        evaluate=_evaluate_settings(config),
        params=config.params if config.task else None,
        training=training,
        setup=SetupSpec(config.requirements, tuple(config.setup)) if config.requirements or config.setup else None,
        notices=_notices(plan, config) if any(entry.from_job for entry in config.notify) else None,
        sweep=search_spec.sweep_spec(whole, plan, kind) if is_sweep else None,
    )


def _init_settings(config: JobConfig) -> contract.InitSettings | None:
    """Return the settings of a task's `init_from`; a script reads CLOUDTRAIN_INPUT_INIT_FROM by itself."""
    wanted = config.init_from
    if wanted is None or not config.task:
        return None
    same = {name: getattr(wanted, name) for name in ("job", "checkpoint", "rename", "strict")}
    return contract.InitSettings(**same, what=wanted.load, skip=tuple(wanted.skip))


def _evaluate_settings(config: JobConfig) -> EvaluateSettings | None:
    """Return the settings of the job's test; None without a test at the end."""
    wanted = config.evaluate
    if wanted is None or not config.task or not (wanted.at_end or wanted.only):
        return None
    return EvaluateSettings(wanted.split, wanted.checkpoint, wanted.batch_size, wanted.only, wanted.predictions)


def container_order(plan: Plan, config: JobConfig, job: JobSpec, bundle_sha256: str, **own: Any) -> ContainerOrder:
    """Return the order of the cloud containers; `own` has the fields that differ between the clouds."""
    return ContainerOrder(
        job=job,
        environment=dict(config.env),
        deadline_s=plan.deadline_s,
        max_duration_s=plan.own_limit_s,
        limit_reason=plan.cap_reason,
        bundle_sha256=bundle_sha256,
        **own,
    )


def default_hang_timeout_s(timeout_s: int, *, is_task: bool) -> int:
    """Return the seconds without a step after which a rank counts as hung; `timeout_s` is a collective call's."""
    return max(timeout_s + HANG_MARGIN_S, 0 if is_task else SCRIPT_HANG_S)


def resume_terms(plan: Plan) -> Terms:
    """Return the terms of a run after this plan's: the lead as in this run, and the shortest limit that is sent."""
    lead_s = max(0, plan.cap_s - (plan.own_limit_s or plan.cap_s))
    return replace(plan.terms, lead_s=lead_s, least_s=limit.least_useful_s(plan.terms))


def node_counts(plan: Plan, config: JobConfig) -> tuple[int, ...]:
    """Return the possible numbers of nodes: for a task, those whose ranks share its micro-batches evenly; else all.

    Of a sweep, those that the machines of a trial divide.
    """
    if config.sweep is not None:
        return tuple(nodes for nodes in range(1, plan.instances + 1) if nodes % plan.slot_instances == 0)
    if plan.batch is None:
        return tuple(range(1, plan.instances + 1))
    found = {nodes: planner.copies(config, nodes * plan.nproc_per_node) for nodes in range(1, plan.instances + 1)}
    micro_batches = plan.batch.global_size // plan.batch.micro_size
    return tuple(nodes for nodes, count in found.items() if count and micro_batches % count == 0)


def _notices(plan: Plan, config: JobConfig) -> contract.NoticeSettings:
    """Return the settings of the job's own notifications (notices/node_notifier.py); secrets hold addresses."""
    channels = tuple(
        contract.NoticeChannel(
            id=entry.id,
            kind=entry.kind,
            secret=(entry.smtp if entry.kind == "email" else entry.place).removeprefix("env:"),
            to=entry.place if entry.kind == "email" else "",
            sender=entry.sender,
            on=tuple(entry.on),
        )
        for entry in entries(config.model_dump(mode="json", include={"notify"}))
        if entry.from_job
    )
    return contract.NoticeSettings(
        channels=channels,
        backend=config.backend,
        limit_micro=plan.budget_micro,
        alert_at=tuple(config.budget.alert_at) if config.budget and plan.budget_micro is not None else (),
        on_limit=plan.on_limit,
        rate=plan.rate,
        terms=resume_terms(plan),
        spent_micro=plan.spent_micro,
    )


def job_order(plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> dict[str, Any]:
    """Return what agents on a user's own machines get of any job: the spec, variables, secrets' names, plain paths."""
    line = {"priority": PRIORITIES[config.queue.priority], "preempt": config.queue.preempt}
    return {
        "name": platform_name(job_id, attempt),
        "plan": plan,
        "spec": job_spec(plan, config, job_id, attempt).dump(),
        "bundle_sha256": bundle_sha256,
        "grace_s": planner.STOP_TAIL_S,
        "queue": {**line, "max_wait_s": config.limits.max_wait} if config.queue.wait else None,
        "environment": dict(config.env),
        "secrets": list(config.secrets),
        "checkpoint_dir": _plain(config.checkpoint.uri),
        "inputs": {key: _plain(value) for key, value in config.inputs.items()},
        "outputs": {key: _plain(value) for key, value in config.outputs.items()},
    }


def _plain(uri: str | None) -> str | None:
    """Return a path without `file://`."""
    return None if uri is None else uri.removeprefix("file://")
