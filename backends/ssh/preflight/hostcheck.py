"""Checks of a host as a job's node: its name, disks, memory, limits, clock, network, and its behaviour at logout."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cloudtrain.launcher.backend import Check

from .folding import fold, graded, groups, local, most, numbers, ranges, remote

# Below the first limit no model can be saved; the second limit is a guess at a few checkpoints.
DISK_FAIL_MB, DISK_WARN_MB = 50, 10 << 10
TMP_WARN_MB = 2 << 10  # a guess: pip unpacks wheels there, and builds packages
MIN_INODES = 10_000
BUSY_LOAD = 0.75  # of the cores
SHM_FAIL_MB, SHM_PER_RANK_MB = 64, 1 << 10  # data loaders with several workers pass batches through /dev/shm
MIN_NOFILE = 65_536
SKEW_WARN_S, SKEW_FAIL_S = 0.5, 30.0  # with a larger difference TLS and signed requests fail

Facts = Mapping[str, Mapping[str, Any]]  # host -> the report of survey.facts


@dataclass(frozen=True)
class HostRequirements:
    """The job's needs for each host: `ranks`, and `gpus` (0: none).

    `ranks_are_chosen`: the config sets the number of ranks, so idle GPUs may be intended. `gpu_model`: the config's
    name. `has_own_torch`: the job's environment brings torch. `can_wait`: the job waits for GPUs in use by jobs.
    """

    ranks: int
    gpus: int
    ranks_are_chosen: bool = False
    allow_busy: bool = False
    gpu_model: str | None = None
    has_own_torch: bool = False
    can_wait: bool = False


def same_machine(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield hosts that are one machine under two names; containers share a boot id, but neither name nor address."""
    seen = {
        host: repr((fact.get("boot_id"), fact.get("name"), sorted(_addresses(fact))))
        for host, fact in facts.items()
        if fact.get("boot_id")
    }
    for hosts in groups(seen).values():
        if len(hosts) > 1:
            cure = f"leave all but one out of ssh.hosts: {local(hosts, 'ssh -G {} | grep ^hostname')}"
            yield Check("hosts", "fail", f"one machine by {len(hosts)} names: {ranges(hosts)}", cure)


