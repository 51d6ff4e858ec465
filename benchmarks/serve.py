"""What `cloudtrain serve` answers on one core: the digits CNN, one image a request, over loopback.

    python benchmarks/serve.py

The server has core 0, and the clients core 1. Full load: connections that ask again at once. Half load: 1,250 requests
a second at a fixed pace. The machine may be shared, so each row is the best of some rounds, and the load is printed.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from report import Report

from cloudtrain.entrypoints.export import loading
from cloudtrain.entrypoints.models import calls
from cloudtrain.entrypoints.models import folder as folders

ROUNDS, SECONDS, HALF = 5, 3.0, 1250
DIGITS = Path(__file__).resolve().parents[1] / "examples" / "digits" / "task.py"


@dataclass(frozen=True)
class Measured:
    """The requests of a round: how many a second, percentiles in ms, the server's processor time of each in ms."""

    rate: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float


def make(path: Path) -> Path:
    """Write a model folder of the digits CNN."""
    path.mkdir()
    model = runpy.run_path(str(DIGITS))["model"]({}).eval()
    arguments = {size: {"input": torch.rand(size, 1, 8, 8)} for size in (8, 1, 3)}
    form, _ = calls.describe(model, [arguments[8]["input"]], {})
    shapes = {"input": {0: torch.export.Dim.DYNAMIC}}
    loading.save_pt2(torch.export.export(model, (arguments[8]["input"],), dynamic_shapes=shapes), path / folders.PT2)
    results = {size: calls.named(model(each["input"])) for size, each in arguments.items()}
    slots = {"inputs": calls.slots(arguments), "outputs": calls.slots(results)}
    config = {"format": 1, "name": "digits", "call": form, **{k: [s.dump() for s in v] for k, v in slots.items()}}
    (path / folders.CONFIG).write_text(json.dumps(config))
    (path / folders.CHECK).write_text(json.dumps({"passed": True}))
    folders.write_sums(path, {})
    return path


def ask(port: int, pid: int, connections: int, rate: float | None) -> Measured:
    """Ask for some seconds; raises AssertionError for an answer other than 200."""
    body = json.dumps({"instances": torch.randint(0, 17, (1, 1, 8, 8)).div(16).tolist()}).encode()
    head = f"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    times: list[float] = []

    def client(number: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            due_s = time.perf_counter() + (number / rate if rate else 0)
            end_s = due_s + SECONDS
            while (begin_s := time.perf_counter()) < end_s:
                if rate is not None:
                    due_s += connections / rate
                    time.sleep(max(0.0, due_s - begin_s))
                    begin_s = time.perf_counter()
                connection.sendall(head.encode() + body)
                answer = connection.recv(65536)
                while not answer.endswith(b"}"):  # head and body are two packets
                    answer += connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200")
                times.append(time.perf_counter() - begin_s)

    before_s, begin_s = cpu_s(pid), time.perf_counter()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - begin_s
    found = sorted(times)
    percentiles = [1000 * found[int(share * (len(found) - 1))] for share in (0.5, 0.99)]
    return Measured(len(found) / took_s, *percentiles, 1000 * (cpu_s(pid) - before_s) / len(found))


def cpu_s(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run() -> Report:
    """Measure full and half load."""
    report = Report("serve: the digits CNN on one core")
    with tempfile.TemporaryDirectory() as scratch:
        model = make(Path(scratch) / "model")
        command = [sys.executable, "-m", "cloudtrain.entrypoints.serve", str(model), "--port", "0", "--threads", "1"]
        server = subprocess.Popen(["taskset", "-c", "0", *command], stderr=subprocess.PIPE, text=True, cwd=scratch)
        assert server.stderr is not None
        port = int(server.stderr.readline().rpartition(":")[2])
        os.sched_setaffinity(0, {1})
        try:
            for connections in (1, 2, 4, 8):
                rounds = [ask(port, server.pid, connections, None) for _ in range(ROUNDS)]
                best = max(rounds, key=lambda each: each.rate)
                words = f"{best.rate:,.0f} requests/s, p50 {best.p50_ms:.2f} ms, p99 {best.p99_ms:.2f} ms"
                words = f"{words}, {best.cpu_ms:.2f} CPU ms a request"
                report.timing(f"full load, connections: {connections}", words, "1,500", ok=best.rate >= 1500)
            halves = [ask(port, server.pid, 4, HALF) for _ in range(2 * ROUNDS)]
            best = min(halves, key=lambda each: each.p99_ms)
            shown = " ".join(f"{each.p99_ms:.1f}" for each in halves)
            words = f"p50 {best.p50_ms:.2f} ms, p99 {best.p99_ms:.2f} ms, all rounds' p99: {shown}"
            report.timing(f"half load, {HALF:,} requests/s", words, "p99 2 ms", ok=best.p99_ms <= 2)
        finally:
            server.send_signal(signal.SIGTERM)
            begin_s = time.perf_counter()
            report.count("exit code after SIGTERM", server.wait(10), 0)
            report.timing("seconds to the exit", f"{time.perf_counter() - begin_s:.1f}", "5")
            server.stderr.close()
    report.notes.append(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return report


if __name__ == "__main__":
    run().show()
