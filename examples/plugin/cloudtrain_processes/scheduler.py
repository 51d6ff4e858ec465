"""The scheduler: starts the nodes of a job as detached processes, each with a rank, the count and an address.

A lock file fences a start: the launcher and the starting nodes hold the lock until each node's state is on the disk. A
later question for the job therefore sees the nodes, or forbids their start for ever.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

from cloudtrain.entrypoints.agent import transport
from cloudtrain.entrypoints.contract import NEVER_SENT, START_LOCK, STATE, AgentSpec

__all__ = ["has_started", "start"]


def start(folder: Path, specs: list[AgentSpec]) -> None:
    """Start the nodes, unless the start was forbidden or the nodes were started before."""
    with (folder / START_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / NEVER_SENT).exists() or any(folder.glob(f"node-*/{STATE}")):
            return
        with transport.listen(specs[0].address) as server:
            host, port = server.getsockname()[:2]
            for spec in specs:
                log = Path(spec.root) / "log"
                log.mkdir(parents=True, mode=0o700)
                files = [lock.fileno(), *([server.fileno()] if spec.node == 0 else [])]
                with (log / "agent.txt").open("a") as text:
                    subprocess.run(
                        [sys.executable, "-m", "cloudtrain_processes.node", *map(str, files)],
                        input=json.dumps(spec.dump()).encode(),
                        cwd=spec.root,  # `-m` searches the current folder first
                        env={**os.environ, **_variables(spec, len(specs), f"{host}:{port}")},
                        stdout=text,
                        stderr=text,
                        pass_fds=files,
                        start_new_session=True,
                        check=False,
                    )


def has_started(folder: Path) -> bool:
    """Return whether the nodes have started. After False, no node of this folder can start."""
    with (folder / START_LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / NEVER_SENT).exists() and any(folder.glob(f"node-*/{STATE}")):
            return True
        (folder / NEVER_SENT).touch()
    return False


def _variables(spec: AgentSpec, count: int, head: str) -> dict[str, str]:
    """Return the variables of a node; the first variable names the module with the node's detection."""
    return {
        "CLOUDTRAIN_NODE_DETECTOR": "cloudtrain_processes.detect",
        "PROCESSES_RANK": str(spec.node),
        "PROCESSES_COUNT": str(count),
        "PROCESSES_HEAD": head,
        "PROCESSES_ADDRESS": spec.address,
    }
