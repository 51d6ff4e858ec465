"""The variables of a replica: the platform's, and the request's."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doubles import sandbox
from doubles.google.names import PROJECT, REGION
from doubles.kit.handle import proxied

if TYPE_CHECKING:
    from doubles.google.jobs import Job
    from doubles.google.replica import Replica
    from doubles.google.world import World

__all__ = ["CA", "HOME", "environment"]

HOME = "/mnt/replica"
CA = f"{HOME}/.ca.pem"
PORT = 2222  # in CLUSTER_SPEC
MASTER_PORT = "3333"  # as in block-cascade
RANKED_POOLS = (0, 1)  # replicas of other pools serve: parameter servers or reducers, and an evaluator
_TF_ROLES = ("chief", "worker", "ps", "evaluator")


def environment(world: World, job: Job, replica: Replica) -> dict[str, str]:
    """Return the environment of a replica's process."""
    task = replica.task
    return {
        "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": HOME,
        "HOSTNAME": replica.hostname,
        "LANG": "C.UTF-8",
        "CLOUD_ML_JOB_ID": job.id,
        "CLOUD_ML_PROJECT_ID": PROJECT,
        "CLOUD_ML_REGION": REGION,
        **_cluster(world, job, replica),
        **_ranks(job, replica),
        **_outputs(job),
        **_network(world),
        **{one.name: _expanded(one.value, task.env) for one in task.env},
    }


def _cluster(world: World, job: Job, replica: Replica) -> dict[str, str]:
    pools: dict[str, list[str]] = {}
    for one in job.replicas:
        pools.setdefault(one.pool.name, []).append(f"{_host(one)}:{PORT}")
    task: dict[str, Any] = {"type": replica.pool.name, "index": replica.index, "trial": ""}
    told = json.dumps({"job_id": job.id, "display_name": job.asked.display_name})  # a string of undocumented content
    spec = json.dumps({"cluster": pools, "environment": "cloud", "task": task, "job": told})
    tf_cluster = {_TF_ROLES[int(name[-1])]: hosts for name, hosts in pools.items()}
    tf_task = {**task, "type": _TF_ROLES[replica.pool.number]}
    tf_config = {"TF_CONFIG": json.dumps({"cluster": tf_cluster, "environment": "cloud", "task": tf_task, "job": told})}
    kind = world.settings.single_cluster_spec if len(job.replicas) == 1 else "full"
    if kind == "missing":
        return {}
    return {"CLUSTER_SPEC": "", "TF_CONFIG": ""} if kind == "empty" else {"CLUSTER_SPEC": spec, **tf_config}


def _ranks(job: Job, replica: Replica) -> dict[str, str]:
    """Return torch's env:// variables with nodes as processes; empty for a job of one replica."""
    ranked = [one for one in job.replicas if one.pool.number in RANKED_POOLS]
    if len(job.replicas) == 1 or replica not in ranked:
        return {}
    return {
        "MASTER_ADDR": _host(ranked[0]),
        "MASTER_PORT": MASTER_PORT,
        "RANK": str(ranked.index(replica)),
        "WORLD_SIZE": str(len(ranked)),
    }


def _outputs(job: Job) -> dict[str, str]:
    prefix = job.spec.base_output_directory.output_uri_prefix.rstrip("/")
    if not prefix:
        return {}
    folders = {"MODEL_DIR": "model", "CHECKPOINT_DIR": "checkpoints", "TENSORBOARD_LOG_DIR": "logs"}
    return {f"AIP_{name}": f"{prefix}/{folder}/" for name, folder in folders.items()}


def _network(world: World) -> dict[str, str]:
    """Return the variables for reaching the outer world: only through the proxy, which serves metadata too."""
    proxy = world.container_url
    place = proxy.removeprefix("http://")
    none = f"localhost,127.0.0.1,{place.partition(':')[0]}"
    return {
        **proxied(proxy, CA, none),
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": CA,
        **dict.fromkeys(("GCE_METADATA_HOST", "GCE_METADATA_IP"), place),
    }


def _host(replica: Replica) -> str:
    """Return the name by which peers find the replica, or its address if names are not available."""
    return replica.address if sandbox.mode() == "none" else replica.hostname


def _expanded(value: str, env: Any) -> str:
    """Return the value with $(NAME) of the request's own variables expanded, as in the API's description."""
    known = {one.name: one.value for one in env}
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda found: _reference(found, known), value)


def _reference(found: re.Match[str], known: dict[str, str]) -> str:
    if found[1] is None:
        return "$"
    return known.get(found[1], found[0])
