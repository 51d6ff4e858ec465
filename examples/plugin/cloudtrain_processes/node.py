"""The first process of a node: identifies the node, and runs cloudtrain's agent to the job's end.

    python -m cloudtrain_processes.node LOCK_FD [SERVER_FD] < spec.json

After the agent's state is on the disk, the agent writes the pid to LOCK_FD and closes LOCK_FD. Node 0 inherits
SERVER_FD, the listening socket for all agents.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace

from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.agent import node as nodes
from cloudtrain.entrypoints.agent.agent import Agent
from cloudtrain.entrypoints.contract import AgentSpec

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run the node in a detached process; the calling process returns at once."""
    spec = AgentSpec.load(json.load(sys.stdin))
    if os.fork():
        return 0
    processes.become_subreaper()
    node = nodes.identify(os.environ)
    spec = replace(spec, node=node.rank, address=node.address, head=(node.head, node.port), head_listens=True)
    server = socket.socket(fileno=int(argv[1])) if argv[1:] else None
    try:
        Agent(spec, server, os.umask(0o077)).run(announce=int(argv[0]))
    finally:
        processes.kill_descendants()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
