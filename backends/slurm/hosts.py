"""The use of the cluster's nodes, by Slurm's own count."""

from __future__ import annotations

from cloudtrain.backends.slurm.channel import Login
from cloudtrain.launcher.backend import HostUse
from cloudtrain.launcher.errors import UnreachableError

__all__ = ["uses"]

# Slurm's words for a node's state, without the marks for a node that does not answer or is reserved.
_FREE, _HELD = ("idle",), ("mix", "alloc", "comp", "resv")


def uses(login: Login, partition: str | None) -> list[HostUse]:
    """Return each node of the partition, or of the cluster, with its generic resources and its free cores.

    Raises UnreachableError if Slurm does not answer.
    """
    among = [f"--partition={partition}"] if partition else []
    told = login.run(["sinfo", "-hN", *among, "-o", "%N|%t|%G|%C|%E"])
    if told.code:
        raise UnreachableError(f"Slurm does not answer: {' '.join(told.stderr.split())}", hint="try again later")
    nodes = {line.split("|", 1)[0]: line.split("|", 4) for line in told.stdout.splitlines() if line.count("|") >= 4}
    return [_use(*fields) for fields in nodes.values()]


def _use(node: str, state: str, gres: str, cores: str, reason: str) -> HostUse:
    word = state.rstrip("*~#%$@^-+!")
    free = cores.split("/")[1]  # allocated/idle/other/total
    model = "" if gres == "(null)" else gres.partition("(")[0]
    if word in _FREE:
        return HostUse(node, "node", model, "free", detail=f"{free} cores")
    if word in _HELD:
        return HostUse(node, "node", model, "held", job=f"{free} cores are free")
    return HostUse(node, "node", model, "broken", detail=f"{state}: {reason}")
