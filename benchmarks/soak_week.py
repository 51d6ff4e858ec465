"""A week of one job, in minutes: a training on eight ssh hosts, a fault each few seconds, and all counts at the end.

    python benchmarks/soak_week.py [--faults N] [--seed SEED] [--minutes MOST]

Needs root, Debian's openssh-server and a C compiler: real sshd, real links, real torchrun over gloo on hosts in
namespaces. torchrun and ranks are forks of a warm process (tests/doubles/warmnodes); agents are real interpreters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import restart
import week_checks
from report import Report
from sandbox import COMMAND, Sandbox, sandbox, wait_until
from ssh_fleet import Bench
from week_faults import KINDS, Kind, disk_full

from doubles import warmnodes
from doubles.faulttable.training import Training, ours
from doubles.sshhosts import clocks
from doubles.sshhosts.cluster import Cluster, missing

HOSTS, FAULTS, MINUTES = 8, 300, 60.0
CAP_S = 150.0  # for a fault, before it counts as bad
FEW = 3  # steps after a fault
RETRIES = 30  # attempts that `retry` begins; later ones by `resume`
HEAD = ("fault", "tries", "recovered", "restarts", "new attempts", "median", "slowest", "bad")
CONFIG = """\
name: week
task: task.py
training: {{global_batch_size: 64, micro_batch_size: 8, reproducible: strict, max_steps: {steps}, log_every: 1}}
checkpoint: {{every_steps: 2}}
"""
ON_HOSTS = """\
backend: ssh
resources: {instances: 8}
distributed: {max_restarts: 1000}
retry: {max_attempts: 30}
ssh: {hosts: [h0, h1, h2, h3, h4, h5, h6, h7], workdir: /data/ct, price_per_hour: 3.60, CLIENT}
""".replace("CLIENT", 'ssh_config: "${SSH_CONFIG}", python: "${SSH_PYTHON}"')
HERE = "backend: local\ndistributed: {nproc_per_node: 2}\n"


class Mark(NamedTuple):
    """How far the job is: its attempt, the starts of the ranks in the attempt, and the attempt's step lines."""

    attempt: int
    start: int
    steps: int


class Outcome(NamedTuple):
    """A fault: seconds until the job trained again, its starts and attempts until then, and a deviation."""

    seconds: float
    starts: int
    attempts: int
    wrong: str = ""


@dataclass
class Week:
    """The job under faults; `lives` has the first and last look at each agent, by host, pid and start."""

    box: Sandbox
    cluster: Cluster
    lives: dict[tuple[str, int, int], tuple[float, float]] = field(default_factory=dict)
    is_over: bool = False

    def job(self) -> tuple[int, Training]:
        """Return the newest attempt and its number."""
        refs = {int(path.stem.rpartition("-")[2]): path for path in self.box.home.glob("ssh/*/attempt-*.json")}
        return max(refs), Training(self.cluster, self.box.home, json.loads(refs[max(refs)].read_text()))

    def mark(self) -> Mark:
        """Return how far the job is, with no steps before the agents of an attempt have a state."""
        with contextlib.suppress(OSError, ValueError, AssertionError, AttributeError, TypeError):
            number, job = self.job()
            start = json.loads((job.folder(0) / "state.json").read_text())["generation"]
            return Mark(number, start, job.log(0, "rank-0.log").count('::ct {"e":"step",'))
        return Mark(0, 0, 0)

    def look(self) -> None:
        """Note which agents live, until the week is over."""
        while not self.is_over:
            for host in self.cluster.hosts:
                with contextlib.suppress(OSError, AssertionError):
                    for process in ours(host):
                        if "cloudtrain.entrypoints.agent" in process.line and ".agent." not in process.line:
                            key, now_s = (host.name, process.pid, process.started), time.monotonic()
                            self.lives[key] = (self.lives.get(key, (now_s, 0.0))[0], now_s)
            time.sleep(0.3)

    def befall(self, kind: Kind, node: int) -> tuple[Mark, Mark]:
        """Let the fault happen; return how far the job was before, and when it trained again."""
        wait_until(lambda: self.mark().steps > FEW, CAP_S, 0.2)
        before = self.mark()
        kind.strike(self.job()[1], node)
        if kind.level == 2 and (kind.strike is disk_full or before.attempt >= RETRIES):
            wait_until(lambda: self._resumed(before), CAP_S, 1.0)
        changed = wait_until(lambda: self._changed(before, kind.level), CAP_S, 0.2)
        return before, wait_until(lambda: self._trains(changed), CAP_S, 0.2)

    def _changed(self, before: Mark, level: int) -> Mark | None:
        now = self.mark()
        return now if now[0] and (level == 0 or now[: 3 - level] > before[: 3 - level]) else None

    def _trains(self, changed: Mark) -> Mark | None:
        now = self.mark()
        few = FEW if now[0] != changed[0] else changed.steps + FEW
        return now if now.steps >= few and now[0] >= changed[0] else None

    def _resumed(self, before: Mark) -> bool:
        with contextlib.suppress(RuntimeError):
            self.box.call("resume", "last", "-d", "-y", "--from-older")
        return self.mark()[0] > before[0]


