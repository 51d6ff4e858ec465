"""Messages between workers and shards, on the authenticated connections of entrypoints/replication/wire.py.

A message is followed by raw bytes of weights, gradients and buffers, which are sent from, and received into, the memory
of tensors. Both ends prove that they have the run's secret, which is never sent here. The ranks share the secret by
their process group. The raw bytes are neither encrypted nor authenticated, as in the collective calls of a process
group.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch

from ...replication.wire import Seal, Wire

VARIABLE = "CLOUDTRAIN_WORKER"  # in a worker's environment: its WorkerOrder
PURPOSE = "parameters"


class MessageKind(IntEnum):
    """The kinds of messages; `value` is a loss or unused."""

    COMPUTE = 1  # worker: this connection is for work; the bytes are its name
    BEAT = 2  # worker: this connection is for signs of life; the bytes are its name
    TAKE = 3  # worker: the ticket before is finished (-1: none), the next ticket please; shard: the ticket
    PULL = 4  # worker: the weights for a ticket please; shard: their version and bytes
    # worker: a ticket's loss, the versions of all shards that it read (`version` is their number), its gradient, and
    # the buffers from rank 0's tickets; shard: received
    PUSH = 5
    LEFT_OUT = 6  # the same without a gradient: loss or gradient is not finite
    FAIL = 7  # worker: the task's own error; the bytes are its text


@dataclass(frozen=True)
class WireMessage:
    """A message; `size` raw bytes follow."""

    kind: MessageKind
    ticket: int = -1
    version: int = 0
    value: float = 0.0
    size: int = 0


@dataclass(frozen=True)
class WorkerOrder:
    """What a rank tells its worker: the shards' addresses, the secret, and where the tickets begin.

    `step` and `samples` are the progress at the first ticket; `ranks` is the number of tickets a step; `parent` is the
    rank's process; `max_steps` is the job's last step.
    """

    name: str
    shards: list[tuple[str, int]]
    secret: str
    ranks: int
    step: int
    samples: int
    parent: int
    max_steps: int = 1


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(b"")
    shared = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    shared.tensor = tensor  # type: ignore[attr-defined]  # keeps the memory as long as the view
    return memoryview(shared).cast("B")


@contextlib.contextmanager
def connected(order: WorkerOrder, kind: MessageKind, number: int) -> Iterator[Wire]:
    """Open a worker's end of a connection to a shard. Raises OSError."""
    with socket.create_connection(order.shards[number], timeout=60) as connection:
        wire = Wire(connection, 60)
        wire.meet(Seal(order.secret, PURPOSE, is_server=False))
        wait(wire, connection)
        send(wire, WireMessage(kind), order.name.encode())
        yield wire


def wait(wire: Wire, connection: socket.socket) -> None:
    """Let the end wait for any time: a dead machine is noticed by its beats."""
    wire.stall_s = math.inf
    connection.settimeout(None)


def send(to: Wire, message: WireMessage, *parts: memoryview | bytes) -> None:
    """Send the message and the parts; `size` is set to theirs. Raises OSError if the connection is lost."""
    to.send(dataclasses.asdict(message) | {"size": sum(len(part) for part in parts)})
    for part in parts:
        to.write(memoryview(part))


def receive(source: Wire) -> WireMessage:
    """Return the next message. Raises OSError if the connection is lost."""
    fields = source.receive()
    return WireMessage(**fields | {"kind": MessageKind(fields["kind"])})
