"""A rehearsal of the CustomJob on this machine: each replica's boot reads code and order from a local bucket."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.contract import ContainerOrder, FetchedInput
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.rehearsal.stage import NodeRun, Rehearsal, Stage

from .records import VertexSending
from .request import boot_source

STORAGE = "storage"  # below `kept`: a folder for each bucket, with objects by their keys
GRACE_S = 30.0  # as for any container, and as in a spot machine's notice
DONE, AGAIN = 0, 143  # after exit code 143 Vertex AI restarts the job
PORT, MASTER_PORT = 2222, "3333"  # the ports that Vertex AI puts into CLUSTER_SPEC and MASTER_PORT


def rehearsal(request: Request, stage: Stage) -> Rehearsal:
    """Prepare the replicas. Raises ConfigError if `raw` has added pools, because they are not nodes of the training."""
    pools = request.body["jobSpec"]["workerPoolSpecs"]
    plan = VertexSending.load(request.sending)
    order, mirrored = _order(request.name, plan), dict[str, Path]()
    if not str(order.job.checkpoint.mirror).startswith("gs://"):  # a folder here replaces another cloud's store
        job, mirrored = stage.with_own_mirror(order.job)
        order = replace(order, job=job)
    _fill(stage, order.fetched or {})
    _put(stage, plan.code_uri, stage.bundle.path.read_bytes())
    _put(stage, plan.order_uri, json.dumps(order.dump()).encode())
    replicas = [(pool, index) for pool, spec in enumerate(pools) for index in range(int(spec["replicaCount"]))]
    if len(replicas) != len(stage.addresses):
        message = f"{len(replicas)} replicas are asked for, of which {len(stage.addresses)} train"
        raise ConfigError(message, where="vertex.raw", hint="leave workerPoolSpecs out, to rehearse it")
    hosts = [f"cmle-training-workerpool{pool}-{index}" for pool, index in replicas]
    shown = hosts if stage.has_own_places else list(stage.addresses)
    nodes = []
    for number, (pool, _) in enumerate(replicas):
        disk = stage.folder / hosts[number]
        (disk / "cloudtrain").mkdir(parents=True)
        home = "/tmp" if stage.has_own_places else str(disk)
        platform = {
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "HOME": home,
            "TMPDIR": home,
            "HOSTNAME": hosts[number],
            "LANG": "C.UTF-8",
            "CUDA_VISIBLE_DEVICES": ",".join(stage.gpus[number]),
            **_platform(request, replicas, shown, number),
            "GCE_METADATA_HOST": stage.service.removeprefix("http://"),
            "CLOUDTRAIN_BOOT_PATIENCE_S": "20",
        }
        task = pools[pool].get("containerSpec") or pools[pool]["pythonPackageSpec"]
        nodes.append(
            NodeRun(
                hostname=hosts[number],
                argv=_argv(task, stage.service),
                env={**platform, **_asked(task), **stage.secrets, **stage.variables},
                agents=(disk / "cloudtrain/cloudtrain",),
                places={"/tmp/cloudtrain": disk / "cloudtrain", **mirrored},
                cwd=home,
                names=dict(zip(hosts, stage.addresses, strict=True)),
            )
        )
    checkpoints = str(order.job.checkpoint.mirror) if mirrored else plan.checkpoint_uri or ""
    return Rehearsal(
        tuple(nodes),
        notice="SIGTERM to every replica, SIGKILL after 30 s; all start again with empty disks, from the bucket",
        grace_s=GRACE_S,
        checkpoints=Path(checkpoints) / order.job.job if mirrored else _file(stage, checkpoints),
        codes={"done": DONE, "interrupted": AGAIN},
        replaced=(
            "Cloud Storage and the metadata server: a folder here answers, by an address added to the boot's arguments",
            f"the image {task.get('imageUri') or task.get('executorImageUri')}",
            *(["Secret Manager"] if plan.container_order.secrets else []),
            *(["how pip installs the boot's package"] if "pythonModule" in task else []),
        ),
    )


def _order(name: str, plan: VertexSending) -> ContainerOrder:
    """Return the order as a send writes the order, without secrets: a rehearsal passes secrets as variables."""
    return replace(plan.container_order, secrets=None, token=name)


def _argv(task: dict[str, Any], service: str) -> tuple[str, ...]:
    """Return the replica's command, with the local storage endpoint."""
    command = task.get("command") or ["python3", "-u", "-c", boot_source()]
    return (*command, *task["args"][:3], service)


def _asked(task: dict[str, Any]) -> dict[str, str]:
    return {str(each["name"]): str(each["value"]) for each in task.get("env", ())}


def _platform(request: Request, replicas: list[tuple[int, int]], hosts: list[str], number: int) -> dict[str, str]:
    """Return the variables that Vertex AI sets in a replica; a single replica gets no variables for ranks."""
    cluster: dict[str, list[str]] = {}
    for (pool, _), host in zip(replicas, hosts, strict=True):
        cluster.setdefault(f"workerpool{pool}", []).append(f"{host}:{PORT}")
    pool, index = replicas[number]
    task = {"type": f"workerpool{pool}", "index": index, "trial": ""}
    spec = {"cluster": cluster, "environment": "cloud", "task": task, "job": "{}"}
    ranks = {"MASTER_ADDR": hosts[0], "MASTER_PORT": MASTER_PORT, "RANK": str(number), "WORLD_SIZE": str(len(hosts))}
    plan, prefix = (
        VertexSending.load(request.sending),
        request.body["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"].rstrip("/"),
    )
    folders = {"MODEL_DIR": "model", "CHECKPOINT_DIR": "checkpoints", "TENSORBOARD_LOG_DIR": "logs"}
    return {
        "CLOUD_ML_JOB_ID": "0000000000000000000",
        "CLOUD_ML_PROJECT_ID": plan.project,
        "CLOUD_ML_REGION": plan.location,
        "CLUSTER_SPEC": json.dumps(spec),
        **(ranks if len(hosts) > 1 else {}),
        **{f"AIP_{name}": f"{prefix}/{folder}/" for name, folder in folders.items()},
    }


def _file(stage: Stage, uri: str) -> Path:
    return stage.kept / STORAGE / uri.removeprefix("gs://")


def _put(stage: Stage, uri: str, data: bytes) -> None:
    """Put an object into the bucket, as a send does."""
    path = _file(stage, uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _fill(stage: Stage, fetched: Mapping[str, FetchedInput]) -> None:
    """Copy the inputs that exist here into the bucket; each missing input becomes one empty object."""
    for name, package in fetched.items():
        target, source = _file(stage, package.uri), stage.inputs.get(name)
        if source is not None and source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        elif not target.exists():
            target.mkdir(parents=True)
            (target / "empty").touch()