def run(faults: int = FAULTS, seed: int = 0, minutes: float = MINUTES) -> Report:
    """Train for the week, then compare every loss, look for what is left, and check the money."""
    report = Report(f"A week of one job on {HOSTS} hosts, seed {seed}", HEAD)
    if reason := missing():
        report.notes.append(f"left out: {reason}")
        return report
    with warmnodes.server(), _week() as week:
        week.box.write(CONFIG.format(steps=100_000) + ON_HOSTS, task=restart.TASK.replace("0.03", "0.25"))
        week.box.call("submit", "-d", "-y")
        with (week.box.home / "watch.txt").open("w") as said:
            watcher = week.box.start_program([COMMAND, "watch", "--every", "2s"], said, said)
        _strike(report, week, faults, random.Random(seed), time.monotonic() + minutes * 60)
        watcher.kill()
        watcher.wait()
        week.box.call("stop", "last", "-y")
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not any(map(ours, week.cluster.hosts)), CAP_S, 0.5)
        week.is_over = True
        box, cluster = week.box, week.cluster
        money, left = week_checks.money(box, week.lives.values()), week_checks.left(box, cluster)
        losses = week_checks.losses(box, cluster, lambda last: CONFIG.format(steps=last) + HERE)
        for what, wrong in (("money", money), ("left", left), ("losses", losses)):
            report.failed = report.failed or any(not word.startswith("ok") for word in wrong)
            report.notes += [f"{what}: {word}" for word in wrong]
    return report


def _strike(report: Report, week: Week, faults: int, chance: random.Random, end_s: float) -> None:
    """Let the faults happen, one after the other, and add a row for each kind."""
    kinds = [kind for kind in KINDS for _ in range(ceil(faults * kind.share / sum(each.share for each in KINDS)))]
    chance.shuffle(kinds)
    seen: dict[str, list[Outcome]] = {kind.name: [] for kind in KINDS}
    node = -1
    for number, kind in enumerate(kinds[:faults], 1):
        if time.monotonic() > end_s:
            report.notes.append(f"out of time after {number - 1} faults")
            break
        # Only a full disk of node 0, which writes the checkpoints, ends the job; so do two kills of a rank at a step.
        node = 0 if kind.strike is disk_full else chance.choice([each for each in range(HOSTS) if each != node])
        outcome = _outcome(week, kind, node)
        seen[kind.name].append(outcome)
        line = f"{number}/{faults} {kind.name:24} node {node} {outcome.seconds:6.1f} s, {outcome.starts} restarts"
        print(f"{line}, {outcome.attempts} new attempts {outcome.wrong}", file=sys.stderr, flush=True)
        if outcome.wrong:
            report.notes.append(f"bad: {line} {outcome.wrong}")
    for name, tries in seen.items():
        took, bad = sorted(each.seconds for each in tries if not each.wrong), sum(bool(each.wrong) for each in tries)
        changes = (sum(each.starts for each in tries), sum(each.attempts for each in tries))
        times = (f"{took[len(took) // 2]:.1f} s", f"{took[-1]:.1f} s") if took else ("-", "-")
        report.rows.append((name, *map(str, (len(tries), len(took), *changes, *times, bad))))
        report.failed = report.failed or bad > 0


def _outcome(week: Week, kind: Kind, node: int) -> Outcome:
    begin_s = time.monotonic()
    try:
        before, after = week.befall(kind, node)
    except Exception as error:  # any kind of error: the other faults must still happen
        told = week.box.call("status", "last").splitlines()[0]
        return Outcome(time.monotonic() - begin_s, 0, 0, f"{type(error).__name__}: {error}; {told}")
    starts = after.start - before.start if after.attempt == before.attempt else after.start
    return Outcome(time.monotonic() - begin_s, starts, after.attempt - before.attempt)


@contextlib.contextmanager
def _week() -> Iterator[Week]:
    root = Path(tempfile.mkdtemp(prefix="ct-week-", dir="/tmp"))
    cluster = Cluster.start(HOSTS, root / "cluster", data_mib=512)
    try:
        clocks.install(cluster)
        (root / "run").mkdir(mode=0o700)
        with sandbox({**cluster.environ, "XDG_RUNTIME_DIR": str(root / "run")}) as box:
            week = Week(box, cluster)
            looks = threading.Thread(target=week.look, daemon=True)
            looks.start()
            try:
                yield week
            finally:
                week.is_over = True
                looks.join()
        Bench(box, cluster, root / "run").end_masters()
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)


def main() -> int:
    """Run as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no further fault after so many")
    options = parser.parse_args()
    report = run(options.faults, options.seed, options.minutes)
    report.show()
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
