"""The Slurm request: sbatch's options, the batch script, and the order for the agents, without any connection."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.plan import Plan
from cloudtrain.launcher.planning import images, render
from cloudtrain.launcher.planning.job_spec import job_order
from cloudtrain.launcher.text.addresses import is_beside

from .block import Slurm

LOW_NICE = 1000
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from cloudtrain.entrypoints.agent import slurm_step; "
    "sys.exit(slurm_step.main(sys.argv[2:]))"
)


def build(plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
    """Return the request. The send adds only `--hold`, `--parsable` and the attempt's folder as `--chdir`."""
    order, block = job_order(plan, config, job_id, attempt, bundle_sha256), config.block(Slurm)
    can_shrink = (order["spec"]["min_nodes"] or plan.instances) < plan.instances
    # Without a number, the task would have a single core.
    cores = block.cpus_per_node or (None if block.exclusive else max(plan.devices_per_node, 1))
    name, per_node = order["name"], [f"--cpus-per-task={cores}"] if cores else []
    inputs = (uri for uri in order["inputs"].values() if not is_beside(uri))  # data that goes along is below workdir
    places = [order["checkpoint_dir"], *inputs, *order["outputs"].values()]
    script = render.render_text(
        "slurm/job.sh",
        name=name,
        modules=block.modules,
        container=block.container,
        image=config.image,
        folder=f"{block.workdir}/jobs/{job_id}/attempt-{attempt}",
        mounts=[block.workdir, *dict.fromkeys(filter(None, places))],
        python=block.python,
        start=_START,
        interface=block.interface,
        gpus=plan.gpus_per_instance,
        can_shrink=can_shrink,
        step_options=per_node,  # since Slurm 22.05, srun does not inherit --cpus-per-task
    )
    options = [f"--job-name={name}", f"--comment=cloudtrain:{job_id}:{attempt}", *_options(plan, config, block)]
    body = render.render_yaml(
        "slurm/request.yml",
        settings={**block.model_dump(mode="json"), "image": config.image},
        options=[*options, *per_node, *(["--no-kill"] if can_shrink else []), *block.raw],
        script=script,
        **order,
    )
    text = render.as_yaml(body)
    files = {"job.yml": text, "job.sh": script}
    runtime = images.of(block.python, "as each node has it", "slurm.python")
    if block.container != "none" and config.image:
        runtime = images.of(config.image, f"run by {block.container} on each node")
    carried = {"resources.min_instances", *(["limits.max_wait"] if _has_deadline(plan, config) else [])}
    carried |= {"requeue"} if plan.budget_micro is None and config.distributed.max_restarts else set()
    return Request(name, body, text, files, carried=frozenset(carried), runtime=runtime)


def _options(plan: Plan, config: JobConfig, block: Slurm) -> Iterator[str]:
    """Yield sbatch's options of the whole job: command-line options, as variables of the shell override the script's.

    The environment of `sbatch` itself, which is nearly empty (entrypoints/host/slurm.py), is the job's: a site's
    database may keep the environment.
    """
    yield from (f"--nodes={plan.instances}", "--ntasks-per-node=1", f"--time={math.ceil(plan.cap_s / 60)}")
    # A requeue begins Slurm's time limit anew, which no budget covers.
    yield "--requeue" if plan.budget_micro is None else "--no-requeue"
    if _has_deadline(plan, config):  # Slurm removes a job that can no longer end by then
        yield f"--deadline=now+{math.ceil(plan.cap_s / 60) * 60 + (config.limits.max_wait or 0)}"
    yield from ("--export=ALL", "--open-mode=append", "--output=batch.log")
    for option in ("partition", "account", "qos", "constraint", "reservation", "licenses", "nodelist", "exclude"):
        if (value := getattr(block, option)) is not None:
            yield f"--{option}={value}"
    if gres := block.gres or _gres(config.resources.accelerators):
        yield f"--gres={gres}"
    if block.exclusive:
        yield "--exclusive"
    if block.mem is not None:
        yield f"--mem={block.mem}"
    if config.queue.priority == "low":  # a user may only lower the priority of a job
        yield f"--nice={LOW_NICE}"


def _has_deadline(plan: Plan, config: JobConfig) -> bool:
    """Return whether Slurm ends the wait. A job that Slurm may requeue has no deadline: its later runs come later."""
    return config.limits.max_wait is not None and plan.budget_micro is not None


def _gres(accelerators: str | None) -> str | None:
    """Return `A100:8` as gpu:a100:8. sbatch refuses a type that no node has, instead of taking some other type."""
    if accelerators is None:
        return None
    kind, _, count = accelerators.partition(":")
    words = ("gpu",) if kind.lower() in ("", "gpu") else ("gpu", kind.lower())
    return ":".join((*words, count or "1"))
