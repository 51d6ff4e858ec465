"""Identifies a node by the variables of the scheduler. The node's first process asks through `node.identify`."""

from __future__ import annotations

from collections.abc import Mapping

from cloudtrain.entrypoints.agent.node import Node

__all__ = ["detect"]


def detect(environ: Mapping[str, str]) -> Node | None:
    """Return the node, or None for a process that the scheduler has not started."""
    if "PROCESSES_RANK" not in environ:
        return None
    rank, count = int(environ["PROCESSES_RANK"]), int(environ["PROCESSES_COUNT"])
    head, _, port = environ["PROCESSES_HEAD"].rpartition(":")
    return Node("processes", rank, count, head, int(port), environ["PROCESSES_ADDRESS"], f"PROCESSES_RANK {rank}")
