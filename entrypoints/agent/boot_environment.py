"""The environment variables of boot and of the ranks on a node."""

from __future__ import annotations

import os
import time
from pathlib import Path

from .. import processes
from ..contract import AgentSpec
from ..environments import dockerrun
from ..rank import variables
from .coordinate import Desired


def boot_environment(
    spec: AgentSpec, desired: Desired, result: Path, resume: Path | None, head_address: str, used_s: float
) -> dict[str, str]:
    """Return the whole environment; the job's `env` and secrets override machine variables.

    `resume`: the checkpoint that a script resumes from; `used_s`: the time since the agent's start.
    """
    root = Path(spec.root)
    beside = {
        **node_variables(spec, desired.nodes.index(spec.node), len(desired.nodes)),
        "CLOUDTRAIN_HEAD": f"{head_address}:{desired.port}",
        "CLOUDTRAIN_SPEC": str(root / "spec.json"),
        "CLOUDTRAIN_RESTART": str(desired.generation - 1),
        "CLOUDTRAIN_RESULT_DIR": str(result),
        "CLOUDTRAIN_LOG_DIR": str(root / "log"),
        "CLOUDTRAIN_GRACE": f"{spec.grace_s:.0f}",
    }
    # Without time to save before the end, no deadline is passed on: `on_limit: stop` stops without a save.
    if spec.deadline_s < spec.max_duration_s:
        # The wall clock may have changed since this agent's start, so the remaining time counts.
        beside["CLOUDTRAIN_DEADLINE"] = f"{time.time() + spec.max_duration_s - used_s:.0f}"
    if resume is not None:
        beside["CLOUDTRAIN_RESUME_PATH"] = str(resume)
    machine = os.environ if spec.container is None else dockerrun.inherited(os.environ)
    path = os.pathsep.join(filter(None, [str(root / "runtime"), machine.get("PYTHONPATH")]))
    # torchrun limits ranks to one thread only on nodes with several ranks; several nodes on a machine need a limit.
    threads = max(1, processes.cores() // (spec.colocated * spec.job.nproc_per_node))
    defaults = {"OMP_NUM_THREADS": str(threads)}
    known = {**spec.environment, **beside}
    own = {name: variables.expanded(value, known) for name, value in spec.environment.items()}
    own |= spec.secrets
    if "PYTHONPATH" in own:
        own[variables.PYTHONPATH] = own["PYTHONPATH"]
    return {**defaults, **machine, **own, **beside, "PYTHONPATH": path}


def node_variables(spec: AgentSpec, place: int, nodes: int) -> dict[str, str]:
    """Return the variables that describe the job and the node, the node at `place` among so many `nodes`."""
    return {
        "CLOUDTRAIN_JOB": spec.job.job,
        "CLOUDTRAIN_ATTEMPT": str(spec.job.attempt),
        "CLOUDTRAIN_NODE_RANK": str(place),
        "CLOUDTRAIN_NUM_NODES": str(nodes),
        "CLOUDTRAIN_ADDRESS": spec.address,
        "CLOUDTRAIN_CODE_DIR": f"{spec.root}/code",
    }
