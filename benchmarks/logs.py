"""How quickly a job's lines come: merged from many ranks, from a printing rank to the screen, and from what is kept.

The merge is measured from 64 rank files of a local job, with the agent's notes of time beside them, to what the command
has written: processor time and peak memory of the command alone; what it wrote is checked line by line by who reads it.
The ranks are unequal: one prints ten times as much as another, so pages of equal size would run apart.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from report import Report
from sandbox import COMMAND, Sandbox, sandbox

from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.plan import Plan
from cloudtrain.launcher.store.registry import Registry, this_process

RANKS, LINES = 64, 100_000
PLAN = {"instances": 1, "nproc_per_node": RANKS, "ranks": RANKS, "hourly_usd": 0.0, "cap_s": 3600}
BEGAN_S = 1.79e9
RARE = "a rare word"
# Starts the command with its output in our hands, and says at the end what it used; small, so that the peak is its own.
METER = """\
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, used = os.wait4(pid, 0)
print("[%d, %f, %f]" % (os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024),
      file=sys.stderr)
"""
# Prints the time at uneven moments, and now and then many lines at once.
CLOCK = """\
import random, sys, time
chance = random.Random(1)
for number in range(COUNT):
    for _ in range(50 if number % 100 == 99 else 1):
        sys.stdout.write(f"at {time.time():.6f} END\\n")
    sys.stdout.flush()
    time.sleep(chance.uniform(0.0, 0.04))
