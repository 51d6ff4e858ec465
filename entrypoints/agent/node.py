"""Identifies this node: index, number of nodes, the head's address. Each platform has its own function."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Variables set by platforms and outer launchers, with wrong values for torchrun (PET_*) and its workers: on Vertex and
# Azure ML, RANK and WORLD_SIZE count nodes, not processes.
MISLEADING = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
MISLEADING_PREFIXES = ("PET_", "TORCHELASTIC_")

HEAD_PORT = 7777  # of node 0's agent on a managed platform, which assigns no port
ELSEWHERE = "192.0.2.1"  # TEST-NET-1 of RFC 5737: the route to this address leads out of the machine
OWN_NAME_S = 60.0  # until a container's own name resolves

_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class Node:
    """A node among the nodes of a job."""

    platform: str
    rank: int  # the node's index
    count: int
    head: str  # the name or address of node 0
    port: int  # of the head's rendezvous
    address: str  # of the node itself, on the network that reaches the head
    evidence: str  # the source of these facts


def identify(environ: Mapping[str, str]) -> Node:
    """Return the node that the environment describes, else a single one. Raises ValueError for contradictions."""
    for detect in _PLATFORMS:
        node = detect(environ)
        if node is not None:
            if not 0 <= node.rank < node.count:
                raise ValueError(f"{node.evidence}: node {node.rank} of {node.count} is out of range")
            return node
    return Node("single machine", 0, 1, "127.0.0.1", 0, "127.0.0.1", "no platform's variables")


def resolve(name: str, patience_s: float) -> str:
    """Return the IPv4 address of `name`, after a wait: cluster DNS is often half a minute late. Raises TimeoutError."""
    end = time.monotonic() + patience_s
    pause_s = 0.1
    while True:
        try:
            return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
        except socket.gaierror as error:
            if time.monotonic() > end:
                message = f"the name {name} did not resolve in {patience_s:.0f} s: {error.strerror}"
                raise TimeoutError(message) from error
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 5.0)


def interface_of(address: str) -> str | None:
    """Return the name of the interface with the address, None if unknown (Linux)."""
    if address.startswith("127."):
        return "lo" if sys.platform == "linux" else "lo0"
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """Return the interface's IPv4 address, None without an address (Linux)."""
    answer = ask_interface(interface, _SIOCGIFADDR)
    return None if answer is None else socket.inet_ntoa(answer[4:8])


def ask_interface(interface: str, question: int) -> bytes | None:
    """Return the kernel's answer for the interface in this network namespace; /sys may show another namespace."""
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), question, struct.pack("256s", interface.encode()[:15]))[16:]
    return None


def towards(address: str) -> str:
    """Return this machine's own address on the route to the address or name; sends no packet. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def _from_agent(environ: Mapping[str, str]) -> Node | None:
    """Return the node from cloudtrain's own variables (local, ssh)."""
    if "CLOUDTRAIN_HEAD" not in environ:
        return None
    head, _, port = environ["CLOUDTRAIN_HEAD"].rpartition(":")
    rank, count = int(environ["CLOUDTRAIN_NODE_RANK"]), int(environ["CLOUDTRAIN_NUM_NODES"])
    return Node("agent", rank, count, head, int(port), environ["CLOUDTRAIN_ADDRESS"], "CLOUDTRAIN_HEAD")


def _from_plugin(environ: Mapping[str, str]) -> Node | None:
    """Return the node from `detect(environ)` of the module that a plug-in's backend names in a variable."""
    module = environ.get("CLOUDTRAIN_NODE_DETECTOR")
    found: Node | None = importlib.import_module(module).detect(environ) if module else None
    return found


