"""What a look at many hosts over ssh costs: seconds, the client's processor time and memory, beside plain ssh.

The hosts are namespaces with a real sshd each (tests/doubles/sshhosts), so that all of them and the client share this
machine's cores. The job is real but for torchrun: an agent and a boot a host, and a process that sleeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from report import Report
from sandbox import COMMAND, Sandbox, sandbox, wait_until

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from doubles.sshhosts import lightpython
from doubles.sshhosts.cluster import Cluster, missing

HOSTS = 64
REPEATS = 3
WARM_S, COLD_S, PREFLIGHT_S, CLIENT_MB = 1.0, 3.0, 5.0, 60
PREFLIGHT_HOSTS = 16
START_S = 180.0
CONFIG = """\
name: fleet
script: train.py
backend: ssh
resources: {{instances: {count}}}
ssh: {{hosts: [{hosts}], ssh_config: "{ssh_config}", python: {python}}}
"""


@dataclass(frozen=True)
class Used:
    """What one run took: seconds, processor seconds of it and all that it waited for, and what it printed."""

    wall_s: float
    cpu_s: float
    code: int
    out: str


def measure(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Used:
    """Run to the end."""
    with tempfile.TemporaryFile("w+") as out:
        begin_s = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, text=True
        )
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - begin_s
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return Used(wall_s, used.ru_utime + used.ru_stime, process.returncode, out.read())


def memory_mb(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> float:
    """Return the most memory that the command and all its processes had at a time, shared pages counted once, in MB.

    Masters are none of its processes any more: they outlive it.
    """
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=null, stdout=null, stderr=null)
    most = 0.0
    while process.poll() is None:
        most = max(most, sum(map(_share_mb, _tree(process.pid))))
        time.sleep(0.02)
    return most


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from _tree(int(child))


def _share_mb(pid: int) -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


@dataclass(frozen=True)
class Bench:
    """A sandbox whose commands reach the cluster; `runtime` holds the masters' sockets."""

    box: Sandbox
    cluster: Cluster
    runtime: Path

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of each command."""
        return self.box.environment

    def run(self, *args: str) -> Used:
        """Run a command line of ours."""
        return measure([COMMAND, *args], self.environment, self.box.folder)

    def write(self, count: int, ssh_config: Path) -> None:
        """Write the project: so many of the hosts, reached by that configuration."""
        hosts = ", ".join(host.name for host in self.cluster.hosts[:count])
        config = CONFIG.format(count=count, hosts=hosts, ssh_config=ssh_config, python=lightpython.PATH)
        self.box.write(config, train="print('x')\n")

    def end_masters(self) -> None:
        """Make it cold: no connection is there."""
        for path in self.runtime.glob("*/*"):
            if path.is_socket():
                exit_ = ["ssh", "-O", "exit", "-S", str(path), "none"]
                subprocess.run(exit_, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)


def run(hosts: int = HOSTS, repeats: int = REPEATS) -> Report:
    """Measure them all, on one cluster."""
    report = Report(f"{hosts} hosts over ssh, all on this machine", ("what", "s", "client CPU s", "target", ""))
    if reason := missing():
        report.notes.append(f"not run: {reason}")
        return report
    with _bench(hosts) as bench:
        bench.write(hosts, bench.cluster.ssh_config)
        _looks(report, bench, hosts, repeats)
        _beside(report, bench, repeats)
        _default_exchange(report, bench, hosts)
        _through_bastion(report, bench, hosts, repeats)
        _preflight(report, bench, repeats)
    report.notes.append("cold: no connection is there; key exchange curve25519-sha256 unless said otherwise")
    return report


def _looks(report: Report, bench: Bench, hosts: int, repeats: int) -> None:
    first = bench.run("hosts", "--json")
    _row(report, f"hosts, for the first time ({hosts} connections, our package sent)", [first])
    _warm_and_cold(report, bench, repeats, "hosts", "--json")
    most = memory_mb([COMMAND, "hosts"], bench.environment, bench.box.folder)
    verdict = "PASS" if most <= CLIENT_MB else "below target"
    report.rows.append(("most memory of `hosts`, masters apart", "", f"{most:.0f} MB", f"<= {CLIENT_MB} MB", verdict))
    _row(report, f"submit -d of a job of {hosts} nodes", [bench.run("submit", "-d", "--json", "-y")])
    with contextlib.suppress(TimeoutError):  # all their agents share this machine's cores, too
        wait_until(lambda: _agents(bench) == hosts, START_S, 2.0)
    _count(report, "hosts where an agent has started what stands for torchrun", _agents(bench), hosts)
    _warm_and_cold(report, bench, repeats, "status", "last", "--json")
    used = json.loads(bench.run("hosts", "--json").out)["hosts"]
    _count(report, "hosts told as held by the job", sum(each["use"] == "held" for each in used), hosts)
    bench.run("stop", "last", "--now", "-y")


def _warm_and_cold(report: Report, bench: Bench, repeats: int, *command: str) -> None:
    bench.run(*command)
    _row(report, f"{command[0]}, warm", [bench.run(*command) for _ in range(repeats)], WARM_S)
    _row(report, f"{command[0]}, cold", [_cold(bench, *command) for _ in range(repeats)], COLD_S)


def _cold(bench: Bench, *command: str) -> Used:
    bench.end_masters()
    return bench.run(*command)


def _row(report: Report, what: str, runs: list[Used], target_s: float | None = None) -> None:
    """Add the median; a run that failed is a count."""
    failed = [run for run in runs if run.code != 0]
    if failed:
        report.notes.append(f"{what}: exit code {failed[0].code}: {failed[0].out.strip()[-200:]}")
        report.failed = True
    wall_s, cpu_s = (statistics.median(getattr(run, name) for run in runs) for name in ("wall_s", "cpu_s"))
    verdict = "" if target_s is None else "PASS" if wall_s <= target_s else "below target"
    target = "" if target_s is None else f"<= {target_s:.0f} s"
    report.rows.append((what, f"{wall_s:.2f}", f"{cpu_s:.2f}", target, verdict))


def _count(report: Report, what: str, measured: int, target: int) -> None:
    report.failed = report.failed or measured != target
    report.rows.append((what, str(measured), "", str(target), "PASS" if measured == target else "FAIL"))


def _agents(bench: Bench) -> int:
    """Return on how many hosts an agent has the job's ranks started: the interpreter that sleeps in their place."""
    return sum(any("time.sleep(600)" in line for _, line in host.processes()) for host in bench.cluster.hosts)


