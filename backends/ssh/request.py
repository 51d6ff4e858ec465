"""The ssh request: the hosts, and each agent's message except the fields that only the hosts know."""

from __future__ import annotations

import re

from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.plan import Plan, Runtime
from cloudtrain.launcher.planning import images, render
from cloudtrain.launcher.planning.job_spec import job_order

from ..channel.hosts import Host
from .block import Ssh


def build(plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
    """Return the request. Hosts may outnumber the instances: the send takes the first hosts that are fit and free."""
    order, block = job_order(plan, config, job_id, attempt, bundle_sha256), config.block(Ssh)
    swaps = _swaps(plan, config)
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", block.ports.strip())
    ports = [int(match[1]), int(match[2])] if match else []  # the lowest and the highest
    body = render.render_json(
        "ssh/request.json",
        gpu_model=(config.resources.accelerators or "").partition(":")[0] or None,
        ranks_are_chosen=config.distributed.nproc_per_node != "auto",
        hosts=[host.dump() for host in of_config(config)],
        ports=ports if ports and 1024 <= ports[0] < ports[1] <= 65535 else None,
        gpu_locks=block.gpu_locks,
        swaps=swaps,
        allow_busy=block.allow_busy,
        runs_in={
            "kind": block.environment,
            "requirements": block.requirements,
            "system_site_packages": block.system_site_packages,
            "conda": block.conda,
            "image": config.image,
        },
        **order,
    )
    text = render.as_json(body)
    carried = frozenset({"resources.min_instances", *(["spares"] if swaps else [])})
    files, runtime = {"request.json": text}, _runtime(config, block)
    return Request(order["name"], body, text, files, carried=carried, runtime=runtime)


def _swaps(plan: Plan, config: JobConfig) -> int:
    """Return how many attempts the job may begin by itself with spare hosts; 0 without spare hosts that wait.

    A job of one host has nobody that sees its loss. In line, the hosts are chosen at the job's turn.
    """
    if plan.instances < 2 or config.queue.wait or len(config.block(Ssh).hosts) <= plan.instances:
        return 0
    left = config.retry.max_attempts - 1 - plan.faults
    return max(0, left) if "node_failure" in config.retry.on else 0


def _runtime(config: JobConfig, block: Ssh) -> Runtime:
    if block.environment == "conda":
        return images.of(str(block.conda), "the conda environment on each host", key="ssh.conda")
    if config.image and block.environment != "none":
        return images.of(config.image, f"run by {block.environment} on each host")
    venv = f", under a venv of {block.requirements}" * (block.environment == "venv")
    return images.of(block.python, f"as each host has it{venv}", key="ssh.python")


def of_config(config: JobConfig) -> list[Host]:
    """Return the config's hosts, with the block's settings as defaults."""
    block = config.block(Ssh)
    return [
        Host(
            name=each.host,
            user=each.user or block.user,
            port=each.port,
            python=each.python or block.python,
            workdir=each.workdir or block.workdir,
            address=each.address,
            interface=each.interface or block.interface,
            ssh_config=block.ssh_config,
            accepts_new_keys=block.accept_new_host_keys,
        )
        for each in block.hosts
    ]
