"""What a parameter server of strategy async can carry: updates a second of 10 M weights on one core.

The server runs in a process of its own with one thread of torch; a worker in this process pulls weights and pushes
gradients over loopback and computes nothing. The figure is the server's processor time an update, network copies
included: another core receives nothing for it.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from report import Report
from torch import nn

from cloudtrain.entrypoints.replication.wire import Wire
from cloudtrain.entrypoints.trainer.parameter_server import wire
from cloudtrain.entrypoints.trainer.parameter_server.server import ShardServer, Tickets
from cloudtrain.entrypoints.trainer.parameter_server.shard import WeightShard
from cloudtrain.entrypoints.trainer.parameter_server.wire import MessageKind, WireMessage, WorkerOrder
from cloudtrain.entrypoints.trainer.settings import OptimizerSettings, TrainingSettings

ROUNDS, WEIGHTS, UPDATES, RANKS, TARGET = 5, 10_000_000, 20, 4, 20.0
SECRET = "s" * 64
OPTIMIZERS = {"sgd": OptimizerSettings("sgd", 1e-3, momentum=0.9), "adamw": OptimizerSettings("adamw", 1e-3)}


def run(rounds: int, say: Callable[[str], None]) -> Report:
    """Measure a server with each optimizer; return the table."""
    table = Report("A parameter server of 10 M weights, one core")
    for name in OPTIMIZERS:
        rates = []
        for round_ in range(rounds):
            rates.append(_rate(name))
            say(f"round {round_ + 1} of {rounds}: {name}: {rates[-1]:.1f} updates/s")
        rate = statistics.median(rates)
        table.timing(f"updates a second of processor time, {name}", f"{rate:.1f}", f">= {TARGET:g}", ok=rate >= TARGET)
    return table


def _rate(optimizer: str) -> float:
    """Return the updates in a second of the server's processor time."""
    with subprocess.Popen(
        [sys.executable, "-m", "trainer.server", optimizer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        port = int(process.stdout.readline())
        with _connected(port, MessageKind.BEAT) as beats, _connected(port, MessageKind.COMPUTE) as work:
            wire.receive(beats)
            _update(work, 0)  # creates the optimizer's state
            print("begin", file=process.stdin, flush=True)
            process.stdout.readline()
            for ticket in range(1, UPDATES + 1):
                wire.send(beats, WireMessage(MessageKind.BEAT))
                _update(work, ticket)
            print("end", file=process.stdin, flush=True)
            taken_s = float(process.stdout.readline())
    return UPDATES / taken_s


def _connected(port: int, kind: MessageKind) -> AbstractContextManager[Wire]:
    return wire.connected(WorkerOrder("bench", [("127.0.0.1", port)], SECRET, RANKS, 0, 0, 0), kind, 0)


def _update(work: Wire, ticket: int) -> None:
    room, version = torch.zeros(WEIGHTS), torch.zeros(1, dtype=torch.int64)
    wire.send(work, WireMessage(MessageKind.TAKE, ticket - 1))
    wire.receive(work)
    wire.send(work, WireMessage(MessageKind.PULL, ticket))
    version.fill_(wire.receive(work).version)
    work.read(wire.memory(room))
    wire.send(work, WireMessage(MessageKind.PUSH, ticket, 1, 1.0), wire.memory(version), wire.memory(room))
    wire.receive(work)


def main() -> None:
    """Serve; print the port, and the processor time between two lines of standard input."""
    torch.set_num_threads(1)
    settings = TrainingSettings(8, optimizer=OPTIMIZERS[sys.argv[1]])
    tickets = Tickets(RANKS)
    shard = WeightShard(settings, 0, [nn.Parameter(torch.zeros(WEIGHTS))], RANKS, 0, 1)
    server = ShardServer(shard, SECRET, RANKS, 60.0, tickets)
    server.open(UPDATES + 2)
    print(server.port, flush=True)
    sys.stdin.readline()
    begin_s = _processor_s()
    print("begun", flush=True)
    sys.stdin.readline()
    print(_processor_s() - begin_s, flush=True)
    os._exit(0)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
