"""A bad line: passes Ethernet frames between two interfaces late, at a limited rate, or not at all.

Needed for kernels without sch_netem. A child of the keeper, as fast as Python is: some 20,000 frames a second.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import select
import socket
import time
import traceback
from dataclasses import dataclass

from doubles.sshhosts import machine

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ETH_P_ALL = 3
BUFFER_S = 1.0  # longest queue at the limited rate: later frames are dropped, as in a router's queue
FRAME_MAX = 70_000  # for segments that the sender's kernel has not yet cut


@dataclass(frozen=True)
class Quality:
    """Quality of the line, each way."""

    delay_s: float = 0.0
    loss: float = 0.0  # share of the frames, 0 to 1
    rate_bit_s: float | None = None


def plug(interface: str) -> socket.socket:
    """Return a socket that receives and sends whole frames on the interface."""
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    # With the kernel's own header: frames between virtual interfaces lack checksums, and the header marks these frames.
    wire.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    wire.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    wire.bind((interface, 0))
    return wire


def become(wires: tuple[socket.socket, socket.socket], quality: Quality, console: str) -> None:
    """Pass frames on until killed; never returns."""
    try:
        machine.begin([wire.fileno() for wire in wires], console)
        _pass_on(wires, quality)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _pass_on(wires: tuple[socket.socket, socket.socket], quality: Quality) -> None:
    other = {wires[0]: wires[1], wires[1]: wires[0]}
    free_at = dict.fromkeys(wires, 0.0)
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    count = 0
    while True:
        rest_s = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for wire in select.select(wires, [], [], rest_s)[0]:
            now, frame = time.monotonic(), b""
            with contextlib.suppress(OSError):  # the interface is down, and reports the fault once
                frame = wire.recv(FRAME_MAX)
            start = max(now, free_at[wire])
            if not frame or random.random() < quality.loss or start - now > BUFFER_S:
                continue
            free_at[wire] = start + (len(frame) * 8 / quality.rate_bit_s if quality.rate_bit_s else 0.0)
            count += 1
            heapq.heappush(waiting, (free_at[wire] + quality.delay_s, count, other[wire], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, out, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the interface is down, or its queue full: the frame is lost
                out.send(frame)
