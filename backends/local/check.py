"""Faults for which this machine would refuse a job, and causes of slow jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import atomic_json, processes
from cloudtrain.entrypoints.contract import JobSpec
from cloudtrain.launcher.errors import Fault
from cloudtrain.launcher.planning.request_rules import places
from cloudtrain.launcher.store.home import where

MAX_INSTANCES = 64  # each is a torchrun and its ranks: about half a gigabyte


def faults(body: dict[str, Any]) -> Iterator[Fault]:
    """Yield the faults of a local request."""
    if len(body["nodes"]) > MAX_INSTANCES:
        message = f"{len(body['nodes'])} instances on one machine are too many"
        hint = f"the local backend starts {MAX_INSTANCES} at most"
        yield Fault(message, key="resources.instances", hint=hint)
    for key, uri in places(body["checkpoint_dir"], body["inputs"], body["outputs"]).items():
        if re.match(r"[a-z0-9]+://", uri):
            hint = f"use a folder here: --set {key}=/some/path"
            yield Fault(f"the local backend cannot reach `{uri}`", key=key, hint=hint)
    yield from _crowding(body, processes.cores())


def _crowding(body: dict[str, Any], cores: int) -> Iterator[Fault]:
    """Yield a warning if this job and the running local jobs have more threads than there are cores."""
    try:
        home = where()
    except RuntimeError:  # `~nobody`: the submit reports the fault
        return
    held: dict[str, int] = {}  # by log folder, one for each node
    jobs = set()
    for _, environ in processes.environments("CLOUDTRAIN_SPEC"):
        folder = environ.get("CLOUDTRAIN_LOG_DIR", "")
        if Path(folder).is_relative_to(home / "local"):
            ranks = (atomic_json.read_json(Path(environ["CLOUDTRAIN_SPEC"])) or {}).get("nproc_per_node", 1)
            held[folder] = ranks * _threads(environ, cores)
            jobs.add(environ.get("CLOUDTRAIN_JOB"))
    ranks = len(body["nodes"]) * JobSpec.load(body["spec"]).devices_per_node
    own = ranks * _threads(body["environment"], max(1, cores // ranks))
    if jobs and own + sum(held.values()) > cores:
        others = f"{len(jobs)} other local job{'s use' if len(jobs) > 1 else ' uses'}"
        message = f"{others} {sum(held.values())} threads, and this job {own}, on {cores} cores: the jobs get slower; "
        message += "wait for the other jobs, or set a smaller env.OMP_NUM_THREADS"
        yield Fault(message, key="env.OMP_NUM_THREADS", is_warning=True)


def _threads(environ: Mapping[str, str], usual: int) -> int:
    """Return the number of OpenMP threads for a rank; the variable may be a list, by level."""
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else usual