def _beside(report: Report, bench: Bench, repeats: int) -> None:
    """Measure what the same connections cost without us: a plain ssh a host, and pdsh where it is installed."""
    names = [host.name for host in bench.cluster.hosts]
    config = str(bench.cluster.ssh_config)
    loop = f"for host in {' '.join(names)}; do ssh -F {config} $host true & done; wait"
    _row(report, "plain ssh, `true` on each, cold", [_shell(bench, loop) for _ in range(repeats)])
    python = f"{sys.executable} -I -S -c 'import json, pathlib'"
    loop = f'for host in {" ".join(names)}; do ssh -F {config} $host "{python}" & done; wait'
    _row(report, "plain ssh, Python with json and pathlib on each, cold", [_shell(bench, loop) for _ in range(repeats)])
    if shutil.which("pdsh"):
        line = f"PDSH_SSH_ARGS_APPEND='-F {config}' pdsh -R ssh -f {len(names)} -w {','.join(names)} true"
        _row(report, "pdsh, `true` on each, cold", [_shell(bench, line) for _ in range(repeats)])
    else:
        report.notes.append("pdsh is not installed, and was not measured")


def _shell(bench: Bench, line: str) -> Used:
    return measure(["sh", "-c", line], bench.environment, bench.box.folder)


def _default_exchange(report: Report, bench: Bench, hosts: int) -> None:
    """Measure cold with the key exchange that OpenSSH 9 takes by itself, which all 128 ends of it compute here."""
    plain = bench.cluster.client_folder / "ssh_config_default_exchange"
    lines = bench.cluster.ssh_config.read_text().splitlines()
    plain.write_text("\n".join(line for line in lines if "KexAlgorithms" not in line) + "\n")
    bench.write(hosts, plain)
    _row(report, "hosts, cold, OpenSSH's own key exchange", [_cold(bench, "hosts", "--json")])
    names = " ".join(host.name for host in bench.cluster.hosts)
    loop = f"for host in {names}; do ssh -F {plain} $host true & done; wait"
    _row(report, "plain ssh, `true` on each, cold, OpenSSH's own key exchange", [_shell(bench, loop)])


def _through_bastion(report: Report, bench: Bench, hosts: int, repeats: int) -> None:
    """Count what fails where all hosts but one are behind that one, whose sshd has its stock limits."""
    jump = bench.cluster.jump_config()
    bench.write(hosts, jump)
    failures, runs = 0, []
    for _ in range(repeats):
        bench.end_masters()
        used = measure([COMMAND, "hosts", "--json"], bench.environment, bench.box.folder)
        told = json.loads(used.out)["hosts"] if used.out.startswith("{") else []
        failures += hosts - sum(each["use"] == "free" for each in told)
        runs.append(used)
    _row(report, "hosts, cold, through one bastion", runs)
    _count(report, f"hosts not reached through one bastion, {repeats} times {hosts}", failures, 0)
    names = " ".join(host.name for host in bench.cluster.hosts)
    loop = f"for host in {names}; do ssh -F {jump} $host echo reached 2>/dev/null & done; wait"
    plain = _shell(bench, loop)
    failed = hosts - plain.out.count("reached")
    report.notes.append(f"plain ssh with ProxyJump, all at once: {failed} of {hosts} fail, {plain.wall_s:.1f} s")


def _preflight(report: Report, bench: Bench, repeats: int) -> None:
    bench.write(PREFLIGHT_HOSTS, bench.cluster.ssh_config)
    doctor = ("doctor", "ssh", "--json")
    what = f"preflight of {PREFLIGHT_HOSTS} hosts (doctor ssh)"
    _row(report, f"{what}, cold", [_cold(bench, *doctor) for _ in range(repeats)], PREFLIGHT_S)
    _row(report, f"{what}, warm", [bench.run(*doctor) for _ in range(repeats)], PREFLIGHT_S)


@contextlib.contextmanager
def _bench(hosts: int) -> Iterator[Bench]:
    """Give the hosts, each with an interpreter that starts real agents and sleeps in place of torchrun."""
    root = Path(tempfile.mkdtemp(prefix="ctb"))  # short: a socket's path has little room
    cluster = Cluster.start(hosts, root / "hosts")
    try:
        for host in cluster.hosts:
            lightpython.install(host, "import time; time.sleep(600)")
        (root / "run").mkdir(mode=0o700)
        variables = {**cluster.environ, "XDG_RUNTIME_DIR": str(root / "run")}
        with sandbox(variables) as box:
            bench = Bench(box, cluster, root / "run")
            yield bench
        bench.end_masters()
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    result = run()
    result.show()
    sys.exit(result.failed)