def system(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield whether processors and kernels are alike, and whether each host has a core for every rank."""
    machines = {host: str(fact["machine"]) for host, fact in facts.items() if fact.get("machine")}
    if len(set(machines.values())) > 1:
        cure = "name hosts of one kind in ssh.hosts: --set 'ssh.hosts=[...]'"
        yield Check("processor", "warn", fold(machines, of), cure)
    kernels = {host: str(fact["kernel"]) for host, fact in facts.items() if fact.get("kernel")}
    if kernels:
        same = len({numbers(kernel)[:2] for kernel in kernels.values()}) == 1
        rest = [host for host, kernel in kernels.items() if kernel != most(kernels)]
        cure = "" if same else f"usually it works; else {remote(rest, 'sudo apt full-upgrade && sudo reboot')}"
        yield Check("kernel", "ok" if same else "warn", fold(kernels, of), cure)
    ranks = needs.ranks
    few = {host: f"{fact['cores']} cores" for host, fact in facts.items() if fact.get("cores", ranks) < ranks}
    if few:
        cure = f"fewer ranks a host: --set distributed.nproc_per_node={min(facts[host]['cores'] for host in few)}"
        yield Check("cores", "warn", f"{ranks} ranks a host on {fold(few, of)}", cure)


def own_name(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield names that resolve only to the machine itself: cloudtrain passes addresses, a script may use the name."""
    grades = {}
    for host, fact in facts.items():
        report = fact.get("own_name")
        if report is None or of < 2:
            continue
        where = f"is {report['addresses'][0]}" if report["addresses"] else "does not resolve"
        is_reached = any(not address.startswith(("127.", "::1", "fe80:")) for address in report["addresses"])
        grades[host] = ("ok", "resolves") if is_reached else ("warn", f"{where} there")

    def cure(hosts: Sequence[str]) -> str:
        lines = []
        for host in hosts[:4]:
            report, interface = facts[host]["own_name"], _interface(facts[host])
            address = facts[host].get("address") or (interface["address"] if interface else None)
            # In this order: after `d` has deleted the last line, sed would append no line.
            edit = f'sudo sed -i -e "$ a {address} {report["name"]}" -e "/^127.0.1.1/d" /etc/hosts'
            by_hand = address is None or any(each not in ("127.0.1.1", "::1") for each in report["addresses"])
            lines.append(remote([host], "sudo -e /etc/hosts" if by_hand else edit))
        return "; ".join(lines) + ("; likewise on the remaining hosts" if len(hosts) > 4 else "")

    yield from graded("own name", grades, of, cure)


def disk(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield the free space for jobs and for checkpoints."""
    for name, key, setting in (
        ("disk", "disk", "ssh.workdir"),
        ("checkpoint disk", "checkpoint_disk", "checkpoint.uri"),
    ):
        there = {host: fact[key] for host, fact in facts.items() if fact.get(key)}
        room = {host: _room(report) for host, report in there.items()}

        def cure(hosts: Sequence[str], there: Facts = there, setting: str = setting) -> str:
            path = shlex.quote(str(there[hosts[0]]["path"]))
            look = remote(hosts, f"du -xh --max-depth=2 {path} | sort -h | tail; df -ih {path}")
            return f"{look}; make room, or --set {setting}=/another/folder"

        yield from graded(name, room, of, cure)


def _room(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return the verdict, and the free space in steps, so that hosts fold: equal byte counts are rare."""
    path, free_mb, inodes = report["path"], report["free_mb"], report.get("inodes")
    files = math.inf if inodes is None else inodes
    is_low = free_mb < DISK_WARN_MB or files < MIN_INODES
    is_full = free_mb < DISK_FAIL_MB or files < MIN_INODES / 10
    verdict = "fail" if is_full else "warn" if is_low else "ok"
    if files < MIN_INODES:
        return verdict, f"{files} files more can be made in {path}"
    if free_mb < 1 << 10:
        return verdict, f"{free_mb} MB free in {path}"
    steps = [step for step in (10, 20, 50, 100, 200, 500, 1000, 10_000) if step <= free_mb / 1024]
    return verdict, f"{f'more than {steps[-1]}' if steps else f'{free_mb / 1024:.1f}'} GB free in {path}"


def write(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield whether files in the job folder can be written and locked."""
    errors = {host: fact["write"]["error"] for host, fact in facts.items() if fact.get("write")}
    grades = {host: ("fail", why) if why else ("ok", "can be written") for host, why in errors.items()}

    def cure(hosts: Sequence[str]) -> str:
        if any(facts[host]["write"].get("no_locks") for host in hosts):
            return "--set ssh.workdir=/a/folder/on/a/local/disk"
        path = shlex.quote(str(facts[hosts[0]].get("workdir", "~/.cloudtrain")))
        user = shlex.quote(str(facts[hosts[0]].get("user", "root")))
        return f"{remote(hosts, f'sudo install -d -o {user} -m 700 {path}')}; or --set ssh.workdir=/another/folder"

    yield from graded("workdir", grades, of, cure)


def temporary(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield folders for temporary files that are absent or small, or from which no program can be run."""
    grades = {}
    for host, report in ((host, fact["tmp"]) for host, fact in facts.items() if fact.get("tmp")):
        path = report["path"]
        if report["absent"]:
            grades[host] = ("warn", f"{path} is not there")
        elif report["free_mb"] < TMP_WARN_MB:
            grades[host] = ("warn", f"{report['free_mb']} MB free in {path}: packages are unpacked and built there")
        elif report["noexec"]:
            grades[host] = ("warn", f"{path} is mounted noexec: no compiled code (torch.compile) can run from it")
    yield from graded("TMPDIR", grades, of, lambda hosts: "--set env.TMPDIR=/another/folder, on a disk with room")


def load(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield hosts of a job for CPUs whose cores are in use by processes that hold no lock of cloudtrain."""
    if needs.gpus:
        return
    there = {host: fact["load"] for host, fact in facts.items() if fact.get("load")}
    grades = {
        host: ("warn", f"{report['mean']:.0f} processes run on {report['cores']} cores")
        for host, report in there.items()
        if report["mean"] >= BUSY_LOAD * report["cores"]
    }
    yield from graded("load", grades, of, lambda hosts: f"the job will be slow: {local(hosts, 'ssh {} top -bn1')}")


def shm(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield the free space in /dev/shm, through which the loaders' workers pass batches."""
    wanted_mb = SHM_PER_RANK_MB * needs.ranks
    grades = {}
    for host, fact in facts.items():
        if (report := fact.get("shm")) is None:
            continue
        free_mb, size_mb = report["free_mb"], report["size_mb"]
        verdict = "ok" if free_mb >= wanted_mb else "warn"
        verdict = "fail" if free_mb < SHM_FAIL_MB and needs.ranks > 1 else verdict
        words = f"at least {wanted_mb >> 10} GB free" if verdict == "ok" else f"{free_mb} MB of {size_mb} MB free"
        grades[host] = (verdict, words)

    def cure(hosts: Sequence[str]) -> str:
        if all(facts[host]["shm"]["size_mb"] >= wanted_mb for host in hosts):
            return remote(hosts, "ls -lhS /dev/shm | head")
        return remote(hosts, f"sudo mount -o remount,size={wanted_mb >> 10}G /dev/shm")

    yield from graded("/dev/shm", grades, of, cure)


def limits(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield the limits on open files and, with InfiniBand, on locked memory."""
    files, pinned = {}, {}
    for host, fact in facts.items():
        if report := fact.get("limits"):
            soft = report["nofile"][0]
            is_enough = soft == -1 or soft >= MIN_NOFILE
            files[host] = ("ok", f"{MIN_NOFILE} or more") if is_enough else ("warn", str(soft))
            if fact.get("infiniband"):
                soft = report["memlock"][0]
                pinned[host] = ("ok", "unlimited") if soft == -1 else ("warn", f"{soft >> 10} kB, with InfiniBand")
    yield from graded("open files", files, of, lambda hosts: _raised(hosts, "nofile", str(MIN_NOFILE)))
    yield from graded("locked memory", pinned, of, lambda hosts: _raised(hosts, "memlock", "unlimited"))


def _raised(hosts: Sequence[str], what: str, value: str) -> str:
    line = f'echo "* - {what} {value}" | sudo tee /etc/security/limits.d/cloudtrain-{what}.conf'
    return f"then log in again: {remote(hosts, line)}"


def clock(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield clocks that are off; if all hosts agree with each other, our clock is off."""
    ahead = {host: float(fact["ahead_s"]) for host, fact in facts.items() if fact.get("ahead_s") is not None}
    if not ahead:
        return
    middle = median(ahead.values())
    if len(ahead) > 1 and abs(middle) > SKEW_WARN_S and all(abs(s - middle) <= SKEW_WARN_S for s in ahead.values()):
        way = "behind" if middle > 0 else "ahead of"
        found = f"this machine is {abs(middle):.1f} s {way} all hosts"
        yield Check("clock", "warn", found, "sudo timedatectl set-ntp true")
        return
    grades = {}
    for host, seconds in ahead.items():
        off = abs(seconds)
        words = f"{off:.1f} s {'ahead' if seconds > 0 else 'behind'}"
        verdict = "fail" if off > SKEW_FAIL_S else "warn" if off > SKEW_WARN_S else "ok"
        grades[host] = (verdict, words if verdict != "ok" else f"within {SKEW_WARN_S} s of ours")
    yield from graded("clock", grades, of, lambda hosts: remote(hosts, "sudo timedatectl set-ntp true"))


def mtu(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield whether all hosts have the same MTU: with different MTUs, large packets may be lost without an error."""
    used = {host: interface for host, fact in facts.items() if (interface := _interface(fact)) is not None}
    values = {host: str(interface.get("mtu")) for host, interface in used.items()}
    if not values or of < 2:
        return
    usual = most(values)
    rest = [host for host, value in values.items() if value != usual]
    commands = [remote([host], f"sudo ip link set {used[host]['name']} mtu {usual}") for host in rest[:4]]
    cure = "; ".join(commands) + ("; likewise on the remaining hosts" if len(rest) > 4 else "")
    yield Check("MTU", "warn" if rest else "ok", fold(values, of), cure)


def leftovers(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield the processes that earlier jobs have left."""
    for host, fact in facts.items():
        if left := fact.get("leftovers"):
            jobs = ", ".join(dict.fromkeys(str(process["job"]) for process in left))
            pids = " ".join(str(process["pid"]) for process in left)
            found = f"{len(left)} of job {jobs}, whose agent is gone: {host}"
            yield Check("processes", "warn", found, remote([host], f"kill -9 {pids}"))


def logind(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield hosts that end the job at logout; lingering alone does not keep a session's own processes."""
    ends = [host for host, fact in facts.items() if (fact.get("logind") or {}).get("kills")]
    grades = dict.fromkeys(ends, ("fail", "KillUserProcesses=yes ends the job when ssh logs out"))

    def cure(hosts: Sequence[str]) -> str:
        user = facts[hosts[0]].get("user", "")
        folder = "/etc/systemd/logind.conf.d"
        lines = f"printf '[Login]\\nKillExcludeUsers=root {user}\\n' | sudo tee {folder}/90-cloudtrain.conf"
        return remote(hosts, f"sudo mkdir -p {folder} && {lines} && sudo systemctl restart systemd-logind")

    yield from graded("logout", grades, of, cure)


def unknown(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield the facts that could not be read; a fact that the job needs is a failure."""
    needed = {"write", "disk", "python", *(("gpus",) if needs.gpus else ())}
    by_probe: dict[str, dict[str, tuple[str, str]]] = {}
    for host, fact in facts.items():
        for probe, why in (fact.get("errors") or {}).items():
            verdict = "fail" if probe in needed else "warn"
            by_probe.setdefault(probe, {})[host] = (verdict, f"could not be found out: {why}")
    for probe, grades in by_probe.items():
        yield from graded(probe, grades, of, lambda hosts: remote(hosts, "df -h; uptime; dmesg | tail"))


def _addresses(fact: Mapping[str, Any]) -> list[str]:
    report = fact.get("interfaces") or ()
    return [each["address"] for each in report if each["address"] and not each["address"].startswith("127.")]


def _interface(fact: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the interface of the job's traffic: by the known address, else the first external interface."""
    there = [each for each in fact.get("interfaces") or () if each["address"]]
    wanted = fact.get("address")
    if known := [each for each in there if each["address"] == wanted]:
        return dict(known[0])
    inner = ("lo", "docker", "br-", "virbr", "veth", "cni", "podman")
    return next((each for each in there if not each["name"].startswith(inner)), None)
