"""The table: each fault of a job on two or three hosts, the job's settings, and the required outcome."""

import enum
import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from doubles.faulttable.training import Training, ours, until

MORE_STEPS = 20


class Ending(enum.Enum):
    """The outcome of the job."""

    UNHURT = "nothing fails"
    RESTARTS = "trains again"
    FEWER = "trains again on fewer"
    FAILS = "failed, node_failure"
    BREAKS = "failed, error"
    STOPS = "stopped, preempted"


# Takes the job and a node. Returns the time of the fault in unix seconds, or None if the fault was immediate.
Strike = Callable[[Training, int], "float | None"]
# A check, or a repair, at the end; returns the deviations found.
After = Callable[[Training, int], "list[str]"]


@dataclass(frozen=True)
class Fault:
    """A row. `node` is the node with the fault (None: node 0 and node 1 in turn), `fewest` is min_instances."""

    name: str
    strike: Strike
    ending: Ending
    node: int | None = 1
    hosts: int = 2
    fewest: int | None = None
    more: str = ""  # other lines of the config
    settings: str = ""  # the other settings, as the table shows them
    after: After | None = None
    ends_by_itself: bool = False
    from_step: int = 22  # earliest step; if node 0 is lost, late enough for a copy of its checkpoint on another node
    workdir: str = ""
    spares: int = 0  # hosts that wait in the job

    @property
    def machines(self) -> int:
        """The number of hosts, with the spares."""
        return self.hosts + self.spares

    def config(self) -> str:
        """Return the job's settings; the processes are real interpreters, no forks of a warm process."""
        fewest = "" if self.fewest is None else f", min_instances: {self.fewest}"
        workdir = f", workdir: {self.workdir}" if self.workdir else ""
        names = ", ".join(f"h{number}" for number in range(self.machines))
        reached = 'ssh_config: "${SSH_CONFIG}", python: "${SSH_PYTHON}"'
        resources = f"resources: {{instances: {self.hosts}{fewest}}}\n"
        resources += "retry: {max_attempts: 2}\n" if self.spares else ""
        env = "" if "env:" in self.more else "env: {COLD_PYTHON: '1'}\n"
        return f"{resources}{env}ssh: {{hosts: [{names}], {reached}{workdir}}}\n{self.more}"

    def told_settings(self) -> str:
        """Return the settings in the form of the table."""
        fewest = [] if self.fewest is None else [f"min {self.fewest}"]
        fewest += [f"{self.spares} spare"] if self.spares else []
        return ", ".join([f"{self.hosts} hosts", *fewest, *([self.settings] if self.settings else [])])


def named(name: str) -> Fault:
    """Return the fault with the name."""
    return next(fault for fault in FAULTS if fault.name == name)


def _process(what: str, signum: int = signal.SIGKILL) -> Strike:
    """Return a strike that sends a signal to the node's agent, boot, elastic (torchrun) or worker (a rank)."""

    def strike(job: Training, node: int) -> None:
        pid = job.agent(node) if what == "agent" else job.one(node, what)
        job.hosts[node].kill(pid, signum)

    return strike


def _all_processes(job: Training, node: int) -> None:
    pids = [process.pid for process in ours(job.hosts[node])]
    job.hosts[node].run(["sh", "-c", 'kill -9 "$@" || true', "sh", *map(str, pids)])  # some die with their parents


def _line(what: str, seconds: float | None = None) -> Strike:
    """Return a strike on the node's line, `cut` or `blackhole`: permanent, or for a number of seconds."""

    def strike(job: Training, node: int) -> None:
        getattr(job.hosts[node], what)()
        if seconds is not None:
            time.sleep(seconds)
            job.hosts[node].join()

    return strike


def _isolate(job: Training, node: int) -> None:
    for host in job.hosts:
        host.isolate()


def _power_off(job: Training, node: int) -> None:
    job.hosts[node].power_off()


