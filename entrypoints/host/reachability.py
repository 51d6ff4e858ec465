"""Tests whether the hosts of a job reach each other: each host listens on a port of the job's range, and dials all.

An answer counts only from the intended host, and only in this round: a different machine may be behind an address.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import random
import socket
import threading
import time
from functools import partial
from typing import Any

from .survey import probed

DIAL_S = 5.0  # a host whose cores all import torch answers late
LISTEN_S = 120.0  # the channel may outlive the preflight by days
MAX_LINE = 512
TRIED_PORTS = 200

_open: list[socket.socket] = []  # closed with the channel, if `close_listener` is not called before


def listen(*, name: str, token: str, address: str, ports: list[int]) -> dict[str, Any]:
    """Listen until `close_listener`, at most LISTEN_S; return `address` and `port`, or the `error`.

    `name` is this host's name in answers, `token` the secret of the round. Listens on a free port of `ports` ([first,
    last]).
    """
    close_listener()
    try:
        server = _bound(address, *ports)
    except OSError as error:
        return {"error": f"cannot listen on {address}: {os.strerror(error.errno or 0)}"}
    server.settimeout(LISTEN_S)
    _open.append(server)
    threading.Thread(target=_answer, args=(server, name, token), daemon=True).start()
    return {"address": address, "port": server.getsockname()[1]}


def dial(*, peers: list[dict[str, Any]], token: str) -> dict[str, Any]:
    """Dial all `peers` (`name`, `address`, `port`) at once; return the `failed`.

    A failure: `name`, `how` (refused, timeout, unreachable, wrong answer), `text`.
    """
    answers, late = probed({peer["name"]: partial(_dialled, peer, token) for peer in peers}, DIAL_S + 1.0)
    timeout = {"how": "timeout", "text": f"no answer within {DIAL_S:.0f} s"}
    faults = {name: timeout if name in late else answer for name, answer in answers.items()}
    return {"failed": [{"name": name, **fault} for name, fault in faults.items() if fault is not None]}


def close_listener() -> None:
    """Stop listening."""
    while _open:
        server = _open.pop()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept; close alone does not
        server.close()


def _bound(address: str, first: int, last: int) -> socket.socket:
    """Return a listening socket. Raises OSError if no port of the range is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    span = last - first + 1
    start = random.randrange(span)  # several preflights at once begin at different ports
    for step in range(min(span, TRIED_PORTS)):
        try:
            return socket.create_server((address, first + (start + step) % span), family=family, backlog=256)
        except OSError as error:
            if error.errno == 99:  # EADDRNOTAVAIL: every port of this address will fail
                raise
            last_error = error
    raise last_error


def _answer(server: socket.socket, name: str, token: str) -> None:
    """Answer each caller of this round with the caller's nonce and this host's name."""
    end = time.monotonic() + LISTEN_S
    with contextlib.suppress(OSError), server:
        while time.monotonic() < end:
            caller, _ = server.accept()
            threading.Thread(target=_greet, args=(caller, name, token), daemon=True).start()


def _greet(caller: socket.socket, name: str, token: str) -> None:
    with contextlib.suppress(OSError, ValueError), caller:
        caller.settimeout(DIAL_S)
        word, nonce = _line(caller).split(" ")
        if hmac.compare_digest(word, token):
            caller.sendall(f"{nonce} {name}\n".encode())


def _dialled(peer: dict[str, Any], token: str) -> dict[str, Any] | None:
    """Return how the call failed, None if the right host answered."""
    nonce = f"{random.getrandbits(64):016x}"
    where = f"{peer['address']} port {peer['port']}"
    try:
        with socket.create_connection((peer["address"], peer["port"]), DIAL_S) as line:
            line.sendall(f"{token} {nonce}\n".encode())
            said = _line(line)
    except TimeoutError:
        return {"how": "timeout", "text": f"{where} did not answer within {DIAL_S:.0f} s"}
    except ConnectionRefusedError:
        return {"how": "refused", "text": f"{where} refused"}
    except OSError as error:
        return {"how": "unreachable", "text": f"{where}: {error.strerror or error}"}
    if said == f"{nonce} {peer['name']}":
        return None
    who = said.partition(" ")[2] if said.startswith(f"{nonce} ") else ""
    return {"how": "wrong answer", "text": f"{where} is {who}" if who else f"{where} is no host of this job"}


def _line(line: socket.socket) -> str:
    """Return the next line, without its line end; the bytes received so far if the peer closes."""
    data = b""
    while not data.endswith(b"\n") and len(data) < MAX_LINE and (more := line.recv(MAX_LINE)):
        data += more
    return data.decode(errors="replace").strip()
