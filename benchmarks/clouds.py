"""What the benchmarks of all clouds do alike: time commands, submit through faults, follow a job's lines."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from report import Report
from sandbox import COMMAND, Sandbox
from startup import medians

PAUSE_S = 0.3  # between two portions of lines
PORTIONS = 60


def add_times(report: Report, box: Sandbox, lines: Mapping[str, tuple[float | None, list[str]]]) -> None:
    """Add each command's processor time; `lines` has the most seconds, None without a target, and the words."""
    found = medians(box, {name: [COMMAND, *words] for name, (_, words) in lines.items()})
    for name, (most_s, _) in lines.items():
        cpu_s, _ = found[name]
        target, ok = ("", None) if most_s is None else (f"<= {most_s:.2f} s", cpu_s <= most_s)
        report.timing(f"cloudtrain {name}", f"{cpu_s:.2f} s", target, ok=ok)


def submit(box: Sandbox, number: int, killed_s: tuple[float, float], tries: Counter[str]) -> str:
    """Submit under a key until there is a job of it; return its name.

    Two in five submits are killed, at a moment between the bounds `killed_s`. `tries` counts `all` and `killed`.
    """
    seed = random.Random(number)
    while True:
        process = box.start("submit", "-d", "-y", "--json", "--idempotency-key", f"k{number}")
        timer = threading.Timer(seed.uniform(*killed_s), process.kill)
        if seed.random() < 0.4:
            timer.start()
        out, _ = process.communicate(timeout=300)
        timer.cancel()
        tries.update(["all"] + ["killed"] * (process.returncode == -9))
        if process.returncode == 0:
            return str(json.loads(out)["job"])


def portions(nodes: int, each: int, look: Callable[[], None]) -> Iterator[tuple[int, int, range]]:
    """Yield round, node and line numbers, over half a minute; the last node begins late. `look` ends each round."""
    done = dict.fromkeys(range(nodes), 0)
    for round_ in range(PORTIONS):
        for node in range(nodes):
            if node == nodes - 1 and round_ < PORTIONS // 3:
                continue
            upto = each * (round_ + 1) // PORTIONS
            yield round_, node, range(done[node], upto)
            done[node] = upto
        look()
        time.sleep(PAUSE_S)


def follow(
    report: Report, box: Sandbox, nodes: int, each: int, write: Callable[[Callable[[], None]], None]
) -> tuple[float, int]:
    """Follow the job `lines` while `write` writes its lines to the end; count the lines that came.

    `write` calls its argument once a round. Return the seconds, and the follower's peak memory in MB.
    """
    begin_s = time.monotonic()
    peaks: list[int] = []
    with (box.home / "followed").open("w+") as out:
        process = box.start_program([COMMAND, "logs", "-f", "lines", "--raw", "--json"], stdout=out)
        write(lambda: peaks.append(_peak_mb(process.pid)))
        process.communicate(timeout=600)
        took_s = time.monotonic() - begin_s
        out.seek(0)
        came = [json.loads(line) for line in out]
    numbers: dict[int, list[int]] = {}
    for line in came:
        numbers.setdefault(line["node"], []).append(int(line["text"].split()[-1]))
    lost = sum(each - len(set(found)) for found in numbers.values()) + each * (nodes - len(numbers))
    report.count("lost", lost, 0)
    report.count("repeated", sum(len(found) - len(set(found)) for found in numbers.values()), 0)
    report.count("nodes out of their own order", sum(found != sorted(found) for found in numbers.values()), 0)
    growth = peaks[-1] / peaks[len(peaks) // 2]
    report.timing("peak memory at the end, of that at half-way", f"{growth:.2f}x", "<= 1.10x", ok=growth <= 1.1)
    early = sum(b["time_s"] < a["time_s"] for a, b in pairwise(came))
    report.notes.append(f"{early} lines came after a later one of another node, whose lines could be read sooner")
    return took_s, peaks[-1]


def _peak_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    return int(found[1]) // 1024 if found else 0
