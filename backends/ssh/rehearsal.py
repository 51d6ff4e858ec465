"""A rehearsal of the agents' start: each host becomes a folder on this machine."""

from __future__ import annotations

import functools
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.contract import AgentSpec, JobSpec, PreparedEnvironment
from cloudtrain.launcher.backend import Request, Shipment
from cloudtrain.launcher.rehearsal.stage import NodeRun, Rehearsal, Stage

from ..channel.hosts import Host
from .hosts_placement import Assignment
from .jobs_send import agent_spec
from .records import SshNode

SAVE_S = 120.0  # from the stop request to a kill by the agents themselves (request.py, `grace_s`)


def rehearsal(request: Request, stage: Stage) -> Rehearsal:
    """Prepare the hosts. Their disks stay from start to start; a shared checkpoint folder is shared here too."""
    body = request.body
    job, mirrored = stage.with_own_mirror(JobSpec.load(body["spec"]))
    body = {**body, "spec": replace(job, attempt=stage.number).dump()}
    shipment = Shipment(stage.bundle, stage.kept, stage.base, stage.secrets)
    token, nodes, given = secrets.token_hex(16), [], (stage.kept, stage.folder, stage.bundle.path)
    # Without this shell's variables, because those do not travel.
    login = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "LANG": "C.UTF-8", "USER": "rehearsal"}
    for number, address in enumerate(stage.addresses):
        disk = stage.kept / f"host-{number}"
        host = Host(**body["hosts"][number])
        seat = Assignment(host, str(disk), address, host.name, stage.gpus[number] or ("machine",), {})
        node = _node(host, disk, body, stage)
        made = PreparedEnvironment(python=sys.executable)
        node_spec = agent_spec(number, seat, node, body, shipment, {host.name: str(stage.bundle.path)}, made)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(stage.gpus[number])}
        node_spec = replace(node_spec, token=token, environment={**node_spec.environment, **visible})
        Path(node_spec.root).mkdir(parents=True)
        nodes.append(
            NodeRun(
                hostname=_plain(host.name),
                argv=(sys.executable, "-m", "cloudtrain.entrypoints.agent.starting"),
                env={**login, "HOME": str(disk), **stage.variables},
                agents=(Path(node_spec.root),),
                places={str(path): path for path in (*given, *stage.inputs.values())} | mirrored,
                names={_plain(host.name): address},
                cwd=node_spec.root,
                stdin=functools.partial(_message, node_spec) if number else _message(node_spec),
                detaches=True,
            )
        )
    shared = body["checkpoint_dir"] is not None
    return Rehearsal(
        tuple(nodes),
        notice="the agents are asked to stop, as `cloudtrain stop` does, and have 120 s",
        grace_s=SAVE_S,
        # With a disk for each host, only the first host writes checkpoints.
        checkpoints=stage.kept / ("checkpoints" if shared else f"host-0/jobs/{body['job']}/checkpoints"),
        replaced=(
            "ssh, the hosts' Python and what `ssh.environment` makes there: this machine's Python runs",
            "each host's disk is a folder here" + ("; the folder they share is one, too" if shared else ""),
        ),
        sends_again=True,
    )


def _node(host: Host, disk: Path, body: Mapping[str, Any], stage: Stage) -> SshNode:
    """Return the node's folders, in the layout that sending.py makes on a host."""
    job = disk / "jobs" / body["job"]
    checkpoints = stage.kept / "checkpoints" if body["checkpoint_dir"] is not None else job / "checkpoints"
    inputs = {name: stage.inputs.get(name, disk / "inputs" / name) for name in body["inputs"]}
    for folder in (checkpoints, job / "output", *(path for name, path in inputs.items() if name not in stage.inputs)):
        folder.mkdir(parents=True, exist_ok=True)
    return SshNode(
        host=host,
        root=str(job / f"attempt-{stage.number}/{disk.name}"),
        checkpoints=str(checkpoints),
        output=str(job / "output"),
        inputs={name: str(path) for name, path in inputs.items()},
    )


def _message(spec: AgentSpec, answer: str | None = None) -> str:
    """Return the starter's message; for all hosts but the first, with the leader's address from the first answer."""
    spec = spec if answer is None else replace(spec, head=json.loads(answer)["head"])
    return json.dumps({"folder": spec.root, "nodes": [spec.dump()]})


def _plain(name: str) -> str:
    """Return a legal machine name from a name that may be `user@host`."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in name.rpartition("@")[2])[:60] or "host"
