"""A node's return: a process beside the agent starts an agent again that was killed or cut off from the job.

Only in jobs that continue with fewer nodes, for all nodes but node 0 and the spares. While the node is away, no process
holds its GPUs, and this process asks once a second whether node 0 answers. The new agent takes the GPUs while the job
lacks a node. If node 0 refuses connections, the job is over, or another node leads the job: then the node does not
return. Neither does a machine that was restarted.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .. import atomic_json, processes
from ..contract import EXIT, STOP, AgentSpec, ExitReport
from . import gpulocks, node_folder
from .boot import EXIT_FAILED

RETURN_S = 10.0  # from the loss: until then the other nodes have given up this node's ranks
AWAY_S = 3600.0  # until a node without contact gives up
LOOK_S, KNOCK_S = 1.0, 2.0

Run = Callable[[AgentSpec, gpulocks.HeldLocks | None], int]


def may_return(spec: AgentSpec) -> bool:
    """Return whether the job can continue without this node, and can take the node back."""
    return 0 < spec.node < spec.job.nodes and (spec.job.min_nodes or spec.job.nodes) < spec.job.nodes


def stay(first: AgentSpec, run: Run, taken: gpulocks.HeldLocks | None = None) -> int:
    """Call `run` in a child process, and again after each loss of the node; return the exit code in both processes.

    `run` supervises the node to the agent's end. `taken` are the node's locks at the first start.
    """
    began_s, spec = time.monotonic(), first
    while True:
        child = os.fork()
        if child == 0:
            processes.become_subreaper()
            return run(spec, taken)
        if taken is not None:
            taken.hand_over()  # the locks end with the agent
            taken = None
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        processes.kill_descendants()
        node_folder.sweep(Path(spec.root))  # a container is no descendant
        if not _is_answered(spec, min(time.monotonic() + AWAY_S, began_s + first.deadline_s)):
            return EXIT_FAILED if code < 0 else code
        (Path(spec.root) / EXIT).unlink(missing_ok=True)
        print(f"node {spec.node} returns", flush=True)
        used_s = time.monotonic() - began_s
        spec = replace(first, life=spec.life + 1, used_s=used_s, join_timeout_s=first.join_timeout_s + used_s)


def _is_answered(spec: AgentSpec, until_s: float) -> bool:
    """Wait until node 0 answers; return False if this node does not return: the job is over, or the time."""
    lost_s = time.monotonic()
    while _may_return(spec) and time.monotonic() < until_s:
        time.sleep(LOOK_S)
        if time.monotonic() - lost_s < RETURN_S:
            continue
        try:
            socket.create_connection(spec.head or (spec.address, 0), KNOCK_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            continue
        return True
    return False


def _may_return(spec: AgentSpec) -> bool:
    """Return whether the node has run ranks, and has neither ended nor been asked to stop."""
    root = Path(spec.root)
    state, ended = node_folder.state_of(root), atomic_json.read_json(root / EXIT)
    is_over = (ended is not None and not ExitReport.load(ended).fenced) or (root / STOP).exists()
    return state is not None and not is_over and bool(state.generation or spec.life)
