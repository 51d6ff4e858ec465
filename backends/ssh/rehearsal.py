"""A start of the agents as the hosts would make it, each host a place of its own on this machine."""

from __future__ import annotations

import functools
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.ssh.crew import Seat
from cloudtrain.backends.ssh.hosts import Host
from cloudtrain.backends.ssh.sending import agent_spec
from cloudtrain.launcher.backend import Request, Shipment
from cloudtrain.launcher.rehearsal.stage import NodeRun, Rehearsal, Stage

__all__ = ["rehearsal"]

SAVE_S = 120.0  # from the word to stop to a kill, by the agents themselves (request.py, `grace_s`)


def rehearsal(request: Request, stage: Stage) -> Rehearsal:
    """Lay out the hosts, whose disks stay from start to start; checkpoints that are shared there are so here."""
    body = request.body
    spec, mirrored = stage.with_own_mirror(body["spec"])
    body = {**body, "spec": spec, "attempt": stage.number}
    shipment = Shipment(stage.bundle, stage.kept, stage.base, stage.secrets)
    token, nodes, given = secrets.token_hex(16), [], (stage.kept, stage.folder, stage.bundle.path)
    for number, address in enumerate(stage.addresses):
        disk = stage.kept / f"host-{number}"
        host = Host(**body["hosts"][number])
        seat = Seat(host, host.name, str(disk), address, stage.gpus[number] or ("machine",), {})
        places = _places(disk, body, stage)
        made: dict[str, Any] = {"python": sys.executable, "container": None, "lock": None, "environment": {}}
        told = agent_spec(number, seat, places, body, shipment, {host.name: str(stage.bundle.path)}, made)
        told |= {"token": token, "colocated": 1}
        Path(told["root"]).mkdir(parents=True)
        told["environment"] = {**told["environment"], "CUDA_VISIBLE_DEVICES": ",".join(stage.gpus[number])}
        nodes.append(
            NodeRun(
                hostname=_plain(host.name),
                argv=(sys.executable, "-m", "cloudtrain.entrypoints.starting"),
                env={**_login(disk), **stage.variables},
                agents=(Path(told["root"]),),
                places={str(path): path for path in (*given, *stage.inputs.values())} | mirrored,
                names={_plain(host.name): address},
                cwd=told["root"],
                stdin=functools.partial(_message, told) if number else _message(told),
                detaches=True,
            )
        )
    shared = body["checkpoint_dir"] is not None
    return Rehearsal(
        tuple(nodes),
        notice="the agents are asked to stop, as `cloudtrain stop` does, and have 120 s",
        grace_s=SAVE_S,
        checkpoints=Path(told["environment"]["CLOUDTRAIN_CHECKPOINT_DIR"]) if shared else _of_first(stage, body),
        replaced=(
            "ssh, the hosts' Python and what `ssh.environment` makes there: this machine's Python runs",
            "each host's disk is a folder here" + ("; the folder they share is one, too" if shared else ""),
        ),
        sends_again=True,
    )


def _places(disk: Path, body: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """Return where the node's folders are, as sending.py lays them out on a host."""
    job = disk / "jobs" / body["job"]
    checkpoints = stage.kept / "checkpoints" if body["checkpoint_dir"] is not None else job / "checkpoints"
    inputs = {name: stage.inputs.get(name, disk / "inputs" / name) for name in body["inputs"]}
    for folder in (checkpoints, job / "output", *(path for name, path in inputs.items() if name not in stage.inputs)):
        folder.mkdir(parents=True, exist_ok=True)
    return {
        "root": str(job / f"attempt-{stage.number}/{disk.name}"),
        "checkpoints": str(checkpoints),
        "output": str(job / "output"),
        "inputs": {name: str(path) for name, path in inputs.items()},
        "outputs": {},
    }


def _of_first(stage: Stage, body: Mapping[str, Any]) -> Path:
    """Return where the first host, which writes where disks are the hosts' own, has its checkpoints."""
    return stage.kept / "host-0/jobs" / str(body["job"]) / "checkpoints"


def _login(disk: Path) -> dict[str, str]:
    """Return what a host's login shell has, not this one's variables: they do not travel."""
    path = f"{Path(sys.executable).parent}:{os.defpath}"
    return {"PATH": path, "HOME": str(disk), "LANG": "C.UTF-8", "USER": "rehearsal"}


def _message(told: dict[str, Any], answer: str | None = None) -> str:
    """Return what the starter is told: by all but the first host's, where the first one listens, as it has answered."""
    spec = told if answer is None else {**told, "head": json.loads(answer)["head"]}
    return json.dumps({"folder": told["root"], "nodes": [spec]})


def _plain(name: str) -> str:
    """Return a name that a machine can have, of one that may be `user@host`."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in name.rpartition("@")[2])[:60] or "host"