def _slow(delay_ms: float = 0.0, loss: float = 0.0, rate_mbit_s: float | None = None) -> Strike:
    def strike(job: Training, node: int) -> None:
        for host in job.hosts:
            host.slow(delay_ms, loss, rate_mbit_s)

    return strike


def _kill_sshd(job: Training, node: int) -> float | None:
    """Kill every sshd with its sessions; the job trains on and ends, unseen until sshd is back."""
    for host in job.hosts:
        host.kill_sshd(with_sessions=True)
    count = len(job.steps())
    until(lambda: len(job.steps()) > count + MORE_STEPS, 60, "steps without sshd")
    job.end()
    until(lambda: not any(map(ours, job.hosts)), 60, "the job's end without sshd")
    for host in job.hosts:
        host.start_sshd()
    return time.time()


def _fill_workdir(job: Training, node: int) -> None:
    fill = "for size in 64k 1; do dd if=/dev/zero of=/data/full-$size bs=$size 2>/dev/null; done; true"
    job.hosts[node].run(["sh", "-c", fill])


def _own_disk_full(job: Training, node: int) -> float:
    """Wait until the job has filled the disk by itself."""
    (told,) = until(lambda: job.said(r"cannot save at ([\d.]+) "), 120, "a full disk")
    return float(told[1])


def _laptop_cut(job: Training, node: int) -> None:
    """Cut a follower's line for longer than ssh waits, then join the line again."""
    with (job.root / "followed.jsonl").open("w") as file:
        job.follower = job.start("logs", "-f", "last", "--json", stdout=file)
    until(lambda: (job.root / "followed.jsonl").stat().st_size, 60, "followed lines")
    job.cluster.client.cut()
    time.sleep(25)
    job.cluster.client.join()


def _followed_all(job: Training, node: int) -> list[str]:
    """Compare the follower's output with the log files, byte by byte."""
    _, said = job.follower.communicate(timeout=60)
    wrong = [] if job.follower.returncode == 0 else [f"the follower ended with code {job.follower.returncode}: {said}"]
    lines = [json.loads(line) for line in (job.root / "followed.jsonl").read_text().splitlines()]
    for rank in range(len(job.hosts)):
        shown = [line["text"] for line in lines if line["rank"] == rank]
        written = job.log(rank, f"rank-{rank}.log").splitlines()
        if shown != written:
            wrong.append(f"of rank {rank}'s {len(written)} lines {len(shown)} were shown, not the same ones")
    return wrong


def _joined_again(job: Training, node: int) -> list[str]:
    for host in job.hosts:
        host.join()
    time.sleep(3)
    return []


def _booted_again(job: Training, node: int) -> list[str]:
    job.hosts[node].boot()
    time.sleep(3)
    found = ours(job.hosts[node])
    return [f"started again by itself: {found}"] if found else []


def _has_good_checkpoint(job: Training, node: int) -> list[str]:
    """Check that a checkpoint from before the full disk is still in the folder."""
    names = job.hosts[0].run(["ls", "/data/ckpt"]).split()
    return [] if any(re.fullmatch(r"step-\d+\.pt", name) for name in names) else [f"no checkpoint is left: {names}"]


_ON_FEWER = {"ending": Ending.FEWER, "fewest": 1}
_SPARE = {"ending": Ending.RESTARTS, "spares": 1}
_THREE = {"ending": Ending.FEWER, "hosts": 3, "fewest": 2, "from_step": 150}

