"""The start of a job's agents on this machine: interpreter, folders, GPUs, locks, messages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.agent import gpulocks
from cloudtrain.entrypoints.contract import AgentSpec, JobSpec
from cloudtrain.launcher.backend import Shipment
from cloudtrain.launcher.errors import ConfigError, UsageError
from cloudtrain.launcher.text.extras import install

NEEDS_LINUX = "the local backend needs Linux: its agents follow process trees through /proc"
INSTEAD = "name ssh, slurm or a cloud by --backend, which run from here; or run cloudtrain in a Linux container"
HERE = "this machine"  # the host's name in the queue's messages


def make_own(folder: Path, job: str) -> None:
    """Make the attempt's folder. Raises UsageError for a folder that an earlier job has left."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError as error:
        message = f"there is a folder of an earlier job named `{job}`, which the registry does not know"
        hint = "choose another --name, or move the folder away"
        raise UsageError(message, where=str(folder), hint=hint) from error


def interpreter(wanted: str | None, base: Path) -> str:
    """Return the interpreter that runs the job; a relative path begins at the config file's folder."""
    if sys.platform != "linux":
        raise ConfigError(NEEDS_LINUX, hint=INSTEAD)
    if wanted is not None:
        path = str(here(base, wanted)) if os.sep in wanted else wanted
        python = shutil.which(path)
        if python is None:
            raise ConfigError(f"there is no interpreter `{wanted}`", where=path, hint="fix local.python")
        return python
    from importlib.util import find_spec

    if find_spec("torch") is None:
        hint = f"{install('local')}, or name an interpreter that has it: local.python"
        raise ConfigError("torch is not installed here, and the local backend trains with it", hint=hint)
    return sys.executable


def here(base: Path, path: str) -> Path:
    """Return a path of the config; `~/` is the user's home folder, any other relative path is below `base`."""
    return base / (Path(path).expanduser() if path.startswith("~/") else path)


def places(body: dict[str, Any], base: Path, output: Path, checkpoints: Path) -> dict[str, str]:
    """Return the folders that the job sees; an output with a path of its own becomes a link to the path."""
    output.mkdir(parents=True, exist_ok=True)
    for name, target in body["outputs"].items():
        here(base, target).mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (output / name).symlink_to(here(base, target))
    inputs = {f"CLOUDTRAIN_INPUT_{name.upper()}": str(here(base, uri)) for name, uri in body["inputs"].items()}
    return {**inputs, "CLOUDTRAIN_CHECKPOINT_DIR": str(checkpoints), "CLOUDTRAIN_OUTPUT_DIR": str(output)}


def agent_spec(
    node: dict[str, Any],
    body: dict[str, Any],
    shipment: Shipment,
    environment: dict[str, str],
    python: str,
    folder: Path,
) -> AgentSpec:
    """Return the message for a node's agent; a checkpoint beside the config file is named by its whole path."""
    job = JobSpec.load(body["spec"])
    if (path := here(shipment.base, job.checkpoint.resume)).is_dir() and job.checkpoint.resume not in ("auto", "never"):
        job = replace(job, checkpoint=replace(job.checkpoint, resume=str(path.absolute())))
    return AgentSpec(
        job=job,
        node=node["node"],
        address=node["address"],
        root=str(folder / f"node-{node['node']}"),
        bundle=str(shipment.bundle.path),
        sha256=shipment.bundle.sha256,
        python=python,
        environment={**share_of_gpus(node), **environment},
        secrets=dict(shipment.secrets),
        **{key: body[key] for key in ("max_duration_s", "limit_reason", "deadline_s", "grace_s")},
        colocated=len(body["nodes"]),
        workdir=str(shipment.home),
    )


def share_of_gpus(node: dict[str, Any]) -> dict[str, str]:
    """Return the variable even without a GPU: a node without a share must not take a GPU of another node."""
    visible = processes.gpus()
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[number] for number in node["gpus"])}


def message(folder: Path, specs: list[AgentSpec]) -> dict[str, Any]:
    """Return the message by which a single starter starts all nodes, with the job's token."""
    token = secrets.token_hex(16)
    return {"folder": str(folder), "nodes": [replace(spec, token=token).dump() for spec in specs]}


def locks_of(home: Path, body: dict[str, Any]) -> dict[str, Any]:
    """Return the locks of this home folder on the job's GPUs, or on the machine; a queued job waits for its locks.

    A job that is not queued shares the GPUs, as ever, and holds the locks that are free.
    """
    visible, queue = processes.gpus(), body.get("queue")
    values = {f"gpu-{re.sub('[^A-Za-z0-9]+', '-', gpu)}": gpu for gpu in visible}
    chosen = [number for node in body["nodes"] for number in node["gpus"]]
    names = [list(values)[number] for number in chosen] or [gpulocks.MACHINE]
    found = {"folder": str(home / "locks"), "names": names, "about": {"job": body["job"]}, "may_share": True}
    if queue is None:
        return found
    units = list(values) if chosen else names
    seat = {"host": HERE, "units": units, "values": values, "needs": {HERE: len(names)}, "holders": [0]}
    return {**found, "queue": {**queue, **seat, "time_s": time.time()}}


@contextlib.contextmanager
def starter(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield the process that starts agents at a message; without a message, as after an error here, it ends."""
    with subprocess.Popen(
        [sys.executable, "-m", "cloudtrain.entrypoints.agent.starting"],
        cwd=folder,  # `-m` searches the current folder first, and the user's folder may hold a signal.py
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        except KeyboardInterrupt:  # for which Popen waits a quarter of a second alone
            process.communicate()
            raise


def start_agents(starter: subprocess.Popen[str], folder: Path, specs: list[AgentSpec], locks: dict[str, Any]) -> None:
    """Start all nodes by one message: a launcher killed meanwhile has started all nodes or no node."""
    answer, complaint = starter.communicate(json.dumps({**message(folder, specs), "locks": locks}))
    if starter.returncode != 0:
        last = complaint.strip().splitlines()[-1:] or [f"their starter ended with code {starter.returncode}"]
        raise ConfigError(f"the agents did not start: {last[0]}", where=folder)
    answered = json.loads(answer)
    if not answered["started"]:
        is_full, elsewhere = "no space is left" in answered["why"], "set CLOUDTRAIN_HOME to a folder on another disk"
        hint = f"free space there, or {elsewhere}" if is_full else elsewhere if answered.get("no_locks") else ""
        raise ConfigError(f"the agents did not start: {answered['why']}", where=folder, hint=hint)
