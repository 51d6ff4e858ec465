"""What a live `watch` costs whoever looks: processor time, and bytes a second to the terminal.

Real agents of local jobs, whose ranks only sleep; their logs are written to from here, as busy jobs would. The watch
runs on a terminal of its own, and is measured once it has come to rest.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import pty
import random
import select
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from report import Report
from sandbox import COMMAND, Sandbox, sandbox

SETTLE_S, MOST_BYTES_S = 8.0, 10_000
CONFIG = """\
name: watched
script: train.py
budget: {limit: 50 USD}
local: {python: %s, price_per_hour: 1.20 USD}
"""


@contextmanager
def writing(logs: list[Path], lines_per_s: float) -> Iterator[None]:
    """Append step events to each log, so many a second, until the block ends."""
    is_over = threading.Event()

    def write() -> None:
        files = [log.open("a", buffering=1) for log in logs]
        chance, step, begin_s = random.Random(1), 0, time.monotonic()
        while not is_over.is_set():
            while step < (time.monotonic() - begin_s) * lines_per_s:
                step += 1
                loss = 2.3 * math.exp(-step / 6000) + 0.03 * chance.random()
                told = {"e": "step", "step": step, "max_steps": 10**6, "loss": loss, "samples_per_s": 8e3 + step % 7}
                told |= {"step_s": 0.01, "data_s": 0.001, "compute_s": 0.009, "eta_s": 1e4, "memory_bytes": 2**34}
                for file in files:
                    file.write(f"step {step}/1000000 loss {loss:.4g} 8k samples/s  ::ct {json.dumps(told)}\n")
            time.sleep(0.01)
        for file in files:
            file.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def watch(box: Sandbox, args: list[str], size: tuple[int, int], seconds: float) -> tuple[float, float]:
    """Return the share of a core, and the bytes a second, of a watch on a terminal of that size."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update({**box.environment, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"})
        os.execv(COMMAND, [COMMAND, "watch", *args])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    try:
        _read(terminal, SETTLE_S)
        used_s, begin_s = _used_s(pid), time.monotonic()
        count = _read(terminal, seconds)
        took_s = time.monotonic() - begin_s
        return (_used_s(pid) - used_s) / took_s, count / took_s
    finally:
        os.kill(pid, signal.SIGTERM)
        while _read(terminal, 0.2):
            pass
        os.waitpid(pid, 0)
        os.close(terminal)


def _read(terminal: int, seconds: float) -> int:
    end_s, count = time.monotonic() + seconds, 0
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([terminal], [], [], left_s)[0]:
            try:
                count += len(os.read(terminal, 65536))
            except OSError:  # it has ended
                return 0
    return count


def _used_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure one busy job, and twenty."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    seconds = parser.parse_args().seconds
    report = Report("a live watch, its looks at the jobs included")
    with sandbox() as box:
        idle = box.folder / "idle-python"
        idle.write_text("#!/bin/sh\nexec sleep 900\n")
        idle.chmod(0o755)
        (box.folder / "train.py").write_text("")
        (box.folder / "cloudtrain.yaml").write_text(CONFIG % idle)
        for number in range(20):
            box.call("submit", "-d", "-y", "--name", f"job-{number}")
        logs = [box.home / "local" / f"job-{n}" / "attempt-1" / "node-0" / "log" / "rank-0.log" for n in range(20)]
        cases: list[tuple[str, list[Path], float, list[str], tuple[int, int], float]] = [
            ("one job of 400 lines/s, 80x24", logs[:1], 400.0, ["job-0"], (80, 24), 0.05),
            ("one job of 400 lines/s, 200x50", logs[:1], 400.0, ["job-0"], (200, 50), 0.05),
            ("20 jobs of 2 lines/s each, 100x40", logs, 2.0, [], (100, 40), 0.15),
        ]
        for what, some, rate, args, size, most in cases:
            with writing(some, rate):
                share, bytes_s = watch(box, args, size, seconds)
            report.timing(f"{what}: of a core", f"{100 * share:.1f} %", f"{100 * most:.0f} %", ok=share < most)
            report.timing("  to the terminal", f"{bytes_s / 1000:.1f} kB/s", "10 kB/s", ok=bytes_s < MOST_BYTES_S)
        box.stop_all()
    report.show()


if __name__ == "__main__":
    main()
