"""A rehearsal of the step's tasks: each node becomes a folder on this machine, and the shared disk another folder."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.contract import JobSpec
from cloudtrain.launcher.backend import Request, Shipment
from cloudtrain.launcher.rehearsal.stage import NodeRun, Rehearsal, Stage

from .channel import host_of
from .jobs_send import agent_spec, handle

KILL_WAIT_S = 30.0  # Slurm's default KillWait, from SIGTERM to SIGKILL; a partition's GraceTime comes on top
DONE, SAVED = 0, 75  # exit codes of entrypoints/agent/slurm_step.py
JOB_NUMBER = 1


def rehearsal(request: Request, stage: Stage) -> Rehearsal:
    """Prepare the nodes. A further start is a requeue by Slurm, of the same attempt."""
    body, order = request.body, request.body["order"]
    job, mirrored = stage.with_own_mirror(JobSpec.load(order["job"]))
    home = stage.kept / "jobs" / job.job
    ref = replace(
        handle(host_of(body["settings"]), body, str(stage.kept), str),
        folder=str(stage.folder / f"attempt-{job.attempt}"),  # each start has its own log here
        checkpoints=str(home / "checkpoints"),
        python=sys.executable,
    )
    inputs = {name: stage.inputs.get(name, stage.kept / "inputs" / name) for name in order["inputs"]}
    folders = [path for name, path in inputs.items() if name not in stage.inputs]
    for folder in (ref.folder, ref.checkpoints, ref.output, *folders):
        Path(folder).mkdir(parents=True, exist_ok=True)
    shipment, bundle = Shipment(stage.bundle, stage.kept, stage.base, stage.secrets), str(stage.bundle.path)
    places = {name: str(path) for name, path in inputs.items()}
    spec = agent_spec(ref, body, shipment, bundle, inputs=places, workdir=str(stage.kept))
    # The rehearsal reads each start's end in the exit reports, which a requeued job does not write.
    message = Path(ref.folder, "order.json")
    message.write_text(json.dumps(replace(spec, job=job, requeues=False).dump()))
    given = (stage.kept, stage.folder, stage.bundle.path, *stage.inputs.values())
    nodes = [
        NodeRun(
            hostname=f"node{number}",
            argv=(sys.executable, "-m", "cloudtrain.entrypoints.agent.slurm_step", str(message)),
            env=_variables(stage, number),
            agents=(Path(ref.folder, f"node-{number}"),),
            places={str(path): path for path in given} | mirrored,
            cwd=ref.folder,
            names={f"node{other}": address for other, address in enumerate(stage.addresses)},
        )
        for number in range(len(stage.addresses))
    ]
    return Rehearsal(
        tuple(nodes),
        notice="SIGTERM to every node, as Slurm's pre-emption; the job requeues itself",
        grace_s=KILL_WAIT_S,
        checkpoints=Path(ref.checkpoints),
        codes={"done": DONE, "interrupted": SAVED},
        replaced=_replaced(body["settings"]),
    )


def _variables(stage: Stage, number: int) -> dict[str, str]:
    """Return a task's environment: without this shell's variables, which sbatch keeps out of the job."""
    step = {
        "SLURM_JOB_ID": str(JOB_NUMBER),
        "SLURM_NODEID": str(number),
        "SLURM_STEP_NUM_NODES": str(len(stage.addresses)),
        "SLURM_LAUNCH_NODE_IPADDR": stage.addresses[0],
        "SLURM_NTASKS": str(len(stage.addresses)),
        "SLURM_PROCID": str(number),
        "CUDA_VISIBLE_DEVICES": ",".join(stage.gpus[number]),
    }
    if stage.number > 1:
        step["SLURM_RESTART_COUNT"] = str(stage.number - 1)
    path = f"{Path(sys.executable).parent}:{os.defpath}"
    login = {"PATH": path, "HOME": str(stage.kept), "LANG": "C.UTF-8", "USER": "rehearsal"}
    return {**login, **step, **stage.variables}


def _replaced(settings: dict[str, Any]) -> tuple[str, ...]:
    python = "this machine's Python runs"
    image = [f"the image and {settings['container']}: {python}"] if settings["container"] != "none" else []
    modules = ["the environment modules"] if settings["modules"] else []
    own = [] if image else [f"`slurm.python`: {python}"]
    return ("Slurm, and sbatch's options", "the shared disk is a folder here", *image, *own, *modules)
