"""Whether the hosts' interpreters can train together: equal Python, torch and NCCL, with drivers that support torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloudtrain.launcher.backend import Check

from .folding import fold, groups, most, numbers, ranges, remote
from .hostcheck import Facts, HostRequirements

MIN_PYTHON = (3, 10)
# The oldest driver for a CUDA major version (CUDA toolkit's release notes, table of minor version compatibility).
_OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
_LOOK = "ls /usr/bin/python3* /opt/*/bin/python3"
_SET = "ssh.python, or `python` of the host in ssh.hosts"  # a host's own `python` comes before ssh.python


def interpreter(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield whether each host has a suitable interpreter, and whether the versions agree."""
    asked = {host: fact["python"] for host, fact in facts.items() if fact.get("python")}
    missing = {host: str(report["error"]) for host, report in asked.items() if "error" in report}
    for why, hosts in groups(missing).items():
        cure = f"name one that is there in {_SET}: {remote(hosts, 'command -v python3')}"
        yield Check("python", "fail", f"{why}: {ranges(hosts)}", cure)
    versions = {host: str(report.get("version")) for host, report in asked.items() if "error" not in report}
    old = {host: version for host, version in versions.items() if numbers(version)[:2] < MIN_PYTHON}
    if old:
        least = ".".join(map(str, MIN_PYTHON))
        cure = f"name a newer one in {_SET}: {remote(old, _LOOK)}"
        yield Check("python", "fail", f"Python {least} or newer is required: {fold(old, 0)}", cure)
    elif versions:
        # Interpreters of one minor version read each other's pickles.
        same = len({numbers(version)[:2] for version in versions.values()}) == 1
        rest = [host for host, version in versions.items() if version != most(versions)]
        cure = f"give them the same, `python` of a host in ssh.hosts: {remote(rest, _LOOK)}"
        yield Check("python", "ok" if same else "warn", fold(versions, of), "" if same else cure)


def torch(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield the findings about torch, its NCCL, and the driver that both need."""
    asked = {host: fact["python"] for host, fact in facts.items() if "version" in (fact.get("python") or {})}
    if needs.has_own_torch or not asked:
        return
    versions = {host: str(report["torch"]) for host, report in asked.items() if report.get("torch")}
    usual = most(versions) if versions else ""
    wanted = _requirement(usual)
    lacking = {host: str(report.get("executable")) for host, report in asked.items() if host not in versions}
    for python, hosts in groups(lacking).items():
        why = f" ({asked[hosts[0]]['fault']})" if asked[hosts[0]].get("fault") else ""
        cure = _installed(hosts, asked[hosts[0]], wanted)
        yield Check("torch", "fail", f"none in {python}{why}: {ranges(hosts)}", cure)
    if len(set(versions.values())) > 1:
        commands = [_installed([host], asked[host], wanted) for host, version in versions.items() if version != usual]
        yield Check("torch", "fail", fold(versions, of), "; ".join(commands))
    elif versions:
        yield Check("torch", "ok", fold(versions, of))
    if not needs.gpus:
        return
    for_cpu = [host for host in versions if not asked[host].get("cuda")]
    if for_cpu:
        yield Check(
            "torch", "fail", f"built for the CPU, and the job is for GPUs: {ranges(for_cpu)}", _again(for_cpu, asked)
        )
    yield from _cuda(facts, asked, of)


def _cuda(facts: Facts, asked: Facts, of: int) -> Iterator[Check]:
    nccl = {host: str(report["nccl"]) for host, report in asked.items() if report.get("nccl")}
    if len(set(nccl.values())) > 1:
        rest = [host for host, version in nccl.items() if version != most(nccl)]
        # torch's requirements fix NCCL's version: a reinstalled torch brings the matching NCCL.
        yield Check("NCCL", "fail", fold(nccl, of), _again(rest, asked))
    elif nccl:
        yield Check("NCCL", "ok", fold(nccl, of))
    too_old = {}
    for host, report in asked.items():
        gpus = (facts[host].get("gpus") or {}).get("gpus") or ()
        build = numbers(str(report.get("cuda") or ""))
        least = _OLDEST_DRIVER.get(build[0]) if build else None
        if gpus and least and numbers(str(gpus[0]["driver"]))[:2] < least:
            needed = ".".join(map(str, least))
            too_old[host] = f"{gpus[0]['driver']}, and CUDA {report['cuda']} of torch needs {needed}"
    if too_old:
        cure = remote(too_old, "sudo apt install --upgrade nvidia-driver && sudo reboot")
        yield Check("driver", "fail", fold(too_old, 0), f"{cure}; or a torch for an older CUDA")


def _again(hosts: Sequence[str], asked: Facts) -> str:
    """Return the commands that install torch anew with its libraries, for each interpreter."""
    pythons = groups({host: str(asked[host].get("executable")) for host in hosts})
    return "; ".join(_installed(each, asked[each[0]], "--force-reinstall torch") for each in pythons.values())


def _installed(hosts: Sequence[str], report: Mapping[str, Any], wanted: str) -> str:
    """Return the command that installs `wanted` where the user may: in a venv, if a package manager owns the Python."""
    python = shlex.quote(str(report.get("executable")))
    if not report.get("managed"):
        first = "" if report.get("pip", True) else f"{python} -m ensurepip && "  # uv's venvs are without pip
        return remote(hosts, f"{first}{python} -m pip install {wanted}")
    wanted = wanted.removeprefix("--force-reinstall ")
    made = remote(hosts, f"{python} -m venv ~/venv && ~/venv/bin/pip install {wanted}")
    return f"{made}; then {_SET}: ~/venv/bin/python (Debian and Ubuntu need the package python3-venv for it)"


def _requirement(version: str) -> str:
    """Return pip's arguments for the same torch; builds for a CUDA version are on an index of their own."""
    number, _, build = version.partition("+")
    if not number:
        return "torch"
    index = f" --index-url https://download.pytorch.org/whl/{build}" if re.fullmatch(r"cpu|cu\d+", build) else ""
    return f"torch=={number}{index}"