def _from_sagemaker(environ: Mapping[str, str]) -> Node | None:
    """Return the node from SageMaker's file with all host names, sorted by number: the file's order is unreliable."""
    path = Path(environ.get("CLOUDTRAIN_PLATFORM_ROOT", "/opt/ml"), "input/config/resourceconfig.json")
    if not path.exists():
        return None
    config = json.loads(path.read_text())
    name = config["current_host"]
    hosts = sorted(config["hosts"], key=lambda host: [int(part) for part in re.findall(r"\d+", host)])
    address = resolve(name, OWN_NAME_S)
    interface = config.get("network_interface_name", "")
    if address.startswith("127.") and interface not in ("", "lo"):  # a name that only this machine resolves
        address = address_of(interface) or address
    return Node("SageMaker", hosts.index(name), len(hosts), hosts[0], HEAD_PORT, address, f"{path}: {name}")


def _from_azureml(environ: Mapping[str, str]) -> Node | None:
    """Return the node from torch's variables, which count nodes (the Azure ML job has a process per node)."""
    if "AZUREML_RUN_ID" not in environ:
        return None
    rank_text = environ.get("NODE_RANK", environ.get("AZUREML_CR_NODE_RANK", ""))
    count = int(environ.get("CLOUDTRAIN_NODES") or environ.get("AZUREML_NODE_COUNT") or 1)  # first: our own count
    if not rank_text and count > 1:
        raise ValueError("neither NODE_RANK nor AZUREML_CR_NODE_RANK says which of the nodes this is")
    rank, head = int(rank_text or 0), environ.get("MASTER_ADDR") or "127.0.0.1"
    if ":" in head:
        raise ValueError(f"MASTER_ADDR {head} must be a host name or an IPv4 address")
    found = resolve(head, OWN_NAME_S)
    if rank == 0 and count > 1 and found.startswith("127.0."):  # a name that only this machine resolves
        found = towards(ELSEWHERE)
    address = found if rank == 0 else towards(found)
    return Node("Azure ML", rank, count, head, HEAD_PORT, address, f"NODE_RANK {rank}, MASTER_ADDR {head}")


def _from_vertex(environ: Mapping[str, str]) -> Node | None:
    """Return the node from Vertex AI's CLUSTER_SPEC: pool 0 is the head, pool 1 holds all followers.

    Raises ValueError in a further pool. Each replica's name includes the port. A single replica may lack CLUSTER_SPEC.
    """
    if "CLOUD_ML_JOB_ID" not in environ and "CLUSTER_SPEC" not in environ:
        return None
    cluster_spec = json.loads(environ.get("CLUSTER_SPEC") or "{}")
    cluster, task = cluster_spec.get("cluster") or {}, cluster_spec.get("task") or {}
    heads = cluster.get("workerpool0") or cluster.get("chief") or []
    names = [*heads[:1], *cluster.get("workerpool1", [])]
    count = int(environ.get("CLOUDTRAIN_NODES") or 1)
    if not names and count == 1:
        return Node("Vertex AI", 0, 1, "127.0.0.1", HEAD_PORT, "127.0.0.1", "one replica, no CLUSTER_SPEC")
    if not names:
        raise ValueError(f"CLUSTER_SPEC names no replicas, but {count} are expected")
    rank = 0 if task.get("type") in ("workerpool0", "chief") else int(task.get("index", 0)) + 1
    if task.get("type") not in ("workerpool0", "chief", "workerpool1"):
        raise ValueError(f"CLUSTER_SPEC gives this replica the type `{task.get('type')}`, which does not train")
    host, _, port = names[0].partition(":")
    own = names[rank].partition(":")[0] if rank < len(names) else socket.gethostname()
    evidence = f"CLUSTER_SPEC: {task.get('type')}-{task.get('index', 0)}"
    return Node("Vertex AI", rank, len(names), host, int(port or HEAD_PORT), _own_address(own), evidence)


def _own_address(name: str) -> str:
    """Return this machine's address by its own name in the cluster, else the address of its route to other networks."""
    with contextlib.suppress(TimeoutError):
        found = resolve(name, OWN_NAME_S)
        if not found.startswith("127.0."):  # 127.0.*: a name that only this machine resolves
            return found
    return towards(ELSEWHERE)


_PLATFORMS: tuple[Callable[[Mapping[str, str]], Node | None], ...] = (
    _from_agent,
    _from_plugin,
    _from_sagemaker,
    _from_azureml,
    _from_vertex,
)
