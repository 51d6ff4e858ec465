"""Messages between workers and shards: a fixed head, then raw bytes of weights, gradients and buffers.

A connection begins with the job's secret: any process on the network can reach the port. Tensors are sent from, and
received into, their own memory.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

SECRET_BYTES = 32
VARIABLE = "CLOUDTRAIN_WORKER"  # in a worker's environment: its WorkerOrder
_HEAD = struct.Struct("<BqqdQ")  # kind, ticket, version, value, bytes that follow


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
    """A message's head; `size` bytes follow."""

    kind: MessageKind
    ticket: int = -1
    version: int = 0
    value: float = 0.0
    size: int = 0


@dataclass(frozen=True)
class WorkerOrder:
    """What a rank tells its worker: the shards' addresses, the secret as hex, and where the tickets begin.

    `step` and `samples` are the progress at the first ticket; `ranks` is the number of tickets a step; `parent` is the
    rank's process.
    """

    name: str
    shards: list[tuple[str, int]]
    secret: str
    ranks: int
    step: int
    samples: int
    parent: int


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(b"")
    shared = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    shared.tensor = tensor  # type: ignore[attr-defined]  # keeps the memory as long as the view
    return memoryview(shared).cast("B")


def send(to: socket.socket, message: WireMessage, *parts: memoryview | bytes) -> None:
    """Send the head and the parts; `size` is set to theirs. Raises OSError if the connection is lost."""
    size = sum(len(part) for part in parts)
    to.sendall(_HEAD.pack(message.kind, message.ticket, message.version, message.value, size))
    for part in parts:
        to.sendall(part)


def receive(source: socket.socket) -> WireMessage:
    """Return the next message's head. Raises EOFError at the end of the connection, OSError if it is lost."""
    head = bytearray(_HEAD.size)
    receive_into(source, memoryview(head))
    kind, ticket, version, value, size = _HEAD.unpack(head)
    return WireMessage(MessageKind(kind), ticket, version, value, size)


def receive_into(source: socket.socket, room: memoryview) -> None:
    """Fill the room. Raises EOFError if the connection ends before."""
    while room:
        count = source.recv_into(room)
        if not count:
            raise EOFError("the other side has closed the connection")
        room = room[count:]
