"""A rehearsal of the agents' start on this machine: as in a submit, but below a temporary folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from cloudtrain.entrypoints.contract import JobSpec
from cloudtrain.launcher.backend import Request, Shipment
from cloudtrain.launcher.rehearsal.stage import NodeRun, Rehearsal, Stage

from . import jobs

SAVE_S = 120.0  # from the stop request to a kill by the agents themselves (request.py, `grace_s`)


def rehearsal(request: Request, stage: Stage) -> Rehearsal:
    """Prepare all nodes' agents for a single starter, as in a submit, where the nodes share this machine too."""
    body = request.body
    attempt, kept = stage.folder / "attempt", stage.kept
    checkpoints, output = kept / "checkpoints", kept / "output"
    for folder in (attempt, checkpoints, output):
        folder.mkdir(parents=True, exist_ok=True)
    job, mirrored = stage.with_own_mirror(JobSpec.load(body["spec"]))
    body = {**body, "spec": job.dump()}
    inputs = {name: stage.inputs.get(name, jobs.here(stage.base, uri)) for name, uri in body["inputs"].items()}
    environment = {
        **body["environment"],
        **{f"CLOUDTRAIN_INPUT_{name.upper()}": str(path) for name, path in inputs.items()},
        "CLOUDTRAIN_CHECKPOINT_DIR": str(checkpoints),
        "CLOUDTRAIN_OUTPUT_DIR": str(output),
    }
    shipment = Shipment(stage.bundle, kept, stage.base, stage.secrets)
    python = jobs.interpreter(body["python"], stage.base)
    specs = [jobs.agent_spec(node, body, shipment, environment, python, attempt) for node in body["nodes"]]
    # Paths below /tmp that the job needs: apart from them, the job has a /tmp of its own.
    below = (*inputs.values(), *(path.parents[1] for path in (Path(python).absolute(), Path(python).resolve())))
    seen = [path for path in below if path.is_relative_to("/tmp") and path.exists()]
    node = NodeRun(
        hostname="localhost",
        argv=(sys.executable, "-m", "cloudtrain.entrypoints.agent.starting"),
        env={**os.environ, **stage.variables},
        agents=tuple(Path(spec.root) for spec in specs),
        places={str(path): path for path in (stage.kept, stage.folder, stage.bundle.path, *seen)} | mirrored,
        cwd=str(attempt),
        stdin=json.dumps(jobs.message(attempt, specs)),
        detaches=True,
    )
    return Rehearsal(
        (node,),
        notice="the agents are asked to stop, as `cloudtrain stop` does, and have 120 s",
        grace_s=SAVE_S,
        checkpoints=checkpoints,
        replaced=("checkpoints and outputs are in a folder that is thrown away",),
        sends_again=True,
    )