FAULTS = (
    Fault("trainer kill -9", _process("worker"), Ending.RESTARTS, node=None),
    Fault("OOM kill of rank 0", _process("worker"), Ending.RESTARTS, node=0),
    Fault("torchrun kill -9", _process("elastic"), Ending.RESTARTS, node=None),
    Fault("boot kill -9", _process("boot"), Ending.RESTARTS, node=None),
    Fault("trainer SIGSTOP", _process("worker", signal.SIGSTOP), Ending.RESTARTS, node=None,
          more="distributed: {hang_timeout: 5s}\n", settings="hang_timeout 5 s"),
    Fault("agent kill -9, node 1", _process("agent"), Ending.FAILS),
    Fault("agent kill -9, node 1, fewer", _process("agent"), **_ON_FEWER),
    Fault("agent kill -9, node 1, spare", _process("agent"), **_SPARE),
    Fault("agent kill -9, node 0, spare", _process("agent"), node=0, from_step=150, **_SPARE),
    Fault("agent kill -9, node 0", _process("agent"), Ending.FAILS, node=0),
    Fault("agent kill -9, node 0, fewer", _process("agent"), node=0, **_THREE),
    Fault("agent SIGSTOP, node 1", _process("agent", signal.SIGSTOP), Ending.FAILS),
    Fault("agent SIGSTOP, node 0", _process("agent", signal.SIGSTOP), Ending.FAILS, node=0),
    Fault("agent SIGTERM", _process("agent", signal.SIGTERM), Ending.STOPS, node=None),
    Fault("all of a node's processes kill -9", _all_processes, Ending.FAILS, node=None),
    Fault("link cut", _line("cut"), Ending.FAILS, after=_joined_again),
    Fault("link cut, fewer", _line("cut"), after=_joined_again, **_ON_FEWER),
    Fault("link cut, spare", _line("cut"), after=_joined_again, **_SPARE),
    Fault("link cut, node 0, spare", _line("cut"), node=0, from_step=150, after=_joined_again, **_SPARE),
    Fault("link cut, node 0", _line("cut"), Ending.FAILS, node=0, from_step=150, after=_joined_again),
    Fault("link cut, node 0, fewer", _line("cut"), node=0, after=_joined_again, **_THREE),
    Fault("link cut 5 s", _line("cut", 5), Ending.UNHURT, node=None),
    Fault("blackhole 6 s", _line("blackhole", 6), Ending.UNHURT, node=None),
    Fault("blackhole", _line("blackhole"), Ending.FAILS, after=_joined_again),
    Fault("blackhole, fewer", _line("blackhole"), after=_joined_again, **_ON_FEWER),
    Fault("nodes cut from each other", _isolate, Ending.FAILS, settings="ssh reaches all", after=_joined_again),
    Fault("nodes cut from each other, fewer", _isolate, settings="ssh reaches all", after=_joined_again, **_ON_FEWER),
    Fault("power off node 1", _power_off, Ending.FAILS, after=_booted_again),
    Fault("power off node 1, fewer", _power_off, after=_booted_again, **_ON_FEWER),
    Fault("power off node 1, spare", _power_off, after=_booted_again, **_SPARE),
    Fault("power off node 0", _power_off, Ending.FAILS, node=0, from_step=150, after=_booted_again),
    Fault("power off node 0, fewer", _power_off, node=0, after=_booted_again, **_THREE),
    Fault("sshd killed on all hosts", _kill_sshd, Ending.UNHURT, ends_by_itself=True),
    Fault("disk full at a checkpoint", _own_disk_full, Ending.BREAKS, after=_has_good_checkpoint,
          more="checkpoint: {uri: /data/ckpt}\nenv: {SAVE_MB: '25', COLD_PYTHON: '1'}\n",
          settings="64 MiB, saves of 25 MB"),
    Fault("disk full of the workdir", _fill_workdir, Ending.BREAKS, node=None, workdir="/data/ct"),
    Fault("laptop's line cut 25 s", _laptop_cut, Ending.UNHURT, after=_followed_all, settings="logs -f"),
    Fault("delay 20 ms, loss 1 %", _slow(delay_ms=20, loss=0.01), Ending.UNHURT),
    Fault("1 Mbit/s", _slow(rate_mbit_s=1), Ending.UNHURT),
)  # fmt: skip
