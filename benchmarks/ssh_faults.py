"""The fault table over ssh: each fault befalls a training on hosts in namespaces, at seeded moments, so many times.

    python benchmarks/ssh_faults.py [--repeats N] [--only WORDS] [--first SEED] [--clusters N]

Needs root and Debian's openssh-server: real sshd, real links, real torchrun over gloo (tests/doubles/faulttable).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from report import Report

from doubles.faulttable.table import FAULTS, Fault
from doubles.faulttable.trial import AGAIN_S, EMPTY_S, RIGHT_S, Seen
from doubles.faulttable.trial import run as befall
from doubles.sshhosts.cluster import Cluster, missing

HEAD = (
    "fault",
    "settings",
    "ends as",
    "state right",
    "no process left",
    "training again",
    "import",
    "`status`",
    "passed",
)
TIMES = ("right_s", "empty_s", "again_s", "import_s", "status_s")


def run(repeats: int = 3, faults: Sequence[Fault] = FAULTS, first: int = 0, clusters: int = 1) -> Report:
    """Let every fault happen so many times; `clusters` of hosts at a time, which share this machine's cores."""
    report = Report(f"Faults over ssh, {repeats} times each: the largest seconds after the fault", HEAD)
    if reason := missing():
        report.notes.append(f"left out: {reason}")
        return report
    trials: SimpleQueue[tuple[Fault, int]] = SimpleQueue()
    for seed in range(first, first + repeats):
        for fault in faults:
            trials.put((fault, seed))
    seen: list[Seen] = []
    workers = [threading.Thread(target=_work, args=(trials, seen)) for _ in range(clusters)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for fault in faults:
        _add(report, fault, [each for each in seen if each.fault == fault.name], repeats)
    targets = f"targets: state {RIGHT_S:.0f} s, no process {EMPTY_S:.0f} s, training {AGAIN_S:.0f} s and the import"
    report.notes.insert(0, targets)
    return report


def _work(trials: SimpleQueue[tuple[Fault, int]], seen: list[Seen]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ct-hosts-"))
    found: dict[int, Cluster] = {}
    try:
        while True:
            try:
                fault, seed = trials.get_nowait()
            except Empty:
                return
            if fault.machines in found:
                found[fault.machines].reset()
            else:
                found[fault.machines] = Cluster.start(fault.machines, folder / f"of-{fault.machines}")
            begin_s = time.monotonic()
            one = befall(fault, found[fault.machines], seed)
            seen.append(one)
            _say(one, time.monotonic() - begin_s)
    finally:
        for cluster in found.values():
            cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _say(one: Seen, took_s: float) -> None:
    times = [getattr(one, name) for name in TIMES]
    told = " ".join("    -" if each is None else f"{each:5.1f}" for each in times)
    what = "; ".join([*one.wrong, *one.late, *([] if one.wrong or one.late else ["good"]), *one.notes])
    print(f"{one.fault:36} {one.seed:2} {told}  ({took_s:.0f} s) {what}", file=sys.stderr, flush=True)


def _add(report: Report, fault: Fault, seen: Sequence[Seen], repeats: int) -> None:
    passed = sum(not (each.wrong or each.late) for each in seen)
    report.failed = report.failed or passed < repeats
    times = [_largest([getattr(each, name) for each in seen]) for name in TIMES]
    report.rows.append((fault.name, fault.told_settings(), fault.ending.value, *times, f"{passed}/{repeats}"))
    report.notes += [f"{each.fault}, seed {each.seed}: {word}" for each in seen for word in each.wrong + each.late]


def _largest(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    return f"{max(known):.1f} s" if known else "-"


def main() -> int:
    """Run as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--clusters", type=int, default=1, help="so many at a time")
    parser.add_argument("--only", nargs="*", default=[], help="faults whose name holds one of these")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if not options.only or any(word in fault.name for word in options.only)]
    report = run(options.repeats, faults, options.first, options.clusters)
    report.show()
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