"""


@dataclass(frozen=True)
class Used:
    """What a command used, and the seconds until its first output."""

    cpu_s: float
    peak_mb: float
    first_s: float
    wall_s: float


def seeded(box: Sandbox, name: str, ranks: int, lines: int) -> None:
    """Put a job that has ended into the registry, with the log files that its agent would have left."""
    box.home.mkdir(mode=0o700, exist_ok=True)
    registry = Registry(box.home)

    def make(job_id: str, number: int) -> Job:
        plan = {**PLAN, "nproc_per_node": ranks, "ranks": ranks}
        attempt = Attempt(job_id, number, "intent", Plan.load(plan), {"body": 1}, time.time(), this_process())
        return Job(job_id, job_id, "local", time.time(), {}, "/x/cloudtrain.yaml", {}, attempt)

    job, _ = registry.add(name, make, exclusive=True, key=None)
    folder = box.home / "local" / name / "attempt-1"
    log = folder / "node-0" / "log"
    log.mkdir(parents=True)
    (folder / "node-0" / "exit.json").write_text("{}")
    shares = [0.1 if rank % 8 == 7 else 1.0 for rank in range(ranks)]
    each = ranks * lines / sum(shares)
    for rank, share in enumerate(shares):
        _write_log(log / f"rank-{rank}.log", rank, int(each * share))
    registry.mark_sent(job.attempt, {"folder": str(folder), "nodes": 1, "checkpoint_dir": str(folder)})
    registry.set_state(job.attempt, State("succeeded", ended_s=time.time() - 86_400), {})
    registry.close()


def _write_log(path: Path, rank: int, count: int) -> None:
    """Write `count` lines as they would come in 1000 s, with a note each tenth of a second."""
    size, notes, parts = 0, [], []
    step = max(1, count // 10_000)
    for first in range(0, count, step):
        last = min(count, first + step)
        text = "".join(
            f"line {number} of rank {rank}: loss 1.2345, {RARE if number % 90_000 == 77 else 'all is well'}\n"
            for number in range(first, last)
        )
        parts.append(text)
        size += len(text)
        notes.append(f"{size} {BEGAN_S + last / count * 1000 + rank / 1e4:.3f}\n")
    path.write_text("".join(parts))
    path.with_suffix(".times").write_text("".join(notes))


def measured(box: Sandbox, *args: str) -> tuple[Used, Iterator[bytes]]:
    """Return what the command used, and its output, which is read to the end first."""
    meter = [sys.executable, "-S", "-E", "-c", METER, COMMAND, *args]
    env = {**box.environment, "PYTHONPYCACHEPREFIX": str(box.home / "compiled")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    kept = box.home / "output"
    begin_s = time.monotonic()
    with kept.open("wb") as file:
        process = subprocess.Popen(
            meter, cwd=box.folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stderr is not None
        first_s = 0.0
        while block := os.read(process.stdout.fileno(), 1 << 20):
            first_s = first_s or time.monotonic() - begin_s
            file.write(block)
        told = process.stderr.read().decode().splitlines()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    code, cpu_s, peak_mb = json.loads(told[-1])
    if code != 0:
        raise RuntimeError(f"cloudtrain {' '.join(args)}: exit code {code}: {told[:-1]}")
    return Used(cpu_s, peak_mb, first_s, time.monotonic() - begin_s), _lines_of(kept)


def _lines_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def checked(report: Report, what: str, lines: Iterator[bytes], wanted: int) -> None:
    """Count what is lost, repeated or out of order, by rank and by time."""
    shown = re.compile(rb"(\S+) \[r(\d+)\] line (\d+) ")
    following: dict[int, int] = {}
    count = repeated = disorder = backwards = 0
    latest = b""
    for line in lines:
        found = shown.match(line)
        assert found is not None, line
        stamp, rank, number = found[1], int(found[2]), int(found[3])
        repeated += number < following.get(rank, 0)
        disorder += number > following.get(rank, 0)
        following[rank] = number + 1
        backwards += stamp < latest
        latest = max(latest, stamp)
        count += 1
    report.count(f"{what}: lines lost", wanted - count, 0)
    report.count(f"{what}: lines repeated", repeated, 0)
    report.count(f"{what}: out of their rank's order", disorder, 0)
    report.count(f"{what}: out of the order of time, over all ranks", backwards, 0)


def merge(ranks: int, lines: int) -> Report:
    """Read all ranks of a job that has ended from its files, then from what that has kept."""
    report = Report(f"Merge of {ranks} streams, {ranks * lines:,} lines in all")
    with sandbox() as box:
        seeded(box, "merged", ranks, lines)
        total = sum(1 for path in (box.home / "local/merged").rglob("rank-*.log") for _ in path.open("rb"))
        raw = sum(path.stat().st_size for path in (box.home / "local/merged").rglob("rank-*.log"))
        measured(box, "logs", "merged", "-n", "1")  # modules are compiled now
        off = Sandbox(box.home, box.folder, {**box.more, "CLOUDTRAIN_KEPT_LOGS_GB": "0"})
        used, _ = measured(off, "logs", "merged")
        report.timing(
            "lines/s of a core, printed", f"{total / used.cpu_s:,.0f}", "200,000", ok=total / used.cpu_s >= 2e5
        )
        report.timing("peak memory, MB", f"{used.peak_mb:.0f}", "100", ok=used.peak_mb < 100)
        used, found = measured(box, "logs", "merged", "--timestamps")
        rate = total / used.cpu_s
        report.timing("lines/s of a core, printed with times, and kept", f"{rate:,.0f}", "200,000", ok=rate >= 2e5)
        report.timing("peak memory, MB", f"{used.peak_mb:.0f}", "100", ok=used.peak_mb < 100)
        report.timing("first line, s", f"{used.first_s:.2f}")
        checked(report, "from the files", found, total)
        size = sum(path.stat().st_size for path in (box.home / "logs").rglob("lines-*"))
        report.timing("kept, MB of MB", f"{size / 1e6:.0f} of {raw / 1e6:.0f}")
        used, found = measured(box, "logs", "merged", "--timestamps")
        report.timing("lines/s of a core, from what is kept", f"{total / used.cpu_s:,.0f}")
        report.timing("peak memory, MB", f"{used.peak_mb:.0f}", "100", ok=used.peak_mb < 100)
        checked(report, "from what is kept", found, total)
    return report


def finished() -> Report:
    """Look at a job of a million lines that has ended, as its lines are kept."""
    report = Report("logs of a finished job of 1,000,000 lines, 8 ranks; medians of 5")
    with sandbox() as box:
        seeded(box, "million", 8, 125_000)
        measured(box, "logs", "million", "-n", "1")  # modules are compiled now
        first, found = measured(box, "logs", "million")
        report.timing("first line, where nothing is kept yet, s", f"{first.first_s:.2f}")
        total = sum(1 for _ in found)
        for path in (box.home / "local").rglob("rank-*.log"):
            path.unlink()  # the machine is gone
        for line, most_s, is_first in (
            ("logs million", 0.3, True),
            (f"logs million --grep {RARE.split()[-2]}.{RARE.split()[-1]}", 2.0, False),
            ("logs million --grep ^line.\\d*77.of", 2.0, False),
            ("logs million --grep nothing-like-it", 2.0, False),
            ("logs million --tail 20", 0.3, False),
            ("logs million --rank 3 --tail 20 --json", 0.3, False),
        ):
            runs = [measured(box, *line.split())[0] for _ in range(5)]
            took = statistics.median(used.first_s if is_first else used.wall_s for used in runs)
            cpu_s = statistics.median(used.cpu_s for used in runs)
            what = f"{line}: {'first screen' if is_first else 'to its end'}, s (CPU {cpu_s:.2f})"
            report.timing(what, f"{took:.2f}", f"{most_s}", ok=took < most_s)
        report.count("lines, of a machine that is gone", sum(1 for _ in measured(box, "logs", "million")[1]), total)
    return report


def latency(count: int) -> Report:
    """Follow a running local job on a terminal, and see how old each line is when it is there."""
    report = Report("From a line that a local job prints to the screen")
    with sandbox() as box:
        box.write(
            "name: clock\nscript: train.py\n",
            train=CLOCK.replace("COUNT", str(count)),
        )
        box.call("submit", "-d")
        master, slave = pty.openpty()
        follower = subprocess.Popen(
            [COMMAND, "logs", "-f", "last"],
            cwd=box.folder,
            env=box.environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        ages, rest = [], b""
        while follower.poll() is None or select.select([master], [], [], 0.0)[0]:
            if not select.select([master], [], [], 0.5)[0]:
                continue
            try:
                rest += os.read(master, 1 << 16)
            except OSError:
                break
            now_s = time.time()
            *whole, rest = rest.split(b"\n")
            ages += [now_s - float(found[1]) for line in whole if (found := re.search(rb"at (\d+\.\d+) END", line))]
        follower.wait()
        os.close(master)
    ages = ages[len(ages) // 20 :]  # what was there before the follower
    centiles = statistics.quantiles(ages, n=100)
    report.timing("lines", f"{len(ages)}")
    report.timing("p50, s", f"{centiles[49]:.3f}")
    report.timing("p99, s", f"{centiles[98]:.3f}", "0.3", ok=centiles[98] < 0.3)
    report.timing("the oldest, s", f"{max(ages):.3f}")
    return report


def main() -> None:
    """Run what is named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help="merge, finished, latency")
    parser.add_argument("--lines", type=int, default=LINES, help="of each of the 64 streams")
    parser.add_argument("--prints", type=int, default=1500, help="of the job whose lines are timed")
    asked = parser.parse_args()
    parts = {
        "merge": lambda: merge(RANKS, asked.lines),
        "finished": finished,
        "latency": lambda: latency(asked.prints),
    }
    reports = [parts[name]() for name in asked.what or parts]
    for report in reports:
        report.show()
    sys.exit(any(report.failed for report in reports))


if __name__ == "__main__":
    main()
